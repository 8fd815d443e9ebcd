"""Rows of tests/cases through chat templates, with literal text of what is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_core.data.chat import Chat
from rl_core.plugins.sft import as_sampled, sft_samples
from rl_core.plugins.tool_calls import ToolCalls
from rl_core.tools.tiny_model import character_tokenizer

CASES = Path(__file__).parents[1] / "cases"


def case_chat(template: str, special: list[str]) -> Chat:
    """A tokenizer with a token per character, and `special` ones; the first one is its end."""
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": special}, replace_extra_special_tokens=False
    )
    if special:
        tokenizer.eos_token = special[0]
    text = (CASES / "templates" / f"{template}.jinja").read_text().rstrip("\n")
    return Chat(tokenizer, text, tool_reader=ToolCalls)


def trained_text(chat: Chat, row: dict) -> list[str]:
    """The text of each sample, with what is trained between « and »."""
    texts = []
    for sample in sft_samples(chat, row):
        text = ""
        for token, trained in zip(sample.token_ids, sample.loss_mask, strict=True):
            piece = chat.tokenizer.decode([int(token)])
            text += f"«{piece}»" if trained else piece
        texts.append(text.replace("»«", ""))
    return texts


CALL_ENDS = ["<|return|>", "<|call|>", "<|channel|>", "<|message|>"]
GEMMA_ENDS = ["<|end|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"]
ENDS = {
    "header_ends": (
        ["<|observation|>"],
        "<|user|>time?<|assistant|>«<tool_call>clock<arg_key>zone</arg_key><arg_value>CET"
        "</arg_value></tool_call><|observation|>»(12:00)<|assistant|>«noon<|user|>»",
    ),
    "call_ends": (
        CALL_ENDS,
        "<|user|>time?<|end|><|assistant|>«to=functions.clock<|channel|>commentary<|message|>"
        '{"zone": "CET"}<|call|>»<|tool|>12:00<|end|><|assistant|>«<|channel|>final<|message|>'
        "noon<|return|>»",
    ),
    "opens_response": (
        GEMMA_ENDS,
        '<|user|>time?<|end|><|assistant|>«<|tool_call>call:clock{"zone": "CET"}<tool_call|>'
        "<|tool_response>»value:12:00<tool_response|>«noon<|end|>»",
    ),
}


@pytest.mark.parametrize("template", ENDS)
def test_a_turn_ends_in_the_token_that_its_template_writes_there(template):
    special, text = ENDS[template]
    row = json.loads((CASES / "end_of_turn.jsonl").read_text())
    assert trained_text(case_chat(template, special), row) == [text]


@pytest.mark.parametrize("reply", ["planned", "mentioned"])
def test_a_call_within_thoughts_is_no_call(reply):
    chat, folder = case_chat("hermes", []), CASES / "calls_in_thoughts"
    ids = chat.encode((folder / f"{reply}.txt").read_text().rstrip("\n"))
    said = as_sampled([*ids, chat.end_token_id], [], True).completion
    message, has_failed = chat.tool_calls.read(
        said, 0, json.loads((folder / "tools.json").read_text())
    )
    calls = [call["function"] for call in message["tool_calls"]]
    assert (calls, has_failed) == ([{"name": "delete", "arguments": {"path": "tmp"}}], False)
