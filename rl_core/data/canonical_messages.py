"""Messages and tools of rows, hooks, programs and the reward model's server in one canonical form,
which data/messages.py describes."""

from __future__ import annotations

from rl_core.data.messages import CANONICAL_ROLES, RULE, check_text, shorten
from rl_core.types import AnyJSON, JSONObject, Message


def is_plain(messages: object) -> bool:
    """True for a list of messages that have a canonical role and a text, and nothing else."""
    if not isinstance(messages, (list, tuple)):
        return False
    return bool(messages) and all(map(is_plain_message, messages))


def is_plain_message(message: object) -> bool:
    if not isinstance(message, dict) or message.keys() != {"role", "content"}:
        return False
    return message["role"] in CANONICAL_ROLES and isinstance(message["content"], str)


def canonical_messages(messages: AnyJSON, notes: list[str] | None = None) -> list[Message]:
    """A copy of a conversation in the canonical form. `notes` collects a line for each value that
    was mapped. Raises ValueError for a message that cannot be mapped; the error has its number,
    counted from 1."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(f"{RULE}, is {shorten(messages)}")
    read: list[Message] = []
    for number, message in enumerate(messages, 1):
        if is_plain_message(message):
            check_text(message, f"message {number}")
            read.append(dict(message))
        else:
            from rl_core.data.message_forms import converted

            read += converted(message, number, notes)
    return read


def canonical_tools(tools: AnyJSON, notes: list[str] | None = None) -> list[JSONObject] | None:
    """Tools from a list or its JSON text, each as {"type": "function", "function": {"name", ...}};
    None for an empty list. Raises ValueError for another value."""
    if tools is None or tools == []:
        return None
    from rl_core.data.tool_schemas import read_tools

    return read_tools(tools, notes)
