"""Rows on disk or on the hub -> Task: formats, order, epochs, position. The only state is a position, one number."""

from __future__ import annotations

import difflib
import gzip
import json
import math
import os
import re
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import zstandard

from rl_core.config import nearest
from rl_core.types import Message, Task, counter_seed

OWN_FORMATS = (".json", ".jsonl")
TABLE_FORMATS = {".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
FORMATS = (*OWN_FORMATS, *TABLE_FORMATS)
ROLLOUTS = ".jsonl.zst"
TOKENIZERS = "tokenizers.json"  # beside a run's rollouts: actor -> fingerprint of the tokenizer that they are in
# Where the first message may stand; the first of these columns that a row has is used.
PROMPT_COLUMNS = ("messages", "prompt", "question", "problem")


def load_rows(
    source: str, split: str = "train", min_reward: float | None = None, actor: str | None = None
) -> Sequence[dict[str, Any]]:
    """The rows of a file, of a folder made by `save_to_disk`, or of a `datasets` name, "org/name[:config]".

    `split` chooses within the latter two; a file is one split. Of a run's rollouts (their folder, or one file) the rows are
    an actor's episodes that did not fail and whose reward is at least min_reward. Raises ValueError for what is missing,
    cut short, empty or no object, with the file and, where there are lines, the line.
    """
    path = Path(source).expanduser()
    if (files := rollout_files(path)) is not None:
        return load_rollouts(files, source, min_reward, actor)
    for flag, value in (("min_reward", min_reward), ("actor", actor)):
        if value is not None:
            raise ValueError(
                f"--data.{flag}={value} chooses among a run's rollouts, which {source} is not; leave it out"
            )
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


def load_rollouts(files: list[Path], source: str, min_reward: float | None, actor: str | None) -> list[dict[str, Any]]:
    """Episodes as rows: messages, reward, and the tokens of each turn, with the fingerprint of their tokenizer."""
    rows, num_failed, highest, actors = [], 0, -math.inf, set()
    for file in files:
        names = file.parent / TOKENIZERS
        tokenizers = json.loads(names.read_text()) if names.is_file() else {}
        for number, row in enumerate(parse_jsonl(file), 1):
            if not {"messages", "turns", "reward", "status", "actor"} <= row.keys():
                raise ValueError(f"{file}:{number}: no episode of a run; it has {', '.join(row)}")
            if row["status"] == "failed" or row["reward"] is None or not row["turns"]:
                num_failed += 1
                continue
            actors.add(row["actor"])
            if actor not in (None, row["actor"]):
                continue
            highest = max(highest, row["reward"])
            if min_reward is None or row["reward"] >= min_reward:
                rows.append(episode_row(row, tokenizers.get(row["actor"], "")))
    if actor not in (None, *actors):
        raise ValueError(f"--data.actor={actor} did not speak in {source}; {nearest(actor, sorted(actors))}")
    if actor is None and len(actors) > 1:
        names = sorted(actors)
        raise ValueError(f"{source} holds what {', '.join(names)} said; choose one by --data.actor, such as {names[0]}")
    if not rows and math.isfinite(highest):
        raise ValueError(
            f"{source}: no episode has a reward of --data.min_reward={min_reward}; the highest is {highest}"
        )
    if not rows:
        raise ValueError(f"{source}: no episode to train on; {num_failed} failed")
    return rows


def episode_row(episode: dict[str, Any], tokenizer: str) -> dict[str, Any]:
    """A trajectory as a row; arrays take a tenth of the memory of lists."""
    turns = [
        (array("i", t["new_ids"]), t["is_fresh"], array("i", t["completion"]["token_ids"])) for t in episode["turns"]
    ]
    return {"messages": episode["messages"], "reward": episode["reward"], "turns": turns, "tokenizer": tokenizer}


def is_trajectory(row: dict[str, Any]) -> bool:
    """Whether a row is an episode of a run, by load_rollouts."""
    return "tokenizer" in row and "turns" in row


def is_path_like(source: str) -> bool:
    """Whether a name that does not exist here was meant as a file: what is meant so must never be asked of the hub."""
    # Names on the hub may have dots (org/data-v1.2), so that only a suffix of letters tells a file.
    return bool(re.match(r"[./~]", source) or re.search(r"\.[a-z]+$", source, re.I) or source.count("/") > 1)


def check_exists(path: Path) -> None:
    """Raises ValueError, with the nearest name in that folder, if there is no such file."""
    if path.is_file():
        return
    if not path.parent.is_dir():
        raise ValueError(f"{path}: no such file; the folder {path.parent} does not exist")
    close = difflib.get_close_matches(path.name, os.listdir(path.parent), n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"nothing in {path.parent.resolve()} has a name like it"
    raise ValueError(f"{path}: no such file; {hint}")


def load_file(path: Path) -> Sequence[dict[str, Any]]:
    check_exists(path)
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    if suffix in OWN_FORMATS:
        return list(parse_jsonl(path)) if suffix == ".jsonl" else parse_json(path)
    if suffix not in TABLE_FORMATS:
        raise ValueError(f"{path}: format {suffix!r} is not known; use one of {', '.join(FORMATS)} (.gz too)")
    datasets = import_datasets(str(path))
    with data_errors(str(path), datasets):
        return datasets.load_dataset(TABLE_FORMATS[suffix], data_files=[str(path)], split="train")


def parse_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in numbered_lines(path):
        place = f"{path}:{number}"
        try:
            text = line.decode("utf-8-sig").strip()
            row = json.loads(text) if text else {}
        except UnicodeDecodeError as error:
            raise ValueError(f"{place}: not UTF-8 text ({error.reason}); save the file as UTF-8") from None
        except json.JSONDecodeError as error:
            hint = "" if text.endswith("}") else " Is the line cut short?"
            raise ValueError(f"{place}: not JSON: {error.msg} at column {error.colno}.{hint}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{place}: a row must be a JSON object, this is {json_kind(row)}")
        if text:  # blank lines are no rows
            yield row


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines from 1, split at newlines alone: JSON strings may hold Unicode's other line separators."""
    number = 0
    if path.suffix == ".zst":
        yield from enumerate(unpacked(path).splitlines(keepends=True), 1)
        return
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}:{number + 1}: not gzip, or the file is cut short: {error}") from None


def unpacked(path: Path) -> bytes:
    """What a zstd file holds. Raises ValueError if it is cut short: its last episodes would be missing unseen."""
    check_exists(path)
    rest, found = path.read_bytes(), []
    try:
        while rest:
            frame = zstandard.ZstdDecompressor().decompressobj()
            found.append(frame.decompress(rest))
            if not frame.eof:
                raise zstandard.ZstdError("it ends inside a frame")
            rest = frame.unused_data
    except zstandard.ZstdError as error:
        num_lines = b"".join(found).count(b"\n")
        raise ValueError(
            f"{path}: not zstd, or the file is cut short after {num_lines} whole lines ({error}); copy it again, or remove it"
        ) from None
    return b"".join(found)


def parse_json(path: Path) -> list[dict[str, Any]]:
    try:
        rows = json.loads(b"".join(line for _, line in numbered_lines(path)).decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason}); save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        hint = "is it one object a line? Then name it .jsonl" if error.msg == "Extra data" else "is the file cut short?"
        raise ValueError(f"{path}:{error.lineno}: not JSON: {error.msg}; {hint}") from None
    if not isinstance(rows, list):
        raise ValueError(f"{path}: must hold an array of objects, holds {json_kind(rows)}")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"{path}: row {number} must be a JSON object, this is {json_kind(row)}")
    return rows


