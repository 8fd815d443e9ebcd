"""Columns that nothing reads, and the columns of prompts and labels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rl_core.config import Config
from rl_core.data.context_columns import CONTEXT_COLUMNS, SYSTEM_COLUMNS
from rl_core.data.image_columns import MARK, holds_image, holds_pixels
from rl_core.data.image_parts import IMAGE_COLUMNS, SIDE_IMAGES, has_image
from rl_core.data.messages import is_filled, text_of
from rl_core.data.task_rows import CONVERSATIONS, PROMPT_COLUMNS
from rl_core.data.warnings.read_row import ColumnUse, ReadRow
from rl_core.data.warnings.row_remarks import ABOUT
from rl_core.types import JSON, Message, Row

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
class NamedColumns:
    """Columns of the first rows of a data set; a renamed one is `name=path`."""

    prompt: list[str] = field(default_factory=list)
    label: list[str] = field(default_factory=list)  # Replies, or columns that hooks name.
    unread: list[str] = field(default_factory=list)


def name_columns(use: ColumnUse) -> NamedColumns:
    """The columns of prompts, of labels and unread ones among the first rows of a data set."""
    if not use.filled:
        return NamedColumns()
    source, columns, filled = use.source, use.config.data.columns, use.filled
    row = source.rows[source.kept[0]]
    hidden, renamed = [], set()
    if columns:
        from rl_core.data.column_names import MISSING, RenamedColumns, nested_value

        renamed = {name for name, path in columns.items() if nested_value(row, path) is not MISSING}
        if isinstance(source.rows, RenamedColumns):
            hidden = [name for name in source.rows.hidden if name in source.rows.rows[0]]
    shown = {name: f"{name}={columns[name]}" for name in renamed & filled.keys()}
    if use.env is None:
        labels = [name for name in use.read if name not in OF_PROMPTS]
        prompts = [name for name in use.read if name in OF_PROMPTS | use.of_messages]
        # A column of conversations holds both.
        conversations = [name for name in prompts if name in PROMPT_COLUMNS]
        prompts, labels = prompts or labels, labels or conversations
    else:
        takes_all = any(hook.takes_all for hook in use.env.hooks.values())
        prompts = list(use.read)
        labels = [n for n in filled if n in use.of_hooks or (takes_all and n not in use.read)]
    used = {*prompts, *labels} | renamed_columns(row | dict.fromkeys(hidden), columns)
    return NamedColumns(
        prompt=[shown.get(name, name) for name in prompts],
        label=[shown.get(name, name) for name in labels],
        unread=[name for name in (*hidden, *filled) if name not in used],
    )


def renamed_columns(row: Row, columns: dict[str, str]) -> set[str]:
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


def fix_of(name: str, prompt: list[str], lost: Iterable[str], nested: set[str]) -> str:
    """Advice to read column `name` of the `lost` ones, of which `nested` hold lists or objects.
    `prompt`: columns of the prompt."""
    prompt = [column.partition("=")[0] for column in prompt]
    prompts = [column for column in prompt if column in PROMPT_COLUMNS]
    system = [column for column in SYSTEM_COLUMNS if column in prompt]
    advice = advice_of(name)
    if advice == READ_PROMPT and not prompts:
        return "it is read where chosen and rejected are replies alone"
    if advice == READ_SYSTEM and name in nested:
        advice = WRITE
    if advice == WRITE and not prompts:
        advice = READ_SYSTEM
    if advice == READ_SYSTEM and system:
        return f"add its text to column {system[0]!r}"
    target = "input" if "instruction" in prompt else "system"
    same = [repr(column) for column in lost if advice_of(column) == READ_SYSTEM]
    if advice == READ_SYSTEM and len(same) > 1:
        return f"write {' and '.join(same)} into one column, for --data.columns {target}=NAME"
    return advice.format(name=name, prompt="".join(prompts[:1]), system=target)


def image_remarks(
    sees: bool, row: ReadRow, messages: list[Message], used: set[str]
) -> Iterator[str]:
    """Remarks on images in columns that nothing reads, and on marks of images that are text."""
    has_images = any(map(has_image, messages))
    others = [name for name in row if name not in used and holds_image(dict.get(row, name))]
    for name in others:
        if has_images and not holds_pixels(dict.get(row, name)):
            continue  # The path of an image that the prompt has, or of another file.
        yield (
            f"column {name!r} holds an image that nothing reads; --data.columns image={name} puts "
            "it into the prompt"
        )
    if not sees or others or has_images:
        return
    if any(MARK in text_of(message) for message in messages):
        yield (
            f"the prompt has the mark {MARK}, which is read as text: the row has no column "
            "'image' or 'images'; --data.columns image=NAME names another one"
        )
