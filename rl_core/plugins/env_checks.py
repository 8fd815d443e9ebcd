"""Whether an environment's file fits the rows and the actors of a run, before the run begins."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from rl_core.config import Config
from rl_core.data.chat import Chat
from rl_core.data.rows import CHECKED_ROWS
from rl_core.data.tasks import row_place
from rl_core.rules import nearest
from rl_core.sampling.env import Env
from rl_core.sampling.episode import check_name


def check_columns(
    env: Env, rows: Sequence[dict[str, Any]], origin: str = "", split: str = "train"
) -> None:
    """Raises ValueError if a hook or a system prompt names what is neither ours nor a column of
    every row."""
    wanted = []
    for hook in env.hooks.values():
        wanted.append((f"{hook.name}()", hook.required - hook.ours, hook.ours))
    for name, prompt in env.dialogue.system_prompts.items():
        wanted.append((f"system_prompts[{name!r}]", prompt.columns, ()))
    columns = getattr(rows, "column_names", None)
    if columns is not None:  # a table's rows all have the same
        rows = [dict.fromkeys(columns)]
    limit = len(rows) if isinstance(rows, list) else CHECKED_ROWS
    for index, row in enumerate(itertools.islice(rows, limit)):
        for what, names, ours in wanted:
            for name in sorted(names - row.keys()):
                hint = nearest(name, sorted({*ours, *row}))
                if name == "state":
                    hint = "it needs start(task)"
                if origin:
                    hint += f"; read another column by --data.columns {name}=COLUMN"
                place = row_place(f"{split}/{index}", origin)
                raise ValueError(
                    f"{env.path}: {what} names {name!r}, which is neither one of its arguments "
                    f"nor a column of {place}; {hint}"
                )


def check_actors(env: Env, names: Sequence[str]) -> None:
    """Raises ValueError unless these actors can play."""
    for name in env.dialogue.system_prompts:
        check_name(env.path, name, names, "system_prompts")
    if env.speakers(names) and env.dialogue.turns is None and len(names) > 1:
        raise ValueError(
            f"{env.path}: there are {len(names)} actors, {', '.join(names)}, and nothing says "
            f'whose turn it is; add turns = "{names[0]}" if hooks ask the others, as a judge, or '
            f'turns = "{" -> ".join(names)}", or write async def rollout(task, actors)'
        )


def check_environments(config: Config, envs: dict[str, Env]) -> None:
    """Raises ValueError unless the actors can play in these environments, and each that should
    learn can speak in one that is trained in."""
    frozen = [name for name in config.actors if name not in config.trained]
    for env in envs.values():
        check_actors(env, [*config.trained, *frozen])
    trained_in = [env for name, env in envs.items() if config.env(name).weight]
    speakers = [env.speakers(list(config.actors)) for env in trained_in]
    for name in config.trained:
        is_heard = any(names is None or name in names for names in speakers)
        if config.is_rl and not is_heard:
            raise ValueError(
                f"--actors.{name} would never speak, so that it cannot learn: `turns` of "
                f"{', '.join(env.path for env in trained_in)} does not name it; name it there, or "
                f"give --actors.{name}.train false"
            )
    if len({env.advantage_fn is None for env in envs.values()}) > 1:
        raise ValueError(
            f"of {config.env_path} some define advantage_fn and some do not; let all do, or none"
        )


def check_tools(config: Config, envs: dict[str, Env], chats: dict[str, Chat]) -> None:
    """Raises ValueError if calls of an actor that gets an environment's tools are not read. Others,
    such as a judge that hooks ask, get none."""
    for env in envs.values():
        speakers = env.speakers(list(config.actors))
        if speakers is None:
            speakers = config.trained  # A function of the file decides; these speak somewhere.
        for name in speakers:
            if name in chats and env.tools:
                chats[name].tool_calls.check(env.tools, env.path)
