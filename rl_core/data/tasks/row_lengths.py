"""The check that rows fit, before a run begins."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rl_core.config import Config
from rl_core.data.chat import Chat
from rl_core.data.rows import CHECKED_ROWS
from rl_core.data.task_rows import TaskSource, fits, row_chat, row_tools
from rl_core.environments.run_checks import speakers
from rl_core.sampling.env import Env
from rl_core.types import Task

if TYPE_CHECKING:
    from rl_core.data.tasks.sft_dataset import SFTDataset

# The first rows of a data set are checked even where a run draws none of them.
FIRST_ROWS = 1000


def check_run(
    config: Config,
    envs: dict[str, Env],
    chats: dict[str, Chat],
    sft_dataset: SFTDataset | None,
    source: TaskSource,
) -> None:
    """Checks the lengths of a run's rows."""
    rows = None
    # Rows that are left out change which rows are drawn. What SFT checks is kept for its steps.
    looks_at_all = sft_dataset or config.data.skip_long or config.num_epochs
    looks_at_all = looks_at_all or "task_weight" in envs[source.env].hooks
    if source.split == "train" and not looks_at_all:
        rows = rows_of_run(config, source)
    check_lengths(config, envs, chats, sft_dataset, source, rows)


def rows_of_run(config: Config, source: TaskSource) -> list[int]:
    """The rows that a run checks, at most CHECKED_ROWS: the first of the data set, and those that
    its steps draw."""
    rows = dict.fromkeys(source.kept[:FIRST_ROWS])
    num_tasks = config.num_steps * config.tasks_per_step
    for position in range(min(num_tasks, len(source))):
        if len(rows) >= CHECKED_ROWS:
            break
        rows[source.kept[source.order.row_index(position)]] = None
    return list(rows)


def check_lengths(
    config: Config,
    envs: dict[str, Env],
    chats: dict[str, Chat],
    sft_dataset: SFTDataset | None,
    source: TaskSource,
    rows: Sequence[int] | None = None,
) -> None:
    """Every row that is checked at start-up renders and fits, or is left out if --data.skip_long
    says so. `rows`: those that are checked, which are to fit; None: the first CHECKED_ROWS."""
    checked, others = source.kept[:CHECKED_ROWS], source.kept[CHECKED_ROWS:]
    if rows is not None:
        checked = rows
    kept = []
    for task, index in zip(map(source.task_of_row, checked), checked, strict=True):
        if is_fit(config, envs, chats, sft_dataset, task):
            kept.append(index)
        elif sft_dataset and task.id in sft_dataset.left_out:
            source.left_out[sft_dataset.left_out[task.id]] += 1
    if len(kept) < len(checked):
        source.keep(array("q", [*kept, *others]))


def is_fit(
    config: Config,
    envs: dict[str, Env],
    chats: dict[str, Chat],
    sft_dataset: SFTDataset | None,
    task: Task,
) -> bool:
    """False for a row that is left out. Raises ValueError for a row that does not render, or that
    is too long, unless such rows are left out."""
    if sft_dataset:
        return bool(sft_dataset.samples(task))
    env, limit, longest, bound = envs[task.env], config.max_prompt_tokens, 0, ""
    try:
        tools = env.turn_loop.tools_of(task)
        for name, chat in chats.items():
            variant = row_chat(chat, task.row)
            if tools and row_tools(task.row) and name in (speakers(env, list(chats)) or chats):
                variant.tool_calls.check(tools, "column 'tools'")
            messages = env.turn_loop.opening(task, name)
            length = variant.least_tokens(messages)
            if length > limit:  # It is not encoded.
                bound = "at least "
            else:
                length = len(variant.prompt_ids(messages, tools))
            longest = max(longest, length)
        named = f"--max_prompt_tokens={limit}"
        return fits("a prompt", longest, limit, named, config.data.skip_long, bound)
    except ValueError as error:
        raise ValueError(f"{task.place}: {error}") from None


def left_out(config: Config, sources: Iterable[TaskSource]) -> str:
    """` (7,251 of 7,473 were left out: too long)`, or nothing where every row is taken."""
    sources = list(sources)
    num_rows = sum(len(source.rows) for source in sources)
    num_left = num_rows - sum(map(len, sources))
    if not num_left:
        return ""
    counts: Counter[str] = sum((source.left_out for source in sources), Counter())
    reasons = "too long"
    if counts:
        counts["too long"] = num_left - counts.total()
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in counts.items() if count)
    elif config.algorithm == "sft" and not config.sft.weights[0]:
        reasons += ", or nothing to train in them"
    return f" ({num_left:,} of {num_rows:,} were left out: {reasons})"
