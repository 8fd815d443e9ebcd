"""Unfinished episodes in a checkpoint: the resumed run samples nothing twice."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from kit import metrics, rewind, run, trajectories, words
from stage import ROW, RuleEngine, actor, chat_of, make_groups, saying
from test_async import UNEVEN
from test_engine_contract import needs_sglang
from test_runs import assert_same_weights, lasting

from rl_core.config import RolloutConfig
from rl_core.data.task_rows import make_task
from rl_core.run.saving.checkpoint import facts_of
from rl_core.run.saving.run_files import jsonable
from rl_core.sampling.episode_runner import EpisodeRunner
from rl_core.sampling.resumable_rollouts import EpisodeReplay, Replays, read_groups
from rl_core.types import Completion, SamplingParams


@pytest.fixture
def flags(tmp_path, tiny_model):
    (tmp_path / "uneven.py").write_text(UNEVEN)
    argv = words(
        "--model",
        tiny_model,
        "--env_path",
        tmp_path / "uneven.py",
        "--data.shuffle false --max_tokens 8",
    )
    sizes = (
        "--max_prompt_tokens 16 --tasks_per_step 4 --group_size 4 --optim.lr 1e-3 --max_staleness 2"
    )
    return words(argv, sizes, "--num_steps 6 --save_every 2 --keep_checkpoints 0")


def turns_of(group: dict) -> dict[tuple[str, int], list[list[dict]]]:
    """(group, episode) -> completions of each of its conversations that were under way, in the
    order of turns."""
    ended = [
        *group["trajectories"],
        *(t for e in group["episodes"].values() for t in e["trajectories"] or ()),
    ]
    turns_by_group = {
        (t["group_id"], t["index"]): [turn["completion"] for turn in t["turns"]] for t in ended
    }
    for episode in group["episodes"].values():
        for turn, answer in episode["answers"].items():
            batch, number, step, index, *_ = turn.split("/")
            turns_by_group.setdefault((f"{batch}/{number}/{step}", int(index)), []).append(
                answer["completion"]
            )
    return turns_by_group


def is_start(kept: dict, full: dict) -> bool:
    names, num = ("token_ids", "logprobs", "kept_ids"), len(kept["token_ids"])
    return all(kept[name] == full[name][:num] for name in names) and (
        not num or kept["policy_version"] == full["policy_version"]
    )


RUNS = [
    (2, ""),
    (2, "--rollout_ranks 1 --sampling.top_k 5"),
    pytest.param(1, "--engine sglang", marks=needs_sglang),
]


@pytest.mark.parametrize("ranks, more", RUNS)
def test_what_was_sampled_before_a_checkpoint_is_in_the_run_that_goes_on(
    ranks, more, flags, tmp_path
):
    more = f"{more} --max_tokens 60"
    out = run(tmp_path / "run", flags, more, ranks=ranks)
    checkpoint = rewind(out, 2)
    kept = read_groups(checkpoint, range(99), 0).values()
    turns_by_key = {key: turns for group in kept for key, turns in turns_of(group).items()}
    completions = [completion for turns in turns_by_key.values() for completion in turns]
    assert sum(bool(c["finish_reason"]) for c in completions) > 4
    assert any(c["token_ids"] and not c["finish_reason"] for c in completions), (
        "turns that were cut off in the middle"
    )
    run(out, flags, more, "--resume", ranks=ranks)
    played = {}
    for file in sorted((out / "rollouts").glob("step_*")):
        played |= {
            (t["group_id"], t["index"]): [turn["completion"] for turn in t["turns"]]
            for t in trajectories(file)
        }
    for key, turns in turns_by_key.items():
        assert all(is_start(*pair) for pair in zip(turns, played[key], strict=False)), key


def test_a_checkpoint_without_open_tasks_plays_them_again(flags, tmp_path):
    out = run(tmp_path / "run", flags, "--deterministic true")
    checkpoint = rewind(out, 2)
    [file] = checkpoint.glob("under_way*")
    file.unlink()
    manifest, state = (
        json.loads((checkpoint / f"{name}.json").read_text()) for name in ("manifest", "state")
    )
    del manifest["files"][file.name]
    (checkpoint / "state.json").write_text(json.dumps(state))
    manifest["files"]["state.json"] = facts_of(checkpoint / "state.json")
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    run(out, flags, "--resume")
    tasks = [
        t["task_id"]
        for step in range(1, 7)
        for t in trajectories(out / f"rollouts/step_{step:06d}.jsonl.zst")
    ]
    assert sorted(tasks) == sorted(f"train/{n}" for n in range(24) for _ in range(4))


def test_a_fixed_order_mixes_versions_and_repeats_bit_for_bit(flags, tmp_path):
    flags = words(flags, "--deterministic true --num_steps 5")
    one, two = (run(tmp_path / name, flags) for name in ("one", "two"))  # its hooks run in threads
    assert lasting(metrics(one)) == lasting(metrics(two))
    assert_same_weights(one, two)
    done = [
        turn["completion"]
        for file in (one / "rollouts").glob("step*")
        for t in trajectories(file)
        for turn in t["turns"]
    ]
    assert sum(bool(c["newer_versions"]) for c in done) > 4, (
        "turns that one version began and the next ended"
    )


ASKING = """
max_turns = 3
scored = []

