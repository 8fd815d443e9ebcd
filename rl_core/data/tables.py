"""Rows from sources other than JSON, or too large for memory: tables, the hub, large .jsonl files,
rollouts, tasks in Harbor's format.

`datasets` does not read JSON here, because it would change rows: dates become times, integers in a
column with 1.5 become floats, and every row gets the columns of all others.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from rl_core.data.row_files import not_utf8, parse_rows, read_json
from rl_core.data.rows import (
    CHECKED_ROWS,
    JSON_FILES,
    ROLLOUTS,
    SEPARATORS,
    TABLES,
    TOKENIZERS,
    quiet_datasets,
    suffix_of,
)
from rl_core.errors import nearest
from rl_core.types import AnyJSON, Row

if TYPE_CHECKING:
    from pandas import DataFrame

# One of these is a key of each message, and of a tool.
MESSAGE_KEYS = {"role", "from", "function"}


def load_other(
    name: str,
    files: list[Path],
    split: str,
    min_reward: float | None = None,
    actor: str | None = None,
) -> list[tuple[str, Sequence[Row]]]:
    """(name, rows) of each part of a source: of its files, or of a folder that `save_to_disk` made,
    or of a name on the hub. A run's rollouts give an actor's episodes that did not fail and have at
    least min_reward."""
    quiet_datasets()
    if not files:
        return [(name, without_null_keys(load_named(name, split)))]
    if files[0].name.endswith(ROLLOUTS):
        return [(name, load_rollouts(files, name, min_reward, actor))]
    parts: list[tuple[str, Sequence[Row]]] = []
    for suffix, group in itertools.groupby(files, suffix_of):
        if suffix not in JSON_FILES:
            parts.append((name, without_null_keys(load_table(list(group), suffix))))
            continue
        for file in group:
            rows = JsonLines(file) if file.suffix == ".jsonl" else list(read_json(file))
            parts.append((str(file), rows))
    return parts


class JsonLines(Sequence):
    """Rows of a .jsonl file that is too large for memory, each read from disk when it is drawn. The
    file must not change. Raises ValueError, with file and line, for a bad line among the first
    CHECKED_ROWS or the last; others raise when they are drawn."""

    def __init__(self, path: Path):
        self.path = path
        self.starts, self.numbers = array("q"), array("q")  # Byte and line of each row.
        start = 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    self.starts.append(start)
                    self.numbers.append(number)
                start += len(line)
        indices = range(len(self))
        for index in (*indices[:CHECKED_ROWS], *indices[-1:]):
            self[index]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Row:
        with open(self.path, "rb") as file:
            file.seek(self.starts[index])
            [row] = parse_rows(file.readline(), f"row {self.numbers[index]} of {self.path}")
        return row


def load_named(name: str, split: str, streaming: bool = False) -> Sequence[Row]:
    """The split of a folder that `save_to_disk` made, or of "org/name[:config]" on the hub."""
    path = Path(name).expanduser()
    import datasets  # takes a second

    if not path.is_dir():
        source, _, config = name.partition(":")
        with one_line_errors(f"{name} is not a file here, and the hub"):
            rows = datasets.load_dataset(source, config or None, split=split, streaming=streaming)
            return cast("Sequence[Row]", rows)
    with one_line_errors(str(path)):
        rows = datasets.load_from_disk(str(path))
    if isinstance(rows, dict):
        if split not in rows:
            raise ValueError(f"{path}: no split {split!r}; {nearest(split, map(str, rows))}")
        rows = rows[split]
    return cast("Sequence[Row]", rows.to_iterable_dataset() if streaming else rows)


def load_table(files: list[Path], suffix: str, streaming: bool = False) -> Sequence[Row]:
    """The rows of files of one format. Cells of text files stay text: 007 is no 7, and NA is no
    empty cell."""
    if suffix not in TABLES:
        raise ValueError(
            f"{files[0]}: format {suffix!r} is not known; use "
            f"{', '.join((*JSON_FILES, *TABLES))} (.gz too)"
        )
    import datasets
    import pandas

    names = [str(path) for path in files]
    with one_line_errors(", ".join(names)):
        if suffix not in SEPARATORS:
            rows = datasets.load_dataset(
                suffix[1:], data_files=names, split="train", streaming=streaming
            )
            return cast("Sequence[Row]", rows)
        separator = SEPARATORS[suffix]
        columns = pandas.read_csv(names[0], sep=separator, nrows=0).columns
        rows = datasets.load_dataset(
            "csv",
            data_files=names,
            split="train",
            streaming=streaming,
            sep=separator,
            features=datasets.Features({column: datasets.Value("string") for column in columns}),
            keep_default_na=False,
        )
        return cast("Sequence[Row]", rows)


@runtime_checkable
class HubTable(Protocol):
    """A table of `datasets`, which takes a second to import."""

    format: dict[str, object]

    def cast_column(self, column: str, feature: object) -> object: ...
    def with_transform(self, transform: Callable) -> Sequence[Row]: ...


def without_null_keys(rows: Sequence[Row]) -> Sequence[Row]:
    """A table of `datasets` that gives its cells as messages_as_written(); anything else, and a
    table with a format of the user, as it is."""
    if not isinstance(rows, HubTable) or rows.format["type"] is not None:
        return rows

    def as_written(batch: dict[str, list]) -> dict[str, list]:
        columns = batch.items()
        return {name: [messages_as_written(name, v) for v in values] for name, values in columns}

    return undecoded(rows).with_transform(as_written)


def undecoded(rows: HubTable) -> HubTable:
    """A table whose columns of images give the bytes of their files."""
    import datasets

    def undecode(feature: object) -> bool:
        """True if the feature, which is changed, has an image."""
        if isinstance(feature, datasets.Image):
            feature.decode = False
            return True
        inner = list(feature.values()) if isinstance(feature, dict) else feature
        inner = inner if isinstance(inner, list) else [getattr(inner, "feature", None)]
        changed = [undecode(each) for each in inner if each is not None]
        return any(changed)

    for name, feature in (getattr(rows, "features", None) or {}).items():
        changed = copy.deepcopy(feature)
        if undecode(changed):
            rows = cast("HubTable", rows.cast_column(name, changed))
    return rows


def messages_as_written(column: str, value: AnyJSON) -> AnyJSON:
    """A cell of a table. In messages and tools a table gives every object each key that one of the
    column has, with None where it was absent: these keys are left out, at any depth."""
    items = value if isinstance(value, list) else [value]
    is_message = [isinstance(item, dict) and not MESSAGE_KEYS.isdisjoint(item) for item in items]
    return without_nulls(value) if column == "tools" or all(is_message) else value


def pandas_rows(frame: DataFrame) -> list[Row]:
    """The rows of a table of pandas, whose cells may hold arrays, as those read from parquet do."""
    rows = frame.to_dict("records")
    return [{k: messages_as_written(k, without_arrays(v)) for k, v in row.items()} for row in rows]


def without_arrays(value: AnyJSON) -> AnyJSON:
    """A copy with lists in place of arrays, at any depth."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: without_arrays(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_arrays(v) for v in value]
    return value


