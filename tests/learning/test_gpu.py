"""A learner and the embedded engine compute the same on a GPU and on a CPU."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch
from kit import embedded, gradient
from test_engine_contract import load, random_prompts
from test_learner import ragged_samples

from rl_core.run.process.joining import init_ranks
from rl_core.types import SamplingParams

pytestmark = pytest.mark.gpu

WORKS = {
    "grpo": "",
    "references": "--algo.kl_coef .1",
    "recomputed": "--learner.activations recompute",
    "offloaded": "--learner.activations offload",
    "lora": "--actors.policy.lora.rank 4 --actors.policy.lora.alpha 8",
}


def off(grads, expected) -> float:
    """The distance of two gradients, relative to the expected one's norm."""
    apart = sum((grads[n].cpu() - w.cpu()).double().square().sum() for n, w in expected.items())
    return (apart / sum(w.double().square().sum().cpu() for w in expected.values())).sqrt().item()


@pytest.mark.parametrize("flags", WORKS.values(), ids=WORKS)
def test_gradients_on_a_gpu_are_those_on_a_cpu(tiny_model, flags):
    here = init_ranks(60)
    there = dataclasses.replace(here, device=torch.device("cpu"))
    samples = ragged_samples(24, shared_prompt=20)
    loss, expected = gradient(tiny_model, samples, flags, ranks=there)
    loss_on_gpu, grads = gradient(tiny_model, samples, flags, ranks=here)
    assert loss_on_gpu == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert any(w.abs().max() > 0 for w in expected.values())
    assert off(grads, expected) < 1e-3


@pytest.mark.parametrize("num_slots", [3, 12])
def test_what_is_sampled_on_a_gpu_is_what_is_sampled_on_a_cpu(any_model, num_slots):
    """Greedy: the draws of the two differ."""
    prompts, params = random_prompts(12, seed=2), SamplingParams(max_tokens=20, temperature=0)

    async def sample(engine):
        jobs = (engine.generate(p, params, seed=i) for i, p in enumerate(prompts))
        return await asyncio.gather(*jobs)

    engines = [
        embedded(load(any_model).to(device), device=torch.device(device), num_slots=num_slots)
        for device in ("cpu", "cuda")
    ]
    cpu, gpu = (asyncio.run(sample(engine)) for engine in engines)
    for a, b in zip(cpu, gpu, strict=True):
        assert a.token_ids == b.token_ids
        torch.testing.assert_close(
            torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=1e-4, rtol=0
        )