def json_kind(value: Any) -> str:
    return {dict: "an object", list: "an array", str: "a string", type(None): "null"}.get(type(value), repr(value))


def load_folder(path: Path, split: str) -> Sequence[dict[str, Any]]:
    if not (path / "dataset_dict.json").exists() and not (path / "state.json").exists():
        names = sorted(name.name for name in path.iterdir() if name.suffix in (*FORMATS, ".gz", ".zst"))
        hint = f"name one file of it, such as {path / names[0]}" if names else "name a file"
        hint = f"the episodes of a run lie in {path / 'rollouts'}" if (path / "rollouts").is_dir() else hint
        raise ValueError(f"{path}: a folder must be one that datasets' save_to_disk made; {hint}")
    datasets = import_datasets(str(path))
    with data_errors(str(path), datasets):
        saved = datasets.load_from_disk(str(path))
    if isinstance(saved, datasets.Dataset):
        return saved
    if split not in saved:
        raise ValueError(f"{path}: no split {split!r}; {nearest(split, saved)}")
    return saved[split]


def load_hub(source: str, split: str) -> Sequence[dict[str, Any]]:
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", source):
        raise ValueError(f"{source!r} is neither a file here nor a `datasets` name such as org/name or org/name:config")
    datasets = import_datasets(source)
    name, _, config = source.partition(":")
    with data_errors(f"{source} is no file here, and the hub", datasets):
        return datasets.load_dataset(name, config or None, split=split)


