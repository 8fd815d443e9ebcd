"""Groups in the background: who takes what, how old it may be, and ranks that only sample."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from pathlib import Path

import pytest
from kit import RanksProcess, answer, metrics, of_ranks, rewind, run_ranks, trajectories
from stage import make_groups

from rl_core.run.process.joining import init_ranks
from rl_core.sampling.rollout import RolloutWorker
from rl_core.train import main
from rl_core.types import RunError, Task, Trajectory

GOLDEN = Path(__file__).parents[1] / "golden"
# Some episodes take much longer than others; the model's own tokens are all that is scored.
UNEVEN = """
import random
max_turns = 8

def load_tasks(split):
    return [{"messages": [{"role": "user", "content": str(n)}], "n": n} for n in range(64)]

def interact(messages, n, state):
    return [{"role": "user", "content": "go up"}] if state.random() < 0.2 + 0.7 * (n % 4 == 0) else None

def start(task):
    return random.Random(task.id)

def reward_fn(messages):
    return float(sum(map(ord, messages[-1]["content"])) % 7)
"""


def group_of(n: int, label: str = ""):
    [group] = make_groups([Task(id=str(n), env="x", row={}, messages=[])])
    group.position, group.label = n, label
    return group


def worker_of(run, timeout_s: float = 20.0, width: int = 8) -> RolloutWorker:
    class Player:
        max_episodes = width
        replays = None

        async def play(self, group) -> list[Trajectory]:
            await run(group.position)
            return [Trajectory(task_id=group.task.id, env="x", group_id=str(group.position))]

    return RolloutWorker(Player(), init_ranks(60), timeout_s)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_no_step_takes_groups_that_are_too_old_or_taken(max_staleness):
    chance, begun = random.Random(max_staleness), []

    async def run(number):
        begun.append(number)
        for _ in range(chance.choice([0, 1, 30])):
            await asyncio.sleep(0)

    async def steps():
        worker, positions, ages = worker_of(run), [], []
        worker.submit(group_of(n) for n in range(4 * max_staleness))
        for version in range(10):
            worker.version = version
            first = 4 * (version + max_staleness)
            worker.submit(group_of(n) for n in range(first, min(first + 4, 40)))
            groups = await worker.collect(4, oldest=version - max_staleness)
            assert len(begun) <= 4 * (version + 1 + max_staleness)
            positions += [g.position for g in groups]
            ages += [version - g.version for g in groups]
            for _ in range(5):
                await asyncio.sleep(0)
        assert not worker.running and not worker.pending
        return positions, ages

    positions, ages = asyncio.run(steps())
    assert sorted(positions) == sorted(begun) == list(range(40))
    assert max(ages) == max_staleness, (
        "what may be older is, where some groups take thirty times as long as others"
    )


def test_an_error_in_a_group_reaches_the_step():
    async def fails(number):
        raise RunError("the engine died")

    async def collect(timeout_s, others=0):
        worker = worker_of(fails, timeout_s)
        # Another rank has these groups, and is never heard of again.
        worker.ranks.add("rollout/drawn/", others)
        worker.submit(group_of(n) for n in range(4))
        await worker.collect(4)

    with pytest.raises(RunError, match="the engine died"):
        asyncio.run(collect(20))
    with pytest.raises(
        RunError,
        match=r"rank 0 waited in the phase 'generate' for 4 groups .* 0 are .*--timeout_s=0.2",
    ):
        asyncio.run(collect(0.2, others=4))


def test_an_evaluation_begins_before_training_groups_that_wait():
    begun = []

    async def run(number):
        begun.append(number)
        await asyncio.sleep(0)

    async def play():
        worker = worker_of(run, width=1)
        worker.submit(group_of(n) for n in range(4))
        worker.submit(group_of(n, "eval") for n in (10, 11))
        evaluated = await worker.collect(2, label="eval")
        return [g.position for g in (*evaluated, *await worker.collect(4))]

    assert asyncio.run(play()) == [10, 11, 0, 1, 2, 3]
    assert begun == [0, 10, 11, 1, 2, 3]


@pytest.fixture
def uneven(tmp_path, tiny_model):
    (tmp_path / "uneven.py").write_text(UNEVEN)
    flags = [
        "--model",
        str(tiny_model),
        "--env_path",
        str(tmp_path / "uneven.py"),
        "--data.shuffle",
        "false",
    ]
    flags += [
        "--max_tokens",
        "8",
        "--max_prompt_tokens",
        "16",
        "--tasks_per_step",
        "4",
        "--group_size",
        "4",
    ]
    return [*flags, "--optim.lr", "1e-3"]


def steps_of(out: Path) -> list[list[dict]]:
    """The trajectories of each step, of all ranks."""
    by_step: dict[str, list[dict]] = {}
    for file in sorted((out / "rollouts").glob("step_*.zst")):
        by_step.setdefault(file.name[:11], []).extend(trajectories(file))
    return list(by_step.values())


def ages_of(out: Path) -> list[int]:
    """(oldest, newest) policy version of every turn's tokens."""
    done = [
        (n, turn["completion"])
        for n, rows in enumerate(steps_of(out))
        for t in rows
        for turn in t["turns"]
    ]
    return [
        n - v for n, c in done for v in [c["policy_version"], *(v for _, v in c["newer_versions"])]
    ]


