"""Rows from JSON files; which files a source means; files that are complete after a crash."""

from __future__ import annotations

import csv
import difflib
import glob
import io
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from rl_core.rules import split as comma_split

Row = dict[str, Any]
JSON = (".json", ".jsonl")
SEPARATORS = {".csv": ",", ".tsv": "\t"}
TABLES = (*SEPARATORS, ".parquet", ".arrow")
# Are checked at start-up where rows are many; those beyond when they are drawn.
CHECKED_ROWS = 20_000
# Of a .jsonl file; rows of a larger one stay on disk, as those of tables do.
IN_MEMORY_BYTES = 64 << 20
ROLLOUTS = ".jsonl.zst"  # one trajectory a line
# Beside a run's rollouts: actor -> fingerprint of the tokenizer that they are in.
TOKENIZERS = "tokenizers.json"


def load_rows(
    source: str, split: str, load_other: Callable[[str, list[Path], str], Sequence[Row]]
) -> Sequence[Row]:
    """The rows of one or several sources, with commas between them, one source after the other. A
    source is a file, a glob, a folder of files or one made by `save_to_disk`, or
    "org/name[:config]" on the hub; "@validation" behind it names a split.

    `split` chooses where none is named; a file is one split. load_other(source, files, split) reads
    what is no JSON, or too large for memory; no files: a name, or a folder that `datasets` saved.
    Raises ValueError, with file and line, for what is missing, cut short, empty or no object.
    """
    parts = []
    for name in comma_split(source):
        files = files_of(name, split)
        found = [] if files else [load_other(name, files, split)]
        for is_json, group in itertools.groupby(files, is_small_json):
            if is_json:
                found += [list(read_json(file)) for file in group]
            else:
                found.append(load_other(name, list(group), split))
        if not any(map(len, found)):
            raise ValueError(f"{name}: the data set is empty; it must have at least one row")
        parts += found
    return chained(parts)


def is_small_json(path: Path) -> bool:
    """Whether a file's rows are read into memory. Only a .jsonl file can stay on disk."""
    suffix = suffix_of(path)
    is_large = path.suffix == ".jsonl" and path.stat().st_size > IN_MEMORY_BYTES
    return suffix in JSON and not is_large


def chained(parts: list[Sequence[Row]]) -> Sequence[Row]:
    from torch.utils.data import ConcatDataset

    return parts[0] if len(parts) == 1 else ConcatDataset(parts)


