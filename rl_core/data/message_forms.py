"""Converts messages of other formats to the canonical form: ShareGPT, LangChain, Gemini, Anthropic,
ms-swift and older OpenAI APIs."""

from __future__ import annotations

import ast
import json
from contextlib import suppress

from rl_core.data.image_parts import image_part, is_image_part, is_picture
from rl_core.data.messages import (
    CANONICAL_ROLES,
    MEDIA_KEYS,
    NOT_READ,
    RULE,
    TRAIN_KEYS,
    check_text,
    json_value,
    read_flag,
    shorten,
    text_of,
)
from rl_core.data.thought_marks import MARKS
from rl_core.data.thoughts import leading_thoughts
from rl_core.types import AnyJSON, JSONObject, Message

# Roles of ShareGPT, LangChain, Gemini, ms-swift and older OpenAI APIs.
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "ai": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "chatbot": "assistant",
    "observation": "tool",
    "function": "tool",
    "ipython": "tool",
    "tool_response": "tool",
    "tool_result": "tool",
    "function_response": "tool",
    "function_result": "tool",
}
# Roles whose content is the JSON text of calls.
CALL_ROLES = ("function_call", "tool_call")
# Keys of calls and results in Gemini's and Gemma's messages and parts.
CALL_PARTS = ("function_call", "functionCall")
RESULT_KEYS = ("function_response", "functionResponse", "tool_responses", "function_responses")
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
THOUGHT_PARTS = {"thinking": "thinking", "reasoning": "reasoning"}
# Keys for a call's arguments in LangChain, Llama and Anthropic formats.
ARGUMENT_KEYS = ("args", "parameters", "input")
THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
GIVE_TRAIN = 'give the message "train": true or false instead'


def converted(message: AnyJSON, number: int, notes: list[str] | None) -> list[Message]:
    """The canonical messages of one message, of which results of functions are messages of their
    own. Raises ValueError with the number."""
    where = f"message {number}"
    try:
        split = split_results(message, where, notes)
        messages = [canonical_message(each, where, notes) for each in split]
    except NoMessageError:
        raise ValueError(f"{RULE}, {where} is {shorten(message)}") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    for each in messages:
        check_text(each, where)
    return messages


class NoMessageError(ValueError):
    """Raised for a value that is not a message."""


def canonical_message(value: AnyJSON, where: str, notes: list[str] | None = None) -> Message:
    """The canonical form of one message. Raises NoMessageError if `value` has no role, or neither
    content nor calls, and ValueError for another fault."""
    if not isinstance(value, dict):
        raise NoMessageError
    notes = [] if notes is None else notes
    # Tables fill missing keys with None; a chat template may test whether a key exists.
    message = {k: v for k, v in value.items() if v is not None or k == "content"}
    if "from" in message:  # ShareGPT
        content = message.pop("value", None)
        message = {"role": message.pop("from"), "content": content} | message
    role = message.get("role")
    if not isinstance(role, str):
        raise NoMessageError
    message["role"] = known_role(role)
    if message["role"] in CALL_ROLES:
        message |= {"role": "assistant", "content": None, "tool_calls": message.get("content")}
    if message["role"] != role:
        notes.append(f"{where}: role {role!r} read as {message['role']}")
    set_trained(message, where, notes)
    if isinstance(message.get("partial"), bool) and message.pop("partial"):  # Kimi, Qwen
        message["prefix"] = True
        notes.append(f"{where}: partial read as prefix")
    set_calls(message, where, notes)
    set_content(message, where, notes)
    set_thoughts(message, where, notes)
    if message.get("content") is None and not message.get("tool_calls"):
        raise NoMessageError
    return message


