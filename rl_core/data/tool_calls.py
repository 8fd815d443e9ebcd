"""Tool calls: parses the calls in a reply by the format of the model's chat template.

`tool_calls` of a message have the form that transformers' templates read: [{"id", "type":
"function", "function": {"name", "arguments"}}], with arguments as a dictionary.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence

from rl_core.data.chat import Chat
from rl_core.data.messages import without_prefix
from rl_core.data.sft_samples import rendered_turn, said_text, shared_length, split_end
from rl_core.data.thoughts import leading_thoughts, thought_spans
from rl_core.data.token_marks import unmarked
from rl_core.data.token_stream import text_after
from rl_core.json_limits import check_value
from rl_core.types import AnyJSON, Completion, JSONObject, Message

# An argument as XML in the formats of Qwen, MiniMax and GLM.
ARGUMENT = (
    r'<(?:parameter=|parameter name="|arg_key>)(?P<key>[^<>"]+)(?:"?>|</arg_key>\s*<arg_value>)'
    r"(?P<value>(?:(?!</?(?:parameter|arg_value)\b).)*)</(?:parameter|arg_value)>"
)
MAX_REFS = 20  # A schema may refer to itself.
# Contains no special token, so that a rendering has no marks in it.
SAMPLE_TEXT = "7 9"
SAMPLES = {
    "integer": 3,
    "number": 1.5,
    "boolean": True,
    "array": [SAMPLE_TEXT],
    "object": {"k": SAMPLE_TEXT},
    "null": None,
}


def xml_calls(match: re.Match, tools: Sequence[dict]) -> list[JSONObject]:
    """A name, and arguments between tags, with types from the tool's schema."""
    name, schemas, arguments, root = match["name"], {}, {}, None
    for tool in tools:
        if tool["function"]["name"] == name:
            schemas, root = properties_of(tool["function"]), tool["function"].get("parameters")
    for argument in re.finditer(ARGUMENT, match["arguments"], re.DOTALL):
        key = argument["key"].strip()
        arguments[key] = typed_value(argument["value"], schemas.get(key, {}), root)
    return [{"name": name, "arguments": arguments}]


def json_calls(match: re.Match, tools: Sequence[dict]) -> list[JSONObject]:
    """A name with JSON arguments; without a name, a call or a list of calls."""
    value = json.loads(match["arguments"])
    if match["name"]:
        value = {"name": match["name"], "arguments": value}
    calls = []
    for call in value if isinstance(value, list) else [value]:
        arguments = call["arguments"] if "arguments" in call else call["parameters"]
        if not isinstance(call["name"], str) or not isinstance(arguments, dict):
            raise TypeError(call)
        calls.append({"name": call["name"], "arguments": arguments})
    if not calls:
        raise ValueError("no call")
    return calls


def keyed_calls(match: re.Match, tools: Sequence[dict]) -> list[JSONObject]:
    """[{"f": {"x": "a"}}, {"g": {}}]: the name of each call is the key of its arguments."""
    calls = []
    for call in json.loads(match["arguments"]):
        if not isinstance(call, dict) or not all(isinstance(v, dict) for v in call.values()):
            raise TypeError(call)
        [(name, arguments)] = call.items()
        calls.append({"name": name, "arguments": arguments})
    if not calls:
        raise ValueError("no call")
    return calls


def gemma_calls(match: re.Match, tools: Sequence[dict]) -> list[JSONObject]:
    """{city:<|"|>Rome<|"|>,days:3}: keys without quotes, strings between special tokens."""
    pieces = match["arguments"].split('<|"|>')
    for i, piece in enumerate(pieces):
        if i % 2:
            pieces[i] = json.dumps(piece)
            continue
        piece = re.sub(r"([{,]\s*)([\w.-]+)\s*:", r'\1"\2":', piece)
        pieces[i] = re.sub(r"(?<=[:\[,])None\b", "null", piece)
    return [{"name": match["name"], "arguments": json.loads("".join(pieces))}]


def python_calls(match: re.Match, tools: Sequence[dict]) -> list[JSONObject]:
    """[f(x='a'), g(n=3)]: calls with keywords and JSON values."""
    calls = []
    try:
        for call in ast.parse(match["arguments"], mode="eval").body.elts:
            if call.args:
                raise ValueError("an argument without a name")
            arguments = {}
            for keyword in call.keywords:
                # A key of None is `**arguments`.
                arguments[keyword.arg] = literal_value(keyword.value)
            if None in arguments:
                raise ValueError("arguments without names")
            calls.append({"name": ast.unparse(call.func), "arguments": arguments})
    except (SyntaxError, AttributeError, MemoryError, RecursionError) as error:
        raise ValueError(match["arguments"]) from error
    return calls


