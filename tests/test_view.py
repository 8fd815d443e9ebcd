"""rl-core view: what it reads of a run's folder."""

from __future__ import annotations

import json
import os

import pytest

from rl_core.data.rows import write_trajectories
from rl_core.tools.view.data import RunFolder, matching, panels_of
from rl_core.types import Completion, Trajectory, Turn

HOSTILE = 'x\n"], "turns": [{"token_ids": [1, 2]}], "reward": 5, "messages": [ \u2028</script><script>'


def said(num: int, text: str = "hi") -> Turn:
    done = Completion(token_ids=[*range(num)], logprobs=[-0.5] * num, text=text, finish_reason="stop", policy_version=0)
    return Turn(new_ids=[7, 8], is_fresh=True, completion=done)


def trajectory(n: int, **more) -> Trajectory:
    messages = [{"role": "user", "content": f"ask {n}"}, {"role": "assistant", "content": f"Reply {n}"}]
    given = {"messages": messages, "turns": [said(3), said(2, f"Reply {n}")], "reward": n / 4} | more
    return Trajectory(task_id=f"train/{n}", env="letters", group_id="train/0/0", index=n, **given)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "rollouts").mkdir()
    write_trajectories(tmp_path / "rollouts/step_000001.jsonl.zst", [trajectory(n) for n in range(4)])
    failed = trajectory(4, reward=None, status="failed", error="the hook took too long", turns=[])
    write_trajectories(tmp_path / "rollouts/eval_000001_greedy.rank_00001.jsonl.zst", [failed])
    write_metrics(tmp_path, [{"step": 1, "rollout/policy/reward_mean": 0.5}])
    return RunFolder(tmp_path)


def write_metrics(folder, rows, mode="w"):
    with open(folder / "metrics.jsonl", mode) as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def test_the_index_says_what_each_trajectory_is(run):
    assert run.refresh()
    [last] = matching(run.entries, step=1, kind="train", index=3)
    assert (last.task, last.env, last.actor, last.reward) == ("train/3", "letters", "policy", 0.75)
    assert (last.num_turns, last.num_tokens, last.preview) == (2, 5, "Reply 3")
    assert run.episode(last)["turns"][0]["new_ids"] == [7, 8]
    [failed] = matching(run.entries, reason="TOO LONG")
    assert (failed.kind, failed.status, failed.reward, failed.num_turns) == ("greedy", "failed", None, 0)
    assert [e.index for e in matching(run.entries, rewards=(0.25, 0.5))] == [1, 2]


def test_text_that_looks_like_the_file_itself_is_text(run):
    named = [{"role": "user", "content": HOSTILE, "name": HOSTILE, "turns": [1], "reward": 2}]
    row = trajectory(9, messages=named, turns=[said(6, HOSTILE)], error=HOSTILE, reward_parts={HOSTILE: 1.0})
    write_trajectories(run.path / "rollouts/step_000002.jsonl.zst", [row, trajectory(1)])
    run.refresh()
    entry, other = matching(run.entries, step=2)
    assert (entry.num_tokens, entry.error, entry.reward) == (6, HOSTILE, 2.25)
    assert run.episode(entry)["messages"] == named and run.episode(other)["index"] == 1
    assert list(run.search("</SCRIPT>", run.entries)) == [entry]


def test_a_file_that_was_cut_short_is_read_as_far_as_it_goes(run):
    file = run.path / "rollouts/step_000003.jsonl.zst"
    rows = [trajectory(n, messages=[{"role": "user", "content": os.urandom(50_000).hex()}]) for n in range(20)]
    write_trajectories(file, rows)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with open(run.path / "metrics.jsonl", "a") as metrics:
        metrics.write('{"step": 2, "rollout/pol')
    assert run.refresh()
    left = matching(run.entries, step=3)
    assert 5 <= len(left) <= 10 and [e.index for e in left] == [*range(len(left))]
    assert run.episode(left[-1])["messages"] == rows[len(left) - 1].messages
    assert [row["step"] for row in run.rows] == [1]


def test_a_run_that_goes_on_adds_to_what_was_read_and_a_resumed_one_replaces_it(run):
    run.refresh()
    write_metrics(run.path, [{"step": 2, "learn/policy/loss": None}], "a")
    write_trajectories(run.path / "rollouts/step_000002.jsonl.zst", [trajectory(5)])
    run.refresh()
    assert (len(run.entries), len(run.rows), run.revision) == (6, 2, 0)
    (run.path / "metrics.jsonl").unlink()
    write_metrics(run.path, [{"step": 1, "rollout/policy/reward_mean": 0.75}])
    write_trajectories(run.path / "rollouts/step_000002.jsonl.zst", [trajectory(6), trajectory(7)])
    run.refresh()
    assert run.revision == 2 and run.curves() == {"rollout/policy/reward_mean": [(1, 0.75)]}
    assert [e.index for e in matching(run.entries, step=2)] == [6, 7]


def test_every_metric_has_a_panel():
    names = ["rollout/bob/reward_mean", "rollout/bob/maths/reward_mean", "rollout/bob/length_p95", "time/learn_s"]
    names += ["rollout/bob/reward/right", "learn/bob/updates", "time/learn_tokens_per_s"]
    assert panels_of(names) == {
        "reward": {"bob": names[0], "bob/maths": names[1]},
        "parts of the reward": {"bob right": "rollout/bob/reward/right"},
        "length (tokens)": {"bob length_p95": "rollout/bob/length_p95"},
        "time per phase (s)": {"learn": "time/learn_s"},
        "tokens per second": {"learn": "time/learn_tokens_per_s"},
        "learn/bob/updates": {"learn/bob/updates": "learn/bob/updates"},
    }


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no folder of a run"):
        RunFolder(tmp_path / "nothing")
