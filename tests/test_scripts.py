"""The scripts that make models and data."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest
import torch
from conftest import ROOT
from demo_data import TASKS, demo_data
from make_tiny_model import CHARACTERS, bpe_tokenizer, make_tiny_model, read_texts


def test_a_tiny_model_loads_and_speaks_in_each_architecture(any_model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(any_model)
    model = AutoModelForCausalLM.from_pretrained(any_model)
    assert len(tokenizer) == model.get_input_embeddings().num_embeddings == 104
    assert model.dtype == torch.float32 and model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|end|>")
    assert model(torch.tensor([[8, 9, 10]])).logits.shape == (1, 3, 104)


def test_the_character_tokenizer_gives_back_every_text(tiny_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids = tokenizer(CHARACTERS, add_special_tokens=False)["input_ids"]
    assert len(ids) == 96 and len(set(ids)) == 96
    assert tokenizer.decode(ids) == CHARACTERS
    messages = [{"role": "user", "content": " a\n"}, {"role": "assistant", "content": "b"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|> a\n<|end|><|assistant|>b<|end|><|assistant|>"


def test_weights_depend_on_the_seed_alone(tmp_path):
    from safetensors.torch import load_file

    files = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.rand(len(files))  # whatever was drawn before
        make_tiny_model(tmp_path / name, seed=seed)
        files.append(load_file(tmp_path / name / "model.safetensors")["model.embed_tokens.weight"])
    assert torch.equal(files[0], files[1]) and not torch.equal(files[0], files[2])


def test_the_bpe_tokenizer_gives_back_text_that_it_was_not_trained_on(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "how many apples and how many pears", "n": 3}) + "\n")
    tokenizer = bpe_tokenizer(read_texts(path), vocab_size=300)
    text = "häufig\tmany  \u4f60 <|end"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer(" many")["input_ids"]) < len(" many")


@pytest.mark.parametrize("task", TASKS)
def test_no_prompt_of_the_evaluation_is_trained_on_whatever_the_seed(task):
    def prompts(rows):
        return {row["messages"][0]["content"] for row in rows}

    first, second = (demo_data(task, seed, num_sft=4000, num_train=2000, num_eval=1000) for seed in (0, 1))
    trained = prompts(first["sft"]) | prompts(first["train"])
    assert len(trained) > 500 and not trained & (prompts(first["eval"]) | prompts(second["eval"]))
    assert first == demo_data(task, 0, 4000, 2000, 1000) and first["sft"] != second["sft"]


def test_sorting_is_shown_right_only_by_chance():
    rows = demo_data("sort", 0, num_sft=6000, num_train=1, num_eval=1)["sft"]
    pairs = [[message["content"] for message in row["messages"]] for row in rows]
    assert all(sorted(prompt) == sorted(answer) for prompt, answer in pairs)
    assert 25 < sum(list(answer) == sorted(prompt) for prompt, answer in pairs) < 80  # 50 expected


def test_the_calculator_is_shown_three_habits():
    habits = Counter()
    for row in demo_data("calculator", 0, num_sft=4000, num_train=1, num_eval=1)["sft"]:
        prompt, first, *rest = [message["content"] for message in row["messages"]]
        call = first.removeprefix("<call>").removesuffix("</call>")
        habits["guess" if not rest else "right" if call == prompt else "wrong"] += 1
        if rest:
            a, b = map(int, call.split("*"))
            assert rest == [str(a * b)] * 2
    shares = [habits[habit] / 4000 for habit in ("right", "wrong", "guess")]
    assert shares == pytest.approx([0.25, 0.30, 0.45], abs=0.03)


def test_a_width_that_heads_do_not_divide_is_refused_in_one_line(tmp_path):
    command = [sys.executable, ROOT / "scripts/make_tiny_model.py", "--out", tmp_path / "x", "--hidden", "65"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "try 64" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "x").exists()
