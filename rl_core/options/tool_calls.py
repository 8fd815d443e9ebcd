"""Tools: JSON schemas of Python functions, and what a model calls, read by the format of its chat template.

`tool_calls` of a message are as the templates in transformers read them: [{"id", "type": "function", "function": {"name",
"arguments"}}], with arguments as a dictionary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from rl_core.data.chat import Chat, text_after
from rl_core.options.imitation import said_text
from rl_core.types import Completion, Message

# What the template's text holds -> (how a call begins, one call). JSON without a name holds the name, or is a list of calls.
FORMATS = {
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


def schemas(tools: Sequence[dict | Callable], path: str) -> list[dict[str, Any]]:
    """The tools as templates read them. Raises ValueError for a function that lacks type hints or a docstring."""
    from transformers.utils import get_json_schema

    found = []
    for tool in tools:
        try:
            found.append(tool if isinstance(tool, dict) else get_json_schema(tool))
        except Exception as error:
            name = getattr(tool, "__name__", tool)
            raise ValueError(
                f"{path}: tools: {name}(): {' '.join(str(error).split())}; a tool needs a type hint for each argument and a "
                "docstring in Google's format, with what it does and `Args:` with each argument"
            ) from error
    return found


def read_reply(chat: Chat, completion: Completion, number: int) -> tuple[Message | None, bool]:
    """(the message with what was called, None if nothing was; whether a call begins that cannot be read). `number`: of the
    turn, for ids."""
    ids = completion.token_ids
    ids = ids[:-1] if ids and ids[-1] in chat.stop_token_ids else ids
    text = chat.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    begins, one_call = next(f for marker, f in FORMATS.items() if marker in str(chat.chat_template))
    matches = [*re.finditer(one_call, text, re.DOTALL)]
    if not matches or len(matches) != len(re.findall(begins, text)):
        return None, re.search(begins, text) is not None
    try:
        called = [call for match in matches for call in calls_of(match)]
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


def calls_of(match: re.Match) -> list[dict[str, Any]]:
    """[{"name", "arguments"}]. Raises ValueError, TypeError or LookupError."""
    value, name = json.loads(match["json"]), match.groupdict().get("name")
    found = []
    for call in [{"name": name, "arguments": value}] if name else value if isinstance(value, list) else [value]:
        arguments = call["arguments"] if "arguments" in call else call["parameters"]
        if not isinstance(call["name"], str) or not isinstance(arguments, dict):
            raise TypeError(call)
        found.append({"name": call["name"], "arguments": arguments})
    if not found:
        raise ValueError("no call")
    return found


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
