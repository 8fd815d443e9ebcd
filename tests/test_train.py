"""The whole pipeline through its command: learning, ranks, resuming, a run's folder, and what is refused."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import zstandard
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_core.train import main

ROOT = Path(__file__).parent.parent
SORT = ["--env_path", str(ROOT / "envs/sort_digits.py"), "--max_tokens", "8", "--max_prompt_tokens", "16"]


def metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(out / "hf/policy").state_dict()


def trajectories(file: Path) -> list[dict]:
    """Its rows, each turn with all that the actor saw before it as `prompt_ids`."""
    with zstandard.ZstdDecompressor().stream_reader(file.open("rb")) as stream:
        rows = [json.loads(line) for line in io.TextIOWrapper(stream)]
    for turns in (row["turns"] for row in rows):
        seen = []
        for turn in turns:
            turn["prompt_ids"] = [*([] if turn["is_fresh"] else seen), *turn["new_ids"]]
            seen = turn["prompt_ids"] + turn["completion"]["token_ids"]
    return rows


def test_grpo_teaches_the_order_that_sft_did_not(warm_model, tmp_path):
    out = tmp_path / "run"
    flags = ["--num_steps", "60", "--optim.lr", "3e-4", "--optim.warmup_steps", "5", "--algo.clip_high", "0.28"]
    flags += ["--eval_every", "60", "--eval.num_tasks", "100"]
    assert main(["--model", str(warm_model), *SORT, *flags, "--out", str(out)]) == 0
    before, after = (
        row["eval/sort_digits/greedy_pass"] for row in metrics(out) if "eval/sort_digits/greedy_pass" in row
    )
    assert before < 0.1 and after > 0.8, (before, after)
    steps = [row for row in metrics(out) if "learn/policy/loss" in row]
    assert steps[-1]["rollout/policy/reward_mean"] > 0.6 > 0.3 > steps[0]["rollout/policy/reward_mean"]
    # On-policy, learner and engine must agree on every token's logprob; k3 is half the square of their difference.
    assert max(row["learn/policy/mismatch_kl_nats_max"] for row in steps) < 1e-7


@pytest.mark.slow
def test_the_calculator_is_learnt_over_two_turns(tiny_model, tmp_path):
    from demo_data import demo_data

    rows = demo_data("calculator", 0, 25600, 64, 64)["sft"]
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    lengths = ["--max_tokens", "24", "--max_prompt_tokens", "32"]
    sft = [
        "--algorithm",
        "sft",
        "--max_turns",
        "2",
        "--tasks_per_step",
        "64",
        "--num_steps",
        "400",
        "--optim.lr",
        "3e-3",
    ]
    assert (
        main(
            [
                "--model",
                str(tiny_model),
                *sft,
                *lengths,
                "--optim.schedule",
                "cosine",
                "--data.train",
                str(tmp_path / "sft.jsonl"),
                "--out",
                str(tmp_path / "warm"),
            ]
        )
        == 0
    )
    grpo = [
        "--env_path",
        str(ROOT / "envs/calculator.py"),
        "--num_steps",
        "150",
        "--optim.lr",
        "5e-4",
        "--optim.warmup_steps",
        "5",
    ]
    assert (
        main(
            [
                "--model",
                str(tmp_path / "warm/hf/policy"),
                *grpo,
                *lengths,
                "--algo.clip_high",
                "0.28",
                "--out",
                str(tmp_path / "run"),
                "--eval_every",
                "150",
            ]
        )
        == 0
    )
    before, after = (
        row["eval/calculator/avg@4"] for row in metrics(tmp_path / "run") if "eval/calculator/avg@4" in row
    )
    assert before < 0.3 and after > 0.75, (before, after)


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_two_ranks_do_what_one_does(algorithm, warm_model, sort_data, torchrun, tmp_path):
    flags = [
        "--model",
        warm_model,
        "--num_steps",
        3,
        "--max_tokens",
        8,
        "--max_prompt_tokens",
        16,
        "--optim.lr",
        "1e-3",
    ]
    flags += ["--algorithm", algorithm, "--tasks_per_step", 7, "--group_size", 6, "--learner.microbatch_tokens", 200]
    flags += (
        ["--env_path", ROOT / "envs/sort_digits.py"]
        if algorithm == "grpo"
        else ["--data.train", sort_data / "sft.jsonl"]
    )
    for ranks in (1, 2):
        torchrun(ranks, "-m", "rl_core.train", *flags, "--out", tmp_path / str(ranks))
    one, two = metrics(tmp_path / "1"), metrics(tmp_path / "2")
    assert len(one) == len(two) == 3
    for a, b in zip(one, two, strict=True):
        for name in ("learn/policy/loss", "learn/policy/grad_norm", "learn/policy/entropy_nats"):
            assert a[name] == pytest.approx(b[name], abs=2e-6, rel=2e-5), name
    a, b = weights(tmp_path / "1"), weights(tmp_path / "2")
    start = AutoModelForCausalLM.from_pretrained(warm_model).state_dict()
    assert max((a[n] - start[n]).abs().max() for n in a) > 1e-3
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=2e-5, rtol=1e-4)


def test_a_resumed_run_is_the_uninterrupted_run(warm_model, tmp_path):
    flags = [
        "--model",
        str(warm_model),
        *SORT,
        "--tasks_per_step",
        "4",
        "--optim.lr",
        "1e-3",
        "--optim.warmup_steps",
        "3",
    ]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([*flags, "--num_steps", "4", "--out", str(whole)]) == 0
    assert main([*flags, "--num_steps", "2", "--out", str(parts)]) == 0
    assert main([*flags, "--num_steps", "4", "--out", str(parts), "--resume"]) == 0
    names = [n for n in metrics(whole)[0] if not n.startswith("time/")]
    assert [[row[n] for n in names] for row in metrics(whole)] == [[row[n] for n in names] for row in metrics(parts)]
    a, b = weights(whole), weights(parts)
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_a_checkpoint_of_two_ranks_goes_on_with_one(warm_model, torchrun, tmp_path):
    flags = ["--model", str(warm_model), *SORT, "--tasks_per_step", "4", "--optim.lr", "1e-3"]
    assert main([*flags, "--num_steps", "4", "--out", str(tmp_path / "one")]) == 0
    torchrun(2, "-m", "rl_core.train", *flags, "--num_steps", "2", "--out", str(tmp_path / "two"))
    assert main([*flags, "--num_steps", "4", "--out", str(tmp_path / "two"), "--resume"]) == 0
    a, b = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=5e-5, rtol=1e-4)


def test_a_damaged_checkpoint_is_refused_and_named(warm_model, tmp_path, capsys):
    flags = ["--model", str(warm_model), *SORT, "--tasks_per_step", "2", "--out", str(tmp_path / "run")]
    assert main([*flags, "--num_steps", "1"]) == 0
    file = tmp_path / "run/checkpoints/step_000001/policy/rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert main([*flags, "--num_steps", "2", "--resume"]) == 1
    assert "rank_00000.safetensors" in capsys.readouterr().err


def test_a_runs_folder_holds_what_is_needed_to_look_at_it_again(warm_model, tmp_path):
    out = tmp_path / "run"
    flags = ["--model", str(warm_model), *SORT, "--tasks_per_step", "3", "--group_size", "4", "--num_steps", "2"]
    assert main([*flags, "--out", str(out), "--eval_every", "1", "--eval.num_tasks", "5", "--eval.samples", "3"]) == 0
    names = {
        "rollout/policy/reward_mean",
        "rollout/policy/length_mean",
        "rollout/policy/truncated_frac",
        "learn/policy/loss",
        "learn/policy/grad_norm",
        "learn/policy/entropy_nats",
        "learn/policy/clip_frac",
        "learn/policy/mismatch_kl_nats",
        "time/generate_s",
        "time/learn_s",
        "time/sync_s",
        "pack/fill_frac",
    }
    steps = [row for row in metrics(out) if "learn/policy/loss" in row]
    assert [row["step"] for row in steps] == [1, 2] and all(names <= row.keys() for row in steps)
    evals = [row for row in metrics(out) if "eval/sort_digits/avg@3" in row]
    assert [row["step"] for row in evals] == [0, 1, 2]
    assert {"eval/sort_digits/greedy_score", "eval/sort_digits/pass@3"} <= evals[0].keys()
    assert (out / "checkpoints/step_000002/manifest.json").is_file()
    found = trajectories(out / "rollouts/step_000002.jsonl.zst")
    assert len(found) == 12 and {t["status"] for t in found} <= {"ok", "truncated"}
    again = tmp_path / "again"
    assert main(["--config", str(out / "config.yaml"), "--out", str(again), "--num_steps", "1"]) == 0
    assert metrics(again)[1]["learn/policy/loss"] == steps[0]["learn/policy/loss"]


def test_engine_logprobs_are_the_exported_models_over_turns_and_refills(tiny_model, tmp_path):
    """Every token of every trajectory, sampled in fewer slots than episodes, against a plain Hugging Face forward."""
    out = tmp_path / "run"
    (tmp_path / "env.py").write_text(
        "max_turns = 3\n"
        "def load_tasks(split): return [{'messages': [{'role': 'user', 'content': 'x' * n}]} for n in range(1, 9)]\n"
        "def interact(messages): return [{'role': 'user', 'content': f'{len(messages)} more'}]\n"
        "def reward_fn(messages): return float(len(messages[1]['content']))\n"
    )
    flags = [
        "--model",
        str(tiny_model),
        "--env_path",
        str(tmp_path / "env.py"),
        "--max_tokens",
        "30",
        "--max_prompt_tokens",
        "40",
    ]
    flags += [
        "--rollout.max_concurrent",
        "5",
        "--tasks_per_step",
        "8",
        "--group_size",
        "3",
        "--num_steps",
        "1",
        "--optim.lr",
        "0",
    ]
    assert main([*flags, "--sampling.temperature", "0.8", "--out", str(out)]) == 0
    model = AutoModelForCausalLM.from_pretrained(out / "hf/policy", attn_implementation="eager")
    found = trajectories(out / "rollouts/step_000001.jsonl.zst")
    assert len(found) == 24 and max(len(t["turns"]) for t in found) > 1
    for trajectory in found:
        for turn in trajectory["turns"]:
            prompt, sampled = turn["prompt_ids"], turn["completion"]["token_ids"]
            with torch.no_grad():
                logits = model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]
            want = (logits / 0.8).log_softmax(-1).gather(-1, torch.tensor(sampled)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(turn["completion"]["logprobs"]), want, atol=1e-5, rtol=0)


def test_the_export_is_the_trained_model_with_its_tokenizer(warm_model):
    tokenizer = AutoTokenizer.from_pretrained(warm_model)
    model = AutoModelForCausalLM.from_pretrained(warm_model)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "31524"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    reply = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert sorted(tokenizer.decode(reply, skip_special_tokens=True)) == list("12345")


def test_failed_episodes_are_recorded_and_the_step_goes_on(tiny_model, tmp_path):
    env = tmp_path / "env.py"
    env.write_text(
        "def load_tasks(split): return [{'prompt': str(n), 'n': n} for n in range(8)]\n"
        "def reward_fn(completion, n):\n"
        "    if n == 3: raise KeyError('broken')\n"
        "    return {4: float('nan'), 5: 'good', 6: None}.get(n, len(completion) / 10)\n"
    )
    flags = [
        "--model",
        str(tiny_model),
        "--env_path",
        str(env),
        "--max_tokens",
        "8",
        "--tasks_per_step",
        "8",
        "--num_steps",
        "1",
    ]
    assert main([*flags, "--out", str(tmp_path / "run"), "--rollout.max_failed_fraction", "0.5"]) == 0
    found = trajectories(tmp_path / "run/rollouts/step_000001.jsonl.zst")
    failed = [t for t in found if t["status"] == "failed"]
    assert len(found) == 64 and len(failed) == 32 == metrics(tmp_path / "run")[0]["rollout/policy/failed"]
    assert all(t["reward"] is None and t["error"] for t in failed)
    assert {e for t in failed for e in ("broken", "nan", "'good'", "None") if e in t["error"]} == {
        "broken",
        "nan",
        "'good'",
        "None",
    }


@pytest.mark.parametrize("flag", ["--help", "--modle"])
def test_help_and_a_wrong_flag_do_not_wait_for_torch(flag):
    code = f"""import sys
