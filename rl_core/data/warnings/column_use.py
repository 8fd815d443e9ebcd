"""The columns from which prompts and labels of a data set are made, and the columns that nothing
reads."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import cast

from rl_core.config import Config
from rl_core.data.chat import Chat
from rl_core.data.images import IMAGE_COLUMNS, SIDE_IMAGES, has_image, holds_image, with_images
from rl_core.data.messages import MESSAGE_KEYS, is_filled, text_of
from rl_core.data.row_forms import read_form
from rl_core.data.task_rows import (
    CONTEXT_COLUMNS,
    CONVERSATIONS,
    PROMPT_COLUMNS,
    SYSTEM_COLUMNS,
    TaskSource,
    prompt_messages,
    row_tools,
    row_variables,
)
from rl_core.data.warnings.row_remarks import (
    ABOUT,
    ReadRow,
    image_remarks,
    label_remarks,
    mark_remarks,
    reply_remarks,
    template_marks,
    tool_remarks,
)
from rl_core.sampling.env import Env
from rl_core.types import JSON, Message, Row

NUM_ROWS = 200  # The first rows of each data set are checked.
# Columns of prompts; other columns that a row's samples are made of hold labels.
OF_PROMPTS = {*PROMPT_COLUMNS, *CONTEXT_COLUMNS, *IMAGE_COLUMNS, *SIDE_IMAGES, "context"}
INSTRUCTIONS = re.compile(
    "system|instruct|persona|context|guideline|passage|article|document|story|starter|hint|"
    "premise|hypothesis|lecture|initial_reason|(^|_)tables?$",
    re.I,
)
# Columns of the answers to choose from.
CHOICES = re.compile(
    r"^(options|choices|op(tion_?)?[a-e]|(option|choice|distractor)_?\w)$|^incorrect.?answer|"
    "(?-i:^[A-E]$)",
    re.I,
)
# Columns that hold the prompt; the last ones of some sets in which `prompt` holds something else.
PROMPTS = re.compile(
    f"^((?-i:{'|'.join(PROMPT_COLUMNS)})|query|user_prompt|(problem|task)_(statement|description)|"
    "question_content)$",
    re.I,
)
MEDIA = ("video", "videos", "audio", "audios")
LONG_CHARS = 200  # Texts of other columns that nothing reads are named from this length on.
TOOLS = re.compile("^(available_tools|functions|function_descriptions?)$", re.I)
READ_PROMPT = "--data.columns prompt={name} reads it"
WRITE = "write its texts into column {prompt!r}"
READ_SYSTEM = "--data.columns {system}={name} reads it"
# Unread columns that may be part of a prompt, and advice about them. The first match counts.
LOST = (
    (
        re.compile(f"^({'|'.join(MEDIA)})$"),
        "models are trained on text and images: leave out rows that need it",
    ),
    (PROMPTS, READ_PROMPT),
    (TOOLS, "--data.columns tools={name} reads it"),
    (CHOICES, WRITE),
    (INSTRUCTIONS, READ_SYSTEM),
)


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
    # Number of rows by another unread column of long texts or lists, and by key of an assistant's
    # message that neither rl_core nor the chat template reads.
    long: Counter[str] = field(default_factory=Counter)
    keys: Counter[str] = field(default_factory=Counter)
    equal: int = 0  # Number of rows whose prompt is the most frequent one, but for RL.
    equal_prompt: str = ""
    # Numbers of the rows, from 0, by remark on their messages.
    remarks: dict[str, list[int]] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class SeenColumns:
    """Columns of the first rows, by their use."""

    of_hooks: set[str]  # Columns that hooks name.
    read: dict[str, None] = field(default_factory=dict)
    filled: dict[str, None] = field(default_factory=dict)
    of_messages: set[str] = field(default_factory=set)  # Columns that a form makes `messages` of.


def read_messages(config: Config, row: Row, notes: list[str]) -> list[Message]:
    """The messages of a row of read_row(), read as training reads them. `notes` collects a line for
    each value that is mapped to another form. Raises ValueError for a row that is refused or left
    out."""
    row_tools(row, notes)
    row_variables(row)
    if config.is_rl:
        return prompt_messages(row, notes)
    if config.algorithm == "sft":
        from rl_core.data.sft_samples import sft_messages

        return sft_messages(row, notes)
    from rl_core.data.preference_pairs import labelled_messages, pair_messages

    if config.algorithm == "kto":
        return labelled_messages(row, notes)
    (context, chosen), (_, rejected) = pair_messages(row, notes)
    return [*context, *chosen, *rejected]


def column_use(
    config: Config, source: TaskSource, env: Env | None, chat: Chat | None = None
) -> ColumnUse:
    """The use of the columns of the first rows. `chat`: the chat that renders the rows."""
    use, asked, columns = ColumnUse(), Counter(), config.data.columns
    seen = SeenColumns(of_hooks=hook_columns(env) if env else set())
    sees_all = config.is_rl and (env is None or sees_rows(env))
    marks = template_marks(chat) if chat else None
    for index in islice(source.kept, NUM_ROWS):
        original, notes = with_images(source.rows[index], source.folder_of(index)), []
        row = cast(ReadRow, read_form(ReadRow(original), PROMPT_COLUMNS, notes))
        row = row if row.made else ReadRow(original)
        messages = read_messages(config, row, notes)
        seen.filled |= {name: None for name, value in original.items() if is_filled(value)}
        seen.read |= row.read
        if "messages" in row.made and "chosen" not in row.made:
            seen.of_messages |= row.read.keys()
        use.num_rows += 1
        used = row.read.keys() | row.made | seen.of_hooks | roots(original, columns)
        lost = lost_columns(config, row, messages, used)
        use.lost.update(lost)
        if not config.is_rl:
            use.keys.update(unread_keys(chat, messages))
        use.nested.update(name for name in lost if not isinstance(dict.get(row, name), str))
        remarks = [*reply_remarks(config, row, messages, notes, used)]
        remarks += [*mark_remarks(chat, marks, messages), *label_remarks(config, row)]
        remarks += image_remarks(chat, row, messages, used)
        remarks += tool_remarks(row, messages) if not config.is_rl else ()
        named = {name for name in row if any(f"column {name!r}" in remark for remark in remarks)}
        if not sees_all:
            use.long.update(long_columns(row, messages, used.union(lost, named)))
        if not config.is_rl and not any(map(has_image, messages)):
            asked[tuple(text_of(m) for m in messages if m["role"] != "assistant")] += 1
        for remark in remarks:
            use.remarks.setdefault(remark, []).append(index)
    [(texts, use.equal)] = asked.most_common(1) or [((), 0)]
    use.equal_prompt = "\n".join(texts)
    if seen.filled:
        name_columns(use, seen, source, env, columns)
    return use


def name_columns(
    use: ColumnUse,
    seen: SeenColumns,
    source: TaskSource,
    env: Env | None,
    columns: dict[str, str],
) -> None:
    """Sets the columns of prompts, of labels and unread ones. `columns`: --data.columns."""
    read, filled, row = seen.read, seen.filled, source.rows[source.kept[0]]
    hidden, renamed = [], set()
    if columns:
        from rl_core.data.column_names import MISSING, RenamedColumns, nested_value

        renamed = {name for name, path in columns.items() if nested_value(row, path) is not MISSING}
        if isinstance(source.rows, RenamedColumns):
            hidden = [name for name in source.rows.hidden if name in source.rows.rows[0]]
    shown = {name: f"{name}={columns[name]}" for name in renamed & filled.keys()}
    if env is None:
        labels = [name for name in read if name not in OF_PROMPTS]
        prompts = [name for name in read if name in OF_PROMPTS | seen.of_messages]
        # A column of conversations holds both.
        conversations = [name for name in prompts if name in PROMPT_COLUMNS]
        prompts, labels = prompts or labels, labels or conversations
    else:
        takes_all = any(hook.takes_all for hook in env.hooks.values())
        prompts = list(read)
        labels = [
            name for name in filled if name in seen.of_hooks or (takes_all and name not in read)
        ]
    used = {*prompts, *labels} | roots(row | dict.fromkeys(hidden), columns)
    use.prompt = [shown.get(name, name) for name in prompts]
    use.label = [shown.get(name, name) for name in labels]
    use.unread = [name for name in (*hidden, *filled) if name not in used]


def hook_columns(env: Env) -> set[str]:
    """Columns that hooks and system prompts of an environment name."""
    names = set().union(*(hook.named - hook.ours for hook in env.hooks.values()))
    return names.union(*(prompt.columns for prompt in env.turn_loop.system_prompts.values()))


def sees_rows(env: Env) -> bool:
    """True if a hook gets the whole row."""
    return any(hook.takes_all or "task" in hook.named for hook in env.hooks.values())


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
        if name in used or not advice_of(name):
            continue
        is_lost = any(text.strip() not in conversation for text in texts_in(value))
        is_lost = is_lost or (name in MEDIA and is_filled(value))
        if is_lost or (is_told and name in PROMPT_COLUMNS and is_filled(value)):
            names.append(name)
    return names


def long_columns(row: ReadRow, messages: list[Message], known: set[str]) -> Iterator[str]:
    """Other columns with a long text, or a list, that is not in the messages."""
    texts = [text_of(message).strip() for message in messages]
    conversation = "\n".join(texts)
    for name, value in dict.items(row):
        if name in known or holds_image(value) or not is_filled(value):
            continue
        lost = [text for text in texts_in(value) if text.strip() not in conversation]
        if isinstance(value, (list, tuple)):
            is_long = bool(lost) or not any(texts_in(value))
        else:  # A text with all messages renders them.
            is_copy = isinstance(value, str) and all(text in value for text in texts)
            is_long = sum(map(len, lost)) >= LONG_CHARS and not is_copy
        if is_long:
            yield name


def unread_keys(chat: Chat | None, messages: list[Message]) -> set[str]:
    """Keys of assistants' messages that nothing reads."""
    words = chat.template_words if chat else ()
    keys = {key for each in messages if each["role"] == "assistant" for key in each}
    return keys.difference(MESSAGE_KEYS, words)


