"""Engines that take turns on a device: who is served when, what goes wrong, and that what they say stays the same."""

from __future__ import annotations

import asyncio
import json
import random
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_core.groups import restarts_of
from rl_core.sampling.embedded_engine import EmbeddedEngine
from rl_core.sampling.engine import ActorEngine, StillEngine
from rl_core.sampling.scripted_engine import ScriptedEngine, plain_chat
from rl_core.sampling.time_slice import TimeSlice
from rl_core.types import SamplingParams

PARAMS = SamplingParams(max_tokens=6)
CHAT = plain_chat()


class Turns(ScriptedEngine):
    """Answers when it is let go; writes down who is awake and who answered, beside the others."""

    def __init__(self, name: str, diary: list[tuple[str, str]], gate: asyncio.Event | None = None):
        super().__init__(CHAT, [name])
        self.name, self.diary, self.gate, self.is_awake, self.error = name, diary, gate, False, None

    async def generate(self, *args, **kwargs):
        assert self.is_awake
        self.diary.append(("start", self.name))
        if self.gate is not None:
            await self.gate.wait()
        else:
            await asyncio.sleep(0)
        assert self.is_awake
        return await super().generate(*args, **kwargs)

    async def sleep(self):
        self.diary.append(("sleep", self.name))
        await asyncio.sleep(0)
        self.is_awake = False

    async def wake(self):
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.diary.append(("wake", self.name))
        self.is_awake = True


def woken(diary) -> list[str]:
    return [name for what, name in diary if what == "wake"]


def make(names: str, max_slice_s: float = 1e9, clock=None, gated: str = ""):
    now, diary = TimeSlice(max_slice_s, **({"clock": clock} if clock else {})), []
    gates = {name: asyncio.Event() for name in gated}
    engines = {name: now.engine(Turns(name, diary, gates.get(name))) for name in names}
    return now, diary, engines, gates


def ask(engine, count: int = 1) -> list[asyncio.Task]:
    return [asyncio.create_task(engine.generate([1, 2], PARAMS, seed=i)) for i in range(count)]


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


