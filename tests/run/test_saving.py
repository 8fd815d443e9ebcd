"""Saving: by the clock, on a signal and before a run gives up; a resumed run continues as if it
had not ended."""

from __future__ import annotations

import json
import resource
import shutil
import signal
from types import SimpleNamespace

import pytest
from kit import metrics, run, run_ranks, steps, weights, words
from test_runs import RL, assert_same_weights, lasting

from rl_core import Config
from rl_core.metrics import Mean
from rl_core.run.process.joining import init_ranks
from rl_core.run.run_folder import RunLog
from rl_core.run.saving.best_keeper import BestKeeper
from rl_core.train import main

# Does `what` at the 20th call: within the second step of 16 episodes on one rank.
AT_20 = """
import asyncio, itertools, os, signal
from pathlib import Path
calls, parent, mark = itertools.count(1), os.getppid(), Path(__file__).with_suffix(".mark")
def load_tasks(split): return [{"prompt": f"{n} and {n * 7 % 10}"} for n in range(8)]
async def reward_fn(completion):
    if next(calls) >= 20 and not mark.exists():
        {what}
    return sum(map(ord, completion)) / 1000
"""
TO_ALL = (
    "mark.touch(); [os.kill(int(p), 15) for p in "
    "Path(f'/proc/{parent}/task/{parent}/children').read_text().split()]"
)
# To the other ranks, or to the only one, while an episode waits.
WAITS = (
    "mark.touch(); [os.kill(int(p), 15) for p in "
    "Path(f'/proc/{parent}/task/{parent}/children').read_text().split() "
    "if os.environ['WORLD_SIZE'] == '1' or int(p) != os.getpid()]; await asyncio.sleep(1000)"
)
TO_ONE = "os.environ['RANK'] == '1' and (mark.touch(), os.kill(os.getpid(), 15))"


@pytest.fixture
def flags_of(places, tmp_path):
    """flags_of(what) -> flags of a run whose environment does that at its 20th call, until the mark
    is there."""

    def make(code: str) -> list[str]:
        (tmp_path / "env.py").write_text(AT_20.replace("{what}", code))
        return words(
            "--optim.lr 1e-2",
            RL.format(**places),
            "--env_path",
            tmp_path / "env.py",
            "--num_steps 100000",
        )

    return make


@pytest.mark.parametrize(
    "code, num_ranks, more",
    [
        (TO_ONE, 2, ""),
        (TO_ALL, 2, ""),
        (TO_ALL, 2, "--rollout_ranks 1"),
        (TO_ALL, 1, "--eval_every 1 --eval.samples 0"),
    ],
)
def test_ranks_agree_where_they_end_if_some_or_all_get_a_signal(
    code, num_ranks, more, flags_of, tmp_path
):
    arguments = [
        "-m",
        "rl_core.train",
        *flags_of(code),
        *words(more, "--out", tmp_path / "run", "--resume"),
    ]
    ended = run_ranks(num_ranks, *arguments, check=False)
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    last = steps(tmp_path / "run")[-1]["step"]
    assert f"saved step {last}" in ended.stdout and "error" not in ended.stderr
    then = run_ranks(num_ranks, *arguments, "--num_steps", str(last + 1)).stdout
    assert f"continues from step {last}" in then
    # The 20th call is in the first step, after an evaluation of 8 tasks: that of its end is left to
    # the resumed run.
    evaluated, skipped = f"eval at step {last}  ", f"eval at step {last} skipped after the signal"
    if more.startswith("--eval"):
        assert skipped in ended.stdout and evaluated not in ended.stdout and evaluated in then


# 8 calls are in the evaluation before the first step, 16 in the step, and 8 in the one after it.
@pytest.mark.parametrize(
    "num_ranks, call, step, more",
    [(1, 2, 0, ""), (2, 2, 0, ""), (1, 26, 1, "--deterministic")],
)
def test_a_signal_interrupts_an_evaluation(num_ranks, call, step, more, flags_of, tmp_path):
    evaluated = "--eval_every 1 --eval.samples 0 --num_steps 1 --resume --out"
    flags = words(flags_of(WAITS), more, evaluated)
    env = tmp_path / "env.py"
    env.write_text(env.read_text().replace(">= 20", f">= {call}"))
    arguments = ["-m", "rl_core.train", *flags, str(tmp_path / "run")]
    ended = run_ranks(num_ranks, *arguments, check=False)
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    assert f"eval at step {step} interrupted" in ended.stdout and "resume: " in ended.stdout
    assert ("saved step 1" in ended.stdout) == (step == 1)
    run_ranks(num_ranks, *arguments)
    # The mark is there: no signal comes.
    run_ranks(num_ranks, *arguments[:-1], str(tmp_path / "whole"))
    # Ranks share the groups differently in each run, and sums differ in the last digit.
    expected = lasting(metrics(tmp_path / "whole"))
    assert lasting(metrics(tmp_path / "run")) == [pytest.approx(row, rel=1e-5) for row in expected]


