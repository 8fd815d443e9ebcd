"""Converts rows of published data sets whose conversation, calls or preference are in other columns
or in texts: read_form() gives them the columns `messages`, `tools`, `chosen` and `rejected`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rl_core.data.canonical_messages import canonical_messages
from rl_core.data.messages import json_value, shorten, text_of
from rl_core.data.thoughts import leading_thoughts
from rl_core.types import AnyJSON, JSONObject, Message, Row

PAIR = ("chosen", "rejected")
# Columns that may say which of two replies is better.
LABELS = re.compile(
    "^(winner|labels?|choice|annotation|human_annotat|prefer|better|best|safer)|"
    "_(preference|winner|choice|preferred)$",
    re.I,
)
HH_TURN = re.compile(r"\n\n(Human|Assistant):")  # hh-rlhf
HH_REPLIES = ("chosen", "rejected", "response", "completion")
HELPSTEER_TURN = re.compile(r"\n<extra_id_1>(User|Assistant)\n")
GLAIVE_TURN = re.compile(r"(?:\A|\n\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE):")
GLAIVE_CALL, GLAIVE_END = "<functioncall>", "<|endoftext|>"
# A call whose arguments are JSON text in single quotes, which are not JSON.
QUOTED_CALL = re.compile(
    r"""\{\s*"name":\s*"([^"]*)",\s*"arguments":\s*'(.*)'\s*\}""", flags=re.DOTALL
)
HERMES_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", flags=re.DOTALL)
HERMES_RESPONSE = re.compile(r"<tool_response>(.*?)</tool_response>", flags=re.DOTALL)
ROLE_OF_TURN = {"Human": "user", "User": "user", "Assistant": "assistant"}


def read_form(row: Row, prompt_columns: Sequence[str], notes: list[str] | None = None) -> Row:
    """The row with the columns that the first fitting one of FORMS makes of it; the row itself if
    none fits, or if one of `prompt_columns` comes before the form's. Raises ValueError, with the
    form's columns, for a value that cannot be mapped."""
    for form in FORMS:
        is_read_first = first_filled(row, prompt_columns) not in (*form.columns, None)
        if not form.columns <= row.keys() or is_read_first:
            continue
        named = f"columns {', '.join(sorted(form.columns))}"
        try:
            made = form.read(row)
        except ValueError as error:
            raise ValueError(f"{named}: {error}") from None
        if notes is not None and made:
            notes.append(f"{named} read as those of {form.name}")
        return row | made
    return row


def first_filled(row: Row, names: Sequence[str]) -> str | None:
    return next((name for name in names if row.get(name) is not None), None)


def xlam_row(row: Row) -> Row:
    """The query and its calls, of xlam-function-calling-60k."""
    call = {"role": "assistant", "content": None, "tool_calls": row["answers"]}
    return {"messages": canonical_messages([{"role": "user", "content": row["query"]}, call])}


def glaive_row(row: Row) -> Row:
    """The functions in the text `system` and the turns in the text `chat`, of
    glaive-function-calling-v2."""
    text = row["system"] or ""
    if not isinstance(text, str) or not isinstance(row["chat"], str):
        raise ValueError(f"both must be texts, are {shorten([row['system'], row['chat']])}")
    instructions, tools = functions_in(text.strip().removeprefix("SYSTEM:").strip())
    messages: list[Message] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for role, turn in turns_in(GLAIVE_TURN, row["chat"]):
        if role == "ASSISTANT":
            messages.append(glaive_reply(turn.strip().removesuffix(GLAIVE_END).strip()))
        else:
            messages.append({"role": "user" if role == "USER" else "tool", "content": turn.strip()})
    return {"messages": canonical_messages(messages), "tools": tools, "system": ""}


def functions_in(text: str) -> tuple[str, list[JSONObject]]:
    """(instructions, the JSON objects of functions behind them). Raises ValueError if something
    behind the instructions is not a JSON object."""
    instructions, brace, rest = text.partition("{")
    rest, tools = brace + rest, []
    while rest.strip():
        try:
            tool, end = json.JSONDecoder().raw_decode(rest.lstrip())
        except ValueError:
            raise ValueError(f"a function is not a JSON object: {shorten(rest)}") from None
        tools.append(tool)
        rest = rest.lstrip()[end:].lstrip().removeprefix(",")
    return instructions.strip().removesuffix("-").strip(), tools


def glaive_reply(text: str) -> Message:
    content, *calls = text.split(GLAIVE_CALL)
    if not calls:
        return {"role": "assistant", "content": text}
    calls = [call_in_text(call) for call in calls]
    return {"role": "assistant", "content": content.strip() or None, "tool_calls": calls}


