"""Checks of a run's files of rows, made before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path

from rl_core.algorithms import PRESETS
from rl_core.config import Config
from rl_core.data.column_names import NUM_ROWS, RenamedColumns, check_columns_exist
from rl_core.data.preference_pairs import RATED, LeftOutError, trained_messages_of
from rl_core.data.row_files import files_of, is_small_json, read_json, source_and_split
from rl_core.data.row_forms import LABELS
from rl_core.data.rows import data_folder, is_trajectory
from rl_core.data.task_rows import make_task
from rl_core.data.tasks.sources import naming_recipes
from rl_core.errors import split
from rl_core.types import Row


def check_source(config: Config, path: str, split_name: str) -> None:
    """Raises ValueError for files of a source that do not exist, are empty, or do not fit."""
    files = []
    for source in split(path):
        files.append(check_rows_exist(*source_and_split(source, split_name)))
    if all(files):
        with naming_recipes(path):
            check_columns(config, [*chain(*files)], path, split_name == "train")


def check_rows_exist(name: str, split_name: str) -> list[Path]:
    """The files of a source. Raises ValueError if all of them are empty."""
    files = files_of(name, split_name)
    if files and not any(file.stat().st_size for file in files):
        raise ValueError(f"{name}: the data set is empty; it must have at least one row")
    return files


def check_columns(config: Config, files: Sequence[Path], source: str, is_train: bool) -> None:
    """Raises ValueError for a column of --data.columns that small JSON files do not have, and if
    the first row is not one that the algorithm learns from."""
    if not files or not all(map(is_small_json, files)):
        return
    columns, tables = config.data.columns, [list(islice(read_json(f), NUM_ROWS)) for f in files]
    if columns and len(config.env_paths) < 2:
        check_columns_exist([*chain(*tables)], columns, source, is_train)
    if not config.is_rl and not config.env_paths and tables[0]:
        [row] = RenamedColumns(tables[0][:1], columns)
        check_row(row, config.algorithm, f"row 1 of {files[0]}", data_folder(str(files[0])))


def check_row(row: Row, algorithm: str, location: str, folder: Path | None) -> None:
    """Raises ValueError for a row that an algorithm without episodes does not learn from."""
    is_pair = PRESETS[algorithm].reads_pairs
    is_rated = is_pair and (row.keys() >= RATED or any(map(LABELS.search, row)))
    if is_trajectory(row) or is_rated:
        return  # Such rows are read in other ways, and have their own errors.
    task = make_task(row, 0, "", "", is_pair, location, folder)
    try:
        trained_messages_of(task.row, algorithm)
    except LeftOutError:
        pass
    except ValueError as error:
        raise ValueError(f"{location}: {error}") from None
