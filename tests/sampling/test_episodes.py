"""Comparisons and counts are over episodes: an episode with several conversations weighs as one."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import statistics
from pathlib import Path

import pytest
from kit import metrics, run, trajectories, words
from view_parts import trajectory, write_metrics, write_step

from rl_core.algorithms import PRESETS
from rl_core.data.episodes import baseline_groups, by_episode, episode_rewards
from rl_core.learning.advantages import group_advantages, turn_advantages
from rl_core.learning.signal import has_signal
from rl_core.run.curriculum import group_results
from rl_core.run.evaluation.episode_metrics import held_out_metrics, part_metrics, rollout_metrics
from rl_core.run.process.joining import init_ranks
from rl_core.tools.check import outcomes_of
from rl_core.tools.cli import main
from rl_core.tools.eval import scores
from rl_core.tools.viewer.data import RunFolder
from rl_core.tools.viewer.tokens import advantage_of
from rl_core.train import main as train
from rl_core.types import Trajectory

ROOT = Path(__file__).parents[2]
KINDS = ("group_mean", "group_norm", "group_norm_unbiased", "rloo", "none", "custom")
# Comprehensions over conversations that read rewards or texts, with the reason for each.
READERS = {
    "environments/agents/chat_completions.py usage": "tokens of one request's replies",
    "data/episodes.py episode_rewards": "the law itself",
    "data/image_families.py PixelCache.joined": "tokens of images",
    "data/tables.py load_rollouts": "keeps conversations by their own reward, of SFT rows",
    "sampling/episode.py Episode.score": "one conversation",
    "run/evaluation/episode_metrics.py part_metrics": "the mean over each episode's conversations, then over episodes",
    "run/evaluation/episode_metrics.py rollout_metrics": "the longest conversation, all tokens, and whether rewards differ at all",
    "run/running_baseline.py RunningBaseline.on_episodes": "the mean over each episode's conversations",
    "tools/check_online.py serve": "conversations of one session",
    "tools/check.py part_means": "gives the value to episode_means",
    "tools/check.py outcomes_of": "names of the parts",
    "tools/eval.py scores": "the mean over each episode's conversations, then over episodes",
    "tools/collect.py collect": "keeps conversations by their own reward",
    "tools/collect.py write_messages": "a row for each conversation",
    "tools/plot.py curves_of_rewards": "means by actor and part",
    "tools/rescore.py facts": "both rewards of a trajectory",
    "tools/stored_episodes.py Rescorer.check": "whether rewards can be known again",
    "tools/stored_episodes.py Rescorer.rescore": "groups as they were played",
    "tools/stored_episodes.py Rescorer.score_episode": "one episode",
    "tools/viewer/data.py RunFolder.read_rescored": "a column",
    "tools/show.py chosen": "conversations in order",
    "tools/show.py described": "one conversation",
    "tools/viewer/data.py matching": "conversations by their own reward",
    "tools/viewer/report.py spread": "whether rewards differ at all",
    "tools/viewer/tokens.py advantage_of": "those that have a reward",
    "run/evaluation/print_samples.py LogSamples.on_episodes": "one conversation",
}
LISTS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)
NAMES = {"reward", "reward_parts", "num_tokens"}


def readers(path: Path) -> set[str]:
    """The functions of a file that read, in a comprehension, what conversations earned or how long
    they are."""
    read_by = set()

    def visit(node: ast.AST, names: tuple[str, ...], is_list: bool) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names, is_list = (*names, node.name), False
        is_list = is_list or isinstance(node, LISTS)
        is_read = isinstance(node, ast.Attribute) and node.attr in NAMES
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            is_read = node.slice.value in NAMES
        if is_list and is_read:
            read_by.add(f"{path.relative_to(ROOT / 'rl_core').as_posix()} {'.'.join(names)}")
        for child in ast.iter_child_nodes(node):
            visit(child, names, is_list)

    visit(ast.parse(path.read_text(encoding="utf-8")), (), False)
    return read_by


def test_whatever_lists_rewards_is_known_to_keep_the_law():
    names = set().union(*map(readers, (ROOT / "rl_core").rglob("*.py")))
    unknown = sorted(names - READERS.keys())
    rule = (
        "take episode_rewards() or episode_means() of data/episodes.py, or say in READERS why it "
        "keeps the law"
    )
    assert not unknown, f"{unknown} list what conversations earned; {rule}"


def conversation(index: int, reward: float, **more) -> Trajectory:
    return trajectory(
        index, reward=reward, task_id="train/0", reward_parts={"right": reward}, **more
    )


def played(copies: int) -> list[Trajectory]:
    """A group of three episodes, of which the first, which is right, cut off and long, returned so
    many conversations."""
    long = {"status": "truncated", "metrics": {"tries": 5.0}}
    first = [conversation(0, 1.0, **long) for _ in range(copies)]
    for t in first:
        t.turns = t.turns * 2
    return [*first, conversation(1, 0.0, metrics={"tries": 2.0}), conversation(2, 0.25)]


def failed(copies: int) -> list[Trajectory]:
    """Trajectories of an episode that failed after its conversations."""
    return [conversation(3, 0.0, status="failed", error="no") for _ in range(copies)]


def values(metrics_: dict) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics_.items() if name != "tokens"}


def advantages(kind: str, turn_discount: float | None, copies: int) -> dict[int, list[float]]:
    """Episode -> the advantages of its turns, which all of its conversations have."""
    group = played(copies)
    row = dataclasses.replace(PRESETS["grpo"], advantage=kind, turn_discount=turn_discount)
    custom = (
        (lambda rewards: [r - statistics.median(rewards) for r in rewards])
        if turn_discount is None
        else list
    )
    values = {}
    for t, expected in zip(
        group, turn_advantages(group, [0.0] * len(group), row, custom), strict=True
    ):
        assert values.setdefault(t.index, expected) == pytest.approx(expected)
    return values


def viewed(copies: int, folder: Path) -> dict[int, float]:
    out = folder / str(copies)
    out.mkdir()
    write_metrics(out, [{"step": 1}])
    write_step(out, 1, played(copies))
    view = RunFolder(out)
    view.refresh()
    return {e.index: pytest.approx(advantage_of(view, e)) for e in view.entries}


def checked(copies: int) -> list[dict]:
    rows = outcomes_of({"plain": [*played(copies), *failed(copies)]})
    assert sum(row["episodes"] for row in rows) == 4
    return rows


COUNTERS = {
    **{f"advantage {kind}": lambda n, kind=kind: advantages(kind, None, n) for kind in KINDS},
    **{
        f"advantage of turns {kind}": lambda n, kind=kind: advantages(kind, 0.9, n)
        for kind in KINDS[:4]
    },
    "success rate and mean of a curriculum": lambda n: group_results(
        played(n), ["policy"], 1.0, init_ranks(60)
    ),
    "metrics of a step": lambda n: values(rollout_metrics([*played(n), *failed(n)])),
    "parts of the reward": lambda n: values(part_metrics(played(n))),
    "held-out scores": lambda n: values(held_out_metrics(played(n), "avg@3", "pass@3", 1.0)),
    "rl-core eval": lambda n: scores(played(1), [*played(n), *failed(n)], [1, 2], 3, 1.0),
    "rl-core check": checked,
}


@pytest.mark.parametrize("name", COUNTERS)
def test_an_episode_counts_the_same_however_many_conversations_it_returns(name):
    once, thrice = COUNTERS[name](1), COUNTERS[name](3)
    as_numbers = json.dumps(plain(once)), json.dumps(plain(thrice))
    assert as_numbers[0] == as_numbers[1]


def plain(values):
    """The same with numbers of ten digits."""
    if dataclasses.is_dataclass(values):
        return plain(
            {field.name: getattr(values, field.name) for field in dataclasses.fields(values)}
        )
    if isinstance(values, dict):
        return {str(name): plain(value) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [plain(value) for value in values]
    return f"{values + 0.0:.10g}" if isinstance(values, (int, float)) else values


def test_the_viewers_advantage_is_over_episodes_too(tmp_path):
    assert viewed(1, tmp_path) == viewed(3, tmp_path)


def test_conversations_of_one_episode_differ_by_what_each_earned():
    group = [conversation(0, 1.0), conversation(0, 0.5), conversation(1, 0.0)]
    episodes, shares = [0, 0, 1], [0.5, 0.5, 1.0]
    rewards = [t.reward for t in group]
    mean = (0.75 + 0.0) / 2
    variance = (0.5 * (1 - mean) ** 2 + 0.5 * (0.5 - mean) ** 2 + mean**2) / 2
    want = {
        "group_mean": [1 - mean, 0.5 - mean, -mean],
        "group_norm": [(r - mean) / math.sqrt(variance) for r in rewards],
        "group_norm_unbiased": [(r - mean) / math.sqrt(2 * variance) for r in rewards],
        "rloo": [1.0, 0.5, -0.75],
        "none": rewards,
    }
    for kind, expected in want.items():
        assert group_advantages(rewards, kind, None, episodes, shares) == pytest.approx(expected), (
            kind
        )
    seen = []
    got = group_advantages(
        rewards, "custom", lambda r: seen.extend(r) or [7.0, 8.0], episodes, shares
    )
    assert (seen, got) == ([0.75, 0.0], [7.0, 7.0, 8.0])
    assert has_signal(group[:2], PRESETS["dapo"]) and episode_rewards(group) == [0.75, 0.0]


@pytest.mark.parametrize("kind", KINDS)
def test_conversations_of_a_lone_episode_are_compared(kind):
    rewards, custom = [1.0, 0.0, 0.25], lambda r: [x - max(r) for x in r]
    alone = group_advantages(rewards, kind, custom, [0, 0, 0], [1 / 3] * 3)
    assert alone == pytest.approx(group_advantages(rewards, kind, custom)) and alone != [0.0] * 3


def test_each_turn_weighs_the_same_however_many_its_episode_has():
    """The baseline of turns is the mean over all turns of the group, whose episodes differ here."""
    row = dataclasses.replace(PRESETS["dr_grpo"], turn_discount=1.0)
    group = [
        conversation(0, 1.0, turn_rewards=[0.0, 1.0]),
        conversation(1, 0.0, turn_rewards=[0.0]),
    ]
    group[1].turns = group[1].turns[:1]
    advantages = turn_advantages(group, [0.0, 0.0], row, None)
    assert advantages == [pytest.approx([1 / 3, 1 / 3]), pytest.approx([-2 / 3])]


def test_a_group_has_signal_where_one_episode_alone_has_a_later_turn():
    row = dataclasses.replace(PRESETS["dapo"], turn_discount=1.0)
    group = [
        conversation(0, 1.0, turn_rewards=[1.0, 0.0]),
        conversation(1, 1.0, turn_rewards=[1.0]),
    ]
    group[1].turns = group[1].turns[:1]
    assert any(map(any, turn_advantages(group, [0.0, 0.0], row, None)))
    assert has_signal(group, row)


def test_episodes_are_told_apart_by_environment_group_actor_and_player():
    others = ({"env": "b"}, {"group_id": "b"}, {"actor": "b"}, {"player": "b"})
    trajectories = [
        trajectory(0, reward=1.0),
        *(trajectory(0, reward=1.0, **more) for more in others),
    ]
    assert by_episode(trajectories) == [[t] for t in trajectories] == baseline_groups(trajectories)
    twice = [trajectory(0, reward=1.0), trajectory(0, reward=0.0)]
    assert by_episode(twice) == [twice] == baseline_groups(twice)


@pytest.mark.parametrize(
    "rewards, differ",
    [
        ([0.3, 0.1 + 0.2], False),
        ([0.0, 0.1 + 0.2 - 0.3], False),
        ([1.0, 1.0 + 9e-7], False),
        ([1.0, 1.0 + 2e-6], True),
        ([5000.0, 5000.004], False),
        ([5000.0, 5000.006], True),
        ([-5000.0, -5000.004], False),
        ([1e-3, 1e-3 + 2e-6], True),
    ],
)
def test_rewards_that_differ_by_rounding_are_equal(rewards, differ):
    group = [conversation(n, reward) for n, reward in enumerate(rewards)]
    for kind in KINDS[:4]:
        assert any(group_advantages(rewards, kind)) == differ, kind
    for discount in (None, 0.9):
        assert (
            has_signal(group, dataclasses.replace(PRESETS["dapo"], turn_discount=discount))
            == differ
        )
    assert rollout_metrics(group)["zero_signal_frac"].value == (not differ)


SEVERAL = """
def load_tasks(split):
    return [{"prompt": f"{n} and {n * 7 % 10}"} for n in range(8)]