def import_datasets(source: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ValueError(f"{source}: reading it needs the `datasets` library: pip install datasets") from None
    return datasets


class data_errors:
    """What the `datasets` library raises, as one line: ValueError."""

    def __init__(self, source: str, datasets: Any):
        self.source = source
        self.kinds = (OSError, ValueError, datasets.exceptions.DatasetsError)

    def __enter__(self) -> None: ...

    def __exit__(self, kind, error, traceback) -> None:
        if isinstance(error, self.kinds):
            cause = error.__cause__ or error
            raise ValueError(f"{self.source}: {type(cause).__name__}: {' '.join(str(cause).split())}") from None


def make_task(row: dict[str, Any], index: int, env: str, split: str, is_pair: bool = False) -> Task:
    """The task of row `index` (from 0). Its messages stand in the column `messages`, or `prompt`, `question` or
    `problem`: a list of messages, or text, which becomes one message of the user. A preference pair is its row alone."""
    if is_pair:
        return Task(id=f"{split}/{index}", env=env, row=row, messages=[])
    place = f"{split} row {index + 1}"
    column = next((name for name in PROMPT_COLUMNS if row.get(name) is not None), None)
    if column is None:
        have = ", ".join(map(str, row)) or "no columns"
        raise ValueError(f"{place}: needs one of the columns {', '.join(PROMPT_COLUMNS)}; has {have}")
    content = row[column]
    if isinstance(content, str) and column != "messages":
        content = [{"role": "user", "content": content}]
    try:
        messages = check_messages(content)
    except ValueError as error:
        raise ValueError(f"{place}, column {column!r}: {error}") from None
    return Task(id=f"{split}/{index}", env=env, row=row, messages=messages)


def check_messages(messages: Any) -> list[Message]:
    """A copy of a conversation. Raises ValueError unless it is a list of at least one {"role", "content"}."""
    rule = 'must be a list of {"role": ..., "content": ...}'
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(f"{rule}, is {shorten(messages)}")
    checked = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise ValueError(f"{rule}, message {number} is {shorten(message)}")
        # Tables give every message every key; a chat template may ask whether a key is there.
        message = {key: value for key, value in message.items() if value is not None or key == "content"}
        content = message.get("content", message)
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{rule}, message {number} has no role in {shorten(message)}")
        if not isinstance(content, (str, list)) and not (content is None and message.get("tool_calls")):
            raise ValueError(f"{rule}, message {number} has no text as content in {shorten(message)}")
        checked.append(message)
    return checked


def shorten(value: Any, width: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= width else text[: width - 3] + "..."


class RowOrder:
    """Which row stands at each position: every epoch is a fresh permutation, drawn from the seed and its number."""

    def __init__(self, num_rows: int, seed: int, shuffle: bool):
        self.num_rows, self.seed, self.shuffle = num_rows, seed, shuffle
        self._epoch, self._permutation = -1, None

    def row_index(self, position: int) -> int:
        epoch, offset = divmod(position, self.num_rows)
        if not self.shuffle:
            return offset
        if epoch != self._epoch:
            import numpy as np

            # RandomState's stream is frozen for ever, unlike default_rng's: a run resumes under another numpy.
            random = np.random.RandomState(counter_seed(self.seed, "order", epoch))
            self._epoch, self._permutation = epoch, random.permutation(self.num_rows)
        return int(self._permutation[offset])


class TaskSource:
    """The tasks of one environment's split, in order."""

    def __init__(
        self, rows: Sequence[dict[str, Any]], *, env: str, split: str, seed: int, shuffle: bool, is_pairs: bool = False
    ):
        if len(rows) == 0:
            raise ValueError(f"{env}: the {split} data set is empty; it must have at least one row")
        self.rows, self.env, self.split, self.seed, self.shuffle = rows, env, split, seed, shuffle
        self.is_pairs = is_pairs
        self.kept = range(len(rows))
        self.order = RowOrder(len(rows), seed, shuffle)

    def __len__(self) -> int:
        return len(self.kept)

    def __iter__(self) -> Iterator[Task]:
        """Every task once, in the file's order."""
        return (make_task(self.rows[index], index, self.env, self.split, self.is_pairs) for index in self.kept)

    def tasks(self, position: int, n: int) -> list[Task]:
        """n tasks from a position on; it counts tasks drawn since the run began, over all epochs."""
        indices = [self.kept[self.order.row_index(p)] for p in range(position, position + n)]
        return [make_task(self.rows[index], index, self.env, self.split, self.is_pairs) for index in indices]

    def keep(self, indices: Sequence[int]) -> None:
        """Leaves out the rows that are not named; the others keep their ids."""
        if not indices:
            raise ValueError(f"{self.env}: no row of the {self.split} data set is left")
        self.kept = indices
        self.order = RowOrder(len(indices), self.seed, self.shuffle)


class TaskMix:
    """The tasks of several sources in turn: of the first n each has its share by weight, but for at most one."""

    def __init__(self, sources: Sequence[TaskSource], weights: Sequence[float]):
        self.sources, self.weights = sources, weights
        self.drawn = [0] * len(sources)  # before self.position
        self.position = 0

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def tasks(self, position: int, n: int) -> list[Task]:
        """n tasks from a position on, which counts those of all sources."""
        if position < self.position:
            self.drawn, self.position = [0] * len(self.sources), 0
        found = []
        while self.position < position + n:
            # The source whose next task is due first; on a tie the one named first.
            i = min(range(len(self.sources)), key=lambda i: ((self.drawn[i] + 0.5) / self.weights[i], i))
            if self.position >= position:
                found += self.sources[i].tasks(self.drawn[i], 1)
            self.drawn[i] += 1
            self.position += 1
        return found
