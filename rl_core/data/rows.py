"""Rows from files, folders, a run's rollouts, or the hub. `datasets` reads all but .json and .jsonl."""

from __future__ import annotations

import difflib
import gzip
import json
import os
import re
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zstandard

from rl_core.config import nearest

Row = dict[str, Any]
TABLE_FORMATS = {".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
FORMATS = (".json", ".jsonl", *TABLE_FORMATS)
ROLLOUTS = ".jsonl.zst"
TOKENIZERS = "tokenizers.json"  # beside a run's rollouts: actor -> fingerprint of the tokenizer that they are in


def load_rows(
    source: str, split: str = "train", min_reward: float | None = None, actor: str | None = None
) -> Sequence[Row]:
    """The rows of a file, of a folder made by `save_to_disk`, or of a `datasets` name, "org/name[:config]".

    `split` chooses within the latter two; a file is one split. A run's rollouts (their folder, or one file) give an actor's
    episodes that did not fail and have at least min_reward. Raises ValueError, with file and line, for what is missing, cut
    short, empty or no object.
    """
    path = Path(source).expanduser()
    if (files := rollout_files(path)) is not None:
        return load_rollouts(files, source, min_reward, actor)
    for flag, value in (("min_reward", min_reward), ("actor", actor)):
        if value is not None:
            raise ValueError(f"--data.{flag}={value} chooses among a run's rollouts, and {source} holds none; drop it")
    if path.is_dir():
        rows = load_folder(path, split)
    elif path.exists() or is_path_like(source):
        rows = load_file(path)
    else:
        rows = load_hub(source, split)
    if len(rows) == 0:
        raise ValueError(f"{source}: the data set is empty; it must have at least one row")
    return rows


def rollout_files(path: Path) -> list[Path] | None:
    """The files of a run's rollouts, without the evaluations' if a folder is given; None for another source."""
    if path.is_dir():
        return sorted(path.glob(f"step_*{ROLLOUTS}")) or None
    return [path] if path.name.endswith(ROLLOUTS) else None


def load_rollouts(files: list[Path], source: str, min_reward: float | None, actor: str | None) -> list[Row]:
    """Episodes as rows: messages, reward, and the tokens of each turn, with the fingerprint of their tokenizer."""
    found: list[tuple[str, float, Row]] = []
    for file in files:
        names = file.parent / TOKENIZERS
        tokenizers = json.loads(names.read_text()) if names.is_file() else {}
        for number, episode in enumerate(parse_jsonl(file), 1):
            if not {"messages", "turns", "reward", "status", "actor"} <= episode.keys():
                raise ValueError(f"{file}:{number}: no episode of a run; it has {', '.join(episode)}")
            if episode["status"] != "failed" and episode["reward"] is not None and episode["turns"]:
                row = episode_row(episode, tokenizers.get(episode["actor"], ""))
                found.append((episode["actor"], episode["reward"], row))
    actors = sorted({name for name, _, _ in found})
    if not found:
        raise ValueError(f"{source}: no episode to train on; all failed")
    if actor is None and len(actors) > 1:
        raise ValueError(
            f"{source} holds episodes of {', '.join(actors)}; choose one with --data.actor, such as {actors[0]}"
        )
    if actor not in (None, *actors):
        raise ValueError(f"--data.actor={actor} has no episode in {source}; {nearest(actor, actors)}")
    own = [(reward, row) for name, reward, row in found if actor in (None, name)]
    rows = [row for reward, row in own if min_reward is None or reward >= min_reward]
    if not rows:
        highest = max(reward for reward, _ in own)
        raise ValueError(
            f"{source}: no episode has a reward of --data.min_reward={min_reward}; the highest is {highest}"
        )
    return rows


def episode_row(episode: Row, tokenizer: str) -> Row:
    """A trajectory as a row; arrays take a tenth of the memory of lists."""
    turns = [
        (array("i", t["new_ids"]), t["is_fresh"], array("i", t["completion"]["token_ids"])) for t in episode["turns"]
    ]
    return {"messages": episode["messages"], "reward": episode["reward"], "turns": turns, "tokenizer": tokenizer}


def is_trajectory(row: Row) -> bool:
    """Whether load_rollouts made this row."""
    return "tokenizer" in row and "turns" in row


def is_path_like(source: str) -> bool:
    """Whether a name that does not exist here means a file: it must then never be sent to the hub."""
    # Names on the hub may have dots (org/data-v1.2), so that only a suffix of letters tells a file.
    return bool(re.match(r"[./~]", source) or re.search(r"\.[a-z]+$", source, re.I) or source.count("/") > 1)


def check_exists(path: Path) -> None:
    """Raises ValueError, with the nearest name in that folder, if there is no such file."""
    if path.is_file():
        return
    if not path.parent.is_dir():
        raise ValueError(f"{path}: no such file; the folder {path.parent} does not exist")
    close = difflib.get_close_matches(path.name, os.listdir(path.parent), n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]!r}?" if close else f" in {path.parent.resolve()}"
    raise ValueError(f"{path}: no such file{hint}")