def texts_in(value: JSON) -> Iterator[str]:
    """The texts of a value, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from texts_in(each)


def advice_of(name: str) -> str:
    """The advice of LOST about a column; "" if it is no part of a prompt by its name."""
    advice = (advice for pattern, advice in LOST if pattern.search(name))
    return "" if ABOUT.search(name) else next(advice, "")


def fix_of(name: str, use: ColumnUse) -> str:
    """Advice to read a lost column."""
    prompt = [column.partition("=")[0] for column in use.prompt]
    prompts = [column for column in prompt if column in PROMPT_COLUMNS]
    system = [column for column in SYSTEM_COLUMNS if column in prompt]
    advice = advice_of(name)
    if advice == READ_PROMPT and not prompts:
        return "it is read where chosen and rejected are replies alone"
    if advice == READ_SYSTEM and name in use.nested:
        advice = WRITE
    if advice == WRITE and not prompts:
        advice = READ_SYSTEM
    if advice == READ_SYSTEM and system:
        return f"add its text to column {system[0]!r}"
    target = "input" if "instruction" in prompt else "system"
    same = [repr(column) for column in use.lost if advice_of(column) == READ_SYSTEM]
    if advice == READ_SYSTEM and len(same) > 1:
        return f"write {' and '.join(same)} into one column, for --data.columns {target}=NAME"
    return advice.format(name=name, prompt="".join(prompts[:1]), system=target)