def tasks_of(out: Path) -> list[int]:
    return sorted(int(t["task_id"].split("/")[1]) for rows in steps_of(out) for t in rows)


def learning(out: Path) -> list[dict]:
    return [row for row in metrics(out) if "learn/policy/loss" in row]


def test_a_run_trains_on_nothing_staler_and_resumes_with_every_task(uneven, tmp_path):
    out = tmp_path / "run"
    flags = [*uneven, "--max_staleness", "2", "--out", str(out)]
    assert main([*flags, "--num_steps", "3"]) == 0
    state = json.loads((out / "checkpoints/step_000003/state.json").read_text())
    # Three steps may begin no more than their own twelve tasks, all of which are done by then.
    assert (state["position"], state["pending"]) == (12, [])
    assert main([*flags, "--num_steps", "6", "--resume"]) == 0
    assert max(ages_of(out)) <= 2 and min(ages_of(out)) == 0
    assert max(row["rollout/staleness_max"] for row in learning(out)) <= 2
    assert tasks_of(out) == [n for n in range(24) for _ in range(4)]


LATE = """
import asyncio
begun = set()

def load_tasks(split):
    return [{"prompt": str(n), "n": n} for n in range(12)]

async def reward_fn(n):
    begun.add(n)
    awaited = {0: 6, 4: 6, 6: 10}.get(n, n)  # which begins one or two steps later
    for _ in range(20):
        await asyncio.sleep(0 if awaited in begun else 0.05)
    return float(n)
"""


def collected(ranks, num_evaluated: str, *positions: str) -> list[list[int]]:
    """Positions of the unfinished groups that this rank continues, and of those whose completions it
    reads from the checkpoint. An evaluation of num_evaluated groups comes first."""

    class Player:
        max_episodes = 8
        replays = None

        async def play(self, group) -> list[Trajectory]:
            return []

    async def play() -> list[int]:
        labelled = [group_of(n, "eval") for n in range(int(num_evaluated))]
        worker.submit(labelled)
        await worker.collect(len(labelled), label="eval")
        worker.submit(map(group_of, positions))
        return [group.position for group in await worker.collect(len(positions))]

    worker = RolloutWorker(Player(), ranks, 20.0)
    positions = [int(position) for position in positions]
    worker.resume_groups(positions, lambda group: group)
    read = [position for position in positions if worker.is_own(position)]
    return [asyncio.run(play()), read]


@pytest.mark.parametrize("num_evaluated", [0, 4])
def test_a_rank_goes_on_with_the_groups_whose_answers_it_has_read(num_evaluated):
    positions = of_ranks(3, __file__, "collected", num_evaluated, 3, 7, 8, 9, 11, 12)
    assert all(begins == reads for begins, reads in positions)
    assert sorted(n for begins, _ in positions for n in begins) == [3, 7, 8, 9, 11, 12]


