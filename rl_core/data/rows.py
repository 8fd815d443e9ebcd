"""Rows from files, folders, a run's rollouts, or the hub; `datasets` reads all but JSON.
Trajectories -> a run's rollouts."""

from __future__ import annotations

import dataclasses
import difflib
import gzip
import itertools
import json
import os
import shutil
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zstandard

from rl_core.rules import split as comma_split
from rl_core.types import Trajectory, option

if TYPE_CHECKING:
    from rl_core.data.chat import Chat

Row = dict[str, Any]
JSON = (".json", ".jsonl")
# Are checked at start-up where rows are many; those beyond when they are drawn.
CHECKED_ROWS = 20_000
# Of a .jsonl file; rows of a larger one stay on disk, as those of tables do.
IN_MEMORY_BYTES = 64 << 20
JSON_LINES = "rl_core.plugins.json_lines:JsonLines"
FILES, NAMED, TABLE = (
    f"rl_core.plugins.tables:{name}" for name in ("files_of", "load_named", "load_table")
)
ROLLOUTS = ".jsonl.zst"  # one trajectory a line
# Beside a run's rollouts: actor -> fingerprint of the tokenizer that they are in.
TOKENIZERS = "tokenizers.json"


def load_rows(
    source: str, split: str = "train", min_reward: float | None = None, actor: str | None = None
) -> Sequence[Row]:
    """The rows of one or several sources, with commas between them, one source after the other. A
    source is a file, a glob, a folder of files or one made by `save_to_disk`, or
    "org/name[:config]" on the hub; "@validation" behind it names a split.

    `split` chooses where none is named; a file is one split. A run's rollouts (their folder, or
    files) give an actor's episodes that did not fail and have at least min_reward. Raises
    ValueError, with file and line, for what is missing, cut short, empty or no object.
    """
    return chained([load_source(part, split, min_reward, actor) for part in comma_split(source)])


def load_source(
    source: str, split: str, min_reward: float | None, actor: str | None
) -> Sequence[Row]:
    files = option(FILES)(source, split)
    if files and all(file.name.endswith(ROLLOUTS) for file in files):
        return load_rollouts(files, source, min_reward, actor)
    if min_reward is not None:
        raise ValueError(
            f"--data.min_reward={min_reward} is for a run's rollouts, and {source} holds none; "
            "drop it"
        )
    parts = [] if files else [option(NAMED)(source, split)]
    for suffix, same in itertools.groupby(files, suffix_of):
        group = list(same)
        parts += map(load_json, group) if suffix in JSON else [option(TABLE)(group, suffix)]
    if not any(map(len, parts)):
        raise ValueError(f"{source}: the data set is empty; it must have at least one row")
    return chained(parts)


def chained(parts: list[Sequence[Row]]) -> Sequence[Row]:
    from torch.utils.data import ConcatDataset

    return parts[0] if len(parts) == 1 else ConcatDataset(parts)


