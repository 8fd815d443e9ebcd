"""Rows -> Tasks, and the order in which they come. The only state is a position: the number of
tasks drawn so far."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rl_core.data.canonical_messages import canonical_messages, canonical_tools, is_plain
from rl_core.data.context_columns import SYSTEM_COLUMNS, renaming
from rl_core.data.image_parts import have_images, without_pixels
from rl_core.data.messages import MEDIA_KEYS, json_value, shorten, text_of
from rl_core.data.rows import data_folder, row_place, row_source
from rl_core.errors import near_name, needs_column
from rl_core.types import JSON, JSONObject, Message, Row, Task, counter_seed

if TYPE_CHECKING:
    from rl_core.data.chat import Chat

# Columns of the first messages; the first of these columns that a row has is used.
PROMPT_COLUMNS = (
    "messages",
    "prompt",
    "conversations",
    "conversation",
    "question",
    "problem",
    "instruction",
    "input",
)
# Columns of whole conversations, whose replies at the end are not part of an RL prompt.
CONVERSATIONS = ("messages", "conversations", "conversation")
LEFT_OUT = "the replies at the end of column {!r} are left out of the prompt"
# Limits of the columns that rollouts/ keeps of a row.
MAX_COLUMNS, MAX_COLUMN_CHARS = 50, 2000


def make_task(
    row: Row,
    index: int,
    env: str,
    split: str,
    is_pair: bool = False,
    location: str = "",
    folder: Path | None = None,
) -> Task:
    """The task of row `index` (from 0), read by read_row(). A preference pair has no messages."""
    location = location or row_place(index, (), split)
    try:
        row = read_row(row, folder=folder)
        messages = [] if is_pair else prompt_messages(row)
        row_tools(row)
        row_variables(row)
    except ValueError as error:
        raise ValueError(f"{location}: {error}") from None
    return Task(id=f"{split}/{index}", env=env, row=row, messages=messages, place=location)


def read_row(row: Row, notes: list[str] | None = None, folder: Path | None = None) -> Row:
    """The row in the form that SFT, RL and pairs read; see read_form(). Its images, whose paths
    begin in `folder`, are data: URLs."""
    return in_form(with_loaded_images(row, folder), notes)


def with_loaded_images(row: Row, folder: Path | None) -> Row:
    if any("image" in column or have_images(value) for column, value in row.items()):
        from rl_core.data.image_columns import with_images

        return with_images(row, folder)
    return row


def in_form(row: Row, notes: list[str] | None = None) -> Row:
    if is_plain(row.get("messages")) and not row.get("tools"):
        return row
    from rl_core.data.row_forms import read_form

    return read_form(row, PROMPT_COLUMNS, notes)


def prompt_messages(row: Row, notes: list[str] | None = None) -> list[Message]:
    """The messages in the first of PROMPT_COLUMNS that a row has, or its text as a user message,
    behind those of its system and history columns. The replies at the end of CONVERSATIONS are
    left out, because they are the solution, up to one that the reply continues."""
    column = prompt_column(row)
    messages = with_prefix_mark(row, column_messages(row, column, notes=notes))
    num_messages = len(messages)
    if column in CONVERSATIONS:
        while len(messages) > 1 and messages[-1]["role"] == "assistant":
            if messages[-1].get("prefix") is True:
                break
            messages.pop()
    if len(messages) < num_messages and notes is not None:
        notes.append(LEFT_OUT.format(column))
    return with_opening(row, messages, notes)


def prompt_column(row: Row) -> str:
    """The first of PROMPT_COLUMNS that the row has. Raises ValueError if there is none."""
    column = first_column(row, PROMPT_COLUMNS)
    if column is not None:
        return column
    hint = (
        "another column is read by --data.columns prompt=NAME, or messages=NAME for conversations "
        "that end with the solution"
    )
    for name in PROMPT_COLUMNS:
        if near := near_name(name, map(str, row), cutoff=0.85):
            hint = f"did you mean {near!r}? Read it by --data.columns {name}={near}"
            break
    have = ", ".join(map(str, row)) or "no columns"
    raise ValueError(f"needs one of the columns {', '.join(PROMPT_COLUMNS)}; has {have}; {hint}")


def with_prefix_mark(row: Row, messages: list[Message]) -> list[Message]:
    """The messages of a prompt, the last one marked as a prefix by `continue_final_message`."""
    name = "continue_final_message"
    if row.get(name) in (None, False):
        return messages
    *before, last = messages or [{"role": ""}]
    if row[name] is not True or last["role"] != "assistant" or not text_of(last):
        raise ValueError(
            f"column {name!r} is {shorten(row[name])}: it must be true, behind a prompt that ends "
            f"in an assistant's text, or false{renaming(name)}"
        )
    return [*before, {**last, "prefix": True}]


def with_opening(
    row: Row, messages: list[Message], notes: list[str] | None = None
) -> list[Message]:
    """The messages with the opening and the images of a row's other columns; see opened()."""
    is_alone = row.keys().isdisjoint((*MEDIA_KEYS, *SYSTEM_COLUMNS, "history"))
    if is_alone and not any("image" in column for column in row):
        return messages
    from rl_core.data.row_openings import opened

    return opened(row, messages, notes)


