"""Turns of other actors and of tools as an actor reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from rl_core.data.messages import with_text_arguments
from rl_core.data.thoughts import without_thoughts
from rl_core.sampling.conversation import Conversation
from rl_core.types import JSONObject, Message

Content: TypeAlias = str | list[JSONObject]  # A text, or parts with texts and images.


def heard_by_another(messages: Sequence[Message], name_prefix: bool) -> list[Message]:
    """Messages of an episode in the view of an actor that did not write them."""
    heard, has_spoken = [], False
    for message in messages:
        if message["role"] == "assistant" and "name" in message:
            has_spoken = True
            message = as_user(message, turn_text(message), name_prefix)
        elif message["role"] == "tool" and has_spoken:
            # This actor's conversation does not hold the call that the message answers.
            message = as_user(message, message.get("content") or "", name_prefix)
        heard.append(message)
    return merged(heard)


def accepted(heard: list[Message], conversation: Conversation) -> list[Message]:
    """The messages in a form that the actor's chat template renders."""
    joined = joined_to_tools(heard)
    return joined if len(joined) < len(heard) and not conversation.accepts(heard) else heard


def turn_text(message: Message) -> str:
    """Text of an actor's turn for other actors: without thoughts, and each tool call as a line
    NAME(ARGUMENTS) with the arguments as JSON."""
    text = without_thoughts(message.get("content") or "")
    lines = [text] if text else []
    for call in message.get("tool_calls") or ():
        function = with_text_arguments(call)["function"]
        lines.append(f"{function['name']}({function['arguments']})")
    return "\n".join(lines)


def as_user(message: Message, content: Content, name_prefix: bool) -> Message:
    """The content of another actor or of a tool as a user message, optionally behind its name."""
    if name_prefix:
        content = joined(f"{message.get('name', message['role'])} says: ", content)
    return {"role": "user", "content": content}


def joined(*contents: Content) -> Content:
    """One content: a text, or a list of parts if one of them has an image."""
    parts: list[JSONObject] = []
    for content in contents:
        for item in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if parts and parts[-1]["type"] == item["type"] == "text":
                item = {"type": "text", "text": parts.pop()["text"] + item["text"]}
            parts.append(item)
    return parts if len(parts) > 1 or parts[0]["type"] == "image" else parts[0]["text"]


def joined_to_tools(messages: Sequence[Message]) -> list[Message]:
    """Messages in which each user message behind a tool message is appended to the tool message,
    for chat templates that allow only an assistant after a tool."""
    result: list[Message] = []
    for message in messages:
        if result and result[-1]["role"] == "tool" and message.get("role") == "user":
            last = result.pop()
            content = joined(last.get("content") or "", "\n\n", message["content"])
            message = last | {"content": content}
        result.append(message)
    return result


def merged(messages: Sequence[Message]) -> list[Message]:
    """Messages with consecutive user messages merged, separated by a blank line."""
    result: list[Message] = []
    for message in messages:
        if result and result[-1].get("role") == message.get("role") == "user":
            last = result.pop()
            message = last | {"content": joined(last["content"], "\n\n", message["content"])}
        result.append(message)
    return result
