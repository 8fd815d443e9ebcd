"""Hooks of served environments that ask actors: a worker's questions, and its use of the
answers."""

from __future__ import annotations

import asyncio
import json

import pytest
from test_sessions import ASK, Client, play, worker_of  # noqa: F401  (a fixture)

from rl_core.environments.service import actors
from rl_core.environments.service import environments_pb2 as pb

CAST = json.dumps([{"name": "policy", "max_turns": 4}, {"name": "judge", "is_trainable": False}])
GAME = """
calls = []

async def rollout(task, actors):
    first, second = await actors["policy"].respond(task.messages, n=2, max_tokens=9, stop=["!"])
    calls.append(first.text)
    fork = first.fork()
    await first.respond("more")
    await fork.respond("less")
    verdict = await actors["judge"].respond([{"role": "user", "content": second.answer}], tools=[{"type": "function", "function": {"name": "f"}}])
    found = [first.trajectory({"a": 0.5, "b": len(verdict.text)}, player="x", metrics={"m": actors["policy"].max_turns})]
    return [*found, fork.trajectory(2, player="y", metrics={"chars": len(fork.text)}), second.trajectory(1)]
"""
TURN = {"new_ids": [1, 2], "is_fresh": True}
TURN["completion"] = {
    "token_ids": [3],
    "logprobs": [-0.1],
    "text": "x",
    "finish_reason": "stop",
    "policy_version": 0,
}


def spoken(ask: int, text: str = "x", **more) -> pb.Spoken:
    more = {
        "messages": json.dumps([{"role": "assistant", "content": text}]),
        "turn": json.dumps(TURN),
    } | more
    return pb.Spoken(ask=ask, **more)


class Player(Client):
    """A session whose hooks ask."""

    async def start(self, row: dict | None = None, code: str = "ok", cast: str = CAST, **arguments):
        return await super().start(row, code, cast=cast, **arguments)

    async def run(self, hook: str = "rollout", code: str = "ok", number: int = 0, given: str = ""):
        run = pb.RunRequest(session=self.session, hook=hook, number=number, given=given)
        return await self.ask(code, run=run)

    async def answer(self, call: int, *answers: pb.Spoken, code: str = "ok", number: int = 0):
        answer = pb.AnswerRequest(session=self.session, call=call, answers=answers, number=number)
        return await self.ask(code, answer=answer)


def test_a_rollout_is_answered_ask_by_ask_and_gives_its_trajectories(worker_of, monkeypatch):  # noqa: F811
    monkeypatch.setattr(actors, "LISTEN_S", 600.0)

    async def script(client):
        asked = (await client.run()).asked
        assert [(o.conversation, o.actor, json.loads(o.messages)) for o in asked.openings] == [
            (n, "policy", ASK) for n in (1, 2)
        ]
        assert json.loads(asked.openings[0].sampling) == {"max_tokens": 9, "stop": ["!"]}
        assert [(ask.id, ask.conversation, ask.messages) for ask in asked.asks] == [
            (1, 1, "[]"),
            (2, 2, "[]"),
        ]
        listening = asyncio.ensure_future(client.answer(1, spoken(2, "<think>a</think>two")))
        await asyncio.sleep(0)  # it begins
        asked = (await client.answer(1, spoken(1, "one"))).asked
        assert not (await listening).WhichOneof("news")  # another one listens
        [fork], [ask] = asked.openings, asked.asks
        assert (fork.fork_of, ask.conversation) == (1, 1) and json.loads(ask.messages)[0][
            "content"
        ] == "more"
        asked = (await client.answer(1, spoken(ask.id, "end", truncated=True))).asked
        [ask] = asked.asks
        assert (
            ask.conversation == fork.conversation
            and json.loads(ask.messages)[0]["content"] == "less"
        )
        [judge] = (
            await client.answer(1, pb.Spoken(ask=ask.id, messages="[]", truncated=True))
        ).asked.openings
        assert (judge.actor, judge.tools) == (
            "judge",
            '[{"type":"function","function":{"name":"f"}}]',
        ) and '"two"' in judge.messages
        result = (await client.answer(1, spoken(5, "good", turn="", metrics={"t": 1}))).run
        assert result.status == pb.COMPLETED
        one, forked, other = json.loads(result.value)
        assert (one["reward"], one["reward_parts"], one["turns"]) == (
            4.5,
            {"a": 0.5, "b": 4.0},
            [1, 3],
        )
        assert (one["player"], one["status"], one["metrics"]) == ("x", "truncated", {"m": 4})
        assert [m["content"] for m in one["messages"]] == ["1+1?", "one", "more", "end"]
        # Its context was full.
        assert (forked["turns"], forked["messages"][-1]["content"], forked["metrics"]) == (
            [1],
            "less",
            {"chars": 0.0},
        )
        assert (other["turns"], other["actor"]) == ([2], "policy")
        assert (await client.answer(1)).run == result  # once more, to who listened meanwhile
        await client.run(code="ended")
        await client.answer(1, number=2, code="ended")  # its reply is forgotten
        assert client.worker.heartbeat().loads[0].interactions == 1

    play(worker_of(GAME), script, Player)


