"""System messages, history and images in columns next to a row's prompt."""

from __future__ import annotations

import re

from rl_core.data.canonical_messages import canonical_messages
from rl_core.data.context_columns import SYSTEM_COLUMNS, renaming
from rl_core.data.image_columns import place_images, row_images
from rl_core.data.image_parts import IMAGE_COLUMNS
from rl_core.data.messages import MEDIA_KEYS, NOT_READ, as_context, shorten, text_of
from rl_core.types import JSON, Message, Row

# Marks in a text for the entries of a column of videos or audio.
MEDIA = re.compile("<(video|audio)>")


def opened(row: Row, messages: list[Message], notes: list[str] | None) -> list[Message]:
    """The messages behind those of a row's columns `system` or `system_prompt` and `history`, with
    the images of its columns. Raises ValueError for two system messages that differ."""
    if urls := row_images(row):
        messages = place_images(messages, urls)
    media = [column for column in MEDIA_KEYS if column in row and column not in IMAGE_COLUMNS]
    has_mark = bool(media) and any(MEDIA.search(text_of(message)) for message in messages)
    for column in media:
        if has_mark and row[column] not in (None, [], ""):
            raise ValueError(f"column {column!r}, to which a mark in the text points, {NOT_READ}")
    texts = {}
    for column in SYSTEM_COLUMNS:
        text = row.get(column)
        if text is not None and not isinstance(text, str):
            raise ValueError(
                f"column {column!r} must be a text, is {shorten(text)}{renaming(column)}"
            )
        if text and text.strip():
            texts[f"column {column!r}"] = text
    has_system = bool(messages) and messages[0]["role"] == "system"
    if has_system and texts:
        texts["the messages"] = text_of(messages[0])
    if len({text.strip() for text in texts.values()}) > 1:
        raise ValueError(
            f"{' and '.join(texts)} have system messages that differ: leave one of them out"
            f"{renaming(next(column for column in SYSTEM_COLUMNS if row.get(column)))}"
        )
    opening = messages[:has_system]
    if texts and not has_system:
        opening = canonical_messages([{"role": "system", "content": next(iter(texts.values()))}])
        if notes is not None:
            notes.append(f"{next(iter(texts))} read as a system message")
    return opening + row_history(row, notes) + messages[has_system:]


def row_history(row: Row, notes: list[str] | None = None) -> list[Message]:
    """The turns in a row's column `history`: messages, or pairs of a question and its answer. They
    are context. Raises ValueError for anything else."""
    history = row.get("history")
    if history is None or (isinstance(history, (str, list, tuple)) and not history):
        return []
    messages: list[JSON] = []
    for turn in history if isinstance(history, (list, tuple)) else [None]:
        if isinstance(turn, dict):
            messages.append(turn)
        elif isinstance(turn, (list, tuple)) and [type(text) for text in turn] == [str, str]:
            messages.append({"role": "user", "content": turn[0]})
            messages.append({"role": "assistant", "content": turn[1]})
        else:
            raise ValueError(
                "column 'history' must be a list of messages, or of pairs of a question and its "
                f"answer; is {shorten(history)}{renaming('history')}"
            )
    try:
        read = canonical_messages(messages)
    except ValueError as error:
        raise ValueError(f"column 'history': {error}{renaming('history')}") from None
    if notes is not None:
        notes.append("column 'history' read as context")
    return as_context(read)
