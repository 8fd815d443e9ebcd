"""Checks that a chat template renders every text, thought and call of its messages: markers replace
them, and each marker must appear in the rendering."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass

from rl_core.types import JSON, JSONObject, Message

# Unicode keeps it for internal use: templates and tokenizers have no rule for it.
PROBE = "\ufdd1"
# Numeric arguments are replaced by numbers from here on, which no template writes itself.
FIRST_NUMBER = 7_130_000
MARKER = re.compile(r"q7x[0-9]+z|[0-9]{7}")
# Keys of messages that few templates render, such as OLMo 3's: tools and calls as texts.
TEMPLATE_KEYS = ("functions", "function_calls", "tools")
# Shapes of conversations that a ShapeCheck remembers.
MAX_SHAPES = 100_000


@dataclass(kw_only=True, slots=True)
class Marker:
    """Example: Marker(index=1, label="its text", text="q7x4z")."""

    index: int  # Index of the message.
    label: str
    text: str
    is_thought: bool = False


class Probe:
    """A copy of a conversation with a marker for each text, thought and call."""

    def __init__(self, messages: list[Message]):
        self.markers: list[Marker] = []
        self.roles = [message["role"] for message in messages]
        self.messages = [self._marked(i, message) for i, message in enumerate(messages)]

    def check(self, rendered: str, indices: Collection[int], with_thoughts: bool = False) -> None:
        """Raises ValueError if a marker of the messages `indices` is absent from `rendered`.
        Markers of thoughts count only `with_thoughts`."""
        shown = set(MARKER.findall(rendered))  # One pass, since there may be many markers.
        for marker in self.markers:
            is_wanted = marker.index in indices and (with_thoughts or not marker.is_thought)
            if is_wanted and marker.text not in shown and marker.text not in rendered:
                raise ValueError(
                    f"message {marker.index + 1} of [{' '.join(self.roles)}] is incomplete: "
                    f"the chat template does not render {marker.label}; change the message, "
                    "or give another template with --actors.NAME.chat_template FILE"
                )

    def _marked(self, index: int, message: Message) -> Message:
        marked, content = dict(message), message.get("content")
        if isinstance(content, str):
            marked["content"] = self._text(index, message["role"], content)
        elif content:
            parts = []
            for item in content:
                if "text" in item:
                    item = {
                        "type": "text",
                        "text": self._text(index, message["role"], item["text"]),
                    }
                parts.append(item)
            marked["content"] = parts
        thoughts = message.get("reasoning_content")
        if isinstance(thoughts, str) and thoughts.strip():
            marked["reasoning_content"] = self._marker(index, "its thoughts", is_thought=True)
        if message.get("tool_calls"):
            marked["tool_calls"] = [self._call(index, call) for call in message["tool_calls"]]
        for key in TEMPLATE_KEYS:
            if is_filled_text(message.get(key)):
                marked[key] = self._marker(index, f"its {key}")
        return marked

    def _text(self, index: int, role: str, text: str) -> str:
        if not text.strip():
            return text
        opened, thoughts, answer = split_thoughts(text)
        if role != "assistant" or thoughts is None:
            return self._marker(index, "its text")
        if thoughts.strip():
            thoughts = "\n" + self._marker(index, "its thoughts", is_thought=True) + "\n"
        if answer.strip():
            answer = "\n\n" + self._marker(index, "its text")
        return opened + thoughts + "</think>" + answer

    def _call(self, index: int, call: JSONObject) -> JSONObject:
        function = call["function"]
        name, arguments = function["name"], {}
        marked = {"name": self._marker(index, f"the call of {name}()")}
        for key, value in function["arguments"].items():
            label = f"the argument {key!r} of the call of {name}()"
            arguments[self._marker(index, label)] = self._value(index, label, value)
        return call | {"function": function | marked | {"arguments": arguments}}

    def _value(self, index: int, label: str, value: JSON) -> JSON:
        """A marker with the value's type. A list or an object keeps only its first item."""
        if isinstance(value, str):
            return self._marker(index, label) if value.strip() else value
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, (int, float)):
            number = FIRST_NUMBER + len(self.markers)
            self.markers.append(Marker(index=index, label=label, text=str(number)))
            return number if isinstance(value, int) else number + 0.5
        if isinstance(value, (list, tuple)):
            return [self._value(index, label, each) for each in value[:1]]
        if isinstance(value, dict):
            firsts = list(value.values())[:1]
            return {self._marker(index, label): self._value(index, label, v) for v in firsts}
        return value

    def _marker(self, index: int, label: str, is_thought: bool = False) -> str:
        text = f"q7x{len(self.markers)}z"
        self.markers.append(Marker(index=index, label=label, text=text, is_thought=is_thought))
        return text


