"""Runs of every algorithm that are killed wherever they happen to be: each is resumed, ends with the
numbers and the weights of a run that nothing happened to, and leaves no process behind.

As a program this file is a run that counts how often it comes to each of PLACES, and is killed at
one of them.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import random
import signal
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from kit import STOP, RanksProcess, metrics, run_ranks, wait_until, words
from test_runs import (
    DPO,
    LORA,
    OLDER,
    PPO,
    RL,
    RM,
    SFT,
    SHARED,
    TALK,
    TWO,
    assert_same_weights,
    lasting,
)

# A phase -> the function that a run is killed at.
PLACES = {
    "generate": "rl_core.engines.embedded:EmbeddedEngine._step",
    "rollouts": "rl_core.run.saving.run_files:write_trajectories",
    "learn": "rl_core.learning.learner:Learner.step",
    "sync": "rl_core.actors:ActorRuntime.sync",
    "metrics": "rl_core.run.run_folder:RunLog.write",
    "eval": "rl_core.run.evaluation.evaluation:Evaluation.evaluate",
    "save": "torch.distributed.checkpoint:save",
    "rename": "os:rename",
    "export": "rl_core.run.saving.checkpointer:export_policy",
}
ASYNC = f"{TALK} {STOP} --tasks_per_step 2 --group_size 3 --deterministic true"
# Name -> flags, number of ranks.
SETUPS = {
    "grpo": (f"{RL} --eval_every 2 --eval.samples 0 --eval.num_tasks 2", 1),
    "stale": (f"{ASYNC} --max_staleness 2", 1),
    "sft": (SFT, 1),
    "engine rank": (f"{ASYNC} --max_staleness 1 --rollout_ranks 1", 2),
    "ppo": (f"{PPO} --critic.warmup_steps 1", 1),
    "stale dapo": (f"{ASYNC} --max_staleness 1 --algorithm dapo --env_path {{dir}}/digits.py", 1),
    "dr_grpo": (f"{RL} --algorithm dr_grpo --learner.updates_per_epoch 2", 1),
    "dapo": (f"{RL} --algorithm dapo --env_path {{dir}}/digits.py", 1),
    "gspo": (f"{RL} --algorithm gspo --algo.kl_coef 0.1 --learner.epochs 2", 1),
    "cispo": (f"{TALK} {STOP} --algorithm cispo", 1),
    "rloo": (f"{RL} --algorithm rloo --save_minutes 1e-4", 1),
    "reinforce_pp": (f"{RL} --algorithm reinforce_pp --algo.kl_coef 0.1", 1),
    "rm": (RM, 1),
    "dpo": (f"{DPO} --eval_every 2 --data.eval {{dir}}/pairs.jsonl", 1),
    "adapter": (f"{RL} {LORA}", 1),
    "two actors": (TWO, 1),
    "shared model": (f"{SHARED} --eval_every 2 --eval.samples 2 --eval.num_tasks 1", 1),
    "older weights": (f"{TALK} {STOP} {OLDER}", 1),
    "weighted tasks": (f"{ASYNC} --max_staleness 1 --env_path {{dir}}/weighted.py", 1),
    "stale, two actors": (
        f"{TWO} --tasks_per_step 2 --group_size 3 --deterministic true --max_staleness 1",
        1,
    ),
    "stale, with evaluations": (
        f"{ASYNC} --max_staleness 1 --eval_every 2 --eval.samples 0 --eval.num_tasks 2",
        1,
    ),
    "stale ppo": (f"{ASYNC} --max_staleness 1 --algorithm ppo --critic.lr 1e-2", 1),
    "stale, two ranks": (f"{ASYNC} --max_staleness 2", 2),
    "two ranks": (f"{RL} --deterministic true --learner.offload phase", 2),
    "stale, older weights": (f"{ASYNC} --max_staleness 1 {OLDER}", 1),
    "engine rank, older weights": (f"{ASYNC} --max_staleness 1 --rollout_ranks 1 {OLDER}", 2),
    "an actor apart": (
        f"{TWO} --actors.alice.ranks 1 --deterministic true --eval_every 2 --eval.samples 0",
        2,
    ),
    "two learners, two engines": (f"{ASYNC} --max_staleness 1 --rollout_ranks 2", 4),
}
NUM_FAULTS = 50
QUICK = 4  # Cases that every run of the tests plays.
WEIGHTED = "async def task_weight(prompt, mean_reward): return 1 + (mean_reward or 0)\n"


def attribute_of(point: str) -> tuple[object, str]:
    """The object that holds the function, and the attribute's name."""
    module, _, path = point.partition(":")
    *owners, name = path.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module)), name