def whole_model(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # no file's pages, which stay where they are
    return model


def plain(model) -> EmbeddedEngine:
    return EmbeddedEngine(model, num_slots=2, max_context_tokens=64)


def requests(num: int, seed: int) -> list[tuple[str, list[int], int]]:
    """(engine, prompt, turns of the event loop before it comes)."""
    draw = random.Random(seed)
    return [(draw.choice("abc"), [draw.randrange(104) for _ in range(9)], draw.randrange(60)) for _ in range(num)]


@pytest.mark.parametrize("max_slice_s", [0.0, 1e9])
def test_real_engines_that_take_turns_say_what_they_say_alone_and_one_is_awake_at_a_time(make_model, max_slice_s):
    folders = dict(zip("abc", [make_model(), make_model(arch="llama", seed=1), make_model(seed=2)], strict=True))
    most = []

    class Watched(EmbeddedEngine):
        def _step(self):
            most.append(sum(not e._copies.waiting for e in awake.values()))
            super()._step()

    def load(cls, name, **how):
        return cls(whole_model(folders[name]), num_slots=3, max_context_tokens=32, **how)

    async def talk(engines):
        async def one(index, name, prompt, delay):
            for _ in range(delay):
                await asyncio.sleep(0)
            first = await engines[name].generate(prompt, PARAMS, seed=index, session=f"s{index}")
            prompt = prompt + first.token_ids + [7]
            second = await engines[name].generate(prompt, PARAMS, seed=100 + index, session=f"s{index}")
            engines[name].end_session(f"s{index}")
            return first, second

        calls = (one(i, *request) for i, request in enumerate(requests(24, seed=3)))
        return await asyncio.wait_for(asyncio.gather(*calls), 60)

    expected = asyncio.run(talk({name: load(EmbeddedEngine, name) for name in "abc"}))
    awake = {name: load(Watched, name, offloads=True) for name in "abc"}
    assert all(p.untyped_storage().nbytes() == 0 for e in awake.values() for p in e.model.parameters())
    now = TimeSlice(max_slice_s)
    found = asyncio.run(talk({name: now.engine(engine) for name, engine in awake.items()}))
    assert max(most) == 1 and now.num_switches > 3
    for pairs in zip(expected, found, strict=True):
        for a, b in zip(*pairs, strict=True):
            assert a.token_ids == b.token_ids and a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_random_arrivals_are_all_served_with_one_awake(tmp_path):
    async def main(seed):
        now, diary, engines, _ = make("abc", max_slice_s=2.0, clock=iter(range(10**6)).__next__)
        draw = random.Random(seed)

        async def one(name):
            for _ in range(draw.randrange(200)):
                await asyncio.sleep(0)
            call = asyncio.create_task(engines[name].generate([1], PARAMS, seed=0))
            if draw.random() < 0.3:
                for _ in range(draw.randrange(30)):
                    await asyncio.sleep(0)
                call.cancel()
            try:
                return (await call).text
            except asyncio.CancelledError:
                return "cancelled"

        names = [draw.choice("aaabbc") for _ in range(150)]
        said = await asyncio.wait_for(asyncio.gather(*map(one, names)), 30)
        assert all(text in (name, "cancelled") for name, text in zip(names, said, strict=True))
        assert now.num_running == 0 and not any(e.waiting for e in engines.values())
        awake = set()
        for what, name in diary:
            awake = awake | {name} if what == "wake" else awake - {name} if what == "sleep" else awake
            assert len(awake) <= 1
        assert {"a", "b", "c"} <= {name for what, name in diary if what == "start"}

    for seed in range(6):
        asyncio.run(main(seed))


def test_the_longest_queue_is_served_next_when_the_awake_engine_is_idle():
    async def main():
        _, diary, engines, gates = make("abcd", gated="a")
        first = ask(engines["a"])
        await settle()
        calls = [*first, *ask(engines["b"], 1), *ask(engines["c"], 4), *ask(engines["d"], 2)]
        await settle()
        assert woken(diary) == ["a"]
        gates["a"].set()
        await asyncio.gather(*calls)
        assert woken(diary) == ["a", "c", "d", "b"]

    asyncio.run(main())


def test_after_its_slice_an_engine_takes_no_further_request_while_others_wait():
    async def main():
        time = [0.0]
        _, diary, engines, gates = make("ab", max_slice_s=10.0, clock=lambda: time[0], gated="a")
        calls = ask(engines["a"])
        await settle()
        calls += ask(engines["b"])
        time[0] = 9.0
        calls += ask(engines["a"], 2)  # the slice goes on
        await settle()
        assert diary.count(("start", "a")) == 3
        time[0] = 10.0
        calls += ask(engines["a"], 5)
        await settle()
        assert diary.count(("start", "a")) == 3 and woken(diary) == ["a"]
        gates["a"].set()
        await asyncio.gather(*calls)
        # Its queue was longer, but it had its slice.
        assert woken(diary) == ["a", "b", "a"] and diary.count(("start", "a")) == 8

    asyncio.run(main())


def test_an_engine_alone_keeps_the_device_after_its_slice():
    async def main():
        now, diary, engines, gates = make("ab", max_slice_s=0.0, gated="a")
        calls = ask(engines["a"])
        await settle()
        other = ask(engines["b"])
        held_back = ask(engines["a"])
        await settle()
        assert diary.count(("start", "a")) == 1
        other[0].cancel()
        await settle()
        assert diary.count(("start", "a")) == 2  # nobody else waits any more
        gates["a"].set()
        await asyncio.gather(*calls, *held_back)
        assert woken(diary) == ["a"] and now.take_metrics()["engine_switches"].value == 1

    asyncio.run(main())


def test_a_short_queue_is_not_passed_over_for_ever():
    async def main():
        _, diary, engines, _ = make("abc", max_slice_s=0.0)

        async def again(name, times):
            for _ in range(times):
                await engines[name].generate([1], PARAMS, seed=0)

        busy = [asyncio.create_task(again(name, 30)) for name in "aabb" * 3]
        await settle()
        [rare] = ask(engines["c"])
        await asyncio.gather(*busy, rare)
        assert woken(diary).index("c") < 9

    asyncio.run(main())


@pytest.mark.parametrize("what", ["wake", "sleep"])
def test_a_switch_that_fails_reaches_everybody_who_waited_for_it(what):
    async def main():
        _, _diary, engines, gates = make("abc", gated="a")
        first = ask(engines["a"])
        await settle()
        waiting, others = ask(engines["b"], 3), ask(engines["c"], 1)
        broken = engines["b" if what == "wake" else "a"].engine
        if what == "wake":
            broken.error = MemoryError("no room for b")
        else:
            good, bad = broken.sleep, [OSError("a does not sleep")]

            async def sleep():
                if bad:
                    raise bad.pop()
                await good()

            broken.sleep = sleep
        gates["a"].set()
        found = await asyncio.wait_for(asyncio.gather(*first, *waiting, *others, return_exceptions=True), 10)
        assert [type(x) for x in found[1:4]] == [MemoryError if what == "wake" else OSError] * 3
        assert found[0].text == "a" and found[4].text == "c"
        broken.error = None
        assert [x.text for x in await asyncio.gather(*ask(engines["b"], 2), *ask(engines["a"]))] == ["b", "b", "a"]

    asyncio.run(main())


def test_a_waiter_that_is_cancelled_leaves_the_queue_and_others_are_served():
    async def main():
        now, _diary, engines, gates = make("ab", gated="a")
        first, waiting = ask(engines["a"]), []
        await settle()
        waiting = ask(engines["b"], 3)
        await settle()
        waiting[1].cancel()
        gates["a"].set()
        found = await asyncio.gather(*first, *waiting, return_exceptions=True)
        assert [getattr(x, "text", type(x)) for x in found] == ["a", "b", asyncio.CancelledError, "b"]
        assert now.num_running == 0

    asyncio.run(main())


def test_paused_engines_lend_the_device_for_new_weights_and_go_on_where_they_stopped(make_model):
    """What asynchronous training does between two tokens, with one engine awake at a time."""
    prompt, params = [1, 2, 3], SamplingParams(max_tokens=40)

    async def main():
        now = TimeSlice(0.0)
        models = [whole_model(make_model(seed=seed)).requires_grad_(False) for seed in (0, 1)]
        limits = {"num_slots": 2, "max_context_tokens": 64, "offloads": True}
        a, b = engines = [now.engine(EmbeddedEngine(model, **limits)) for model in models]
        calls = [asyncio.create_task(e.generate(prompt, params, seed=0)) for e in (a, a, b)]
        while a.engine.stats.decode_steps < 5:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for engine in engines:
            await engine.pause()
        new = whole_model(make_model(seed=2))
        for engine in engines:
            await engine.update_weights(new.named_parameters(), 1)
        await asyncio.gather(*(engine.resume() for engine in engines))
        return await asyncio.wait_for(asyncio.gather(*calls), 30), new

    (first, second, last), new = asyncio.run(main())
    assert len(first.token_ids) == 40 and first.token_ids == second.token_ids
    assert last.token_ids == asyncio.run(plain(new).generate(prompt, params, seed=0)).token_ids
    alone = asyncio.run(plain(whole_model(make_model(seed=0))).generate(prompt, params, seed=0))
    same = [x == y for x, y in zip(first.token_ids, alone.token_ids, strict=True)]
    assert all(same[:5]) and not all(same)


def test_new_weights_wait_for_the_device_and_leave_an_engine_asleep_that_slept(tiny_model):
    async def main():
        now = TimeSlice(1e9)
        models = [whole_model(tiny_model).requires_grad_(False) for _ in "ab"]
        weights = {k: v + 1 for k, v in models[0].named_parameters()}
        limits = {"num_slots": 2, "max_context_tokens": 32, "offloads": True}
        a, b = (now.engine(EmbeddedEngine(model, **limits)) for model in models)
        before = await b.generate([1, 2, 3], PARAMS, seed=0)
        await a.update_weights(weights.items(), 1)
        assert now.holder is None and a.engine._copies.waiting and b.engine._copies.waiting
        assert (a.policy_version, b.policy_version) == (1, 0)
        await a.wake()
        assert all(torch.equal(models[0].get_parameter(k), v) for k, v in weights.items())
        after = await b.generate([1, 2, 3], PARAMS, seed=0)
        assert after.token_ids == before.token_ids and a.engine._copies.waiting
        await b.sleep()
        assert now.holder is None and b.engine._copies.waiting
        await asyncio.gather(a.close(), b.close())

    asyncio.run(main())


def talk(make_model, tmp_path, *flags: str):
    (tmp_path / "talk.py").write_text(
        'turns = "bob -> alice -> bob"\n'
        'def load_tasks(split): return [{"prompt": f"say {n}"} for n in range(6)]\n'
        "def reward_fn(completion): return float(len(completion))\n"
    )
    models = ["--actors.bob.model", str(make_model()), "--actors.alice.model", str(make_model(arch="llama", seed=1))]
    sizes = [
        "--tasks_per_step",
        "4",
        "--group_size",
        "4",
        "--num_steps",
        "2",
        "--optim.lr",
        "1e-3",
        "--max_tokens",
        "60",
    ]
    sizes += ["--sampling.stop", json.dumps(list("abcdefghijklmnopqrstuvwxyz"))]  # what is cut short ends the episode
    return [*models, "--env_path", str(tmp_path / "talk.py"), *sizes, "--max_prompt_tokens", "60", *flags]


def test_deaths_of_an_engine_that_takes_turns_and_is_shared_are_counted_once():
    class Mortal(StillEngine):
        policy_version, capacity, num_restarts = 0, 1, 2

    mortal = Mortal()
    sliced = TimeSlice(1e9).engine(mortal)
    run = SimpleNamespace(
        engines={"bob": ActorEngine(sliced, "bob"), "alice": ActorEngine(sliced), "eve": StillEngine()}
    )
    counted = {name: metric.value for name, metric in restarts_of(run).items()}
    assert counted == {"rollout/bob/engine_restarts": 2, "rollout/alice/engine_restarts": 0}
    assert mortal.num_restarts == 0


def test_a_run_of_engines_that_take_turns_learns_what_one_without_does(make_model, tmp_path):
    from test_several import weights
    from test_train import metrics

    from rl_core.train import main

    flags = [*talk(make_model, tmp_path), "--actors.alice.train", "false"]
    for how in ("all", "one"):
        assert main([*flags, "--out", str(tmp_path / how), "--rollout.engines_awake", how]) == 0
    a, b = (weights(tmp_path / how, "bob") for how in ("all", "one"))
    assert all(torch.allclose(a[key], b[key], atol=1e-5) for key in a)
    assert metrics(tmp_path / "one")[-1]["rollout/engine_switches"] >= 3
    assert "rollout/engine_switches" not in metrics(tmp_path / "all")[-1]
