"""The groups of a run's steps: failures, baselines, seeds, scores and
checkpoints."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from kit import metrics, trajectories
from stage import make_groups

from rl_core.data.episodes import CUT_OFF
from rl_core.distributed import Ranks
from rl_core.run.failure_limit import refuse_failures
from rl_core.sampling.rollout import POLL_S, RolloutWorker
from rl_core.train import main
from rl_core.types import RunError, Task, Trajectory

ROWS = """
def load_tasks(split): return [{"prompt": f"{n}?", "n": n} for n in range(NUM_ROWS)]
"""


@pytest.fixture
def run(tmp_path, make_model, capsys):
    """run(environment, *flags, num_rows=) -> (exit status, the run's folder, its error
    output)."""
    model = make_model(hidden=32)

    def train(code: str, *flags: str, num_rows: int = 4, model: Path | None = model):
        (tmp_path / "x.py").write_text(ROWS.replace("NUM_ROWS", str(num_rows)) + code)
        sizes = [
            "--tasks_per_step",
            "4",
            "--group_size",
            "2",
            "--max_tokens",
            "6",
            "--max_prompt_tokens",
            "16",
        ]
        arguments = ["--env_path", str(tmp_path / "x.py"), "--out", str(tmp_path / "run"), *sizes]
        arguments += ["--model", str(model)] if model else []
        status = main([*arguments, "--optim.lr", "1e-3", *flags])
        output = capsys.readouterr()
        train.printed = output.out.splitlines()
        return status, tmp_path / "run", output.err

    return train


def step(out: Path, number: int) -> list[dict]:
    return trajectories(out / f"rollouts/step_{number:06d}.jsonl.zst")


FAILS = (
    "def reward_fn(n, completion):\n    assert {when}, 'it was to fail'\n    return "
    "float(len(completion) % 3)\n"
)


def test_one_bad_row_of_twenty_does_not_end_a_run(run):
    status, out, _ = run(FAILS.format(when="n != 7"), "--num_steps", "10", num_rows=20)
    assert status == 0
    # Two episodes in each epoch.
    assert sum(row["rollout/policy/failed"] for row in metrics(out)) == 4


def test_a_row_that_fails_whenever_it_is_drawn_is_one_row():
    ranks, rows = Ranks(rank=0, size=1, device=None, store=None), {}
    for epoch in range(20):
        episodes = [
            Trajectory(
                task_id=str(n),
                env="x",
                group_id=f"{epoch}/{n}",
                index=i,
                status="ok" if n else "failed",
            )
            for n in range(20)
            for i in range(3)
        ]
        refuse_failures(episodes, rows, 0.1, "the step", ranks)
    assert len(rows) == 20 and sum(rows.values()) == 1


def test_failures_are_counted_among_the_newest_200_rows():
    ranks, rows = Ranks(rank=0, size=1, device=None, store=None), {}

    def refuse(first: int, num_failed: int):
        places = [
            (str(n), "failed" if n < first + num_failed else "ok")
            for n in range(first, first + 200)
        ]
        episodes = [
            Trajectory(task_id=n, env="x", group_id=n, status=status) for n, status in places
        ]
        refuse_failures(episodes, rows, 0.1, "the step", ranks)

    refuse(0, 0)
    refuse(200, 20)
    with pytest.raises(RunError, match="21 of 200 episodes of the step failed"):
        refuse(400, 21)


def test_rows_that_are_too_long_are_left_out_if_that_is_asked_for(run):
    code = (
        "def load_tasks(split): return [{'prompt': 'x' * (1 + 40 * (n % 2))} for n in range(4)]\n"
    )
    code += "def reward_fn(completion): return float(len(completion))\n"
    status, _, output = run(code, "--num_steps", "1")
    assert (
        status == 1
        and "row 2 of the split 'train': a prompt of" in output
        and "--data.skip_long" in output
    )
    status, out, _ = run(code, "--num_steps", "1", "--data.skip_long", "true")
    assert status == 0 and {t["task_id"] for t in step(out, 1)} == {"train/0", "train/2"}


def test_where_all_fail_the_run_stops_and_what_was_said_is_in_its_folder(run):
    status, out, output = run(FAILS.format(when="False"), "--num_steps", "10")
    assert (
        status == 1 and "8 of 8 episodes of step 1 failed" in output and "it was to fail" in output
    )
    hint = f"{out}/failure.txt has the traceback; mend the cause, and give the same command with --resume"
    assert hint in output
    first, _, *traced = (out / "failure.txt").read_text().splitlines()
    assert first.startswith("RunError: ") and "8 of 8 episodes of step 1 failed" in first
    assert "Traceback" in traced[0]
    failed = step(out, 1)
    assert len(failed) == 8 and {t["status"] for t in failed} == {"failed"}
    assert all(t["turns"] and "it was to fail" in t["error"] for t in failed)


def test_an_evaluation_where_all_fail_stops_the_run(run):
    status, out, output = run(FAILS.format(when="False"), "--num_steps", "1", "--eval_every", "1")
    assert status == 1 and "episodes of eval/000000/greedy failed" in output
    failed = trajectories(out / "rollouts/eval_000000_greedy.jsonl.zst")
    assert {t["status"] for t in failed} == {"failed"} and all(
        "it was to fail" in t["error"] for t in failed
    )


def test_where_half_of_the_rows_fail_the_run_stops_after_a_few_steps(run):
    status, out, output = run(FAILS.format(when="n % 2"), "--num_steps", "20", num_rows=80)
    assert (
        status == 1 and "more than --rollout.max_failed_fraction=0.1 allows: of the last" in output
    )
    assert 1 <= len(metrics(out)) <= 5
    assert output.rstrip().endswith(f"all reasons: rl-core show {out} --reasons")


def test_half_of_few_rows_may_fail_and_last_lines_count_them(run):
    code = FAILS.format(when="n % 2")
    status, out, _ = run(code, "--num_steps", "4", num_rows=8)
    assert (
        status == 0 and f"  16 of 32 episodes failed: rl-core show {out} --reasons" in run.printed
    )


def test_a_failing_evaluation_names_the_command_for_reasons(run):
    status, out, output = run(
        FAILS.format(when="n % 2"), "--num_steps", "1", "--eval_every", "1", num_rows=8
    )
    assert status == 1 and "of the last 8 rows 4 failed, where a row" in output
    assert "failed. The first: eval/" in output and "and 0.8 may; all reasons" in output
    assert output.rstrip().endswith(f"all reasons: rl-core show {out} --reasons --eval")


def test_an_evaluation_that_failed_is_made_by_the_run_that_goes_on(run):
    # Eight calls of the first evaluation and eight of the step; the evaluation behind it fails.
    code = (
        "calls = []\ndef reward_fn(completion):\n    calls.append(completion)\n    assert "
        "len(calls) <= 16\n"
    )
    flags = ["--num_steps", "2", "--eval_every", "1", "--eval.samples", "0"]
    status, out, _ = run(code + "    return float(len(completion) % 3)\n", *flags, num_rows=8)
    assert status == 1
    [state] = out.glob("checkpoints/step_*/state.json")
    assert json.loads(state.read_text())["to_evaluate"] is True


def test_the_error_for_too_many_failures_names_its_rule():
    ranks = Ranks(rank=0, size=1, device=None, store=None)
    groups = [{"task_id": str(n), "env": "x", "group_id": str(n)} for n in range(20)]
    episodes = [
        # Whole episodes fail by the same reason: it is not the truncation.
        Trajectory(**fields, status="failed", error="not a number" + CUT_OFF * (n == 0))
        if n < 8
        else Trajectory(**fields, status="ok")
        for n, fields in enumerate(groups)
    ]
    with pytest.raises(RunError) as error:
        refuse_failures(episodes, {}, 0.1, "the step", ranks)
    rule = (
        "more than --rollout.max_failed_fraction=0.1 allows: of the last 20 rows 8 failed, where a "
        "row counts by its failed fraction, and 5 may, 0.1 of 50 rows, the least number that the "
        "limit applies to"
    )
    begin = "8 of 20 episodes of the step failed. The first: 0: not a number. It is "
    assert str(error.value) == begin + rule
    assert refuse_failures(episodes, {}, 1.0, "the step", ranks) == {"not a number": 8}
    # No whole episode fails: it may be the truncation.
    [reason] = refuse_failures([episodes[0], *episodes[8:]], {}, 1.0, "the step", ranks)
    assert reason.startswith("not a number; the episode was truncated")


def test_a_resumed_run_says_which_environment_file_has_changed(run):
    code = "def reward_fn(completion): return float(len(completion) % 3)\n"
    _, out, _ = run(code, "--num_steps", "1")
    says = f"differs from {out / 'env_code.yaml'}: {out.parent / 'x.py'} has changed since"
    run(code, "--num_steps", "2", "--resume")
    assert says not in run.printed
    run(code + "# another\n", "--num_steps", "3", "--resume")
    assert run.printed.count(says) == 1


def test_players_of_one_actor_have_baselines_of_their_own(run):
    players = """
