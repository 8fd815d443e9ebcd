"""Groups that go on from step to step, and ranks that only sample: who takes what, and by which weights it was sampled."""

from __future__ import annotations

import asyncio
import io
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import zstandard
from conftest import ROOT
from transformers import AutoModelForCausalLM

from rl_core.distributed import init_ranks
from rl_core.sampling.stream import DRAWN, GroupStream, HeldClock, Intake
from rl_core.train import main
from rl_core.types import RunError, Trajectory

SORT = ["--env_path", str(ROOT / "envs/sort_digits.py"), "--max_tokens", "8", "--max_prompt_tokens", "16"]
# Some episodes take much longer than others; the model's own tokens are all that is scored.
UNEVEN = """
import asyncio, random
max_turns = 4

def load_tasks(split):
    return [{"messages": [{"role": "user", "content": str(n)}], "n": n} for n in range(64)]

async def interact(messages, n, state):
    await asyncio.sleep(state.random() * 0.05)
    return [{"role": "user", "content": "go on"}] if state.random() < 0.2 + 0.7 * (n % 4 == 0) else None

def start(task):
    return random.Random(task.id)

def reward_fn(messages):
    return float(sum(map(ord, messages[-1]["content"])) % 7)
"""


def metrics(out: Path) -> list[dict]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "learn/policy/loss" in row]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(out / "hf/policy").state_dict()


def steps_of(out: Path) -> list[list[dict]]:
    """The trajectories of each step."""
    found: dict[str, list[dict]] = {}
    for file in sorted((out / "rollouts").glob("step_*.zst")):
        with zstandard.ZstdDecompressor().stream_reader(file.open("rb")) as stream:
            found.setdefault(file.name[:11], []).extend(json.loads(line) for line in io.TextIOWrapper(stream))
    return list(found.values())


def versions_of(trajectory: dict) -> list[int]:
    done = [turn["completion"] for turn in trajectory["turns"]]
    return [v for c in done for v in [c["policy_version"], *(v for _, v in c["newer_versions"])]]


def make_intake(roll_out, width: int = 8, **how) -> Intake:
    ranks = init_ranks(60)
    given = {
        "per_step": 4,
        "total": 40,
        "max_staleness": 0,
        "patience_s": 20.0,
        "limits": "--x",
    } | how
    return Intake(ranks, GroupStream(roll_out, ranks, width), **given)


def some(number: int) -> list[Trajectory]:
    return [Trajectory(task_id=str(number), env="x", group_id=str(number))]


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_no_step_takes_what_is_older_than_allowed_and_every_group_is_taken_once(max_staleness):
    chance, begun = random.Random(max_staleness), []

    async def roll_out(number):
        begun.append(number)
        await asyncio.sleep(chance.choice([0.0, 0.001, 0.03]))
        return some(number)

    async def steps():
        intake, taken, ages = make_intake(roll_out, max_staleness=max_staleness), [], []
        for version in range(10):
            intake.advance(version)
            groups = await intake.take(4)
            assert len(set(begun)) <= 4 * (version + 1 + max_staleness)
            taken += [g.number for g in groups]
            ages += [version - g.version for g in groups]
            await asyncio.sleep(0.002)
        assert not intake.stream.open and intake.unfinished() == []
        return taken, ages

    taken, ages = asyncio.run(steps())
    assert sorted(taken) == list(range(40))
    assert max(ages) == max_staleness, "what may be older is, where some groups take ten times as long as others"
    assert len(begun) == 40


def test_an_error_in_a_group_reaches_the_step_and_waiting_ends():
    async def fails(number):
        raise RunError("the engine died")

    async def take(roll_out, patience_s, others: int = 0):
        intake = make_intake(roll_out, patience_s=patience_s)
        intake.ranks.add(DRAWN, others)  # another rank has these groups, and is never heard of again
        intake.advance(0)
        await intake.wait(4)

    with pytest.raises(RunError, match="the engine died"):
        asyncio.run(take(fails, 20))
    with pytest.raises(
        RunError, match=r"rank 0 waited in the phase 'generate' for 4 groups .* 0 are complete: .*--x=0.2"
    ):
        asyncio.run(take(fails, 0.2, others=4))


