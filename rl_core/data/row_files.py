"""Reads rows from files of JSON; tables.py reads other files."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

from rl_core.data.rows import (
    JSON_FILES,
    ROLLOUTS,
    TABLES,
    check_exists,
    suffix_of,
)
from rl_core.errors import split as comma_split
from rl_core.json_limits import ESCAPED, lone_surrogate, may_be_deeper, nesting
from rl_core.types import Row

# Size of a .jsonl file up to which it is read; rows of larger files and of tables stay on disk.
IN_MEMORY_BYTES = 64 << 20
# Deepest nesting of objects and lists in a row, because code that reads rows recurses.
MAX_NESTING = 200
NESTED = f"objects and lists are nested deeper than {MAX_NESTING} levels; flatten the row"


def load_rows(
    source: str, split: str, load_other: Callable[..., list[tuple[str, Sequence[Row]]]]
) -> tuple[Sequence[Row], list[tuple[str, int]]]:
    """(rows, name and number of rows of each file) of one or several sources, with commas between
    them, one source after the other. A source is a file, a glob, a folder of files or one made by
    `save_to_disk`, or "org/name[:config]" on the hub; "@validation" behind it names a split.

    `split` chooses where none is named; a file is one split. load_other(name, files, split) gives
    the name and the rows of each source that is not JSON or too large for memory; no files: a name
    on the hub, or a folder that `datasets` saved. Raises ValueError, with file and line, for
    a row that is missing, cut short, empty or not an object.
    """
    parts = []
    for name in comma_split(source):
        name, own_split = source_and_split(name, split)
        files = files_of(name, own_split)
        if files and all(map(is_small_json, files)):
            loaded = [(str(file), list(read_json(file))) for file in files]
        else:
            loaded = load_other(name, files, own_split)
        if not any(len(rows) for _, rows in loaded):
            raise ValueError(f"{name}: the data set is empty; it must have at least one row")
        parts += loaded
    from torch.utils.data import ConcatDataset  # seconds to import

    rows = parts[0][1] if len(parts) == 1 else ConcatDataset([rows for _, rows in parts])
    counts = [(name, len(rows)) for name, rows in parts]
    return cast("Sequence[Row]", rows), counts


def source_and_split(name: str, split: str) -> tuple[str, str]:
    """A source without the split that is written behind it, and that split, or else `split`."""
    named, _, last = name.rpartition("@")
    if named and "/" not in last and not Path(name).expanduser().exists():
        return named, last
    return name, split


def is_small_json(path: Path) -> bool:
    """True if a file's rows are read into memory. Only a .jsonl file can stay on disk."""
    is_large = path.suffix == ".jsonl" and path.stat().st_size > IN_MEMORY_BYTES
    return suffix_of(path) in JSON_FILES and not is_large


def files_of(name: str, split: str) -> list[Path]:
    """A file itself, those that a glob matches, or a folder's files of this split. None if the
    source is a folder that `datasets` saved, or a name on the hub. Raises ValueError for a file
    that does not exist, and if the folder has none of this split."""
    path = Path(name).expanduser()
    if path.is_dir():
        return files_in(path, split)
    if path.is_file():
        return [path]
    matching = sorted(glob.glob(str(path), recursive=True))
    files = [Path(match) for match in matching if os.path.isfile(match)]
    # Names on the hub may have dots (org/data-v1.2), so that only a suffix of letters means a file.
    # What looks like a file and does not exist is never sent to the hub.
    if not files and re.search(r"^[./~]|\.[a-z]+$|/.*/|[*?]", name, re.I):
        check_exists(path)
    return files


def files_in(folder: Path, split: str) -> list[Path]:
    """The rollouts in a run's folder; else files of rows: of this split, if names
    have splits. Empty for tasks in Harbor's format, and for what `datasets` saved."""
    if rollouts := sorted(folder.glob(f"step_*{ROLLOUTS}")):
        return rollouts
    if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
        return []
    if is_tasks_folder(folder):
        return []
    files = sorted(file for file in folder.iterdir() if suffix_of(file) in (*JSON_FILES, *TABLES))

    def named(word: str) -> list[Path]:
        pattern = rf"(?<![a-z]){re.escape(word)}(?![a-z])"
        return [file for file in files if re.search(pattern, file.name.lower())]

    if not named(split) and (named("train") or named("test")):
        names = ", ".join(file.name for file in files)
        raise ValueError(
            f"{folder}: no file of the split {split!r}; name the split by {folder}@WORD of these "
            f"names: {names}"
        )
    return named(split) or files


def is_tasks_folder(folder: Path) -> bool:
    """True if a folder is a task in Harbor's format, or holds some."""
    return (folder / "task.toml").is_file() or any(folder.glob("*/task.toml"))


def read_json(path: Path) -> Iterator[Row]:
    """Objects of a .json file (an array or one object), or of another file's lines. Raises
    ValueError if the file is cut short."""
    if path.suffix in (".gz", ".zst"):
        import pyarrow

        try:
            data = pyarrow.input_stream(str(path)).read()
        except OSError as error:
            raise ValueError(f"{path}: it is damaged or cut short: {error}") from None
    else:
        data = path.read_bytes()
    if suffix_of(path) == ".json":
        yield from parse_rows(data, str(path), is_array=True)
        return
    # Split at newlines alone: JSON strings may hold Unicode's other line separators.
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            yield from parse_rows(line, f"row {number} of {path}")


def is_utf16(text: bytes) -> bool:
    return b"\0" in text[:4]


def not_utf8(location: str, text: bytes, error: ValueError) -> str:
    """The message of an error of a text that is not UTF-8, with the command that converts it."""
    encoding = "UTF-16" if is_utf16(text) else "WINDOWS-1252"
    return (
        f"{location}: not UTF-8 but probably {encoding} ({error}); convert the file by iconv -f "
        f"{encoding} -t UTF-8 FILE > NEW"
    )


def parse_rows(text: bytes, location: str, is_array: bool = False) -> list[Row]:
    try:
        decoded = text.decode("utf-8-sig")
        value = json.loads(decoded)
    except RecursionError:
        raise ValueError(f"{location}: {NESTED}") from None
    except ValueError as error:
        if isinstance(error, UnicodeDecodeError) or is_utf16(text):
            raise ValueError(not_utf8(location, text, error)) from None
        raise ValueError(
            f"{location}: not JSON in UTF-8: {error}. The file may be cut short; a file with one "
            "object per line must end in .jsonl"
        ) from None
    is_deep = may_be_deeper(decoded, MAX_NESTING)
    has_surrogates = ESCAPED.search(decoded) is not None
    is_list = is_array and isinstance(value, list)
    rows = cast("list[Row]", value if is_list else [value])
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(
                f"{location}: a row must be a JSON object, this is {json.dumps(row)[:40]}"
            )
        where = f"row {number} of {location}" if is_list else location
        if is_deep and nesting(row) > MAX_NESTING:
            raise ValueError(f"{where}: {NESTED}")
        if has_surrogates:
            check_surrogates(row, where)
    return rows


def check_surrogates(row: Row, where: str) -> None:
    """Raises ValueError for a lone surrogate."""
    for column, value in row.items():
        if surrogate := lone_surrogate([column, value]):
            raise ValueError(
                f"{where}: column {column!r} has a lone surrogate, {surrogate!r}, from a text that "
                "was cut inside an emoji: remove it"
            )
