"""Turns by stale weights: which engine answers which call, with whose logprobs, and the requests that
a resumed run repeats."""

from __future__ import annotations

import asyncio
import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from kit import embedded, metrics, run, run_ranks, steps, trajectories, words
from safetensors.torch import load_file
from test_engine_contract import needs_sglang
from test_runs import assert_same_weights, lasting
from transformers import AutoModelForCausalLM

from rl_core.engines.embedded import EmbeddedEngine
from rl_core.sampling.actor import Actor
from rl_core.train import main
from rl_core.types import Completion, SamplingParams

# Hooks that are not async run in threads, whose timing decides which turns are computed together,
# and so their rounding.
TALK = """
max_turns = 4
def load_tasks(split): return [{"messages": [{"role": "user", "content": "x" * n}]} for n in range(1, 9)]
async def interact(messages): return [{"role": "user", "content": f"{len(messages)} more"}]
async def reward_fn(messages): return float(sum(map(ord, messages[1]["content"])) % 7)
"""
EVERY = 3
STOP = json.dumps(list("abcdefghijklmnopqrstuvwxyz"))  # A turn that is cut short ends the episode.


def makers(trajectory: dict) -> list[int]:
    """The version that spoke each turn."""
    assert not any(turn["completion"]["newer_versions"] for turn in trajectory["turns"])
    return [turn["completion"]["policy_version"] for turn in trajectory["turns"]]


@pytest.fixture(scope="module")
def talk(tiny_model, tmp_path_factory) -> tuple[str, ...]:
    file = tmp_path_factory.mktemp("talk") / "talk.py"
    file.write_text(TALK)
    flags = words("--model", tiny_model, "--env_path", file, "--sampling.stop", [STOP])
    flags += words(
        "--max_tokens 12 --max_prompt_tokens 150 --tasks_per_step 4 --group_size 4 --optim.lr 3e-3"
    )
    flags += words(f"--rollout.stale_policy_frac 0.4 --rollout.stale_policy_refresh {EVERY}")
    return tuple(flags)


def load_engine(folder: Path, version: int) -> EmbeddedEngine:
    model = AutoModelForCausalLM.from_pretrained(folder)
    engine = embedded(model, max_context_tokens=64)
    engine.version = version
    return engine


def test_who_answers_hangs_on_the_calls_seed_alone(make_model):
    fresh, older = load_engine(make_model(), 7), load_engine(make_model(seed=1), 4)
    limits = {"stop_token_ids": (), "max_context_tokens": 64}
    actor = Actor(
        name="bob", engine=fresh, chat=None, stale_engine=older, stale_frac=0.25, **limits
    )

    async def ask(seeds, actor) -> dict[int, tuple]:
        params = SamplingParams(max_tokens=2)
        done = await asyncio.gather(*(actor.generate([5, 6, 7], params, seed) for seed in seeds))
        return {
            s: (d.policy_version, d.token_ids, d.logprobs) for s, d in zip(seeds, done, strict=True)
        }

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
        assert (version, tokens) == together[seed][:2] and logprobs == pytest.approx(
            together[seed][2], abs=1e-5
        )


def models_of(out: Path, path: Path, num_steps: int) -> dict[int, torch.nn.Module]:
    """Version -> the model that a run's checkpoint of it holds."""
    start = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    models = {0: start}
    for version in range(1, num_steps):
        folder = out / f"checkpoints/step_{version:06d}/policy"
        file = folder / "shard-00001-model-00001-of-00001.safetensors"
        saved = {k[9:]: v for k, v in load_file(file).items() if k.startswith("param/hf.")}
        model = AutoModelForCausalLM.from_config(start.config, attn_implementation="eager")
        missing, _ = model.load_state_dict(saved, strict=False)
        assert not set(missing) - {"lm_head.weight"}  # tied
        models[version] = model
    return models


@torch.no_grad()
def logprobs_by(model: torch.nn.Module, turn: dict) -> torch.Tensor:
    """[L] of a turn's tokens, by transformers."""
    prompt, sampled = turn["prompt_ids"], turn["completion"]["token_ids"]
    logits = model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(sampled)[:, None])[:, 0]


