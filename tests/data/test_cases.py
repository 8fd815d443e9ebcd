"""Rows of tests/cases through chat templates, with the literal trained text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from rl_core.data.chat import Chat
from rl_core.data.sft_samples import as_sampled, sft_samples
from rl_core.data.tool_calls import ToolCalls
from rl_core.tools.cli import main
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
    """The text of each sample, with the trained text between « and »."""
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
    completion_ids = as_sampled([*ids, chat.end_token_id], [], True).completion
    message, has_failed = chat.tool_calls.read(
        completion_ids, 0, json.loads((folder / "tools.json").read_text())
    )
    calls = [call["function"] for call in message["tool_calls"]]
    assert (calls, has_failed) == ([{"name": "delete", "arguments": {"path": "tmp"}}], False)


def null_keys() -> list[dict]:
    """Rows of different tools, to which a table gives each other's keys."""
    rows = []
    for tool, name, value, kind in (
        ("clock", "zone", "CET", "string"),
        ("dice", "sides", 6, "integer"),
    ):
        call = {
            "id": "c1",
            "type": "function",
            "function": {"name": tool, "arguments": {name: value}},
        }
        schema = {"type": "object", "properties": {name: {"type": kind}}}
        messages = [{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": [call]}]
        tools = [{"type": "function", "function": {"name": tool, "parameters": schema}}]
        rows.append({"messages": messages, "tools": tools})
    return rows


# Blocks of `$ flags -> exit status` and the printed text.
SHOWN = (CASES / "shown.txt").read_text().split("$ ")[1:]


@pytest.mark.parametrize("block", SHOWN, ids=lambda block: block.splitlines()[0].replace("/", ":"))
def test_what_a_row_trains_is_printed(block, tiny_model, tmp_path, monkeypatch, capsys):
    shutil.copytree(CASES, tmp_path / "cases")
    monkeypatch.chdir(tmp_path / "cases")
    pq.write_table(pa.Table.from_pylist(null_keys()), "null_keys.parquet")
    command, _, expected = block.partition("\n")
    flags, status = command.split(" -> ")
    argv = ["tokens", "--model", str(tiny_model), "--data.train", *flags.split()]
    assert main(argv) == int(status)
    printed = capsys.readouterr()
    # A process that had loaded `datasets` before has its progress bars in stderr.
    shown = [line for line in printed.err.splitlines() if not line.startswith("loading torch")]
    lines = [line for line in shown if line.strip() and "examples" not in line]
    assert printed.out + "".join(f"{line}\n" for line in lines) == expected


def test_weights_and_masks_of_tokens_are_those_of_a_run(tiny_model, capsys):
    flags = f"--model {tiny_model} --data.train {CASES}/arguments_as_text.jsonl --json"
    template = f"--actors.policy.chat_template {CASES}/templates/hermes.jinja"
    assert main(["tokens", *flags.split(), *template.split(), "--sft.weights", "1,0.5"]) == 0
    (sample,) = json.loads(capsys.readouterr().out)["samples"]
    assert len(sample["ids"]) == len(sample["mask"]) == len(sample["weight"])
    assert sample["weight"][-2:] == [1.0, 1.0] and set(sample["weight"]) == {0, 0.5, 1}
    assert sample["mask"] == [int(weight > 0) for weight in sample["weight"]]
    observed = [i for i, w in zip(sample["ids"], sample["weight"], strict=True) if w == 0.5]
    text = AutoTokenizer.from_pretrained(tiny_model).decode(observed)
    assert text == "<|tool|>12:00<|end|>"


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
