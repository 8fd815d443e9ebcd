"""Groups of episodes: failures, deadlines, metrics, engines that die."""

from __future__ import annotations

import re

import pytest
from stage import ROW, RuleEngine, actor, cast, chat_of, run

from rl_core.run.evaluation.episode_metrics import rollout_metrics
from rl_core.sampling.engine import EngineDied
from rl_core.types import RunError


def test_metrics_of_an_actor_count_groups_by_player(env_of):
    env = env_of("""
        async def rollout(task, actors):
            first, second = await actors["bob"].respond(task.messages, n=2)
            return [first.trajectory(float(first.text), player="first"), second.trajectory(1.0, player="second")]
    """)
    metrics = rollout_metrics(
        run(env, cast(bob=lambda p, s: str(s % 97)), group_size=4, rows=[ROW] * 2)
    )
    assert metrics["zero_signal_frac"].value == 0.5
    assert metrics["turns_mean"].value == 1 and metrics["failed"].value == 0


def test_an_episode_counts_once_however_many_trajectories_it_leaves(env_of):
    env = env_of("""
        turns = "bob -> alice"
        def reward_fn(task):
            if task.id == "train/0": raise ValueError("no")
            return 1
    """)
    rows = [ROW | {"n": n} for n in range(4)]
    played = run(env, cast(bob="B", alice="A"), rows=rows, max_failed=0.25)
    assert [t.columns["n"] for t in played] == list("00112233")
    with pytest.raises(RunError, match="1 of 4 episodes of train/0 failed"):
        run(env, cast(bob="B", alice="A"), rows=rows, max_failed=0.2)


@pytest.mark.parametrize("limit", [0.0, 0.5, 1.0])
def test_a_step_whose_episodes_all_failed_ends_the_run(env_of, limit):
    env = env_of("def reward_fn(): raise ValueError('no')")
    with pytest.raises(RunError, match=r"8 of 8 episodes of train/0 failed.*ValueError: no"):
        run(env, cast(policy="a"), group_size=2, rows=[ROW] * 4, max_failed=limit)


def test_256_conversations_at_once_end_whatever_their_hooks_do(env_of):
    env = env_of(
        """
        import asyncio, time
        turns = "bob -> alice -> carol -> (bob/alice/carol)*3"
        def kind(task):
            n = int(task.id.split("/")[1])
            return 0 if n % 8 == 2 and n > 16 else n % 8  # two tasks hang: their threads are missed for as long
        def interact(task, messages):
            if kind(task) == 1: raise ValueError("broken interact")
            if kind(task) == 2 and len(messages) == 4: time.sleep(30)
            return [{"role": "user", "content": "go up"}]
        async def reward_fn(task, actors, actor):
            if kind(task) == 3: await asyncio.sleep(60)
            if kind(task) == 4: return float("nan")
            reply = await actors["carol"].respond("how good?", max_tokens=5)
            return len(reply.text)
        def group_reward_fn(trajectories, task):
            if kind(task) == 5: return []
            return [1.0] * len(trajectories)
        """,
        hook_timeout_s=2,
    )
    trajectories = run(
        env, cast(wait_s=0.02, bob="B", alice="A", carol="C"), group_size=4, rows=[ROW] * 64
    )
    reasons = {
        1: "broken interact",
        2: r"interact\(\) ran longer than 2 s",
        3: r"reward_fn\(\) ran longer than 2 s",
        4: "is nan; a reward must be a finite",
        5: r"group_reward_fn\(\) returned is \[\]",
    }
    assert len({(t.group_id, t.index) for t in trajectories}) == 256
    for t in trajectories:
        number = int(t.task_id.split("/")[1])
        kind = number % 8
        if kind in reasons and (kind != 2 or number < 16):
            assert (t.status, t.reward) == ("failed", None) and re.search(reasons[kind], t.error), (
                kind,
                t.error,
            )
        else:
            assert (t.status, t.reward) == ("ok", 2.0)


def test_seeds_differ_by_place_and_repeat_exactly(env_of):
    env = env_of("turns = '(bob/alice)*6'\ndef reward_fn(messages): return 1")

    def played(**which):
        actors = cast(bob="B", alice="A")
        orders = [
            [m["content"] for m in t.messages]
            for t in run(env, actors, group_size=2, rows=[ROW] * 4, **which)
        ]
        seeds = sorted(seed for a in actors.values() for _, seed, _ in a.engine.asked)
        assert len(set(seeds)) == len(seeds) == 2 * 4 * 6
        return seeds, orders

    seeds, orders = played(batch="train/0")
    assert played(batch="train/0") == (seeds, orders)
    for other_seeds, other_orders in (played(batch="train/1"), played(batch="train/0", seed=1)):
        assert not set(seeds) & set(other_seeds) and other_orders != orders


class MortalEngine(RuleEngine):
    """Dies at some requests, with all that run, until it is woken."""

    def __init__(self, chat, rule, dies_at: set[int], stays_dead: bool = False):
        super().__init__(chat, rule, wait_s=0.01)
        self.dies_at, self.stays_dead, self.is_dead, self.num_revived = (
            dies_at,
            stays_dead,
            False,
            0,
        )

    async def generate(self, prompt_ids, params, *, seed, session="", adapter="", unfinished=None):
        self.is_dead |= len(self.asked) in self.dies_at
        completion = await super().generate(prompt_ids, params, seed=seed, session=session)
        if self.is_dead:
            raise EngineDied("engine bob has died (exit status -9)")
        return completion

    async def wake(self):
        if self.stays_dead:
            raise EngineDied("engine bob did not start")
        self.num_revived += self.is_dead
        self.is_dead = False


MORTAL = """
    turns = "bob*2"
    async def reward_fn(messages, actors):
        return float((await actors["bob"].respond("how good?")).text)
"""


def played(env, engine, num_rows):
    return run(env, {"bob": actor("bob", engine)}, group_size=4, rows=[ROW] * num_rows)


@pytest.mark.parametrize("dies_at", [{5}, {0, 21, 22, 60}])
def test_groups_of_an_engine_that_died_are_done_again(env_of, dies_at):
    mortal = MortalEngine(chat_of(), lambda p, s: str(s % 97), dies_at)
    again = played(env_of(MORTAL), mortal, 6)
    once = played(env_of(MORTAL), RuleEngine(chat_of(), lambda p, s: str(s % 97)), 6)
    assert mortal.num_revived >= min(2, len(dies_at)) and len(mortal.asked) > 6 * 4 * 3
    assert [t.messages for t in again] == [t.messages for t in once] and len(again) == 24
    assert [t.reward for t in again] == [t.reward for t in once] and {t.status for t in again} == {
        "ok"
    }


def test_an_engine_that_cannot_be_revived_ends_the_run(env_of):
    with pytest.raises(RunError, match="cannot be started again: engine bob did not start"):
        played(env_of(MORTAL), MortalEngine(chat_of(), lambda p, s: "1", {3}, stays_dead=True), 2)
    with pytest.raises(
        RunError, match=r"died 3 times in one group of train/0: engine bob has died"
    ):
        played(env_of(MORTAL), MortalEngine(chat_of(), lambda p, s: "1", set(range(1000))), 2)