@dataclass(kw_only=True, slots=True)
class Rendering:
    """A rendering that must hold the texts and calls of the messages at `indices`."""

    text: str
    indices: Collection[int]
    with_thoughts: bool = False


class ShapeCheck:
    """Checks that a template renders all of a conversation, once for each shape."""

    def __init__(self) -> None:
        self._complete: set[int] = set()  # Shapes that are rendered in full.

    def check(
        self,
        messages: list[Message],
        others: tuple[Hashable, ...],
        render: Callable[[list[Message]], list[Rendering]],
    ) -> None:
        """Raises ValueError if a rendering of render(messages) is incomplete. `others`: all other
        inputs of render()."""
        shape = shape_of(messages, *others)
        if shape in self._complete:
            return
        probe = Probe(messages)
        try:
            renderings = render(probe.messages)
        except ValueError:
            return  # Rendering the real messages raises the error for the user.
        for rendering in renderings:
            probe.check(rendering.text, rendering.indices, rendering.with_thoughts)
        if len(self._complete) >= MAX_SHAPES:
            self._complete.clear()
        self._complete.add(shape)


def shape_of(messages: list[Message], *others: Hashable) -> int:
    """A hash of a conversation's roles, keys and kinds of content, and of `others`. Templates
    render conversations with the same hash in the same way."""
    return hash((tuple(map(shape_of_message, messages)), others))


def shape_of_message(message: Message) -> tuple:
    kinds = []
    for key, value in sorted(message.items()):
        kind: Hashable = ""
        if key == "role":
            kind = value
        elif key == "content" and isinstance(value, list):
            kind = tuple(shape_of_text(item["text"]) if "text" in item else "" for item in value)
        elif key in ("content", "reasoning_content") and isinstance(value, str):
            kind = shape_of_text(value)
        elif key in TEMPLATE_KEYS:
            kind = is_filled_text(value)
        elif key == "tool_calls":
            kind = tuple(shape_of_value(call["function"]["arguments"], 2) for call in value)
        kinds.append((key, kind))
    return tuple(kinds)


def is_filled_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def shape_of_text(text: str) -> tuple:
    opened, thoughts, answer = split_thoughts(text)
    return opened, thoughts and bool(thoughts.strip()), bool(answer.strip())


def split_thoughts(text: str) -> tuple[str, str | None, str]:
    """(opening mark, thoughts, text after the closing mark). Thoughts are None if the text has no
    closing mark."""
    thoughts, closed, answer = text.rpartition("</think>")
    if not closed:
        return "", None, text
    before, opened, inside = thoughts.partition("<think>")
    return opened, inside if opened and not before.strip() else thoughts, answer


def shape_of_value(value: JSON, depth: int = 0) -> tuple:
    """Types of a value and its items: of all values of an object if `depth` > 0, else of the first
    item."""
    if isinstance(value, dict):
        values = list(value.values())[: None if depth else 1]
    elif isinstance(value, (list, tuple)):
        values = list(value[:1])
    else:
        return type(value).__name__, not value
    return type(value).__name__, tuple(shape_of_value(v) for v in values)