async def rollout(task, actors):
    first, second = await actors["policy"].respond(task.messages, n=2)
    return [first.trajectory(1.0, player="first"), second.trajectory(0.0, player="second")]
"""
    status, out, output = run(players, "--num_steps", "1")
    [row] = metrics(out)
    assert (
        status == 0
        and "warning: none of 1 steps made an update" in output
        and row["rollout/policy/zero_signal_frac"] == 1
    )
    assert row["learn/policy/skipped_updates"] == 1, (
        "each player's rewards are all equal: there is nothing to learn"
    )


def test_the_same_task_is_drawn_with_other_seeds_in_another_step(run):
    code = "def reward_fn(completion): return float(len(completion))\n"
    status, out, _ = run(code, "--num_steps", "2", "--optim.lr", "0", num_rows=1)
    first, second = (
        [t["turns"][0]["completion"]["token_ids"] for t in step(out, n)] for n in (1, 2)
    )
    assert status == 0 and first != second


def test_who_speaks_is_drawn_anew_in_another_step(run, make_model):
    code = "turns = '(bob/alice)*8'\ndef reward_fn(completion): return float(len(completion))\n"
    model = str(make_model(hidden=32))
    two = [
        "--actors.bob.model",
        model,
        "--actors.alice.model",
        model,
        "--actors.alice.train",
        "false",
    ]
    status, out, _ = run(
        code, *two, "--num_steps", "2", "--max_prompt_tokens", "64", model=None, num_rows=1
    )
    # bob's own turns are "assistant" to bob.
    first, second = ([[m["role"] for m in t["messages"]] for t in step(out, n)] for n in (1, 2))
    assert status == 0 and first != second


def test_pass_at_k_counts_tasks_of_which_one_sample_passed(run):
    code = "def reward_fn(completion): return float(sum(map(ord, completion)) % 4 == 0)\n"
    flags = [
        "--num_steps",
        "1",
        "--eval_every",
        "1",
        "--eval.samples",
        "4",
        "--eval.num_tasks",
        "12",
    ]
    status, out, _ = run(code, *flags, num_rows=20)
    groups: dict[str, list[float]] = {}
    for t in trajectories(out / "rollouts/eval_000000_sampled.jsonl.zst"):
        groups.setdefault(t["task_id"], []).append(t["reward"])
    assert groups.keys() == {f"eval/{n}" for n in range(12)}
    passed = sum(max(g) for g in groups.values()) / 12
    mean = sum(map(sum, groups.values())) / 48
    row = metrics(out)[0]
    assert status == 0 and (row["eval/x/pass@4"], row["eval/x/avg@4"]) == pytest.approx(
        (passed, mean)
    )
    assert 0 < mean < passed


def test_samples_of_an_evaluation_are_drawn_as_eval_sampling_says(run):
    code = "def reward_fn(completion): return float(len(completion))\n"
    flags = ["--num_steps", "1", "--eval_every", "1", "--eval.samples", "3", "--eval.sampling"]
    status, out, _ = run(code, *flags, "top_k=1")
    output = {label: {} for label in ("greedy", "sampled")}
    for label, by_task in output.items():
        for t in trajectories(out / f"rollouts/eval_000000_{label}.jsonl.zst"):
            by_task.setdefault(t["task_id"], set()).add(
                tuple(t["turns"][0]["completion"]["token_ids"])
            )
    assert status == 0 and output["greedy"] == output["sampled"], (
        "the likeliest token is the only one of the first 1"
    )


def test_failed_episodes_are_no_part_of_an_evaluation(run):
    code = "def reward_fn(n): return float(n)\n"
    code += (
        "def group_reward_fn(trajectories, n):\n    assert n != 3\n    return [0.5] * "
        "len(trajectories)\n"
    )
    status, out, output = run(
        code, "--num_steps", "1", "--eval_every", "1", "--rollout.max_failed_fraction", "1"
    )
    row = metrics(out)[0]
    assert "warning: none of 1 steps made an update" in output
    assert status == 0 and row["eval/x/greedy_score"] == (0 + 1 + 2) / 3 + 0.5
    assert row["eval/x/greedy_failed"] == 1
    assert (
        row["eval/x/greedy_reward/reward_fn"] == 1
        and row["eval/x/greedy_reward/group_reward_fn"] == 0.5
    )


HALF = """
from itertools import count
numbers = count()
def reward_fn(n):
    if next(numbers) % 2 and n < 2:
        raise OSError("the grader is away")
    return float(n != 2)