def row_variables(row: Row) -> JSONObject:
    """The variables of the chat template in a row's column `chat_template_kwargs`: an object, or
    its JSON text. Raises ValueError for anything else."""
    column = row.get("chat_template_kwargs")
    value = json_value(column) if isinstance(column, str) and column.strip() else column or {}
    if not isinstance(value, dict):
        raise ValueError(
            f"column 'chat_template_kwargs' must be an object, or its JSON text; is "
            f"{shorten(column)}{renaming('chat_template_kwargs')}"
        )
    return {name: each for name, each in value.items() if each is not None}


def row_chat(chat: Chat, row: Row) -> Chat:
    """The chat with a row's `chat_template_kwargs`. Raises ValueError if its template does not read
    them."""
    variables = row_variables(row)
    if not variables:
        return chat
    from rl_core.data.template_variables import check_variables

    name = "chat_template_kwargs"
    fix = f": remove it, or ignore the column by --data.columns my_{name}={name}"
    check_variables(chat.tokenizer, variables, f"column {name!r}", fix)
    return chat.with_variables(variables)


def fits(text: str, length: int, limit: int, named: str, skip_long: bool, bound: str = "") -> bool:
    """True if `length` is at most `limit`. Raises ValueError if it is longer and such rows are not
    left out. The error names `text`, which was measured, and puts `bound` before the length."""
    if length > limit and not skip_long:
        raise ValueError(
            f"{text} of {bound}{length} tokens is longer than {named}; raise it, or leave such "
            "rows out with --data.skip_long"
        )
    return length <= limit


def shown_columns(task: Task) -> dict[str, str]:
    """The columns of a task's row as text, each cut after MAX_COLUMN_CHARS, for who judges its
    replies. Columns that the prompt shows whole, and empty ones, are left out."""
    contents = (message.get("content") or "" for message in task.messages)
    shown = {"", column_text(task.messages), *map(column_text, contents)}
    columns = {}
    for name, value in task.row.items():
        text = "" if value is None or name == "chat_template_kwargs" else column_text(value)
        if text not in shown and len(columns) < MAX_COLUMNS:
            columns[name] = text
    return columns


def column_text(value: JSON) -> str:
    """A text, or the JSON of another value, cut after MAX_COLUMN_CHARS. load_tasks() may return any
    objects: the type stands for a value that has no text."""
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value)} bytes"
    value = without_pixels(value)
    text = ""
    try:
        if isinstance(value, (list, tuple, dict, bool)):
            encoder = json.JSONEncoder(ensure_ascii=False, skipkeys=True, default=str)
            # Piece by piece, as a value may have megabytes.
            for piece in encoder.iterencode(value):
                text += piece
                if len(text) > MAX_COLUMN_CHARS:
                    break
        else:  # Objects of other libraries shorten themselves.
            text = str(value)
    except Exception:
        text = type(value).__name__
    return text if len(text) <= MAX_COLUMN_CHARS else f"{text[:MAX_COLUMN_CHARS]} ..."


def first_column(row: Row, names: Sequence[str]) -> str | None:
    """The first of these columns with a value; else the first that exists."""
    for name in names:
        if row.get(name) is not None:
            return name
    return next((name for name in names if name in row), None)


def column_messages(
    row: Row, column: str, role: str = "user", notes: list[str] | None = None
) -> list[Message]:
    """A column's messages, and `notes`, as of canonical_messages. Text, but in `messages`, is one
    message of `role`, and `input` the rest of `instruction`. Raises ValueError if there are none,
    and as canonical_messages."""
    if column not in row:
        raise ValueError(needs_column(column, row))
    value = row[column]
    if not is_plain(value):
        value = messages_in_column(row, column, role, notes)
    try:
        return canonical_messages(value, notes)
    except ValueError as error:
        raise ValueError(f"column {column!r}: {error}") from None