def split_results(value: AnyJSON, where: str, notes: list[str] | None) -> list[AnyJSON]:
    """The message, and the results of functions in it as messages of tools. An assistant's text
    follows the results of its calls."""
    if not isinstance(value, dict):
        return [value]
    message, results = dict(value), []
    if message.get("content") is None and isinstance(message.get("parts"), (list, tuple)):
        message["content"] = message.pop("parts")  # Gemini
    content = message.get("content")
    if isinstance(content, dict) and "response" in content:
        results, message["content"] = [content], None
    elif isinstance(content, (list, tuple)) and any(map(function_part, content)):
        parts = [(item, function_part(item)) for item in content]
        calls = [item[key] for item, key in parts if key in CALL_PARTS]
        results = [item[key] for item, key in parts if key in RESULT_KEYS]
        message["content"] = [item for item, key in parts if not key] or None
        if calls:
            message["tool_calls"] = [*(message.get("tool_calls") or []), *calls]
    for key in RESULT_KEYS:
        more = message.pop(key, None) or []
        results += more if isinstance(more, (list, tuple)) else [more]
    if not results:
        return [message]
    if notes is not None:
        notes.append(f"{where}: results of functions read as messages of tools")
    tools = [result_message(result, message) for result in results]
    text = {k: v for k, v in message.items() if k not in ("tool_calls", *THOUGHT_KEYS)}
    is_text = bool(message.get("content")) and known_role(str(message.get("role"))) != "tool"
    calling = [message | {"content": None}] if message.get("tool_calls") else []
    return [*calling, *tools, *([text] if is_text else [])]


def function_part(item: AnyJSON) -> str | None:
    """The key of the call or the result in a part of a content."""
    keys = (*CALL_PARTS, *RESULT_KEYS) if isinstance(item, dict) else ()
    return next((key for key in keys if item.get(key) is not None), None)


def result_message(result: AnyJSON, message: Message) -> Message:
    """A tool's message with a result: a text, or an object with a name and a response."""
    made = {"role": "tool"}
    if known_role(str(message.get("role"))) == "tool":
        made = message | made
    if isinstance(result, dict):
        names = {"name": result.get("name"), "tool_call_id": result.get("id")}
        made |= {key: value for key, value in names.items() if value is not None}
        result = result.get("response", result)
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    return made | {"content": text}


def known_role(role: str) -> str:
    """The canonical name of a role. Unknown roles are returned unchanged."""
    lowered = role.strip().lower()
    name = ROLES.get(lowered, lowered)
    return name if name in (*CANONICAL_ROLES, *CALL_ROLES) else role


def set_trained(message: Message, where: str, notes: list[str]) -> None:
    """Replaces TRAIN_KEYS and "masked" with "train": False, or removes them if the message is
    trained. Raises ValueError for a weight between 0 and 1, and for keys about a part of a message
    or of two meanings."""
    is_trained = True
    for key in (*TRAIN_KEYS, "masked"):
        if key in message and read_flag(key, message.pop(key)) == (key == "masked"):
            is_trained = False
            notes.append(f"{where}: not trained ({key})")
    if not is_trained:
        message["train"] = False
    if isinstance(message.get("mask"), (bool, int, float)):
        raise ValueError(f"'mask' may say that it is trained, or that it is not; {GIVE_TRAIN}")
    spans = message.pop("train_detail", None)  # Axolotl's name for parts of a text
    for parts in (spans, message.get("content")):
        for item in parts if isinstance(parts, (list, tuple)) else ():
            flags = item if isinstance(item, dict) else {}
            for key in TRAIN_KEYS:
                if flags.get(key) is not None and not read_flag(key, flags[key]):
                    raise ValueError(
                        f"{key!r} of a part is false: messages are trained whole; {GIVE_TRAIN}"
                    )


def set_calls(message: Message, where: str, notes: list[str]) -> None:
    """Moves all calls to `tool_calls`, with arguments as objects."""
    older = message.pop("function_call", None)  # OpenAI's key before tool_calls
    if older is not None:
        message["tool_calls"] = [*(message.get("tool_calls") or []), older]
        notes.append(f"{where}: function_call read as tool_calls")
    calls = message.pop("tool_calls", None)
    if isinstance(calls, str):
        calls = json_value(calls)
    if isinstance(calls, dict):
        calls = [calls]
    if not calls and calls in (None, [], ()):
        return
    if not isinstance(calls, (list, tuple)):
        raise ValueError(f"tool_calls must be a list, or its JSON text; is {shorten(calls)}")
    message["tool_calls"] = [canonical_call(call, where, notes) for call in calls]
    message.setdefault("content", None)


