"""Marks of a chat template in the texts of prompts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress

from rl_core.data.chat import Chat
from rl_core.data.messages import text_of
from rl_core.data.rendering import PROBE
from rl_core.data.thought_marks import MARKS
from rl_core.data.token_marks import unmarked
from rl_core.types import Message

BETWEEN_MARKS = re.compile(r"(?<=[>\]])(?=[<\[])")


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