def task_weight(success_rate, mean_reward):
    return 1.0

async def rollout(task, actors):
    replies = await actors["policy"].respond(task.messages, n=3)
    is_good = sum(map(ord, replies[0].text)) % 2
    return [r.trajectory(float(is_good), metrics={"good": is_good}) for r in (replies if is_good else replies[:1])]
"""


def test_a_run_and_collect_count_episodes(places, tmp_path, capsys):
    (tmp_path / "several.py").write_text(SEVERAL)
    flags = words(
        "--model",
        places["model"],
        "--env_path",
        tmp_path / "several.py",
        "--max_tokens 8 --group_size 4",
    )
    flags += words(
        "--max_prompt_tokens 24 --tasks_per_step 4 --num_steps 1 --eval_every 1 --eval.samples 3"
    )
    out = run(tmp_path / "run", flags)
    last, step = [row for row in metrics(out) if "eval/several/avg@3" in row][-1], metrics(out)[1]

    rewards = by_task(out / "rollouts/step_000001.jsonl.zst")
    every = [r for group in rewards.values() for r in group]
    num_trajectories = len(trajectories(out / "rollouts/step_000001.jsonl.zst"))
    assert len(every) == 16 < num_trajectories, "some episodes returned three conversations"
    assert (
        step["rollout/policy/reward_mean"]
        == step["rollout/policy/good"]
        == pytest.approx(sum(every) / 16)
    )
    equal = sum(len(set(group)) == 1 for group in rewards.values())
    assert step["rollout/policy/zero_signal_frac"] == equal / 4 < 1

    [state] = out.glob("checkpoints/*/state.json")
    tried = json.loads(state.read_text())["curriculum"]["several"]["tried"]
    assert {f"train/{row}": values[1] for row, values in tried.items()} == pytest.approx(
        {task: sum(group) / 4 for task, group in rewards.items()}
    )
    sampled = by_task(out / "rollouts/eval_000001_sampled.jsonl.zst")
    assert last["eval/several/avg@3"] == pytest.approx(
        statistics.fmean(sum(g) / 3 for g in sampled.values())
    )
    assert last["eval/several/pass@3"] == pytest.approx(
        statistics.fmean(max(g) for g in sampled.values())
    )

    capsys.readouterr()
    assert (
        main(
            [
                "collect",
                str(places["model"]),
                *flags[2:-6],
                "--out",
                str(tmp_path / "rows"),
                "--num_tasks",
                "4",
            ]
        )
        == 0
    )
    rows = by_task(tmp_path / "rows/rollouts/step_000001.jsonl.zst")
    every = [r for group in rows.values() for r in group]
    assert f"kept 16 of 16  reward {sum(every) / 16:.4g}" in capsys.readouterr().out


JUDGED = """
def load_tasks(split):
    return [{"prompt": str(n)} for n in range(8)]

