"""Sessions of a run that stays open, by the official clients, with written replies."""

from __future__ import annotations

import asyncio
import math
import re
import shutil
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import anthropic
import httpx
import openai
import pytest
from test_endpoint import CHAT, HI, until

from rl_core.config import AgentsConfig, OnlineConfig, parse_config
from rl_core.data.tasks.online import SessionSource
from rl_core.engines.scripted import ScriptedActor
from rl_core.environments.agents.endpoint import MAX_READING
from rl_core.environments.agents.online import OnlineServer
from rl_core.environments.agents.rollout import unscored_module
from rl_core.environments.agents.session_files import session_files, summaries
from rl_core.environments.agents.session_scores import Scorer
from rl_core.environments.agents.sessions import Sessions
from rl_core.environments.env_file import load_env
from rl_core.run.online import judge_of
from rl_core.run.running_baseline import RunningBaseline
from rl_core.sampling.actor import EpisodeActors
from rl_core.sampling.engine import EngineDied
from rl_core.types import SamplingParams, Trajectory

ADMIN = "sk-admin-of-these-tests"


class Client:
    """A program with the key of its session."""

    def __init__(self, url: str, http: httpx.AsyncClient, key: str):
        self.url, self.http, self.key = url, http, key

    async def post(self, path: str, body=None, key: str | None = None, **headers) -> httpx.Response:
        headers |= {"Authorization": f"Bearer {self.key if key is None else key}"}
        return await self.http.post(self.url + path, json=body or {}, headers=headers)

    async def start(self, **body) -> Client:
        begun = await self.post("/rl/start_session", {"task_id": "t"} | body, ADMIN)
        assert begun.status_code == 200, begun.text
        return Client(self.url, self.http, begun.json()["api_key"])

    async def say(self, *messages, **headers) -> dict:
        """The reply to a conversation, of the user and the assistant in turns."""
        roles = ("user", "assistant")
        body = [{"role": roles[n % 2], "content": text} for n, text in enumerate(messages)]
        asked = {"model": "any", "messages": body}
        answer = await self.post("/v1/chat/completions", asked, **headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def rate(self, reward, **more) -> None:
        rated = await self.post("/rl/set_reward", {"reward": reward, **more})
        assert rated.status_code == 200, rated.text

    async def end(self, **body) -> None:
        assert (await self.post("/rl/end_session", body)).status_code == 200


@asynccontextmanager
async def opened(folder, *replies, env=None, judge="", step=0, context=1 << 20, **flags):
    """(a client without a session, the sessions) of a run whose earlier sessions are restored.
    `env`: text of an environment's file; `judge`: reply of the actor judge."""
    module, path = unscored_module(), "--online"
    if env:
        module, path = None, str(folder / "env.py")
        (folder / "env.py").write_text(env)
    loaded = load_env(path, module=module)
    replies = replies or ["one", "two", "three"]
    actor = ScriptedActor(name="policy", chat=CHAT, replies=replies, max_context_tokens=context)
    cast = {"policy": actor}
    if judge:
        cast["judge"] = ScriptedActor(name="judge", chat=CHAT, replies=[judge], is_trainable=False)

    def make_players(number):
        return EpisodeActors(cast, SamplingParams(max_tokens=200), number, f"online/{number}")

    sessions = Sessions(
        rollouts=folder / "rollouts",
        config=OnlineConfig(**flags),
        make_players=make_players,
        scorer=Scorer(env=loaded, judge=judge_of("judge") if judge else None),
    )
    server = OnlineServer(AgentsConfig(), 0, sessions, ADMIN)
    await sessions.restore(server, step)
    await server.start()
    try:
        async with httpx.AsyncClient(timeout=60) as http:
            yield Client(server.address, http, ""), sessions
    finally:
        await server.close()


async def rated(sessions, number: int = 1):
    """The trajectories of sessions once this number is rated."""
    await until(lambda: len(sessions.rated) == number)
    return [t for session in sessions.rated for t in session.trajectories]


async def refused_start(client, sessions, **body):
    return await client.post("/rl/start_session", {"task_id": "t"} | body, ADMIN)


async def bound_to_the_admin(client, sessions):
    return await refused_start(client, sessions, api_key=ADMIN)


async def short_key(client, sessions):
    return await refused_start(client, sessions, api_key="guessable")


async def task_that_is_no_text(client, sessions):
    return await refused_start(client, sessions, task_id=["t"])


async def misspells_the_task(client, sessions):
    return await client.post("/rl/start_session", {"task": "t"}, ADMIN)


async def misspells_the_reward(client, sessions):
    return await rates_with(client, sessions, rewards=1)


async def misspells_the_info(client, sessions):
    return await (await client.start()).post("/rl/end_session", {"inf": 1})


async def full(client, sessions):
    for _ in range(3):
        await client.start()
    return await refused_start(client, sessions)


async def guessed(client, sessions):
    await client.start()
    return await client.post("/rl/set_reward", {"reward": 1}, "sk-sess-guessed-0000")


async def starts_a_session(client, sessions):
    mine = await client.start()
    return await mine.post("/rl/start_session", {"task_id": "t"})


async def admin_asks(client, sessions):
    return await client.post("/v1/chat/completions", {"model": "m", "messages": HI}, ADMIN)


async def rates_nothing(client, sessions):
    return await (await client.start()).post("/rl/set_reward", {"reward": 1})


async def rates_with(client, sessions, **body):
    mine = await client.start()
    await mine.say("hi")
    return await mine.post("/rl/set_reward", body)


async def rates_by_text(client, sessions):
    return await rates_with(client, sessions, reward="good")


async def rates_in_words_that_nothing_scores(client, sessions):
    return await rates_with(client, sessions, text="too long")


async def rates_by_many_parts(client, sessions):
    return await rates_with(client, sessions, reward={f"part {n}": 1 for n in range(1000)})


async def rates_what_is_not_there(client, sessions):
    return await rates_with(client, sessions, reward=1, interaction_id="chatcmpl-1")


async def rates_anothers(client, sessions):
    other = await (await client.start()).say("hi")
    return await rates_with(client, sessions, reward=1, interaction_id=other["id"])


async def asks_after_the_end(client, sessions):
    mine = await client.start()
    await mine.say("hi")
    await mine.end()
    return await mine.post("/v1/chat/completions", {"model": "m", "messages": HI})


async def asks_after_the_end_while_a_step_learns(client, sessions):
    mine = await client.start()
    await mine.say("hi")
    await mine.end()
    sessions.gate.clear()
    return await mine.post("/v1/chat/completions", {"model": "m", "messages": HI})


async def rates_too_late(client, sessions):
    mine = await client.start()
    await mine.say("hi")
    await mine.end()
    await until(lambda: sessions.live[0].is_scored)
    sessions.live[0].ended_s -= 100
    sessions.tick()
    return await mine.post("/rl/set_reward", {"reward": 1})


async def rates_what_is_over(client, sessions):
    mine = await client.start()
    await mine.say("hi")
    await mine.rate(1)
    await mine.end()
    await rated(sessions)
    sessions.take(sessions.rated[0], 1)
    return await mine.post("/rl/set_reward", {"reward": 1})


async def rates_slowly_while_a_step_takes_it(client, sessions):
    mine = await client.start()
    await mine.say("hi")
    await mine.rate(0)
    await mine.end()
    await rated(sessions)
    session = sessions.live[0]
    for _ in range(MAX_READING - 1):
        await session.reading.acquire()

    async def body():
        yield b'{"reward"'
        await until(session.reading.locked)  # The server has begun to read the body.
        sessions.take(session, 1)
        sessions.delete_until(1)
        yield b": 1}"

    headers = {"Authorization": f"Bearer {mine.key}"}
    answer = await client.http.post(f"{mine.url}/rl/set_reward", content=body(), headers=headers)
    [[attempt]] = session.trees["policy"].attempts.values()
    session.note_sent(attempt)  # As at the end of a slow stream.
    return answer


async def asks_when_the_session_ends(client, sessions):
    """The session ends between the sampling of a reply and its sending, also in a stream."""
    answers = []
    for number, stream in enumerate((True, False)):
        mine = await client.start()
        await mine.say("hi")
        session = sessions.live[number]
        engine = session.players["policy"].engine

        async def generate(*args, of=session, generate=engine.generate, **more):
            attempts = [each for [each] in of.trees["policy"].attempts.values()]
            attempts[-1].nodes.add_done_callback(lambda _: of.end())
            return await generate(*args, **more)

        engine.generate = generate
        messages = [{"role": "user", "content": "hello"}]
        asked = {"model": "m", "messages": messages, "stream": stream}
        answers.append(await mine.post("/v1/chat/completions", asked))
    assert answers[0].text.startswith("event: error") and "is over" in answers[0].text
    return answers[1]


async def asks_while_a_step_learns(client, sessions):
    mine = await client.start()
    sessions.gate.clear()
    return await mine.post("/v1/chat/completions", {"model": "m", "messages": HI})


async def asks_while_the_run_ends(client, sessions):
    mine = await client.start()
    sessions.is_closing = True
    return await mine.post("/v1/chat/completions", {"model": "m", "messages": HI})


REFUSALS = {
    guessed: 401,
    starts_a_session: 401,
    admin_asks: 401,
    bound_to_the_admin: 409,
    short_key: 400,
    task_that_is_no_text: 400,
    misspells_the_task: 400,
    misspells_the_reward: 400,
    misspells_the_info: 400,
    full: 429,
    rates_nothing: 400,
    rates_by_text: 400,
    rates_by_many_parts: 400,
    rates_in_words_that_nothing_scores: 400,
    rates_what_is_not_there: 404,
    rates_anothers: 404,
    asks_after_the_end: 410,
    asks_after_the_end_while_a_step_learns: 410,
    rates_too_late: 410,
    rates_what_is_over: 410,
    rates_slowly_while_a_step_takes_it: 410,
    asks_when_the_session_ends: 410,
    asks_while_a_step_learns: 429,
    asks_while_the_run_ends: 503,
}


@pytest.mark.parametrize("case", REFUSALS)
async def test_each_route_refuses_what_it_must(case, tmp_path):
    async with opened(tmp_path, max_sessions=3, wait_s=0, reward_s=60) as (client, sessions):
        answer = await case(client, sessions)
        assert answer.status_code == REFUSALS[case], answer.text
        message = answer.json()["error"]["message"]
        assert ("did you mean" if "misspells" in case.__name__ else " ") in message
        assert ("retry-after" in answer.headers) == (answer.status_code in (429, 503))
    async with opened(tmp_path) as (client, sessions):  # The files can be read.
        assert len(sessions.live) <= len(summaries(tmp_path / "rollouts"))


async def test_eight_clients_of_both_kinds_are_trained_on_the_tokens_they_read(tmp_path):
    async with opened(tmp_path, "one", "two") as (client, sessions):

        async def by_openai(number):
            mine = await client.start(task_id=f"task-{number}")
            async with openai.AsyncOpenAI(base_url=f"{mine.url}/v1", api_key=mine.key) as program:
                first = await program.chat.completions.create(model="any", messages=HI)
                echo = {"role": "assistant", "content": first.choices[0].message.content}
                await program.chat.completions.create(model="any", messages=[*HI, echo, *HI])
                assert [model.id async for model in program.models.list()] == ["policy"]
            await mine.rate(number)
            await mine.end()

        async def by_anthropic(number):
            mine = await client.start(task_id=f"task-{number}")
            async with anthropic.AsyncAnthropic(base_url=mine.url, api_key=mine.key) as program:
                async with program.messages.stream(
                    model="any", max_tokens=99, messages=HI
                ) as stream:
                    text = "".join([text async for text in stream.text_stream])
                messages = [*HI, {"role": "assistant", "content": text}, *HI]
                await program.messages.create(model="any", max_tokens=99, messages=messages)
            await mine.rate(number)
            await mine.end()

        await asyncio.gather(*map(by_openai, range(4)), *map(by_anthropic, range(4, 8)))
        scored = await rated(sessions, 8)
        assert sorted((t.task_id, t.reward) for t in scored) == [(f"task-{n}", n) for n in range(8)]
        for t in scored:
            assert [turn.completion.text for turn in t.turns] == ["one", "two"]


# Name -> (a client's calls, the rewards of branches with those of their turns).
async def rates_the_last(mine):
    await mine.say("a")
    await mine.say("a", "one", "b")
    await mine.rate(2.0)


async def rates_each_turn(mine):
    await mine.say("a")
    await mine.rate(-1.0)
    await mine.say("a", "one", "b")
    await mine.rate({"good": 2.0, "short": 0.5})


async def rates_two_turns_by_one_name(mine):
    await mine.say("a")
    await mine.rate(1.0)
    await mine.say("a", "one", "b")
    await mine.rate(2.0)


async def rates_the_session_of_two_branches(mine):
    await mine.say("a")
    await mine.say("b")
    await mine.rate(1.0)


async def rates_one_branch_by_its_id(mine):
    first = await mine.say("a")
    await mine.say("b")
    await mine.rate(1.0, interaction_id=first["id"])


async def rates_again(mine):
    await mine.say("a")
    await mine.rate(0.0)
    await mine.rate(3.0)


REWARDS = {
    rates_the_last: [(2.0, [0.0, 2.0])],
    rates_each_turn: [(1.5, [-1.0, 2.5])],
    rates_two_turns_by_one_name: [(3.0, [1.0, 2.0])],
    rates_the_session_of_two_branches: [(1.0, []), (1.0, [1.0])],
    rates_one_branch_by_its_id: [(1.0, [1.0])],
    rates_again: [(3.0, [3.0])],
}


@pytest.mark.parametrize("case", REWARDS)
async def test_a_reward_is_that_of_its_reply_or_of_the_session(case, tmp_path):
    async with opened(tmp_path) as (client, sessions):
        mine = await client.start()
        await case(mine)
        await mine.end()
        scored = await rated(sessions)
        assert [(t.reward, t.turn_rewards) for t in scored] == REWARDS[case]


ENV = """
def reward_fn(completion, info):
    return {"length": len(completion) / 10, "known": None if info is None else float(info["good"])}
"""
FEEDBACK = """
def feedback_fn(text, messages):
    assert messages[-1]["content"] == "one"
    return {"thanks": 0.75, "well": None}.get(text)
"""
# Name -> (environment, judge's reply, text, info, reward parts or None: the session is not rated).
SCORES = {
    "a hook alone": (ENV, "", None, {"good": True}, {"length": 0.3, "known": 1.0}),
    "a hook without info": (ENV, "", None, None, {"length": 0.3}),
    "a hook and text": (ENV + FEEDBACK, "", "thanks", None, {"length": 0.3, "feedback": 0.75}),
    "a hook and text without a number": (ENV + FEEDBACK, "", "well", None, {"length": 0.3}),
    "text with a number": (FEEDBACK, "", "thanks", None, {"feedback": 0.75}),
    "text without a number": (FEEDBACK, "", "well", None, None),
    "text and a judge": (FEEDBACK, "so [[10]]", "well", None, {"feedback": 1.0}),
    "a judge alone": (None, "so [[1]]", "bad", None, {"feedback": 0.0}),
    "a judge who does not": (None, "hm", "bad", None, None),
    "a hook that fails": (ENV, "", None, {}, None),
    "nobody": (None, "", "", None, None),
}


@pytest.mark.parametrize("name", SCORES)
async def test_hooks_and_judges_score_what_clients_say(name, tmp_path):
    env, judge, text, info, parts = SCORES[name]
    async with opened(tmp_path, "one", env=env, judge=judge) as (client, sessions):
        mine = await client.start()
        reply = await mine.say("a")
        if text:
            body = {"text": text, "interaction_id": reply["id"]}
            assert (await mine.post("/rl/set_reward", body)).status_code == 200
        await mine.end(info=info)
        session = next(iter(sessions.live.values()), None)
        await until(lambda: session is None or session.is_scored)
        scored = [t.reward_parts for each in sessions.rated for t in each.trajectories]
        assert scored == ([parts] if parts else [])
        if parts:
            assert sessions.rated[0].trajectories[0].reward == math.fsum(parts.values())


DAMAGED = {"its file is damaged": 1}
# Last lines of a file of a session -> counts of a run that resumes.
LAST_LINES = {
    '{"event": "rebound"}\n{"event": "rebound"}': {},
    '{"event": ': DAMAGED,
    "[]": DAMAGED,
    '{"event": "end"}': DAMAGED,
    '{"event": "truncated", "actor": "another"}': DAMAGED,
    '{"event": "sent", "reply": "another", "num": null}': DAMAGED,
    '{"event": "reward", "reply": "another", "parts": {}, "named": true}': DAMAGED,
    '{"event": "reply", "dialect": "", "request": {}, "completions": []}': DAMAGED,
}


async def test_what_is_not_rated_or_read_is_left_out_and_counted(tmp_path):
    async with opened(tmp_path, reward_s=50, session_s=50) as (client, sessions):
        waiting, unread, forgotten = [await client.start() for _ in range(3)]
        await waiting.say("a")
        await waiting.end()
        await unread.end()
        await forgotten.say("a")
        await forgotten.rate(1)
        await until(lambda: sessions.live[0].is_scored and 1 not in sessions.live)
        sessions.tick()
        assert set(sessions.live) == {0, 2} and not sessions.rated
        sessions.live[0].ended_s -= 60
        sessions.live[2].used_s -= 60
        sessions.tick()
        assert (await rated(sessions))[0].reward == 1
        assert sessions.counts == {"started": 3, "no reward came": 1, "no reply was read": 1}
    async with opened(tmp_path) as (client, sessions):
        assert set(sessions.live) == {2}
    for number, line in enumerate(LAST_LINES):
        folder = tmp_path / f"resumed_{number}"
        shutil.copytree(tmp_path / "rollouts", folder / "rollouts")
        (folder / "rollouts/sessions/notes.jsonl").write_text("{}\n")
        file = folder / "rollouts/sessions/000002.jsonl"
        file.write_text(f"{file.read_text()}{line}\n")
        for counts in (LAST_LINES[line], {}):
            async with opened(folder) as (client, sessions):
                assert sessions.counts == counts, line
                assert set(sessions.live) == (set() if LAST_LINES[line] else {2})
                assert summaries(folder / "rollouts")
    for counts in ({"cannot be restored": 1}, {}):  # Its request is too long for the context.
        async with opened(tmp_path, context=9) as (client, sessions):
            assert not sessions.live and sessions.counts == counts
            again = await client.post("/rl/set_reward", {"reward": 1}, forgotten.key)
            assert again.status_code == 410


async def test_a_session_with_the_key_of_an_old_one_ends_it(tmp_path):
    async with opened(tmp_path, max_sessions=1) as (client, sessions):
        first = await client.start(task_id="old")
        await first.say("a")
        await first.rate(1)
        again = await client.start(task_id="new", api_key=first.key)
        assert again.key == first.key
        assert [t.task_id for t in await rated(sessions)] == ["old"]
        await again.say("b")
        await again.rate(2)
        await again.end()
        assert [t.reward for t in await rated(sessions, 2)] == [1, 2]
        sessions.take(sessions.live[1], 1)
        sessions.delete_until(1)
    async with opened(tmp_path, step=1) as (client, sessions):
        assert [t.task_id for t in await rated(sessions)] == ["old"]
        late = await client.post("/rl/set_reward", {"reward": 3}, again.key)
        assert late.status_code == 410 and sessions.live[0].rewards


async def test_a_reward_may_come_after_the_end_and_after_an_outage(tmp_path):
    async with opened(tmp_path) as (client, sessions):
        mine, _ = await client.start(), await client.start()
        await mine.say("a")
        await mine.end()
        await until(lambda: sessions.live[0].is_scored)
    for _, file in session_files(tmp_path / "rollouts"):
        lines = re.sub(r'"time": \d+', '"time": 0', file.read_text()).splitlines(keepends=True)
        lines.sort(key=lambda line: '"reply"' in line)  # The reply follows the end.
        file.write_text("".join(lines))
    async with opened(tmp_path) as (client, sessions):
        await until(lambda: sessions.live[0].is_scored)
        sessions.tick()
        assert sessions.live[1].is_open and not sessions.rated
        await Client(client.url, client.http, mine.key).rate(1)
        assert [t.reward for t in await rated(sessions)] == [1]


async def test_hostile_clients_neither_hinder_nor_rate_others(tmp_path):
    async with opened(tmp_path) as (client, sessions):
        mine, hostile = await client.start(task_id="mine"), await client.start(task_id="hostile")
        first = await mine.say("a")

        async def status(path, body, key):
            try:
                return (await client.post(path, body, key)).status_code
            except httpx.TransportError:  # Strangers are turned away.
                return 401

        reward = {"reward": -1, "interaction_id": first["id"]}
        guesses = [f"sk-sess-{number:032d}" for number in range(50)]
        asked = [status("/rl/set_reward", reward, key) for key in guesses]
        asked += [status("/rl/end_session", {}, key) for key in guesses]
        assert {*await asyncio.gather(*asked)} == {401}
        flood = [status("/rl/set_reward", reward, hostile.key) for _ in range(50)]
        flood += [status("/rl/start_session", {}, hostile.key) for _ in range(50)]
        huge = "a" * 40_000_000
        flood += [status("/rl/set_reward", {"reward": 1, "text": huge}, hostile.key)]
        flood += [status("/rl/end_session", {"info": huge}, hostile.key)]
        messages = [{"role": "user", "content": huge}]
        flood += [status("/v1/chat/completions", {"messages": messages}, hostile.key)]
        *of_flood, rated_status, ended_status, asked_status = await asyncio.gather(*flood)
        assert {*of_flood} <= {401, 404, 429}
        assert (rated_status, ended_status, asked_status) == (413, 413, 400)
        await mine.say("a", "one", "b")
        await mine.rate(1)
        await mine.end()
        [trajectory] = await rated(sessions)
        assert (trajectory.task_id, trajectory.reward, len(trajectory.turns)) == ("mine", 1, 2)
        assert sessions.live[1].is_open


@pytest.mark.parametrize("starts_again", [True, False])
async def test_an_engine_that_dies_is_started_again_in_the_middle(starts_again, tmp_path):
    async with opened(tmp_path) as (client, sessions):
        mine = await client.start()
        await mine.say("a")
        engine = sessions.live[0].players["policy"].engine
        generate = engine.generate

        async def die(*args, **kwargs):
            raise EngineDied("gone")

        async def wake(*args):
            engine.generate = generate if starts_again else die
            if not starts_again:
                raise EngineDied("its port is taken")

        engine.generate, engine.wake = die, wake
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "one"}, *HI]
        asked = {"model": "m", "messages": messages}
        failed = await mine.post("/v1/chat/completions", asked)
        assert failed.status_code == 502 and "send the request again" in failed.text
        assert (sessions.fatal is None) == starts_again
        if starts_again:
            engine.version = 3
            again = await mine.post("/v1/chat/completions", asked)
            assert again.json()["choices"][0]["message"]["content"] == "two"
            await mine.rate(1)
            await mine.end()
            [trajectory] = await rated(sessions)
            assert [turn.completion.text for turn in trajectory.turns] == ["one", "two"]
            assert sessions.rated[0].oldest_version == 0