@pytest.mark.parametrize("engine", ["embedded", pytest.param("sglang", marks=needs_sglang)])
def test_each_turn_has_version_and_logprobs_of_the_weights_that_spoke_it(
    engine, talk, tiny_model, tmp_path
):
    out, num_steps = tmp_path / "run", 5
    talk += ("--engine", engine)
    kept = (
        "--save_every 1 --keep_checkpoints 0 --eval_every 2 --eval.samples 2 --eval.num_tasks 2 "
        "--num_steps"
    )
    assert main(words(talk, kept, num_steps, "--out", out)) == 0
    models = models_of(out, tiny_model, num_steps)

    apart = 0.0
    for version, row in enumerate(steps(out)):
        result = trajectories(out / f"rollouts/step_{version + 1:06d}.jsonl.zst")
        older = version - version % EVERY
        assert {v for t in result for v in makers(t)} == {version, older}
        assert sum(len(set(makers(t))) for t in result) > len(result) or version == older, (
            "an episode must mix policies"
        )
        for turn in (turn for t in result[::3] for turn in t["turns"]):
            turns_of_one, maker = (
                torch.tensor(turn["completion"]["logprobs"]),
                turn["completion"]["policy_version"],
            )
            torch.testing.assert_close(
                turns_of_one, logprobs_by(models[maker], turn), atol=2e-5, rtol=0
            )
            if maker != version:
                newest = logprobs_by(models[version], turn)
                apart = max(apart, (turns_of_one - newest).abs().max().item())
        sampled = [
            (v, len(turn["completion"]["token_ids"]))
            for t in result
            for v, turn in zip(makers(t), t["turns"], strict=True)
        ]
        num_older = sum(n for v, n in sampled if v != version)
        assert row["rollout/policy/lagged_frac"] == num_older / sum(n for _, n in sampled)
        assert row.get("rollout/policy/lag_versions", 0) == version - older
    assert apart > 1e-2, "the two would have said the same"
    held = load_file(out / f"checkpoints/step_{num_steps:06d}/policy.lagged.safetensors")
    assert held and all(
        torch.equal(value, models[num_steps - num_steps % EVERY].get_parameter(n))
        for n, value in held.items()
    )
    for step in (0, 2, 4):
        for label in ("greedy", "sampled"):
            result = trajectories(out / f"rollouts/eval_{step:06d}_{label}.jsonl.zst")
            assert {v for t in result for v in makers(t)} == {step}, (
                "an evaluation is of the newest weights"
            )


def test_a_run_without_them_has_nothing_of_it_and_can_go_on_with_them(talk, tmp_path):
    out, plain = tmp_path / "run", talk[: talk.index("--rollout.stale_policy_frac")]
    assert main([*plain, "--num_steps", "1", "--out", str(out)]) == 0
    assert not any("lag" in name for row in metrics(out) for name in row) and not list(
        out.rglob("*lagged*")
    )
    assert main([*talk, "--num_steps", "3", "--out", str(out), "--resume"]) == 0
    versions = [
        {v for t in trajectories(out / f"rollouts/step_{n:06d}.jsonl.zst") for v in makers(t)}
        for n in (2, 3)
    ]
    assert versions == [{1}, {1, 2}], "the older weights are the newest at first"


def test_older_weights_are_corrected_by_default(talk, tmp_path):
    norms = {}
    for name, more in {
        "default": "",
        "tis": "--algo.importance_correction tis",
        "none": "--algo.importance_correction none",
    }.items():
        # One episode at a time, since an engine's rounding depends on its batch.
        steady = "--rollout.max_concurrent 1 --optim.lr 1e-2 --num_steps 3 --out"
        flags = words(talk, more, steady, tmp_path / name)
        assert main(flags) == 0
        norms[name] = [row["learn/policy/grad_norm"] for row in steps(tmp_path / name)]
    assert norms["default"] == pytest.approx(norms["tis"], rel=1e-4)
    assert norms["default"] != pytest.approx(norms["none"], rel=1e-3)


def versions_of(turn: dict) -> list[int]:
    """The policy version of each token."""
    return Completion(**turn["completion"]).policy_versions


def renewed(version: int) -> int:
    """The version of the stale weights while the newest ones have this version."""
    return version - version % EVERY


def check_logprobs(turns: list[dict], models: dict[int, torch.nn.Module]) -> None:
    """Each token's logprob is that of the version that it names, and not that of others."""
    apart = 0.0
    for turn in turns:
        turns_of_one, versions = torch.tensor(turn["completion"]["logprobs"]), versions_of(turn)
        for version, model in models.items():
            by = logprobs_by(model, turn)
            made = torch.tensor([v == version for v in versions])
            torch.testing.assert_close(turns_of_one[made], by[made], atol=2e-5, rtol=0)
            if not made.all():
                apart = max(apart, (turns_of_one - by)[~made].abs().max().item())
    assert apart > 1e-2, "one version says what another does"


STALE = "--max_staleness 1 --tasks_per_step 2 --save_every 1 --keep_checkpoints 0"
LONG = ["--sampling.stop", json.dumps(list("abcd"))]  # most turns are interrupted
ORDERED = f"{STALE} --deterministic true"
# Sampling ranks -> flags, number of ranks.
PLACES = {"the learner's ranks": ("", 1), "a separate rank": ("--rollout_ranks 1", 2)}