def test_deadlines_stand_still_while_the_thread_learns():
    async def wait_for(learning_s: float) -> bool:
        clock = HeldClock()
        waiter = asyncio.ensure_future(asyncio.wait_for(asyncio.sleep(0.2), 0.4))
        await asyncio.sleep(0.01)
        with clock.stopped():
            time.sleep(learning_s)  # noqa: ASYNC251 - it is what holds the thread
        return await waiter is None

    assert asyncio.run(wait_for(1.0))


@pytest.fixture
def uneven(tmp_path, tiny_model):
    (tmp_path / "uneven.py").write_text(UNEVEN)
    flags = ["--model", str(tiny_model), "--env_path", str(tmp_path / "uneven.py"), "--data.shuffle", "false"]
    flags += ["--max_tokens", "16", "--tasks_per_step", "4", "--group_size", "4", "--optim.lr", "1e-3"]
    return flags


def test_a_partial_run_trains_on_nothing_staler_and_resumes_with_every_task(uneven, tmp_path):
    out = tmp_path / "run"
    flags = [*uneven, "--max_staleness", "2", "--out", str(out)]
    assert main([*flags, "--num_steps", "3"]) == 0
    state = json.loads((out / "checkpoints/step_000003/state.json").read_text())
    assert main([*flags, "--num_steps", "6", "--resume"]) == 0
    steps = steps_of(out)
    ages = [number - v for number, found in enumerate(steps) for t in found for v in versions_of(t)]
    assert len(steps) == 6 and max(ages) == 2 and min(ages) == 0
    assert max(row["rollout/staleness_max"] for row in metrics(out)) == 2
    crossed = [t for found in steps for t in found if len(set(versions_of(t))) > 1]
    assert crossed, "some conversations must have gone on by newer weights"
    # Three steps may begin no more than their own twelve tasks, all of which are done by then.
    assert (state["position"], state["pending"]) == (12, [])
    tasks = [t["task_id"] for found in steps for t in found if t["index"] == 0]
    assert sorted(tasks, key=lambda name: int(name.split("/")[1])) == [f"train/{n}" for n in range(24)]


def test_tasks_under_way_at_a_checkpoint_come_first_when_the_run_goes_on(uneven, tmp_path):
    out = tmp_path / "run"
    flags = [*uneven, "--max_staleness", "2", "--out", str(out), "--num_steps", "6"]
    assert main([*flags, "--save_every", "2", "--keep_checkpoints", "0"]) == 0
    for step in (4, 6):
        subprocess.run(["rm", "-r", str(out / f"checkpoints/step_{step:06d}")], check=True)
    state = json.loads((out / "checkpoints/step_000002/state.json").read_text())
    before = {t["task_id"] for found in steps_of(out)[:2] for t in found}
    assert state["position"] == 16 and len(state["pending"]) == 8
    assert {f"train/{p}" for p in state["pending"]} == {f"train/{p}" for p in range(16)} - before
    assert main([*flags, "--resume"]) == 0
    tasks = [t["task_id"] for found in steps_of(out) for t in found if t["index"] == 0]
    assert sorted(tasks, key=lambda name: int(name.split("/")[1])) == [f"train/{n}" for n in range(24)]


def test_two_ranks_share_what_is_under_way(uneven, tmp_path, torchrun):
    out = tmp_path / "run"
    flags = [*uneven, "--max_staleness", "1", "--num_steps", "4", "--out", str(out)]
    torchrun(2, "-m", "rl_core.train", *flags)
    steps = steps_of(out)
    ages = [number - v for number, found in enumerate(steps) for t in found for v in versions_of(t)]
    assert max(ages) == 1 and len(list((out / "rollouts").glob("step_000002*"))) == 2
    tasks = sorted(int(t["task_id"].split("/")[1]) for found in steps for t in found)
    assert tasks == [n for n in range(16) for _ in range(4)]


