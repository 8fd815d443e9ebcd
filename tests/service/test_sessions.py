"""Sessions of served environments: a worker's answers equal those of the same file in process."""

from __future__ import annotations

import asyncio
import json
import re
import textwrap
from pathlib import Path

import pytest

from rl_core.environments.service import environments_pb2 as pb
from rl_core.environments.service.hosted import LocalEnv
from rl_core.environments.service.worker import Worker

ROOT = Path(__file__).parents[2]
CODES = {
    "ok": 0,
    "wrong": 3,
    "unknown": 2,
    "late": 4,
    "absent": 5,
    "exists": 6,
    "full": 8,
    "ended": 9,
}
ASSISTANT = '[{"role": "assistant", "content": "%s"}]'
ASK = [{"role": "user", "content": "1+1?"}]
COUNTS = """
import asyncio, time

max_turns = 5
calls = []

def start(task):
    if task.row.get("refuse"):
        raise KeyError("no such level")
    time.sleep(task.row.get("start_s", 0))
    return {"n": 0}

async def interact(messages, state, actor):
    calls.append(actor)
    state["n"] += 1
    said = messages[-1]["content"]
    messages.clear()
    if said == "sleep":
        try:
            await asyncio.sleep(60)
        finally:
            calls.append("cancelled")
    if said == "crash":
        raise ValueError("broken board")
    if said == "nonsense":
        return [{"role": "user", "content": "x", "seen": {1, 2}}]
    done = said == "end"
    return {"messages": [{"role": "user", "content": f"{said} {state['n']}"}], "reward": 0.25, "done": done}

def reward_fn(completion, state, answer=0):
    return {"right": float(completion == "end"), "n": state["n"]}
"""


@pytest.fixture
def worker_of(tmp_path):
    def make(
        code: str = COUNTS, capacity: int = 100, idle_s: float = 60.0, hook_timeout_s: float = 20.0
    ) -> Worker:
        file = tmp_path / "game.py"
        file.write_text(textwrap.dedent(code))
        return Worker(
            [LocalEnv(str(file), hook_timeout_s=hook_timeout_s, idle_s=idle_s)],
            capacity=capacity,
            idle_s=idle_s,
        )

    return make


class Client:
    """A session by the protocol alone."""

    def __init__(self, worker: Worker, session: str = ""):
        self.worker, self.session = worker, session

    async def ask(self, code: str = "ok", **verb):
        reply = await self.worker.answer(pb.Request(id=7, **verb))
        assert (reply.id, reply.code) == (7, CODES[code]), (reply.code, reply.error)
        return reply.error if reply.code else getattr(reply, next(iter(verb)))

    async def start(self, row: dict | None = None, code: str = "ok", **arguments):
        row = json.dumps({"messages": ASK, **(row or {})})
        reply = await self.ask(code, start=pb.StartRequest(env="game", row=row, **arguments))
        self.session = getattr(reply, "session", "")
        return reply

    async def say(self, text: str, code: str = "ok", number: int = 0, **said):
        said = pb.Said(messages=ASSISTANT % text, **said)
        return await self.ask(
            code, interact=pb.InteractRequest(session=self.session, number=number, said=said)
        )

    async def score(self, code: str = "ok", number: int = 0, hooks=(), actors=(), **text):
        request = pb.ScoreRequest(
            session=self.session, number=number, said=pb.Said(**text), hooks=hooks, actors=actors
        )
        return await self.ask(code, score=request)

    async def cancel(self, status: int = 0):
        return (await self.ask(cancel=pb.CancelRequest(session=self.session, status=status))).status


async def until(fact) -> None:
    while True:
        if fact():
            return
        await asyncio.sleep(0.01)


def play(worker: Worker, script, kind=Client, **start):
    """Result of script(client) in a separate session, and the remains of that session."""

    async def main():
        client = kind(worker)
        await client.start(**start)
        return await script(client)

    return asyncio.run(asyncio.wait_for(main(), 120))


def test_a_client_without_numbers_plays_an_episode_to_its_end(worker_of):
    async def script(client):
        first, last = await client.say("a"), await client.say("end")
        assert json.loads(first.messages) == [{"role": "user", "content": "a 1"}]
        assert (first.reward, first.done, first.status) == (0.25, False, pb.RUNNING)
        assert (last.done, last.status) == (True, pb.COMPLETED)
        assert "completed" in await client.say("more", "ended")
        (score,) = (await client.score()).scores
        assert dict(score.parts) == {"interact": 0.5, "right": 1.0, "n": 2.0}
        assert score.reward == 3.5
        assert await client.cancel() == pb.COMPLETED
        assert "completed" in await client.score("ended")

    worker = worker_of()
    play(worker, script)
    assert not worker.held
    assert worker.ended["game", pb.COMPLETED] == 1


