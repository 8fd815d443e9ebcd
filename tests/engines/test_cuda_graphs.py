"""Decode steps of rounded shapes equal steps of exact shapes. On a CPU the calls of a step are
recorded, and replayed on the same memory."""

from __future__ import annotations

import asyncio
from itertools import chain

import pytest
import torch
from kit import embedded
from test_engine_contract import load, logprobs_of, random_prompts
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_core.engines import cuda_graphs
from rl_core.engines.cuda_graphs import DecodeGraphs, capture_on_gpu, rounded_length, rounded_rows
from rl_core.engines.fused_graphs import FusedGraphs
from rl_core.engines.llama_slots import LlamaSlots
from rl_core.engines.options import make_sampler
from rl_core.types import SamplingParams

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Recording(TorchDispatchMode):
    """Records each call inside, with its output."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


def record_on_cpu(compute, pool):
    """Same as capture_on_gpu: Python runs once, and outputs keep their memory."""
    with Recording() as recording:
        out = compute()

    def replay():
        for func, args, kwargs, known in recording.calls:
            output = func(*args, **kwargs)
            for old, new in zip(tree_leaves(known), tree_leaves(output), strict=True):
                if old.data_ptr() != new.data_ptr():  # neither a view nor in place
                    old.copy_(new)
        return out

    return replay


@pytest.fixture
def captured(monkeypatch):
    """Shapes that were captured. They are small, and captured at their second step."""
    monkeypatch.setattr(cuda_graphs, "LENGTHS", 16)
    monkeypatch.setattr(cuda_graphs, "FIRST_STEPS", 1)
    kernels = []

    def remembering(captured):
        def capture(compute, pool):
            kernels.append(compute().shape)
            replay = captured(compute, pool)

            def counted():
                remembering.num_replays += 1
                return replay()

            return counted

        return capture

    remembering.num_replays = 0
    return kernels, remembering


async def converse(engine, prompts, temperature):
    """Three turns of each, of which the second begins while others have the rows."""

    async def one(index, prompt):
        texts = []
        for turn in range(3):
            params = SamplingParams(max_tokens=3 + (5 * index + turn) % 23, temperature=temperature)
            done = await engine.generate(prompt, params, seed=7 * index + turn, session=f"s{index}")
            texts.append(done)
            prompt = [*prompt, *done.token_ids, 5, 6]
        return texts

    return await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts)))


def graphs(remembering, device="cpu"):
    if device == "cpu":
        return lambda model: DecodeGraphs(model, remembering(record_on_cpu))
    kinds = {True: FusedGraphs, False: DecodeGraphs}
    return lambda model: kinds[FusedGraphs.fits(model)](model, remembering(capture_on_gpu))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_slots", [3, 20])
def test_steps_that_are_replayed_sample_what_others_do(any_model, captured, num_slots, device):
    shapes, remembering = captured
    options = {"num_slots": num_slots, "device": torch.device(device)}
    model, prompts = load(any_model).to(device), random_prompts(17, seed=3)
    plain = embedded(model, **options, sampler=LlamaSlots)
    expected = asyncio.run(converse(plain, prompts, 0.9))
    graphed = embedded(model, **options, sampler=graphs(remembering, device))
    result = asyncio.run(converse(graphed, prompts, 0.9))
    assert len(shapes) > 3
    assert remembering.num_replays > 10 * len(shapes) / num_slots
    assert graphed.stats == plain.stats
    for a, b in zip(chain(*result), chain(*expected), strict=True):
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


def test_long_rows_are_at_most_an_eighth_longer():
    numbers = [1, 256, 257, 2000, 4095, 4097, 32_768, 33_000]
    rounded = [256, 256, 512, 2048, 4096, 4608, 32_768, 36_864]
    assert [rounded_length(n) for n in numbers] == rounded
    assert all(n <= rounded_length(n) <= max(n + 255, 1.125 * n) for n in range(1, 50_000, 37))


def test_few_rows_are_a_power_of_two_and_many_a_multiple_of_sixteen():
    numbers = [1, 2, 3, 5, 9, 15, 16, 17, 33, 100, 128]
    assert [rounded_rows(n) for n in numbers] == [1, 2, 4, 8, 16, 16, 16, 32, 48, 112, 128]


@pytest.mark.parametrize("device", DEVICES)
def test_short_rows_are_padded_and_go_on_to_the_end_of_a_context(any_model, captured, device):
    """It is longer than the positions that their first steps know, and no multiple of LENGTHS."""
    shapes, remembering = captured
    options = {"device": torch.device(device), "max_context_tokens": 300}
    model, params = load(any_model).to(device), SamplingParams(max_tokens=300)

    async def sample(engine):
        jobs = (engine.generate([3, 4 + i], params, seed=i) for i in range(3))
        return await asyncio.gather(*jobs)

    expected = asyncio.run(sample(embedded(model, **options, sampler=LlamaSlots)))
    result = asyncio.run(sample(embedded(model, **options, sampler=graphs(remembering, device))))
    assert len(shapes) == 18
    assert [c.token_ids for c in result] == [c.token_ids for c in expected]


@pytest.mark.parametrize("num_branches", [1, 5])
def test_branches_and_turns_are_read_beside_replayed_steps(any_model, captured, num_branches):
    """The last token of a branch is read like a decode step, but not into the first rows. A turn of
    one conversation is read into the first row, but has several tokens."""
    shapes, remembering = captured
    cuda_graphs.FIRST_STEPS = 0  # until the fixture puts it back
    model, branches = load(any_model), [[*range(8, 78), i] for i in range(num_branches)]
    expected = asyncio.run(converse(embedded(model, sampler=LlamaSlots), branches, 0.9))
    result = asyncio.run(converse(embedded(model, sampler=graphs(remembering)), branches, 0.9))
    assert shapes
    for a, b in zip(chain(*result), chain(*expected), strict=True):
        assert a.token_ids == b.token_ids


def with_hook(model):
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)


def with_rotary_that_changes(model):
    model.config.rope_parameters |= {"rope_type": "dynamic", "factor": 2.0}
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)


def with_quantised_weights(model):
    model.is_quantized = True  # Set by transformers.


@pytest.mark.parametrize("change", [with_hook, with_rotary_that_changes, with_quantised_weights])
def test_models_whose_steps_are_not_all_alike_are_computed_as_ever(tiny_model, captured, change):
    shapes, remembering = captured
    model = load(tiny_model)
    change(model)
    engine = embedded(model, sampler=graphs(remembering))
    asyncio.run(converse(engine, random_prompts(3, seed=1), 1.0))
    assert not shapes


def test_a_shape_is_captured_when_it_has_come_four_times_in_a_loan(tiny_model, captured):
    shapes, remembering = captured
    cuda_graphs.FIRST_STEPS = 4  # until the fixture puts it back
    engine = embedded(load(tiny_model), sampler=graphs(remembering))

    def num_captured(prompt_tokens, decode_steps):
        params, shapes[:] = SamplingParams(max_tokens=1 + decode_steps), []
        asyncio.run(engine.generate([3] * prompt_tokens, params, seed=1))
        return len(shapes)

    assert [num_captured(2, steps) for steps in (4, 4, 5, 12)] == [0, 0, 1, 1]
    # A cache of 16 tokens for two steps, then of 32.
    assert [num_captured(14, steps) for steps in (6, 7)] == [0, 1]


def test_in_fp32_no_graph_outlives_the_loan_of_the_model(tiny_model, captured):
    shapes, remembering = captured
    engine = embedded(load(tiny_model), sampler=graphs(remembering))
    asyncio.run(converse(engine, random_prompts(3, seed=1), 1.0))
    num = len(shapes)
    assert num
    assert not engine._slots.graphs
    asyncio.run(converse(engine, random_prompts(3, seed=1), 1.0))
    assert len(shapes) > num


def bf16_engine(tiny_model, sampler):
    model = load(tiny_model).to(torch.bfloat16)
    return embedded(model, dtype=torch.bfloat16, sampler=sampler)


def test_in_bf16_graphs_stay_and_read_weights_that_arrive(tiny_model, captured):
    """Until the cache goes, or weights lie elsewhere."""
    shapes, remembering = captured
    prompts = random_prompts(3, seed=1)
    engine = bf16_engine(tiny_model, graphs(remembering))
    asyncio.run(converse(engine, prompts, 1.0))
    graph = next(iter(engine._slots.graphs.values()))
    others = [(n, 1.1 * w) for n, w in load(tiny_model).to(torch.bfloat16).named_parameters()]
    plain = bf16_engine(tiny_model, LlamaSlots)
    for each in (plain, engine):
        asyncio.run(each.update(others, 1))
    expected = asyncio.run(converse(plain, prompts, 0.0))
    result = asyncio.run(converse(engine, prompts, 0.0))
    assert next(iter(engine._slots.graphs.values())) is graph
    for (a, *_), (b, *_) in zip(result, expected, strict=True):
        assert a.token_ids[:3] == b.token_ids[:3]
        torch.testing.assert_close(
            torch.tensor(a.logprobs[:3]), torch.tensor(b.logprobs[:3]), atol=0.05, rtol=0
        )
    model = engine.model.model
    for weight in (
        engine.model.get_output_embeddings().weight,
        model.layers[0].self_attn.k_proj.weight,
        model.layers[-1].mlp.down_proj.weight,
        model.norm.weight,
    ):
        num, graph = len(shapes), next(iter(engine._slots.graphs.values()))
        weight.data = weight.data.clone()
        asyncio.run(converse(engine, prompts, 1.0))
        assert len(shapes) > num
        assert next(iter(engine._slots.graphs.values())) is not graph
    asyncio.run(engine.sleep())
    assert not engine._slots.graphs


def test_where_nothing_can_be_captured_steps_are_computed_as_ever(tiny_model, capfd):
    decode_graphs_of = []

    def failing(compute, pool):
        decode_graphs_of.append(compute)
        raise RuntimeError("operation not permitted when stream is capturing")

    prompts = random_prompts(3, seed=1)
    expected = asyncio.run(converse(embedded(load(tiny_model)), prompts, 1.0))
    engine = embedded(load(tiny_model), sampler=lambda m: DecodeGraphs(m, failing))
    result = asyncio.run(converse(engine, prompts, 1.0))
    for a, b in zip(chain(*result), chain(*expected), strict=True):
        assert a.token_ids == b.token_ids
    assert len(decode_graphs_of) == 1
    assert "without CUDA graphs: operation not permitted" in capfd.readouterr().err


def test_the_oldest_of_many_graphs_goes(tiny_model, captured, monkeypatch):
    shapes, remembering = captured
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 2)
    engine = bf16_engine(tiny_model, graphs(remembering))
    asyncio.run(engine.generate([3], SamplingParams(max_tokens=100), seed=1))
    assert len(shapes) == 7
    assert [length for _, length in engine._slots.graphs] == [96, 112]


@pytest.mark.parametrize("call", ["pause", "close"])
def test_no_graph_is_left_where_an_engine_stops_between_two_tokens(tiny_model, captured, call):
    shapes, remembering = captured
    engine = embedded(load(tiny_model), sampler=graphs(remembering))

    async def stop():
        job = engine.generate([3], SamplingParams(max_tokens=100), seed=1)
        task = asyncio.create_task(job)
        while not (shapes or task.done()):  # noqa: ASYNC110 - an event would serve tests alone
            await asyncio.sleep(0)
        assert engine._slots.graphs
        await getattr(engine, call)()
        task.cancel()

    asyncio.run(stop())
    assert not engine._slots.graphs


@pytest.mark.parametrize("device", DEVICES)
def test_steps_are_replayed_on_a_gpu_and_not_on_a_cpu(tiny_model, device):
    sampler = make_sampler(load(tiny_model).to(device))
    assert type(sampler) is (DecodeGraphs if device == "cuda" else LlamaSlots)
