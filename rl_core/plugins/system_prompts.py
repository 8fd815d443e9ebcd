"""System prompts of an environment: Jinja2 over the columns of the data, in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, meta
from jinja2.sandbox import SandboxedEnvironment

from rl_core.types import Task


@dataclass(kw_only=True, slots=True)
class SystemPrompt:
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
    """Actor -> its prompt. Raises ValueError for an unknown name in a template."""
    sandbox, prompts = SandboxedEnvironment(undefined=StrictUndefined), {}
    for actor, text in texts.items():
        where = f"{path}: system_prompts[{actor!r}]"
        try:
            columns = meta.find_undeclared_variables(sandbox.parse(text))
            prompts[actor] = SystemPrompt(
                template=sandbox.from_string(text), columns=columns, where=where
            )
        except TemplateSyntaxError as error:
            raise ValueError(f"{where}, line {error.lineno}: {error.message}") from None
    return prompts