def test_a_rollout_that_returns_no_trajectories_ends_its_session(worker_of):  # noqa: F811
    async def script(client):
        assert "rollout() returned" in await client.run(code="unknown")
        assert "environment error" in await client.run(code="ended")

    play(worker_of("async def rollout(task, actors): return 3"), script, Player)


def test_an_actors_error_is_raised_in_the_hook(worker_of):  # noqa: F811
    code = """
    async def rollout(task, actors):
        for _ in range(3):
            try:
                await actors["policy"].respond("hi")
            except (ValueError, TimeoutError, ConnectionError) as error:
                seen = f"{type(error).__name__} {error}"
        await actors["policy"].respond(seen)
    """

    async def script(client):
        await client.run()
        await client.answer(1, pb.Spoken(ask=1, error="ValueError: too: long"))
        await client.answer(1, spoken(1), code="exists")
        await client.answer(1, pb.Spoken(ask=2, error="TimeoutError: late"))
        asked = (await client.answer(1, pb.Spoken(ask=3, error="ConnectionError: no answer"))).asked
        assert json.loads(asked.openings[0].messages)[0]["content"] == "ConnectionError no answer"
        error = await client.answer(1, pb.Spoken(ask=4, error="Unwell: of late"), code="unknown")
        assert error.startswith("rollout() failed for task row/0: ") and error.endswith(
            "game.py:8: Unwell: of late"
        )

    play(worker_of(code), script, Player)


def test_a_hooks_deadline_does_not_count_the_time_of_actors(worker_of):  # noqa: F811
    code = """
    import asyncio

    async def interact(actors):
        reply = await actors["policy"].respond("hi")
        if reply.text == "hang":
            asyncio.get_running_loop().call_later(0.05, asyncio.ensure_future(reply.respond("again")).cancel)
            await asyncio.sleep(600)
        return [{"role": "user", "content": reply.text}]
    """

    async def script(client):
        assert (await client.say("a")).asked.asks[0].id == 1
        await asyncio.sleep(2)
        assert (
            json.loads((await client.answer(1, spoken(1, "late"))).interact.messages)[0]["content"]
            == "late"
        )
        await client.say("b")
        await client.answer(3, spoken(2, "hang"))
        error = await client.answer(3, code="late")
        assert (
            "interact() ran longer than 1 s for task row/0, without its waits for actors" in error
        )

    play(worker_of(code, hook_timeout_s=1.0), script, Player)


def test_a_returned_hook_asks_no_more_and_waits_cost_no_time():
    async def count() -> list[float]:
        call, now_s, own_s = actors.HookCall(asyncio.sleep(0), actors.PendingCalls(CAST)), 0.0, []
        call.loop = type("Clock", (), {"time": lambda _: now_s})()
        for lasts_s, change in [(1, 1), (10, 1), (100, -1), (1000, -1), (2, 1), (10, -1), (4, 0)]:
            now_s += lasts_s
            own_s.append(call._own_s())
            call.count_waiting(change)
        await call.task
        actors.CALL.set(call)
        with pytest.raises(RuntimeError, match="the hook of this actor has returned"):
            await asyncio.wait_for(call.pending_calls.ask(1, [], {}), 30)
        return own_s

    assert asyncio.run(count()) == [1, 1, 1, 1, 3, 3, 7]


