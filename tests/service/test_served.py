"""Environments behind an address, as a run sees them: the same curves, errors, ends and failures as
those of a file."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import itertools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit import (
    ROOT,
    STOP,
    kill_session,
    metrics,
    run,
    run_ranks,
    start_process,
    trajectories,
    wait_until,
    words,
)
from test_service import made_certificate

from rl_core.config import RolloutConfig
from rl_core.data.images import read_image
from rl_core.data.task_rows import read_row
from rl_core.data.tool_calls import ToolCalls
from rl_core.engines.scripted import PlainImages, ScriptedActor, plain_chat
from rl_core.environments import env_file as environments
from rl_core.environments.row_columns import check_columns
from rl_core.environments.service import client, connection
from rl_core.environments.service import environments_pb2 as pb
from rl_core.environments.service.client import plain
from rl_core.environments.service.session import read_trajectory
from rl_core.environments.service.speakers import ActorRegistry
from rl_core.environments.service.wire import ServiceError, to_json
from rl_core.sampling.actor import Actor
from rl_core.sampling.engine import EngineDied
from rl_core.sampling.episode import read_answer
from rl_core.sampling.episode_runner import EpisodeRunner
from rl_core.sampling.groups import Group
from rl_core.sampling.resumable_rollouts import read_trajectories
from rl_core.tools.cli import main as command
from rl_core.types import SamplingParams, Task


def load_env(path: str) -> environments.Env:
    """Plays as a run does."""
    module = client.load_module(path) if "://" in path else None
    return environments.load_env(path, module=module)


ROWS = """
def load_tasks(split):
    return [{"prompt": f"{n} and {n * 7 % 10}", "answer": str(n)} for n in range(8 if split == "train" else 3)]
"""
# Rewards of all kinds, a curriculum, and custom advantages.
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

def task_weight(mean_reward, tries, success_rate, answer):
    return 1 + int(answer) + abs(mean_reward) + tries / 10 + success_rate / 3

def advantage_fn(rewards):
    return [r - sorted(rewards)[len(rewards) // 2] for r in rewards]

def teacher_prompt(task, trajectory, trajectories, answer, completion, messages):
    if answer == "3":
        return None
    best = max(trajectories, key=lambda t: t.reward)
    said = [task.messages[-1]["content"], best.messages[-1]["content"], str(round(trajectory.reward, 6)), completion[:2]]
    said.append(str(len(messages)))
    return [{{"role": "system", "content": answer}}, {{"role": "user", "content": " ".join(said)}}]
"""
# Several turns with a state, a reward in each, and an end that the environment chooses.
STATEFUL = f"""{ROWS}
from types import SimpleNamespace

max_turns = 4
truncated_reward = -0.25

def start(task, answer, actor):
    return SimpleNamespace(said=[], goal=int(answer), actor=actor)

def state_key(messages, trajectory, completion, actor, state):
    spoken = len(trajectory.turns) if trajectory else completion
    return {{"goal": state.goal, "spoken": spoken, "length": len(messages), "actor": actor}}

async def interact(messages, completion, state, trajectory):
    state.said.append(len(completion))
    said = [{{"role": "user", "content": f"{{state.goal}} {{state.said}} {{len(trajectory.turns)}} {{state.actor}}"}}]
    return {{"messages": said, "reward": len(completion) / 7, "done": len(state.said) > state.goal % 4}}

async def reward_fn(messages, state):
    return sum(state.said) / 11 + len(messages) / 100
"""
TALK = f"""{ROWS}
name_prefix = True
system_prompts = {{"bob": "Say {{{{ answer }}}}.", "alice": "Listen."}}

def turns(task, actors):
    yield from sorted(actors)[:: 1 if task.row["answer"] < "4" else -1]
    yield "bob"

async def state_key(actor, state, completion):
    return [actor, len(state), completion] if state else None

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
    time.sleep(task.row.get("start_s", 0))
    return {{"turns": 0, "name": os.urandom(4).hex()}}

async def interact(messages, state, completion, task):
    state["turns"] += 1
    said = messages[-1]["content"]
    if said == "raise":
        raise ValueError("it was said to raise")
    if said == "hang":
        await asyncio.sleep(600)
    if said == "wait":
        await asyncio.sleep(0.4)
    if said == "completion":
        return [{{"role": "user", "content": completion + str(task.info)}}]
    return {{"messages": [{{"role": "user", "content": str(state["turns"])}}], "done": said == "done"}}

async def reward_fn(state, answer, task):
    state["scores"] = state.get("scores", 0) + 1
    await asyncio.sleep(task.row.get("score_s", 0))
    return state["turns"] / 8 + (state["scores"] - 1 if "score_s" in task.row else 0)
"""
# Hooks that ask actors: a rollout with branches at once, and a conversation that start() begins and
# interact() continues.
ASKING = f"""{ROWS}
import asyncio
import os

max_turns = 3

async def rollout(task, actors):
    policy, judge = actors["policy"], actors["judge"]
    if task.row.get("is_race"):
        return [await _race(policy, judge)]
    first, other = await policy.respond(task.messages, n=2, state_key=["opening", 2])
    branch, before = first.fork(), first.turns[0].completion.logprobs[0]
    replies = await asyncio.gather(first.respond("more", state_key="more"), branch.respond([{{"role": "user", "content": "less"}}]))
    verdict = await judge.respond(f"{{first.text}} or {{branch.text}}?", max_tokens=2, temperature=0.5)
    parts = {{"own": len(first.text) / 9 + before, "judged": sum(map(ord, verdict.answer)) / 999}}
    found = [first.trajectory(parts, player="a", metrics={{"tried": len(replies)}})]
    found[0].turn_rewards = [found[0].reward / n for n in (2, 2)[: len(found[0].turns)]] if len(found[0].turns) == 2 else []
    return [*found, branch.trajectory(len(branch.last_text), player="b"), other.trajectory(policy.max_turns, player="b")]

async def _race(policy, judge):
    order = []

    async def say(actor, turns):
        reply = await actor.respond("go")
        for _ in range(turns - 1):
            await reply.respond("on")
        order.append(actor.name)
        return reply

    _, reply = await asyncio.gather(say(judge, 1), say(policy, 3))
    return reply.trajectory(float(order == ["policy", "judge"]))

async def group_reward_fn(trajectories, actors, answer):
    said = [actors["judge"].respond(t.messages[-1]["content"][:5] + answer, max_tokens=2) for t in trajectories]
    return [len(s.text) / 5 + s.turns[0].completion.logprobs[0] for s in await asyncio.gather(*said)]
"""
HINTED = f"""{ROWS}
import asyncio

max_turns = 3
turns = "policy*3"

async def start(task, actors):
    return {{"hint": await actors["judge"].respond(task.messages, max_tokens=3), "names": sorted(actors)}}

async def interact(completion, state, actors):
    if completion == "wrong":
        try:
            await actors["judge"].respond("x" * 100_000)
        except ValueError as error:
            return [{{"role": "user", "content": str(error)}}]
    hint = await state["hint"].respond(completion[:3])
    return {{"messages": [{{"role": "user", "content": hint.text[:5]}}], "reward": len(hint.text) / 7}}

async def reward_fn(completion, actors, state):
    return len((await actors["judge"].respond(completion[:9])).text) / 11 + len(state["names"])

async def second(actors, answer):
    return len((await actors["judge"].respond(answer * 3)).text) / 13
second.reward_mark = 0.5, False

async def group_reward_fn(trajectories, actors, task):
    said = await actors["judge"].respond(task.messages, max_tokens=3)  # as start(), which no group begins with
    return [said.turns[0].completion.logprobs[0]] * len(trajectories)
"""
# A program at an endpoint: turns, a branch, a limit of one turn, another actor.
AGENT = f"""{ROWS}
import openai

max_turns = 6

async def agent(task, llm):
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        async def ask(messages, **more):
            reply = await client.chat.completions.create(messages=messages, **{{"model": "policy"}} | more)
            return reply.choices[0].message.model_dump(exclude_none=True)

        def user(text):
            return {{"role": "user", "content": text}}

        first = [*task.messages, await ask(task.messages)]
        left = await ask([*first, user("more")], max_tokens=3)
        right = await ask([*first, user("less")], stop=["a"])
        verdict = await ask([user(left["content"])], model="judge")
        return left["content"] + right["content"] + verdict["content"]

def reward_fn(result, answer, completion):
    return len(result) / 9 + sum(map(ord, completion)) / 999
"""
# The first two pairs that run together die with their worker.
SIGHT = """
max_turns = 2

def load_tasks(split):
    from PIL import Image
    return [{"prompt": "a", "image": Image.new("RGB", (2, 3), (9, 9, 9))}]

def interact(messages):
    import numpy
    picture = numpy.full((4, 5, 3), len(messages), "uint8")
    return [{"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "image", "image": picture}]}]

def reward_fn(messages):
    return sum(map(ord, str(messages))) % 1000
"""
SEEN = """
import copy

async def rollout(task, actors):
    reply = await actors["policy"].respond(task.messages)
    t = reply.trajectory(1)
    t.turns = copy.deepcopy(t.turns) if task.row["is_copied"] else t.turns
    ids, sampled = t.turns[0].new_ids, t.turns[0].completion.token_ids
    exec(task.row["change"])
    return [t]
"""
ENVS = {
    "seen": SEEN,
    "sight": SIGHT,
    "scored": SCORED,
    "agent": AGENT,
    "stateful": STATEFUL,
    "talk": TALK,
    "count": COUNT,
    "asking": ASKING,
    "hinted": HINTED,
}


