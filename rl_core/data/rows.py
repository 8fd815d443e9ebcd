"""Places of rows, kinds of files, and files that are complete after a crash."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from rl_core.errors import near_name
from rl_core.types import Row

JSON_FILES = (".json", ".jsonl")
SEPARATORS = {".csv": ",", ".tsv": "\t"}
TABLES = (*SEPARATORS, ".parquet", ".arrow")
# Are checked at start-up where rows are many; those beyond when they are drawn.
CHECKED_ROWS = 20_000
ROLLOUTS = ".jsonl.zst"  # one trajectory a line
# File next to a run's rollouts: actor -> fingerprint of the tokenizer.
TOKENIZERS = "tokenizers.json"
END = "end.json"  # num_steps; once a run has ended without an error, its last step and signal.


def quiet_datasets() -> None:
    """Turns off the progress bars of `datasets`, before it is imported."""
    if not os.environ.get("RL_CORE_DEBUG"):
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def suffix_of(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def row_place(index: int, files: Sequence[tuple[str, int]], split: str) -> str:
    """`row N of FILE`, for errors. `files`: as of load_rows; none: rows of load_tasks(), or a list
    in Python."""
    name, number = row_source(index, files)
    return f"row {number} of {name or f'the split {split!r}'}"


def row_source(index: int, files: Sequence[tuple[str, int]]) -> tuple[str, int]:
    """(name of the file of row `index`, the row's number in it, from 1); "": load_tasks()."""
    number = index + 1
    for name, num_rows in files:
        if number <= num_rows:
            return name, number
        number -= num_rows
    return "", number


def data_folder(name: str) -> Path | None:
    """The folder in which the rows of a source have their images; None for a name on the hub, and
    for "", load_tasks()."""
    path = Path(name).expanduser()
    if not name or path.is_dir():
        return path if name else None
    # A glob's folder is the one before its first pattern.
    while glob.has_magic(str(path.parent)):
        path = path.parent
    is_file = path.is_file() or glob.has_magic(path.name)
    return path.parent if is_file and path.parent.is_dir() else None


def check_exists(path: Path) -> None:
    """Raises ValueError, with the nearest name in that folder, if there is no such file."""
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; name a file in it")
    if path.is_file():
        return
    names = os.listdir(path.parent) if path.parent.is_dir() else []
    hint = f" in {path.parent.resolve()}"
    if close := near_name(path.name, names):
        hint = f"; did you mean {close!r}?"
    raise ValueError(f"{path}: no such file{hint}")


def is_trajectory(row: Row) -> bool:
    """True if load_rollouts() made this row."""
    return "tokenizer" in row and "turns" in row


def write_whole(file: Path, text: str) -> None:
    """Writes a file that is complete or unchanged after a crash, also of the machine."""
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(text)
    flush_to_disk(temporary)
    os.replace(temporary, file)


def flush_to_disk(path: Path) -> None:
    """Returns once the disk has the content of a file, or the names in a folder."""
    opened = os.open(path, os.O_RDONLY)
    try:
        # Some file systems flush no folders.
        with suppress(OSError) if path.is_dir() else nullcontext():
            os.fsync(opened)
    finally:
        os.close(opened)


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """Yields a new folder that replaces `folder` once it is complete."""
    scratch = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    yield scratch
    rename_into_place(scratch, folder)


def rename_into_place(scratch: Path, folder: Path) -> None:
    """Replaces `folder` by `scratch`. After a crash, also of the machine, `folder` is either
    complete or as it was. A crash between the two renames leaves the old folder as `.NAME.old`."""
    for path in scratch.rglob("*"):
        flush_to_disk(path)
    flush_to_disk(scratch)
    before = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(before, ignore_errors=True)
    if folder.exists():
        os.rename(folder, before)
    os.rename(scratch, folder)
    flush_to_disk(folder.parent)
    shutil.rmtree(before, ignore_errors=True)


def undo_rename(before: Path) -> None:
    """Restores a folder from `.NAME.old` if a crash came before its replacement was in place."""
    folder = before.with_name(before.name.removeprefix(".").removesuffix(".old"))
    if not folder.exists():
        os.rename(before, folder)
