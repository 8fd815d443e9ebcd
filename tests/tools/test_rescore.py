"""rl-core rescore: rewards of stored episodes by a changed file, and what reads them."""

from __future__ import annotations

import json
import random
from itertools import islice

import pytest
import stage
import yaml
from kit import LETTERS, ROOT, STOP, run, steps, weights, words

from rl_core.data.row_files import read_json
from rl_core.data.tables import read_rewards
from rl_core.engines.scripted import ScriptedActor, plain_chat
from rl_core.environments.env_file import load_env
from rl_core.run.saving.run_files import write_trajectories
from rl_core.tools import replay
from rl_core.tools.cli import main
from rl_core.tools.plot import curves_of
from rl_core.tools.rescore import facts as facts_of
from rl_core.tools.viewer.data import RunFolder
from rl_core.types import Trajectory


class Varied(ScriptedActor):
    """An actor that says its replies in an order that differs between episodes."""

    def bind_episode(self, params, seed, session, max_turns=0):
        replies = random.Random(seed).sample(self.replies, len(self.replies))
        same = {"name": self.name, "chat": self.chat, "is_trainable": self.is_trainable}
        actor = ScriptedActor(replies=replies, **same)
        return actor.bind_episode(params, seed, session, max_turns)


def stored(out, path, rows, replies, actors=("policy",), frozen=(), group_size=4):
    """(folder of a run with the played episodes of step 1, their trajectories)."""
    env = load_env(str(path))
    cast = {
        name: Varied(name=name, chat=plain_chat(), replies=replies, is_trainable=name not in frozen)
        for name in (*actors, *frozen)
    }
    played = stage.run(
        env, cast, rows=rows, group_size=group_size, batch="train/000000", max_tokens=400
    )
    config = {"env_path": str(path), "num_steps": 1, "out": str(out)}
    config["actors"] = {
        name: {"model": "none", "train": name not in frozen} for name in (*actors, *frozen)
    }
    (out / "rollouts").mkdir(parents=True)
    (out / "config.yaml").write_text(yaml.safe_dump(config))
    write_trajectories(out / "rollouts/step_000001.jsonl.zst", played)
    return out, played


def rescored(capsys, out, *flags) -> tuple[dict, list[dict]]:
    """(the report, the lines of the file)."""
    capsys.readouterr()
    assert main(words("rescore", out, "--json", *flags)) == 0, capsys.readouterr().err
    report = json.loads(capsys.readouterr().out)
    return report, list(read_json(out / "rescored.jsonl.zst"))


def scores(items) -> list[tuple]:
    names = ("reward", "reward_parts", "turn_rewards", "status")
    rows = (item if isinstance(item, dict) else vars_of(item) for item in items)
    return [tuple(row[name] for name in names) for row in rows]


def vars_of(t) -> dict:
    return {name: getattr(t, name) for name in t.__slots__}


# Environment -> (actors, text in a refusal; "" if the rewards are computed).
SAME = {
    "calculator code code_contest count_shapes countdown instructions math_answer "
    "picture_questions search_qa sort_digits summarise translate word_problems": ("policy", ""),
    "referential_game": ("alice bob", ""),
    "sort_two_ways": ("up down", ""),
    "collaborate": ("alice bob", "reads turns of other actors, or messages of interact()"),
    "agentbench_shop agentbench_db tool_use": ("policy", "reads `state`"),
    "drawn_maze maze": ("policy", "interact() gave a reward while"),
    "openai_agent": ("policy", "reads `result`"),
    "harbor tic_tac_toe": ("policy", "rollout() scores its episodes itself"),
}


# Replies that earn something, where a column is not one.
REPLIES = [
    "<answer>13+14</answer>",
    "<answer>Gobeto</answer>",
    "- One bicycle\n- was\n- old",
    "print(sum(map(int, input().split())))",
]


