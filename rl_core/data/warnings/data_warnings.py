"""Warnings about a run's rows: oddities that can be meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rl_core.config import Config
from rl_core.data.chat import Chat
from rl_core.data.task_rows import Tasks, TaskSource
from rl_core.data.warnings.column_use import column_use
from rl_core.sampling.env import Env


def data_warnings(
    config: Config,
    train: Tasks,
    evals: dict[str, TaskSource],
    spelled: tuple[str, str] | None = None,
    envs: Mapping[str, Env] | None = None,
    chats: Mapping[str, Chat] | None = None,
) -> Iterator[str]:
    """Warnings about the sizes of a run and its held-out rows, and row_warnings()."""
    has_rows = not config.data.streaming and not config.online.on
    if config.tasks_per_step > len(train) and has_rows:
        yield (
            f"--tasks_per_step={config.tasks_per_step} draws rows twice in one step: "
            f"there are {len(train)} training rows"
        )
    if evals or config.num_epochs or len(config.env_paths) > 1 or config.algorithm == "kto":
        from rl_core.data.warnings.set_warnings import set_warnings

        yield from set_warnings(config, train, evals, envs or {})
    sources = [*train.sources, *evals.values()]
    yield from row_warnings(config, sources, spelled, envs or {}, chats or {})


def row_warnings(
    config: Config,
    sources: Sequence[TaskSource],
    spelled: tuple[str, str] | None,
    envs: Mapping[str, Env],
    chats: Mapping[str, Chat],
) -> Iterator[str]:
    """Warnings about rows, each once by environment and column or remark. `spelled`: a row with a
    reply that spells a special token, and the token."""
    if spelled:
        row, token = spelled
        yield (
            f"{row}: a reply spells the special token {token!r}, which is trained as text: the "
            "model learns to write these characters, not the token (docs/sft.md); others may too"
        )
    chat = next((chats[name] for name in config.trained if name in chats), None)
    uses = [column_use(config, source, envs.get(source.env), chat) for source in sources]
    warned: dict[str, set[str]] = {}
    for use in uses:
        has_prompts = use.env and use.env.turn_loop.system_prompts
        if has_prompts or use.remarks or use.lost or use.long or use.keys or use.equal:
            from rl_core.data.warnings.use_warnings import use_warnings

            yield from use_warnings(use, warned.setdefault(use.source.env, set()))
    of_hooks = any(env.turn_loop.tools for env in envs.values())
    if not config.is_rl or of_hooks or any(use.has_tools for use in uses):
        from rl_core.data.warnings.tool_warnings import tool_warnings

        yield from tool_warnings(config, sources, envs, chats)