def test_a_step_waits_for_a_group_that_would_be_too_old_for_the_next(tiny_model, tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    flags = (
        f"--model {tiny_model} --env_path {tmp_path}/late.py --max_tokens 4 --tasks_per_step 2 "
        "--group_size 2"
    )
    # Rewards differ between tasks alone, from which this algorithm learns too.
    flags += (
        " --data.shuffle false --max_staleness 1 --num_steps 6 --optim.lr 0 --algorithm "
        "reinforce_pp"
    )
    assert main([*flags.split(), "--out", str(tmp_path / "run")]) == 0
    assert max(ages_of(tmp_path / "run")) == 1


def test_tasks_under_way_at_a_checkpoint_come_first_when_the_run_resumes(uneven, tmp_path):
    out = tmp_path / "run"
    flags = [*uneven, "--max_staleness", "2", "--out", str(out), "--num_steps", "6"]
    assert main([*flags, "--save_every", "2", "--keep_checkpoints", "0"]) == 0
    state = json.loads((rewind(out, 2) / "state.json").read_text())
    before = {t["task_id"] for rows in steps_of(out)[:2] for t in rows}
    assert state["position"] == 16 and len(state["pending"]) == 8
    assert {f"train/{p}" for p in state["pending"]} == {f"train/{p}" for p in range(16)} - before
    assert main([*flags, "--resume"]) == 0
    assert tasks_of(out) == [n for n in range(24) for _ in range(4)]


def test_two_ranks_share_what_is_under_way(uneven, tmp_path):
    out = tmp_path / "run"
    run_ranks(
        2, "-m", "rl_core.train", *uneven, "--max_staleness", "1", "--num_steps", "4", "--out", out
    )
    assert max(ages_of(out)) <= 1 and len(list((out / "rollouts").glob("step_000002*"))) == 2
    assert tasks_of(out) == [n for n in range(16) for _ in range(4)]


def test_without_staleness_a_rank_that_only_samples_changes_no_number():
    # test_golden.py compares the runs with these files.
    one, two = (
        [json.loads(line) for line in (GOLDEN / f"{name}.jsonl").read_text().splitlines()]
        for name in ("grpo", "engine_rank")
    )
    one = [row for row in one if "learn/policy/loss" in row]
    assert len(one) == len(two) == 2
    for mine, other in zip(one, two, strict=True):
        assert other == pytest.approx(mine, rel=1e-4, abs=1e-6)


def test_ranks_that_only_sample_serve_several_learners(uneven, tmp_path):
    out, rows = tmp_path / "run", tmp_path / "eval.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "1"}], "n": 1}) + "\n")
    flags = [
        *uneven,
        "--max_staleness",
        "1",
        "--num_steps",
        "4",
        "--eval_every",
        "4",
        "--data.eval",
        rows,
    ]
    run_ranks(4, "-m", "rl_core.train", *flags, "--rollout_ranks", "2", "--out", out)
    assert max(ages_of(out)) <= 1
    assert tasks_of(out) == [n for n in range(16) for _ in range(4)]
    for row in learning(out):
        assert 0 < row["learn/policy/canary_max_diff"] < 1e-4, "the weights arrived"
        assert 0 <= row["time/engines_idle_frac"] <= 1 and 0 < row["time/learners_idle_frac"] < 1
    assert "eval/uneven/greedy_score" in metrics(out)[-1]


def test_a_rank_that_only_samples_is_missed_when_it_dies(uneven, tmp_path):
    dying = UNEVEN.replace(
        "def reward_fn(messages):", "def reward_fn(messages):\n    open(folder + '/scored', 'w')"
    )
    (tmp_path / "uneven.py").write_text(f"folder = {str(tmp_path)!r}\n{dying}")
    (tmp_path / "die.py").write_text(
        "import os, signal, sys, threading, time\n"
        "from rl_core.train import main\n"
        "def die():\n"
        f"    while not os.path.exists({str(tmp_path / 'scored')!r}): time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if os.environ['RANK'] == '1': threading.Thread(target=die, daemon=True).start()\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    flags = [
        *uneven,
        "--num_steps",
        "100000",
        "--rollout_ranks",
        "1",
        "--out",
        str(tmp_path / "run"),
    ]
    ranks = RanksProcess(2, tmp_path / "die.py", *flags)
    assert ranks.wait(60) in (1, signal.SIGKILL)


def test_a_rank_that_only_samples_may_start_late(uneven, tmp_path):
    # It must not take the folder that the learners made meanwhile for another run's.
    (tmp_path / "late.py").write_text(
        "import os, sys, time\n"
        "import rl_core.run.plan.plan\n"
        "from rl_core.train import main\n"
        "make_plan = rl_core.run.plan.plan.make_plan\n"
        "def late(config):\n"
        "    time.sleep(3 if os.environ['RANK'] == '1' else 0)\n"
        "    return make_plan(config)\n"
        "rl_core.run.plan.plan.make_plan = late\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    run_ranks(
        2,
        tmp_path / "late.py",
        *uneven,
        "--num_steps",
        "1",
        "--rollout_ranks",
        "1",
        "--out",
        tmp_path / "run",
    )


def test_a_profiled_step_is_a_chrome_trace(uneven, tmp_path):
    out = tmp_path / "run"
    assert main([*uneven, "--num_steps", "2", "--profile_step", "2", "--out", str(out)]) == 0
    [file] = out.glob("trace_*")
    assert file.name == "trace_step_000002_rank_0.json"
    names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    assert {"generate", "learn", "sync", "aten::mm"} <= names


if __name__ == "__main__":
    answer({"collected": collected})
