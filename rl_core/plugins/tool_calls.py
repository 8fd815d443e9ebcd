"""Tools: what a model calls, read by the format of its chat template.

`tool_calls` of a message are as the templates in transformers read them: [{"id", "type":
"function", "function": {"name", "arguments"}}], with arguments as a dictionary.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from rl_core.data.chat import Chat, shared_length, text_after, unmarked
from rl_core.plugins.sft import said_text
from rl_core.types import Completion, Message

# An argument as XML: Qwen's, MiniMax's and GLM's.
ARGUMENT = (
    r'<(?:parameter=|parameter name="|arg_key>)(?P<key>[^<>"]+)(?:"?>|</arg_key>\s*<arg_value>)'
)
ARGUMENT += r"(?P<value>(?:(?!</?(?:parameter|arg_value)\b).)*)</(?:parameter|arg_value)>"
# LFM2: a list of Python calls.
PYTHON_CALLS = (
    r"<\|tool_call_start\|>",
    r"<\|tool_call_start\|>\s*(?P<python>\[.*?\])\s*<\|tool_call_end\|>",
)
# What the template's text holds -> (how a call begins, one call). JSON without a name holds the
# name, or is a list of calls.
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
    # Gemma 4: its strings stand between tokens of their own
    "<|tool_call>": (
        r"<\|tool_call>",
        r"<\|tool_call>\s*call:(?P<name>[^\s{]+)(?P<gemma>\{.*?\})\s*<tool_call\|>(?:<\|tool_response>)?",
    ),
    "<|tool_call_start|>": PYTHON_CALLS,
    "<|tool_list_start|>": PYTHON_CALLS,  # the first LFM2's template, which writes no calls itself
    # Hermes, Qwen 2.5 and 3; templates that know no calls too
    "": (r"<tool_call>", r"<tool_call>\s*(?P<json>\{.*?\})\s*</tool_call>"),
}


def read_reply(
    chat: Chat, completion: Completion, number: int, tools: Sequence[dict] = ()
) -> tuple[Message | None, bool]:
    """(the message with what was called, None if nothing was; whether a call begins that cannot be
    read). `number`: of the turn, for ids. `tools`: what types arguments have that are written as
    text."""
    ids = completion.token_ids
    ids = ids[:-1] if ids and ids[-1] in chat.stop_token_ids else ids
    text = chat.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    begins, one_call = FORMATS[marker_of(chat)]
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
    return {
        "role": "assistant",
        "content": chat.special_token.sub("", rest).strip(),
        "tool_calls": calls,
    }, False


def marker_of(chat: Chat) -> str:
    """The key of FORMATS by which calls of this chat are read."""
    return next(marker for marker in FORMATS if marker in str(chat.chat_template))


def calls_of(match: re.Match, tools: Sequence[dict]) -> list[dict[str, Any]]:
    """[{"name", "arguments"}]. Raises ValueError, TypeError or LookupError."""
    name, xml = (match.groupdict().get(part) for part in ("name", "xml"))
    if xml is not None:
        known = {
            f["name"]: f.get("parameters", {}).get("properties", {})
            for f in (tool["function"] for tool in tools)
        }
        pairs = [
            (pair["key"].strip(), pair["value"]) for pair in re.finditer(ARGUMENT, xml, re.DOTALL)
        ]
        return [
            {
                "name": name,
                "arguments": {k: typed_value(v, known.get(name, {}).get(k, {})) for k, v in pairs},
            }
        ]
    if match.groupdict().get("python"):
        return python_calls(match["python"])
    if match.groupdict().get("gemma"):
        return [{"name": name, "arguments": json.loads(json_of_gemma(match["gemma"]))}]
    value = json.loads(match["json"])
    found = []
    for call in (
        [{"name": name, "arguments": value}]
        if name
        else value
        if isinstance(value, list)
        else [value]
    ):
        arguments = call["arguments"] if "arguments" in call else call["parameters"]
        if not isinstance(call["name"], str) or not isinstance(arguments, dict):
            raise TypeError(call)
        found.append({"name": call["name"], "arguments": arguments})
    if not found:
        raise ValueError("no call")
    return found


def typed_value(text: str, schema: dict[str, Any]) -> Any:
    """An argument that is written as text: itself if its schema allows a string, else what it is as
    JSON or in Python's words."""
    text = text.removeprefix("\n").removesuffix("\n")
    if "string" in schema.get("type", "string"):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def are_shown(messages: list[Message], rendered: str) -> bool:
    """Whether a rendering holds their text: some templates leave out a tool's result that follows
    no call."""
    rendered = unmarked(rendered)
    for message in messages:
        content = message.get("content") or ""
        parts = [{"text": content}] if isinstance(content, str) else content
        for part in parts:
            if part.get("text", "").strip() not in rendered:
                return False
    return True


