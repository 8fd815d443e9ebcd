"""Environments behind an address, as a run sees them: the same curves, errors, ends and failures as those of a file."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from kit import ROOT, STOP, kill_session, metrics, run, start_process, trajectories, wait_until, words

from rl_core.cli import main as command
from rl_core.config import RolloutConfig
from rl_core.engines.scripted import ScriptedActor, plain_chat
from rl_core.sampling.env import load_env
from rl_core.sampling.hooks import HookError
from rl_core.sampling.rollout import Group, run_group
from rl_core.service import client
from rl_core.service import environments_pb2 as pb
from rl_core.types import SamplingParams, Task

ROWS = """
def load_tasks(split):
    return [{"prompt": f"{n} and {n * 7 % 10}", "answer": str(n)} for n in range(8 if split == "train" else 3)]
"""
# Rewards of all kinds, a curriculum, and advantages of its own.
SCORED = f"""{ROWS}
from rl_core import reward

async def reward_fn(completion):
    return {{"sum": sum(map(ord, completion)) / 1000, "long": len(completion) / 70}}

@reward(weight=0.3)
async def answered(completion, answer, **everything):
    return float(answer in completion) + everything["trajectory"].turns[0].completion.logprobs[0] / 9

@reward(weight=0)
def length(completion, task):
    return len(completion) + int(task.id[-1])

@reward(weight=0.7, batched=True)
async def rank(trajectories, answer):
    best = max(t.num_tokens for t in trajectories)
    return [t.num_tokens / best + int(answer) / 10 for t in trajectories]

def task_weight(mean_reward, answer):
    return 1 + int(answer) + abs(mean_reward)