def call_in_text(text: str) -> JSONObject:
    """The call in a JSON text, in a Python literal, or with JSON arguments in single quotes. Raises
    ValueError for other text."""
    text = text.strip()
    call = json_value(text)
    if isinstance(call, str) and (match := QUOTED_CALL.fullmatch(text)):
        arguments = json_value(match[2])
        if isinstance(arguments, str):
            arguments = json_value(match[2].replace("\\'", "'"))
        call = {"name": match[1], "arguments": arguments}
    elif isinstance(call, str):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            call = ast.literal_eval(text)
    if not isinstance(call, dict) or "name" not in call:
        raise ValueError(f"a call is not an object with a name: {shorten(text)}")
    return call


def hermes_row(row: Row) -> Row:
    """The calls in <tool_call> and the results in <tool_response> of a conversation whose row has
    tools, such as hermes-function-calling-v1."""
    column = "messages" if row.get("messages") is not None else "conversations"
    value = json_value(row[column]) if isinstance(row[column], str) else row[column]
    marks = ("<tool_call>", "<tool_response>")
    if not row.get("tools") or not any(mark in str(value) for mark in marks):
        return {}
    messages: list[Message] = []
    for number, message in enumerate(canonical_messages(value), 1):
        content = message.get("content")
        if not isinstance(content, str):
            messages.append(message)
        elif message["role"] == "tool" and HERMES_RESPONSE.search(content):
            messages += hermes_results(message, content)
        elif message["role"] == "assistant" and not message.get("tool_calls"):
            try:
                messages.append(hermes_reply(message, content))
            except ValueError as error:
                raise ValueError(f"message {number}: {error}") from None
        else:
            messages.append(message)
    return {column: messages}


def hermes_results(message: Message, content: str) -> list[Message]:
    if HERMES_RESPONSE.sub("", content).strip():
        return [message]
    return [{**message, "content": text.strip()} for text in HERMES_RESPONSE.findall(content)]


def hermes_reply(message: Message, content: str) -> Message:
    """The message with the calls behind its thoughts and text. Raises ValueError for text behind a
    call, which has no position in a message."""
    start = leading_thoughts(content)
    text, mark, calls = content[start:].partition("<tool_call>")
    if not mark:
        return message
    calls = mark + calls
    if HERMES_CALL.sub("", calls).strip():
        raise ValueError(f"text behind a call, or a call without its end: {shorten(calls)}")
    read = [call_in_text(call) for call in HERMES_CALL.findall(calls)]
    return {**message, "content": (content[:start] + text).strip() or None, "tool_calls": read}


def exchanges_row(row: Row) -> Row:
    """The questions and answers about the images of FineVision and of the_cauldron."""
    messages: list[Message] = []
    for each in row["texts"]:
        if not isinstance(each, dict) or not {"user", "assistant"} <= each.keys():
            return {}
        messages += exchange(each["user"], each["assistant"])
    return {"messages": canonical_messages(messages)}


def hh_row(row: Row) -> Row:
    """The prompt of hh-rlhf's text that ends in "Assistant:", and the replies without the space
    behind that."""
    prompt = row["prompt"]
    if not is_hh(prompt) or not prompt.rstrip().endswith("Assistant:"):
        return {}
    names = [name for name in HH_REPLIES if isinstance(row.get(name), str)]
    return {"prompt": conversation_in(prompt, "user")} | {n: row[n].strip() for n in names}


def is_hh(text: object) -> bool:
    is_text = isinstance(text, str)
    return is_text and text.lstrip().startswith("Human:") and "\n\nAssistant:" in text


def ranked(first: AnyJSON, second: AnyJSON, preference: float) -> Row:
    chosen, rejected = (second, first) if preference > 0 else (first, second)
    made = {"chosen": chosen, "rejected": rejected}
    return made | ({"tied": True} if preference == 0 else {})


def arena_row(row: Row) -> Row:
    """The two conversations of arena-human-preference-55k, whose columns are JSON texts of a list
    with each turn's text."""
    turns = [json_value(row[name]) for name in ("prompt", "response_a", "response_b")]
    if not all(isinstance(texts, list) and len(texts) == len(turns[0]) for texts in turns):
        return {}
    asked, *replies = turns
    sides = []
    for texts in replies:
        turns = zip(asked, texts, strict=True)
        sides.append([m for question, reply in turns for m in exchange(question, reply)])
    preference = bool(row["winner_model_b"]) - bool(row["winner_model_a"])
    made = ranked(sides[0], sides[1], preference)
    return made | {"messages": [{"role": "user", "content": asked[0]}]}


def exchange(question: AnyJSON, reply: AnyJSON) -> list[JSONObject]:
    return [
        {"role": "user", "content": question or ""},
        {"role": "assistant", "content": reply or ""},
    ]