async def rollout(task, actors):
    reply = await actors["policy"].respond(task.messages)
    verdict = await actors["judge"].respond(reply.text)
    return [reply.trajectory(1.0), verdict.trajectory(float(sum(map(ord, verdict.text))))]
"""


def test_a_group_is_refilled_unless_actors_that_learn_differ(places, tmp_path):
    (tmp_path / "judged.py").write_text(JUDGED)
    models = (
        f"--actors.policy.model {places['model']} --actors.judge.model {places['model']} "
        "--actors.judge.train false"
    )
    flags = words(
        models,
        "--env_path",
        tmp_path / "judged.py",
        "--max_tokens 8 --max_prompt_tokens 40 --group_size 2",
    )
    out = tmp_path / "run"
    flags += words("--tasks_per_step 2 --num_steps 1 --algo.dynamic_sampling_rounds 1 --out", out)
    assert train(flags) == 0
    [row] = metrics(out)
    rewards = {
        t["reward"]
        for t in trajectories(out / "rollouts/step_000001.jsonl.zst")
        if t["actor"] == "judge"
    }
    assert len(rewards) > 2, "the judge's episodes differ"
    assert row["rollout/groups_missing"] == 2 and row["rollout/policy/zero_signal_frac"] == 1


def by_task(file: Path) -> dict[str, list[float]]:
    """Task -> the reward of each of its episodes, whose conversations earn the same here."""
    means: dict[str, dict[int, float]] = {}
    for row in trajectories(file):
        means.setdefault(row["task_id"], {})[row["index"]] = row["reward"]
    return {task: list(rewards.values()) for task, rewards in means.items()}