"""


def test_pass_at_k_leaves_failed_episodes_out(run):
    flags = (
        "--num_steps 0 --eval_every 1 --rollout.max_failed_fraction 1 --rollout.max_concurrent 1"
    )
    _, out, _ = run(HALF, *flags.split())
    [row] = metrics(out)
    result = {name.removeprefix("eval/x/"): row[name] for name in row if name.startswith("eval/x/")}
    # Greedy: the second of four tasks fails. Sampled: two of four episodes of the first two fail.
    assert (result["greedy_failed"], result["greedy_score"]) == (1, 2 / 3)
    assert (result["sampled_failed"], result["avg@4"], result["pass@4"]) == (4, 3 / 4, 1 / 2)


class Enough(Exception): ...


class CountingRanks(Ranks):
    """The first of several ranks, of which the others are never heard of. It counts questions to
    the store."""

    num_adds = 0

    def add(self, name, n):
        self.num_adds += 1
        return super().add(name, n)


class WaitingWorker(RolloutWorker):
    """Counts its looks at the other ranks, until there are enough."""

    num_waits = waited_s = 0

    async def _wait(self, timeout_s):
        self.num_waits += 1
        self.waited_s += timeout_s
        if self.num_waits == 40:
            raise Enough
        await asyncio.sleep(0)


@pytest.mark.parametrize("size", [2, 1024])
def test_store_traffic_does_not_grow_with_ranks_or_groups(size):
    ranks = CountingRanks(rank=0, size=size, device=None)

    class Player:
        max_episodes = 8
        replays = None

        async def play(self, group):
            return []

    worker = WaitingWorker(Player(), ranks, 60.0)

    async def collect():
        task = Task(id="0", env="x", row={}, messages=[])
        worker.submit(make_groups([task] * 4))
        await asyncio.sleep(0.1)
        ranks.num_adds = 0
        await worker.collect(5)

    with pytest.raises(Enough):
        asyncio.run(collect())
    assert ranks.num_adds <= 2 * 40 + 4
    asked_a_second = size * ranks.num_adds / worker.waited_s
    assert asked_a_second < 2_000, "one store answers all ranks"
    assert POLL_S >= 0.05
