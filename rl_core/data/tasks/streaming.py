"""--data.streaming: training rows read one after the other, from the hub or from large files.

No complete file is downloaded or read. Rows are shuffled within blocks of --data.shuffle_buffer,
each block by a separate seed, so that the row at a position does not depend on earlier draws.
Every rank reads the same stream and takes its positions from it.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Protocol, cast

import numpy as np

from rl_core.algorithms import make_algorithm
from rl_core.config import Config
from rl_core.data.column_names import RenamedColumns, check_columns_exist
from rl_core.data.row_files import files_of, parse_rows, source_and_split
from rl_core.data.rows import data_folder, suffix_of
from rl_core.data.tables import load_named, load_table, messages_as_written
from rl_core.data.task_rows import TaskSource, make_task
from rl_core.data.tasks.prompt_hook import MadePrompts
from rl_core.data.tasks.sft_dataset import check_rows
from rl_core.environments.row_columns import check_columns
from rl_core.errors import nearest, refuse
from rl_core.sampling.env import Env
from rl_core.types import JSONObject, Row, Task, counter_seed

CHECKED_ROWS = 200  # The first rows, which are checked at start-up.
KEPT_BLOCKS = 2  # Two, because groups still draw from the older block.
KEPT_STATES = 8
# c: the configuration; path: source of the rows; env: None without an environment.
OF_STREAMS = [
    (
        lambda c, path, env: not path,
        "--data.streaming needs --data.train: files or a name on the hub; load_tasks() gives all "
        "rows at once",
    ),
    (
        lambda c, path, env: c.num_epochs,
        "--num_epochs={c.num_epochs} needs the number of rows, which --data.streaming does not "
        "know; give --num_steps",
    ),
    (
        lambda c, path, env: c.data.skip_long,
        "--data.skip_long looks at all rows, which --data.streaming does not; leave out long rows "
        "before, or raise --max_prompt_tokens",
    ),
    (
        lambda c, path, env: c.data.min_reward is not None,
        "--data.min_reward is for a run's rollouts, which --data.streaming does not read; leave "
        "one out",
    ),
    (
        lambda c, path, env: len(c.env_paths) > 1,
        "--data.streaming is for one environment; leave it out, or name one --env_path",
    ),
    (
        lambda c, path, env: env and "task_weight" in env.hooks,
        "task_weight() draws from all rows, which --data.streaming does not hold; leave one out",
    ),
]


class RowStream(Protocol):
    """An iterable whose position is a state, such as an IterableDataset."""

    def __iter__(self) -> Iterator[Row]: ...

    def state_dict(self) -> JSONObject: ...

    def load_state_dict(self, state_dict: JSONObject) -> None: ...


class JsonLinesStream:
    """Rows of .jsonl files, one after the other. The state is a position in a file, with the
    methods of an IterableDataset. Raises ValueError, with file and line, for a line that is not a
    row."""

    def __init__(self, files: list[Path]):
        self.files = files
        self.load_state_dict({"file": 0, "byte": 0, "line": 0})

    def state_dict(self) -> JSONObject:
        return {"file": self.file, "byte": self.byte, "line": self.line}

    def load_state_dict(self, state_dict: JSONObject) -> None:
        self.file, self.byte, self.line = (state_dict[key] for key in ("file", "byte", "line"))

    def __iter__(self) -> Iterator[Row]:
        while self.file < len(self.files):
            path = self.files[self.file]
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                file.seek(self.byte)
                for text in file:
                    self.byte += len(text)
                    self.line += 1
                    if text.strip():
                        yield from parse_rows(text, f"row {self.line} of {path}")
            self.load_state_dict({"file": self.file + 1, "byte": 0, "line": 0})


def open_stream(path: str, split: str) -> RowStream:
    path, split = source_and_split(path, split)
    files = files_of(path, split)
    if not files:
        return cast(RowStream, load_named(path, split, streaming=True))
    suffixes = {suffix_of(file) for file in files}
    if suffixes == {".jsonl"}:
        return JsonLinesStream(files)
    if len(suffixes) > 1 or ".json" in suffixes:
        raise ValueError(
            f"{path}: --data.streaming reads files of one format, and of JSON one object a line; "
            f"these are {', '.join(sorted(suffixes))}"
        )
    return cast(RowStream, load_table(files, suffixes.pop(), streaming=True))


class StreamedTasks:
    """Training tasks of a stream. At most KEPT_BLOCKS blocks of
    rows are in memory. After the last row the next epoch begins, in another order."""

    def __init__(
        self,
        stream: RowStream,
        name: str,
        config: Config,
        env_name: str,
        env: Env | None,
        is_pairs: bool,
    ):
        self.stream, self.name, self.config = stream, name, config
        self.env, self.env_name, self.is_pairs = env, env_name, is_pairs
        self.columns = required_columns(env) if env else set()
        self.size = config.data.shuffle_buffer
        self.num_rows = 0  # 0 until the end is reached.
        self.blocks: dict[int, list[Row]] = {}
        # Number of a block -> state of the stream before it.
        self.states: dict[int, JSONObject] = {0: stream.state_dict()}
        self.next_block, self.iterator = 0, iter(stream)
        first = self.block(0)[:CHECKED_ROWS]
        if not first:
            raise ValueError(f"{name}: the data set is empty; it must have at least one row")
        if env:
            check_columns(env, first, [(name, len(first))])
        else:
            check_rows(config, first, name, True)
        # The rows that start-up checks.
        head = TaskSource(
            first,
            env=env_name,
            split="train",
            seed=config.seed,
            shuffle=False,
            is_pairs=is_pairs,
            files=[(name, len(first))],
        )
        self.sources = [head]

    def __len__(self) -> int:
        """Number of rows that start-up checks; the number of all rows is unknown."""
        return len(self.sources[0])

    def task(self, position: int) -> Task:
        """The task at a position, the number of tasks drawn since the run began. Raises ValueError,
        with its number, for a row that is cut short or lacks a column."""
        epoch, offset = self.locate(position)
        number = offset // self.size
        rows = self.block(number)
        if self.locate(position) != (epoch, offset):  # The read reached the end of the first epoch.
            return self.task(position)
        at = offset - number * self.size
        if self.config.data.shuffle:
            seed = counter_seed(self.config.seed, "stream", epoch, number)
            at = int(np.random.RandomState(seed).permutation(len(rows))[at])
        index = number * self.size + at
        location = f"row {index + 1} of {self.name}"
        for column in sorted(self.columns - rows[at].keys()):
            raise ValueError(f"{location}: no column {column!r}; {nearest(column, rows[at])}")
        row, folder = rows[at], data_folder(self.name)
        return make_task(row, index, self.env_name, "train", self.is_pairs, location, folder)

    def num_before(self, position: int) -> list[int]:
        return [position]

    def locate(self, position: int) -> tuple[int, int]:
        """(epoch, row in the epoch) of a position."""
        return divmod(position, self.num_rows) if self.num_rows else (0, position)

    def block(self, number: int) -> list[Row]:
        """Rows of a block, in the order of the files; empty past the end."""
        if number not in self.blocks:
            self.go_to(number)
            while self.next_block <= number and not self.is_past_end():
                self.read_block()
        return self.blocks.get(number, [])

    def go_to(self, number: int) -> None:
        """Rewinds to before a block, or skips to the nearest saved state before it."""
        start = max(block for block in self.states if block <= number)
        if number < self.next_block or start > self.next_block:
            self.stream.load_state_dict(self.states[start])
            self.next_block, self.iterator = start, iter(self.stream)

    def is_past_end(self) -> bool:
        return bool(self.num_rows) and self.next_block * self.size >= self.num_rows

    def read_block(self) -> None:
        number = self.next_block
        while len(self.blocks) >= KEPT_BLOCKS:
            del self.blocks[next(iter(self.blocks))]
        rows: list[Row] = []
        try:
            for row in islice(self.iterator, self.size):
                if not isinstance(self.stream, JsonLinesStream):
                    row = {name: messages_as_written(name, value) for name, value in row.items()}
                rows.append(row)
        except (OSError, ValueError, EOFError) as error:
            if isinstance(error, ValueError) and isinstance(self.stream, JsonLinesStream):
                raise  # It names file and line.
            cause = error.__cause__ or error
            text = " ".join(str(cause).split())
            number_before = number * self.size + len(rows)
            raise ValueError(
                f"{self.name}: after row {number_before}: {type(cause).__name__}: {text}"
            ) from None
        if rows and self.config.data.columns:
            columns = self.config.data.columns
            if number == 0:
                check_columns_exist(rows, columns, self.name)
            rows = list(RenamedColumns(rows, columns))
        if self.env and self.env.row_to_prompt:
            rows = list(MadePrompts(rows, self.env.row_to_prompt, self.env.path))
        if len(rows) < self.size:
            self.num_rows = number * self.size + len(rows)
        if rows:
            self.blocks[number] = rows
        self.next_block += 1
        # Popped first, so that the dictionary's order is the order of reading.
        self.states.pop(self.next_block, None)
        self.states[self.next_block] = self.stream.state_dict()
        if len(self.states) > KEPT_STATES:
            del self.states[next(block for block in self.states if block)]

    def state(self) -> JSONObject:
        """States of the stream before its last blocks, with which a resumed run skips earlier
        rows."""
        states = {str(number): state for number, state in self.states.items()}
        return {"num_rows": self.num_rows, "size": self.size, "states": states}

    def load(self, state: JSONObject) -> None:
        if state.get("size") == self.size:
            self.num_rows = state["num_rows"]
            self.states |= {int(number): saved for number, saved in state["states"].items()}


def required_columns(env: Env) -> set[str]:
    """Columns that hooks and system prompts name."""
    columns: set[str] = set()
    for hook in env.hooks.values():
        columns |= set(hook.required - hook.ours)
    for prompt in env.turn_loop.system_prompts.values():
        columns |= set(prompt.columns)
    return columns


def streamed_tasks(
    config: Config, env: Env | None, env_name: str, path: str | None
) -> StreamedTasks:
    """Opens the stream of training tasks. Raises ValueError for flags that need all rows."""
    refuse(OF_STREAMS, c=config, path=path, env=env)
    assert path is not None
    is_pairs = make_algorithm(config.algorithm, config.algo).reads_pairs
    return StreamedTasks(open_stream(path, "train"), path, config, env_name, env, is_pairs)
