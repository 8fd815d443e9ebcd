"""Loads the chat of a model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from rl_core.data.chat import Chat, ToolReader
from rl_core.data.pretrained import load_pretrained
from rl_core.data.rows import check_exists
from rl_core.data.vision_models import load_family
from rl_core.types import JSONObject


class ImageLimits(Protocol):
    """The limits of images in config/data.py."""

    max_image_pixels: int | None
    max_images: int | None


def load_chat(
    path: str,
    chat_template: str | None = None,
    variables: JSONObject | None = None,
    tool_reader: Callable[[Chat], ToolReader] | None = None,
    limits: ImageLimits | None = None,
) -> Chat:
    """The tokenizer at path (a folder or a hub name); chat_template is a file's path, or the
    template itself."""
    from transformers import AutoTokenizer  # seconds to import, which --help need not wait for

    if chat_template is not None and "{" not in chat_template:
        check_exists(Path(chat_template))
        chat_template = Path(chat_template).read_text(encoding="utf-8")
    tokenizer = load_pretrained(AutoTokenizer, path)
    copy = "copy the tokenizer's files of the model that it was made from into the folder"
    if not (chat_template or tokenizer.chat_template):
        raise ValueError(
            f"model {path} has no chat template: {copy}, or give one with "
            "--actors.NAME.chat_template FILE"
        )
    # For some families transformers makes a tokenizer from nothing.
    if set(tokenizer.get_vocab().values()) <= tokenizer.added_tokens_decoder.keys():
        raise ValueError(
            f"model {path} has no tokenizer, such as tokenizer.json, but special tokens: {copy}"
        )
    vision = load_family(path, None if limits is None else limits.max_image_pixels)
    chat = Chat(tokenizer, chat_template, variables, tool_reader, vision)
    chat.max_images = None if limits is None else limits.max_images
    return chat


@lru_cache(8)
def fingerprint(chat: Chat) -> str:
    """A hash that is equal for two chats with the same vocabulary and template."""
    known = [sorted(chat.tokenizer.get_vocab().items()), chat.chat_template]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()