@pytest.mark.parametrize(
    "name, actors, says",
    [
        pytest.param(name, *row, marks=[pytest.mark.slow] if name == "picture_questions" else [])
        for names, row in SAME.items()
        for name in names.split()
    ],
)
def test_a_file_gives_the_rewards_that_it_gave_or_says_why_not(
    name, actors, says, tmp_path, capsys
):
    path = ROOT / f"envs/{name}.py"
    rows = list(islice(load_env(str(path)).load_tasks("train"), 1 if says else 2))
    replies = [str(v) for row in rows for v in row.values() if not isinstance(v, (list, dict))]
    out, played = stored(
        tmp_path / "run", path, rows, [*replies, *REPLIES * 3], actors.split(), (), 8
    )
    if says:
        assert main(words("rescore", out, "--env_path", path)) == 1
        assert says in capsys.readouterr().err
        return
    _, lines = rescored(capsys, out, "--env_path", path)
    assert not any(t.status == "failed" for t in played), played[0].error
    assert scores(lines) == scores(played)
    assert name == "referential_game" or max(t.reward for t in played) > 0


CASES = """
import asyncio
from rl_core import reward
from rl_core.rewards import together

MAX = 3

def load_tasks(split):
    return [{"prompt": f"{n} and {n * 7 % 10}", "answer": str(n)} for n in range(3)]

@together(size=4, wait_s=0.01)
async def lengths(texts):
    return [len(text) for text in texts]

async def reward_fn(completion, answer, messages, prompt):
    if completion == "raise":
        raise KeyError(completion)
    length = await lengths(completion)
    return {"length": length / MAX, "right": float(completion == answer), "some": None if length > 2 else 0.25}

@reward(weight=0.5)
def polite(completion, **columns):
    return len(columns["prompt"]) * 0.1

def group_reward_fn(trajectories):
    return [t.reward + n / 8 for n, t in enumerate(trajectories)]
"""
ROWS = [{"prompt": f"{n} and {n * 7 % 10}", "answer": str(n)} for n in range(3)]
SAID = ["0", "1", "2", "no", "raise", "many words"]


@pytest.mark.parametrize(
    "old, new, flags",
    [
        ("MAX = 3", "MAX = 3", ""),
        ("* 0.1", "* 0.2", ""),
        ("float(completion == answer)", "float(completion != answer)", ""),
        ("n / 8", "1 / (n + 1)", ""),
        ("MAX = 3", "MAX = 7", "--set MAX=7"),
        ('completion == "raise"', 'completion in ("raise", "no")', ""),
        ('completion == "raise"', "False", ""),
    ],
    ids=["same", "weighted", "part", "group", "set", "raises", "mended"],
)
def test_a_changed_file_gives_the_rewards_of_a_run_that_played_with_it(
    old, new, flags, tmp_path, capsys
):
    files = tmp_path / "old/cases.py", tmp_path / "new/cases.py"
    for file, text in zip(files, (CASES, CASES.replace(old, new)), strict=True):
        file.parent.mkdir()
        file.write_text(text)
    out, before = stored(tmp_path / "run", files[0], ROWS, SAID)
    _, after = stored(tmp_path / "other", files[1], ROWS, SAID)
    report, lines = rescored(capsys, out, "--env_path", files[0 if flags else 1], flags)
    failed = [t.status == "failed" for t in before]
    assert any(failed) and not all(failed)
    for line, t in zip(lines, before, strict=True):
        assert line["before"] == t.reward
        assert t.status != "failed" or (line["status"], line["error"]) == ("failed", t.error)
    if new == "False":  # Episodes that failed in the run have rewards in the other alone.
        without = {t.group_id for t in before if t.status == "failed"}
        lines = [line for line in lines if line["group_id"] not in without]
        after = [t for t in after if t.group_id not in without]
        assert lines and scores(lines) == scores(after)
        return
    assert scores(lines) == scores(after)
    live = [(b, a) for b, a in zip(before, after, strict=True) if None not in (b.reward, a.reward)]
    [facts] = report["actors"]
    assert facts["changed_episodes"] == sum(b.reward != a.reward for b, a in live)
    assert facts["parts"]["reward"]["after"] == pytest.approx(
        sum(a.reward for _, a in live) / len(live)
    )
    assert (facts["failed"], facts["failed_before"]) == (
        sum(t.status == "failed" for t in after),
        sum(failed),
    )
    assert sum(facts["failures"].values()) == facts["failed"]
    largest = max(abs(a.reward - b.reward) for b, a in live)
    for first in facts["most_changed"][:1]:
        assert abs(first["after"] - first["before"]) == largest


