"""Tools: what a model calls, read by the format of its chat template.

`tool_calls` of a message are as the templates in transformers read them: [{"id", "type": "function", "function": {"name",
"arguments"}}], with arguments as a dictionary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from rl_core.data.chat import Chat, text_after
from rl_core.options.imitation import said_text
from rl_core.types import Completion, Message

# An argument as XML: Qwen's, MiniMax's and GLM's.
ARGUMENT = r'<(?:parameter=|parameter name="|arg_key>)(?P<key>[^<>"]+)(?:"?>|</arg_key>\s*<arg_value>)'
ARGUMENT += r"(?P<value>(?:(?!</?(?:parameter|arg_value)\b).)*)</(?:parameter|arg_value)>"
# What the template's text holds -> (how a call begins, one call). JSON without a name holds the name, or is a list of calls.
FORMATS = {
    # Qwen 3.5, Qwen3-Coder, Nemotron 3
    "<function=": (
        r"<tool_call>",
        rf"<tool_call>\s*<function=(?P<name>[^<>\s]+)>(?P<xml>(?:\s*{ARGUMENT})*)\s*</function>\s*</tool_call>",
    ),
    # GLM 4.5
    "<arg_key>": (
        r"<tool_call>",
        rf"<tool_call>\s*(?P<name>[^<>\s{{]+)(?P<xml>(?:\s*{ARGUMENT})*)\s*</tool_call>",
    ),
    # MiniMax M2: several in one element
    "<invoke name=": (
        r"<\w+:tool_call>\s*<invoke|<invoke",
        r'(?:<\w+:tool_call>\s*)?<invoke name="(?P<name>[^<>"]+)">'
        rf"(?P<xml>(?:\s*{ARGUMENT})*)\s*</invoke>(?:\s*</\w+:tool_call>)?",
    ),
    # gpt-oss
    "<|channel|>commentary": (
        r"to=functions\.",
        r"to=functions\.(?P<name>[^\s<]+)(?:(?!to=).)*?<\|message\|>(?P<json>.*?)(?:<\|call\|>|\Z)",
    ),
    # Mistral: a list of calls, or a name and arguments
    "[TOOL_CALLS]": (
        r"\[TOOL_CALLS\]",
        r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)?(?:\[ARGS\])?\s*(?P<json>[\[{].*?)(?=\[TOOL_CALLS\]|\Z)",
    ),
    # Llama 3: the whole turn is one call
    '"parameters": ': (
        r'\A\s*(?:<\|python_tag\|>|\{\s*"name")',
        r"\A\s*(?:<\|python_tag\|>)?\s*(?P<json>\{.*\})\s*(?:<\|eom_id\|>)?\Z",
    ),
    # Hermes, Qwen 2.5 and 3; templates that know no calls too
    "": (r"<tool_call>", r"<tool_call>\s*(?P<json>\{.*?\})\s*</tool_call>"),
}


def read_reply(
    chat: Chat, completion: Completion, number: int, tools: Sequence[dict] = ()
) -> tuple[Message | None, bool]:
    """(the message with what was called, None if nothing was; whether a call begins that cannot be read). `number`: of the
    turn, for ids. `tools`: what types arguments have that are written as text."""
    ids = completion.token_ids
    ids = ids[:-1] if ids and ids[-1] in chat.stop_token_ids else ids
    text = chat.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    begins, one_call = next(f for marker, f in FORMATS.items() if marker in str(chat.chat_template))
    matches = [*re.finditer(one_call, text, re.DOTALL)]
    if not matches or len(matches) != len(re.findall(begins, text)):
        return None, re.search(begins, text) is not None
    try:
        called = [call for match in matches for call in calls_of(match, tools)]
    except (ValueError, TypeError, LookupError):
        return None, True
    rest = re.sub(one_call, "", text, flags=re.DOTALL)
    if "<|message|>" in rest:  # gpt-oss: what stands in its channels
        rest = "\n".join(re.findall(r"<\|message\|>(.*?)<\|end\|>", rest, re.DOTALL))
    calls = [
        # Mistral's templates want nine characters.
        {"id": f"call{number % 1000:03d}{i % 100:02d}", "type": "function", "function": function}
        for i, function in enumerate(called)
    ]
    return {"role": "assistant", "content": chat.special_token.sub("", rest).strip(), "tool_calls": calls}, False


def calls_of(match: re.Match, tools: Sequence[dict]) -> list[dict[str, Any]]:
    """[{"name", "arguments"}]. Raises ValueError, TypeError or LookupError."""
    name, xml = (match.groupdict().get(part) for part in ("name", "xml"))
    if xml is not None:
        known = {f["name"]: f.get("parameters", {}).get("properties", {}) for f in (tool["function"] for tool in tools)}
        pairs = [(pair["key"].strip(), pair["value"]) for pair in re.finditer(ARGUMENT, xml, re.DOTALL)]
        return [{"name": name, "arguments": {k: typed_value(v, known.get(name, {}).get(k, {})) for k, v in pairs}}]
    value = json.loads(match["json"])
    found = []
    for call in [{"name": name, "arguments": value}] if name else value if isinstance(value, list) else [value]:
        arguments = call["arguments"] if "arguments" in call else call["parameters"]
        if not isinstance(call["name"], str) or not isinstance(arguments, dict):
            raise TypeError(call)
        found.append({"name": call["name"], "arguments": arguments})
    if not found:
        raise ValueError("no call")
    return found


def typed_value(text: str, schema: dict[str, Any]) -> Any:
    """An argument that is written as text: itself if its schema allows a string, else what it is as JSON or in Python's words."""
    text = text.removeprefix("\n").removesuffix("\n")
    if "string" in schema.get("type", "string"):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def in_stream(
    chat: Chat, prompt: str, before: list[Message], reply: Message, text: str, after: list[Message], tools: list
) -> tuple[str, Message]:
    """(text of the turn as the template renders it behind `prompt`, its message for the template): what the model said, word for
    word, where the template takes that; else its calls."""
    said = chat.assistant_message(text)
    try:
        if text_after(chat.render([*before, said, *after], tools), prompt, text) is not None:
            return text, said
    except ValueError:
        pass
    said = chat.assistant_message(reply["content"]) | {"tool_calls": reply["tool_calls"]}
    try:
        return said_text(chat, prompt, [*before, said], tools)[0], said
    except ValueError:  # rendered behind another prompt: the stream begins anew
        return text, said