def python_calls(text: str) -> list[dict[str, Any]]:
    """[{"name", "arguments"}] of "[f(x='a'), g(n=3)]". Raises ValueError or TypeError for anything
    but calls with keywords and values of JSON."""
    try:
        tree = ast.parse(text, mode="eval").body
        return [python_call(node) for node in tree.elts]
    except (SyntaxError, AttributeError, MemoryError, RecursionError) as error:
        raise ValueError(text) from error


def python_call(node: ast.Call) -> dict[str, Any]:
    if node.args:
        raise ValueError("an argument without a name")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("arguments without names")
        value = ast.literal_eval(JsonNames().visit(keyword.value))
        # Raises TypeError for literals that JSON does not have: templates and services could not
        # write them.
        arguments[keyword.arg] = json.loads(json.dumps(value))
    return {"name": ast.unparse(node.func), "arguments": arguments}


class JsonNames(ast.NodeTransformer):
    """JSON's names as Python's constants: templates write dictionaries in the one, single values in
    the other."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        values = {"true": True, "false": False, "null": None}
        return ast.Constant(values[node.id]) if node.id in values else node


def json_of_gemma(text: str) -> str:
    """{city:<|"|>Rome<|"|>,days:3} as JSON."""
    pieces = text.split('<|"|>')
    for i, piece in enumerate(pieces):
        if i % 2:
            pieces[i] = json.dumps(piece)
            continue
        piece = re.sub(r"([{,]\s*)([\w.-]+)\s*:", r'\1"\2":', piece)
        pieces[i] = re.sub(r"(?<=[:\[,])None\b", "null", piece)
    return "".join(pieces)


def check_tools(tools: Sequence[dict], chat: Chat, where: str) -> None:
    """Raises ValueError if a call of one of the tools, as the chat's template writes it, is not
    read back."""
    user = [{"role": "user", "content": "x"}]
    if chat.render(user, tools) == chat.render(user):
        return  # A template that says nothing of tools leaves it to the environment's messages.
    for function in (tool["function"] for tool in tools if "function" in tool):
        arguments = sample_arguments(function)
        call = {"name": function["name"], "arguments": arguments}
        written = written_call(chat, user, call, tools)
        if call["name"] not in written:
            continue  # The template writes no calls: nothing says in which form it expects them.
        ids = chat.encode(written)
        read = Completion(
            token_ids=ids,
            logprobs=[0.0] * len(ids),
            text="",
            finish_reason="stop",
            policy_version=0,
        )
        message, _ = read_reply(chat, read, 0, tools)
        if message is None or [each["function"] for each in message["tool_calls"]] != [call]:
            text = unmarked(written).strip()
            raise ValueError(
                f"{where}: tools: the chat template of {chat.tokenizer.name_or_path} writes a call "
                f"of {call['name']}() as "
                f"{text!r}, which is not read back; take a model whose calls are read "
                "(docs/environments.md#tools), or "
                "give another template with --actors.NAME.chat_template FILE"
            )


def written_call(
    chat: Chat, before: list[Message], call: dict[str, Any], tools: Sequence[dict]
) -> str:
    """Marked text of an assistant's turn with this call, as the template renders it."""
    calls = [{"id": "call00000", "type": "function", "function": call}]
    messages = [*before, {"role": "assistant", "content": "", "tool_calls": calls}]
    prompt = chat.render(before, tools)
    try:
        return said_text(chat, prompt, messages, tools)[0]
    except ValueError:
        # Some templates put something else than their generation prompt before a turn of the
        # history.
        whole = chat.render(messages, tools, add_generation_prompt=False)
        return whole[shared_length(prompt, whole) :]


def sample_arguments(function: dict[str, Any]) -> dict[str, Any]:
    """An argument of the right type for each of a tool's parameters."""
    text = "7 9"  # Part of no special token, so that the rendering has no marks in it.
    samples = {
        "integer": 3,
        "number": 1.5,
        "boolean": True,
        "array": [text],
        "object": {"k": text},
        "null": None,
    }
    arguments = {}
    for name, schema in (function.get("parameters") or {}).get("properties", {}).items():
        schema = schema if isinstance(schema, dict) else {}  # `true` allows anything
        types = schema.get("type", "string")
        first = types[0] if isinstance(types, list) else types
        arguments[name] = text if "string" in types else samples.get(first, text)
        if schema.get("enum"):
            arguments[name] = schema["enum"][0]
    return arguments


def in_stream(
    chat: Chat,
    prompt: str,
    before: list[Message],
    reply: Message,
    text: str,
    after: list[Message],
    tools: list,
) -> tuple[str, Message]:
    """(text of the turn as the template renders it behind `prompt`, its message for the template):
    what the model said, word for word, where the template takes that; else its calls."""
    said = chat.assistant_message(text)
    try:
        suffix = text_after(chat.render([*before, said, *after], tools), prompt, text)
        if suffix is not None and are_shown(after, suffix):
            return text, said
    except ValueError:
        pass
    said = chat.assistant_message(reply["content"]) | {"tool_calls": reply["tool_calls"]}
    try:
        return said_text(chat, prompt, [*before, said], tools)[0], said
    except ValueError:  # rendered behind another prompt: the stream begins anew
        return text, said
