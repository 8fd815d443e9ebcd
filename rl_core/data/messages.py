"""Keys and texts of messages in the canonical form.

A canonical message has "role" and "content" (text, or a list of parts with texts and images, see
image_parts.py; None next to calls) and may have

    reasoning_content  thoughts, as text
    tool_calls         [{"type": "function", "function": {"name", "arguments": {...}}, "id"?}]
    train              False: context, not trained
    prefix             True: the reply continues this last message of the assistant; or "partial"
    other keys         unchanged, such as name and tool_call_id; keys that are None are dropped

`data/canonical_messages.py` converts rows' messages to this form, and `data/chat.py` this form to
the form that a chat template reads.
"""

from __future__ import annotations

import json
from contextlib import suppress

from rl_core.types import AnyJSON, JSONObject, Message

CANONICAL_ROLES = ("system", "developer", "user", "assistant", "tool")
MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")
# Keys with which formats exclude a message from the loss if they are false, and if they are true.
TRAIN_KEYS = (
    *("train", "training", "trainable", "train_on_turn", "weight", "weights"),
    *("loss", "loss_weight", "loss_scale", "loss_mask", "step_loss_mask"),
)
# Keys of a canonical message.
MESSAGE_KEYS = (
    *("role", "content", "reasoning_content", "tool_calls"),
    *("train", "prefix", "name", "tool_call_id"),
)
NOT_READ = (
    "is not supported: models are trained on text and images, not on video, audio or files; "
    "give its content as text, or remove it"
)
RULE = 'must be a list of {"role": ..., "content": ...}'


def is_filled(value: AnyJSON) -> bool:
    return value is not None and not (isinstance(value, (str, list, dict)) and not value)


def text_of(message: Message) -> str:
    """The content of a message as one text; "" if the content is None."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(item.get("text", "") for item in content)


def shorten(value: object, width: int = 80) -> str:
    text = repr(value)
    if len(text) > width:
        text = text[: width - 3] + "..."
    return text


def read_flag(key: str, value: AnyJSON) -> bool:
    """A value of TRAIN_KEYS as a bool. Raises ValueError for any other value."""
    flag = value.item() if hasattr(value, "item") else value  # numpy's
    if isinstance(flag, str):
        flag = {"true": 1, "1": 1, "false": 0, "0": 0}.get(flag.strip().lower())
    if not isinstance(flag, (bool, int, float)) or flag not in (0, 1):
        raise ValueError(
            f"{key!r} is {shorten(value)}; a message is trained (true, 1) or not (false, 0): "
            "remove the key or give one of these"
        )
    return bool(flag)


def json_value(text: str) -> AnyJSON:
    """The value of a JSON text. Text that is not JSON is returned unchanged."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return text


def with_text_arguments(call: JSONObject) -> JSONObject:
    """A call whose arguments are JSON text, as OpenAI's APIs and some chat templates read them."""
    function = call["function"]
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    return call | {"function": function | {"arguments": arguments}}


def as_context(messages: list[Message]) -> list[Message]:
    """Copies of messages with "train": False."""
    return [{**message, "train": False} for message in messages]


def check_text(message: Message, where: str) -> None:
    """Raises ValueError, which begins with `where`, for a lone surrogate, which no tokenizer
    encodes. Programs that cut a text by UTF-16 code units leave lone surrogates."""
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else [item.get("text", "") for item in content]
    for text in (*texts, message.get("reasoning_content", "")):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{where}: its text has a lone surrogate, {text[error.start]!r}, at character "
                f"{error.start}: remove it"
            ) from None


def without_prefix(messages: list[Message]) -> tuple[list[Message], str]:
    """(the messages without a last one that the reply continues, the text of that one or "")."""
    if messages and messages[-1]["role"] == "assistant" and messages[-1].get("prefix") is True:
        return messages[:-1], text_of(messages[-1])
    return messages, ""