def suffix_of(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def load_rollouts(
    files: list[Path], source: str, min_reward: float | None, actor: str | None
) -> list[Row]:
    """Episodes as rows: messages, reward, and the tokens of each turn, with the fingerprint of
    their tokenizer."""
    found: dict[str, list[Row]] = {}  # by actor
    for file in files:
        names = file.parent / TOKENIZERS
        tokenizers = json.loads(names.read_text()) if names.is_file() else {}
        for episode in read_episodes(file):
            if episode["status"] != "failed" and episode["reward"] is not None and episode["turns"]:
                # Arrays take a tenth of the memory of lists.
                tokens = (
                    (t["new_ids"], t["is_fresh"], t["completion"]["token_ids"])
                    for t in episode["turns"]
                )
                turns = [
                    (array("i", new), is_fresh, array("i", said)) for new, is_fresh, said in tokens
                ]
                row = {"messages": episode["messages"], "reward": episode["reward"], "turns": turns}
                row["tokenizer"] = tokenizers.get(episode["actor"], "")
                found.setdefault(episode["actor"], []).append(row)
    if len(found) == 1:
        [actor] = found
    rows = [
        row for row in found.get(actor, []) if min_reward is None or row["reward"] >= min_reward
    ]
    if not rows:
        best = (
            f"{name} with rewards up to {max(row['reward'] for row in own)}"
            for name, own in sorted(found.items())
        )
        raise ValueError(
            f"{source}: no episode of {actor} with --data.min_reward={min_reward}; it holds those "
            "of "
            f"{', '.join(best) or 'nobody: all failed'}; --actors.bob.model takes those of bob"
        )
    return rows


def read_episodes(file: Path) -> Iterator[Row]:
    """A file of a run's rollouts. Raises ValueError for another one."""
    for number, episode in enumerate(read_json(file), 1):
        if not {"messages", "turns", "reward", "status", "actor"} <= episode.keys():
            raise ValueError(
                f"row {number} of {file}: no episode of a run; it has {', '.join(episode)}"
            )
        yield episode


def is_trajectory(row: Row) -> bool:
    """Whether load_rollouts made this row."""
    return "tokenizer" in row and "turns" in row


def write_tokenizers(folder: Path, chats: Mapping[str, Chat]) -> None:
    """Beside rollouts: in which tokenizer each actor's tokens are."""
    (folder / TOKENIZERS).write_text(
        json.dumps({name: chat.fingerprint for name, chat in chats.items()})
    )


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


def write_trajectories(file: Path, trajectories: list[Trajectory]) -> None:
    beside, compressor = file.with_name(f".{file.name}.tmp"), zstandard.ZstdCompressor(level=3)
    with open(beside, "wb") as raw, compressor.stream_writer(raw) as writer:
        for trajectory in trajectories:
            writer.write((json.dumps(trajectory, default=jsonable) + "\n").encode())
    os.replace(beside, file)


def jsonable(value: Any) -> Any:
    """A dataclass as a dictionary, without fields that are not shown (repr=False); what JSON does
    not know, as text."""
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.repr}
    return str(value)


def check_exists(path: Path) -> None:
    """Raises ValueError, with the nearest name in that folder, if there is no such file."""
    if path.is_file():
        return
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: no such file; the folder {path.parent} does not exist")
    close = difflib.get_close_matches(path.name, os.listdir(path.parent), n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]!r}?" if close else f" in {path.parent.resolve()}"
    raise ValueError(f"{path}: no such file{hint}")


def load_json(path: Path) -> Sequence[Row]:
    is_large = path.suffix.lower() == ".jsonl" and path.stat().st_size > IN_MEMORY_BYTES
    return option(JSON_LINES)(path) if is_large else list(read_json(path))


def read_json(path: Path) -> Iterator[Row]:
    """The objects of a .json file, an array or one alone, or of another file's lines."""
    data = read_bytes(path)
    if suffix_of(path) == ".json":
        yield from parse_rows(data, str(path), is_array=True)
        return
    # Split at newlines alone: JSON strings may hold Unicode's other line separators.
    for number, text in enumerate(data.split(b"\n"), 1):
        if text.strip():
            yield from parse_rows(text, f"row {number} of {path}")


def parse_rows(text: bytes, place: str, is_array: bool = False) -> Iterator[Row]:
    try:
        found = json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: {encoding_rule(error.object)}") from None
    except ValueError as error:
        if b"\0" in text:  # which no JSON holds
            raise ValueError(f"{place}: {encoding_rule(text)}") from None
        hint = ", or one object a line? Then name it .jsonl" if is_array else "?"
        raise ValueError(f"{place}: not JSON: {error}. Is it cut short{hint}") from None
    for row in found if is_array and isinstance(found, list) else [found]:
        if not isinstance(row, dict):
            raise ValueError(
                f"{place}: a row must be a JSON object, this is {json.dumps(row)[:40]}"
            )
        yield row


def encoding_rule(data: bytes) -> str:
    """What is told of bytes that are no UTF-8. Every second byte of English in UTF-16 is 0."""
    is_utf_16 = b"\0" in data or data.startswith((b"\xff\xfe", b"\xfe\xff"))
    name, of = ("UTF-16", "UTF-16") if is_utf_16 else ("not UTF-8, maybe Latin-1", "LATIN1")
    return f"it is {name}; rows must be UTF-8: iconv -f {of} -t UTF-8 FILE > NEW_FILE"


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
        raise ValueError(
            f"{path}: not {path.suffix[1:]}, or the file is cut short: {error}"
        ) from None
    return b"".join(parts) or data