def watch(calls: Counter, phase: str, number: int, kind: int) -> None:
    """Counts calls of all PLACES. At the call of `phase` with this number this process gets a
    signal."""

    def watched(name: str, function):
        @functools.wraps(function)
        def call(*args, **more):
            calls[name] += 1
            if (name, calls[name]) == (phase, number):
                os.kill(os.getpid(), kind)
            return function(*args, **more)

        return call

    for name, point in PLACES.items():
        owner, attribute = attribute_of(point)
        setattr(owner, attribute, watched(name, getattr(owner, attribute)))


class Fault:
    """A point at which a run is hit: one of the calls of an unharmed run."""

    def __init__(self, chance: random.Random, calls: list[Counter]):
        self.rank = chance.randrange(len(calls))
        self.phase = chance.choice(
            sorted(name for name, number in calls[self.rank].items() if number)
        )
        self.number = chance.randint(1, calls[self.rank][self.phase])
        self.kind = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])

    def __str__(self) -> str:
        return f"{self.kind.name} on rank {self.rank} at call {self.number} of {self.phase}"


@pytest.fixture
def start(places):
    """start(setup, out, fault) -> the exit status of a run that is resumed in that folder, if there is
    one. No process is left."""
    weighted = Path(places["dir"], "ask.py").read_text() + WEIGHTED.replace("async ", "")
    Path(places["dir"], "weighted.py").write_text(weighted)

    def run(setup: str, out: Path, fault: Fault | None = None) -> int:
        flags, num_ranks = SETUPS[setup]
        arguments = words(
            "--optim.lr 1e-2",
            flags.format(**places),
            "--num_steps 5 --save_every 2 --resume --out",
            out,
        )
        hit = (
            [fault.rank, fault.phase, fault.number, int(fault.kind)] if fault else [0, "none", 0, 0]
        )
        ranks = RanksProcess(num_ranks, __file__, out.with_suffix(""), *hit, *arguments)
        code = ranks.wait(120)
        wait_until(lambda: not is_alive(ranks.pid), "all processes of the run have ended", 30)
        assert code == 0 or fault, ranks.both()
        return code

    return run


def is_alive(group: int) -> bool:
    with suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


def check_fault(number: int, start, whole_of, tmp_path) -> None:
    setup = list(SETUPS)[number % len(SETUPS)]
    full, calls = whole_of(setup)
    chance, out = random.Random(number), tmp_path / "run"
    faults = [Fault(chance, calls) for _ in range(1 + number % 2)]
    label = f"{setup}: {', then '.join(map(str, faults))}"
    codes = [start(setup, out, fault) for fault in faults]
    # After the last step a signal has nothing to end.
    ends = {signal.SIGKILL: {9}, signal.SIGTERM: {15, 128 + 15, 0}}
    assert codes[0] in ends[faults[0].kind], f"{label}: not hit, ended with {codes}"
    start(setup, out)
    assert lasting(metrics(out)) == lasting(metrics(full)), label
    assert_same_weights(out, full)