def scored_row(row: Row) -> Row:
    """The question and the two answers of webgpt_comparisons by their scores."""
    asked = row["question"]
    if not isinstance(asked, dict) or "full_text" not in asked or row.get("chosen") is not None:
        return {}
    pair = ranked(row["answer_0"], row["answer_1"], row["score_1"] - row["score_0"])
    return pair | {"prompt": asked["full_text"]}


@dataclass(kw_only=True, slots=True)
class Form:
    """A published form: the columns that a row must have, and the columns made of them."""

    name: str
    columns: set[str]
    read: Callable[[Row], Row]


def pair_form(
    name: str,
    prompt: str,
    replies: tuple[str, str],
    preference: str,
    sides: dict[AnyJSON, int] | None = None,
) -> Form:
    """The form of a pair of replies with a preference: negative for the first one, positive for the
    second one, 0 for a tie. `prompt`: column of its prompt, or "". `sides`: the preferences of
    labels."""

    def read(row: Row) -> Row:
        value = label = row[preference]
        if row.get("chosen") is not None:
            return {}
        if sides is not None:
            label = label.strip().lower() if isinstance(label, str) else label
            value = sides.get(label) if isinstance(label, (str, int, float)) else None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            rule = f"one of {', '.join(map(str, sides))}" if sides else "a number"
            raise ValueError(f"{preference} must be {rule}, is {shorten(label)}")
        made = ranked(row[replies[0]], row[replies[1]], value)
        return made if prompt in ("", "prompt") else made | {"prompt": row[prompt], "history": None}

    return Form(name=name, columns={*replies, preference, prompt} - {""}, read=read)


WINNERS = {"model_a": -1, "model_b": 1, "tie": 0, "tie (bothbad)": 0, "both_bad": 0}
FORMS = [
    Form(name="xlam-function-calling", columns={"query", "answers", "tools"}, read=xlam_row),
    Form(name="glaive-function-calling", columns={"system", "chat"}, read=glaive_row),
    Form(name="hermes-function-calling", columns={"conversations", "tools"}, read=hermes_row),
    Form(name="hermes-function-calling", columns={"messages", "tools"}, read=hermes_row),
    pair_form("HelpSteer 2", "prompt", ("response_1", "response_2"), "preference_strength"),
    pair_form("HelpSteer 3", "context", ("response1", "response2"), "overall_preference"),
    pair_form(
        "PKU-SafeRLHF", "prompt", ("response_0", "response_1"), "better_response_id", {0: -1, 1: 1}
    ),
    pair_form("SHP", "history", ("human_ref_A", "human_ref_B"), "labels", {1: -1, 0: 1}),
    pair_form("Chatbot Arena", "", ("conversation_a", "conversation_b"), "winner", WINNERS),
    Form(
        name="arena-human-preference-55k",
        columns={"prompt", "response_a", "response_b", "winner_model_a", "winner_model_b"},
        read=arena_row,
    ),
    Form(
        name="webgpt_comparisons",
        columns={"question", "answer_0", "answer_1", "score_0", "score_1"},
        read=scored_row,
    ),
    Form(name="FineVision", columns={"images", "texts"}, read=exchanges_row),
    Form(name="hh-rlhf", columns={"prompt"}, read=hh_row),
]


def turns_in(pattern: re.Pattern[str], text: str) -> list[tuple[str, str]]:
    """(name, text) of each turn. Raises ValueError for text before the first one."""
    before, *parts = pattern.split(text)
    if before.strip() or not parts:
        raise ValueError(f"a turn must begin with {pattern.pattern!r}, is {shorten(text)}")
    return list(zip(parts[::2], parts[1::2], strict=True))


def conversation_in(value: AnyJSON, role: str) -> AnyJSON:
    """The messages in hh-rlhf's or HelpSteer's text, or in Capybara's list of inputs and outputs;
    any other value is returned unchanged. A reply of `role` that is empty is kept; at the end of
    another text it stands for the generation prompt."""
    if isinstance(value, (list, tuple)) and value and all(map(is_exchange, value)):
        return [m for each in value for m in exchange(each["input"], each["output"])]
    if not isinstance(value, str):
        return value
    if is_hh(value):
        turns = turns_in(HH_TURN, f"\n\n{value.lstrip()}")
    elif HELPSTEER_TURN.search(value):
        turns = turns_in(HELPSTEER_TURN, f"\n<extra_id_1>User\n{value}")
    else:
        return value
    messages = [{"role": ROLE_OF_TURN[name], "content": text.strip()} for name, text in turns]
    last = messages[-1]
    if role != "assistant" and last["role"] == "assistant" and not text_of(last):
        messages.pop()
    return messages


def is_exchange(value: object) -> bool:
    return isinstance(value, dict) and value.keys() == {"input", "output"}