def canonical_call(call: AnyJSON, where: str, notes: list[str]) -> JSONObject:
    if isinstance(call, str):
        call = json_value(call)
    is_wrapped = isinstance(call, dict) and call.get("function") is not None
    function = call["function"] if is_wrapped else call
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"a tool call must be a function with a name, is {shorten(call)}")
    function = {k: v for k, v in function.items() if v is not None}
    # LangChain's calls have the type "tool_call".
    kept = {}
    if is_wrapped:
        kept = {k: v for k, v in call.items() if v is not None and k in ("id", "type")}
        if kept.get("type") == "tool_call":
            kept.pop("type")
    else:
        if "id" in function:
            kept["id"] = function.pop("id")
        if function.get("type") in ("function", "tool_call"):
            function.pop("type")
    for key in ARGUMENT_KEYS:
        if "arguments" not in function and key in function:
            function["arguments"] = function.pop(key)
            notes.append(f"{where}: {key} of {function['name']}() read as arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        notes.append(f"{where}: arguments of {function['name']}() parsed from JSON text")
        arguments = json_value(arguments) if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError(
            f"the arguments of the call of {function['name']}() must be a JSON object, or its "
            f"text; are {shorten(function['arguments'])}"
        )
    function["arguments"] = arguments
    return {"type": "function"} | kept | {"function": function}


def messages_in_text(text: str) -> AnyJSON:
    """The messages in the JSON text, or Python literal, of a list of messages. Other text is
    returned unchanged."""
    if not text.lstrip().startswith("["):
        return text
    value = json_value(text)
    if isinstance(value, str):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            value = ast.literal_eval(text.strip())
    is_list = isinstance(value, list) and bool(value)
    return value if is_list and all(map(is_message, value)) else text


def is_message(value: AnyJSON) -> bool:
    if not isinstance(value, dict):
        return False
    role = value.get("role", value.get("from"))
    is_role = isinstance(role, str) and known_role(role) in (*CANONICAL_ROLES, *CALL_ROLES)
    return is_role and not value.keys().isdisjoint(("content", "value", "tool_calls"))


def set_content(message: Message, where: str, notes: list[str]) -> None:
    """Reduces the content to a text, a list of parts with texts and images, or None. Raises
    ValueError for video, audio and files, and for an image that cannot be read."""
    for key in MEDIA_KEYS:
        if message.get(key):
            raise ValueError(refused_part(key))
    content = message.get("content")
    if content is None or isinstance(content, str):
        return
    content = [content] if is_picture(content) else content
    if not isinstance(content, (list, tuple)):
        raise NoMessageError
    parts, thoughts = [], []
    for item in content:
        if is_image_part(item):
            parts.append(image_part(item))
            continue
        if isinstance(item, str):
            item = {"type": "text", "text": item}
        kind = item.get("type") or "text" if isinstance(item, dict) else type(item).__name__
        key = TEXT_PARTS.get(kind) or THOUGHT_PARTS.get(kind)
        if key is None or not isinstance(item.get(key), str):
            raise ValueError(refused_part(kind))
        if kind in TEXT_PARTS:
            parts.append({"type": "text", "text": item[key]})
        else:
            thoughts.append(item[key])
    message["content"] = parts or ""
    if thoughts:
        key = "thinking" if message.get("reasoning_content") else "reasoning_content"
        message[key] = "".join(thoughts)
        notes.append(f"{where}: thinking parts read as reasoning_content")


def refused_part(kind: str) -> str:
    return f"a part of type {kind!r} {NOT_READ}"


def set_thoughts(message: Message, where: str, notes: list[str]) -> None:
    """Moves thoughts to `reasoning_content`. Raises ValueError if two keys hold different
    thoughts."""
    texts = {}
    for key in THOUGHT_KEYS:
        if isinstance(message.get(key), str):
            texts[key] = message.pop(key)
    texts = {key: text for key, text in texts.items() if text.strip()}
    if not texts:
        return
    if len(set(texts.values())) > 1:
        raise ValueError(f"{' and '.join(texts)} differ: give a message's thoughts in one of them")
    key, thoughts = next(iter(texts.items()))
    if thoughts.strip() == thoughts_in(text_of(message)):
        notes.append(f"{where}: {key} left out; the content begins with the same thoughts")
        return
    message["reasoning_content"] = thoughts
    if key != "reasoning_content":
        notes.append(f"{where}: {key} read as reasoning_content")


def thoughts_in(content: str) -> str:
    """The thoughts at the start of a content, without their marks."""
    block = content[: leading_thoughts(content)].strip()
    for opening, closing in MARKS.items():
        if block.startswith(opening):
            return block.removeprefix(opening).removesuffix(closing).strip()
    return ""