def test_a_hook_by_its_name_gives_what_it_returned(worker_of):
    async def script(client):
        async def run(hook, code="ok", **text):
            text = pb.Said(**text)
            reply = await client.ask(
                code, run=pb.RunRequest(session=client.session, hook=hook, said=text)
            )
            return reply if code != "ok" else (json.loads(reply.value), reply.status)

        answer, status = await run("interact", messages=ASSISTANT % "a")
        assert answer["messages"] == [{"role": "user", "content": "a 1"}]
        assert (answer["reward"], answer["done"], status) == (0.25, False, pb.RUNNING)
        await run("interact", keep=1, messages=ASSISTANT % "end")
        assert await run("reward_fn") == ({"right": 1.0, "n": 2}, pb.RUNNING)
        assert "has no 'nobody' of a session" in await run("nobody", "wrong")
        assert await client.cancel(pb.COMPLETED) == pb.COMPLETED

    worker = worker_of()
    play(worker, script)
    assert worker.envs["game"].interactions == 2


def test_the_last_turn_is_a_limit_which_the_client_may_move(worker_of):
    async def script(client):
        for _ in range(5):
            reply = await client.say("a")
        assert (reply.status, reply.done) == (pb.LIMIT, False)
        assert "its 5 turns" in await client.say("a", "ended")
        assert (await client.score()).scores[0].parts["n"] == 5.0
        (held,) = client.worker.held.values()
        # Nobody answers the last of the environment's.
        assert len(held.session.messages) == 1 + 5 + 4

    async def longer(client):
        assert [(await client.say("a")).status for _ in range(6)] == [pb.RUNNING] * 6

    play(worker_of(), script)
    play(worker_of(), longer, max_turns=100)


def test_a_number_that_comes_again_gives_the_same_reply_and_calls_nothing(worker_of):
    async def script(client):
        first, twin = await asyncio.gather(client.say("a", number=1), client.say("a", number=1))
        again = await client.say("a", number=1)
        assert first == twin == again
        assert "another request" in await client.say("b", "exists", number=1)
        twin = pb.ScoreRequest(
            session=client.session, number=1, said=pb.Said(messages=ASSISTANT % "a")
        )
        await client.ask("exists", score=twin)  # the same bytes, another verb
        assert "expects 2" in await client.say("b", "ended", number=3)
        for number in range(2, 5):
            await client.say("b", number=number)
        assert "long ago" in await client.say("a", "ended", number=1)
        assert json.loads((await client.say("b", number=4)).messages)[0]["content"] == "b 4"

    worker = worker_of()
    play(worker, script)
    assert worker.heartbeat().loads[0].interactions == 4


def test_one_interaction_at_a_time_and_rewards_side_by_side(worker_of):
    code = """
    import asyncio
    from rl_core import reward
    met = asyncio.Event()

    async def interact(messages):
        await asyncio.sleep(0.05)
        return [{"role": "user", "content": "x"}]

    @reward
    async def one(messages):
        await asyncio.wait_for(met.wait(), 60)
        return 1.0

    @reward(weight=0)
    async def two(messages):
        met.set()
        return {"logged": 2.0}
    """

    async def script(client):
        (held,) = client.worker.held.values()
        began_s = held.used_s
        await client.say("a")
        assert held.used_s >= began_s + 0.05  # it is idle from the hook's end on
        _, error, late = await asyncio.gather(
            client.say("a"), client.say("b", "ended"), client.score("ended")
        )
        assert "still being answered" in error and "still being answered" in late
        one, two, error = await asyncio.gather(
            client.score(hooks=["one"]), client.score(hooks=["two"]), client.say("b", "ended")
        )
        assert "still being answered" in error
        assert (dict(one.scores[0].parts), dict(two.scores[0].parts)) == ({"one": 1.0}, {})
        assert dict(two.scores[0].metrics) == {"logged": 2.0}

    play(worker_of(code), script)


def test_what_fails_ends_the_session_and_says_where(worker_of, tmp_path):
    worker = worker_of()

    async def crash(client):
        error = await client.say("crash", "unknown")
        line = [*COUNTS.splitlines()].index('        raise ValueError("broken board")') + 1
        assert f"game.py:{line}: ValueError: broken board" in error
        assert "environment error" in await client.say("a", "ended")
        assert await client.cancel() == pb.ENVIRONMENT_ERROR

    async def nonsense(client):
        assert "contains a value of type set" in await client.say("nonsense", "unknown")

    play(worker, crash)
    play(worker, nonsense)
    error = asyncio.run(Client(worker).start({"refuse": True}, "unknown"))
    assert "no such level" in error
    assert (
        len(worker.held),
        worker.num_held["game"],
        worker.ended["game", pb.ENVIRONMENT_ERROR],
    ) == (0, 0, 3)

    async def slow(client):
        assert re.search(
            "longer than 0.05 s .* raise --hook_timeout_s of", await client.say("sleep", "late")
        )

    worker = worker_of(hook_timeout_s=0.05)
    play(worker, slow)
    assert worker.ended["game", pb.ENVIRONMENT_ERROR] == 1