# Errors of `datasets` and pandas for files without a row.
EMPTY = re.compile("corresponds to no data|No columns to parse|BatchSize must be greater than 0")


@contextmanager
def one_line_errors(source: str) -> Iterator[None]:
    """Errors of `datasets` become a ValueError of one line."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (OSError, ValueError, DatasetsError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, UnicodeDecodeError):
            raise ValueError(not_utf8(source, cause.object, cause)) from None
        text = " ".join(str(cause).split())
        if EMPTY.search(text):
            raise ValueError(
                f"{source}: the data set is empty; it must have at least one row"
            ) from None
        raise ValueError(f"{source}: {type(cause).__name__}: {text}") from None


def load_rollouts(
    files: list[Path], source: str, min_reward: float | None, actor: str | None
) -> list[Row]:
    """Episodes as rows: messages, reward, and the tokens of each turn, with the fingerprint of
    their tokenizer."""
    rows_of: dict[str, list[Row]] = {}  # Actor -> rows.
    for file in files:
        names = file.parent / TOKENIZERS
        tokenizers = json.loads(names.read_text()) if names.is_file() else {}
        for episode in read_episodes(file):
            if episode["status"] == "failed" or episode["reward"] is None or not episode["turns"]:
                continue
            turns = []
            for turn in episode["turns"]:
                # Arrays take a tenth of the memory of lists.
                # Tokens of images are negative, with 62 bits.
                has_images = min(turn["new_ids"], default=0) < 0
                new_ids = array("q" if has_images else "i", turn["new_ids"])
                sampled = array("i", turn["completion"]["token_ids"])
                turns.append((new_ids, turn["is_fresh"], sampled))
            row = {
                "messages": episode["messages"],
                "reward": episode["reward"],
                "turns": turns,
                "tokenizer": tokenizers.get(episode["actor"], ""),
            }
            rows_of.setdefault(episode["actor"], []).append(row)
    if len(rows_of) == 1:
        [actor] = rows_of
    rows = rows_of.get(actor, []) if actor else []
    if min_reward is not None:
        rows = [row for row in rows if row["reward"] >= min_reward]
    if not rows:
        best = []
        for name, actor_rows in sorted(rows_of.items()):
            best.append(f"{name} with rewards up to {max(row['reward'] for row in actor_rows)}")
        raise ValueError(
            f"{source}: no episode of {actor} with --data.min_reward={min_reward}; it holds those "
            f"of {', '.join(best) or 'nobody: all failed'}; --actors.bob.model takes those of bob"
        )
    return rows


def read_episodes(file: Path) -> Iterator[Row]:
    """Episodes in a file of a run's rollouts. Raises ValueError for another file."""
    for number, episode in enumerate(read_json(file), 1):
        if not {"messages", "turns", "reward", "status", "actor"} <= episode.keys():
            raise ValueError(
                f"row {number} of {file}: no episode of a run; it has {', '.join(episode)}"
            )
        yield episode


def read_rewards(file: Path) -> dict[str, list[Row]]:
    """File of rollouts/ -> rewards by rl-core rescore, a line for each of its trajectories. Raises
    ValueError for another file."""
    by_file: dict[str, list[Row]] = {}
    for number, row in enumerate(read_json(file), 1):
        if not {"file", "reward", "before"} <= row.keys():
            raise ValueError(f"row {number} of {file}: no reward that rl-core rescore wrote")
        by_file.setdefault(row["file"], []).append(row)
    return by_file


def without_nulls(value: AnyJSON) -> AnyJSON:
    """A copy without the keys that are None, at any depth. In a table every object of a column has
    the keys of all others, with None for its missing ones."""
    if isinstance(value, dict):
        return {key: without_nulls(v) for key, v in value.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [without_nulls(v) for v in value]
    return value
