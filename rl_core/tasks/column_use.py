"""The columns from which prompts and labels of a data set are made, and the columns that nothing
reads."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import cast

from rl_core.config import Config
from rl_core.data.chat import Chat, unmarked
from rl_core.data.column_names import MISSING, RenamedColumns, nested_value
from rl_core.data.images import IMAGE_COLUMNS, MARK, has_image, holds_image, with_images
from rl_core.data.messages import text_of
from rl_core.data.preference_pairs import PAIR, pair_messages
from rl_core.data.rendering import PROBE
from rl_core.data.row_forms import read_form
from rl_core.data.sft_samples import sft_messages
from rl_core.data.tasks import (
    CONTEXT_COLUMNS,
    CONVERSATIONS,
    LEFT_OUT,
    PROMPT_COLUMNS,
    SYSTEM_COLUMNS,
    TaskSource,
    prompt_messages,
    row_tools,
    row_variables,
)
from rl_core.data.thoughts import MARKS
from rl_core.sampling.env import Env
from rl_core.types import JSON, Message, Row

NUM_ROWS = 200  # The first rows of a data set are looked at.
# Columns of prompts; other columns that a row's samples are made of hold labels.
OF_PROMPTS = {*PROMPT_COLUMNS, *CONTEXT_COLUMNS, *IMAGE_COLUMNS, "context"}
INSTRUCTIONS = re.compile(
    "system|instruct|persona|context|guideline|passage|article|document|story|starter|"
    "^(options|choices)$|^op(tion_?)?[a-e]$",
    re.I,
)
TOOLS = re.compile("^(available_tools|functions|function_descriptions?)$", re.I)
# Columns about others, such as context_id.
ABOUT = re.compile("_(ids?|id_list|type|source|num|len|length)$", re.I)
REPLIES = ("response", "completion", "output", "solution", "answer")
REASONS = re.compile("^solution$|reason|think|thought|rationale|explanation|(^|_)cot($|_)", re.I)
MIN_REPLY_CHARS = 20  # A shorter text may be at the end of a prompt by chance.
BETWEEN_MARKS = re.compile(r"(?<=[>\]])(?=[<\[])")
# Columns of the scores of the two replies of a pair.
SCORES = (
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("chosen_rating", "rejected_rating"),
)


class ReadRow(dict):
    """A row that keeps the names of its columns of which a value was read."""

    def __init__(self, row: Row):
        super().__init__(row)
        self.read: dict[str, None] = {}
        self.made: set[str] = set()  # Columns that were made of others.

    def __or__(self, made: Row) -> ReadRow:
        """The row with columns made of others. Reading these adds no name."""
        row = ReadRow(super().__or__(made))
        row.read, row.made = self.read, self.made
        row.made |= made.keys()
        return row

    def __getitem__(self, name: str) -> JSON:
        return self.get(name) if name in self else super().__getitem__(name)

    def get(self, name: str, default: JSON = None) -> JSON:
        value = super().get(name, default)
        if is_filled(value) and name not in self.made:
            self.read[name] = None
        return value


@dataclass(kw_only=True, slots=True)
class ColumnUse:
    """Columns of the first rows of a data set; a renamed one is `name=path`."""

    prompt: list[str] = field(default_factory=list)
    label: list[str] = field(default_factory=list)  # Replies, or columns that hooks name.
    unread: list[str] = field(default_factory=list)
    num_rows: int = 0
    # Number of rows by unread column that may be part of their prompt.
    lost: Counter[str] = field(default_factory=Counter)
    nested: set[str] = field(default_factory=set)  # Lost columns of lists or objects.
    # Numbers of the rows, from 0, by remark on their messages.
    remarks: dict[str, list[int]] = field(default_factory=dict)


def is_filled(value: JSON) -> bool:
    return value is not None and not (isinstance(value, (str, list, dict)) and not value)


def read_messages(config: Config, row: Row, notes: list[str]) -> list[Message]:
    """The messages of a row of read_row(), read as training reads them. `notes` collects a line for
    each value that is mapped to another form. Raises ValueError for a row that is refused or left
    out."""
    row_tools(row, notes)
    row_variables(row)
    if config.is_rl:
        return prompt_messages(row, notes)
    if config.algorithm == "sft":
        return sft_messages(row, notes)
    (context, chosen), (_, rejected) = pair_messages(row, notes)
    return [*context, *chosen, *rejected]


def column_use(
    config: Config, source: TaskSource, env: Env | None, chat: Chat | None = None
) -> ColumnUse:
    """The use of the columns of the first rows. `chat`: the chat that renders the rows."""
    use, read, filled = ColumnUse(), {}, {}
    columns = config.data.columns if source.files else {}
    of_hooks = hook_columns(env) if env else set()
    of_messages: set[str] = set()  # Columns of which a form makes `messages`.
    marks = template_marks(chat) if chat else None
    for index in islice(source.kept, NUM_ROWS):
        original, notes = with_images(source.rows[index], source.folder_of(index)), []
        row = cast(ReadRow, read_form(ReadRow(original), PROMPT_COLUMNS, notes))
        row = row if row.made else ReadRow(original)
        messages = read_messages(config, row, notes)
        filled |= {name: None for name, value in original.items() if is_filled(value)}
        read |= row.read
        if "messages" in row.made and "chosen" not in row.made:
            of_messages |= row.read.keys()
        use.num_rows += 1
        used = row.read.keys() | row.made | of_hooks | roots(original, columns)
        lost = lost_columns(config, row, messages, used)
        use.lost.update(lost)
        use.nested.update(name for name in lost if not isinstance(dict.get(row, name), str))
        remarks = [*reply_remarks(config, row, messages, notes, used)]
        remarks += [*mark_remarks(chat, marks, messages), *label_remarks(config, row)]
        remarks += image_remarks(chat, row, messages, used)
        for remark in remarks:
            use.remarks.setdefault(remark, []).append(index)
    if filled:
        name_columns(use, source, env, columns, read, filled, of_hooks, of_messages)
    return use


def name_columns(
    use: ColumnUse,
    source: TaskSource,
    env: Env | None,
    columns: dict[str, str],
    read: dict[str, None],
    filled: dict[str, None],
    of_hooks: set[str],
    of_messages: set[str],
) -> None:
    """Sets the columns of prompts, of labels and unread ones. `columns`: --data.columns."""
    row = source.rows[source.kept[0]]
    renamed = {name for name, path in columns.items() if nested_value(row, path) is not MISSING}
    shown = {name: f"{name}={columns[name]}" for name in renamed & filled.keys()}
    if env is None:
        labels = [name for name in read if name not in OF_PROMPTS]
        prompts = [name for name in read if name in OF_PROMPTS | of_messages]
        # A column of conversations holds both.
        conversations = [name for name in prompts if name in PROMPT_COLUMNS]
        prompts, labels = prompts or labels, labels or conversations
    else:
        takes_all = any(hook.takes_all for hook in env.hooks.values())
        prompts = list(read)
        labels = [name for name in filled if name in of_hooks or (takes_all and name not in read)]
    hidden = []
    if isinstance(source.rows, RenamedColumns):
        hidden = [name for name in source.rows.hidden if name in source.rows.rows[0]]
    used = {*prompts, *labels} | roots(row | dict.fromkeys(hidden), columns)
    use.prompt = [shown.get(name, name) for name in prompts]
    use.label = [shown.get(name, name) for name in labels]
    use.unread = [name for name in (*hidden, *filled) if name not in used]


def hook_columns(env: Env) -> set[str]:
    """Columns that hooks and system prompts of an environment name."""
    names = set().union(*(hook.named - hook.ours for hook in env.hooks.values()))
    return names.union(*(prompt.columns for prompt in env.turn_loop.system_prompts.values()))


def roots(row: Row, columns: dict[str, str]) -> set[str]:
    """The columns of a row that are read by another name, as a whole or by a path."""
    paths = columns.values()
    return {name for name in row if any(f"{path}.".startswith(f"{name}.") for path in paths)}


def lost_columns(
    config: Config, row: ReadRow, messages: list[Message], used: set[str]
) -> list[str]:
    """Unread columns that look like a part of the prompt and have a text that is not in the
    messages. In RL next to a conversation also the prompts that are in it, such as `problem`."""
    is_told = config.is_rl and not row.read.keys().isdisjoint(CONVERSATIONS)
    conversation = "\n".join(map(text_of, messages))
    names = []
    for name, value in dict.items(row):
        is_prompt = name in PROMPT_COLUMNS
        is_named = INSTRUCTIONS.search(name) and not ABOUT.search(name)
        if name in used or not (is_prompt or is_named or TOOLS.search(name)):
            continue
        is_lost = any(text.strip() not in conversation for text in texts_in(value))
        if is_lost or (is_told and is_prompt and is_filled(value)):
            names.append(name)
    return names


def texts_in(value: JSON) -> Iterator[str]:
    """The texts of a value, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from texts_in(each)


