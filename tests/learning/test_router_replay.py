"""Router replay: the experts that the engine chose are those of the learner, whatever its routers
would choose."""

from __future__ import annotations

import asyncio
import json

import kit
import pytest
import torch
from kit import embedded, make_learner, trajectories
from models_table import load_plain
from test_experts import family, needs_routers  # noqa: F401
from test_truncation import talks

from rl_core.config import parse_config
from rl_core.data.samples import samples_from_turns
from rl_core.engines.factory import EngineFactory
from rl_core.engines.router_recorder import Recorder
from rl_core.run.plan.model_checks import make_chats
from rl_core.run.process.joining import init_ranks
from rl_core.types import SamplingParams

REPLAY = "--actors.policy.router_replay true"
ROUTERS = ("TopKRouter", "TopkRouter")


def routers_of(model) -> list:
    return [m for m in model.modules() if type(m).__name__.endswith(ROUTERS)]


def experts_of(model, token_ids) -> torch.Tensor:
    """[L - 1, routers, top_k] by transformers itself, each token's in order of their numbers."""
    choices: list[torch.Tensor] = []
    hooks = [
        m.register_forward_hook(lambda _, __, out: choices.append(out[2]))
        for m in routers_of(model)
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([token_ids[:-1]]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(choices, 1).sort(-1).values


def conversations(model) -> list:
    """Samples of two turns, of groups that begin alike, from an engine with fewer slots than
    conversations."""
    played = talks(embedded(model, num_slots=3, recorder=Recorder), 6)
    return [samples_from_turns(turns, 1.0, f"{n // 2}")[0] for n, turns in enumerate(played)]


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "gpt_oss"])
def test_the_engine_records_the_experts_of_every_token_but_the_last(family, name):  # noqa: F811
    """Covers prompts that several share, turns that find the first one's cache, and row by row
    (gpt-oss)."""
    plain = load_plain(family(name))
    needs_routers(plain)
    for s in conversations(load_plain(family(name))):
        wanted = experts_of(plain, s.token_ids.tolist())
        assert torch.equal(torch.from_numpy(s.experts).long().sort(-1).values, wanted)


def disturbed(learner):
    """The learner with other routers than the engine."""
    for n, router in enumerate(routers_of(learner.policy.hf)):
        router.weight.data += (
            torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(n)) / 3
        )
    return learner


@torch.no_grad()
def test_the_learner_goes_by_the_engines_experts_and_is_nearer_to_it(family):  # noqa: F811
    samples, results = conversations(load_plain(family("qwen3_moe"))), {}
    for flag in (REPLAY, ""):
        learner = disturbed(make_learner(family("qwen3_moe"), flag))
        [minibatch], _ = learner.shard(samples)
        [batch] = minibatch.batches
        assert len(batch.parents) > len(samples), "no prompt is shared"
        logprobs, _ = learner.forward(batch)
        chose = torch.stack(kit.part_of(learner, "Experts").routers.experts, 1)
        recorded = make_learner(family("qwen3_moe"), REPLAY).shard(samples)[0][0].batches[0].experts
        same = (chose == recorded).float().mean()
        results[flag] = same, (logprobs - batch.rollout_logprobs).abs().mean()
    assert results[REPLAY][0] == 1.0 and results[""][0] < 0.9
    assert results[REPLAY][1] < results[""][1]


ENV = """
def load_tasks(split): return [{"prompt": str(n)} for n in range(4)]
def interact(messages): return [{"role": "user", "content": "and?"}] if len(messages) < 3 else None
def reward_fn(completion): return sum(map(ord, completion)) / 1000
"""
SIZES = (
    "--group_size 2 --tasks_per_step 4 --max_tokens 8 --max_prompt_tokens 16 --num_steps 2 "
    "--max_turns 2"
)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_replays_conversations(family, tmp_path, ranks):  # noqa: F811
    (tmp_path / "env.py").write_text(ENV)
    # A turn that is cut off is the last.
    stop = ["--sampling.stop", json.dumps(list("abcdefghijklm"))]
    flags = kit.words(
        "--model", family("qwen3_moe"), "--env_path", tmp_path / "env.py", SIZES, REPLAY, stop
    )
    out = kit.run(tmp_path / "run", flags, "--optim.lr 1e-2", ranks=ranks)
    assert all(row["learn/policy/mismatch_kl_nats_max"] < 1e-6 for row in kit.steps(out))
    rows = [row for file in (out / "rollouts").glob("step_*") for row in trajectories(file)]
    assert {len(row["turns"]) for row in rows} == {1, 2}
    assert "experts" not in json.dumps(rows)
    config = parse_config([*flags, "--out", str(tmp_path / "other"), "--engine", "embedded"])
    chat = make_chats(config)[0]["policy"]
    engine = EngineFactory(config).make("policy", chat, {}, init_ranks(60))
    done = asyncio.run(engine.generate([5, 6, 7], SamplingParams(max_tokens=2), seed=0))
    assert done.experts.shape == (3 + len(done.token_ids) - 1, 2, 2)


@pytest.mark.parametrize(
    "flags, why",
    [
        ("--max_staleness 1", "cannot be combined with --max_staleness=1"),
        ("--rollout_ranks 1", "cannot be combined with --rollout_ranks=1"),
        (
            "--rollout.stale_policy_frac 0.5 --rollout.stale_policy_refresh 4",
            "cannot be combined with --rollout.stale_policy_frac",
        ),
        ("--learner.kernels compile", "cannot be combined with --learner.kernels=compile"),
        (
            "--actors.policy.lora.rank 2 --actors.b.lora_base policy",
            "cannot be combined with lora_base",
        ),
    ],
)
def test_replay_is_refused_where_experts_could_be_others(family, flags, why, monkeypatch):  # noqa: F811
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    sizes = "--env_path x.py --out x --max_prompt_tokens 16 --max_tokens 16 --engine embedded"
    config = parse_config(kit.words("--model", family("qwen3_moe"), sizes, REPLAY, flags))
    with pytest.raises(ValueError, match=f"--actors.policy.router_replay=true {why}; remove one"):
        make_chats(config)[0]["policy"]
