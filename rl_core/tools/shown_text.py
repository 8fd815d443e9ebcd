"""Tokens as text for people."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rl_core.data.chat import Chat
from rl_core.data.image_parts import shown_image
from rl_core.types import InputImage


def shown_text(chat: Chat, token_ids: Sequence[int], images: Sequence[InputImage] = ()) -> str:
    """Text with special tokens: an image is `[image 336x336, 144 tokens]`."""
    known, pieces = {image.key: image for image in images}, []
    for key, group in itertools.groupby(token_ids, lambda number: min(number, 0)):
        ids = [int(number) for number in group]
        if key < 0:
            size = shown_image(known[-key])[1:-1] if -key in known else "image"
            pieces.append(f"[{size}, {len(ids)} tokens]" if len(ids) > 1 else f"[{size}]")
        else:
            pieces.append(chat.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    return "".join(pieces)
