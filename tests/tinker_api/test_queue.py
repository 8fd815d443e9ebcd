"""Order, repeats, turns and failures of requests."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from rl_core.http_guard import HttpError
from rl_core.tinker import queue
from rl_core.tinker.queue import FairGate, Lane, Promises, Turns
from rl_core.types import RunError


@asynccontextmanager
async def turns_of():
    """Turns, and the lanes whose gradients were dropped."""
    dropped: list[Lane] = []
    turns = Turns(Promises(), dropped.append)
    task = asyncio.create_task(turns.work())
    try:
        yield turns, dropped
    finally:
        task.cancel()
        turns.thread.shutdown()


async def results(promises) -> list:
    for promise in promises:
        await asyncio.wait_for(promise.done.wait(), 20)
    return [promise.result for promise in promises]


async def test_requests_run_once_each_in_the_order_of_seq_id():
    done: list[int] = []

    def run(number):
        done.append(number)
        return {"n": number}

    async with turns_of() as (turns, _):
        lane, promises = Lane(tenant="a"), {}
        for seq in (4, 2, 3, 4, 2, 1, 1, 5):  # The first comes last, and each twice.
            promise = turns.submit(lane, seq, f"m:{seq}", lambda seq=seq: run(seq), size=5)
            assert promises.setdefault(seq, promise) is promise
        await results(promises.values())
        assert turns.submit(lane, 3, "m:3", lambda: run(3)).result == {"n": 3}, "a late repeat"
        assert (turns.waiting["a"], turns.waiting_bytes["a"]) == (0, 0)
    assert done == [1, 2, 3, 4, 5]


async def test_a_failed_backward_fails_what_follows_up_to_its_step():
    def fail():
        raise ValueError("datum 0: no")

    async with turns_of() as (turns, dropped):
        bad, good = Lane(tenant="a"), Lane(tenant="b")
        promises = []
        for seq, kind in enumerate(["backward", "backward", "step", "backward", "step"], 1):
            run = fail if seq == 1 else dict
            promises.append(turns.submit(bad, seq, f"bad:{seq}", run, kind=kind))
        promises.append(turns.submit(good, 1, "good:1", dict, kind="backward"))
        first, second, step, *others = await results(promises)
    assert first == {"error": "datum 0: no", "category": "user"}
    assert all("earlier request of this model failed" in each["error"] for each in (second, step))
    assert others == [{}, {}, {}]
    assert set(dropped) == {bad}


async def test_errors_of_the_server_name_their_type(capsys):
    async with turns_of() as (turns, _):
        promise = turns.submit(Lane(tenant="a"), 1, "m:1", lambda: 1 // 0)
        [result] = await results([promise])
    assert result["category"] == "server"
    assert result["error"].startswith("ZeroDivisionError")
    assert "Traceback" in capsys.readouterr().err


async def test_ranks_that_cannot_continue_together_end_the_server():
    def fail():
        raise RunError("other ranks wait")

    turns = Turns(Promises(), lambda lane: None)
    turns.submit(Lane(tenant="a"), 1, "m:1", fail, kind="backward")
    with pytest.raises(RunError, match="other ranks wait"):
        await asyncio.wait_for(turns.work(), 20)
    turns.thread.shutdown()


async def test_tenants_take_turns():
    done: list[str] = []
    async with turns_of() as (turns, _):
        promises = []
        for name, tenant, num in (("a0", "a", 4), ("a1", "a", 4), ("b", "b", 3)):
            lane = Lane(tenant=tenant)
            for seq in range(1, num + 1):
                run = lambda name=name: done.append(name) or {}  # noqa: E731
                promises.append(turns.submit(lane, seq, f"{name}:{seq}", run))
        await results(promises)
    assert "".join(name[0] for name in done[:6]) in ("ababab", "bababa")
    assert [name for name in done if name != "b"] == ["a0", "a1"] * 4


async def test_a_tenant_with_too_many_requests_waits_for_the_next_in_line(monkeypatch):
    monkeypatch.setattr(queue, "MAX_WAITING", 2)
    turns, lane = Turns(Promises(), lambda lane: None), Lane(tenant="a")
    for seq in (2, 3):
        turns.submit(lane, seq, f"m:{seq}", dict)
    with pytest.raises(HttpError, match="2 requests wait") as error:
        turns.submit(lane, 4, "m:4", dict)
    assert error.value.status == 429
    turns.submit(lane, 1, "m:1", dict)
    logprobs = Lane(tenant="a")
    for number in range(2):
        turns.submit(logprobs, None, f"logprobs:{number}", dict)
    turns.submit(Lane(tenant="b"), 2, "n:2", dict)
    turns.thread.shutdown()


async def test_a_request_that_never_comes_does_not_hold_the_others_forever(monkeypatch):
    monkeypatch.setattr(queue, "GAP_S", 0.0)
    async with turns_of() as (turns, dropped):
        lane = Lane(tenant="a")
        promises = [turns.submit(lane, 3, "m:3", dict, kind="step")]
        promises.append(turns.submit(lane, 4, "m:4", dict))
        late, after = await results(promises)
    assert "request 1 did not arrive" in late["error"]
    assert after == {}
    assert dropped == [lane]


async def test_a_promise_is_its_tenants_alone_and_old_results_are_dropped(monkeypatch):
    monkeypatch.setattr(queue, "MAX_RESULTS", 1)
    promises = Promises()
    known: dict[int, queue.Promise] = {}
    first, second = (promises.add("a", f"m:{seq}", known, seq) for seq in (1, 2))
    for tenant, request_id in (("b", "m:1"), ("a", "m:3")):
        with pytest.raises(HttpError) as error:
            promises.find(tenant, request_id)
        assert error.value.status == 410
    for promise in (first, second):
        promises.finish(promise, b"x")
    with pytest.raises(HttpError):
        promises.find("a", "m:1")
    assert await promises.wait(promises.find("a", "m:2")) == b"x"
    assert known == {2: second}


async def test_a_poll_of_a_running_request_is_told_to_ask_again(monkeypatch):
    monkeypatch.setattr(queue, "POLL_S", 0.0)
    promises = Promises()
    answer = await promises.wait(promises.add("a", "m:1"))
    assert (answer["type"], answer["queue_state"]) == ("try_again", "active")


async def test_sequences_of_tenants_take_turns_and_cancelled_ones_leave():
    gate, order, going = FairGate(1), [], asyncio.Event()

    async def sample(name):
        order.append(name)
        await going.wait()

    tasks = [asyncio.create_task(gate.run("a", lambda n=n: sample(f"a{n}"))) for n in range(4)]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(gate.run("b", lambda: sample("b0"))))
    await asyncio.sleep(0)
    tasks[1].cancel()
    going.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order in (["a0", "a2", "b0", "a3"], ["a0", "b0", "a2", "a3"])
    assert (gate.free, gate.waiting) == (1, {})


async def test_a_sequence_that_is_cancelled_as_it_is_admitted_leaves_its_place():
    gate, going = FairGate(1), asyncio.Event()
    first, second = (asyncio.create_task(gate.run("a", going.wait)) for _ in range(2))
    await asyncio.sleep(0)
    going.set()
    await asyncio.sleep(0)  # The first ends, and the second has its turn without having begun.
    assert first.done()
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert second.cancelled()
    assert (gate.free, gate.waiting) == (1, {})
