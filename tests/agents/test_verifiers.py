"""Environments of the verifiers library at our endpoint. The library needs other versions of
packages than rl_core's tests, so these run in a separate environment (docs/environments.md)."""

from __future__ import annotations

import json
import os

import pytest
import stage
from kit import ROOT

from rl_core.environments.agents.rollout import Endpoints
from rl_core.environments.env_file import load_env

pytest.importorskip("verifiers.v1", reason="verifiers is not installed")

SUMS = """
import verifiers.v1 as vf

class SumsConfig(vf.TasksetConfig):
    kind: str = "sums"

class SumsData(vf.TaskData):
    answer: str

class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    def add(self, a: int, b: int) -> str:
        "Adds two numbers."
        return str(a + b)

class SumsTask(vf.Task[SumsData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def is_right(self, trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def num_turns(self, trace) -> float:
        return float(trace.num_turns)

class ToolTask(SumsTask):
    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())]

class BrokenTask(SumsTask):
    @vf.reward
    async def is_raised(self, trace) -> float:
        raise LookupError("no such sum")

class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self):
        kinds = {"sums": SumsTask, "tool": ToolTask, "broken": BrokenTask}
        for n in range(20):
            data = SumsData(prompt=f"{n} + {n}?", answer=str(2 * n))
            yield kinds[self.config.kind](data, self.config.task)

__all__ = ["SumsTaskset"]

# The library starts a tool's server as `python -m` of its module.
if __name__ == "__main__":
    Adder.run()
"""
# The library puts the server's name before the tool's.
CALL = '<tool_call>{"name": "adder_add", "arguments": {"a": 1, "b": 1}}</tool_call>'


@pytest.fixture
def sums(tmp_path, monkeypatch):
    """sums(kind) -> an environment of the library, as one of ours."""
    (tmp_path / "sums_taskset.py").write_text(SUMS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("VERIFIERS_ENV", "sums_taskset")

    def make(kind: str, **args):
        agent = {} if args else {"agent": {"harness": {"id": "null"}}}
        args |= {"taskset": {"kind": kind}, **agent}
        monkeypatch.setenv("VERIFIERS_ARGS", json.dumps(args))
        return load_env(str(ROOT / "envs/verifiers_env.py"))

    return make


def play_cast(env, max_tokens=200, max_turns=None, **replies):
    """Trajectories of one episode of the task 1 + 1."""
    actors = stage.cast(**replies)
    for actor in actors.values():
        actor.open_endpoint = Endpoints()
    limits = {"max_tokens": max_tokens, "max_turns": max_turns, "timeout_s": 300}
    return stage.run(env, actors, rows=[env.load_tasks("train")[1]], **limits)


def play(env, *replies, **limits):
    """The only trajectory of one episode of the task 1 + 1."""
    [trajectory] = play_cast(env, policy=list(replies), **limits)
    return trajectory


def test_tasks_are_divided_and_every_tenth_is_held_out(sums):
    env = sums("sums")
    rows = env.load_tasks("train")
    assert (len(rows), len(env.load_tasks("eval"))) == (18, 2)
    assert rows[1] == {"index": 1, "prompt": "1 + 1?"}


@pytest.mark.parametrize(
    "kind, replies, reward",
    [("sums", ["It is 2"], 1.0), ("sums", ["It is 3"], 0.0), ("tool", [CALL, "It is 2"], 1.0)],
)
def test_an_environment_plays_at_the_endpoint_and_scores(sums, kind, replies, reward):
    outcome = play(sums(kind), *replies)
    assert (outcome.error, outcome.reward) == ("", reward)
    assert outcome.metrics["num_turns"] == len(replies)
    assert [turn.is_fresh for turn in outcome.turns] == [True, False][: len(replies)]
    results = [message["content"] for message in outcome.messages if message["role"] == "tool"]
    assert results == (["2"] if kind == "tool" else [])


def test_a_reply_that_is_cut_off_is_scored_as_it_is(sums):
    outcome = play(sums("sums"), "It is 3, no, it is 2", max_tokens=7)
    assert (outcome.error, outcome.reward) == ("", 0.0)
    assert outcome.turns[0].completion.finish_reason == "length"
    assert outcome.messages[-1]["content"] == "It is 3"


def test_an_episode_without_turns_left_is_truncated_and_scored(sums):
    outcome = play(sums("tool"), CALL, "It is 2", max_turns=1)
    assert (outcome.status, outcome.error, outcome.reward) == ("truncated", "", 0.0)
    assert len(outcome.turns) == 1


def test_a_reward_that_raises_fails_its_episode_with_the_reason(sums):
    outcome = play(sums("broken"), "It is 2")
    assert (outcome.status, outcome.reward) == ("failed", None)
    assert "no such sum" in outcome.error


NULL = {"harness": {"id": "null"}}
USER_SIM = {"id": "user-sim", "assistant": NULL, "user": {"max_turns": 2}}


def test_an_environments_agents_are_played_by_the_actors_of_their_names(sums):
    env = sums("sums", **USER_SIM)
    replies = {"user": ["1 + 1?", "###DONE###"], "assistant": ["It is 2"]}
    failed, *_ = play_cast(env, **replies)
    assert "--actors.user.trainable false" in failed.error
    failed, *_ = play_cast(env, ann=["1"], ben=["2"])
    assert "the agents of sums_taskset are assistant, user" in failed.error
    # One actor plays both agents; the library never trains its user.
    [trained] = play_cast(env, policy="###DONE### is not 2")
    assert (trained.player, trained.reward) == ("assistant", 1.0)
    assert trained.metrics["user_turns"] == 2
    assert "USER" not in str(trained.messages)
