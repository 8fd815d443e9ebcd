"""Images in canonical messages, as parts {"type": "image", "image": "data:image/png;base64,..."}: a
text, which copies of a message share and JSON can hold."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rl_core.types import AnyJSON, InputImage, JSONObject, Message, Trajectory

IMAGE_COLUMNS = ("image", "images")
SIDE_IMAGES = ("chosen_images", "rejected_images")  # Of one reply of a pair, as in ms-swift.
IMAGE_PARTS = ("image", "image_url", "input_image")
URL_START = '"image": "data:image/'
STORED_URL = re.compile(r'"image": "(data:image/[a-z]+;base64,[A-Za-z0-9+/=]+)"')


def image_part(item: object, folder: Path | None = None) -> JSONObject:
    """The canonical part of OpenAI's, transformers', Anthropic's or MCP's part of an image, or of a
    picture. Raises ValueError as read_image()."""
    from rl_core.data.images import IMAGE_KEYS, read_image

    if isinstance(item, dict) and all(item.get(key) is None for key in IMAGE_KEYS):
        return {"type": "image"}

    return {"type": "image", "image": read_image(item, folder).url}


def is_image_part(item: object) -> bool:
    return is_picture(item) or (isinstance(item, dict) and item.get("type") in IMAGE_PARTS)


def is_picture(value: object) -> bool:
    """True for an image that stands for its part: a file's content, or an image of PIL."""
    return isinstance(value, bytes) or type(value).__module__.startswith("PIL.")


def has_image(message: AnyJSON) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    is_list = isinstance(content, (list, tuple))
    return is_picture(content) or (is_list and any(map(is_image_part, content)))


def have_images(value: AnyJSON) -> bool:
    """True for a list of messages of which one has an image."""
    return isinstance(value, (list, tuple)) and any(map(has_image, value))


def images_of(messages: Sequence[Message]) -> list[InputImage]:
    """The images of canonical messages in their order. Raises ValueError for a part without an
    image."""
    images = []
    for number, message in enumerate(messages, 1):
        content = message.get("content")
        for item in content if isinstance(content, list) else ():
            if item.get("type") != "image":
                continue
            if message["role"] == "assistant":
                raise ValueError(
                    f"message {number}: an assistant's message has an image; models "
                    "write text alone"
                )
            if "image" not in item:
                raise ValueError(
                    f"message {number}: a part of type 'image' has no image; give one there, or in "
                    "a column 'images' of the row"
                )
            from rl_core.data.images import image_of

            images.append(image_of(item["image"]))
    return images


def loaded_messages(value: AnyJSON, folder: Path | None) -> list[AnyJSON] | None:
    """The messages with canonical parts for their images; None if the value has none."""
    if not have_images(value):
        return None
    messages = []
    for number, message in enumerate(value, 1):
        if not has_image(message):
            messages.append(message)
            continue
        content = [message["content"]] if is_picture(message["content"]) else message["content"]
        try:
            parts = [image_part(item, folder) if is_image_part(item) else item for item in content]
        except ValueError as error:
            raise ValueError(f"message {number}: {error}") from None
        messages.append({**message, "content": parts})
    return messages


def load_images(trajectory: JSONObject, folder: Path) -> None:
    """Reads the images of a trajectory's messages from files in `folder`."""
    for key in ("messages", "teacher_messages"):
        if (loaded := loaded_messages(trajectory.get(key), folder)) is not None:
            trajectory[key] = loaded


def has_image_tokens(trajectory: Trajectory) -> bool:
    for turn in trajectory.turns:
        if turn.images or min([*turn.new_ids, *turn.completion.token_ids], default=0) < 0:
            return True
    return False


def set_images(trajectory: Trajectory) -> None:
    """Sets the images of turns from the messages, which alone have them on disk and between
    processes. Raises ValueError if an image of a turn is in no message."""
    with_tokens = [turn for turn in trajectory.turns if min(turn.new_ids, default=0) < 0]
    known = {image.key: image for image in images_of(trajectory.messages) if with_tokens}
    for turn in with_tokens:
        keys = dict.fromkeys(-number for number in turn.new_ids if number < 0)
        if missing := keys.keys() - known:
            raise ValueError(
                f"a turn of {trajectory.group_id or trajectory.actor} has tokens of the image "
                f"{min(missing):016x}, which no message of its trajectory has"
            )
        turn.images = tuple(known[key] for key in keys)


def with_stored_images(text: str, folder: Path) -> str:
    """JSON text whose parts of images name files in folder/images, which hold each image once: the
    paths are relative to `folder`, as those of rows are."""
    if URL_START not in text:
        return text
    from rl_core.data.images import store_image

    return STORED_URL.sub(lambda match: f'"image": "{store_image(match[1], folder)}"', text)


def is_image_url(value: AnyJSON) -> bool:
    return isinstance(value, str) and value.startswith("data:image/")


def without_pixels(value: AnyJSON, depth: int = 5) -> AnyJSON:
    """A value for people: data: URLs of images down to `depth` are replaced by shown_image()."""
    if is_image_url(value):
        from rl_core.data.images import image_of

        with suppress(ValueError):
            return shown_image(image_of(value))
    if isinstance(value, dict) and depth:
        return {key: without_pixels(each, depth - 1) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and depth:
        return [without_pixels(each, depth - 1) for each in value]
    return value


def shown_image(image: InputImage) -> str:
    """Text for people in place of an image."""
    return f"[image {image.width}x{image.height}]"
