"""Rows of tests/cases through chat templates, with literal text of what is trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rl_core.cli import main
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


CALLED = '«<tool_call>{"name": "clock", "arguments": {"zone": "CET"}}</tool_call><|end|>»'
SHOWN = [
    ("hermes", "arguments_as_text", "sft", 0, [f"<|assistant|>{CALLED}<|tool|>12:00<|end|>"]),
    ("hermes", "assistant_first", "sft", 0, ["<|assistant|>Hello.<|end|><|user|>Hi<|end|>"]),
    ("hermes", "roles", "sft", 1, ["<|system|>Answer in French.", "refused: ", "'image_url'"]),
    ("no_calls", "calls", "sft", 1, ["refused: message 2", "the call of clock()"]),
    (
        "hermes",
        "not_trained",
        "sft",
        0,
        ["5<|end|><|user|>no<|end|><|assistant|>«4<|end|>»", "message 2: not trained (weight)"],
    ),
    ("hermes", "tools_of_a_row", "grpo", 0, ['<|system|>tools:[{"type"', "time?<|end|><|assist"]),
]


@pytest.mark.parametrize(("template", "rows", "algorithm", "status", "texts"), SHOWN)
def test_what_a_row_trains_is_printed(template, rows, algorithm, status, texts, tiny_model, capsys):
    paths = [f"{CASES}/{rows}.jsonl", f"{CASES}/templates/{template}.jinja"]
    flags = ["--data.train", paths[0], "--chat_template", paths[1], "--algorithm", algorithm]
    flags += ["--model", str(tiny_model)]
    assert main(["tokens", *flags]) == status
    printed = capsys.readouterr().out
    num_rows = len(Path(paths[0]).read_text().splitlines())
    assert printed.count("== row ") == num_rows
    assert not [text for text in texts if text not in printed], printed
    assert main(["tokens", *flags, "--json", "--rows", "1"]) == (status and "no_" in template)
    report = json.loads(capsys.readouterr().out)
    for sample in report.get("samples", ()):
        assert len(sample["ids"]) == len(sample["mask"]) == len(sample["weight"]) > 0
        assert any(sample["mask"]) == (algorithm == "sft")


def test_an_export_has_trained_ends_and_processor_files(tiny_model, tmp_path):
    """The base model ends at another token than its chat template."""
    base, out = tmp_path / "base", tmp_path / "out"
    shutil.copytree(tiny_model, base)
    for name in ("generation_config.json", "config.json"):
        settings = json.loads((base / name).read_text())
        (base / name).write_text(json.dumps(settings | {"eos_token_id": 3}))
    settings = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|begin|>"}))
    files = {
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor"},
        "processor_config.json": {"processor_class": "Qwen2_5_VLProcessor"},
        "video_preprocessor_config.json": {"video_processor_type": "Qwen2VLVideoProcessor"},
        "audio_tokenizer_config.json": {"audio_tokenizer_class": "DacModel"},
    }
    # Another template than the tokenizer's, which transformers would read before it.
    other = {"chat_template": "other"}
    for name, settings in (files | {"chat_template.json": {}}).items():
        (base / name).write_text(json.dumps(settings | other))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "response": "2"}\n')
    flags = f"--algorithm sft --model {base} --data.train {tmp_path}/rows.jsonl --out {out}"
    assert main(["train", *flags.split(), *["--tasks_per_step", "1", "--num_steps", "1"]]) == 0
    generation = json.loads((out / "hf/policy/generation_config.json").read_text())
    assert generation["eos_token_id"] == [1, 3]  # <|end|>, <|begin|>
    assert {name: json.loads((out / "hf/policy" / name).read_text()) for name in files} == files
    assert not (out / "hf/policy/chat_template.json").exists()
