"""Images in columns of rows, and the marks in texts that they replace.

An image of a column that has no position yet is {"type": "image"}; place_images() fills it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rl_core.data.image_parts import (
    IMAGE_COLUMNS,
    SIDE_IMAGES,
    is_image_url,
    is_picture,
    loaded_messages,
)
from rl_core.data.images import is_named, read_image
from rl_core.types import JSON, JSONObject, Message, Row

NUMBERED = re.compile(r"image_(\d+)")  # The columns of MMMU.
MARK = "<image>"
# The place of an image by its number, from 1: <image 1> in MMMU, <image1> in MathVision.
NUMBERED_MARK = re.compile(r"<image[ _]?(\d+)>")


def with_images(row: Row, folder: Path | None) -> Row:
    """The row with each image of its columns and messages as a data: URL. `folder`: of the data
    file. A row without images is returned itself. Raises ValueError with the column."""
    changed: Row = {}
    for column, value in row.items():
        try:
            if column in (*IMAGE_COLUMNS, *SIDE_IMAGES) or NUMBERED.fullmatch(column):
                loaded = loaded_column(value, folder)
            else:
                loaded = loaded_messages(value, folder)
        except ValueError as error:
            raise ValueError(f"column {column!r}: {error}") from None
        if loaded is not None:
            changed[column] = loaded
    return row | changed if changed else row


def loaded_column(value: JSON, folder: Path | None) -> list[str] | None:
    """The URLs of a column of images; None if it holds none. A text that names no file of an image
    is of another column, such as the container of an environment."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    is_empty = not values or (len(values) == 1 and values[0] is None)
    if is_empty or any(isinstance(v, str) and not is_named(v) for v in values):
        return None
    urls = []
    for number, each in enumerate(values, 1):
        try:
            urls.append(read_image(each, folder).url)
        except ValueError as error:
            raise ValueError(f"image {number}: {error}") from None
    return urls


def holds_image(value: object) -> bool:
    """True if a column of any name has images: pixels, or paths of files."""
    return holds_pixels(value) or any(map(is_image_name, values_of(value)))


def holds_pixels(value: object) -> bool:
    """True for images of PIL, data: URLs, and datasets.Image's bytes."""
    return any(is_picture(each) or is_image_url(each) for each in values_of(value))


def is_image_name(value: object) -> bool:
    return isinstance(value, str) and is_named(value) and not re.search(r"\s", value)


def values_of(value: object) -> list[object]:
    """The images of a column: the items of a list; the bytes, else the name, of datasets.Image."""
    images: list[object] = []
    for each in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(each, dict) and "path" in each:
            each = each["bytes"] if isinstance(each.get("bytes"), bytes) else each["path"]
        images.append(each)
    return images


def row_images(row: Row) -> list[str]:
    """The URLs of a row of with_images(): of one of IMAGE_COLUMNS, else of the numbered ones."""
    numbered = [column for column in row if NUMBERED.fullmatch(column)]
    numbered.sort(key=lambda column: int(column.rpartition("_")[2]))
    for columns in (*[[column] for column in IMAGE_COLUMNS], numbered):
        # A column without images is not read in the sense of ReadRow.
        filled = [column for column in columns if is_image_list(dict.get(row, column))]
        if filled:
            return [url for column in filled for url in row[column]]
    return []


def is_image_list(value: JSON) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_image_url, value))


def place_images(messages: list[Message], urls: Sequence[str]) -> list[Message]:
    """The messages with the images of a row's columns: in the parts of type image that have none,
    else in place of the marks <image> (verl, LLaVA) or <image 1> (MMMU) in texts, else before the
    first text of a user (TRL). Images whose number has no mark are behind the last text with marks.
    Raises ValueError for another number of parts or marks than of images."""
    parts = [list_of_parts(message) for message in messages]
    empty = sum(item == {"type": "image"} for message in parts for item in message)
    if any("image" in item for message in parts for item in message) and not empty:
        return messages  # The messages hold the images themselves.
    marked = [i for i, message in enumerate(messages) if has_numbered_mark(message)]
    if marked and not empty:
        left = dict(enumerate(urls, 1))
        filled = {i: numbered_parts(parts[i], left, len(urls)) for i in marked}
        filled[marked[-1]] += [{"type": "image", "image": url} for url in left.values()]
        return [m | {"content": filled[i]} if i in filled else m for i, m in enumerate(messages)]
    if not empty:
        parts = [split_marks(message) for message in parts]
    num_parts = sum(item == {"type": "image"} for message in parts for item in message)
    if not num_parts:
        first = next((i for i, m in enumerate(messages) if m["role"] == "user"), 0)
        parts[first] = [{"type": "image"} for _ in urls] + parts[first]
        num_parts = len(urls)
    if num_parts != len(urls):
        kind = "parts of type 'image'" if empty else f"marks {MARK}"
        raise ValueError(
            f"the messages have {num_parts} {kind}, and the row has {len(urls)} images; give one "
            "for each"
        )
    left, placed = iter(urls), []
    for message, of_message in zip(messages, parts, strict=True):
        if {"type": "image"} in of_message:
            filled = []
            for item in of_message:
                is_empty = item == {"type": "image"}
                filled.append({"type": "image", "image": next(left)} if is_empty else item)
            message = {**message, "content": filled}
        placed.append(message)
    return placed


def list_of_parts(message: Message) -> list[JSONObject]:
    content = message.get("content") or []
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def has_numbered_mark(message: Message) -> bool:
    texts = (item.get("text", "") for item in list_of_parts(message))
    return message["role"] != "assistant" and any(map(NUMBERED_MARK.search, texts))


def numbered_parts(
    parts: list[JSONObject], left: dict[int, str], num_images: int
) -> list[JSONObject]:
    """The parts with the image of each NUMBERED_MARK. Images of `left`, by number, are taken out; a
    later mark of the same number stays text."""
    split: list[JSONObject] = []
    for item in parts:
        text, end = item.get("text", ""), 0
        for mark in NUMBERED_MARK.finditer(text):
            if not 0 < int(mark[1]) <= num_images:
                raise ValueError(f"a text has the mark {mark[0]}, and the row {num_images} images")
            if (url := left.pop(int(mark[1]), None)) is None:
                continue
            if before := text[end : mark.start()]:
                split.append({"type": "text", "text": before})
            split.append({"type": "image", "image": url})
            end = mark.end()
        if rest := text[end:]:
            split.append({"type": "text", "text": rest} if end else item)
    return split


def split_marks(parts: list[JSONObject]) -> list[JSONObject]:
    """The parts with an empty part of an image for each mark in their texts."""
    split: list[JSONObject] = []
    for item in parts:
        if MARK not in item.get("text", ""):
            split.append(item)
            continue
        for number, text in enumerate(item["text"].split(MARK)):
            if number:
                split.append({"type": "image"})
            if text:
                split.append({"type": "text", "text": text})
    return split
