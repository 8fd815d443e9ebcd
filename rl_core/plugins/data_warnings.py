"""What is odd about a run's rows, though it can be meant."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from rl_core.algorithms import Algorithm
from rl_core.config import Config
from rl_core.data.tasks import TaskSource

NUM_ROWS = 200  # the first of each source, which are looked at


def data_warnings(
    config: Config, algorithm: Algorithm, train: TaskSource, evals: dict[str, TaskSource]
) -> Iterator[str]:
    if config.tasks_per_step > len(train) and not config.data.streaming:
        yield (
            f"--tasks_per_step={config.tasks_per_step} draws rows twice in one step: "
            f"there are {len(train)} training rows"
        )
    for name, source in evals.items():
        for other in train.sources:
            num = min(NUM_ROWS, len(source), len(other))
            if source.env == other.env and first_rows(source, num) == first_rows(other, num):
                yield (
                    f"the first {num} held-out rows of {name} are training rows too; "
                    "--data.eval or load_tasks must give others"
                )
    for source in (*train.sources, *evals.values()) if algorithm.is_rl else ():
        tasks = [(task, [m["role"] for m in task.messages]) for task in islice(source, NUM_ROWS)]
        odd = [task for task, roles in tasks if roles[-1] == "assistant" or "user" not in roles]
        if odd:
            yield (
                f"{len(odd)} of the first {len(tasks)} prompts of {source.env} end with an "
                "assistant's turn, or have no user "
                f"message, such as {odd[0].place}"
            )


def first_rows(source: TaskSource, num: int) -> list[str]:
    return [repr(source.rows[index]) for index in source.kept[:num]]
