"""Decode steps of rounded shapes give what steps of their own shapes do. On a CPU nothing is
captured: the same step is computed again from the same memory."""

from __future__ import annotations

import asyncio
from itertools import chain

import pytest
import torch
from kit import embedded
from test_engine_contract import load, logprobs_of, random_prompts

from rl_core.engines.llama_slots import LlamaSlots
from rl_core.plugins import decode_graphs
from rl_core.plugins.decode_graphs import DecodeGraphs, capture_on_gpu, rounded_rows
from rl_core.registry import choose_sampler
from rl_core.types import SamplingParams

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def captured(monkeypatch):
    """Shapes that were captured. They are small, and captured at their second step."""
    monkeypatch.setattr(decode_graphs, "LENGTHS", 16)
    monkeypatch.setattr(decode_graphs, "FIRST_STEPS", 1)
    found = []

    def remembering(replay):
        def capture(compute, pool):
            found.append(compute().shape)
            return capture_on_gpu(compute, pool) if replay else compute

        return capture

    return found, remembering


async def converse(engine, prompts, temperature):
    """Three turns of each, of which the second begins while others have the rows."""

    async def one(index, prompt):
        said = []
        for turn in range(3):
            params = SamplingParams(max_tokens=3 + (5 * index + turn) % 23, temperature=temperature)
            done = await engine.generate(prompt, params, seed=7 * index + turn, session=f"s{index}")
            said.append(done)
            prompt = [*prompt, *done.token_ids, 5, 6]
        return said

    return await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts)))


def graphs(remembering, device="cpu"):
    return lambda model: DecodeGraphs(LlamaSlots(model), remembering(device == "cuda"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_slots", [3, 20])
def test_steps_that_are_replayed_sample_what_others_do(any_model, captured, num_slots, device):
    shapes, remembering = captured
    how = {"num_slots": num_slots, "device": torch.device(device)}
    model, prompts = load(any_model).to(device), random_prompts(17, seed=3)
    plain = embedded(model, **how, sampler=LlamaSlots)
    expected = asyncio.run(converse(plain, prompts, 0.9))
    graphed = embedded(model, **how, sampler=graphs(remembering, device))
    found = asyncio.run(converse(graphed, prompts, 0.9))
    assert len(shapes) > 3
    assert graphed.stats == plain.stats
    for a, b in zip(chain(*found), chain(*expected), strict=True):
        assert a.token_ids == b.token_ids
        torch.testing.assert_close(
            torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("device", DEVICES)
def test_in_bf16_logprobs_are_those_of_a_plain_forward(any_model, captured, device):
    shapes, remembering = captured
    model, prompts = load(any_model).to(device, torch.bfloat16), random_prompts(17, seed=3)
    engine = embedded(
        model,
        num_slots=20,
        device=torch.device(device),
        dtype=torch.bfloat16,
        sampler=graphs(remembering, device),
    )
    for prompt, (first, *_) in zip(
        prompts, asyncio.run(converse(engine, prompts, 1.0)), strict=True
    ):
        expected = logprobs_of(model.to("cpu", torch.float32), prompt, first.token_ids, 1.0)
        torch.testing.assert_close(torch.tensor(first.logprobs), expected, atol=0.1, rtol=0)
    assert len(shapes) > 3


def test_few_rows_are_a_power_of_two_and_many_a_multiple_of_sixteen():
    numbers = [1, 2, 3, 5, 9, 15, 16, 17, 100, 128]
    assert [rounded_rows(n) for n in numbers] == [1, 2, 4, 8, 16, 16, 16, 32, 112, 128]


def test_a_model_with_hooks_is_computed_as_ever(tiny_model, captured):
    shapes, remembering = captured
    model = load(tiny_model)
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    engine = embedded(model, sampler=graphs(remembering))
    asyncio.run(converse(engine, random_prompts(3, seed=1), 1.0))
    assert not shapes


def test_no_graph_outlives_the_loan_of_the_model(tiny_model, captured):
    shapes, remembering = captured
    engine = embedded(load(tiny_model), sampler=graphs(remembering))
    asyncio.run(converse(engine, random_prompts(3, seed=1), 1.0))
    num = len(shapes)
    assert num
    assert not engine._slots.graphs
    asyncio.run(converse(engine, random_prompts(3, seed=1), 1.0))
    assert len(shapes) > num


def test_on_a_cpu_steps_are_not_replayed(tiny_model):
    assert isinstance(choose_sampler(load(tiny_model)), LlamaSlots)