def load_file(path: Path) -> Sequence[Row]:
    check_exists(path)
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    if suffix == ".jsonl":
        return list(parse_jsonl(path))
    if suffix == ".json":
        return parse_json(path)
    if suffix not in TABLE_FORMATS:
        raise ValueError(f"{path}: format {suffix!r} is not known; use one of {', '.join(FORMATS)} (.gz too)")
    with data_errors(str(path)) as datasets:
        return datasets.load_dataset(TABLE_FORMATS[suffix], data_files=[str(path)], split="train")


def parse_jsonl(path: Path) -> Iterator[Row]:
    # Split at newlines alone: JSON strings may hold Unicode's other line separators.
    for number, line in enumerate(read_bytes(path).split(b"\n"), 1):
        place = f"{path}:{number}"
        if line.strip():
            yield check_object(parse(line, place, "Is the line cut short?"), place)


def parse_json(path: Path) -> list[Row]:
    rows = parse(read_bytes(path), f"{path}", "Is the file cut short, or one object a line? Then name it .jsonl")
    if not isinstance(rows, list):
        raise ValueError(f"{path}: must hold an array of objects, holds {json.dumps(rows)[:40]}")
    return [check_object(row, f"{path}: row {number}") for number, row in enumerate(rows, 1)]


def parse(data: bytes, place: str, hint: str) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{place}: not JSON: {error}. {hint}") from None


def check_object(row: Any, place: str) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"{place}: a row must be a JSON object, this is {json.dumps(row)[:40]}")
    return row


def read_bytes(path: Path) -> bytes:
    """The unpacked content of a file. Raises ValueError if it is cut short."""
    check_exists(path)
    try:
        if path.suffix == ".gz":
            return gzip.decompress(path.read_bytes())
        return unpack_zstd(path.read_bytes()) if path.suffix == ".zst" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise ValueError(f"{path}: not {path.suffix[1:]}, or the file is cut short: {error}") from None


def unpack_zstd(rest: bytes) -> bytes:
    found = []
    while rest:
        frame = zstandard.ZstdDecompressor().decompressobj()
        found.append(frame.decompress(rest))
        if not frame.eof:
            raise zstandard.ZstdError("it ends early")
        rest = frame.unused_data
    return b"".join(found)


def load_folder(path: Path, split: str) -> Sequence[Row]:
    if not (path / "dataset_dict.json").exists() and not (path / "state.json").exists():
        hint = path / "rollouts" if (path / "rollouts").is_dir() else "one file of it"
        raise ValueError(f"{path}: a folder must be one that datasets' save_to_disk made; or name {hint}")
    with data_errors(str(path)) as datasets:
        saved = datasets.load_from_disk(str(path))
    if isinstance(saved, datasets.Dataset):
        return saved
    if split not in saved:
        raise ValueError(f"{path}: no split {split!r}; {nearest(split, saved)}")
    return saved[split]


def load_hub(source: str, split: str) -> Sequence[Row]:
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", source):
        raise ValueError(f"{source!r} is neither a file here nor a `datasets` name such as org/name or org/name:config")
    name, _, config = source.partition(":")
    with data_errors(f"{source} is no file here, and the hub") as datasets:
        return datasets.load_dataset(name, config or None, split=split)


@contextmanager
def data_errors(source: str) -> Iterator[Any]:
    """The `datasets` library; its errors become a ValueError of one line."""
    import datasets  # takes a second

    try:
        yield datasets
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error
        raise ValueError(f"{source}: {type(cause).__name__}: {' '.join(str(cause).split())}") from None