def test_ctrl_c_twice_ends_at_once(flags_of, tmp_path):
    code = "[os.kill(os.getpid(), 2) for _ in 'ab']; await asyncio.sleep(1000)"
    ended = run_ranks(
        1, "-m", "rl_core.train", *flags_of(code), "--out", tmp_path / "run", check=False
    )
    assert (
        ended.returncode == signal.SIGINT and "SIGINT: saves when this step is done" in ended.stderr
    )
    assert len(steps(tmp_path / "run")) == 1 and not list((tmp_path / "run/checkpoints").iterdir())


def test_a_run_that_gives_up_saves_before_and_repeats_the_step(flags_of, tmp_path, capsys):
    flags, parts, unbroken = (
        flags_of("raise KeyError('gone')"),
        tmp_path / "parts",
        tmp_path / "whole",
    )
    more = ["--num_steps", "4", "--rollout.max_failed_fraction", "0", "--out"]
    assert main([*flags, *more, str(parts)]) == 1
    assert (
        "gone" in capsys.readouterr().err
        and (parts / "checkpoints/step_000001/manifest.json").is_file()
    )
    (tmp_path / "env.mark").touch()
    for out in (parts, unbroken):
        assert main([*flags, *more, str(out), "--resume"]) == 0
    assert lasting(metrics(parts)) == lasting(metrics(unbroken))
    assert_same_weights(parts, unbroken)


@pytest.mark.parametrize("more", ["", "--max_staleness 1"])
def test_a_run_that_was_killed_before_its_export_makes_it_when_it_goes_on(more, flags_of, tmp_path):
    flags = words(flags_of("pass"), more, "--num_steps 2")
    out = run(tmp_path / "run", flags)
    before = weights(out)
    shutil.rmtree(out / "hf/policy")
    after = weights(run(out, flags, "--resume"))
    assert before and all(value.equal(after[name]) for name, value in before.items())


def test_a_run_saves_when_the_last_checkpoint_is_old(flags_of, tmp_path):
    out = run(
        tmp_path / "run", flags_of("pass"), "--num_steps 3 --save_minutes 1e-4 --keep_checkpoints 0"
    )
    assert len(list((out / "checkpoints").glob("step_*"))) == 3


def test_the_best_by_an_evaluation_is_kept(flags_of, tmp_path, capsys):
    flags, out = words(flags_of("pass"), "--eval_every 1 --eval.samples 0"), tmp_path / "run"
    run(out, flags, "--num_steps 4 --keep_best greedy_score")
    scores = {
        row["step"]: row["eval/env/greedy_score"]
        for row in metrics(out)
        if "eval/env/greedy_score" in row
    }
    best = json.loads((out / "best/best.json").read_text())
    assert best["greedy_score"] == max(scores.values()) == scores[best["step"]]
    assert len(set(scores.values())) > 1
    then = run(tmp_path / "then", flags, "--num_steps", max(1, best["step"]))
    if best["step"]:
        assert all(
            value.equal(weights(out / "best", ".").get(name, value))
            for name, value in weights(then).items()
        )
    assert main(words(flags, "--num_steps 1 --keep_best score --out", tmp_path / "other")) == 1
    assert (
        "--keep_best score is not a metric of this evaluation; it has greedy_failed, greedy_pass, "
        "greedy_reward/reward_fn, greedy_score" in capsys.readouterr().err
    )


NAN = float("nan")  # All episodes failed.


@pytest.mark.parametrize(
    "metric, values", [("greedy_score", (1.0, 2.0, 1.5, NAN)), ("loss", (3.0, 1.0, 2.0, NAN))]
)
def test_a_resumed_run_knows_the_highest_score_or_the_lowest_loss(metric, values, tmp_path):
    result = []
    for step, value in enumerate(values):
        run = SimpleNamespace(config=Config(keep_best=metric), out=tmp_path, ranks=init_ranks(60))
        keeper = BestKeeper(run)
        result.append(keeper.is_best({f"eval/env/{metric}": value}))
        if result[-1]:
            keeper.write(step)
    assert result == [True, True, False, False]


@pytest.mark.parametrize("full", ["rollouts", "checkpoints"])
def test_a_full_disk_is_named(full, flags_of, tmp_path, capsys):
    limit, out = resource.getrlimit(resource.RLIMIT_FSIZE), tmp_path / "run"
    code = "pass"
    if full == "rollouts":
        file = out / full / ".step_000002.jsonl.zst.tmp"
        code = f"mark.symlink_to('/dev/full'), os.replace(mark, {str(file)!r}), mark.touch()"
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limit[1]))
    try:
        assert main([*flags_of(code), *words("--num_steps 2 --out", out)]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert f"error: {out / full}/step_000002" in line and "make room there" in line


def test_a_full_disk_is_named_where_metrics_do_not_fit(tmp_path):
    log = RunLog(tmp_path, init_ranks(60))
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(
        OSError, match=f"{tmp_path}/metrics.jsonl: No space left on device; make room there"
    ):
        log.write(1, {"learn/loss": Mean(1.0)})
