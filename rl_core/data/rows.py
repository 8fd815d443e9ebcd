"""Rows from files, folders, a run's rollouts, or the hub; `datasets` reads all but JSON. Trajectories -> a run's rollouts."""

from __future__ import annotations

import dataclasses
import difflib
import gzip
import json
import os
import re
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import zstandard

from rl_core.config import nearest
from rl_core.types import Trajectory

Row = dict[str, Any]
TABLES = (".csv", ".parquet", ".arrow")
ROLLOUTS = ".jsonl.zst"  # one trajectory a line
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
    if files := [path] if path.name.endswith(ROLLOUTS) else sorted(path.glob(f"step_*{ROLLOUTS}")):
        return load_rollouts(files, source, min_reward, actor)
    if min_reward is not None:
        raise ValueError(f"--data.min_reward={min_reward} is for a run's rollouts, and {source} holds none; drop it")
    if path.is_dir():
        rows = from_datasets(source, "load_from_disk", str(path))
        if isinstance(rows, dict):
            if split not in rows:
                raise ValueError(f"{path}: no split {split!r}; {nearest(split, rows)}")
            rows = rows[split]
    # Names on the hub may have dots (org/data-v1.2), so that only a suffix of letters tells a file. What looks like a file
    # and does not exist is never sent to the hub.
    elif path.exists() or re.match(r"[./~]", source) or re.search(r"\.[a-z]+$|/.*/", source, re.I):
        rows = load_file(path)
    else:
        name, _, config = source.partition(":")
        rows = from_datasets(
            f"{source} is no file here, and the hub", "load_dataset", name, config or None, split=split
        )
    if len(rows) == 0:
        raise ValueError(f"{source}: the data set is empty; it must have at least one row")
    return rows


def load_rollouts(files: list[Path], source: str, min_reward: float | None, actor: str | None) -> list[Row]:
    """Episodes as rows: messages, reward, and the tokens of each turn, with the fingerprint of their tokenizer."""
    found: dict[str, list[Row]] = {}  # by actor
    for file in files:
        names = file.parent / TOKENIZERS
        tokenizers = json.loads(names.read_text()) if names.is_file() else {}
        for number, episode in enumerate(read_json(file), 1):
            if not {"messages", "turns", "reward", "status", "actor"} <= episode.keys():
                raise ValueError(f"{file}:{number}: no episode of a run; it has {', '.join(episode)}")
            if episode["status"] != "failed" and episode["reward"] is not None and episode["turns"]:
                # Arrays take a tenth of the memory of lists.
                tokens = ((t["new_ids"], t["is_fresh"], t["completion"]["token_ids"]) for t in episode["turns"])
                turns = [(array("i", new), is_fresh, array("i", said)) for new, is_fresh, said in tokens]
                row = {"messages": episode["messages"], "reward": episode["reward"], "turns": turns}
                row["tokenizer"] = tokenizers.get(episode["actor"], "")
                found.setdefault(episode["actor"], []).append(row)
    if len(found) == 1:
        [actor] = found
    rows = [row for row in found.get(actor, []) if min_reward is None or row["reward"] >= min_reward]
    if not rows:
        best = (f"{name} with rewards up to {max(row['reward'] for row in own)}" for name, own in sorted(found.items()))
        raise ValueError(
            f"{source}: no episode of {actor} with --data.min_reward={min_reward}; it holds those of "
            f"{', '.join(best) or 'nobody: all failed'}; --actors.bob.model takes those of bob"
        )
    return rows


def is_trajectory(row: Row) -> bool:
    """Whether load_rollouts made this row."""
    return "tokenizer" in row and "turns" in row


def write_trajectories(file: Path, trajectories: list[Trajectory]) -> None:
    beside, compressor = file.with_name(f".{file.name}.tmp"), zstandard.ZstdCompressor(level=3)
    with open(beside, "wb") as raw, compressor.stream_writer(raw) as writer:
        for trajectory in trajectories:
            writer.write((json.dumps(trajectory, default=jsonable) + "\n").encode())
    os.replace(beside, file)


def jsonable(value: Any) -> Any:
    """A dataclass as a dictionary; what JSON does not know, as text."""
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return str(value)


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
    if suffix in (".json", ".jsonl"):
        return list(read_json(path))
    if suffix not in TABLES:
        raise ValueError(f"{path}: format {suffix!r} is not known; use .json, .jsonl, {', '.join(TABLES)} (.gz too)")
    return from_datasets(str(path), "load_dataset", suffix[1:], data_files=[str(path)], split="train")


def read_json(path: Path) -> Iterator[Row]:
    """The objects of a .json file, an array or one alone, or of another file's lines."""
    data, is_array = read_bytes(path), path.name.lower().removesuffix(".gz").endswith(".json")
    # Split at newlines alone: JSON strings may hold Unicode's other line separators.
    for number, text in enumerate([data] if is_array else data.split(b"\n"), 1):
        place = str(path) if is_array else f"{path}:{number}"
        if not is_array and not text.strip():
            continue
        try:
            found = json.loads(text.decode("utf-8-sig"))
        except ValueError as error:
            hint = ", or one object a line? Then name it .jsonl" if is_array else "?"
            raise ValueError(f"{place}: not JSON: {error}. Is it cut short{hint}") from None
        for row in found if is_array and isinstance(found, list) else [found]:
            if not isinstance(row, dict):
                raise ValueError(f"{place}: a row must be a JSON object, this is {json.dumps(row)[:40]}")
            yield row


def read_bytes(path: Path) -> bytes:
    """The unpacked content of a file. Raises ValueError if it is cut short."""
    check_exists(path)
    data, parts = path.read_bytes(), []
    try:
        if path.suffix == ".gz":
            return gzip.decompress(data)
        while path.suffix == ".zst" and data:
            frame = zstandard.ZstdDecompressor().decompressobj()
            parts.append(frame.decompress(data))
            if not frame.eof:
                raise EOFError("it ends early")
            data = frame.unused_data
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise ValueError(f"{path}: not {path.suffix[1:]}, or the file is cut short: {error}") from None
    return b"".join(parts) or data


def from_datasets(source: str, load: str, *args: Any, **kwargs: Any) -> Any:
    """What a function of `datasets` gives; its errors become a ValueError of one line."""
    import datasets  # takes a second

    try:
        return getattr(datasets, load)(*args, **kwargs)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error
        raise ValueError(f"{source}: {type(cause).__name__}: {' '.join(str(cause).split())}") from None