@pytest.fixture(scope="module")
def whole_run(talk, tmp_path_factory):
    """whole_run(setup) -> the folder of a run of five steps, in which each weight is updated next to
    conversations that are under way."""

    @cache
    def made(setup: str) -> Path:
        (more, ranks), out = PLACES[setup], tmp_path_factory.mktemp("whole") / "run"
        return run(out, talk, LONG, ORDERED, more, "--num_steps 5", ranks=ranks)

    return made


@pytest.mark.parametrize("setup", PLACES)
def test_an_interrupted_turn_goes_on_with_its_engines_weights(setup, whole_run, tiny_model):
    out = whole_run(setup)
    models = models_of(out, tiny_model, 5)
    interrupted, spoken = set(), []
    for version, row in enumerate(steps(out)):
        result = trajectories(out / f"rollouts/step_{version + 1:06d}.jsonl.zst")
        begun = max(0, version - 1)  # At the start of a step half of the turns before it are done.
        lags = []
        for turns in (t["turns"] for t in result):
            for number, turn in enumerate(turns):
                # The newest weights, and the older ones, while the turn was sampled.
                both = [[begun] * 6 + [version] * 6, [renewed(begun)] * 6 + [renewed(version)] * 6]
                if number:
                    both = [[version] * 12, [renewed(version)] * 12]
                versions = versions_of(turn)
                assert versions in [may[: len(versions)] for may in both]
                interrupted.add((versions[0], versions[-1]))
                lags += [version - v for v in versions]
        older = [lag for lag in lags if lag]
        assert row["rollout/policy/lagged_frac"] == len(older) / len(lags)
        assert row.get("rollout/policy/lag_versions", 0) == pytest.approx(
            sum(older) / max(1, len(older))
        )
        spoken += [turn for t in result[::3] for turn in t["turns"]]
    check_logprobs(spoken, models)
    # Turns by the newest weights, and by older ones that stayed and that were renewed.
    assert {(1, 2), (2, 3), (0, 0), (0, 3)} <= interrupted


def test_engines_on_own_ranks_equal_engines_in_turn(whole_run):
    one, other = (whole_run(setup) for setup in PLACES)
    for a, b in zip(steps(one), steps(other), strict=True):
        names = {name for name in a if not name.startswith(("time/", "pack/"))}
        assert {n: b.get(n) for n in names} == pytest.approx({n: a[n] for n in names}, rel=1e-4)
    assert_same_weights(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "more, ranks",
    [
        ("", 1),
        ("--rollout_ranks 1", 2),
        pytest.param("--engine sglang", 1, marks=needs_sglang),
        pytest.param("--engine sglang --rollout_ranks 1", 2, marks=needs_sglang),
    ],
)
def test_tokens_name_the_weights_that_sampled_them_whatever_the_order(
    more, ranks, talk, tiny_model, tmp_path
):
    """With as many requests at once as there are episodes."""
    out = tmp_path / "run"
    flags = words(talk, LONG, STALE, more, "--num_steps 7 --out", out)
    run_ranks(ranks, "-m", "rl_core.train", *flags, timeout_s=600)  # two servers start
    models, spoken = models_of(out, tiny_model, 7), []
    for version in range(7):
        result = trajectories(out / f"rollouts/step_{version + 1:06d}.jsonl.zst")
        turns_of_one = [turn for t in result for turn in t["turns"]]
        assert {t["status"] for t in result} <= {"ok", "truncated"}
        might = {max(0, version - 1), version}
        might |= {renewed(v) for v in might}
        versions = {v for turn in turns_of_one for v in versions_of(turn)}
        assert versions <= might
        assert (version - 2) in versions or version not in (2, 5), "older weights say nothing"
        spoken += turns_of_one[::3]
    check_logprobs(spoken, models)
    assert all(row["learn/policy/grad_norm"] > 0 for row in steps(out))


@pytest.mark.parametrize("setup, stop", zip(PLACES, (2, 3), strict=True))
def test_a_run_that_was_stopped_with_episodes_under_way_goes_on(
    setup, stop, whole_run, talk, tmp_path
):
    full, parts = whole_run(setup), tmp_path / "parts"
    # A run that is killed before it saves again leaves this.
    for file in ("metrics.jsonl", "env_code.yaml", f"checkpoints/step_{stop:06d}"):
        (parts / file).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (full / file).is_dir() else shutil.copy)(full / file, parts / file)
    more, ranks = PLACES[setup]
    run(parts, talk, LONG, ORDERED, more, "--num_steps 5 --resume", ranks=ranks)
    assert not (parts / f"rollouts/step_{stop:06d}.jsonl.zst").exists(), "it began anew"
    assert lasting(steps(full)) == lasting(steps(parts))
    assert_same_weights(full, parts)