@pytest.fixture
def whole_of(start, made_once):
    """whole_of(setup) -> the folder of a run that nothing happens to, and how often each rank comes
    to each place."""

    def full(setup: str) -> tuple[Path, list[Counter]]:
        folder = made_once(
            f"unharmed {setup}", lambda target: target.mkdir() or start(setup, target / "run")
        )
        files = sorted(folder.glob("run.calls.*"))
        return folder / "run", [Counter(json.loads(file.read_text())) for file in files]

    return full


@pytest.mark.parametrize("number", range(QUICK))
def test_a_run_that_is_killed_anywhere_goes_on_as_if_nothing_had_happened(
    number, start, whole_of, tmp_path
):
    check_fault(number, start, whole_of, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(QUICK, NUM_FAULTS))
def test_a_run_of_any_kind_that_is_killed_anywhere_goes_on(number, start, whole_of, tmp_path):
    check_fault(number, start, whole_of, tmp_path)


LONG = "--optim.lr 1e-2 --num_steps 100000"
TAUGHT, FROZEN = "--actors.alice.ranks 1", "--actors.alice.ranks 1 --actors.alice.train false"
IN_EVAL = f"{RL} --rollout_ranks 1 --eval_every 1 --eval.samples 40"
# A rank that plays no episodes -> flags, number of ranks, its rank, the phase in which it gets the signal.
APART = {
    "serves engines": (f"{ASYNC} --max_staleness 1 --rollout_ranks 1", 2, 1, "generate"),
    "serves engines, and is not the first": (f"{TALK} --rollout_ranks 2", 3, 2, "generate"),
    "serves engines, in an evaluation": (IN_EVAL, 2, 1, "generate"),
    "of an actor, samples": (f"{TWO} {TAUGHT}", 2, 1, "generate"),
    "of an actor, learns": (f"{TWO} {TAUGHT}", 2, 1, "learn"),
    "of an actor, learns and is not the first": (f"{TWO} --actors.alice.ranks 1-2", 3, 2, "learn"),
    "of a frozen actor": (f"{TWO} {FROZEN}", 2, 1, "generate"),
}
SIGNALS = {"of a frozen actor": signal.SIGINT, "of an actor, learns": signal.SIGUSR1}


@pytest.mark.parametrize("kind", APART)
def test_a_signal_at_a_rank_that_plays_nothing_ends_all_ranks(kind, places, tmp_path):
    flags, num_ranks, rank, phase = APART[kind]
    number, out = SIGNALS.get(kind, signal.SIGTERM), tmp_path / "run"
    # An evaluation takes 250 calls, a step 12: this one is in the second evaluation.
    call = 380 if flags == IN_EVAL else 2
    arguments = words(LONG, flags.format(**places), "--resume --out", out)
    hit = [tmp_path / "ended", rank, phase, call, int(number)]
    ranks = RanksProcess(num_ranks, __file__, *hit, *arguments)
    ranks.wait(60)
    codes = [Path(f"{hit[0]}.code.{each}").read_text() for each in range(num_ranks)]
    assert codes == [str(128 + number)] * num_ranks, ranks.both()
    last = metrics(out)[-1]["step"]
    assert (out / f"checkpoints/step_{last:06d}/manifest.json").is_file()
    assert f"ended by {number.name}" in ranks.text("stdout")
    interrupted = "eval at step 1 interrupted; --resume repeats it" in ranks.text("stdout")
    assert interrupted == (flags == IN_EVAL)
    resumed = run_ranks(num_ranks, "-m", "rl_core.train", *arguments, "--num_steps", last + 1)
    assert f"continues from step {last}" in resumed.stdout


if __name__ == "__main__":
    from rl_core.train import main

    out, rank, phase, number, kind, *flags = sys.argv[1:]
    of_one, calls = os.environ["RANK"], Counter()
    watch(calls, phase if of_one == rank else "none", int(number), int(kind))
    status = main(flags)
    Path(f"{out}.calls.{of_one}").write_text(json.dumps(calls))
    Path(f"{out}.code.{of_one}").write_text(str(status))
    sys.exit(status)