class Service:
    """`rl-core serve` as a process."""

    def __init__(self, *args, token: str = ""):
        before = os.environ.pop("RL_CORE_SERVICE_TOKEN", None)
        if token:
            os.environ["RL_CORE_SERVICE_TOKEN"] = token
        try:
            self.process = start_process(
                "-m", "rl_core.tools.cli", "serve", *args, "--port", "0", "--drain_s", "0"
            )
        finally:
            os.environ.pop("RL_CORE_SERVICE_TOKEN", None)
            if before is not None:
                os.environ["RL_CORE_SERVICE_TOKEN"] = before
        address = next(
            (line.split()[-1] for line in self.process.stdout if "serving on" in line), ""
        )
        assert address, self.process.stderr.read()
        self.address = address
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def url(self, name: str, **settings) -> str:
        return f"grpc://{self.address}/{name}?" + "&".join(
            f"{key}={value}" for key, value in settings.items()
        )

    def workers(self) -> list[pb.Worker]:
        served = client.parse(self.url("any"))
        return list(served.ask_now("", workers=pb.WorkersRequest()).workers)

    def num_queued(self) -> int:
        return sum(
            client.parse(self.url("any")).ask_now("", workers=pb.WorkersRequest()).queued.values()
        )

    def num_open(self, env: str = "") -> int:
        return sum(
            load.sessions
            for worker in self.workers()
            for load in worker.loads
            if env in ("", load.env)
        )

    def num_completed(self) -> int:
        return sum(load.ended["completed"] for worker in self.workers() for load in worker.loads)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("envs")
    for name, text in ENVS.items():
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def service(files):
    made = Service(
        *sorted(files.glob("*.py")), "--workers", "2", "--idle_s", "5", "--hook_timeout_s", "4"
    )
    yield made
    kill_session(made.process)


def play(
    env,
    replies: list[str],
    size: int = 1,
    task_id: str = "train/3",
    actors=None,
    content="hi",
    **row,
) -> list:
    """A group of episodes with these replies, one a turn."""
    actors = actors or {
        "policy": ScriptedActor(name="policy", chat=plain_chat(ToolCalls), replies=replies)
    }

    async def group() -> list:
        task = Task(
            id=task_id,
            env=env.name,
            row={"answer": "3"} | row,
            messages=[{"role": "user", "content": content}],
        )
        options = {"size": size, "params": SamplingParams(max_tokens=100), "seed": 0}
        group = Group(task=task, batch="t", number=0, **options)
        return await EpisodeRunner({env.name: env}, actors, RolloutConfig()).play(group)

    return asyncio.run(group())


