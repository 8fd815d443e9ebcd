"""Whether rows fit, before a run begins."""

from __future__ import annotations

from array import array
from contextlib import suppress
from itertools import compress, islice
from typing import Any

from rl_core.config import Config
from rl_core.data.chat import Chat
from rl_core.data.rows import CHECKED_ROWS, row_place
from rl_core.data.tasks import TaskSource, fits
from rl_core.sampling.env import Env
from rl_core.types import Task

CHECKED_TOGETHER = 500  # rows, which are rendered one by one and tokenized by one call


def check_lengths(
    config: Config, envs: dict[str, Env], chats: dict[str, Chat], imitated: Any, source: TaskSource
) -> None:
    """Every row that is checked at start-up renders and fits, or is left out if --data.skip_long
    says so."""

    def is_fit(task: Task) -> bool:
        if imitated:
            return bool(imitated.samples(task))
        env, limit = envs[task.env], config.max_prompt_tokens
        prompts = ((chat, env.opening(task, name)) for name, chat in chats.items())
        try:
            length = max(len(chat.prompt_ids(messages, env.tools)) for chat, messages in prompts)
            return fits(
                "a prompt", length, limit, f"--max_prompt_tokens={limit}", config.data.skip_long
            )
        except ValueError as error:
            raise ValueError(f"{row_place(task.id, task.origin)}: {error}") from None

    def longest(name: str, tasks: list[Task]) -> int:
        env = envs[source.env]
        return max(
            chats[name].prompt_lengths([env.opening(task, name) for task in tasks], env.tools)
        )

    def are_fit(tasks: list[Task]) -> list[bool]:
        with suppress(ValueError):  # is_fit() names the row
            if not imitated and all(
                longest(name, tasks) <= config.max_prompt_tokens for name in chats
            ):
                return [True] * len(tasks)
        return [is_fit(task) for task in tasks]

    checked = source.kept[: None if isinstance(source.rows, list) else CHECKED_ROWS]
    kept, tasks = array("q"), iter(source)
    for begin in range(0, len(checked), CHECKED_TOGETHER):
        part = checked[begin : begin + CHECKED_TOGETHER]
        loaded = list(islice(tasks, len(part)))
        kept.extend(part if begin >= CHECKED_ROWS else compress(part, are_fit(loaded)))
    if len(kept) < len(checked):
        kept.extend(source.kept[len(checked) :])
        source.keep(kept)