def reply_remarks(
    config: Config, row: ReadRow, messages: list[Message], notes: list[str], used: set[str]
) -> Iterator[str]:
    """Remarks on replies that are left out, that prompts end with, or whose thoughts are not
    read."""
    for column in CONVERSATIONS:
        if (note := LEFT_OUT.format(column)) in notes:
            yield f"{note}; --data.columns prompt={column} keeps them"
    prompt = next((name for name in PROMPT_COLUMNS if name in row.read), "")
    if prompt in ("", *CONVERSATIONS):
        return
    asked = [text_of(message).rstrip() for message in messages if message["role"] == "user"]
    others = [name for name in PROMPT_COLUMNS if name not in ("input", prompt) and row.get(name)]
    conversation = "\n".join(map(text_of, messages))
    can_be_reason = config.algorithm == "sft" and "reasoning_content" not in messages[-1]
    for name, value in dict.items(row):
        text = value.strip() if isinstance(value, str) else ""
        if name in REPLIES and len(text) >= MIN_REPLY_CHARS and asked and asked[-1].endswith(text):
            fix = f"{others[0]}={others[0]}" if others else "prompt=NAME"
            yield (
                f"column {prompt!r} ends with the text of {name!r}, so that prompts give it away; "
                f"--data.columns {fix} reads another prompt"
            )
        is_reason = REASONS.search(name) and not ABOUT.search(name) and name not in used
        is_longer = len(text) > len(text_of(messages[-1])) and text not in conversation
        if can_be_reason and is_reason and is_longer:
            yield (
                f"column {name!r} is longer than the reply and not read; --data.columns "
                f"response={name} or reasoning_content={name} trains it"
            )