async def has_branches_a_retry_and_a_stream(mine, sessions):
    first = await mine.say("a")
    await mine.say("a", "one", "b")
    retried = await mine.say("a", **{"x-stainless-retry-count": "1"})
    assert retried["id"] == first["id"]
    too_long = [{"role": "user", "content": "a" * (1 << 21)}]
    refused = await mine.post("/v1/chat/completions", {"messages": too_long})
    assert refused.status_code == 400
    async with (
        anthropic.AsyncAnthropic(base_url=mine.url, api_key=mine.key) as program,
        program.messages.stream(
            model="any", max_tokens=99, messages=HI, extra_body={"temperature": 0.5}
        ) as stream,
    ):
        await stream.until_done()
    await mine.rate(0.5)
    await mine.rate(1.0, interaction_id=first["id"])


async def leaves_while_a_turn_is_sampled_and_guesses_its_text(mine, sessions):
    tree, engine = sessions.live[0].trees["policy"], sessions.live[0].players["policy"].engine
    generate, has_left = engine.generate, asyncio.Event()

    async def wait(*args, **more):
        await has_left.wait()
        return await generate(*args, **more)

    engine.generate = wait
    asking = asyncio.ensure_future(mine.say("a"))
    await until(lambda: tree.is_asked)
    asking.cancel()
    [[attempt]] = tree.attempts.values()
    await until(lambda: not attempt.num_waiting)
    has_left.set()
    await until(lambda: tree.nodes)
    engine.generate = generate
    await mine.say("a", "one", "b")
    await mine.say("a")
    await mine.rate(1.0)


