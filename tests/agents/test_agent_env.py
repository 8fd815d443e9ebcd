"""Environments with an `agent`: a function or a command that plays at an endpoint."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from kit import run as train
from kit import steps
from stage import cast, run

from rl_core.environments.env_file import load_env
from rl_core.environments.row_columns import check_columns
from rl_core.sampling.engine import EngineDied

# A client of the standard library, for commands: openai's takes a second to import.
ASK = """
import json, os, sys, urllib.request

def ask(*messages, **more):
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    body = {"model": "m", "messages": [{"role": "user", "content": m} for m in messages]} | more
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""
FUNCTION = """
import openai

async def agent(task, llm):
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        said = []
        for model in MODELS:
            reply = await client.chat.completions.create(model=model, messages=task.messages)
            said.append(reply.choices[0].message.content)
        return said
"""
IN_A_THREAD = """
import openai

def agent(task, llm):
    with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        reply = client.chat.completions.create(model="m", messages=task.messages)
    return reply.choices[0].message.content
"""
REWARD = "\ndef reward_fn(result, answer): return float(result == answer)\n"


def write(folder: Path, text: str) -> str:
    file = folder / "env.py"
    file.write_text(text)
    return str(file)


def command_env(folder: Path, program: str, reward: str) -> str:
    (folder / "program.py").write_text(ASK + program)
    command = [sys.executable, str(folder / "program.py"), "{answer}"]
    return write(folder, f"agent = {command!r}\n{reward}")


def test_a_function_plays_and_is_scored_by_its_result(tmp_path):
    env = load_env(
        write(
            tmp_path,
            "MODELS = ['m']\n"
            + FUNCTION
            + """
def reward_fn(result, completion, messages, answer):
    assert messages[-1] == {"role": "assistant", "content": completion}
    return {"right": result == [answer], "said": 0.5}
""",
        )
    )
    (trajectory,) = run(env, cast(policy="4"))
    assert trajectory.error == ""
    assert (trajectory.reward, trajectory.reward_parts) == (1.5, {"right": 1.0, "said": 0.5})
    assert trajectory.messages[-1]["content"] == "4"
    assert [turn.completion.text for turn in trajectory.turns] == ["4"]
    assert trajectory.metrics["agent_requests"] == 1


def test_a_function_without_async_plays_in_a_thread(tmp_path):
    env = load_env(write(tmp_path, IN_A_THREAD + REWARD))
    assert [t.reward for t in run(env, cast(policy="4"), group_size=6)] == [1.0] * 6


def test_several_actors_are_asked_by_name_and_each_is_scored(tmp_path):
    env = load_env(
        write(
            tmp_path,
            "MODELS = ['alice', 'bob', 'judge', 'nobody']\n"
            + FUNCTION
            + """
def reward_fn(result, actor):
    assert result == ["A", "B", "J", "B"]
    return float(actor == "bob")
""",
        )
    )
    trajectories = run(env, cast(bob="B", alice="A", judge=("J", False)))
    # The second request of bob is the same as the first, after its reply: another turn.
    assert sorted((t.actor, t.reward, len(t.turns), t.error) for t in trajectories) == [
        ("alice", 0.0, 1, ""),
        ("bob", 1.0, 1, ""),
        ("bob", 1.0, 1, ""),
    ]


GIVES_UP = """
import openai

async def agent(task, llm):
    asked, said = list(task.messages), []
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        client = client.with_options(timeout=3, max_retries=0)
        for model in task.row["models"]:
            try:
                reply = await client.chat.completions.create(model=model, messages=asked)
                said.append(reply.choices[0].message.content)
            except openai.APITimeoutError:
                said.append("gave up")
            asked += [{"role": "assistant", "content": said[-1]}]
            asked += [{"role": "user", "content": "wait"}]
    return said

def reward_fn(result): return float(result[-1] == "gave up")
"""
GIVEN_UP = {
    "the last": (["bob", "bob"], [("bob", 1.0, 1)]),
    "another actor's": (["bob", "alice"], [("bob", 1.0, 1)]),
    "each": (["alice"], "closed each connection before the reply came; raise its client's timeout"),
}


