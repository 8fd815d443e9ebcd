"""Turns by older weights: who answers which call, with whose logprobs, and what a run that goes on needs of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_engine_contract import needs_sglang
from test_train import SORT, metrics, trajectories
from transformers import AutoModelForCausalLM

from rl_core.engines.embedded import EmbeddedEngine
from rl_core.sampling.actor import Actor
from rl_core.train import main
from rl_core.types import SamplingParams

# Hooks that are not async run in threads, whose timing says what is computed together, and so how it is rounded.
TALK = """
max_turns = 4
def load_tasks(split): return [{"messages": [{"role": "user", "content": "x" * n}]} for n in range(1, 9)]
async def interact(messages): return [{"role": "user", "content": f"{len(messages)} more"}]
async def reward_fn(messages): return float(sum(map(ord, messages[1]["content"])) % 7)
"""
EVERY = 3
STOP = json.dumps(list("abcdefghijklmnopqrstuvwxyz"))  # what is cut short ends the episode


def steps_of(out: Path) -> list[dict]:
    return [row for row in metrics(out) if "learn/policy/loss" in row or "learn/bob/loss" in row]


def makers(trajectory: dict) -> list[int]:
    """The version that spoke each turn."""
    assert not any(turn["completion"]["newer_versions"] for turn in trajectory["turns"])
    return [turn["completion"]["policy_version"] for turn in trajectory["turns"]]


@pytest.fixture
def talk(tiny_model, tmp_path) -> list[str]:
    (tmp_path / "talk.py").write_text(TALK)
    flags = ["--model", str(tiny_model), "--env_path", str(tmp_path / "talk.py"), "--max_tokens", "12"]
    flags += [
        "--sampling.stop",
        STOP,
        "--max_prompt_tokens",
        "150",
        "--tasks_per_step",
        "4",
        "--group_size",
        "4",
        "--optim.lr",
        "3e-3",
    ]
    return [*flags, "--rollout.lagged_frac", "0.4", "--rollout.lagged_every", str(EVERY)]


def load_engine(folder: Path, version: int) -> EmbeddedEngine:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return EmbeddedEngine(model, num_slots=8, max_context_tokens=64, version=version)


def test_who_answers_hangs_on_the_calls_seed_alone(make_model):
    fresh, older = load_engine(make_model(), 7), load_engine(make_model(seed=1), 4)
    limits = {"stop_token_ids": (), "max_turns": 1, "max_context_tokens": 64}
    actor = Actor(name="bob", engine=fresh, chat=None, older=older, older_frac=0.25, **limits)

    async def ask(seeds, actor) -> dict[int, tuple]:
        params = SamplingParams(max_tokens=2)
        done = await asyncio.gather(*(actor.generate([5, 6, 7], params, seed) for seed in seeds))
        return {s: (d.policy_version, d.token_ids, d.logprobs) for s, d in zip(seeds, done, strict=True)}

    async def ask_all():
        seeds = list(range(300))
        together, apart = await ask(seeds, actor), {}
        for seed in reversed(seeds[:20]):
            apart |= await ask([seed], actor)
        return together, apart

    together, apart = asyncio.run(ask_all())
    versions = [version for version, _, _ in together.values()]
    assert set(versions) == {4, 7} and 0.18 < versions.count(4) / len(versions) < 0.32
    for seed, (version, tokens, logprobs) in apart.items():
        assert (version, tokens) == together[seed][:2] and logprobs == pytest.approx(together[seed][2], abs=1e-5)


@pytest.mark.parametrize("engine", ["embedded", pytest.param("sglang", marks=needs_sglang)])
def test_each_turn_has_version_and_logprobs_of_the_weights_that_spoke_it(engine, talk, tiny_model, tmp_path):
    out, steps = tmp_path / "run", 5
    talk += ["--engine", engine]
    kept = [
        "--save_every",
        "1",
        "--keep_checkpoints",
        "0",
        "--eval_every",
        "2",
        "--eval.samples",
        "2",
        "--eval.num_tasks",
        "2",
    ]
    assert main([*talk, "--num_steps", str(steps), *kept, "--out", str(out)]) == 0
    start = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="eager")
    models = {0: start}
    for version in range(1, steps):
        file = out / f"checkpoints/step_{version:06d}/policy/rank_00000.safetensors"
        saved = {k[9:]: v for k, v in load_file(file).items() if k.startswith("param/hf.")}
        models[version] = AutoModelForCausalLM.from_config(start.config, attn_implementation="eager")
        missing, _ = models[version].load_state_dict(saved, strict=False)
        assert not set(missing) - {"lm_head.weight"}  # tied

    def logprobs(version: int, turn: dict) -> torch.Tensor:
        prompt, sampled = turn["prompt_ids"], turn["completion"]["token_ids"]
        with torch.no_grad():
            logits = models[version](torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(-1, torch.tensor(sampled)[:, None])[:, 0]

    apart = 0.0
    for version, row in enumerate(steps_of(out)):
        found = trajectories(out / f"rollouts/step_{version + 1:06d}.jsonl.zst")
        older = version - version % EVERY
        assert {v for t in found for v in makers(t)} == {version, older}
        assert sum(len(set(makers(t))) for t in found) > len(found) or version == older, "an episode must mix policies"
        for turn in (turn for t in found[::3] for turn in t["turns"]):
            own, maker = torch.tensor(turn["completion"]["logprobs"]), turn["completion"]["policy_version"]
            torch.testing.assert_close(own, logprobs(maker, turn), atol=2e-5, rtol=0)
            if maker != version:
                apart = max(apart, (own - logprobs(version, turn)).abs().max().item())
        sampled = [
            (v, len(turn["completion"]["token_ids"]))
            for t in found
            for v, turn in zip(makers(t), t["turns"], strict=True)
        ]
        num_older = sum(n for v, n in sampled if v != version)
        assert row["rollout/policy/lagged_frac"] == num_older / sum(n for _, n in sampled)
        assert row.get("rollout/policy/lag_versions", 0) == version - older
    assert apart > 1e-2, "the two would have said the same"
    held = load_file(out / f"checkpoints/step_{steps:06d}/policy.lagged.safetensors")
    assert held and all(torch.equal(value, models[steps - steps % EVERY].get_parameter(n)) for n, value in held.items())
    for step in (0, 2, 4):
        for label in ("greedy", "sampled"):
            found = trajectories(out / f"rollouts/eval_{step:06d}_{label}.jsonl.zst")
            assert {v for t in found for v in makers(t)} == {step}, "an evaluation is of the newest weights"


HOW = {
    "alone": [],
    "adapters": ["--actors.policy.lora.rank", "4"],
}


@pytest.mark.parametrize("how", HOW)
def test_a_run_that_goes_on_between_two_renewals_is_the_uninterrupted_one(how, talk, tmp_path):
    flags = [*talk, *HOW[how]]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    kept = ["--save_every", "1", "--keep_checkpoints", "0"]
    assert main([*flags, "--num_steps", "5", *kept, "--out", str(whole)]) == 0
    for steps in ("4", "5"):
        assert main([*flags, "--num_steps", steps, "--out", str(parts), "--resume"]) == 0
    assert_same(whole, parts, "policy")
    last = trajectories(parts / f"rollouts/step_{5:06d}.jsonl.zst")
    assert {v for t in last for v in makers(t)} == {3, 4}
    files = {p.parent.name for p in (whole / "checkpoints").glob("*/*.lagged.safetensors")}
    assert files == {f"step_{n:06d}" for n in (1, 2, 4, 5)}, "what is as new as the learner is not saved twice"
    named = json.loads((whole / "checkpoints/step_000004/manifest.json").read_text())["files"]
    assert "policy.lagged.safetensors" in named


def assert_same(whole: Path, parts: Path, *actors: str) -> None:
    mine, others = steps_of(whole), steps_of(parts)
    names = {name for row in mine for name in row if not name.startswith(("time/", "rollout/engine_switch"))}
    assert [[row.get(n) for n in sorted(names)] for row in mine] == [
        [row.get(n) for n in sorted(names)] for row in others
    ]
    for actor in actors:
        a, b = (AutoModelForCausalLM.from_pretrained(out / "hf" / actor).state_dict() for out in (whole, parts))
        assert all(torch.equal(a[n], b[n]) for n in a)


def test_two_models_that_take_turns_go_on_by_their_own_older_weights(make_model, tmp_path):
    (tmp_path / "say.py").write_text(
        'turns = "bob -> alice -> bob -> alice"\n'
        'def load_tasks(split): return [{"prompt": f"say {n}"} for n in range(6)]\n'
        'async def reward_fn(completion, actor): return float(sum(map(ord, completion)) % 7) * (1 if actor == "bob" else -1)\n'
    )
    flags = ["--actors.bob.model", str(make_model()), "--actors.alice.model", str(make_model(hidden=48, seed=1))]
    flags += ["--env_path", str(tmp_path / "say.py"), "--max_tokens", "12", "--max_prompt_tokens", "150"]
    flags += ["--sampling.stop", STOP]
    flags += ["--tasks_per_step", "2", "--group_size", "4", "--optim.lr", "3e-3", "--rollout.engines_awake", "one"]
    flags += ["--rollout.lagged_frac", "0.5", "--rollout.lagged_every", "2"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([*flags, "--num_steps", "4", "--eval_every", "3", "--out", str(whole)]) == 0
    for steps in ("3", "4"):
        assert main([*flags, "--num_steps", steps, "--out", str(parts), "--resume"]) == 0
    assert_same(whole, parts, "bob", "alice")
    assert len(list((parts / "checkpoints/step_000003").glob("*.lagged.safetensors"))) == 2
    last = trajectories(parts / "rollouts/step_000004.jsonl.zst")
    assert {(t["actor"], v) for t in last for v in makers(t)} == {(a, v) for a in ("bob", "alice") for v in (2, 3)}


def test_a_run_without_them_has_nothing_of_it_and_can_go_on_with_them(talk, tmp_path):
    out, plain = tmp_path / "run", talk[: talk.index("--rollout.lagged_frac")]
    assert main([*plain, "--num_steps", "1", "--out", str(out)]) == 0
    assert not any("lag" in name for row in metrics(out) for name in row) and not list(out.rglob("*lagged*"))
    assert main([*talk, "--num_steps", "3", "--out", str(out), "--resume"]) == 0
    versions = [{v for t in trajectories(out / f"rollouts/step_{n:06d}.jsonl.zst") for v in makers(t)} for n in (2, 3)]
    assert versions == [{1}, {1, 2}], "the older weights are the newest at first"


def test_the_plan_counts_the_second_copy_and_its_cache(talk, tiny_model, capsys):
    found = []
    for flags in (talk[: talk.index("--rollout.lagged_frac")], talk):
        assert main([*flags, "--dry_run"]) == 0
        shown = capsys.readouterr().out
        assert f"correction='{'tis' if flags is talk else 'none'}'" in shown
        rows = {line[:22].strip(): line[22:].split() for line in shown.splitlines()}
        found.append((rows.get("engine weights"), float(rows["KV cache"][0])))
    (no_weights, cache), (weights, both) = found
    size = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tiny_model).parameters())
    assert set(no_weights) == {"-"} and float(weights[0]) == pytest.approx(4 * size / 2**30, rel=0.01)
    assert both == pytest.approx(2 * cache, rel=0.01)


def test_two_ranks_with_shards_mix_as_one_does_and_one_goes_on_from_theirs(warm_model, torchrun, tmp_path):
    flags = ["--model", str(warm_model), *SORT, "--tasks_per_step", "4", "--optim.lr", "1e-3"]
    flags += ["--rollout.lagged_frac", "0.5", "--rollout.lagged_every", str(EVERY)]
    one, two = tmp_path / "one", tmp_path / "two"
    assert main([*flags, "--num_steps", "5", "--out", str(one)]) == 0
    torchrun(2, "-m", "rl_core.train", *flags, "--num_steps", "4", "--out", str(two))
    assert main([*flags, "--num_steps", "5", "--out", str(two), "--resume"]) == 0
    a, b = (AutoModelForCausalLM.from_pretrained(out / "hf/policy").state_dict() for out in (one, two))
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=5e-5, rtol=1e-4)
    for name in ("rollout/policy/lagged_frac", "rollout/policy/reward_mean"):
        mine, others = ([row[name] for row in steps_of(out)] for out in (one, two))
        assert mine == pytest.approx(others)


@pytest.mark.slow
def test_the_sort_task_is_learnt_from_mixed_policies_too(warm_model, tmp_path):
    flags = ["--model", str(warm_model), *SORT, "--num_steps", "60", "--optim.lr", "3e-4", "--optim.warmup_steps", "5"]
    flags += ["--algo.clip_high", "0.28", "--rollout.lagged_frac", "0.25", "--rollout.lagged_every", "5"]
    assert main([*flags, "--out", str(tmp_path / "run")]) == 0
    rows = steps_of(tmp_path / "run")
    assert rows[-1]["rollout/policy/reward_mean"] > 0.55 > 0.3 > rows[0]["rollout/policy/reward_mean"]
    assert max(row.get("rollout/policy/lag_versions", 0) for row in rows) == 4