def advantage_fn(rewards):
    return [r - sorted(rewards)[len(rewards) // 2] for r in rewards]
"""
# Several turns with a state, a reward in each, and an end that the environment chooses.
STATEFUL = f"""{ROWS}
from types import SimpleNamespace

max_turns = 4
truncated_reward = -0.25

def start(task, answer):
    return SimpleNamespace(said=[], goal=int(answer))

async def interact(messages, completion, state, trajectory):
    state.said.append(len(completion))
    said = [{{"role": "user", "content": f"{{state.goal}} {{state.said}} {{len(trajectory.turns)}}"}}]
    return {{"messages": said, "reward": len(completion) / 7, "done": len(state.said) > state.goal % 4}}

async def reward_fn(messages, state):
    return sum(state.said) / 11 + len(messages) / 100

def advantage_fn(rewards):
    return [r - sum(rewards) / len(rewards) for r in rewards]
"""
TALK = f"""{ROWS}
name_prefix = True
system_prompts = {{"bob": "Say {{{{ answer }}}}.", "alice": "Listen."}}

def turns(task, actors):
    yield from sorted(actors)[:: 1 if task.row["answer"] < "4" else -1]
    yield "bob"

async def interact(actor, state, messages):
    state.append(actor)
    return [{{"role": "user", "content": f"{{len(messages)}} {{''.join(state)}}"}}]

def start(task):
    return []

async def reward_fn(actor, completion, state):
    return {{"said": len(completion) / 9, "turns": len(state) / (3 if actor == "bob" else -7)}}
"""
COUNT = f"""{ROWS}
import asyncio
import os
import signal
import time

max_turns = 6

def start(task):
    return {{"turns": 0, "name": os.urandom(4).hex()}}

async def interact(messages, state):
    state["turns"] += 1
    said = messages[-1]["content"]
    if said == "raise":
        raise ValueError("it was said to raise")
    if said == "hang":
        await asyncio.sleep(600)
    if said == "name":
        return [{{"role": "user", "content": state["name"]}}]
    return {{"messages": [{{"role": "user", "content": str(state["turns"])}}], "done": said == "done"}}

def reward_fn(state, answer):
    return state["turns"] / 8
"""
ENVS = {"scored": SCORED, "stateful": STATEFUL, "talk": TALK, "count": COUNT}


class Service:
    """`rl-core serve` as a process."""

    def __init__(self, *args, token: str = ""):
        before = os.environ.pop("RL_CORE_SERVICE_TOKEN", None)
        if token:
            os.environ["RL_CORE_SERVICE_TOKEN"] = token
        try:
            self.process = start_process("-m", "rl_core.cli", "serve", *args, "--port", "0", "--drain_s", "0")
        finally:
            os.environ.pop("RL_CORE_SERVICE_TOKEN", None)
            if before is not None:
                os.environ["RL_CORE_SERVICE_TOKEN"] = before
        self.said = self.process.stdout.readline()
        assert "serving on" in self.said, self.said + self.process.stderr.read()
        self.address = f"127.0.0.1:{self.said.strip().rpartition(':')[2]}"
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def url(self, name: str, **settings) -> str:
        return f"grpc://{self.address}/{name}?" + "&".join(f"{key}={value}" for key, value in settings.items())

    def workers(self) -> list[pb.Worker]:
        served = client.parse(self.url("any"))
        return list(served.ask_now("", 10, workers=pb.WorkersRequest()).workers)

    def num_open(self) -> int:
        return sum(load.sessions for worker in self.workers() for load in worker.loads)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("envs")
    for name, text in ENVS.items():
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def service(files):
    made = Service(*sorted(files.glob("*.py")), "--workers", "2", "--idle_s", "2", "--hook_timeout_s", "2")
    yield made
    kill_session(made.process)


def play(env, replies: list[str], size: int = 1, task_id: str = "train/3", **row) -> list:
    """A group of episodes with these replies, one a turn."""

    async def group() -> list:
        actors = {"policy": ScriptedActor(name="policy", chat=plain_chat(), replies=replies)}
        task = Task(id=task_id, env=env.name, row={"answer": "3"} | row, messages=[{"role": "user", "content": "hi"}])
        how = {"size": size, "params": SamplingParams(max_tokens=100), "seed": 0}
        return await run_group({env.name: env}, actors, RolloutConfig(), Group(task=task, batch="t", number=0, **how))

    return asyncio.run(group())


TINY = f"--max_tokens 8 --max_prompt_tokens 24 --tasks_per_step 4 --group_size 3 --num_steps 2 --optim.lr 1e-2 {STOP}"
# An engine with one slot computes each token alone: what it rounds does not depend on when an environment answers.
ALONE = "--rollout.max_concurrent 1"
SAME = {
    "one actor": "--model {model} --env_path {scored},{stateful} --eval_every 2 --max_turns 3",
    "two actors": "--actors.bob.model {model} --actors.alice.model {model} --env_path {talk} --max_prompt_tokens 90",
}


def lasting(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


@pytest.mark.parametrize("how", SAME)
def test_a_run_through_a_service_is_the_run_of_the_files_bit_for_bit(how, service, files, tiny_model, tmp_path):
    local = {name: files / f"{name}.py" for name in ENVS}
    served = {name: service.url(name) for name in ENVS}
    outs = []
    for name, paths in {"local": local, "served": served}.items():
        flags = words(TINY, ALONE, SAME[how].format(model=tiny_model, **paths))
        outs.append(run(tmp_path / name, flags))
    one, two = outs
    assert lasting(metrics(one)) == lasting(metrics(two)) and len(metrics(one)) >= 2
    played = [sorted(out.glob("rollouts/*.zst")) for out in outs]
    assert [f.name for f in played[0]] == [f.name for f in played[1]] and played[0]
    for a, b in zip(*played, strict=True):
        rows = trajectories(a)
        assert rows == trajectories(b)
        assert len({row["reward"] for row in rows}) > 1 and all(row["status"] != "failed" for row in rows)


ALIKE = "calculator countdown guess_number sort_digits tool_use word_game tic_tac_toe nim collaborate debate".split()


@pytest.fixture(scope="module")
def examples():
    """Environments of the repository, one worker with room for three sessions of each, and a token."""
    made = Service(*(ROOT / f"envs/{name}.py" for name in ALIKE), "--workers", "1", "--capacity", "3", token=TOKEN)
    yield made
    kill_session(made.process)


TOKEN = "a-secret-that-nobody-may-see"


@pytest.fixture
def token(monkeypatch):
    monkeypatch.setenv("RL_CORE_SERVICE_TOKEN", TOKEN)


@pytest.mark.parametrize("name", ALIKE)
def test_check_says_of_a_served_environment_what_it_says_of_the_file(name, examples, token, capsys):
    reports = []
    for path in (f"envs/{name}.py", examples.url(name)):
        assert command(["check", path, "--num_tasks", "3", "--json"]) == 0
        [report] = json.loads(capsys.readouterr().out)
        reports.append({key: report[key] for key in ("columns", "num_tasks", "tokens", "episodes", "normal")})
    assert reports[0] == reports[1]


def line_of(text: str, part: str) -> int:
    return next(n for n, line in enumerate(text.splitlines(), 1) if part in line)


def test_a_failing_hook_reads_as_that_of_a_file(service, files):
    env, file = load_env(service.url("count")), files / "count.py"
    url, line = f"grpc://{service.address}/count", line_of(COUNT, "raise ValueError")
    [raised], [hung], [strange] = (play(env, ["hi", said]) for said in ("raise", "hang", "name"))
    error = f"{file}:{line}: ValueError: it was said to raise"
    assert raised.error == f"interact() failed for task train/3: {url}: {error}"
    assert raised.status == hung.status == "failed" and raised.reward is None
    assert hung.error.startswith(f"interact() failed for task train/3: {url}: {file}: interact() ran longer than 2 s")
    assert strange.status == "ok" and strange.reward == 6 / 8
    [unfit] = play(env, ["hi"], odd=object())
    assert unfit.error.endswith("the row of train/3 must be JSON to travel: a object is not")


def test_columns_that_a_served_hook_does_not_find_are_refused_at_start_up(service):
    with pytest.raises(ValueError, match=r"grpc://.*reward_fn\(\) names 'answer', which is neither"):
        load_env(service.url("count")).check_columns([{"prompt": "1"}])


@pytest.mark.parametrize(
    "url, why",
    [
        ("grpc://{0}/nobody", "there is no environment 'nobody'; there are count, scored, stateful, talk"),
        ("grpc://{0}/count?on_loss=replay", "unknown setting 'on_loss'; known: ca, on_lost, reconnect_s, token_file"),
        ("grpc://{0}/count?on_lost=retry", "on_lost=retry must be fail or replay"),
        ("http://{0}/count", "must be grpc://HOST:PORT/NAME"),
        ("grpc://me:secret@{0}/count", "holds a password"),
        ("grpc://127.0.0.1:9/count?reconnect_s=0.3", "127.0.0.1:9 could not be reached for 0.3 s: .*refused"),
    ],
)
def test_a_url_that_leads_nowhere_is_refused(url, why, service):
    with pytest.raises(ValueError, match=why) as caught:
        load_env(url.format(service.address))
    assert "secret" not in str(caught.value)


def test_numbers_of_numpy_in_rows_reach_the_service(service):
    [t] = play(load_env(service.url("count")), ["hi", "done"], size=1, x=np.float32(1.5), y=np.arange(3))
    assert (t.status, t.reward) == ("ok", 2 / 8)


class Playing:
    """A session by hand."""

    def __init__(self, url: str):
        self.env, self.messages = load_env(url), [{"role": "user", "content": "hi"}]

    async def start(self) -> Playing:
        task = Task(id="train/3", env="count", row={"answer": "3"}, messages=list(self.messages))
        self.state = await self.env.hooks["start"].function(task=task, actor="policy")
        return self

    async def say(self, text: str) -> str:
        """The environment's answer."""
        self.messages.append({"role": "assistant", "content": text})
        given = {"messages": list(self.messages), "completion": text, "actor": "policy"}
        answer = await self.env.hooks["interact"].function(state=self.state, **given)
        self.messages += answer["messages"]
        return answer["messages"][0]["content"]

    def kill_worker(self, service: Service) -> None:
        [pid] = [worker.pid for worker in service.workers() if self.state.name.startswith(worker.name)]
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("on_lost", ["fail", "replay"])
def test_a_session_whose_worker_died_fails_or_is_played_again(on_lost, service):
    async def lose(third: str) -> str:
        playing = await Playing(service.url("count", on_lost=on_lost)).start()
        assert [await playing.say("a"), await playing.say(third and "b")] == ["1", "2"]
        playing.kill_worker(service)
        return await playing.say("c")

    if on_lost == "fail":
        with pytest.raises(client.ServiceError, match=r"session [0-9a-f]{12}\.[0-9a-f]{16} is lost"):
            asyncio.run(lose("b"))
    else:
        assert asyncio.run(lose("b")) == "3"


def test_a_replay_that_is_answered_otherwise_fails(service):
    async def lose() -> None:
        playing = await Playing(service.url("count", on_lost="replay")).start()
        await playing.say("name")  # drawn by each session
        playing.kill_worker(service)
        await playing.say("b")

    with pytest.raises(client.ServiceError, match="was lost, and its replay differs: turn 1 was answered otherwise"):
        asyncio.run(lose())