@pytest.mark.parametrize("name", GIVEN_UP)
def test_an_episode_ends_with_the_last_reply_that_its_agent_waited_for(tmp_path, name):
    """Bob replies at once, but never to "wait"; alice never replies."""
    models, expected = GIVEN_UP[name]
    actors = cast(bob="4", alice="5")
    for actor in actors.values():

        async def answer(ids, *args, actor=actor, generate=actor.engine.generate, **more):
            if "wait" in actor.chat.decode(ids) or actor.name == "alice":
                await asyncio.sleep(1000)
            return await generate(ids, *args, **more)

        actor.engine.generate = answer
    env = load_env(write(tmp_path, GIVES_UP))
    trajectories = run(env, actors, rows=[{"prompt": "hi", "models": models}])
    if isinstance(expected, str):
        assert expected in trajectories[0].error
    else:
        assert [(t.actor, t.reward, len(t.turns)) for t in trajectories] == expected


def test_a_command_plays_and_is_scored_by_how_it_ended(tmp_path):
    program = "print(ask('2+2'), sys.argv[1]); sys.exit(3)"
    reward = """
def reward_fn(result):
    assert (result.text, result.exit_code) == ("four 4", 3), result
    assert open(result.workspace + "/task.json").read().startswith("{")
    return 1.0
"""
    env = load_env(command_env(tmp_path, program, reward))
    before = set(os.listdir("/tmp"))
    trajectories = run(env, cast(policy="four"), group_size=3)
    assert [(t.reward, t.error) for t in trajectories] == [(1.0, "")] * 3
    left = [name for name in set(os.listdir("/tmp")) - before if name.startswith("rl_core_agent")]
    assert left == []


def test_a_program_beside_the_environment_is_named_without_a_path(tmp_path):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "program.py").write_text(ASK + "print(ask('hi'), sys.argv[1])")
    command = [sys.executable, "tools/program.py", "{answer}"]
    # A row's value is not taken for a file of the environment's folder.
    reward = "def reward_fn(result): return float(result.text == 'x env.py')"
    env = load_env(write(tmp_path, f"agent = {command!r}\n{reward}"))
    (trajectory,) = run(env, cast(policy="x"), rows=[{"prompt": "hi", "answer": "env.py"}])
    assert (trajectory.reward, trajectory.error) == (1.0, "")


def test_branches_are_trajectories_of_one_episode_with_one_reward(tmp_path):
    program = "ask('a'); ask('b'); ask('b', seed=1)"
    env = load_env(command_env(tmp_path, program, "def reward_fn(result): return 0.5"))
    trajectories = run(env, cast(policy="x"), group_size=2)
    assert [(t.index, t.reward) for t in trajectories] == [(0, 0.5)] * 3 + [(1, 0.5)] * 3