class JsonNames(ast.NodeTransformer):
    """Replaces JSON's names by Python's constants: templates write dictionaries as JSON and single
    values as Python."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        values = {"true": True, "false": False, "null": None}
        return ast.Constant(values[node.id]) if node.id in values else node


def literal_value(node: ast.expr) -> AnyJSON:
    """The value of a literal of Python, in which JSON's names may stand. Raises TypeError for one
    that JSON lacks, since templates and services could not write it."""
    return json.loads(json.dumps(ast.literal_eval(JsonNames().visit(node))))


def python_collection(text: str) -> AnyJSON:
    """The list or object that a text writes as Python; else the text."""
    try:
        value = literal_value(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, (list, dict)) else text


def typed_value(text: str, schema: AnyJSON, root: AnyJSON = None) -> AnyJSON:
    """The value of an argument that is written as text: an enumerated value of the schema; null
    where the schema allows null; the text itself where it allows a string; else the value as JSON
    or Python. `root`: the schema that `$ref` refers to."""
    text = text.removeprefix("\n").removesuffix("\n")
    types, values = allowed(schema, root)
    if values is not None and text in values:
        return text
    try:
        value = json.loads(text)
    except ValueError:
        value = {"True": True, "False": False, "None": None}.get(text.strip(), text)
        if value == text and not {"array", "object"}.isdisjoint(types):
            value = python_collection(text)
    if isinstance(value, float) and "number" not in types and "integer" in types:
        # A schema's integer may be written as 5.0; doubles are exact up to 2**53.
        value = int(value) if value.is_integer() and abs(value) <= 2**53 else value
    is_listed = values is not None and any(same_value(value, each) for each in values)
    if is_listed or (value is None and "null" in types) or "string" not in types:
        return value
    return text


def same_value(a: AnyJSON, b: AnyJSON) -> bool:
    """True if both are equal as JSON, where true is not 1."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def properties_of(function: JSONObject) -> JSONObject:
    """Schemas of a tool's parameters by name."""
    parameters = function.get("parameters") or {}
    return resolved(parameters, parameters).get("properties") or {}


def resolved(schema: AnyJSON, root: AnyJSON, depth: int = 0) -> AnyJSON:
    """A schema, or the one that its `$ref` names by a path in `root`; {} if there is none."""
    if not isinstance(schema, dict):
        return schema if schema is not None else {}
    ref = schema.get("$ref")
    if not isinstance(ref, str):
        return schema
    if depth > MAX_REFS or not ref.startswith("#"):
        return {}
    target = root
    for name in ref.removeprefix("#").strip("/").split("/"):
        target = target.get(name.replace("~1", "/").replace("~0", "~"), {}) if name else target
        if not isinstance(target, dict):
            return {}
    return resolved({**target, **{k: v for k, v in schema.items() if k != "$ref"}}, root, depth + 1)


def allowed(schema: AnyJSON, root: AnyJSON = None, depth: int = 0) -> tuple[list[str], list | None]:
    """(JSON types that all rules of a schema allow, its enumerated values or None). `true` and a
    schema without a type allow a string."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or depth > MAX_REFS:
        return ["string"], None
    rules: list[tuple[list[str], list | None]] = []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, (list, tuple)):
        rules.append(([json_type(value) for value in values], list(values)))
    if "type" in schema:
        kinds = schema["type"]
        rules.append(([kinds] if isinstance(kinds, str) else list(kinds or ()), None))
    for key in ("anyOf", "oneOf"):
        if options := [allowed(each, root, depth + 1) for each in schema.get(key) or ()]:
            listed = [value for _, values in options for value in values or ()]
            rules.append(([kind for types, _ in options for kind in types], listed or None))
    for each in schema.get("allOf") or ():
        if is_typed(resolved(each, root)):
            rules.append(allowed(each, root, depth + 1))
    if not rules:
        for key, kind in (("properties", "object"), ("items", "array")):
            if key in schema:
                return [kind], None
        return ["string"], None
    types = rules[0][0]
    for more, _ in rules[1:]:
        types = [kind for kind in types if fits(kind, more)] or types
    return types, next((values for _, values in rules if values is not None), None)


def fits(kind: str, types: list[str]) -> bool:
    return kind in types or (kind == "integer" and "number" in types)


def is_typed(schema: AnyJSON) -> bool:
    keys = ("type", "enum", "const", "anyOf", "oneOf", "allOf", "properties", "items", "$ref")
    return isinstance(schema, dict) and any(key in schema for key in keys)


def json_type(value: AnyJSON) -> str:
    """The name of a value's type in a JSON schema."""
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


