"""Warnings about the data sets of a run: held-out rows, epochs, environments and labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rl_core.config import Config
from rl_core.data.rows import CHECKED_ROWS
from rl_core.data.task_rows import Tasks, TaskSource
from rl_core.data.warnings.column_use import NUM_ROWS
from rl_core.sampling.env import Env

NUM_TRAIN_ROWS = 20_000  # Training rows of each source among which held-out rows are searched.


def set_warnings(
    config: Config, train: Tasks, evals: dict[str, TaskSource], envs: Mapping[str, Env]
) -> Iterator[str]:
    if config.num_epochs:
        yield from epoch_warnings(config.num_epochs, train, envs)
    if config.is_rl and len(config.env_paths) > 1:
        yield from env_warnings(config, train, evals)
    if evals:
        yield from overlap_warnings(train, evals)
    if config.algorithm == "kto" and not config.data.streaming:
        for source in train.sources:
            yield from label_warnings(source)


def env_warnings(config: Config, train: Tasks, evals: dict[str, TaskSource]) -> Iterator[str]:
    """Warnings for environments that are not trained in."""
    trained = {source.env for source in train.sources}
    evaluated = {source.env for source in evals.values()}
    for name in config.env_paths:
        if name not in trained | evaluated:
            yield f"{name} is never played, as it has held-out rows alone: give --eval_every"
        elif name not in trained and config.env(name).is_trained_in:
            yield f"{name} has no training rows: it is evaluated and not trained"


def overlap_warnings(train: Tasks, evals: dict[str, TaskSource]) -> Iterator[str]:
    """Warnings for held-out rows that are training rows too."""
    evaluated = {source.env for source in evals.values()}
    train_rows: dict[str, set[int]] = {}  # Hashes of rows by environment.
    for other in train.sources:
        if other.env in evaluated:
            train_rows.setdefault(other.env, set()).update(row_hashes(other, NUM_TRAIN_ROWS))
    for name, source in evals.items():
        held_out = row_hashes(source, NUM_ROWS)
        num_both = sum(row in train_rows.get(source.env, ()) for row in held_out)
        if num_both:
            yield (
                f"{num_both} of the first {len(held_out)} held-out rows of {name} are training "
                "rows too; --data.eval or load_tasks must give others"
            )


def label_warnings(source: TaskSource) -> Iterator[str]:
    """A warning for rows of KTO that all have the same label."""
    from rl_core.data.preference_pairs import row_label

    labels = (row_label(source.rows[index]) for index in source.kept[:CHECKED_ROWS])
    first = next(labels)
    if all(label == first for label in labels):
        yield (
            f"all replies of {source.env} are labelled {'good' if first else 'bad'}: KTO compares "
            "good with bad ones; --data.columns label=NAME reads another column"
        )


def epoch_warnings(num_epochs: float, train: Tasks, envs: Mapping[str, Env]) -> Iterator[str]:
    """A warning for weights by which rows are drawn more or less often than --num_epochs."""
    num_drawn = train.num_before(round(num_epochs * len(train)))
    often, is_uneven = [], False
    for source, num in zip(train.sources, num_drawn, strict=True):
        often.append(f"of {source.env} {num / len(source):.3g} times")
        is_uneven |= abs(num - num_epochs * len(source)) >= 1
        if source.env in envs and "task_weight" in envs[source.env].hooks:
            yield (
                f"--num_epochs {num_epochs:g} draws {num} tasks of the {len(source)} rows of "
                f"{source.env} by task_weight(): some rows more often than others"
            )
    if is_uneven:
        yield (
            f"--num_epochs {num_epochs:g} with --envs.NAME.weight draws a row {', '.join(often)}; "
            f"without weights each is drawn {num_epochs:g} times"
        )


def row_hashes(source: TaskSource, num: int) -> list[int]:
    """Hashes of the first rows, which do not depend on the order of columns."""
    rows = (source.rows[index] for index in source.kept[:num])
    return [hash(repr(sorted(row.items()))) for row in rows]