def test_groups_that_gain_or_lose_signal_and_signs_are_counted(tmp_path, capsys):
    file = tmp_path / "cases.py"
    text = "def load_tasks(split):\n    return [{{'prompt': str(n)}} for n in range(3)]\n"
    text += "def reward_fn(completion, prompt):\n    return {}\n"
    by_length = "len(completion) * int(prompt[0]['content'])"  # No signal in the first group.
    file.write_text(text.format(by_length))
    rows = [{"prompt": str(n)} for n in range(3)]
    out, before = stored(tmp_path / "run", file, rows, ["a", "bcd"], group_size=6)
    # The lengths differ in each group, or the test has no sense.
    assert all(
        len({t.messages[1]["content"] for t in before if t.task_id == f"train/{n}"}) == 2
        for n in range(3)
    )
    file.write_text(text.format("(2 - int(prompt[0]['content'])) * -len(completion)"))
    [facts] = rescored(capsys, out, "--env_path", file)[0]["actors"]
    names = ("groups", "changed_groups", "gain_signal", "lose_signal", "flipped_advantages")
    # Groups: 0 -> -2 len gains; len -> -len turns all; 2 len -> 0 loses.
    assert [facts[name] for name in names] == [3, 3, 1, 1, 6]
    # 42 is the mean. Its advantage is 1e-17 in steps of 1/500, and -1e-17 in steps of 1/400.
    rewards = [38, 42, 36, 52]
    old, new = ([Trajectory(index=r, reward=r / n) for r in rewards] for n in (500, 400))
    assert facts_of(list(zip(old, new, strict=True)))["flipped_advantages"] == 0


def test_steps_are_those_between_both_ends(tmp_path, capsys):
    file = tmp_path / "cases.py"
    file.write_text(f"WEIGHT = 0.5\n{LETTERS}")
    out, played = stored(tmp_path / "run", file, [{"prompt": "0 and 0"}], ["a", "b"])
    for step in (2, 3):
        write_trajectories(out / f"rollouts/step_00000{step}.jsonl.zst", played)
    folder = RunFolder(out)
    for chosen, numbers in {"2": "2", "2:": "23", ":2": "12", "2:3": "23"}.items():
        _, lines = rescored(capsys, out, "--env_path", file, "--step", chosen)
        assert sorted({line["file"][10] for line in lines}) == list(numbers)
        folder.refresh()  # The viewer reads a file that has changed.
        shown = {str(e.step) for e in folder.entries if e.rescored is not None}
        assert sorted(shown) == list(numbers)
    for flags, says in {
        "--step 5:7": " --step 5:7: no episodes",
        "--eval": "run: no episodes",
        "--set WEIGHT=abc": "WEIGHT=abc: WEIGHT of ",
        "--set WEIGHT=true": "cases.py is 0.5; give a value of type float",
        "--out x.jsonl": "--out x.jsonl: the rewards are compressed; name a file *.jsonl.zst",
    }.items():
        assert main(words("rescore", out, "--env_path", file, flags)) == 1
        assert says in capsys.readouterr().err


