"""Engines that share a device: order of use, failures, and unchanged samples."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random

import pytest
import torch
from kit import embedded, words
from transformers import AutoModelForCausalLM

from rl_core.engines.lease import DeviceLease
from rl_core.types import SamplingParams


class Sleeper:
    """Tracks whether it is awake, and fails on demand."""

    def __init__(self, name: str, diary: list[tuple[str, str]]):
        self.name, self.diary, self.is_awake, self.errors = name, diary, False, {}

    async def _turn(self, event: str) -> None:
        await asyncio.sleep(0)
        if event in self.errors:
            raise self.errors.pop(event)
        self.is_awake = event == "wake"
        self.diary.append((event, self.name))

    async def sleep(self):
        await self._turn("sleep")

    async def wake(self):
        await self._turn("wake")


class Desk:
    """A lease and the engines that share it."""

    def __init__(self, names: str, max_slice_s: float = 1e9):
        self.lease, self.diary, self.inside = DeviceLease(max_slice_s), [], dict.fromkeys(names, 0)
        self.engines = {name: Sleeper(name, self.diary) for name in names}
        self.gate = asyncio.Event()  # who is inside leaves once it is open

    def enter(self, name: str) -> asyncio.Task:
        return asyncio.create_task(self._enter(name))

    async def _enter(self, name: str) -> str:
        async with self.lease.of(self.engines[name]):
            self.inside[name] += 1
            assert [n for n, engine in self.engines.items() if engine.is_awake] == [name]
            assert [n for n, num in self.inside.items() if num] == [name]
            try:
                await self.gate.wait()
            finally:
                self.inside[name] -= 1
        return name

    @property
    def woken(self) -> str:
        return "".join(name for event, name in self.diary if event == "wake")


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def test_the_engine_that_waited_longest_is_next_once_the_holder_is_idle():
    async def main():
        desk = Desk("abc")
        calls = [desk.enter("a")]
        await settle()
        calls += [desk.enter(name) for name in "cbcba"]
        await settle()
        assert desk.woken == "a" and desk.inside == {"a": 2, "b": 0, "c": 0}, (
            "callers of the holder run side by side"
        )
        desk.gate.set()
        assert await asyncio.gather(*calls) == list("acbcba")
        assert desk.woken == "acb" and not desk.lease.queue and not desk.lease.inside

    run(main())


def test_after_its_slice_the_holder_admits_nobody_while_others_queue():
    async def main():
        desk = Desk("ab", max_slice_s=0.0)
        calls = [desk.enter("a"), desk.enter("a")]
        await settle()
        assert desk.inside["a"] == 2, "alone it keeps the device after its slice"
        other, held_back = desk.enter("b"), desk.enter("a")
        await settle()
        assert desk.inside["a"] == 2
        other.cancel()
        await settle()
        assert desk.inside["a"] == 3, "nobody else waits any more"
        calls += [held_back, desk.enter("b"), desk.enter("a")]
        desk.gate.set()
        await asyncio.gather(*calls)
        assert desk.woken == "aba"

    run(main())


@pytest.mark.parametrize("method", ["wake", "sleep"])
def test_a_failed_switch_reaches_all_who_wait_for_it(method):
    async def main():
        desk = Desk("abc")
        first = desk.enter("a")
        await settle()
        desk.engines["b" if method == "wake" else "a"].errors[method] = OSError("no room")
        calls = [first, *(desk.enter(name) for name in "bbc")]
        await settle()
        desk.gate.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(x) for x in results] == ["a", "no room", "no room", "c"]
        assert await asyncio.gather(desk.enter("b"), desk.enter("a")) == ["b", "a"]

    run(main())


def test_random_arrivals_and_cancellations_are_all_served_with_one_awake():
    async def main(seed: int) -> None:
        draw = random.Random(seed)
        desk = Desk("abc", max_slice_s=draw.choice([0.0, 1e-4, 1e9]))
        desk.gate.set()

        async def one(name: str) -> str:
            for _ in range(draw.randrange(200)):
                await asyncio.sleep(0)
            call = desk.enter(name)
            if draw.random() < 0.3:
                for _ in range(draw.randrange(30)):
                    await asyncio.sleep(0)
                call.cancel()
            try:
                return await call
            except asyncio.CancelledError:
                return "cancelled"

        names = [draw.choice("aaabbc") for _ in range(150)]
        completions = await asyncio.gather(*map(one, names))
        assert all(
            text in (name, "cancelled") for name, text in zip(names, completions, strict=True)
        )
        assert set(desk.woken) == set("abc") and not desk.lease.queue and not desk.lease.inside

    for seed in range(6):
        run(main(seed))


def whole_model(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # no file's pages, which stay where they are
    return model


@pytest.mark.parametrize("max_slice_s", [0.0, 1e9])
def test_real_engines_that_share_a_device_say_what_they_say_alone(make_model, max_slice_s):
    folders = dict(
        zip(
            "abc", [make_model(), make_model(arch="llama", seed=1), make_model(seed=2)], strict=True
        )
    )
    params, draw = SamplingParams(max_tokens=6), random.Random(3)
    requests = [
        (draw.choice("abc"), [draw.randrange(104) for _ in range(9)], draw.randrange(60))
        for _ in range(24)
    ]

    def size(engine) -> int:
        return sum(p.untyped_storage().nbytes() for p in engine.model.parameters())

    async def talk(engines, lease):
        async def speak(name, prompt, **changes):
            async with lease.of(engines[name]):
                completion = await engines[name].generate(prompt, params, **changes)
                assert not lease.holder or [n for n, e in engines.items() if size(e)] == [name]
                return completion

        async def one(index, name, prompt, delay):
            for _ in range(delay):
                await asyncio.sleep(0)
            first = await speak(name, prompt, seed=index, session=f"s{index}")
            prompt = prompt + first.token_ids + [7]
            return first, await speak(name, prompt, seed=100 + index, session=f"s{index}")

        return await asyncio.gather(*(one(i, *request) for i, request in enumerate(requests)))

    def load(name, **changes):
        return embedded(whole_model(folders[name]), num_slots=3, max_context_tokens=32, **changes)

    class NoLease:
        holder = None

        def of(self, engine):
            return contextlib.nullcontext()

    expected = run(talk({name: load(name) for name in "abc"}, NoLease()))
    shared = {name: load(name, offloads_weights=True) for name in "abc"}
    assert not any(map(size, shared.values()))
    lease = DeviceLease(max_slice_s)
    completions = run(talk(shared, lease))
    assert lease.num_switches >= 3
    for pairs in zip(expected, completions, strict=True):
        for a, b in zip(*pairs, strict=True):
            assert a.token_ids == b.token_ids and a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_paused_engines_lend_the_device_and_go_on(make_model):
    """Asynchronous training updates between two tokens, with one engine awake at a time."""
    prompt, params = [1, 2, 3], SamplingParams(max_tokens=40)
    new = whole_model(make_model(seed=2))

    async def main():
        lease = DeviceLease()
        models = [whole_model(make_model(seed=seed)).requires_grad_(False) for seed in (0, 1)]
        limits = {"num_slots": 2, "max_context_tokens": 64, "offloads_weights": True}
        a, b = engines = [embedded(model, **limits) for model in models]

        async def ask(engine):
            async with lease.of(engine):
                return await engine.generate(prompt, params, seed=0)

        calls = [asyncio.create_task(ask(e)) for e in (a, a, b)]
        while a.stats["decode_steps"] < 5:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for engine in engines:
            await engine.pause()
            await engine.sleep()
        assert not any(p.untyped_storage().nbytes() for m in models for p in m.parameters()), (
            "a learner has the device"
        )
        for engine in engines:
            await engine.update(new.named_parameters(), 1)
            await engine.sleep()
        for engine in engines:
            await engine.resume()
        return await asyncio.gather(*calls)

    first, second, last = run(main())
    assert len(first.token_ids) == 40 and first.token_ids == second.token_ids

    def alone(model) -> list[int]:
        plain = embedded(model, num_slots=2, max_context_tokens=64)
        return run(plain.generate(prompt, params, seed=0)).token_ids

    assert last.token_ids == alone(new)
    same = [
        x == y for x, y in zip(first.token_ids, alone(whole_model(make_model(seed=0))), strict=True)
    ]
    assert all(same[:5]) and not all(same)


def talk(make_model, tmp_path, *flags: str):
    (tmp_path / "talk.py").write_text(
        'turns = "bob -> alice -> bob"\n'
        'def load_tasks(split): return [{"prompt": f"say {n}"} for n in range(6)]\n'
        "def reward_fn(completion): return float(len(completion))\n"
    )
    models = [
        "--actors.bob.model",
        str(make_model()),
        "--actors.alice.model",
        str(make_model(arch="llama", seed=1)),
    ]
    sizes = words(
        "--tasks_per_step 4 --group_size 4 --num_steps 2 --optim.lr 1e-3 --max_tokens 60 "
        "--max_prompt_tokens 60"
    )
    stop = json.dumps(list("abcdefghijklmnopqrstuvwxyz"))  # A truncated turn ends the episode.
    return [
        *models,
        "--env_path",
        str(tmp_path / "talk.py"),
        *sizes,
        "--sampling.stop",
        stop,
        *flags,
    ]


def test_a_run_of_engines_that_take_turns_learns_what_one_without_does(make_model, tmp_path):
    from kit import metrics, weights

    from rl_core.train import main

    flags = [*talk(make_model, tmp_path), "--actors.alice.train", "false"]
    for awake in ("all", "one"):
        assert main([*flags, "--out", str(tmp_path / awake), "--rollout.engines_awake", awake]) == 0
    a, b = (weights(tmp_path / awake, "bob") for awake in ("all", "one"))
    assert all(torch.allclose(a[key], b[key], atol=1e-5) for key in a)
    assert metrics(tmp_path / "one")[-1]["rollout/engine_switches"] >= 2
    assert "rollout/engine_switches" not in metrics(tmp_path / "all")[-1]