# LFM2
PYTHON_CALLS = (
    r"<\|tool_call_start\|>",
    r"<\|tool_call_start\|>\s*(?P<arguments>\[.*?\])\s*<\|tool_call_end\|>",
    python_calls,
)
# Text of the template -> (start of a call, pattern of a call, parser).
FORMATS = {
    # Qwen 3.5, Qwen3-Coder, Nemotron 3
    "<function=": (
        r"<tool_call>",
        r"<tool_call>\s*<function=(?P<name>[^<>\s]+)>"
        rf"(?P<arguments>(?:\s*{ARGUMENT})*)\s*</function>\s*</tool_call>",
        xml_calls,
    ),
    # GLM 4.5
    "<arg_key>": (
        r"<tool_call>",
        r"<tool_call>\s*(?P<name>[^<>\s{]+)"
        rf"(?P<arguments>(?:\s*{ARGUMENT})*)\s*</tool_call>",
        xml_calls,
    ),
    # MiniMax M2: several calls in one element
    "<invoke name=": (
        r"<\w+:tool_call>\s*<invoke|<invoke",
        r'(?:<\w+:tool_call>\s*)?<invoke name="(?P<name>[^<>"]+)">'
        rf"(?P<arguments>(?:\s*{ARGUMENT})*)\s*</invoke>(?:\s*</\w+:tool_call>)?",
        xml_calls,
    ),
    # gpt-oss
    "<|channel|>commentary": (
        r"to=functions\.",
        r"to=functions\.(?P<name>[^\s<]+)(?:(?!to=|<\|channel\|>analysis).)*?<\|message\|>"
        r"(?P<arguments>.*?)(?:<\|call\|>|\Z)",
        json_calls,
    ),
    # Mistral: a list of calls, or a name and arguments
    "[TOOL_CALLS]": (
        r"\[TOOL_CALLS\]",
        r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)?(?:\[ARGS\])?\s*"
        r"(?P<arguments>[\[{].*?)(?=\[TOOL_CALLS\]|\Z)",
        json_calls,
    ),
    # Llama 3: the whole turn is one call
    '"parameters": ': (
        r'\A\s*(?:<\|python_tag\|>|\{\s*"name")',
        r"\A\s*(?:<\|python_tag\|>)?\s*(?P<name>)(?P<arguments>\{.*\})\s*(?:<\|eom_id\|>)?\Z",
        json_calls,
    ),
    # Gemma 4
    "<|tool_call>": (
        r"<\|tool_call>",
        r"<\|tool_call>\s*call:(?P<name>[^\s{]+)"
        r"(?P<arguments>\{.*?\})\s*<tool_call\|>(?:<\|tool_response>)?",
        gemma_calls,
    ),
    "<|tool_call_start|>": PYTHON_CALLS,
    # Apertus, whose turn may end at the closing mark
    "<|tools_prefix|>": (
        r"<\|tools_prefix\|>",
        r"<\|tools_prefix\|>\s*(?P<name>)(?P<arguments>\[.*?\])\s*(?:<\|tools_suffix\|>|\Z)",
        keyed_calls,
    ),
    "<|tool_list_start|>": PYTHON_CALLS,  # The first LFM2 template, which writes no calls itself.
    # Hermes, Qwen 2.5 and 3; the default for templates without calls
    "": (
        r"<tool_call>",
        r"<tool_call>\s*(?P<name>)(?P<arguments>\{.*?\})\s*</tool_call>",
        json_calls,
    ),
}