INTERACT = (
    LETTERS
    + """
max_turns = 2
def interact(completion):
    return {"messages": [{"role": "user", "content": "more"}], "reward": len(completion)}
"""
)
OF_STATE = """
from rl_core import reward

def start(task):
    return []

@reward
def kept(state):
    return len(state) + 0.5
"""
STATE = (
    LETTERS
    + OF_STATE
    + """
max_turns = 2
def interact(state):
    state.append(1)
    return [{"role": "user", "content": "more"}]
"""
)
AGENT = (
    LETTERS
    + """
from openai import AsyncOpenAI
from rl_core import reward

async def agent(llm, task):
    async with AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        done = await client.chat.completions.create(model="policy", messages=task.messages)
    return len(done.choices[0].message.content)

@reward
def kept(result):
    return result
"""
)
PAIR = LETTERS + "turns = 'bob -> alice -> bob'\n"


@pytest.mark.parametrize(
    "text, changed, frozen, says",
    [
        (LETTERS, "(completion, gold):", (), "reward_fn() asks for 'gold'"),
        (LETTERS.replace("range(8)", "range(7, -1, -1)"), "", (), "its prompt is not the one of train/0"),
        (LETTERS.replace("range(8)", "range(0, 1)"), "", (), "the rows have no such task"),
        (INTERACT, "", (), "interact() gave a reward while the episode was played; --force"),
        (STATE, "", (), "kept() reads `state`, which is not stored; --force"),
        (LETTERS + OF_STATE, "", (), ""),
        (AGENT, "", (), "kept() reads `result`, which is not stored; --force"),
        (PAIR, "(messages, completion):", ("alice",), "reads turns of other actors"),
        (PAIR, "(actor, completion):", ("alice",), ""),
    ],
    ids=["column", "order", "row", "interact", "state", "start", "agent", "frozen", "own-turns"],
)  # fmt: skip
def test_what_cannot_be_known_is_refused_by_name(text, changed, frozen, says, tmp_path, capsys):
    file = tmp_path / "cases.py"
    file.write_text(text.replace("range(7, -1, -1)", "range(8)").replace("range(0, 1)", "range(8)"))
    rows = load_env(str(file)).load_tasks("train")[:3]
    actors = ("bob",) if "turns" in text else ("policy",)
    out, played = stored(tmp_path / "run", file, rows, ["a", "b c", "def"], actors, frozen)
    file.write_text(text.replace("(completion):", changed or "(completion):"))
    status = main(words("rescore", out, "--env_path", file))
    assert (status, says in capsys.readouterr().err) == (bool(says), True)
    if not says:
        assert scores(read_json(out / "rescored.jsonl.zst")) == scores(played)
    if "--force" in says:
        file.write_text(file.read_text().replace("/ 1000", "/ 2000"))
        report, lines = rescored(capsys, out, "--env_path", file, "--force")
        [name] = report["left_out"]
        for line, t in zip(lines, played, strict=True):
            assert line["kept"] == [name] and {*line["reward_parts"]} == {name, "reward_fn"}
            kept, new = t.reward_parts[name], t.reward_parts["reward_fn"] / 2
            assert line["reward"] == pytest.approx(kept + new)
            assert sum(line["turn_rewards"] or [line["reward"]]) == pytest.approx(line["reward"])


JUDGED = LETTERS.replace("(completion)", "(completion, actors)", 1) + "turns = 'policy'\n"
JUDGED = JUDGED.replace(
    "return sum(map(ord, completion))",
    """
    reply = await actors["judge"].respond(completion, max_tokens=5)
    return sum(map(ord, completion + reply.text))""".strip(),
)
FLAGS = (
    "--actors.policy.model {model} --actors.judge.model {other} --actors.judge.train false "
    "--max_tokens 10 --max_prompt_tokens 40 --tasks_per_step 2 --group_size 4 --optim.lr 1e-2 "
    f"--num_steps 1 --eval_every 1 --eval.num_tasks 2 --eval.samples 2 --deterministic {STOP} --env_path"
)