TINY = (
    f"--max_tokens 8 --max_prompt_tokens 24 --tasks_per_step 6 --num_steps 2 --optim.lr 1e-2 {STOP}"
)
# An engine's rounding depends on its batch and on its caches: one slot, and over several turns one
# episode at a time, so that the numbers do not depend on when an environment answers.
TINY += " --rollout.max_concurrent 1"
ALONE = "--algorithm reinforce_pp --group_size 1 --eval.samples 0"
SAME = {
    "an agent": "--actors.policy.model {model} --actors.judge.model {model} "
    f"--actors.judge.train false --env_path {{agent}} {ALONE} --max_prompt_tokens 90",
    "a teacher": "--model {model} --env_path {scored} --group_size 3 --eval_every 2 "
    "--algo.teacher self --algo.teacher_coef 0.5 --algo.teacher_update latest",
    "several turns": f"--model {{model}} --env_path {{stateful}},{{count}} {ALONE} --max_turns 3 --eval_every 2",
    "two actors": f"--actors.bob.model {{model}} --actors.alice.model {{model}} --env_path {{talk}} {ALONE} "
    "--max_prompt_tokens 90",
    "hooks that ask": "--actors.policy.model {model} --actors.judge.model {model} --actors.judge.train false "
    f"--env_path {{asking}},{{hinted}} {ALONE} --max_prompt_tokens 90",
}


KEYS = {
    "several turns": {'{"actor": "policy", "goal": 3, "length": 1, "spoken": null}', ""},
    "two actors": {"", '["alice", 1, null]'},
    "hooks that ask": {'["opening", 2]', "more", ""},
}


