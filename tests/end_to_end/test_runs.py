"""Runs through the command: resumed they are the uninterrupted run, and on several ranks they are
the run of one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from kit import (
    LETTERS,
    ROOT,
    STOP,
    metrics,
    resume_after,
    rewind,
    run,
    steps,
    trajectories,
    wait_until,
    weights,
    words,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl_core.config import read_config
from rl_core.tools.cli import main as command
from rl_core.train import main

RL = (
    "--model {model} --env_path {dir}/letters.py --max_tokens 10 --max_prompt_tokens 24 "
    "--tasks_per_step 4 --group_size 4"
)
FIT = "--model {model} --max_tokens 40 --max_prompt_tokens 24 --max_turns 3 --tasks_per_step 7"
TWO = (
    "--actors.bob.model {model} --actors.alice.model {other} --env_path {dir}/talk.py --max_tokens "
    "20"
    f" --max_prompt_tokens 60 --tasks_per_step 4 --group_size 4 {STOP}"
)
SHARED = (
    TWO.replace(".alice.model {other}", ".alice.lora_base bob")
    + " --actors.bob.lora.rank 4 --actors.alice.lora.rank 2"
)
LORA = "--actors.policy.lora.rank 4"
SFT = f"{FIT} --algorithm sft --data.train {{dir}}/rows.jsonl"
DPO = f"{FIT} --algorithm dpo --data.train {{dir}}/pairs.jsonl"
RM = DPO.replace("dpo", "rm")
PPO = f"{RL} --algorithm ppo --critic.lr 1e-2"
TALK = RL.replace("letters", "ask")  # over several turns
OLDER = "--rollout.stale_policy_frac 0.5 --rollout.stale_policy_refresh 3"
MEAN = f"{RL} --algo.kl_coef 0.1 --algo.reference_decay 0.5"
SELF = f"{RL} --algorithm opd --env_path {{dir}}/taught.py --algo.teacher self"
STREAM = "--data.streaming --data.shuffle_buffer 4"

# Runs that SIGTERM ends and those that are resumed at the end of their steps.
ENDED = {
    "warm-up": f"{RL} --optim.warmup_steps 3",
    "curriculum": f"{RL} --env_path {{dir}}/weighted.py",
    "older weights": f"{TALK} {STOP} {OLDER}",
    "sft": SFT,
}
RESUMED = {
    "epochs and KL": f"{RL} --learner.epochs 2 --learner.updates_per_epoch 2 --algo.kl_coef 0.1",
    "refilled groups": f"{RL} --algorithm dapo --env_path {{dir}}/digits.py",
    "critic": f"{PPO} --critic.warmup_steps 1 --learner.epochs 2",
    "shared model": SHARED,
    "older adapters": f"{RL} {LORA} {OLDER}",
    "older weights of two": f"{TWO} {OLDER} --rollout.engines_awake one",
    "mean reference": f"{MEAN} {LORA} --learner.offload always",
    "reference in bf16": f"{RL} --algo.kl_loss k3,0.1 --algo.kl_reward k1,0.1 --num_steps 5 "
    "--algo.reference_every 2 --save_every 3 --learner.dtype bfloat16",
    "self-teacher": f"{SELF} --algo.teacher_update ema",
    "self-teacher of the start": f"{SELF} --algo.teacher_update start",
    "stream": f"{RL} --data.train {{dir}}/pairs.jsonl {STREAM} --tasks_per_step 7 --group_size 2",
    "rm": RM,
    "8 bits": f"{RL} --optim.name adamw8bit",
    "sgd": f"{RL} --optim.name sgd --optim.lr 0.1",
}


@pytest.fixture(scope="module")
def make_flags(places):
    """given(flags) -> arguments, with a rate at which runs learn."""
    hooks = {
        "weighted": "def task_weight(prompt, mean_reward): return 1 + (mean_reward or 0)\n",
        "taught": "async def teacher_prompt(task): return f'{task.id} is {task.row}'\n",
    }
    for name, hook in hooks.items():
        Path(places["dir"], f"{name}.py").write_text(LETTERS + hook)
    return lambda flags: words("--optim.lr 1e-2", flags.format(**places))


def lasting(rows: list[dict]) -> list[dict]:
    """Values that must not depend on when a run was stopped."""
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "rollout/engine_switch"))}
        for row in rows
    ]


def assert_same_weights(one, two, **tolerance) -> None:
    files = [sorted(out.glob("hf/*/*.safetensors")) for out in (one, two)]
    assert files[0] and [f.parent.name for f in files[0]] == [f.parent.name for f in files[1]]
    for a, b in zip(*(map(load_file, result) for result in files), strict=True):
        assert a.keys() == b.keys()
        for name in a:
            torch.testing.assert_close(a[name], b[name], **(tolerance or {"atol": 0, "rtol": 0}))


SAVES = "--save_every 2 --keep_checkpoints 0"


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_is_the_uninterrupted_run(case, make_flags, tmp_path, monkeypatch):
    monkeypatch.setattr("rl_core.run.saving.checkpoint.FILE_BYTES", 1 << 14)
    flags = words("--num_steps 4", SAVES, make_flags(RESUMED[case]))
    out = run(tmp_path / "run", flags)
    checkpoint = min(out.glob("checkpoints/step_*"))
    assert len([*checkpoint.glob("*/*.safetensors")]) > 2
    full = resume_after(out, int(checkpoint.name[5:]), flags)
    assert len(steps(out)) >= 4 and lasting(steps(out)) == lasting(steps(full))
    assert_same_weights(full, out)


def end_after_a_step(out: Path) -> None:
    """Sends SIGTERM to this process once the run there has done a step, at whatever it does."""

    def send() -> None:
        wait_until(lambda: (out / "metrics.jsonl").exists() and steps(out), "a step")
        assert callable(signal.getsignal(signal.SIGTERM)), "it would end the tests"
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send, daemon=True).start()


@pytest.mark.parametrize("case", ENDED)
def test_a_run_that_sigterm_ends_goes_on_bit_for_bit(case, make_flags, tmp_path):
    # An evaluation is due at every step, and so at the one at which it ends.
    flags = words(
        make_flags(ENDED[case]),
        "" if case == "sft" else "--eval_every 1 --eval.samples 0 --eval.num_tasks 2",
    )
    full, parts = tmp_path / "whole", tmp_path / "parts"
    end_after_a_step(parts)
    assert main(words(flags, "--num_steps 100000 --out", parts)) == 128 + signal.SIGTERM
    last = steps(parts)[-1]["step"]
    assert (parts / f"checkpoints/step_{last:06d}/manifest.json").is_file() and (
        parts / "hf/policy"
    ).is_dir()
    for out in (parts, full):
        run(out, flags, "--resume --num_steps", last + 2)
    assert lasting(metrics(parts)) == lasting(metrics(full))
    assert_same_weights(parts, full)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# Name -> flags, and further flags on two ranks.
TWO_RANKS = {
    "grpo": (f"{RL} --tasks_per_step 7 --group_size 3 --learner.microbatch_tokens 100", ""),
    "gspo": (
        f"{RL} --algorithm gspo --algo.kl_coef 0.1 --learner.updates_per_epoch 2 --algo.target_kl 0.5",
        "",
    ),
    "refilled": (f"{RL} --algorithm dapo --env_path {{dir}}/digits.py", ""),
    "reinforce_pp": (f"{RL} --algorithm reinforce_pp --algo.kl_coef 0.1", ""),
    "one episode": (f"{PPO} --tasks_per_step 1 --group_size 1", ""),
    "gae, cispo": (
        f"{RL} --algorithm cispo --algo.advantage gae --learner.updates_per_epoch 2",
        "",
    ),
    "normalized": (f"{TALK} {STOP} --algo.normalize env --algo.turn_discount 0.9", ""),
    "states": (f"{RL.replace('letters', 'keyed')} {STOP} --algo.turn_discount 0.9", ""),
    "sft": (f"{SFT} --learner.microbatch_tokens 200 --sft.weights 0.25,0.5", ""),
    "sft of a stream": (f"{SFT} {STREAM}", ""),
    "dpo": (DPO, ""),
    "kto": (f"{FIT} --algorithm kto --data.train {{dir}}/labelled.jsonl", ""),
    "rm, one pair": (f"{RM} --tasks_per_step 1", ""),
    "adapter": (f"{RL} {LORA}", ""),
    "two actors": (TWO, "--learner.offload phase"),
    "shared, 4 bits": (
        f"{SHARED} --actors.bob.lora.quantize nf4 --algo.kl_coef 0.1",
        "--learner.offload phase",
    ),
    "offload": (
        f"{PPO} --tasks_per_step 5 --group_size 3 --algo.kl_coef 0.1 --critic.warmup_steps 1",
        "--learner.offload always",
    ),
    "older weights": (f"{RL} {OLDER} --num_steps 4", ""),
    "engine ranks, older weights": (
        f"{RL} {OLDER} --num_steps 4 --eval_every 2",
        "--rollout_ranks 1",
    ),
    "tp": (f"{PPO} --algo.kl_coef 0.1", "--tp 2"),
    "tp, mean reference": (MEAN, "--tp 2"),
    "tp, self-teacher": (
        f"{SELF} --algo.teacher_update ema --algo.teacher_loss reverse_kl",
        "--tp 2",
    ),
    "tp, shared": (f"{SHARED} --algo.kl_coef 0.1", "--tp 2"),
    "cp": (f"{PPO} --algo.kl_coef 0.1", "--cp 2"),
}
COMPARED = (
    "loss",
    "grad_norm",
    "entropy_nats",
    "kl_nats",
    "updates",
    "reward_mean",
    "score",
    "explained_variance",
)
COMPARED += ("length_p50", "length_p95", "length_max", "pack/tokens", "shared_state_frac")


@pytest.mark.parametrize("case", TWO_RANKS)
def test_two_ranks_do_what_one_does(case, make_flags, tmp_path):
    flags, more = TWO_RANKS[case]
    # Not AdamW, which makes a step of full size out of a gradient that is nothing but rounding.
    flags = words("--num_steps 2 --optim.name sgd", make_flags(flags), "--optim.lr 0.05")
    one, two = run(tmp_path / "one", flags), run(tmp_path / "two", flags, more, ranks=2)
    assert len(metrics(one)) == len(metrics(two))
    for a, b in zip(metrics(one), metrics(two), strict=True):
        names = [n for n in a if n.endswith(COMPARED) and "mismatch" not in n]
        assert {n: b.get(n) for n in names} == pytest.approx(
            {n: a[n] for n in names}, abs=1e-5, rel=1e-4
        )
    assert_same_weights(one, two, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "flags, before, after",
    [
        pytest.param(PPO, 1, 2, id="ppo"),
        pytest.param(f"{RL} {LORA}", 2, 1, id="lora"),
        pytest.param(f"{MEAN} --learner.offload always", 2, 1, id="mean reference"),
        pytest.param(f"{RL} {OLDER}", 1, 2, id="older"),
        pytest.param(f"{RL} {OLDER}", 2, 1, id="older, fewer"),
    ],
)
def test_a_run_goes_on_with_another_number_of_ranks(flags, before, after, make_flags, tmp_path):
    flags = words(make_flags(flags), "--optim.name sgd --optim.lr 0.05 --num_steps 5", SAVES)
    out = run(tmp_path / "run", flags, ranks=before)
    full = resume_after(out, 2, flags, ranks=after)
    assert_same_weights(full, out, atol=2e-5, rtol=1e-4)


def test_a_run_on_split_models_goes_on_with_unsplit_ones(make_flags, tmp_path):
    flags = words(make_flags(f"{PPO} --algo.kl_coef 0.1"), "--optim.name sgd --optim.lr 0.05")
    flags = words(flags, "--num_steps 5", SAVES)
    out = run(tmp_path / "run", flags, "--tp 2", ranks=2)
    full = resume_after(out, 2, flags)
    assert_same_weights(full, out, atol=2e-5, rtol=1e-4)


def test_checkpoints_beyond_those_that_are_kept_are_deleted(make_flags, tmp_path):
    for keep, left in ((2, [2, 3]), (0, [1, 2, 3])):
        out = run(
            tmp_path / str(keep),
            make_flags(RL),
            f"--num_steps 3 --save_every 1 --keep_checkpoints {keep}",
        )
        assert sorted(int(p.name[5:]) for p in (out / "checkpoints").glob("step_*")) == left
    assert not (
        run(tmp_path / "seldom", make_flags(RL), "--num_steps 2") / "checkpoints/step_000001"
    ).exists()


def test_a_runs_folder_holds_what_is_needed_to_look_at_it_again(make_flags, tmp_path):
    flags = words(
        make_flags(RL),
        "--tasks_per_step 3 --num_steps 2 --eval_every 1 --eval.num_tasks 5 --eval.samples 3",
    )
    out = run(tmp_path / "run", flags)
    names = (
        "rollout/policy/reward_mean rollout/policy/length_mean rollout/policy/truncated_frac "
        "learn/policy/loss"
    )
    names += (
        " learn/policy/grad_norm learn/policy/entropy_nats learn/policy/clip_frac "
        "learn/policy/mismatch_kl_nats"
    )
    names += " time/generate_s time/learn_s time/sync_s pack/fill_frac"
    assert [row["step"] for row in steps(out)] == [1, 2] and all(
        {*names.split()} <= row.keys() for row in steps(out)
    )
    evals = [row for row in metrics(out) if "eval/letters/avg@3" in row]
    assert [row["step"] for row in evals] == [0, 1, 2]
    assert {"eval/letters/greedy_score", "eval/letters/pass@3"} <= evals[0].keys()
    result = trajectories(out / "rollouts/step_000002.jsonl.zst")
    assert len(result) == 12 and {t["status"] for t in result} <= {"ok", "truncated"}
    again = run(tmp_path / "again", "--config", out / "config.yaml", "--num_steps 1")
    assert steps(again)[0]["learn/policy/loss"] == steps(out)[0]["learn/policy/loss"]


def test_engine_logprobs_are_the_exported_models_over_turns_and_refills(make_flags, tmp_path):
    """Every token of every trajectory, sampled in fewer slots than episodes, against a plain
    Hugging Face forward."""
    flags = words(
        make_flags(TALK),
        STOP,
        "--rollout.max_concurrent 5 --tasks_per_step 8 --group_size 3 --num_steps 1",
    )
    out = run(tmp_path / "run", flags, "--optim.lr 0 --sampling.temperature 0.8")
    model = AutoModelForCausalLM.from_pretrained(out / "hf/policy", attn_implementation="eager")
    result = trajectories(out / "rollouts/step_000001.jsonl.zst")
    assert len(result) == 24 and max(len(t["turns"]) for t in result) > 1
    for turn in (turn for t in result for turn in t["turns"]):
        prompt, sampled = turn["prompt_ids"], turn["completion"]["token_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]
        want = (logits / 0.8).log_softmax(-1).gather(-1, torch.tensor(sampled)[:, None])[:, 0]
        torch.testing.assert_close(
            torch.tensor(turn["completion"]["logprobs"]), want, atol=1e-5, rtol=0
        )


def test_failed_episodes_are_recorded_and_the_step_goes_on(tiny_model, tmp_path):
    (tmp_path / "env.py").write_text(
        "def load_tasks(split): return [{'prompt': str(n), 'n': n} for n in range(8)]\n"
        "def reward_fn(completion, n):\n"
        "    if n == 3: raise KeyError('broken')\n"
        "    return {4: float('nan'), 5: 'good', 6: None}.get(n, len(completion) / 10)\n"
    )
    flags = words(
        "--model",
        tiny_model,
        "--env_path",
        tmp_path / "env.py",
        "--max_tokens 8 --tasks_per_step 8",
    )
    out = run(tmp_path / "run", flags, "--num_steps 1 --rollout.max_failed_fraction 0.5")
    result = trajectories(out / "rollouts/step_000001.jsonl.zst")
    failed = [t for t in result if t["status"] == "failed"]
    assert len(result) == 64 and len(failed) == 32 == metrics(out)[0]["rollout/policy/failed"]
    assert all(t["reward"] is None and t["error"] for t in failed)
    causes = {"broken", "nan", "'good'", "None"}
    assert {e for t in failed for e in causes if e in t["error"]} == causes


def test_mixed_precision_keeps_fp32_weights(make_flags, tmp_path):
    exact, mixed = (
        run(
            tmp_path / dtype, make_flags(RL), "--num_steps 3 --optim.lr 1e-3 --learner.dtype", dtype
        )
        for dtype in ("float32", "bfloat16")
    )
    a, b = steps(exact), steps(mixed)
    assert b[0]["learn/policy/grad_norm"] == pytest.approx(a[0]["learn/policy/grad_norm"], rel=0.1)
    assert b[0]["learn/policy/grad_norm"] != a[0]["learn/policy/grad_norm"]
    assert max(row["learn/policy/mismatch_kl_nats_max"] for row in b) < 1e-2
    rounded = [v.bfloat16().float().equal(v) for v in weights(mixed).values()]
    assert not all(rounded), "the exported weights have no more precision than bfloat16"


@pytest.mark.parametrize("flag", ["--help", "--modle"])
def test_help_and_a_wrong_flag_do_not_wait_for_torch(flag):
    no_torch = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None"
    code = f"{no_torch}; from rl_core.train import main; main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, flag], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "--tasks_per_step" in done.stdout or "did you mean 'model'" in done.stderr, done.stderr


# Several actors and environments


def test_each_actor_learns_from_its_own_turns(make_flags, tmp_path):
    out = run(tmp_path / "run", make_flags(TWO), "--num_steps 2 --eval_every 2 --eval.samples 2")
    for name in ("bob", "alice"):
        assert {f"learn/{name}/loss", f"rollout/{name}/reward_mean", f"learn/{name}/lr"} <= steps(
            out
        )[-1].keys()
        assert any(key.startswith(f"eval/talk/{name}/avg@2") for key in metrics(out)[-1])
    result = trajectories(out / "rollouts/step_000001.jsonl.zst")
    assert {t["actor"] for t in result} == {"bob", "alice"} and ("bob", 2) in {
        (t["actor"], len(t["turns"])) for t in result
    }
    for t in result:
        printed = [m["content"] for m in t["messages"] if m["role"] == "assistant"][-1]
        assert t["reward"] == sum(map(ord, printed)) / (1000 if t["actor"] == "bob" else -1000)


def test_a_frozen_actor_speaks_and_stays_as_it_is(make_flags, places, tmp_path):
    out = run(
        tmp_path / "run",
        make_flags(TWO),
        "--num_steps 2 --actors.alice.train false --actors.bob.optim.lr 2e-2",
    )
    assert not (out / "hf/alice").exists() and not any("alice" in key for key in steps(out)[-1])
    assert (
        steps(out)[-1]["learn/bob/lr"] == pytest.approx(2e-2)
        and steps(out)[-1]["rollout/bob/turns_mean"] > 1
    )
    recorded = trajectories(out / "rollouts/step_000001.jsonl.zst")
    assert {t["actor"] for t in recorded} == {"bob"}
    before = load_file(f"{places['model']}/model.safetensors")
    assert any(not torch.equal(before[key], value) for key, value in weights(out, "bob").items())


def test_two_environments_are_mixed_by_weight_and_their_groups_apart(places, tmp_path):
    count = "def load_tasks(split): return [{{'prompt': str(n)}} for n in range(10)]\n"
    count += "def reward_fn(completion): return float(completion.count({0!r}))\n"
    for name in "abc":
        (tmp_path / f"{name}.py").write_text(
            count.format(name) + ("max_turns = 3\n" if name == "a" else "")
        )
    paths = ",".join(str(tmp_path / f"{name}.py") for name in "abc")
    flags = words(
        "--model",
        places["model"],
        "--env_path",
        paths,
        "--tasks_per_step 4 --group_size 4 --max_tokens 6",
    )
    flags += words(
        "--envs.a.weight 3 --envs.c.weight 0 --envs.b.max_tokens 2 --eval_every 2 "
        "--max_prompt_tokens 60"
    )
    out = run(tmp_path / "run", flags, "--num_steps 2")
    for step in (1, 2):
        result = trajectories(out / f"rollouts/step_{step:06d}.jsonl.zst")
        assert sorted(t["env"] for t in result) == ["a"] * 12 + ["b"] * 4
        assert all(
            len(t["turns"][0]["completion"]["token_ids"]) <= (2 if t["env"] == "b" else 6)
            for t in result
        )
        assert all(t["reward"] == t["messages"][-1]["content"].count(t["env"]) for t in result)
        assert len({(t["env"], t["group_id"]) for t in result}) == 4
    assert {"rollout/policy/a/reward_mean", "rollout/policy/b/reward_mean"} <= steps(out)[-1].keys()
    assert {f"eval/{name}/greedy_score" for name in "abc"} <= metrics(out)[-1].keys()
    assert main(words("--config", out / "config.yaml", "--resume --num_steps 3")) == 0


def rows_in(folder: Path, **files: list[dict]) -> list[str]:
    """Flags that name the file train.jsonl, and the others as held-out sets."""
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = ",".join(f"{name}={folder}/{name}.jsonl" for name in files if name != "train")
    return words(
        "--data.train", folder / "train.jsonl", "--data.eval", sets, "--eval_every 9 --max_tokens 4"
    )


def test_held_out_sets_have_names_and_epochs_are_steps(places, tmp_path):
    (tmp_path / "env.py").write_text("def reward_fn(completion, answer): return float(answer)\n")
    rows = [{"prompt": "1", "solution": str(n)} for n in range(7)]
    files = rows_in(
        tmp_path, train=rows, gsm8k=rows[1:2], aime=[{"prompt": "2", "answer": "5"}, *rows[3:4]]
    )
    files += words("--max_prompt_tokens 40 --tasks_per_step 3 --model", places["model"])
    flags = words(
        files,
        "--env_path",
        tmp_path / "env.py",
        "--data.columns answer=solution --num_epochs 1.5 --group_size 2",
    )
    # Rewards differ between tasks alone, from which this algorithm learns too.
    out = run(tmp_path / "run", flags, "--algorithm reinforce_pp")
    assert len(steps(out)) == 4  # 1.5 * 7 / 3 = 3.5
    last = metrics(out)[-1]
    assert (
        last["eval/gsm8k/greedy_score"],
        last["eval/aime/greedy_score"],
        last["eval/aime/avg@4"],
    ) == (1, 4, 4)
    result = trajectories(out / "rollouts/eval_000004_greedy_aime.jsonl.zst")
    assert [(t["task_id"], t["env"], t["reward"]) for t in result] == [
        ("eval/aime/0", "env", 5),
        ("eval/aime/1", "env", 3),
    ]
    assert main(words("--config", out / "config.yaml", "--resume --num_steps 5")) == 0
    two = words(
        "--env_path",
        f"{tmp_path}/env.py,{places['dir']}/letters.py",
        "--envs.letters.weight 0 --envs.env.train",
    )
    # A set of two files.
    named = files[1], "--envs.env.eval", files[3].replace(",", f",{tmp_path}/train.jsonl,")
    out = run(
        tmp_path / "two", files[4:], two, *named, "--data.columns answer=solution --num_steps 0"
    )
    [row] = metrics(out)
    assert (row["eval/env/gsm8k/greedy_score"], row["eval/env/aime/greedy_score"]) == (22 / 8, 4)
    assert "eval/letters/greedy_score" in row


def test_held_out_sets_of_sft_rows(places, tmp_path):
    rows = [{"instruction": text, "output": text} for text in ("1", "2", "33")]
    files = rows_in(tmp_path, train=rows, a=rows[:1], b=rows[2:])
    out = run(
        tmp_path / "run",
        "--algorithm sft --tasks_per_step 1 --num_epochs 1 --model",
        places["model"],
        files,
    )
    losses = [
        (row["eval/a/loss"], row["eval/b/loss"]) for row in metrics(out) if "eval/a/loss" in row
    ]
    assert len(steps(out)) == 3 and len(losses) == 2 and all(a != b for a, b in losses)


HALF = """
def load_tasks(split): return [{"prompt": str(n), "n": n} for n in range(13 if split == "train" else 1)]
async def reward_fn(completion, n): return (n % 2) * sum(map(ord, completion)) / 1000
"""
TWO_ENVS = "--env_path {tmp}/half.py,{dir}/letters.py"
EPOCHS = {
    "dynamic sampling": ("--algorithm dapo --env_path {tmp}/half.py", 1, 13),
    "stale dynamic sampling": (
        "--algorithm dapo --max_staleness 1 --env_path {tmp}/half.py",
        2,
        26,
    ),
    "environments": (TWO_ENVS, 1, 13 + 8),
    # An environment without a weight has 1: of 21 tasks 14 and 7.
    "one weight": (f"{TWO_ENVS} --envs.half.weight 2", 1, {"half": 14, "letters": 7}),
    "dynamic environments": (f"--algorithm dapo {TWO_ENVS}", 2, 2 * (13 + 8)),
}


@pytest.mark.parametrize(
    "case, ranks", [*((case, 1) for case in EPOCHS), ("dynamic environments", 2)]
)
def test_a_run_of_epochs_draws_each_row_as_often_and_resumes(case, ranks, places, tmp_path):
    flags, num_epochs, num_drawn = EPOCHS[case]
    (tmp_path / "half.py").write_text(HALF)
    flags = words(
        f"--model {{model}} {flags} --max_tokens 6 --max_prompt_tokens 24 --tasks_per_step 4".format(
            tmp=tmp_path, **places
        ),
        f"--group_size 2 --optim.lr 1e-2 --num_epochs {num_epochs} --eval_every 99",
        "--eval.samples 0 --save_every 1 --keep_checkpoints 0",
    )
    out = run(tmp_path / "run", flags, ranks=ranks)
    groups = set()
    for file in out.glob("rollouts/step_*"):
        groups |= {(t["env"], t["task_id"], t["group_id"]) for t in trajectories(file)}
    draws = Counter((env, task) for env, task, _ in groups)
    if isinstance(num_drawn, dict):
        assert Counter(env for env, _, _ in groups) == num_drawn
        return
    assert set(draws.values()) == {num_epochs} and draws.total() == num_drawn
    last = max(row["step"] for row in metrics(out))
    assert "eval/half/greedy_score" in metrics(out)[-1] and metrics(out)[-1]["step"] == last
    assert (out / f"checkpoints/step_{last:06d}").is_dir()
    if "stale" in case or ranks > 1:
        return
    parts = shutil.copytree(out, tmp_path / "parts")
    rewind(parts, 1)
    for folder in (parts, out):  # The second has nothing left to do.
        run(folder, flags, "--resume")
    assert lasting(metrics(parts)) == lasting(metrics(out))
    assert_same_weights(parts, out)


def test_the_last_step_of_epochs_may_have_fewer_rows_than_ranks(places, tmp_path):
    flags = words(SFT.format(**places), "--num_epochs 2.0625 --tasks_per_step 8")
    out = run(tmp_path / "run", flags, ranks=2)
    assert len(steps(out)) == 5  # 2.0625 * 16 rows are 33: 4 steps of 8, and one of 1.


def test_num_steps_replaces_the_epochs_of_a_file(places, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("num_epochs: 3\n")
    flags = words("--config", file, SFT.format(**places))
    assert read_config(flags).num_epochs == 3
    assert read_config([*flags, "--num_steps", "5"]).num_epochs is None


ODD_ROWS = {
    "--tasks_per_step=3 draws rows twice": "[{'prompt': split}] * 2",
    "2 of the first 2 held-out rows of env are training rows "
    "too": "[{'prompt': str(n)} for n in range(2)]",
    "1 of the first 2 rows of env, such as row 2 of the split 'eval': the prompt ends with an "
    "assistant's turn, or has no user message": (
        "[{'prompt': split}, {'prompt': [{'role': 'user' if split == 'train' else 'system', "
        "'content': split}]}]"
    ),
}


@pytest.mark.parametrize("says", ODD_ROWS)
def test_odd_rows_are_told_once_when_a_run_starts(says, places, tmp_path, capsys):
    sized = "--tasks_per_step 3" if "tasks" in says else "--tasks_per_step 2"
    (tmp_path / "env.py").write_text(
        f"def load_tasks(split): return {ODD_ROWS[says]}\ndef reward_fn(messages): return 0\n"
    )
    flags = words(
        "--model",
        places["model"],
        "--env_path",
        tmp_path / "env.py",
        sized,
        "--max_tokens 4 --num_steps 0",
    )
    run(tmp_path / "run", flags, "--eval_every 1 --eval.samples 0")
    [warning] = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")
    ]
    assert warning.startswith(f"warning: {says}")


def test_an_actor_may_say_less_in_a_turn_than_the_others(make_flags, tmp_path):
    flags = words(
        make_flags(TWO),
        "--max_tokens 9 --actors.bob.max_tokens 4 --eval_every 1 --num_steps 1 --algo.truncation_penalty "
        "soft",
    )
    longest, limits = {"bob": 0, "alice": 0}, set()
    run(tmp_path / "run", flags)
    for file in tmp_path.glob("run/rollouts/*.zst"):
        for t in trajectories(file):
            longest[t["actor"]] = max(
                [longest[t["actor"]], *(len(x["completion"]["token_ids"]) for x in t["turns"])]
            )
            limits |= {(t["actor"], x["max_tokens"]) for x in t["turns"]}
    assert longest == {"bob": 4, "alice": 9} and limits == set(longest.items())


@pytest.mark.parametrize(
    "turns, is_refused",
    [
        ('turns = "bob -> bob"', True),
        ('turns = "bob -> (bob -> alice*0)*2"', True),
        ("turns = ['bob']", True),
        ('turns = "bob -> (bob/alice)"', False),
        ('turns = "* * 2"', False),
        ("def turns(task): return ['bob']", False),
    ],
)
def test_an_actor_that_would_never_speak_is_refused_unless_it_is_frozen(
    turns, is_refused, make_flags, places, tmp_path, capsys
):
    talk = Path(places["dir"], "talk.py").read_text()
    (tmp_path / "talk.py").write_text(talk.replace('turns = "bob -> alice -> bob"', turns))
    (tmp_path / "other.py").write_text(talk)
    flags = words("plan", make_flags(TWO), "--env_path", tmp_path / "talk.py")
    both = f"{tmp_path / 'talk.py'},{tmp_path / 'other.py'}"
    assert command(flags) == int(is_refused)
    printed = capsys.readouterr().err
    assert (
        "--actors.alice would never speak" in printed and "--actors.alice.train false" in printed
    ) is is_refused
    assert command(words(flags, "--actors.alice.train false")) == 0
    assert command(words(flags, "--env_path", both)) == 0
    assert command(words(flags, "--env_path", both, "--envs.other.weight 0")) == is_refused


def test_evaluations_draw_alike_at_every_step_and_tell_parts_and_metrics(
    make_model, tmp_path, capsys
):
    (tmp_path / "env.py").write_text(
        'turns = "(bob/alice)*(1..3)"\n'
        "from rl_core import reward\n"
        "def load_tasks(split): return [{'prompt': str(n)} for n in range(6)]\n"
        "def reward_fn(messages): return {'some': 0.25, 'length': "
        "float(len(messages[-1]['content']))}\n"
        "@reward(weight=0)\n"
        "def spoken(messages): return sum(m['role'] == 'assistant' for m in messages)\n"
    )
    models = words(
        "--actors.bob.model", make_model(), "--actors.alice.model", make_model(seed=1), STOP
    )
    flags = words(
        models,
        "--env_path",
        tmp_path / "env.py",
        "--tasks_per_step 4 --group_size 4 --max_prompt_tokens 60",
    )
    out = run(
        tmp_path / "run",
        flags,
        "--max_tokens 60 --eval.samples 2 --num_steps 2 --optim.lr 0 --eval_every 1",
    )
    for label in ("greedy", "sampled"):
        files = [out / f"rollouts/eval_{step:06d}_{label}.jsonl.zst" for step in (0, 1, 2)]
        first, second, third = (
            [(t["task_id"], t["index"], t["actor"], t["messages"]) for t in trajectories(file)]
            for file in files
        )
        assert first == second == third and len(first) > 6
    # Two samples of a task are not the same.
    assert len({json.dumps(messages) for *_, messages in first}) > 6
    result = trajectories(out / "rollouts/eval_000002_sampled.jsonl.zst")
    row = [row for row in metrics(out) if "eval/env/bob/greedy_score" in row][-1]
    for actor in ("bob", "alice"):
        of_one = [t for t in result if t["actor"] == actor]
        assert (
            row[f"eval/env/{actor}/greedy_reward/some"]
            == row[f"eval/env/{actor}/sampled_reward/some"]
            == 0.25
        )
        length = [t["reward_parts"]["length"] for t in of_one]
        assert row[f"eval/env/{actor}/sampled_reward/length"] == pytest.approx(
            sum(length) / len(of_one)
        )
        spoken = [t["metrics"]["spoken"] for t in of_one]
        assert row[f"eval/env/{actor}/sampled_spoken"] == pytest.approx(sum(spoken) / len(of_one))
    [printed, *_] = [
        line for line in capsys.readouterr().out.splitlines() if "eval at step 2" in line
    ]
    assert (
        "env/bob/greedy_score" in printed
        and "env/bob/pass@2" in printed
        and "some" not in printed
        and "spoken" not in printed
    )


def test_what_one_actor_said_can_train_another(make_flags, places, tmp_path, capsys):
    talk = run(tmp_path / "talk", make_flags(TWO), "--num_steps 1")
    flags = words(
        "--algorithm sft --data.train",
        talk / "rollouts",
        "--num_steps 1 --max_tokens 300 --tasks_per_step 4",
    )
    assert command(words("plan", flags, "--model", places["model"])) == 1
    assert "it holds those of alice with rewards up to" in capsys.readouterr().err
    bob = words(flags, "--actors.bob.model", places["model"])
    assert command(["plan", *bob]) == 0
    result = trajectories(talk / "rollouts/step_000001.jsonl.zst")
    assert f"{sum(t['actor'] == 'bob' for t in result)} rows to train on" in capsys.readouterr().out
    run(
        tmp_path / "sft",
        bob,
        "--data.eval",
        talk / "rollouts/step_000001.jsonl.zst",
        "--eval_every 1",
    )


def test_a_checkpoint_of_an_adapter_holds_no_frozen_weights(make_flags, tmp_path):
    out = run(tmp_path / "run", make_flags(f"{RL} {LORA}"), "--num_steps 2")
    saved = sum(f.stat().st_size for f in (out / "checkpoints/step_000002/policy").iterdir())
    assert saved < sum(value.nbytes for value in weights(out).values())
    # The engine samples with the adapter: were it left out, logprobs would differ from the
    # learner's after a step.
    assert max(row["learn/policy/mismatch_kl_nats_max"] for row in steps(out)) < 1e-6