def test_a_step_replayed_with_new_rewards_has_the_weights_of_such_a_run(places, tmp_path, capsys):
    files = tmp_path / "old/judged.py", tmp_path / "new/judged.py"
    changed = JUDGED.replace("completion + reply.text", "reply.text[:2] + completion[:3]")
    for file, text in zip(files, (JUDGED, changed), strict=True):
        file.parent.mkdir()
        file.write_text(text)
    old, new = (
        run(tmp_path / f"run{n}", FLAGS.format(**places), file) for n, file in enumerate(files)
    )
    name = "step_000001.jsonl.zst"
    _, same = rescored(capsys, old, "--env_path", files[0])
    assert scores(same) == scores(read_json(old / "rollouts" / name))
    _, held_out = rescored(capsys, old, "--eval --env_path", files[0])
    played = {f.name: list(read_json(f)) for f in (old / "rollouts").glob("eval_*.zst")}
    assert len(played) == 4 and len(held_out) == sum(map(len, played.values()))
    for file, rows in played.items():
        assert scores(line for line in held_out if line["file"] == file) == scores(rows)
    _, lines = rescored(capsys, old, "--env_path", files[1])
    assert scores(lines) == scores(read_json(new / "rollouts" / name)) != scores(same)
    rewards = old / "rescored.jsonl.zst"
    assert main(words("replay", old, "--json --rewards", rewards)) == 0
    replayed = json.loads(capsys.readouterr().out)["replayed"]
    for key in ("learn/policy/loss", "learn/policy/grad_norm"):
        assert replayed[key] == steps(new)[0][key] != steps(old)[0][key]
    learned = weights_after(old, rewards)
    assert all(learned[key].equal(value) for key, value in weights(new).items())
    assert not all(learned[key].equal(value) for key, value in weights(old).items())
    # The viewer's index, and the curves of the plot.
    folder = RunFolder(old)
    folder.refresh()
    entries = [e for e in folder.entries if e.kind == "train"]
    assert [e.rescored for e in entries] == [line["reward"] for line in lines]
    curve = curves_of(rewards)["reward"]["policy after"]
    mean = sum(line["reward"] for line in lines) / len(lines)
    assert curve == [(1, pytest.approx(mean))]
    parts = [row["reward_parts"]["reward_fn"] for row in read_json(old / "rollouts" / name)]
    curve = curves_of(rewards)["part reward_fn"]["policy before"]
    assert curve == [(1, pytest.approx(sum(parts) / len(parts)))]
    assert main(words("replay", new, "--rewards", rewards)) == 0  # The same trajectories.
    rows = read_rewards(rewards)[name]
    write_trajectories(rewards, rows[1:])
    assert main(words("replay", old, "--rewards", rewards)) == 1
    assert "not the trajectories of" in capsys.readouterr().err
    write_trajectories(rewards, [row | {"reward": None} for row in rows])
    assert main(words("plot", rewards)) == 1
    assert "no rewards to draw; all its trajectories failed" in capsys.readouterr().err


def weights_after(out, rewards) -> dict:
    """The weights after step 1 with other rewards, by the functions of rl-core replay."""
    from rl_core.distributed import close_ranks
    from rl_core.run.plan.environments import load_envs
    from rl_core.run.plan.plan import plan_learning
    from rl_core.run.process.joining import init_ranks

    config, _ = replay.read_flags(out, [])
    plan = plan_learning(*load_envs(config))
    ranks = init_ranks(60, plan.mesh)
    learners = replay.load_learners(plan, ranks, None)
    parts, trajectories = replay.read_step([out / "rollouts/step_000001.jsonl.zst"], ranks)
    replay.set_rewards(parts, rewards)
    replay.learn(plan, learners, trajectories, 1, ranks)
    [model] = learners["policy"].models()
    close_ranks(ranks)
    return model.hf.state_dict()