async def interact(messages):
    return [{"role": "user", "content": f"{len(messages)}?"}]

async def reward_fn(messages):
    scored.append(messages)
    return 1.0
"""


def new_group(env):
    [group] = make_groups([make_task(dict(ROW), 0, env.name, "train")], 4)
    return group


def row_of(player, group) -> dict:
    return json.loads(json.dumps(player.replays.row_of(group), default=jsonable))


class Limited(RuleEngine):
    """Answers after a while, so that some episodes end before others; after `limit` requests it
    answers none."""

    limit: int | None = None
    num_waiting = 0

    async def generate(self, prompt_ids, params, *, seed, session="", adapter="", unfinished=None):
        if len(self.asked) == self.limit:
            self.num_waiting += 1
            await asyncio.Event().wait()
        return await super().generate(prompt_ids, params, seed=seed, session=session)


def test_a_group_that_goes_on_asks_only_what_nobody_has_answered(env_of):
    env, engine = env_of(ASKING), Limited(chat_of(), saying(["a", "b", "c"]), 0.01)
    actors, scored = (
        {"policy": actor("policy", engine)},
        env.rewards[0].function.__globals__["scored"],
    )

    player = EpisodeRunner({env.name: env}, actors, RolloutConfig(), replays=Replays())
    full = asyncio.run(player.play(new_group(env)))
    num_turns = len(engine.asked)

    async def until(num_answers: int) -> dict:
        """The group's row after num_answers turns, while others wait."""
        engine.asked.clear()
        engine.limit = num_answers
        group = new_group(env)
        task = asyncio.create_task(player.play(group))
        # Every episode has ended, or waits for an answer that does not come.
        num_ended = 0
        while engine.num_waiting + num_ended < group.size:
            await asyncio.sleep(0.001)
            row = row_of(player, group)
            num_ended = sum(bool(e["trajectories"]) for e in row["episodes"].values())
        task.cancel()
        engine.limit, engine.num_waiting = None, 0
        return row

    num_ended = 0
    for num_answers in range(1, num_turns, 2):
        row = asyncio.run(until(num_answers))
        known = [
            a
            for e in row["episodes"].values()
            for a in e["answers"].values()
            if a["completion"]["finish_reason"]
        ]
        ended = [t for e in row["episodes"].values() for t in e["trajectories"] or ()]
        engine.asked.clear(), scored.clear()
        player, group = (
            EpisodeRunner({env.name: env}, actors, RolloutConfig(), replays=Replays()),
            new_group(env),
        )
        player.replays.restore(group, row)
        again = asyncio.run(player.play(group))
        assert [t.turns for t in again] == [t.turns for t in full]
        assert [t.reward for t in again] == [t.reward for t in full]
        assert len(engine.asked) == num_turns - len(known) - sum(len(t["turns"]) for t in ended)
        assert len(scored) == 4 - len(ended), (
            "hooks of an episode that has ended are not called again"
        )
        num_ended += len(ended)
    assert num_ended


class Endpoint:
    """Says how often it was asked."""

    num_asked = 0

    async def chat(self, messages, tools, params, seed):
        self.num_asked += 1
        text = str(self.num_asked)
        done = Completion(
            token_ids=[], logprobs=[], text=text, finish_reason="stop", policy_version=-1
        )
        return {"role": "assistant", "content": text}, done


@pytest.mark.parametrize("has_tokens", [True, False])
def test_who_asks_otherwise_than_before_is_answered_anew(has_tokens):
    replies, record = iter("1234"), EpisodeReplay(("g", "0"), {}, None)
    bob = actor("bob", RuleEngine(chat_of(), lambda prompt, seed: next(replies)))
    if not has_tokens:
        bob = replace(bob, engine=Endpoint(), chat=None)

    def episode(*prompts) -> list[str]:
        """Replies to conversations with one label."""
        record.used.clear()
        params = SamplingParams(max_tokens=9)
        player = replace(bob.bind_episode(params, 0, "s"), replay=record)
        asked = [player.converse([{"role": "user", "content": p}], label="l") for p in prompts]
        return [asyncio.run(talk.respond()).text for talk in asked]

    assert episode("a", "a") == ["1", "2"], "two conversations of one label are two"
    assert episode("a", "a") == ["1", "2"]
    assert episode("b", "a") == ["3", "2"]
    assert episode("b") == ["3"] and list(record.answers) == ["s/l#0", "s/l#0~"]


SCALARS = """
import numpy
import torch

async def rollout(task, actors):
    reply = await actors["policy"].respond("x")
    found = reply.trajectory(torch.tensor(0.5), metrics={"a": numpy.float32(0.25), "b": torch.tensor(2)})
    found.turn_rewards = [numpy.float32(0.5)]
    return [found]
"""


def test_numbers_of_numpy_and_torch_are_the_same_after_a_checkpoint(env_of):
    env, engine = env_of(SCALARS), RuleEngine(chat_of(), saying(["a"]))
    group = new_group(env)
    player = EpisodeRunner(
        {env.name: env}, {"policy": actor("policy", engine)}, RolloutConfig(), replays=Replays()
    )
    group.trajectories = asyncio.run(player.play(group))
    again = new_group(env)
    player.replays.restore(again, row_of(player, group))
    assert again.trajectories == group.trajectories
    assert again.trajectories[0].metrics == {"a": 0.25, "b": 2}