def test_a_cancelled_session_ends_a_hook_that_gave_up_an_ask(
    worker_of,  # noqa: F811
    monkeypatch,
):
    code = """
    import asyncio

    over = asyncio.Event()

    async def rollout(task, actors):
        first = asyncio.ensure_future(actors["policy"].respond("first"))
        await asyncio.wait({first}, timeout=0.05)
        first.cancel()
        try:
            await actors["policy"].respond("second")
        finally:
            over.set()
    """

    async def script(client):
        asks = [*(await client.run()).asked.asks]
        while len(asks) < 2:
            asks += (await client.answer(1)).asked.asks
        assert [ask.id for ask in asks] == [1, 2]
        monkeypatch.setattr(actors, "LISTEN_S", 0.01)
        assert not (await client.answer(1, spoken(1))).WhichOneof(
            "news"
        )  # The hook gave up this call.
        assert await client.cancel() == pb.CANCELLED
        await client.answer(1, spoken(1), code="ended")
        over = client.worker.envs["game"].env.hooks["rollout"].function.__globals__["over"]
        await asyncio.wait_for(over.wait(), 30)

    play(worker_of(code), script, Player)


def test_start_rewards_and_group_rewards_ask_too(worker_of):  # noqa: F811
    code = """
    async def start(task, actors):
        return [(await actors["judge"].respond("start")).text]

    async def one(state, actors):
        return len((await actors["judge"].respond("one")).text) + len(state[0])
    one.reward_mark = 1.0, False

    async def two(completion, actors):
        return len((await actors["judge"].respond(completion)).text)
    two.reward_mark = 0.5, False

    async def group_reward_fn(trajectories, actors, answer):
        said = await actors["judge"].respond(f"{trajectories[0].player} {answer}")
        return [len(said.text), trajectories[0].turns[0].completion.logprobs[0]]
    """

    async def script(client):
        await client.say("a", "ended")  # start() is not over
        assert len(json.loads((await client.answer(0, spoken(1, "abc"))).start.messages)) == 1
        early = await client.score(hooks=["two"], number=2)
        await client.say("a", "ended")  # the reward is not over
        assert (await client.answer(2, spoken(early.asked.asks[0].id, "x"))).score.scores[
            0
        ].reward == 0.5
        assert (await client.say("a")).status == pb.COMPLETED
        first, second = (
            await client.score(hooks=["one"], number=5),
            await client.score(hooks=["two"]),
        )
        assert [(a.id, a.conversation) for r in (first, second) for a in r.asked.asks] == [
            (3, 3),
            (4, 4),
        ]
        assert json.loads(second.asked.openings[0].messages)[0]["content"] == "a"
        assert (await client.answer(6, spoken(4, "four"))).score.scores[0].reward == 2.0
        assert (await client.answer(5, spoken(3, "four"))).score.scores[0].reward == 7.0
        assert (
            await client.score(hooks=["one"], number=5) == first
        )  # The first answer had not arrived.
        assert (await client.score(hooks=["two"])).asked.asks
        assert (await client.answer(5)).score.scores[0].reward == 7.0
        assert await client.cancel() == pb.COMPLETED
        trajectory = {
            "task_id": "t",
            "env": "game",
            "group_id": "g",
            "player": "x",
            "turns": [TURN],
        }
        arguments = json.dumps({"trajectories": [trajectory]})
        await client.ask(
            "wrong", call=pb.CallRequest(env="game", hook="group_reward_fn", given=arguments)
        )
        assert not (await client.start({"answer": "y"}, no_start=True)).HasField("asked")
        for hook in ("start", "nobody"):
            await client.run(hook, "wrong")
        await client.run("group_reward_fn", "wrong", given='{"trajectories": 3}')
        asked = (await client.run("group_reward_fn", given=arguments)).asked
        assert json.loads(asked.openings[0].messages)[0]["content"] == "x y"
        assert json.loads((await client.answer(1, spoken(1, "xyz"))).run.value) == [3, -0.1]

    play(worker_of(code), script, Player)


def test_a_session_whose_asks_nobody_answers_expires(worker_of):  # noqa: F811
    async def script(client):
        await client.run()
        client.worker.draining = True
        await client.worker.sweep()  # until no session is left
        assert "expired" in await client.answer(1, spoken(1), code="ended")

    play(worker_of(GAME, idle_s=0.2), script, Player)