def image_remarks(
    chat: Chat | None, row: ReadRow, messages: list[Message], used: set[str]
) -> Iterator[str]:
    """Remarks on images in columns that nothing reads, and on marks of images that are text."""
    others = [name for name in row if name not in used and holds_image(dict.get(row, name))]
    for name in others:
        yield (
            f"column {name!r} holds an image that nothing reads; --data.columns image={name} puts "
            "it into the prompt"
        )
    is_blind = chat is None or isinstance(chat.vision, str)
    if is_blind or others or any(map(has_image, messages)):
        return
    if any(MARK in text_of(message) for message in messages):
        yield (
            f"the prompt has the mark {MARK}, which is read as text: the row has no column "
            "'image' or 'images'; --data.columns image=NAME names another one"
        )


def label_remarks(config: Config, row: ReadRow) -> Iterator[str]:
    """Remarks on columns that mark a reply as bad."""
    if config.algorithm == "sft" and str(dict.get(row, "label")).lower() == "false":
        yield (
            "column 'label' is false, which marks a bad reply in KTO's data sets, and SFT trains "
            "it; leave these rows out, or make pairs for --algorithm dpo"
        )
    for names in SCORES if not config.is_rl else ():
        chosen, rejected = (dict.get(row, name) for name in names)
        if not isinstance(chosen, (int, float)) or not isinstance(rejected, (int, float)):
            continue
        if chosen < rejected:
            yield (
                f"column {names[0]!r} is below {names[1]!r}: the worse reply is preferred; leave "
                "these rows out, or if all are so, --data.columns "
                "chosen=rejected,rejected=chosen"
            )


def template_marks(chat: Chat) -> re.Pattern[str]:
    """Special tokens, and the lines that the template writes around a message."""
    rendered = PROBE
    with suppress(ValueError):  # The template refuses a lone message.
        rendered = unmarked(chat.render([{"role": "user", "content": PROBE}]))
    before, _, behind = rendered.partition(PROBE)
    lines = [before.rpartition("\n")[2], *behind.split("\n")]
    pieces = [piece.strip() for line in lines for piece in re.split(BETWEEN_MARKS, line)]
    thoughts = {*MARKS, *MARKS.values()}
    marks = [re.escape(p) for p in pieces if len(p) > 2 and p not in thoughts]
    marks = [mark for mark in marks if re.search(r"[^\w\s]", mark)]
    # Special tokens come first, because a line may begin with one.
    return re.compile("|".join([chat.special_token.pattern, *marks]))


def mark_remarks(
    chat: Chat | None, marks: re.Pattern[str] | None, messages: list[Message]
) -> Iterator[str]:
    """A remark on messages that are not replies and that have a mark of the template."""
    texts = [text_of(message) for message in messages if message["role"] != "assistant"]
    matches = [marks.search(text) for text in texts] if marks else []
    mark = next((match[0] for match in matches if match), None)
    if mark is None or chat is None:
        return
    effect = "begins another message for the model"
    if mark in chat.special_ids:
        effect = "is read as text, and no message begins or ends there"
    yield (
        f"the prompt has {mark!r}, a mark of the chat template, which {effect}; remove it, or "
        "give the conversation as a list in column 'messages'"
    )


def fix_of(name: str, use: ColumnUse) -> str:
    """Advice to read a lost column."""
    prompt = [column.partition("=")[0] for column in use.prompt]
    prompts = [column for column in prompt if column in PROMPT_COLUMNS]
    system = [column for column in SYSTEM_COLUMNS if column in prompt]
    if name in PROMPT_COLUMNS:
        fix = f"--data.columns prompt={name} reads it"
        return fix if prompts else f"it is read where {' and '.join(PAIR)} are replies alone"
    if TOOLS.search(name):
        return f"--data.columns tools={name} reads it"
    if name in use.nested and prompts:
        return f"write its texts into column {prompts[0]!r}"
    if system:
        return f"add its text to column {system[0]!r}"
    target = "input" if "instruction" in prompt else "system"
    return f"--data.columns {target}={name} reads it"
