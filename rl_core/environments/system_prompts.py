"""System prompts and tools of an environment file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jinja2 import StrictUndefined, Template, TemplateSyntaxError, meta
from jinja2.sandbox import SandboxedEnvironment

from rl_core.data.canonical_messages import canonical_tools
from rl_core.types import JSONObject, Task


@dataclass(kw_only=True, slots=True)
class SystemPrompt:
    """A sandboxed Jinja2 template over the columns of the data."""

    template: Template
    columns: set[str]  # Columns that the template names.
    where: str

    def render(self, task: Task) -> str:
        try:
            return self.template.render(task.row)
        except Exception as error:  # A template is a hook: its filters may raise anything.
            raise ValueError(
                f"{self.where} fails for task {task.id}: {type(error).__name__}: {error}"
            ) from error


def load_prompts(texts: Mapping[str, str], path: str) -> dict[str, SystemPrompt]:
    """Actor -> system prompt. Raises ValueError for a template that does not parse."""
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


def tool_schemas(tools: Sequence[dict | Callable], path: str) -> list[JSONObject]:
    """Schemas of the tools for chat templates. Raises ValueError for a function without type hints
    or a docstring."""
    schemas = []
    for tool in tools:
        try:
            schemas.append(tool if isinstance(tool, dict) else schema_of(tool))
        except ModuleNotFoundError as error:  # Environments are served without transformers.
            raise ValueError(
                f"{path}: tools: {error}; pip install transformers, or write the OpenAI schemas"
            ) from error
        except Exception as error:
            name = getattr(tool, "__name__", tool)
            raise ValueError(
                f"{path}: tools: {name}(): {' '.join(str(error).split())}; a tool needs a type "
                "hint for each argument and a docstring in Google's format, with its purpose and "
                "`Args:` for each argument"
            ) from error
    try:
        return canonical_tools(schemas) or []
    except ValueError as error:
        raise ValueError(f"{path}: tools {error}") from None


def schema_of(tool: Callable) -> JSONObject:
    from transformers.utils import get_json_schema

    return get_json_schema(tool)