def test_cancelling_ends_a_hook_that_runs(worker_of):
    async def script(client):
        saying = asyncio.ensure_future(client.say("sleep", "ended", number=1))
        again = asyncio.ensure_future(client.say("sleep", "ended", number=1))
        calls = client.worker.envs["game"].env.hooks["interact"].function.__globals__["calls"]
        await until(lambda: calls or saying.done())
        assert await client.cancel(pb.AGENT_ERROR) == pb.AGENT_ERROR
        assert "agent error" in await saying and "agent error" in await again
        return calls

    worker = worker_of()
    assert play(worker, script) == ["", "cancelled"]
    assert not worker.held
    assert worker.ended["game", pb.AGENT_ERROR] == 1


def test_silence_expires_a_session_but_no_hook_and_no_start(worker_of):
    async def script(client):
        sweep = asyncio.ensure_future(client.worker.sweep())
        slow = Client(client.worker)
        starting = asyncio.ensure_future(slow.start({"start_s": 1.5}, key="k"))
        kept = Client(client.worker)
        await kept.start()
        saying = asyncio.ensure_future(Client(client.worker, kept.session).say("sleep", "late"))
        await until(lambda: client.session not in client.worker.held or saying.done())
        assert "expired" in await client.say("a", "ended")
        assert kept.session in client.worker.held
        await starting
        await slow.say("a")
        gone = await client.ask(renew=pb.RenewRequest(sessions=[client.session, slow.session, "x"]))
        assert list(gone.gone) == [client.session, "x"]
        await saying
        sweep.cancel()

    worker = worker_of(idle_s=0.6, hook_timeout_s=4.0)
    play(worker, script)
    assert worker.ended["game", pb.EXPIRED] >= 1


def test_a_start_with_the_same_key_is_the_same_session(worker_of):
    async def main(worker):
        one, two, three = Client(worker), Client(worker), Client(worker)
        await asyncio.gather(
            one.start({"start_s": 0.05}, key="k"), two.start({"start_s": 0.05}, key="k")
        )
        await three.start(key="other")
        assert one.session == two.session != three.session
        assert (await two.start({"start_s": 0.05}, key="k")).session == one.session
        assert worker.num_held["game"] == 2
        assert "no room" in await Client(worker).start(code="full", key="third")
        await one.cancel()
        assert "cancelled" in await two.start(code="ended", key="k")
        assert "no such level" in await one.start({"refuse": True}, "unknown", key="failed")
        await one.start(key="failed")

    asyncio.run(main(worker_of(capacity=2)))


def test_ended_sessions_take_bounded_memory(worker_of, monkeypatch):
    monkeypatch.setattr("rl_core.environments.service.worker.KEPT_ENDED", 6)

    async def main(worker):
        clients = [Client(worker) for _ in range(10)]
        for number, client in enumerate(clients):
            await client.start(key=str(number))
            await client.cancel()
        assert "cancelled" in await clients[-1].say("a", "ended")
        await clients[0].say("a", "absent")
        assert len(worker.gone) == 6
        assert not (worker.held or worker.by_key)

    asyncio.run(main(worker_of()))


def test_several_actors_are_scored_as_in_process(worker_of):
    code = """
    from rl_core import reward
    turns = "bob -> alice"

    def interact(messages, actor):
        return {"messages": [], "reward": {"bob": 1.0, "alice": 2.0}[actor]}

    @reward(weight=0.5)
    def each(actor, completion, trajectory):
        return len(completion) + 10.0 * (trajectory.actor == actor)

    @reward
    def both(messages, completion):
        return {"total": len(messages), "last": completion == "hello"}
    """

    async def script(client):
        for actor, text in (("bob", "hi"), ("alice", "hello")):
            messages = json.dumps([{"role": "assistant", "content": text, "name": actor}])
            request = pb.InteractRequest(
                session=client.session, said=pb.Said(messages=messages, actor=actor)
            )
            reply = await client.ask(interact=request)
            assert (json.loads(reply.messages), reply.done) == ([], False)
        scores = (await client.score(actors=["bob", "alice"], actor="alice")).scores
        assert {s.actor: dict(s.parts) for s in scores} == {
            "bob": {"interact": 1.0, "each": 6.0, "total": 3.0, "last": 1.0},
            "alice": {"interact": 2.0, "each": 7.5, "total": 3.0, "last": 1.0},
        }
        assert [s.reward for s in scores] == [11.0, 13.5]

    play(worker_of(code), script, actors=["bob", "alice"])


