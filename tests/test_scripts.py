"""The scripts that make models and data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from demo_data import TASKS, demo_data
from kit import ROOT, words
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
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "try 64" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "x").exists()


def test_the_memory_benchmark_measures_what_fits_and_says_what_the_rest_would_need(tmp_path):
    out = tmp_path / "result.json"
    flags = ["--lengths", "300", "4000", "--vocabularies", "20000", "--width", "16", "--sides", "naive", "ours"]
    command = [sys.executable, ROOT / "scripts/bench_memory.py", *flags, "--most_gib", "1.1", "--out", out]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    naive, ours, refused, long = json.loads(out.read_text())["cells"]
    assert 0 < ours["peak_mib"] < naive["peak_mib"] and ours["seconds"] > 0
    assert naive["peak_mib"] > 2 * 4 * 300 * 20_000 / 2**20
    assert "peak_mib" not in refused and refused["need_gib"] > 1.1
    assert "would need 1.2 GiB, may take 1.1" in done.stdout
    assert long["peak_mib"] < 1024


def test_the_learners_benchmark_counts_the_operations_that_torch_counts(tmp_path):
    from bench_learner import PROMPT, model_config, update_flops
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    config, length = model_config("tiny"), 100
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tokens = length - 1
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(torch.ones(1, tokens, dtype=torch.int64), use_cache=False, logits_to_keep=length - PROMPT)
    width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    unmasked = 4 * width * tokens**2 - 2 * width * tokens * (tokens + 1)  # eager attention computes what the mask hides
    assert counted.get_total_flops() == update_flops(config, length, 1) / 3 + unmasked

    command = [sys.executable, ROOT / "scripts/bench_learner.py"]
    command += words("--sizes tiny --lengths 64 --tokens 128")
    out = tmp_path / "result.json"
    subprocess.run([*command, "--steps", "1", "--out", out], check=True, capture_output=True, cwd=ROOT)
    [line] = json.loads(out.read_text())["lines"]
    assert line["documents"] == 2 and line["mfu"] > 0 and line["peak_gib"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_check_of_gpus_says_that_there_is_none(tmp_path):
    command = [sys.executable, ROOT / "scripts/gpu_check.py", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: torch sees no CUDA device") and not done.stdout


@pytest.mark.slow
def test_bench_async_runs_every_mode(tmp_path):
    out = tmp_path / "async.json"
    command = [sys.executable, ROOT / "scripts/bench_async.py", "--steps", "3", "--turn_s", "0.01", "--out", out]
    subprocess.run(command, check=True)
    runs = json.loads(out.read_text())["runs"]
    assert [r["staleness"] is None for r in runs.values()] == [True, False, False, False, False]
    assert all(r["seconds"] > 0 for r in runs.values())


@pytest.mark.slow
def test_bench_sync_measures_each_phase_and_what_is_held(tmp_path):
    out = tmp_path / "sync.json"
    size = ["--hidden", "128", "--layers", "2", "--cycles", "10", "--engine", "embedded"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "scripts/bench_sync.py", *size, "--out", out]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    [found] = json.loads(out.read_text())["engines"]
    seconds, held = found["seconds"], found["held"]
    assert found["params"] > 3e5 and seconds["all in"] >= seconds["load"] > 0 < seconds["gather"]
    assert held["this process, descriptors"]["at last"] == held["this process, descriptors"]["at first"] > 0
    assert held["this process, MiB"]["at last"] > 100 and "at first" in done.stdout
