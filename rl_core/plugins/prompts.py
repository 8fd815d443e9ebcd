"""What a file gives its actors besides messages: system prompts and tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, meta
from jinja2.sandbox import SandboxedEnvironment

from rl_core.data.messages import canonical_tools
from rl_core.types import Task


@dataclass(kw_only=True, slots=True)
class SystemPrompt:
    """Jinja2 over the columns of the data, in a sandbox."""

    template: Any
    columns: set[str]  # that it names
    where: str

    def render(self, task: Task) -> str:
        try:
            return self.template.render(task.row)
        except Exception as error:  # a template is a hook too: filters raise what they like
            raise ValueError(
                f"{self.where} fails for task {task.id}: {type(error).__name__}: {error}"
            ) from error


def load_prompts(texts: Mapping[str, str], path: str) -> dict[str, SystemPrompt]:
    """Actor -> its prompt. Raises ValueError for a template that does not parse."""
    sandbox = SandboxedEnvironment(undefined=StrictUndefined)
    prompts = {}
    for actor, text in texts.items():
        where = f"{path}: system_prompts[{actor!r}]"
        try:
            columns = meta.find_undeclared_variables(sandbox.parse(text))
        except TemplateSyntaxError as error:
            raise ValueError(f"{where}, line {error.lineno}: {error.message}") from None
        template = sandbox.from_string(text)
        prompts[actor] = SystemPrompt(template=template, columns=columns, where=where)
    return prompts


def tool_schemas(tools: Sequence[dict | Callable], path: str) -> list[dict[str, Any]]:
    """The tools as templates read them. Raises ValueError for a function that lacks type hints or a
    docstring."""
    found = []
    for tool in tools:
        try:
            found.append(tool if isinstance(tool, dict) else schema_of(tool))
        except ModuleNotFoundError as error:  # environments are served without transformers
            raise ValueError(
                f"{path}: tools: {error}; pip install transformers, or write the OpenAI schemas"
            ) from error
        except Exception as error:
            name = getattr(tool, "__name__", tool)
            raise ValueError(
                f"{path}: tools: {name}(): {' '.join(str(error).split())}; a tool needs a type "
                "hint for each argument and a docstring in Google's format, with what it does and "
                "`Args:` with each argument"
            ) from error
    try:
        return canonical_tools(found) or []
    except ValueError as error:
        raise ValueError(f"{path}: tools {error}") from None


def schema_of(tool: Callable) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    return get_json_schema(tool)
