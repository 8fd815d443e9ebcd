"""Checks of a run's paths, made before torch is imported, which takes seconds."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from rl_core.algorithms import PRESETS
from rl_core.config import Config
from rl_core.data.env_names import env_path
from rl_core.data.rows import (
    check_exists,
    files_of,
    is_small_json,
    is_trajectory,
    read_json,
    source_and_split,
)
from rl_core.data.tasks.eval_sets import held_out
from rl_core.errors import needs_column, split
from rl_core.run.plan.model_paths import check_local

ROWS = ("train", "eval")  # Splits of --data.


def check_paths(config: Config) -> None:
    """Raises ValueError for an --out that is in use, and for inputs that do not exist."""
    check_folder(config.folder, config.resume)
    check_inputs(config, ROWS if config.eval_every else ROWS[:1])
    for actor in config.actors.values():
        if actor.model and not actor.api:
            check_local(actor.model)


def check_inputs(config: Config, splits: Collection[str]) -> None:
    """Raises ValueError for environments and rows of these splits that do not exist, and for files
    without a row."""
    for path in config.env_paths.values():
        if "://" not in path:
            check_exists(Path(env_path(path)).expanduser())
    names = [*config.env_paths] or ["data"]
    sources = []
    if "train" in splits:
        sources += [("train", config.env(name).train or config.data.train) for name in names]
    if "eval" in splits:
        sources += [("test", path) for *_, path in held_out(config, names)]
    for split_name, path in sources:
        for source in split(path):
            check_rows_exist(*source_and_split(source, split_name))
            if PRESETS[config.algorithm].reads_pairs and not config.data.columns:
                check_pairs(*source_and_split(source, split_name))


def check_rows_exist(name: str, split_name: str) -> None:
    files = files_of(name, split_name)
    if files and not any(file.stat().st_size for file in files):
        raise ValueError(f"{name}: the data set is empty; it must have at least one row")


def check_pairs(name: str, split_name: str) -> None:
    """Raises ValueError if the first row of a small JSON file has no replies to prefer."""
    from rl_core.data.row_forms import LABELS, PAIR, read_form

    files = files_of(name, split_name)
    if not files or not is_small_json(files[0]):
        return
    row = next(read_json(files[0]), {})
    pair = read_form(row, ())
    is_other = is_trajectory(row) or pair.get("tied") or any(map(LABELS.search, pair))
    if pair.keys().isdisjoint(PAIR) and not is_other:  # Others have their own errors.
        raise ValueError(f"row 1 of {files[0]}: {needs_column('chosen', pair)}")


def check_folder(out: Path, is_resumed: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; name a folder that does not exist yet")
    if out.exists() and not is_resumed and any(out.iterdir()):
        raise ValueError(
            f"--out {out} exists already; continue it with --resume, or name another folder"
        )