async def asks_twice_at_once(mine, sessions):
    await asyncio.gather(mine.say("a"), mine.say("a"))
    await mine.rate(1.0)


async def offers_tools(mine, sessions):
    tools = [{"type": "function", "function": {"name": "look"}}]
    for messages in (A, [*A, {"role": "assistant", "content": "one"}, *A]):
        body = {"messages": messages, "tools": tools}
        assert (await mine.post("/v1/chat/completions", body)).status_code == 200
    await mine.rate(1.0)


async def asks_an_engine_that_died(mine, sessions):
    engine = sessions.live[0].players["policy"].engine
    generate = engine.generate

    async def die(*args, **more):
        engine.generate = generate
        raise EngineDied("gone")

    engine.generate = die
    failed = await mine.post("/v1/chat/completions", {"messages": A})
    assert failed.status_code == 502
    await mine.say("a")
    await mine.rate(1.0)


A = [{"role": "user", "content": "a"}]
# Texts of a retry of the first request, by the number of replies in the file.
PLAYS = {
    has_branches_a_retry_and_a_stream: ["another", "one", "one", "one"],
    leaves_while_a_turn_is_sampled_and_guesses_its_text: ["another", "another", "one"],
    asks_twice_at_once: ["another", "one", "one two"],
    offers_tools: ["another"] * 3,
    asks_an_engine_that_died: ["another", "one"],
}