def lasting(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


@pytest.mark.parametrize("mode", SAME)
def test_a_run_through_a_service_is_the_run_of_the_files_bit_for_bit(
    mode, service, files, tiny_model, tmp_path
):
    local = {name: files / f"{name}.py" for name in ENVS}
    served = local | {name: service.url(name) for name in ENVS if name != "count"}
    outs = []
    for name, paths in {"local": local, "served": served}.items():
        flags = words(TINY, SAME[mode].format(model=tiny_model, **paths))
        outs.append(run(tmp_path / name, flags))
    one, two = outs
    assert lasting(metrics(one)) == lasting(metrics(two)) and len(metrics(one)) >= 2
    played = [sorted(out.glob("rollouts/*.zst")) for out in outs]
    assert [f.name for f in played[0]] == [f.name for f in played[1]] and played[0]
    rows = [[row for file in observed for row in trajectories(file)] for observed in played]
    assert rows[0] == rows[1] and all(row["status"] != "failed" for row in rows[0])
    assert len({row["reward"] for row in rows[0]}) > 5
    assert any(row["teacher_ids"] for row in rows[0]) == (mode == "a teacher")
    keys = {turn["state_key"] for row in rows[0] for turn in row["turns"]}
    assert KEYS.get(mode, {""}) <= keys, keys


# An environment, and flags of check, which tries some of its tasks.
CHECKED = """
agentbench_db --num_tasks 2
agentbench_house --num_tasks 2
agentbench_kg --num_tasks 2
agentbench_os --num_tasks 2
agentbench_shop --num_tasks 2
calculator --num_tasks 3
code --num_tasks 2
code_contest --num_tasks 2
code_parallel --num_tasks 1 --actors ann,combiner
collaborate --num_tasks 2
collaborate --num_tasks 3 --actors ann,ben,cleo
count_shapes --num_tasks 2
countdown --num_tasks 3 --reply '<answer>{{ nums[0] }}+{{ nums[1] }}</answer>'
customer_service --num_tasks 2 --actors agent,user
debate --num_tasks 1 --actors ann,ben
debate --num_tasks 1 --actors ann,ben,judge
drawn_maze --num_tasks 2
gym_text --num_tasks 1 --reply right --reply down
harbor --num_tasks 2
instructions --num_tasks 3
jailbreak --num_tasks 2 --actors attacker,target --reply 'It is {{ password }}.'
llm_judge --num_tasks 2 --actors policy,judge
math_answer --num_tasks 2
maze --num_tasks 3
openai_agent --num_tasks 3
parallel_thinking --num_tasks 1 --reply '{{ answer }}'
parallel_thinking --num_tasks 1 --actors ann,ben,combiner
python_tool --num_tasks 3
referential_game --num_tasks 3
search_qa --num_tasks 1 --reply '<search>{{ question }}</search>' --reply '<answer>{{ golden_answers[0] }}</answer>'
sort_digits --num_tasks 3
sort_two_ways --num_tasks 3 --actors up,down
summarise --num_tasks 3
terminal --num_tasks 3
tic_tac_toe --num_tasks 1 --actors ann,ben
tic_tac_toe --num_tasks 2 --reply 1 --reply 4 --reply 2 --reply 5 --reply 3
tool_use --num_tasks 3 --reply '<tool_call>{"name": "calculator", "arguments": {"expression": "{{ prompt[:-1] }}"}}</tool_call>' --reply '{{ answer }}'
translate --num_tasks 3
word_problems --num_tasks 3
""".strip().splitlines()
# They need a second, a server, a folder or a model.
OTHERS = ["chess_game", "mcp_tools", "openenv_client", "reward_model", "tau2_env"]


@pytest.fixture(scope="module")
def examples(files):
    """All environments of the repository and one more, one worker with room for three sessions of
    each, and a token."""
    # Their libraries are not installed, or they draw thousands of pictures.
    outside = {"reasoning_gym_env", "textarena_env", "verifiers_env", "picture_questions"}
    names = {path.stem for path in ROOT.glob("envs/*.py")} - outside
    assert names == {*(line.split()[0] for line in CHECKED), *OTHERS}
    paths = [files / "count.py", *(ROOT / f"envs/{name}.py" for name in sorted(names))]
    os.environ["OPENENV_URL"] = "http://127.0.0.1:9"  # Nobody listens there.
    made = Service(*paths, "--workers", "1", "--capacity", "3", token=TOKEN)
    del os.environ["OPENENV_URL"]
    yield made
    kill_session(made.process)


TOKEN = "a-secret-that-nobody-may-see"


@pytest.fixture
def token(monkeypatch):
    monkeypatch.setenv("RL_CORE_SERVICE_TOKEN", TOKEN)


@pytest.mark.parametrize("line", CHECKED)
def test_check_says_of_a_served_environment_what_it_says_of_the_file(line, examples, token, capsys):
    (name, *flags), reports = shlex.split(line), []
    for path in (f"envs/{name}.py", examples.url(name)):
        assert command(["check", path, *flags, "--json"]) == 0
        [report] = json.loads(capsys.readouterr().out)
        names = "columns", "num_tasks", "tokens", "teacher", "episodes", "normal"
        reports.append({key: report[key] for key in names})
    assert reports[0] == reports[1] and bool(reports[0]["teacher"]) == (name == "sort_digits")
    assert not [episode for episode in reports[0]["episodes"] if episode["status"] == "failed"]


def test_environments_that_check_cannot_try_begin_sessions(examples, token):
    # The last one, tau2_env, is only hosted: its folder is in tests/envs/test_tau2.py.
    chess, mcp, openenv, scored, _ = (load_env(examples.url(name)) for name in OTHERS)
    fen = "7k/5ppp/8/8/8/8/5PPP/R5K1 w - - 0 1"
    [t] = play(chess, ["Ra8"], fen=fen, opponent="actor", prompt="Move.")
    assert (t.status, t.player, t.reward_parts) == (
        "ok",
        "white",
        {"result": 1.0, "legal": pytest.approx(0.2)},
    )
    row = mcp.load_tasks("train")[0]
    [t] = play(mcp, [row["answer"]], **row)
    assert (t.status, t.reward, t.metrics["called"]) == ("ok", 1.0, 0)
    [t] = play(openenv, ["x"])
    assert (
        t.error.startswith("rollout() failed for task train/3: grpc://")
        and "Cannot connect to host" in t.error
    )
    assert scored.rewards and {*scored.hooks} == {"start", "reward_fn"}


def line_of(text: str, words_of_line: str) -> int:
    return next(n for n, line in enumerate(text.splitlines(), 1) if words_of_line in line)


def test_a_failing_hook_reads_as_that_of_a_file(service, files):
    env, file = load_env(service.url("count")), files / "count.py"
    url, line = f"grpc://{service.address}/count", line_of(COUNT, "raise ValueError")
    [raised], [hung], [strange] = (play(env, ["hi", text]) for text in ("raise", "hang", "name"))
    error = f"{file}:{line}: ValueError: it was said to raise"
    assert raised.error == f"interact() failed for task train/3: {url}: {error}"
    assert raised.status == hung.status == "failed" and raised.reward is None
    assert hung.error.startswith(
        f"interact() failed for task train/3: {url}: {file}: interact() ran longer than 4 s"
    )
    assert strange.status == "ok" and strange.reward == 6 / 8
    [unfit] = play(env, ["hi"], odd=object())
    assert (
        "the row of train/3 must be JSON to be sent: it contains a value of type object"
        in unfit.error
    )


def test_images_of_rows_and_of_served_hooks_are_those_of_a_file(service, files):
    picture = read_image(np.full((3, 7, 3), 9, np.uint8))
    prompt = [{"type": "image", "image": picture.url}, {"type": "text", "text": "a"}]
    paths = [service.url("sight"), str(files / "sight.py")]
    [served], [local] = (play(load_env(path), ["hi", "ho"], content=prompt) for path in paths)
    assert (served.error, served.status) == ("", "ok")
    assert served.messages == local.messages and served.reward == local.reward
    assert served.turns == local.turns
    sizes = [[(image.width, image.height) for image in turn.images] for turn in served.turns]
    assert sizes == [[(7, 3)], [(5, 4)]]
    rows = (read_row(env.load_tasks("train")[0]) for env in map(load_env, paths))
    assert next(rows) == next(rows)
    # Messages alone carry images, and keys are those of the content.
    sent = plain(served)
    assert to_json(sent, "").count(picture.url) == 1
    assert read_trajectory(sent).turns == served.turns
    [returned] = ActorRegistry(None).trajectories(to_json([sent], ""))
    assert returned.turns == served.turns
    [first, _] = sent["turns"]
    forged = {"key": 5, "url": picture.url, "width": 900_000, "height": 1}
    first["new_ids"] = [-5 if number < 0 else number for number in first["new_ids"]]
    with pytest.raises(ServiceError, match=r"tokens of the image 0+5, which no message of its"):
        read_trajectory(sent | {"turns": [first | {"images": [forged]}]})


class FourTokens(PlainImages):
    def num_tokens(self, image):
        return 4


OTHER_TOKENS = r"a trajectory of 'policy': .* 7 x 3 pixels has other tokens .* reads, 4"
SEEN_CHANGES = {
    "no change": ("pass", "^$"),
    "a message less": ("del t.messages[0]", r"tokens of the image \w{16}, which no message of its"),
    "a token less": ("ids.remove(min(ids))", OTHER_TOKENS),
    "a token more": ("ids.insert(0, min(ids))", OTHER_TOKENS),
    "text between": ("ids.insert(ids.index(min(ids)) + 2, 5)", OTHER_TOKENS),
    "twice": ("ids += [min(ids)] * 4", "^$"),
    "in the reply": ("sampled[0] = min(ids)", "a reply has tokens of an image; models write"),
}


@pytest.mark.parametrize("path", ["served", "local"])
@pytest.mark.parametrize("change, error", SEEN_CHANGES.values(), ids=SEEN_CHANGES)
def test_a_trajectory_with_other_tokens_of_images_fails(change, error, path, service, files):
    picture = read_image(np.full((3, 7, 3), 9, np.uint8))
    prompt = [{"type": "image", "image": picture.url}, {"type": "text", "text": "a"}]
    chat = plain_chat()
    chat.vision = FourTokens(chat.vision.token_id)
    actors = {"policy": ScriptedActor(name="policy", chat=chat, replies=["hi"])}
    env = load_env(service.url("seen") if path == "served" else str(files / "seen.py"))
    row = {"is_copied": change.startswith(("ids", "sampled")), "change": change}
    [t] = play(env, [], actors=actors, content=prompt, **row)
    assert re.search(error, t.error), t.error
    assert t.status == ("failed" if t.error else "ok")
    [saved] = read_trajectories([asdict(t)])
    assert saved.turns[0].images == t.turns[0].images == (picture,)


def test_columns_that_a_served_hook_does_not_find_are_refused_at_start_up(service):
    with pytest.raises(ValueError, match=r"grpc://.*reward_fn\(\) asks for 'answer'; "):
        check_columns(load_env(service.url("count")), [{"prompt": "1"}])


@pytest.mark.parametrize(
    "url, why",
    [
        (
            "grpc://{0}/nobody",
            "unknown environment 'nobody'; known: agent, asking, count, hinted, scored, seen, sight, "
            "stateful, talk",
        ),
        (
            "grpc://{0}/count?on_lost=replay",
            "unknown setting 'on_lost'; known: ca, owner, reconnect_s, token_file",
        ),
        ("http://{0}/count", "must be grpc://HOST:PORT/NAME"),
        ("grpc://{0}/", "must be grpc://HOST:PORT/NAME: add the name of an environment"),
        ("grpc://127.0.0.1/count", "grpc://127.0.0.1/count must be grpc://HOST:PORT/NAME"),
        ("grpc://127.0.0.1:99999/count", "must be grpc://HOST:PORT/NAME"),
        (
            "grpc://{0}/count?reconnect_s=soon",
            "count: reconnect_s=soon must be a number of seconds, such as 120",
        ),
        ("grpc://me:secret@{0}/count", "holds a password"),
        (
            "grpc://127.0.0.1:9/count?reconnect_s=0.3",
            "127.0.0.1:9 could not be reached for 0.3 s: .*refused( \\(111\\))?$",
        ),
    ],
)
def test_a_url_that_leads_nowhere_is_refused(url, why, service):
    with pytest.raises(ValueError, match=why) as caught:
        load_env(url.format(service.address))
    assert "secret" not in str(caught.value)


def test_numbers_of_numpy_in_rows_reach_the_service(service):
    [t] = play(
        load_env(service.url("count")), ["hi", "done"], size=1, x=np.float32(1.5), y=np.arange(3)
    )
    assert (t.status, t.reward) == ("ok", 2 / 8)


class Playing:
    """A session by hand."""

    def __init__(self, url: str, **row):
        self.env, self.messages, self.row = (
            load_env(url),
            [{"role": "user", "content": "hi"}],
            {"answer": "3"} | row,
        )

    async def start(self) -> Playing:
        self.task = Task(
            id="train/3", env="count", row=self.row, messages=list(self.messages), info={"level": 3}
        )
        hook = self.env.hooks["start"]
        self.state = await hook(self.task, dict.fromkeys(hook.ours) | {"task": self.task})
        return self

    async def say(self, text: str, completion: str = "") -> str:
        """The environment's answer, if it gives one."""
        self.messages.append({"role": "assistant", "content": text})
        hook, arguments = (
            self.env.hooks["interact"],
            {"messages": self.messages, "state": self.state},
        )
        arguments["completion"] = completion or text
        answer = await hook(self.task, dict.fromkeys(hook.ours) | arguments)
        messages, _, _ = read_answer(answer, self.env.path, ends=True)
        self.messages += messages
        return messages[0]["content"] if messages else ""

    async def score(self) -> float:
        hook, arguments = (
            self.env.hooks["reward_fn"],
            {"messages": self.messages, "completion": "", "state": self.state},
        )
        return await hook(self.task, dict.fromkeys(hook.ours) | arguments)


class Acting(ScriptedActor):
    """Calls act(number of the turn) before a turn, and awaits its result if there is one."""

    act: Any = None

    def bind_episode(self, *args, **more) -> Actor:
        actor = super().bind_episode(*args, **more)
        speak, count = actor.engine.generate, itertools.count()

        async def generate(*args, **more) -> Any:
            waits = self.act(next(count))
            if waits:
                await waits
            return await speak(*args, **more)

        actor.engine.generate = generate
        return actor


def speakers(act=lambda turn: None, **more) -> dict[str, ScriptedActor]:
    """A policy and a judge; act() before each turn of the policy."""
    options = {"chat": plain_chat(ToolCalls), **more}
    cast = {
        name: Acting(name=name, replies=[f"{name} {n}" for n in range(9)], **options)
        for name in ("policy", "judge")
    }
    cast["policy"].act, cast["judge"].act, cast["judge"].is_trainable = (
        act,
        lambda turn: None,
        False,
    )
    return cast


def kill_once(service: Service, env: str, at: int):
    """Kills the worker that holds a session of the environment, before N turns were played."""
    killed = []

    def act(turn: int) -> None:
        if turn == at and not killed:
            wait_until(lambda: service.num_open(env) == 1, "the hub hears of the session", 30)
            held = [(worker.pid, load) for worker in service.workers() for load in worker.loads]
            [pid] = [pid for pid, load in held if load.env == env and load.sessions]
            killed.append(os.kill(pid, signal.SIGKILL))
            return asyncio.sleep(at // 3)  # it is heard while the actor thinks, or later

    return act


@pytest.fixture(scope="module")
def mortal(files):
    """A service whose workers are killed."""
    made = Service(files / "asking.py", files / "hinted.py", "--workers", "2")
    yield made
    kill_session(made.process)


@pytest.mark.parametrize("name, at", [("asking", 3), ("hinted", 1)])
def test_a_session_fails_whose_worker_died_while_it_asked(name, at, mortal):
    wait_until(lambda: mortal.num_open(name) == 0, "sessions end", 30)
    cast = speakers(kill_once(mortal, name, at))
    observed = play(load_env(mortal.url(name)), [], actors=cast)
    assert {t.status for t in observed} == {"failed"}
    assert re.search(
        r"session [0-9a-f]{12}\.[0-9a-f]{16} is lost with its worker ", observed[0].error
    )


def test_each_trajectory_has_the_hash_of_the_file_whose_session_scored_it(tmp_path, capfd):
    file = tmp_path / "changing.py"
    text = (
        "import asyncio\nasync def reward_fn(completion):\n    await asyncio.sleep(0.2)\n    "
        "return {}\n"
    )
    texts = [text.format(reward) for reward in (1.0, 2.0)]
    file.write_text(texts[0])
    service = Service(file, "--workers", "2")
    try:
        wait_until(lambda: len(service.workers()) == 2, "both workers", 60)
        env = load_env(service.url("changing"))
        file.write_text(texts[1])
        old = service.workers()[0].pid
        os.kill(old, signal.SIGKILL)
        wait_until(
            lambda: len({w.pid for w in service.workers()} - {old}) == 2, "the next worker", 60
        )
        observed = play(env, ["a"], size=8) + play(env, ["a"], size=8)
    finally:
        kill_session(service.process)
    codes = [hashlib.sha256(text.encode()).hexdigest()[:12] for text in texts]
    assert {t.reward for t in observed} == {1.0, 2.0}, "both workers were asked"
    assert [t.env_code for t in observed] == [codes[int(t.reward) - 1] for t in observed]
    lines = capfd.readouterr().err.splitlines()
    [line] = [line for line in lines if "the environment file changed during the run" in line]
    changes = [f"env_code {a} -> {b}" for a, b in (codes, codes[::-1])]
    assert any(change in line for change in changes), line


def test_workers_with_different_files_side_by_side_are_told_once(capsys):
    served = client.Served(url="grpc://x", name="x", connection=None)
    for code in ("a", "b", "a", "", "b"):
        served.hear_code(code)
    assert capsys.readouterr().err.count("changed during the run") == 1 and served.code == "b"


def test_an_engine_that_dies_while_a_service_asks_is_started_again(service, files):
    died = []

    def die(turn: int) -> None:
        if turn == 3 and not died:
            died.append(turn)
            raise EngineDied("it is out of memory")

    local = play(load_env(str(files / "asking.py")), [], actors=speakers())
    gc.collect()
    gc.disable()
    try:
        assert play(load_env(service.url("asking")), [], actors=speakers(die)) == local and died
        wait_until(lambda: service.num_open("asking") == 0, "its session ends with it", 30)
    finally:
        gc.enable()


def test_a_fast_actor_does_not_wait_for_a_slow_one(service):
    """The judge speaks once the policy has begun its third turn, which the hook asks for
    meanwhile."""
    has_begun = asyncio.Event()
    cast = speakers(lambda turn: has_begun.set() if turn == 2 else None)
    cast["judge"].act = lambda turn: asyncio.wait_for(has_begun.wait(), 30)
    [t] = play(load_env(service.url("asking")), [], actors=cast, is_race=True)
    assert t.reward_parts["rollout"] == 1.0 and len(t.turns) == 3 and t.status == "ok"


def test_what_an_actor_raises_reads_as_in_a_file(service, files):
    """A prompt that is too long: caught by one hook, not by the other."""
    errors, text = [], []
    for path in (str(files / "hinted.py"), service.url("hinted")):
        cast = speakers(max_context_tokens=150)
        cast["policy"].replies = ["wrong", "x", "y"]
        [t] = play(load_env(path), [], actors=cast)
        text.append(t.messages)
        cast["policy"].max_context_tokens = 1
        errors.append([t.error for t in play(load_env(path), [], actors=cast)])
    assert (
        text[0] == text[1]
        and "fills the context of 150; raise --max_prompt_tokens" in text[0][2]["content"]
    )
    assert errors[0] == errors[1] and "a prompt of" in errors[0][0]
    paths = str(files / "asking.py"), service.url("asking")
    one, two = (
        play(load_env(path), [], actors=speakers(max_context_tokens=1))[0].error for path in paths
    )
    assert two == one.replace("train/3: ", f"train/3: grpc://{service.address}/asking: ")
    assert "ValueError: a prompt of" in one


def test_the_weight_of_a_task_is_that_of_the_file(service):
    weight = client.load_module(service.url("scored")).task_weight(
        tries=3, success_rate=0.25, mean_reward=-2, answer="4"
    )
    assert weight == pytest.approx(1 + 4 + 2 + 0.3 + 0.25 / 3)


def test_a_completion_and_the_info_of_a_task_travel(service):
    async def say() -> str:
        return await (await Playing(service.url("count")).start()).say(
            "completion", "<think>a</think>completion"
        )

    assert asyncio.run(say()) == "<think>a</think>completion{'level': 3}"


class Cutting:
    """A TCP proxy that cuts all its connections, repeatedly or on request."""

    def __init__(self, address: str, every_s: float, delay_s: float = 0.0, port: int = 0):
        """delay_s: until it connects to the address."""
        self.target, self.every_s, self.num_cuts, self.writers = (
            address.split(":"),
            every_s,
            0,
            set(),
        )
        self.delay_s = delay_s
        self.loop, ready = asyncio.new_event_loop(), threading.Event()
        self.tasks: list[asyncio.Task] = []

        async def serve() -> None:
            self.server = await asyncio.start_server(self.join, "127.0.0.1", port)
            self.address = f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
            self.tasks = [asyncio.ensure_future(self.cut())]
            ready.set()

        self.loop.create_task(serve())
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        assert ready.wait(60)

    async def join(self, reader, writer) -> None:
        await asyncio.sleep(self.delay_s)
        there, out = await asyncio.open_connection(*self.target)
        self.writers |= {writer, out}
        await asyncio.gather(
            self.pump(reader, out), self.pump(there, writer), return_exceptions=True
        )

    async def pump(self, reader, writer) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def cut(self) -> None:
        while self.num_cuts < 8:
            await asyncio.sleep(self.every_s)
            self.abort()

    def abort(self) -> None:
        self.num_cuts += bool(self.writers)
        for writer in self.writers:
            writer.transport.abort()
        self.writers = set()

    async def after(self, wait_s: float, asked) -> Any:
        """Result of a request with a cut meanwhile."""
        asking = asyncio.ensure_future(asked)
        await asyncio.sleep(wait_s)
        self.loop.call_soon_threadsafe(self.abort)
        return await asking

    def end(self) -> None:
        async def stop() -> None:
            self.server.close()
            self.abort()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self.loop.stop()

        asyncio.run_coroutine_threadsafe(stop(), self.loop)


def test_requests_are_sent_again_in_their_order(roomy):
    proxy = Cutting(roomy.address, every_s=600)

    async def score() -> list[float]:
        playing = await Playing(f"grpc://{proxy.address}/count").start()
        await playing.say("a")
        proxy.loop.call_soon_threadsafe(proxy.abort)
        await asyncio.sleep(0.02)
        return await asyncio.gather(*(playing.score() for _ in range(4)))

    assert asyncio.run(score()) == [1 / 8] * 4
    wait_until(lambda: roomy.num_open() == 0, "its session ends")
    proxy.end()


@pytest.fixture(scope="module")
def divided(files):
    """(a hub, {side: the proxy between it and its worker or its client})"""
    hub = Service("--controller")
    cuts = {side: Cutting(hub.address, every_s=600) for side in ("client", "worker")}
    flags = "--workers", "1", "--join", cuts["worker"].address
    served = files / "count.py", files / "asking.py"
    host = start_process("-m", "rl_core.tools.cli", "serve", *served, *flags)
    host.stderr.close()  # Nobody reads the worker's message.
    yield hub, cuts
    for process in (host, hub.process):
        kill_session(process)
    for proxy in cuts.values():
        proxy.end()


@pytest.mark.parametrize("side", ["client", "worker"])
@pytest.mark.parametrize("verb", ["start", "interact", "score", "answer"])
def test_a_cut_connection_does_nothing_twice(verb, side, divided, files):
    """The connection breaks while the verb is under way."""
    hub, cuts = divided
    address = cuts["client"].address

    async def count() -> tuple:
        async def cut(name: str, asked) -> Any:
            return await (cuts[side].after(0.2, asked) if name == verb else asked)

        playing = Playing(f"grpc://{address}/count", start_s=0.6, score_s=0.5)
        await cut("start", playing.start())
        turns = [await cut("interact", playing.say("wait")), await playing.say("a")]
        return *turns, await cut("score", playing.score())

    def act(turn: int):
        if turn == 2:
            cuts[side].loop.call_soon_threadsafe(cuts[side].abort)

    before = hub.num_completed()
    if verb == "answer":
        local, served = (
            play(load_env(path), [], actors=speakers(acts))
            for path, acts in (
                (str(files / "asking.py"), lambda turn: None),
                (f"grpc://{address}/asking", act),
            )
        )
        assert served == local
    else:
        assert asyncio.run(count()) == ("1", "2", 2 / 8)
        # A scored call is not abandoned.
        wait_until(lambda: hub.num_completed() == before + 1, "its session is complete")
    wait_until(lambda: hub.num_open() == 0, "no other session was left")


def test_a_request_without_a_number_is_not_sent_again(divided):
    hub, cuts = divided

    async def ask() -> None:
        session = (await Playing(hub.url("count")).start()).state
        text = pb.Said(messages='[{"role": "assistant", "content": "wait"}]')
        request = pb.InteractRequest(session=session.name, said=text)
        await cuts["worker"].after(0.2, session.served.ask("interact", "t", interact=request))

    with pytest.raises(ServiceError, match="a request without a number is not resent"):
        asyncio.run(ask())


def test_silent_sessions_are_renewed_and_end_with_their_holder(service):
    async def wait() -> str:
        playing = await Playing(service.url("count")).start()
        await asyncio.sleep(7)  # it would expire after 5
        assert service.num_open() >= 1
        return await playing.say("hi")

    assert asyncio.run(wait()) == "1"


def test_a_forked_process_is_told_that_grpc_does_not_work_there(service):
    env = load_env(service.url("count"))
    pid = os.fork()
    if pid == 0:
        signal.alarm(90)
        num_told = 0
        try:
            for load in (lambda: env.load_tasks("train"), lambda: load_env(service.url("talk"))):
                with pytest.raises(ValueError, match="this process was forked"):
                    load()
                num_told += 1
        finally:
            os._exit(num_told)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    assert len(env.load_tasks("train")) == 8


@pytest.fixture
def roomy(examples, token):
    """A service on which a session that nobody ends stays for minutes."""
    wait_until(lambda: examples.num_open() == 0, "its sessions end")
    return examples


def test_sessions_end_with_their_episodes_and_wait_for_room(roomy):
    """Eight at once where three have room. No garbage collection: nothing may hang in a cycle of
    references."""
    env = load_env(roomy.url("count"))
    gc.collect()
    gc.disable()
    try:
        played = play(env, ["hi", "done"], size=8)
        assert Counter(t.status for t in played) == {"ok": 8}
        wait_until(lambda: roomy.num_open() == 0, "sessions end")
        played = play(env, ["hi", "raise"], size=8)
        assert Counter(t.status for t in played) == {"failed": 8}
        wait_until(lambda: roomy.num_open() == 0, "sessions of failed episodes end")
    finally:
        gc.enable()


def test_a_start_that_was_given_up_leaves_no_session(roomy):
    async def start() -> Playing:
        return await Playing(roomy.url("count")).start()

    async def crowd() -> None:
        held = [await start() for _ in range(3)]
        waiting = asyncio.ensure_future(start())
        await asyncio.to_thread(
            wait_until, lambda: (roomy.num_open(), roomy.num_queued()) == (3, 1), "one waits"
        )
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        held.clear()

    asyncio.run(crowd())
    wait_until(lambda: roomy.num_open() == 0, "all sessions end")


def test_a_process_that_ends_takes_its_sessions_along_at_once_and_quietly(roomy):
    code = f"""
import asyncio, sys, weakref
weakref.finalize(type("Other", (), {{}}), int)  # another library's, so that its end comes after the connection's
from rl_core.environments.env_file import load_env
from rl_core.environments.service.client import load_module
from rl_core.types import Task
url = {roomy.url("count")!r}
env = load_env(url, module=load_module(url))
task = Task(id="train/0", env="count", row={{"answer": "1"}}, messages=[{{"role": "user", "content": "hi"}}])
async def start():
    hook = env.hooks["start"]
    return await hook(task, dict.fromkeys(hook.ours) | {{"task": task}})
held = asyncio.run(start())
held.itself = held
print(held.name, "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    wait_until(lambda: roomy.num_open() == 0, "its session ends")


def test_two_ranks_share_a_service_and_a_wrong_token_is_refused(
    examples, tiny_model, tmp_path, monkeypatch
):
    (tmp_path / "wrong").write_text("another")
    began = time.monotonic()
    with pytest.raises(ValueError, match="bearer token"):
        load_env(examples.url("sort_digits", token_file=tmp_path / "wrong"))
    assert time.monotonic() - began < 100  # Less than the 120 s for an unreachable service.
    (tmp_path / "right").write_text(TOKEN + "\n")
    paths = f"{examples.url('sort_digits', token_file=tmp_path / 'right')},{ROOT}/envs/countdown.py"
    flags = words(
        "--model",
        tiny_model,
        "--env_path",
        paths,
        "--max_tokens 4 --max_prompt_tokens 140 --tasks_per_step 4",
    )
    arguments = [*flags, "--group_size", "2", "--num_steps", "2", "--out", str(tmp_path / "run")]
    done = run_ranks(2, "-m", "rl_core.train", *arguments, check=False)
    assert (
        len(metrics(tmp_path / "run")) == 2 and "none of 2 steps made an update" in done.stderr
    ), done.stderr
    observed = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(observed) > 5 and not [
        path for path in observed if TOKEN.encode() in path.read_bytes()
    ]
    assert TOKEN not in done.stdout + done.stderr


def test_tls_trusts_the_given_authority_alone(files, tmp_path):
    tls, cert = made_certificate(tmp_path)
    made = Service(files / "count.py", "--workers", "1", *tls)
    try:
        url = f"grpcs://{made.address}/count"
        assert play(load_env(f"{url}?ca={cert}"), ["done"])[0].status == "ok"
        with pytest.raises(
            ValueError, match=r"could not be reached for 0\.5 s: .*CERTIFICATE_VERIFY_FAILED"
        ):
            load_env(f"{url}?reconnect_s=0.5")
    finally:
        kill_session(made.process)


def test_a_service_that_takes_seconds_to_greet_a_client_is_reached(service):
    proxy = Cutting(service.address, every_s=600, delay_s=2.5)
    assert load_env(f"grpc://{proxy.address}/count?reconnect_s=20").max_turns == 6
    proxy.end()


@pytest.mark.parametrize(
    "address, why", [("127.0.0.1:9", "refused"), ("nobody.onion:50051", "name not found")]
)
def test_an_address_at_which_nothing_can_be_is_given_up_soon(address, why, monkeypatch):
    monkeypatch.setattr(connection, "NOWHERE_S", 0.2)
    error = rf"could not be reached for 0.2 s: .*{why}.*; \?reconnect_s=120 in the URL waits longer"
    with pytest.raises(ValueError, match=f"(?i){error}"):
        load_env(f"grpc://{address}/count")


def test_a_service_that_starts_after_its_run_is_waited_for_and_named_once(
    service, monkeypatch, capfd
):
    # The flag does not count if the URL sets the time.
    monkeypatch.setattr(connection, "NOWHERE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    urls, output = (
        [f"grpc://127.0.0.1:{port}/{name}?reconnect_s=60" for name in ("count", "talk")],
        [],
    )
    client.parse(urls[0])
    with ThreadPoolExecutor() as pool:
        loading = [pool.submit(load_env, url) for url in urls]
        wait_until(
            lambda: output.append(capfd.readouterr().err) or f":{port} until" in "".join(output),
            "it is named",
        )
        proxy = Cutting(service.address, every_s=600, port=port)
        assert [env.result(60).name for env in loading] == ["count", "talk"]
    lines = [
        line
        for line in "".join([*output, capfd.readouterr().err]).splitlines()
        if f":{port} until" in line
    ]
    assert len(lines) == 1 and re.match(
        r"waiting for a service at \S+ until \d\d:\d\d:\d\d .*refused( \(111\))?$", lines[0]
    )
    proxy.end()


def test_a_service_that_went_is_named_once_it_is_missed(service, monkeypatch, capfd):
    monkeypatch.setattr(connection, "NOWHERE_S", 0.2)
    proxy, output = Cutting(service.address, every_s=600), []
    url = f"grpc://{proxy.address}/count"
    env, held = load_env(url), client.parse(url).connection
    proxy.end()
    wait_until(lambda: held.down_s and held.loop.time() - held.down_s > 1.5, "nobody misses it")
    assert proxy.address not in capfd.readouterr().err
    with ThreadPoolExecutor() as pool:
        loading = pool.submit(load_env, url)
        wait_until(
            lambda: (
                output.append(capfd.readouterr().err) or f"{proxy.address} until" in "".join(output)
            ),
            "it is named",
        )
        monkeypatch.setenv("LOCAL_RANK", "1")
        held._tell(60.0)
        assert proxy.address not in capfd.readouterr().err  # Another rank of the machine prints it.
        proxy = Cutting(service.address, every_s=600, port=int(proxy.address.rpartition(":")[2]))
        assert loading.result(60).max_turns == env.max_turns
    proxy.end()


SLOW = COUNT.replace('state["turns"] += 1', 'state["turns"] += 1; await asyncio.sleep(0.15)')


def test_a_run_whose_workers_die_finishes_and_what_it_reports_adds_up(tiny_model, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    service = Service(tmp_path / "slow.py", "--workers", "2")
    over, killed = threading.Event(), []

    def kill() -> None:
        """Kills a worker that holds sessions, twice."""
        while not over.wait(0.7) and len(killed) < 2:
            busy = [
                worker
                for worker in service.workers()
                if any(load.sessions for load in worker.loads)
            ]
            for worker in busy[:1]:
                os.kill(worker.pid, signal.SIGKILL)
                killed.append(worker.name)

    killing = threading.Thread(target=kill)
    killing.start()
    try:
        url = service.url("slow")
        flags = words(
            "--model", tiny_model, f"--env_path {url} --max_tokens 3 --max_prompt_tokens 64 {STOP}"
        )
        more = "--tasks_per_step 4 --group_size 4 --num_steps 2 --rollout.max_failed_fraction 0.9"
        out = run(tmp_path / "out", flags, more)
    finally:
        over.set()
        killing.join()
        service.process.terminate()
        service.process.wait(60)
    rows = [trajectories(file) for file in sorted(out.glob("rollouts/step*.zst"))]
    assert [len(step) for step in rows] == [16, 16] and killed
    output = {line["step"]: line for line in metrics(out) if "rollout/policy/failed" in line}
    for number, step in enumerate(rows, 1):
        statuses = Counter(row["status"] for row in step)
        assert output[number]["rollout/policy/failed"] == statuses["failed"]
        scored = statuses["ok"] + statuses["truncated"]
        assert output[number]["rollout/policy/truncated_frac"] == pytest.approx(
            statuses["truncated"] / scored
        )
        for row in step:
            assert (row["reward"] is None) == (row["status"] == "failed")
            if row["status"] == "failed":
                assert re.search(
                    r"session [0-9a-f]{12}\.[0-9a-f]{16} is lost with its worker ", row["error"]
                )
    assert any(row["status"] == "failed" for step in rows for row in step)


def test_the_example_plays_with_nothing_but_grpc(examples, token):
    """In a process in which the library cannot be imported."""
    code = "import runpy, sys; sys.modules['rl_core'] = None; sys.argv = sys.argv[1:]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    script = ROOT / "scripts/grpc_client.py"
    argv = [
        sys.executable,
        "-c",
        code,
        str(script),
        "--address",
        examples.address,
        "--episodes",
        "2",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert printed[0] == "648 tasks" and printed.count('reward 1, of {"reward_fn": 1.0}') == 2
    asked = [line.partition(": ")[2] for line in printed if line.startswith("user: ")]
    output = [line.partition(": ")[2] for line in printed if line.startswith("tool: ")]
    assert [eval(product) for product in asked] == [int(text) for text in output] and len(
        output
    ) == 2