def messages_in_column(row: Row, column: str, role: str, notes: list[str] | None) -> JSON:
    """The messages in a text or another form of a conversation; any other value unchanged."""
    from rl_core.data.message_forms import messages_in_text
    from rl_core.data.row_forms import conversation_in

    value = conversation_in(row[column], role)
    if isinstance(value, str):
        value = messages_in_text(value)
    if isinstance(value, str) and column in CONVERSATIONS:
        value = json_value(value)
    if value is not row[column] and notes is not None:
        notes.append(f"column {column!r} read as {len(value)} messages")
    if isinstance(value, str) and column != "messages":
        rest = row.get("input") if column == "instruction" else None
        if rest and not isinstance(rest, str):
            raise ValueError(
                f"column 'input' next to 'instruction' must be a text, is {shorten(rest)}"
            )
        if rest:
            value = f"{value}\n\n{rest}"
        value = {"role": role, "content": value}
    # One message, as ShareGPT's pairs have it, is a conversation.
    return [value] if isinstance(value, dict) else value


def row_tools(row: Row, notes: list[str] | None = None) -> list[JSONObject] | None:
    """The tools in a row's column `tools`, as of canonical_tools. Raises ValueError."""
    try:
        return canonical_tools(row.get("tools"), notes)
    except ValueError as error:
        raise ValueError(f"column 'tools' {error}{renaming('tools')}") from None


class TaskOrder(Protocol):
    def row_index(self, position: int) -> int:
        """Index among the kept rows of the row at a position."""
        ...


class RowOrder:
    """The row at each position: every epoch is a new permutation, drawn from the seed and its
    number."""

    def __init__(self, num_rows: int, seed: int, shuffle: bool):
        self.num_rows = num_rows
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = -1
        self.permutation: np.ndarray | None = None

    def row_index(self, position: int) -> int:
        epoch, offset = divmod(position, self.num_rows)
        if not self.shuffle:
            return offset
        if epoch != self.epoch:
            # RandomState's stream never changes, unlike default_rng's: a run may resume with
            # another numpy.
            random = np.random.RandomState(counter_seed(self.seed, "order", epoch))
            self.epoch, self.permutation = epoch, random.permutation(self.num_rows)
        assert self.permutation is not None
        return int(self.permutation[offset])


class Tasks(Protocol):
    """Tasks of one or several environments, in the order in which a run draws them."""

    @property
    def sources(self) -> Sequence[TaskSource]: ...

    def __len__(self) -> int: ...

    def task(self, position: int) -> Task: ...

    def num_before(self, position: int) -> list[int]: ...


class TaskSource:
    """The tasks of one environment's split, in order. data/tasks/task_mix.py mixes those of several
    environments."""

    def __init__(
        self,
        rows: Sequence,
        *,
        env: str,
        split: str,
        seed: int,
        shuffle: bool,
        is_pairs: bool = False,
        files: Sequence[tuple[str, int]] = (),
    ):
        """`files`: names and row counts of load_rows(); empty for rows of load_tasks()."""
        self.rows = rows
        self.env = env
        self.split = split
        self.seed = seed
        self.shuffle = shuffle
        self.is_pairs = is_pairs
        self.files = files
        self.sources: list[TaskSource] = [self]
        # Reason other than length -> number of pairs that are left out for it.
        self.left_out: Counter[str] = Counter()
        self.keep(range(len(rows)))

    def __len__(self) -> int:
        return len(self.kept)

    def __iter__(self) -> Iterator[Task]:
        """Every task once, in the file's order."""
        return map(self.task_of_row, self.kept)

    def task(self, position: int) -> Task:
        """The task at a position, the number of tasks drawn since the run began, over all
        epochs."""
        return self.task_of_row(self.kept[self.order.row_index(position)])

    def task_of_row(self, index: int) -> Task:
        location = row_place(index, self.files, self.split)
        row, folder = self.rows[index], self.folder_of(index)
        return make_task(row, index, self.env, self.split, self.is_pairs, location, folder)

    def folder_of(self, index: int) -> Path | None:
        """The folder in which paths of a row's images begin."""
        return data_folder(row_source(index, self.files)[0])

    def num_before(self, position: int) -> list[int]:
        """Number of tasks of each source before a position."""
        return [position]

    def keep(self, indices: Sequence[int]) -> None:
        """Keeps only these rows. Their ids do not change."""
        if not indices:
            flag = self.split.partition("/")[0]
            fix = f"no row; give some by --data.{flag} or load_tasks({flag!r})"
            if len(self.rows):
                fix = "no row that fits; raise --max_prompt_tokens"
            if self.left_out.total() == len(self.rows) > 0:
                fix = f"no pair with a preference: all have {' or '.join(self.left_out)}"
            raise ValueError(f"{self.env}: the {self.split} data set has {fix}")
        self.kept = indices
        self.draw_by(RowOrder(len(indices), self.seed, self.shuffle))

    def draw_by(self, order: TaskOrder) -> None:
        self.order = order