REFUSED_CALL = 'ask("x", conversation=1)'
BROKEN = {
    "raises": ("async def agent(task, llm): raise KeyError('x')", "KeyError: 'x'"),
    "asks nothing": ("async def agent(task, llm): return 4", "the agent asked no model"),
    "raises, reported once": (
        "async def agent(task, llm): return {}[task.id]",
        r"^agent\(\) failed for task \S+ \S+env.py:1: KeyError: '\S+'$",
    ),
    "a command with a script that is not there": (
        f"agent = [{sys.executable!r}, 'nowhere.py']",
        r"no model for task .* OPENAI_BASE_URL .* exit code 2; stderr: .*file 'nowhere.py'",
    ),
    "exits": ("async def agent(task, llm): raise SystemExit(3)", "SystemExit: 3"),
    "a command that asks nothing": (
        f"agent = [{sys.executable!r}, '-c', 'raise OSError(28)']",
        "exit code 1; stderr: .*OSError: 28",
    ),
    "a command whose request is refused": (
        f"agent = [{sys.executable!r}, '-c', {ASK + REFUSED_CALL!r}]",
        "its last request was refused: conversation is not supported; .* exit code 1",
    ),
    "no such command": ("agent = ['no-such-program']", "no-such-program"),
    "no such column": ("agent = ['say', '{answr}']", "no such column; did you mean 'answer'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_agent_that_fails_fails_its_episode_and_is_not_scored(tmp_path, name):
    text, error = BROKEN[name]
    (trajectory,) = run(load_env(write(tmp_path, text + REWARD)), cast(policy="4"))
    assert trajectory.status == "failed" and trajectory.reward is None
    with pytest.raises(AssertionError, match=error):
        raise AssertionError(" ".join(trajectory.error.split()))


def test_an_agent_that_hangs_is_ended_by_its_episodes_deadline(tmp_path):
    program = "ask('x'); import time; time.sleep(1000)"
    env = load_env(command_env(tmp_path, program, "def reward_fn(result): return 1.0"))
    (trajectory,) = run(env, cast(policy="4"), timeout_s=3.0)
    assert trajectory.status == "failed" and "episode_timeout_s" in trajectory.error


def test_a_full_context_truncates_and_scores_an_agent(tmp_path):
    text = "MODELS = ['m']\n" + FUNCTION.replace(
        "task.messages)", "[*task.messages, {'role': 'user', 'content': 'x' * n}])"
    ).replace("for model in MODELS", "for n, model in ((1, 'm'), (200, 'm'))")
    env = load_env(write(tmp_path, text + "\ndef reward_fn(result): return float(result is None)"))
    (trajectory,) = run(env, cast(policy="4", limits={"max_context_tokens": 60}))
    assert (trajectory.status, trajectory.reward) == ("truncated", 1.0)


def test_an_engine_that_dies_is_started_again_and_the_episode_played_again(tmp_path):
    actors = cast(policy="4")
    engine = actors["policy"].engine
    generate, died = engine.generate, []

    async def die_once(*args, **kwargs):
        if not died:
            died.append(True)
            raise EngineDied("gone")
        return await generate(*args, **kwargs)

    async def wake():
        pass

    engine.generate, engine.wake = die_once, wake
    (trajectory,) = run(load_env(write(tmp_path, IN_A_THREAD + REWARD)), actors)
    assert (trajectory.reward, trajectory.error, died) == (1.0, "", [True])


REFUSED = {
    "an agent and a rollout": ("async def rollout(task, actors): pass", "agent replaces 'rollout'"),
    "an agent and tools": ("tools = ['x']", "an agent sends its tools .* to _tools"),
    "tools of a program": ("del agent\nasync def rollout(): 0\ntools = ['x']", "to _tools"),
    "no reward": ("", "an agent needs a hook that scores"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_beside_an_agent_is_refused(tmp_path, name):
    text, error = REFUSED[name]
    reward = REWARD if "rollout" in text or "tools" in text else ""
    with pytest.raises(ValueError, match=error):
        load_env(write(tmp_path, IN_A_THREAD + reward + text))
    with pytest.raises(ValueError, match="a function, or a command"):
        load_env(write(tmp_path, "agent = 'python x.py'" + REWARD))


def test_columns_of_agents_and_their_rewards_are_checked(tmp_path):
    env = load_env(write(tmp_path, "async def agent(task, llm, question): pass" + REWARD))
    check_columns(env, [{"question": "x", "answer": "y"}])
    with pytest.raises(ValueError, match="asks for 'question'; "):
        check_columns(env, [{"answer": "y"}])
    for row, fix in (
        ({"prompt": "x", "answer": "y", "topic": "z"}, "question=topic"),
        ({"prompt": "x", "answer": "y", "a": "z", "b": "z"}, "question=COLUMN"),
        ({"prompt": "x", "answer": "y", "quest": "z", "b": "z"}, "question=quest"),
    ):
        known = f" has {', '.join(row)}; read one by --data.columns {fix}$"
        with pytest.raises(ValueError, match=known):
            check_columns(env, [row], files=[("x.jsonl", 1)])
    with pytest.raises(ValueError, match="asks for 'answer'; "):
        check_columns(env, [{"question": "y"}])
    command = load_env(write(tmp_path, "agent = ['say', '{question} {{x}}']" + REWARD))
    check_columns(command, [{"question": "x", "answer": "y"}])
    with pytest.raises(ValueError, match="asks for 'question'; "):
        check_columns(command, [{"answer": "y"}])


ENDPOINT = """
import openai

async def rollout(task, actors):
    async with actors["policy"].endpoint() as llm:
        async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
            messages = list(task.messages)
            for said in ("a", "b"):
                reply = await client.chat.completions.create(model="m", messages=messages)
                messages += [reply.choices[0].message, {"role": "user", "content": said}]
        return llm.trajectories(len(reply.choices[0].message.content))

def load_tasks(split):
    return [{"prompt": "12"}, {"prompt": "34"}]
"""
AGENT = (
    ENDPOINT.replace("rollout(task, actors)", "agent(task, llm)")
    .replace(
        "        return llm.trajectories(len(reply.choices[0].message.content))",
        "        return len(reply.choices[0].message.content)",
    )
    .replace('async with actors["policy"].endpoint() as llm', "if True")
)


@pytest.mark.parametrize("text", [ENDPOINT, AGENT + "\ndef reward_fn(result): return result"])
def test_a_run_learns_from_what_was_sampled_at_the_endpoint(tmp_path, tiny_model, text):
    out = train(
        tmp_path / "out",
        "--model",
        tiny_model,
        f"--env_path {write(tmp_path, text)} --num_steps 2 --tasks_per_step 2 --group_size 4",
        "--max_prompt_tokens 64 --max_tokens 12 --seed 1",
    )
    rows = steps(out)
    assert len(rows) == 2
    for row in rows:
        # The learner computes the logprobs that the engine sampled with.
        assert abs(row["learn/policy/mismatch_kl_nats"]) < 1e-5
        assert row["learn/policy/grad_norm"] > 0


IN_A_SCHEMA = """
from typing import Literal
import openai, pydantic

class Order(pydantic.BaseModel):
    size: Literal["small", "big"]
    count: int = pydantic.Field(ge=0, le=20)

async def agent(task, llm):
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        messages, orders = list(task.messages), []
        for said in ("a", "b"):
            asked = {"model": "m", "messages": messages, "response_format": Order}
            reply = (await client.chat.completions.parse(**asked)).choices[0].message
            orders.append(reply.parsed)
            messages += [{"role": "assistant", "content": reply.content}]
            messages += [{"role": "user", "content": said}]
        return orders

def reward_fn(result):
    return sum(order.count for order in result) / 20

def load_tasks(split):
    return [{"prompt": "12"}, {"prompt": "34"}]
"""


def test_a_run_samples_in_a_schema_and_learns_over_the_same_ids(tmp_path, tiny_model, capfd):
    pytest.importorskip("llguidance")
    flags = (
        f"--env_path {write(tmp_path, IN_A_SCHEMA)} --num_steps 2 --tasks_per_step 2 "
        "--group_size 4 --max_prompt_tokens 64 --max_tokens 400 --seed 1 "
        "--agents.response_format enforce --optim.lr 1e-2 --eval_every 2"
    )
    out = train(tmp_path / "out", "--model", tiny_model, flags)
    printed = capfd.readouterr().out
    assert "policy: top_p, min_p and JSON schemas choose among the 1,024 likeliest ids" in printed
    rows = steps(out)
    assert len(rows) == 2
    for row in rows:
        assert row["rollout/policy/failed"] == 0, "each reply was parsed"
        assert row["rollout/policy/agent_overridden"] == 0
        assert abs(row["learn/policy/mismatch_kl_nats"]) < 1e-6
        assert row["learn/policy/entropy_nats"] < 2, "no more than the ids of the schema"
        assert row["learn/policy/grad_norm"] > 0