def learned(trajectories):
    """The trained facts, sorted. Names of turns number the conversations of one process."""
    facts = []
    for t in trajectories:
        turns = [replace(turn, name="") for turn in t.turns]
        facts.append((t.messages, turns, t.reward_parts, t.turn_rewards, t.status))
        facts[-1] += (t.metrics["agent_overridden"],)
    return sorted(facts, key=str)


@pytest.mark.parametrize("play", PLAYS)
async def test_a_run_that_was_killed_at_any_event_goes_on_with_its_sessions(play, tmp_path):
    complete = tmp_path / "complete"
    complete.mkdir()
    async with opened(complete) as (client, sessions):
        mine = await client.start(task_id="restored", api_key="sk-chosen-by-its-client")
        await play(mine, sessions)
        await mine.end(info={"good": 1})
        known = await rated(sessions)
    [(_, file)] = session_files(complete / "rollouts")
    lines = file.read_text().splitlines(keepends=True)
    if play is asks_twice_at_once:  # The first client is slow.
        lines[1:5] = sorted(lines[1:5], key=lambda line: '"sent"' in line)
    for number in range(1, len(lines) + 1):
        cut = tmp_path / f"cut_{number}"
        shutil.copytree(complete, cut)
        [(_, copy)] = session_files(cut / "rollouts")
        following = lines[number] if number < len(lines) else ""
        copy.write_text("".join(lines[:number]) + following[: len(following) // 2])
        async with opened(cut, "another") as (client, sessions):
            mine = Client(client.url, client.http, "sk-chosen-by-its-client")
            session = sessions.live[0]
            kept = [line for line in lines[:number] if '"event": "reply"' in line]
            assert len(session.nodes) == len(kept)
            # The request before the third reply was too long.
            assert session.is_truncated or len(kept) < 3
            if session.is_open:
                again = await mine.say("a", **{"x-stainless-retry-count": "1"})
                text = again["choices"][0]["message"]["content"]
                assert text in PLAYS[play][len(kept)].split()
                num_nodes = len(session.nodes)
                answer = await mine.post("/v1/chat/completions", {"messages": A, "max_tokens": 9})
                assert answer.status_code == 200 and len(session.nodes) == num_nodes + 1
                await mine.rate(0.5)
                await mine.end()
            scored = await rated(sessions)
            if number == len(lines):
                assert learned(scored) == learned(known) and session.info == {"good": 1}
            assert (await client.start()).key and len(sessions.live) == 2
        async with opened(cut, "another") as (client, sessions):  # The events since then too.
            assert learned(await rated(sessions)) == learned(scored) and len(sessions.live) == 2


async def test_steps_that_were_lost_are_trained_again_and_others_are_not(tmp_path):
    async with opened(tmp_path) as (client, sessions):
        for number in range(3):
            mine = await client.start()
            await mine.say("a")
            await mine.rate(number)
            await mine.end()
        await rated(sessions, 3)
        for number in (0, 1):
            sessions.take(sessions.live[number], number + 1)
    async with opened(tmp_path, step=1) as (client, sessions):
        assert sorted(t.reward for t in await rated(sessions, 2)) == [1, 2]
        sessions.delete_until(1)
        assert [number for number, _ in session_files(tmp_path / "rollouts")] == [1, 2]
        assert [each["state"] for each in summaries(tmp_path / "rollouts")] == [
            "rated",
            "rated",
        ]
        assert (await client.start()).key and sessions.next_number == 4
        sessions.take(sessions.live[2], 2)  # The step comes again without session 1.
    async with opened(tmp_path, step=2) as (client, sessions):
        assert [t.reward for t in await rated(sessions)] == [1]
    for _, file in session_files(tmp_path / "rollouts"):
        assert "sk-" not in file.read_text()


def waiting(number, task="t", version=0):
    """A rated session, as the source sees it."""
    return SimpleNamespace(number=number, task_id=task, oldest_version=version)


# Name -> (flags, tasks of rated sessions, minutes since the step before, numbers that a step takes).
STEPS = {
    "enough": ("--tasks_per_step 2", "abc", 0, [[0], [1]]),
    "too few": ("--tasks_per_step 4", "abc", 0, None),
    "too few for long": ("--tasks_per_step 4 --online.step_minutes 5", "abc", 6, [[0], [1], [2]]),
    "too few for a while": ("--tasks_per_step 4 --online.step_minutes 5", "abc", 4, None),
    "fewer than the least": (
        "--tasks_per_step 4 --online.step_minutes 5 --online.min_sessions 4",
        "abc",
        6,
        None,
    ),
    "groups": ("--tasks_per_step 1 --group_size 2", "abca", 0, [[0, 3]]),
    "no group": ("--tasks_per_step 1 --group_size 2", "abc", 0, None),
    "a group in part": (
        "--tasks_per_step 2 --group_size 3 --online.step_minutes 5",
        "abca",
        6,
        [[0, 3]],
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_begins_with_enough_rated_sessions_or_by_the_clock(name):
    flags, tasks, minutes, numbers = STEPS[name]
    config = parse_config(f"--online --model m --out o {flags}".split())
    sessions = SimpleNamespace(taken_by_step=[], left_out=[])
    sessions.rated = [waiting(number, task) for number, task in enumerate(tasks)]
    sessions.take = lambda session, step: sessions.taken_by_step.append(session)
    source = SessionSource(config, sessions)
    source.began_s -= 60 * minutes
    chosen = source.take(3, is_last=False)
    assert (chosen and [[each.number for each in group] for group in chosen]) == numbers
    assert sorted(each.number for each in sessions.taken_by_step) == sorted(
        number for group in numbers or () for number in group
    )


def test_sessions_with_tokens_older_than_the_staleness_are_left_out():
    config = parse_config(words := "--online --model m --out o --max_staleness 2".split())
    assert config.max_staleness == 2, words
    left = []
    rated = [waiting(number, version=version) for number, version in enumerate((2, 3, 5))]
    sessions = SimpleNamespace(rated=rated, leave_out=lambda session, why: left.append(session))
    SessionSource(config, sessions).take(5, is_last=False)
    assert [session.number for session in left] == [0]


async def test_the_running_baseline_is_the_weighted_mean_of_other_episodes():
    trainer = SimpleNamespace(ranks=SimpleNamespace(size=1))
    baseline = RunningBaseline(trainer)

    def episodes(*facts):
        return [
            Trajectory(task_id=task, group_id=f"{number}", reward=reward)
            for number, (task, reward) in enumerate(facts)
        ]

    first = episodes(("a", 1.0), ("a", 3.0), ("b", 5.0))
    await baseline.on_episodes(1, "step 1", first)
    # The task has one other episode; the mean of all others counts as 4 episodes.
    assert first[0].baseline == pytest.approx((3 + 4 * (3 + 5) / 2) / 5)
    assert first[2].baseline == pytest.approx((1 + 3) / 2)
    resumed = RunningBaseline(trainer)
    resumed.load(baseline.state())
    second = episodes(("a", 2.0), ("c", 0.0))
    await resumed.on_episodes(2, "step 2", second)
    overall = (0.9 * 9 + 0) / (0.9 * 3 + 1)  # Without the episode itself.
    assert second[0].baseline == pytest.approx((0.9 * 4 + 4 * overall) / (0.9 * 2 + 4))