class ToolCalls:
    """Parses the tool calls of one chat's model, and checks the format."""

    def __init__(self, chat: Chat):
        self.chat = chat
        template = str(chat.chat_template)
        marker = next(marker for marker in FORMATS if marker in template)
        self.begins, self.call, self.calls_of = FORMATS[marker]
        self.checked: set[int] = set()  # Hashes of tools that were checked.

    def read(
        self,
        completion: Completion,
        number: int,
        tools: Sequence[dict] = (),
        prompt: str = "",
    ) -> tuple[Message | None, bool]:
        """(the message with its calls, None without calls; True if a call begins but cannot be
        parsed). Calls within thoughts do not count. `number`: of the turn, for ids. `tools`: types
        of arguments that are written as text. `prompt`: the rendering before the turn, which may
        open thoughts."""
        chat, ids = self.chat, completion.token_ids
        if ids and ids[-1] in chat.stop_token_ids:
            ids = ids[:-1]
        text = chat.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        start = leading_thoughts(text, prompt)
        thoughts, text = text[:start], text[start:]
        # The leftmost match wins: thoughts hide calls, and a call hides marks in its arguments.
        matches, rest, spoken, at = [], thoughts, "", 0
        for begin, end, match in thought_spans(text, self.call):
            spoken += text[at:begin]
            rest += text[at : begin if match else end]
            matches += [match] if match else []
            at = end
        begins = re.search(self.begins, spoken + text[at:]) is not None
        if not matches or begins:
            return None, begins
        calls = []
        try:
            for match in matches:
                for function in self.calls_of(match, tools):
                    check_value(function)  # It could not be rendered.
                    # Mistral's templates require nine characters.
                    call_id = f"call{number % 1000:03d}{len(calls) % 100:02d}"
                    calls.append({"id": call_id, "type": "function", "function": function})
        except (ValueError, TypeError, LookupError, RecursionError):
            return None, True
        rest += text[at:]
        if "<|message|>" in rest:  # gpt-oss: takes the text of its channels.
            rest = "\n".join(re.findall(r"<\|message\|>(.*?)<\|end\|>", rest, re.DOTALL))
        content = chat.special_token.sub("", rest).strip()
        return {"role": "assistant", "content": content, "tool_calls": calls}, False

    def check(self, tools: list[dict], where: str) -> None:
        """Raises ValueError if a call of one of the tools, as the chat's template writes it, cannot
        be parsed. Each tool is checked once, by itself. `where`: source of the tools."""
        user = [{"role": "user", "content": "x"}]
        for tool in tools:
            key = hash(json.dumps(tool, default=str))
            if key in self.checked:
                continue
            prompt = self.chat.render(user, [tool])
            # With a template that ignores tools the environment's messages describe them.
            if "function" in tool and prompt != self.chat.render(user):
                self.check_call(tool["function"], prompt, user, [tool], where)
            self.checked.add(key)

    def check_call(
        self, function: dict, prompt: str, user: list[Message], tools: list[dict], where: str
    ) -> None:
        chat, name = self.chat, function["name"]
        call = {"name": name, "arguments": sample_arguments(function)}
        calls = [{"id": "call00000", "type": "function", "function": call}]
        messages = [*user, {"role": "assistant", "content": "", "tool_calls": calls}]
        try:
            written = rendered_turn(chat, prompt, messages, tools)
        except ValueError:  # No prompt of this template is the beginning of a conversation.
            rendered = chat.render(messages, tools, add_generation_prompt=False)
            written = rendered[shared_length(prompt, rendered) :]
        written, _ = split_end(chat, written)
        if name not in written:
            return  # The template writes no calls, so the expected format is unknown.
        ids = chat.encode(written)
        completion = Completion(
            token_ids=ids,
            logprobs=[0.0] * len(ids),
            text="",
            finish_reason="stop",
            policy_version=0,
        )
        message, _ = self.read(completion, 0, tools)
        if message is None or [each["function"] for each in message["tool_calls"]] != [call]:
            raise ValueError(
                f"{where}: tools: the chat template of {chat.tokenizer.name_or_path} writes a call "
                f"of {name}() as {unmarked(written).strip()!r}, which is not read back; take a "
                "model whose calls are read (docs/environments.md#tools), or give another template "
                "with --actors.NAME.chat_template FILE"
            )

    def in_stream(
        self,
        prompt: str,
        before: list[Message],
        reply: Message,
        text: str,
        after: list[Message],
        tools: list | None,
    ) -> tuple[str, Message]:
        """(text of the turn as the template renders it after `prompt`, message of the turn for the
        template): the sampled text if the template renders it unchanged, else the calls."""
        chat = self.chat
        before, prefix = without_prefix(before)
        as_said = chat.template.assistant_message(prefix + text)
        try:
            messages = [*before, as_said, *after]
            # Some templates leave out a tool's result that follows no call.
            chat.check(messages, tools, replies=range(len(before) + 1))
            if text_after(chat.render(messages, tools), prompt, text) is not None:
                return text, as_said
        except ValueError:
            pass
        called = chat.template.assistant_message(reply["content"]) | {
            "tool_calls": reply["tool_calls"]
        }
        try:
            return said_text(chat, prompt, [*before, called], tools)[0], called
        except ValueError:  # The template renders another prompt, so a new stream begins.
            return text, called


def sample_arguments(function: JSONObject) -> JSONObject:
    """An argument of the right type for each of a tool's parameters."""
    arguments = {}
    for name, schema in properties_of(function).items():
        types, _ = allowed(schema, function.get("parameters"))
        kind = "string" if "string" in types else next(iter(types), "string")
        arguments[name] = SAMPLES.get(kind, SAMPLE_TEXT)
    return arguments