from rl_core.train import main
try:
    main([{flag!r}])
except SystemExit:
    pass
assert 'torch' not in sys.modules"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_dry_run_prints_the_plan_and_makes_nothing(tiny_model, tmp_path, capsys):
    assert main(["--model", str(tiny_model), *SORT, "--out", str(tmp_path / "run"), "--dry_run"]) == 0
    shown = capsys.readouterr().out
    assert all(part in shown for part in ("tokens per step", "3072", "GiB on one rank", "KV cache"))
    assert not (tmp_path / "run").exists()


def test_mixed_precision_keeps_fp32_weights_and_learns_the_same_within_its_precision(warm_model, torchrun, tmp_path):
    flags = ["--model", warm_model, *SORT, "--tasks_per_step", 4, "--num_steps", 3, "--optim.lr", "1e-3"]
    for dtype in ("float32", "bfloat16"):
        torchrun(1, "-m", "rl_core.train", *flags, "--learner.dtype", dtype, "--out", tmp_path / dtype)
    exact, mixed = metrics(tmp_path / "float32"), metrics(tmp_path / "bfloat16")
    assert mixed[0]["learn/policy/grad_norm"] == pytest.approx(exact[0]["learn/policy/grad_norm"], rel=0.1)
    assert mixed[0]["learn/policy/grad_norm"] != exact[0]["learn/policy/grad_norm"]
    assert max(row["learn/policy/mismatch_kl_nats_max"] for row in mixed) < 1e-2
    rounded = [v.bfloat16().float().equal(v) for v in weights(tmp_path / "bfloat16").values()]
    assert not all(rounded), "the exported weights have no more precision than bfloat16"