def test_two_rewards_may_not_give_one_part(worker_of):
    code = """
    from rl_core import reward

    @reward
    def one(messages):
        return {"part": 1.0}

    @reward
    def two(messages):
        return {"part": 2.0}
    """

    async def script(client):
        assert "two hooks give the reward part 'part'" in await client.score("unknown")

    play(worker_of(code), script)


def test_tasks_travel_as_json_and_start_by_their_ids(worker_of):
    code = """
    import datetime
    import numpy as np

    def load_tasks(split):
        if split == "eval":
            return [{"prompt": "x", "picture": object()}]
        day = datetime.date(2026, 11, 22)
        return [{"prompt": f"{i}?", "n": np.int64(i), "v": np.ones(2), "day": day, "odd": "\\ud800"} for i in range(2500)]

    def reward_fn(messages, n, odd, task):
        return n + task.info["more"]
    """

    async def main(worker):
        client, rows, total = Client(worker), [], 1
        while len(rows) < total:
            reply = await client.ask(
                tasks=pb.TasksRequest(env="game", split="train", first=len(rows))
            )
            rows, total = [*rows, *map(json.loads, reply.rows)], reply.total
        assert len(rows) == 2500
        assert rows[1999] == {
            "prompt": "1999?",
            "n": 1999,
            "v": [1.0, 1.0],
            "day": "2026-11-22",
            "odd": "\ud800",
        }
        assert "row 0 of" in (
            error := await client.ask("unknown", tasks=pb.TasksRequest(env="game", split="eval"))
        )
        assert "contains a value of type object" in error
        await client.ask("wrong", tasks=pb.TasksRequest(env="game", split="secret"))
        await client.ask("absent", start=pb.StartRequest(env="game", task_id="train/2500"))

    asyncio.run(main(worker_of(code)))

    async def other(worker):  # a worker that nobody asked for tasks
        client = Client(worker)
        row, asked = '{"prompt": "7?", "n": 7, "odd": ""}', '[{"role": "user", "content": "7?"}]'
        for arguments in ({"task_id": "train/7"}, {"row": row}, {"row": row, "messages": asked}):
            reply = await client.ask(
                start=pb.StartRequest(env="game", info='{"more": 0.5}', **arguments)
            )
            assert json.loads(reply.messages) == [{"role": "user", "content": "7?"}]
            client.session = reply.session
            assert (await client.score(messages='[{"role": "assistant", "content": "7"}]')).scores[
                0
            ].reward == 7.5

    asyncio.run(other(worker_of(code)))


def test_functions_without_a_session(worker_of):
    code = """
    def turns(task, actors):
        return [actors[0]] * task.row["n"]

    def interact(messages):
        return [{"role": "user", "content": "x"}]

    def group_reward_fn(trajectories, task):
        return [t.turns[0].completion.logprobs[0] + task.row["n"] for t in trajectories]

    def advantage_fn(rewards):
        return [r - 1 for r in rewards] if len(rewards) < 3 else rewards[:1]
    """

    async def main(worker):
        client, task = Client(worker), {"id": "train/0", "row": {"n": 2}, "messages": ASK}

        async def call(hook, code="ok", **arguments):
            arguments = json.dumps(arguments)
            reply = await client.ask(
                code, call=pb.CallRequest(env="game", hook=hook, given=arguments)
            )
            return reply if code != "ok" else json.loads(reply.value)

        assert await call("turns", task=task, actors=["bob"]) == ["bob", "bob"]
        assert await call("advantage_fn", rewards=[1, 3]) == [0.0, 2.0]
        assert "it gave 1 values" in await call("advantage_fn", "unknown", rewards=[1, 3, 4])
        done = {
            "token_ids": [1],
            "logprobs": [-0.5],
            "text": "a",
            "finish_reason": "stop",
            "policy_version": 0,
        }
        turn = {"new_ids": [1], "is_fresh": True, "completion": done}
        trajectory = {"task_id": "train/0", "env": "game", "group_id": "g", "turns": [turn]}
        assert await call("group_reward_fn", trajectories=[trajectory], task=task) == [1.5]
        for bad in ([1], {}, [{"turns": 1}], [{"turns": [1]}]):
            await call("group_reward_fn", "wrong", trajectories=bad, task=task)
        await call("interact", "wrong")
        await call("advantage_fn", "wrong", rewards=5)

    asyncio.run(main(worker_of(code)))
