"""Images of a conversation under a model's limits, and their tokens."""

from __future__ import annotations

from collections.abc import Sequence

from rl_core.data.image_families import ImageFamily
from rl_core.data.image_parts import images_of
from rl_core.types import InputImage, Message


def checked_images(
    messages: list[Message], vision: ImageFamily | str, max_images: int | None
) -> tuple[InputImage, ...]:
    """See Chat.images_of()."""
    images = images_of(messages)
    if images and isinstance(vision, str):
        raise ValueError(f"a message has an image, and {vision}")
    most = None if isinstance(vision, str) else vision.max_images
    if most and len(images) > most:
        raise ValueError(
            f"a conversation has {len(images)} images; this model reads {most}, as each image "
            "has other tokens where there are more"
        )
    if max_images and len(images) > max_images:
        raise ValueError(
            f"a conversation has {len(images)} images, --data.max_images is {max_images}"
        )
    return tuple(images)


def expanded(
    ids: list[int], images: Sequence[InputImage], vision: ImageFamily, messages: list[Message]
) -> list[int]:
    """See Chat.expand()."""
    num, with_images, left = ids.count(vision.placeholder_id), [], iter(images)
    if num != len(images):
        roles = " ".join(str(message["role"]) for message in messages)
        raise ValueError(
            f"the chat template renders {num} of the {len(images)} images in messages with "
            f"roles [{roles}]; move the images to a user's message, or give another template "
            "with --actors.NAME.chat_template FILE"
        )
    for token_id in ids:
        if token_id == vision.placeholder_id:
            with_images += vision.expand(next(left))
        else:
            with_images.append(token_id)
    return with_images
