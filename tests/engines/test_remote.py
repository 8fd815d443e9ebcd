"""Engines on other ranks: the same answers as an engine here, new weights to all of them, and
nobody else may ask."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from kit import engine_spec
from test_engine_contract import GREEDY, LONG, load, make_embedded

from rl_core.distributed import Ranks
from rl_core.engines import remote
from rl_core.engines.embedded import EmbeddedEngine
from rl_core.engines.lease import DeviceLease
from rl_core.engines.remote import EngineServer, ask, connect, in_buckets, make_weight_channel
from rl_core.sampling.engine import EngineDied
from rl_core.types import Completion, RunError, SamplingParams

NUM_ENGINES = 2


def in_threads(function, arguments) -> list:
    results = [None] * len(arguments)

    def run(number: int) -> None:
        results[number] = function(arguments[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(arguments))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.fixture
def ranks():
    """A learner and two ranks that sample, which are processes in all but their threads."""
    same = {"store": dist.HashStore(), "device": torch.device("cpu"), "rollout_ranks": NUM_ENGINES}
    samplers = [
        Ranks(rank=n, size=NUM_ENGINES, is_engine=True, group=1, **same) for n in range(NUM_ENGINES)
    ]
    return [Ranks(rank=0, size=1, **same), *samplers]


@pytest.fixture
def served(ranks, tiny_model):
    """(the learner's engine, those that answer it)"""
    engines = [make_embedded(tiny_model) for _ in range(NUM_ENGINES)]

    def serve(number: int) -> None:
        server_ranks = ranks[1 + number]
        channel = make_weight_channel(server_ranks, 60)
        asyncio.run(
            EngineServer({"policy": engines[number]}, DeviceLease(), server_ranks, channel).serve()
        )

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(NUM_ENGINES)]
    for thread in threads:
        thread.start()
    engine = connect(["policy"], ranks[0], torch.float32, 60)["policy"]
    asyncio.run(engine.wake())
    yield engine, engines
    asyncio.run(engine.close())
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "the server still runs after stop"


