"""Tasks of a run: training rows and held-out rows of each environment, from files, folders of
Harbor tasks, the hub, or load_tasks()."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rl_core.algorithms import make_algorithm
from rl_core.config import Config
from rl_core.data.task_rows import Tasks, TaskSource
from rl_core.environments.row_columns import check_columns
from rl_core.sampling.env import Env
from rl_core.types import Row

# Name of an environment -> its held-out tasks by the name of their set.
HeldOut = Callable[[str], dict[str, TaskSource]]


def train_tasks(config: Config, envs: dict[str, Env], held_out: HeldOut | None = None) -> Tasks:
    """Training tasks of all environments. One that has held-out rows alone is left out."""
    held_out = held_out or partial(held_out_tasks, config, envs)
    sources, weights = [], []
    names = list(envs or ["data"])
    for name in names:
        section = config.env(name)
        if not section.is_trained_in:
            continue
        path = section.train or config.data.train
        if config.data.streaming:
            from rl_core.data.tasks.streaming import streamed_tasks

            return streamed_tasks(config, envs.get(name), name, path)
        source = load_source(config, envs.get(name), name, "train", path)
        if source is None:
            if len(names) > 1 and held_out(name):
                continue
            flag = "--data.train" if len(names) == 1 else f"--envs.{name}.train"
            reason = ""
            if envs and envs[name].load_tasks is None:
                reason = f"; {envs[name].path} has no load_tasks"
            elif envs:
                reason = f"; load_tasks('train') of {envs[name].path} gives no rows"
            raise ValueError(f"{flag} is missing: a file or `datasets` name{reason}")
        sources.append(source)
        weights.append(section.weight)
    return sources[0] if len(sources) == 1 else mixed_tasks(config, sources, weights)


def mixed_tasks(
    config: Config, sources: list[TaskSource], weights: Sequence[float | None]
) -> Tasks:
    """Tasks of several environments, with --envs.NAME.weight."""
    if not sources:
        raise ValueError(
            f"--env_path {config.env_path}: no environment has training rows; add rows to one "
            "with --envs.NAME.train, or with load_tasks('train') in its file"
        )
    from rl_core.data.tasks.task_mix import TaskMix

    is_by_rows = config.num_epochs and weights == [None] * len(weights)
    shares = None if is_by_rows else [1.0 if weight is None else weight for weight in weights]
    return TaskMix(sources, shares)


@contextmanager
def naming_recipes(source: str) -> Iterator[None]:
    """Adds the recipes of the sets in `source`, a value of --data.train, to ValueErrors."""
    try:
        yield
    except ValueError as error:
        from rl_core.data.published_sets import recipes

        names = [re.split("[:@]", name.strip())[0] for name in source.split(",")]
        hints = [f"rl-core datasets {name}" for name in names if name in recipes()]
        if not hints:
            raise
        raise ValueError(f"{error}. The command for this set: {', '.join(hints)}") from error


def eval_tasks(
    config: Config, envs: dict[str, Env], held_out: HeldOut | None = None
) -> dict[str, TaskSource]:
    """Held-out tasks by the name of their environment or set. Raises ValueError if there are
    none."""
    held_out = held_out or partial(held_out_tasks, config, envs)
    sources: dict[str, TaskSource] = {}
    for name in envs or ["data"]:
        sources |= held_out(name)
    if not sources:
        raise ValueError(
            "an evaluation has no held-out rows: --data.eval is missing, and no load_tasks(split) "
            "of an environment returns rows for 'eval'; name rows by --data.eval rows.jsonl"
        )
    return sources


def held_out_tasks(config: Config, envs: dict[str, Env], name: str) -> dict[str, TaskSource]:
    """Held-out tasks of one environment, by the names of its sets."""
    from rl_core.data.tasks.eval_sets import held_out as held_out_sets

    sources = {}
    for set_name, env, split, path in held_out_sets(config, envs or ["data"]):
        if env == name:
            source = load_source(config, envs.get(env), env, split, path)
            if source is not None:
                sources[set_name] = source
    return sources


def renamed(config: Config, rows: Sequence[Row], source: str, is_train: bool) -> Sequence[Row]:
    """The rows with the columns of --data.columns."""
    from rl_core.data.column_names import RenamedColumns, check_columns_exist

    if len(config.env_paths) < 2:
        check_columns_exist(rows, config.data.columns, source, is_train)
    return RenamedColumns(rows, config.data.columns)


def rows_of_files(
    config: Config, path: str, is_train: bool, is_pairs: bool
) -> tuple[Sequence[Row], Sequence[tuple[str, int]]]:
    """The rows of --data.train or --data.eval, and the name and number of rows of each file."""
    min_reward = config.data.min_reward if is_train else None
    load = partial(
        load_other,
        min_reward=min_reward,
        actor=config.trained[0],
        build=config.agents.build_network,
        verify=config.agents.verify_network,
    )
    from rl_core.data.row_files import load_rows

    rows, files = load_rows(path, "train" if is_train else "test", load)
    if is_pairs:
        from rl_core.data.preference_pairs import pair_rows

        rows, files = pair_rows(rows, files)
    return rows, files


def load_source(
    config: Config, env: Env | None, name: str, split: str, path: str | None
) -> TaskSource | None:
    is_train = split == "train"
    is_pairs = make_algorithm(config.algorithm, config.algo).reads_pairs
    if config.online.on:
        from rl_core.data.tasks.online import ROWS

        rows, files = ROWS, ()
    elif path:
        rows, files = rows_of_files(config, path, is_train, is_pairs)
    elif env and env.load_tasks:
        rows, files = env.load_tasks(split), ()
        if not len(rows):
            return None  # An environment may be for training, or for evaluation, alone.
    else:
        return None
    if config.data.columns:
        rows = renamed(config, rows, path or f"the split {split!r}", is_train)
    if env and env.row_to_prompt:
        from rl_core.data.tasks.prompt_hook import MadePrompts

        rows = MadePrompts(rows, env.row_to_prompt, env.path)
    if config.is_rl:
        assert env is not None
        check_columns(env, rows, files, split)
    elif path:
        from rl_core.data.tasks.sft_dataset import check_rows

        check_rows(config, rows, path, is_train)
    return TaskSource(
        rows,
        env=name,
        split=split,
        files=files,
        seed=config.seed,
        shuffle=config.data.shuffle and is_train,
        is_pairs=is_pairs,
    )


def load_other(
    name: str,
    files: list[Path],
    split: str,
    min_reward: float | None = None,
    actor: str | None = None,
    **networks: bool,
) -> list[tuple[str, Sequence[Row]]]:
    """tables.load_other(), or the tasks of a folder in Harbor's format. `networks`: of
    task_rows()."""
    from rl_core.data.row_files import is_tasks_folder

    folder = Path(name).expanduser()
    if not files and is_tasks_folder(folder):
        from rl_core.environments.agents.harbor_tasks import NETWORKS, task_rows

        return [(name, task_rows(folder, NETWORKS | networks))]
    from rl_core.data import tables

    return tables.load_other(name, files, split, min_reward, actor)