def test_a_rank_that_only_samples_without_staleness_does_what_one_rank_does(warm_model, tmp_path, torchrun):
    flags = ["--model", str(warm_model), *SORT, "--num_steps", "3", "--optim.lr", "3e-4", "--optim.name", "sgd"]
    flags += ["--eval_every", "2", "--eval.num_tasks", "16", "--algo.correction", "none"]
    one, two = tmp_path / "one", tmp_path / "two"
    assert main([*flags, "--out", str(one)]) == 0
    torchrun(2, "-m", "rl_core.train", *flags, "--engine_ranks", "1", "--out", str(two))
    a, b = weights(one), weights(two)
    assert all(torch.allclose(a[n], b[n], atol=1e-6) for n in a)
    rows = [[json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()] for out in (one, two)]
    for mine, other in zip(*rows, strict=True):
        same = [k for k in mine if not k.startswith("time/") and "canary" not in k]  # no engine beside the learner
        assert {k: other[k] for k in same} == pytest.approx({k: mine[k] for k in same}, abs=1e-5)
        if "learn/policy/loss" in other:
            assert 0 < other["learn/policy/canary_max_diff"] < 1e-4
            assert 0 <= other["time/engines_idle_frac"] <= 1 and 0 < other["time/learners_idle_frac"] < 1


def test_ranks_that_only_sample_hand_groups_to_several_learners(uneven, tmp_path, torchrun):
    out = tmp_path / "run"
    flags = [*uneven, "--max_staleness", "1", "--num_steps", "4", "--out", str(out), "--eval_every", "4"]
    eval_rows = tmp_path / "eval.jsonl"
    eval_rows.write_text(
        "".join(json.dumps({"messages": [{"role": "user", "content": "1"}], "n": 1}) + "\n" for _ in "ab")
    )
    flags += ["--data.eval", str(eval_rows)]
    torchrun(4, "-m", "rl_core.train", *flags, "--engine_ranks", "2")
    steps = steps_of(out)
    ages = [number - v for number, found in enumerate(steps) for t in found for v in versions_of(t)]
    assert max(ages) == 1
    tasks = sorted(int(t["task_id"].split("/")[1]) for found in steps for t in found)
    assert tasks == [n for n in range(16) for _ in range(4)]
    # Where one version sampled a token, it is the learner's: the weights arrived.
    fresh = [row["learn/policy/mismatch_kl_nats_max"] for row in metrics(out) if row["rollout/staleness_max"] == 0]
    assert fresh and max(fresh) < 1e-6
    assert all(0 < row["learn/policy/canary_max_diff"] < 1e-4 for row in metrics(out) if "learn/policy/loss" in row)


def test_a_rank_that_only_samples_is_missed_when_it_dies(uneven, tmp_path):
    out = tmp_path / "run"
    flags = [*uneven, "--num_steps", "1000", "--engine_ranks", "1", "--out", str(out)]
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "rl_core.train", *flags]
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        while not (out / "metrics.jsonl").exists() and process.poll() is None:
            time.sleep(0.1)
        ranks = subprocess.run(
            ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
        ).stdout.split()
        assert len(ranks) == 2
        subprocess.run(["kill", "-9", ranks[-1]], check=True)
        text, _ = process.communicate(timeout=60)
    finally:
        process.send_signal(signal.SIGKILL)
    assert process.returncode not in (0, -9) and "Signal 9 (SIGKILL)" in text


def test_a_profiled_step_is_a_chrome_trace(uneven, tmp_path):
    out = tmp_path / "run"
    assert main([*uneven, "--num_steps", "2", "--profile_step", "2", "--out", str(out)]) == 0
    [file] = out.glob("trace_*")
    assert file.name == "trace_step_000002_rank_0.json"
    names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    assert {"generate", "learn", "sync", "aten::mm"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--max_staleness", "1"], ["--max_staleness", "2", "--engine_ranks", "1"]])
def test_the_sort_task_is_learnt_from_older_weights_too(flags, warm_model, tmp_path, torchrun):
    given = ["--model", str(warm_model), *SORT, "--num_steps", "60", "--optim.lr", "3e-4", "--optim.warmup_steps", "5"]
    out = tmp_path / "run"
    torchrun(
        2 if "--engine_ranks" in flags else 1, "-m", "rl_core.train", *given, "--algo.clip_high", "0.28", *flags,
        "--out", str(out),
    )  # fmt: skip
    rows = metrics(out)
    assert rows[-1]["rollout/policy/reward_mean"] > 0.55 > 0.3 > rows[0]["rollout/policy/reward_mean"]
    assert max(row["rollout/staleness_max"] for row in rows) == int(flags[1])