def suffix_of(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def located(source: str, split: str) -> tuple[str, Path, str]:
    """(name, its path, split) of a source; "@validation" at its end names the split."""
    name, _, last = source.rpartition("@")
    if name and "/" not in last and not Path(source).expanduser().exists():
        source, split = name, last
    return source, Path(source).expanduser(), split


def files_of(source: str, split: str) -> list[Path]:
    """A file itself, those that a glob matches, or a folder's files of this split. None if the
    source is a folder that `datasets` saved, or a name on the hub. Raises ValueError for a file
    that does not exist, and if the folder has none of this split."""
    name, path, split = located(source, split)
    if path.is_dir():
        return files_in(path, split)
    if path.is_file():
        return [path]
    matching = sorted(glob.glob(str(path), recursive=True))
    files = [Path(name) for name in matching if os.path.isfile(name)]
    # Names on the hub may have dots (org/data-v1.2), so that only a suffix of letters tells a file.
    # What looks like a file and does not exist is never sent to the hub.
    if not files and re.search(r"^[./~]|\.[a-z]+$|/.*/|[*?]", name, re.I):
        check_exists(path)
    return files


def files_in(folder: Path, split: str) -> list[Path]:
    """The rollouts in a run's folder; else files of rows: of this split, if names tell splits
    apart."""
    if rollouts := sorted(folder.glob(f"step_*{ROLLOUTS}")):
        return rollouts
    if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
        return []
    files = sorted(file for file in folder.iterdir() if suffix_of(file) in (*JSON, *TABLES))

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


def read_json(path: Path) -> Iterator[Row]:
    """The objects of a .json file, an array or one alone, or of another file's lines."""
    data = read_bytes(path)
    if suffix_of(path) == ".json":
        yield from parse_rows(data, str(path), is_array=True)
        return
    # Split at newlines alone: JSON strings may hold Unicode's other line separators.
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            yield from parse_rows(line, f"row {number} of {path}")


def parse_rows(text: bytes, place: str, is_array: bool = False) -> list[Row]:
    try:
        found = json.loads(text.decode("utf-8-sig"))
    except ValueError as error:
        if isinstance(error, UnicodeDecodeError) or b"\0" in text:  # which no JSON holds
            fault = encoding_rule(text)
        else:
            hint = ", or one object a line? Then name it .jsonl" if is_array else "?"
            fault = f"not JSON: {error}. Is it cut short{hint}"
        raise ValueError(f"{place}: {fault}") from None
    rows = found if is_array and isinstance(found, list) else [found]
    for row in rows:
        if not isinstance(row, dict):
            raise ValueError(
                f"{place}: a row must be a JSON object, this is {json.dumps(row)[:40]}"
            )
    return rows


def encoding_rule(data: bytes) -> str:
    """What is told of bytes that are no UTF-8. Every second byte of English in UTF-16 is 0."""
    name, code = "not UTF-8, maybe Latin-1", "LATIN1"
    if b"\0" in data or data.startswith((b"\xff\xfe", b"\xfe\xff")):
        name = code = "UTF-16"
    return f"it is {name}; rows must be UTF-8: iconv -f {code} -t UTF-8 FILE > NEW_FILE"


def read_bytes(path: Path) -> bytes:
    """The unpacked content of a file. Raises ValueError if it is cut short."""
    check_exists(path)
    if path.suffix not in (".gz", ".zst"):
        return path.read_bytes()
    import pyarrow

    try:
        return pyarrow.input_stream(str(path)).read()
    except OSError as error:
        raise ValueError(
            f"{path}: not {path.suffix[1:]}, or the file is cut short: {error}"
        ) from None


def check_exists(path: Path) -> None:
    """Raises ValueError, with the nearest name in that folder, if there is no such file."""
    if path.is_file():
        return
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: no such file; the folder {path.parent} does not exist")
    hint = f" in {path.parent.resolve()}"
    for close in difflib.get_close_matches(path.name, os.listdir(path.parent), n=1):
        hint = f"; did you mean {close!r}?"
    raise ValueError(f"{path}: no such file{hint}")


def row_place(task_id: str, origin: str) -> str:
    """`row N of FILE` of the task "train/17", for errors. N is the line where a file has lines,
    else the row's number from 1. `origin`: the files or names that were given for the rows; "":
    load_tasks()."""
    part, _, index = task_id.rpartition("/")
    split, left = "train" if part == "train" else "test", int(index)
    # A file that changed meanwhile must not hide what is wrong with the row.
    with suppress(OSError, ValueError):
        for source in comma_split(origin):
            for file in files_of(source, split) or [Path(source)]:
                lines = lines_of_rows(file)
                if left < len(lines):
                    return f"row {lines[left]} of {file}"
                left -= len(lines)
    return f"row {int(index) + 1} of {origin or f'load_tasks({part!r})'}"


def lines_of_rows(file: Path) -> Sequence[int]:
    """The line in which each row begins; their numbers from 1 in a .json file. Raises ValueError
    for other files without lines."""
    suffix = suffix_of(file)
    if suffix == ".json":
        return range(1, len(list(read_json(file))) + 1)
    if suffix not in (".jsonl", *SEPARATORS):
        raise ValueError(f"{file} has no lines")
    lines = io.StringIO(read_bytes(file).decode(errors="replace"), newline="\n")
    if suffix == ".jsonl":
        return [number for number, line in enumerate(lines, 1) if line.strip()]
    # A row begins behind the one before, the first behind the names of the columns.
    reader = csv.reader(lines, delimiter=SEPARATORS[suffix])
    return [reader.line_num + 1 for _ in reader][:-1]


def is_trajectory(row: Row) -> bool:
    """Whether load_rollouts made this row."""
    return "tokenizer" in row and "turns" in row


def write_whole(file: Path, text: str) -> None:
    """The file is complete, or as it was before, after a crash of the machine too."""
    beside = file.with_name(f".{file.name}.tmp")
    beside.write_text(text)
    flush_to_disk(beside)
    os.replace(beside, file)


def rename_into_place(beside: Path, folder: Path) -> None:
    """`beside` becomes `folder`, which is complete, or as it was before, after a crash of the
    machine too. A crash between the two renames leaves what was before as `.NAME.old`."""
    for path in beside.rglob("*"):
        flush_to_disk(path)
    flush_to_disk(beside)
    before = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(before, ignore_errors=True)
    if folder.exists():
        os.rename(folder, before)
    os.rename(beside, folder)
    flush_to_disk(folder.parent)
    shutil.rmtree(before, ignore_errors=True)


def flush_to_disk(path: Path) -> None:
    """Returns once the disk has the content of a file, or the names in a folder."""
    opened = os.open(path, os.O_RDONLY)
    try:
        # Some file systems flush no folders.
        with suppress(OSError) if path.is_dir() else nullcontext():
            os.fsync(opened)
    finally:
        os.close(opened)


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object of a file that a run has written. Raises ValueError with its name if it holds
    none."""
    try:
        found = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is damaged: it is empty or no JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} is damaged: it must hold a JSON object")
    return found
