"""Remarks on single rows: values that are trained or left out in a way that may not be meant."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress

from rl_core.config import Config
from rl_core.data.chat import Chat, unmarked
from rl_core.data.images import MARK, has_image, holds_image, holds_pixels
from rl_core.data.messages import TRAIN_KEYS, is_filled, text_of
from rl_core.data.rendering import PROBE
from rl_core.data.rows import is_trajectory
from rl_core.data.task_rows import CONVERSATIONS, LEFT_OUT, PROMPT_COLUMNS, row_tools, row_variables
from rl_core.data.thoughts import MARKS
from rl_core.types import JSON, Message, Row

REPLIES = ("response", "completion", "output", "solution", "answer")
REASONS = re.compile("^solution$|reason|think|thought|rationale|explanation|(^|_)cot($|_)", re.I)
MIN_REPLY_CHARS = 20  # A shorter text may be at the end of a prompt by chance.
BETWEEN_MARKS = re.compile(r"(?<=[>\]])(?=[<\[])")
# Columns that say whether a reply is good.
GOOD = re.compile(
    "^((is|was)_)?(correct|resolved|solved|passed|success|successful|verified|accepted|safe)$|"
    "^(label|target|reward|score)$|_(is_)?correct$|_passed$",
    re.I,
)
# Texts of these columns that mark a bad reply. Others, such as "no" or "bad", may be an answer.
FALSE = re.compile(r"\s*(false|incorrect|wrong|failed|failure|unsafe|undesirable)\s*", re.I)
TOOLS = re.compile(r"(^|\.)(tools|functions)$")
TEXT_CALL = re.compile(r'<tool_call>\s*\{\s*"name":\s*"([^"]+)"')
SCORE = re.compile("score|rating|reward", re.I)
# Columns about others, such as context_id.
ABOUT = re.compile("_(ids?|id_list|type|source|num|len|length)$", re.I)


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
    has_images = any(map(has_image, messages))
    others = [name for name in row if name not in used and holds_image(dict.get(row, name))]
    for name in others:
        if has_images and not holds_pixels(dict.get(row, name)):
            continue  # The path of an image that the prompt has, or of another file.
        yield (
            f"column {name!r} holds an image that nothing reads; --data.columns image={name} puts "
            "it into the prompt"
        )
    is_blind = chat is None or isinstance(chat.vision, str)
    if is_blind or others or has_images:
        return
    if any(MARK in text_of(message) for message in messages):
        yield (
            f"the prompt has the mark {MARK}, which is read as text: the row has no column "
            "'image' or 'images'; --data.columns image=NAME names another one"
        )


def label_remarks(config: Config, row: ReadRow) -> Iterator[str]:
    """Remarks on columns that mark a reply as bad."""
    # Rewards of episodes are chosen by --data.min_reward.
    is_trained = config.algorithm == "sft" and not is_trajectory(row)
    names = [name for name in row if GOOD.search(name) or name in TRAIN_KEYS]
    for name in names if is_trained else ():
        value = dict.get(row, name)
        is_number = isinstance(value, (int, float)) and name not in ("label", "target")
        is_text = isinstance(value, str)
        if value is False or (is_text and FALSE.fullmatch(value)) or (is_number and value == 0):
            kept = f"row[{name!r}] != {value!r}" if is_text else f"row[{name!r}]"
            shown = repr(value) if is_text else "false or 0"
            yield (
                f"column {name!r} is {shown}, which marks a bad reply, and SFT trains it; write "
                f"a file without such rows: load_dataset(...).filter(lambda row: {kept})"
                ".to_json(...)"
            )
    scores = [name for name in row if "chosen" in name and SCORE.search(name)]
    for name in scores if not config.is_rl else ():
        names = name, name.replace("chosen", "rejected")
        chosen, rejected = (dict.get(row, each) for each in names)
        if not isinstance(chosen, (int, float)) or not isinstance(rejected, (int, float)):
            continue
        if chosen < rejected:
            yield (
                f"column {names[0]!r} is below {names[1]!r}: the worse reply is preferred; leave "
                "these rows out, or if all are so, --data.columns "
                "chosen=rejected,rejected=chosen"
            )


def tool_remarks(row: ReadRow, messages: list[Message]) -> Iterator[str]:
    """A remark on replies that call a tool of which no prompt says anything."""
    called, texts = set(), [str(row_variables(row))]
    known = {tool["function"]["name"] for tool in row_tools(row) or ()}
    for message in messages:
        if message["role"] != "assistant":
            texts.append(text_of(message))
            continue
        called.update(call["function"]["name"] for call in message.get("tool_calls") or ())
        called.update(TEXT_CALL.findall(text_of(message)))
    prompts = "\n".join(texts)
    if not any(name not in known and name not in prompts for name in called):
        return
    fix = "give the rows a column 'tools'"
    if path := tools_path(row):
        fix = f"--data.columns tools={path} reads them"
    yield f"replies call a tool that neither column 'tools' nor a message names; {fix}"


def tools_path(row: Row) -> str | None:
    """The path to a nested value with the name of tools."""
    from rl_core.data.column_names import MISSING, nested_names, nested_value

    paths = [path for path in nested_names(dict(row)) if path != "tools" and TOOLS.search(path)]
    paths += [f"{column}.0.tools" for column in CONVERSATIONS]
    values = {path: nested_value(dict(row), path) for path in paths}
    return next(
        (path for path, value in values.items() if is_filled(value) and value is not MISSING), None
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
