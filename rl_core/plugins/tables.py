"""Files, folders and names of rows -> rows: which files a source means, and all that `datasets`
reads."""

from __future__ import annotations

import csv
import glob
import gzip
import re
from pathlib import Path
from typing import Any

from rl_core.data.rows import JSON, ROLLOUTS, check_exists, encoding_rule, suffix_of
from rl_core.rules import nearest

SEPARATORS = {".csv": ",", ".tsv": "\t"}
TABLES = (*SEPARATORS, ".parquet", ".arrow")


def located(source: str, split: str) -> tuple[str, str]:
    """(name, split) of a source; "@validation" at its end names the split."""
    name, _, last = source.rpartition("@")
    is_split = name and "/" not in last and not Path(source).expanduser().exists()
    return (name, last) if is_split else (source, split)


def files_of(source: str, split: str) -> list[Path]:
    """A file itself, those that a glob matches, the rollouts in a run's folder, or a folder's files
    of rows: of this split, if names tell splits apart. None if the source is a folder that
    `datasets` saved, or a name on the hub. Raises ValueError for a file that does not exist, and if
    the folder has none of this split."""
    name, split = located(source, split)
    path = Path(name).expanduser()
    if not path.is_dir():
        found = (
            [path] if path.is_file() else map(Path, sorted(glob.glob(str(path), recursive=True)))
        )
        files = [file for file in found if file.is_file()]
        # Names on the hub may have dots (org/data-v1.2), so that only a suffix of letters tells a
        # file. What looks like a file and does not exist is never sent to the hub.
        if not files and re.search(r"^[./~]|\.[a-z]+$|/.*/|[*?]", name, re.I):
            check_exists(path)
        return files
    if rollouts := sorted(path.glob(f"step_*{ROLLOUTS}")):
        return rollouts
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        return []
    files = sorted(file for file in path.iterdir() if suffix_of(file) in (*JSON, *TABLES))
    words = {word: rf"(?<![a-z]){re.escape(word)}(?![a-z])" for word in ("train", "test", split)}
    named = {
        word: [file for file in files if re.search(words[word], file.name.lower())]
        for word in words
    }
    if any(named.values()) and not named[split]:
        names = ", ".join(file.name for file in files)
        raise ValueError(
            f"{path}: no file of the split {split!r}; name the split by {path}@WORD of these "
            f"names: {names}"
        )
    return named[split] or files


def load_named(source: str, split: str) -> Any:
    """The split of a folder that `save_to_disk` made, or of "org/name[:config]" on the hub."""
    name, split = located(source, split)
    path = Path(name).expanduser()
    if not path.is_dir():
        name, _, config = name.partition(":")
        return from_datasets(
            f"{source} is no file here, and the hub",
            "load_dataset",
            name,
            config or None,
            split=split,
        )
    rows = from_datasets(str(path), "load_from_disk", str(path))
    if not isinstance(rows, dict):
        return rows
    if split not in rows:
        raise ValueError(f"{path}: no split {split!r}; {nearest(split, rows)}")
    return rows[split]


def load_table(files: list[Path], suffix: str) -> Any:
    """The rows of files of one format. Cells of text files stay text: 007 is no 7, and NA is no
    empty cell."""
    if suffix not in TABLES:
        raise ValueError(
            f"{files[0]}: format {suffix!r} is not known; use {', '.join((*JSON, *TABLES))} (.gz "
            "too)"
        )
    names, kind, given = [str(path) for path in files], suffix[1:], {}
    if suffix in SEPARATORS:
        from datasets import Features, Value

        with (gzip.open if names[0].endswith(".gz") else open)(
            names[0], "rt", errors="replace", newline=""
        ) as file:
            columns = next(csv.reader(file, delimiter=SEPARATORS[suffix]), [])
        features = Features({column.removeprefix("\ufeff"): Value("string") for column in columns})
        kind, given = (
            "csv",
            {"sep": SEPARATORS[suffix], "features": features, "keep_default_na": False},
        )
    return from_datasets(
        ", ".join(names), "load_dataset", kind, data_files=names, split="train", **given
    )


def from_datasets(source: str, load: str, *args: Any, **kwargs: Any) -> Any:
    """What a function of `datasets` gives; its errors become a ValueError of one line."""
    import datasets  # takes a second

    try:
        return getattr(datasets, load)(*args, **kwargs)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, UnicodeDecodeError):
            raise ValueError(f"{source}: {encoding_rule(cause.object)}") from None
        raise ValueError(
            f"{source}: {type(cause).__name__}: {' '.join(str(cause).split())}"
        ) from None