def changed(folder, factor: float):
    model = load(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return dict(model.named_parameters())


async def all_of(coroutines):
    return await asyncio.wait_for(asyncio.gather(*coroutines, return_exceptions=True), 120)


def test_it_answers_as_an_engine_here(served, tiny_model):
    engine, others = served
    assert engine.capacity == sum(one.capacity for one in others)
    prompts = [[3, 4, 5], [7] * 20, [1], [9, 8]]
    params = SamplingParams(max_tokens=12, stop_token_ids=(5,), stop=("zz",))

    async def both():
        here = make_embedded(tiny_model)
        local = await asyncio.gather(
            *(here.generate(p, params, seed=i) for i, p in enumerate(prompts))
        )
        far = await asyncio.gather(
            *(engine.generate(p, params, seed=i) for i, p in enumerate(prompts))
        )
        return local, far

    for local, far in zip(*asyncio.run(both()), strict=True):
        assert (local.token_ids, local.text, local.finish_reason) == (
            far.token_ids,
            far.text,
            far.finish_reason,
        )
        assert far.logprobs == pytest.approx(local.logprobs, abs=1e-5)
    metrics = asyncio.run(engine.take_metrics())
    assert (
        metrics.keys() == {"time/engines_idle_frac"}
        and 0 < metrics["time/engines_idle_frac"].value < 1
    )


def test_new_weights_reach_all_of_them_while_requests_go_on(served, tiny_model):
    engine, others = served

    async def run():
        tasks = [asyncio.create_task(engine.generate([i], LONG, seed=i)) for i in range(4)]
        while sum(server.num_open for server in engine.servers) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await engine.update(changed(tiny_model, 1.3).items(), version=7)
        return await asyncio.gather(*tasks, engine.generate([3, 4], GREEDY, seed=0))

    *completions, late = asyncio.run(run())
    assert late.policy_versions == [7] * 12
    for completion in completions:  # Continued after the pause, or started after it.
        assert len(completion.token_ids) == LONG.max_tokens and completion.policy_versions[-1] == 7
    for one in others:
        held = dict(one.model.named_parameters())
        assert all(
            torch.equal(held[name], value) for name, value in changed(tiny_model, 1.3).items()
        )


def test_the_learner_knows_what_was_sampled_so_far_once_it_has_caught_up(served):
    engine, others = served
    nothing = {"text": "", "finish_reason": "", "policy_version": -1}

    async def look():
        unfinished = [Completion(token_ids=[], logprobs=[], **nothing) for _ in range(4)]
        asked = (engine.generate([i], LONG, seed=i, unfinished=b) for i, b in enumerate(unfinished))
        tasks = [asyncio.create_task(one) for one in asked]
        while sum(len(one._active) for one in others) < len(tasks):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await engine.update_unfinished()
        early = [(list(b.token_ids), list(b.logprobs)) for b in unfinished]
        return early, await asyncio.gather(*tasks)

    early, late = asyncio.run(look())
    for (token_ids, logprobs), completion in zip(early, late, strict=True):
        assert token_ids and token_ids == completion.token_ids[: len(token_ids)]
        assert logprobs == completion.logprobs[: len(logprobs)]
    assert not engine.unfinished


def test_a_conversation_stays_where_its_keys_and_values_are(served):
    engine, _ = served

    async def talk():
        for name in ("a", "b"):
            [first] = await all_of([engine.generate([1, 2, 3], GREEDY, seed=0, session=name)])
            server = engine.session_servers[name]
            await all_of(
                [engine.generate([1, 2, 3, *first.token_ids, 4], GREEDY, seed=0, session=name)]
            )
            assert engine.session_servers[name] is server
            engine.end_session(name)
        assert not engine.session_servers

    asyncio.run(talk())


def test_errors_arrive_as_they_were(served):
    engine, _ = served

    async def run():
        [refused] = await all_of([engine.generate([1] * 10_000, GREEDY, seed=0)])
        [wrong] = await all_of([engine.servers[0].ask("nonsense")])
        assert isinstance(wrong, RunError) and "do_nonsense" in str(wrong)
        engine.servers[0].url = engine.servers[1].url = "http://127.0.0.1:9/policy"
        [gone] = await all_of([engine.generate([1], GREEDY, seed=0)])
        return refused, gone

    urls = [server.url for server in engine.servers]
    refused, gone = asyncio.run(run())
    for server, url in zip(engine.servers, urls, strict=True):
        server.url = url
    assert isinstance(refused, ValueError) and "a prompt of 10000 tokens" in str(refused)
    assert isinstance(
        gone, EngineDied
    ) and "http://127.0.0.1:9/policy/generate does not answer" in str(gone)


def test_a_stranger_gets_no_answer(served):
    engine, _ = served
    for token in ("", "guess"):
        status, content = asyncio.run(ask(f"{engine.servers[0].url}/stop", {}, token, 60))
        assert (status, content) == (401, b'"the token is missing or wrong"')


@pytest.mark.parametrize(
    "change", [lambda w: w.pop("model.norm.weight"), lambda w: w.update(alien=torch.ones(1))]
)
def test_weights_that_do_not_fit_are_the_learners_error(served, tiny_model, change):
    engine, _ = served
    weights = changed(tiny_model, 1.0)
    change(weights)
    weights |= {name: weights.pop(name) for name in list(weights)[:-1]}  # the last comes first
    with pytest.raises(ValueError, match=r"model.norm.weight|alien"):
        asyncio.run(engine.update(weights.items(), version=9))
    assert asyncio.run(engine.generate([1], GREEDY, seed=0)).policy_version == 0
    asyncio.run(engine.update(changed(tiny_model, 1.0).items(), version=9))
    assert asyncio.run(engine.generate([1], GREEDY, seed=0)).policy_version == 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_arrives_in_the_dtype_of_compute(ranks, monkeypatch, dtype):
    channels = in_threads(lambda one: make_weight_channel(one, 60), ranks)
    monkeypatch.setattr(remote, "BUCKET_BYTES", 200)
    draw = torch.Generator().manual_seed(0)
    weights = {f"layer.{i}": torch.randn(3 + i, 5, generator=draw) for i in range(7)}

    def run(channel) -> dict[str, torch.Tensor] | None:
        if channel is channels[0]:
            channel.send(weights.items(), dtype)
        else:
            return {name: value.clone() for name, value in channel.receive()}

    for received in in_threads(run, channels)[1:]:
        assert list(received) == list(weights)
        assert all(torch.equal(received[name], value.to(dtype)) for name, value in weights.items())


def test_buckets_hold_as_much_as_they_may_and_a_larger_tensor_is_alone(monkeypatch):
    monkeypatch.setattr(remote, "BUCKET_BYTES", 100)
    sizes = {"a": 40, "b": 60, "c": 1, "d": 300, "e": 100, "f": 1}
    tensors = ((n, torch.zeros(s, dtype=torch.uint8)) for n, s in sizes.items())
    assert [list(bucket) for bucket in in_buckets(tensors)] == [
        ["a", "b"],
        ["c"],
        ["d"],
        ["e"],
        ["f"],
    ]


class Watched(EmbeddedEngine):
    """Keeps which of several engines have memory of the device."""

    def __init__(self, name: str, model, awake: list[set[str]]):
        super().__init__(engine_spec(model))
        self.name, self.awake = name, awake

    async def wake(self) -> None:
        await super().wake()
        self.awake.append(self.awake[-1] | {self.name})

    async def sleep(self) -> None:
        await super().sleep()
        self.awake.append(self.awake[-1] - {self.name})


def test_an_update_of_one_engine_leaves_another_awake(ranks, tiny_model):
    awake: list[set[str]] = [set()]
    names = ("policy", "policy.older")
    engines = {name: Watched(name, load(tiny_model), awake) for name in names}
    ranks = [replace(one, rollout_ranks=1) for one in ranks[:2]]

    def serve() -> None:
        channel = make_weight_channel(ranks[1], 60)
        asyncio.run(EngineServer(engines, DeviceLease(), ranks[1], channel).serve())

    server = threading.Thread(target=serve)
    server.start()
    newest, older = connect(list(engines), ranks[0], torch.float32, 60).values()

    async def run() -> list[int]:
        await newest.generate([3], GREEDY, seed=0)
        await older.update(changed(tiny_model, 1.3).items(), version=3)
        again = await newest.generate([3], GREEDY, seed=0)
        other = await older.generate([3], GREEDY, seed=0)
        await newest.close()
        return [again.policy_version, other.policy_version]

    assert asyncio.run(run()) == [0, 3]
    server.join(60)
    assert {"policy"} in awake and {"policy.older"} in awake and set(names) not in awake
