"""Actors with separate ranks (--actors.NAME.ranks): they learn the same as on shared ranks,
at the same time, and nobody waits for ever.

As a program this file is a run whose optimizers do something more: the first argument names it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import test_kills
from kit import STOP, metrics, resume_after, run, run_ranks, steps, trajectories, words
from test_runs import COMPARED, assert_same_weights, lasting

from rl_core.config import Config, parse_config, to_yaml
from rl_core.config.rank_groups import numbers
from rl_core.distributed import Mesh
from rl_core.engines.rank_groups import RankGroup, make_rank_groups
from rl_core.run.plan.option_rules import check_options
from rl_core.run.rank_group_client import from_text, to_text
from rl_core.types import PER_TOKEN, TrainingSample

# Episodes of rank 1 begin late.
TALK = """
import asyncio, os

def load_tasks(split):
    return [{"prompt": f"{n} and {n * 7 % 10}"} for n in range(8)]

turns = "bob -> judge -> alice -> bob"

async def start(task):
    await asyncio.sleep(DELAY_S * (os.environ.get("RANK") == "1"))

async def reward_fn(completion, actor):
    return sum(map(ord, completion)) / (1000 if actor == "bob" else -1000)
"""
# Bob and Alice learn, the judge is frozen. Not AdamW, which makes a step of full size out of a
# gradient that is nothing but rounding.
THREE = (
    "--actors.bob.model {model} --actors.alice.model {other} --actors.judge.model {other} "
    "--actors.judge.train false --env_path {env} --max_tokens 12 --max_prompt_tokens 80 "
    "--tasks_per_step 4 --group_size 4 --num_steps 2 --optim.name sgd --optim.lr 0.05 "
    f"--timeout_s 60 {STOP}"
)
LORA = "--actors.alice.lora.rank 4 --actors.bob.lora.rank 2 --optim.lr 0.5"
WAIT_S = 90.0


@pytest.fixture(scope="module")
def make_flags(places, tmp_path_factory):
    """given(flags) -> arguments."""
    folder = tmp_path_factory.mktemp("places")
    for name, delay_s in (("env", 0), ("slow", 2)):
        (folder / f"{name}.py").write_text(TALK.replace("DELAY_S", str(delay_s)))
    files = {name: folder / f"{name}.py" for name in ("env", "slow")}
    return lambda *flags: words(*(str(flag).format(**files, **places) for flag in flags))


@pytest.fixture(scope="module")
def together(make_flags, tmp_path_factory):
    """together(flags) -> the folder of a run in which all actors share one rank."""
    folders: dict[str, Path] = {}

    def made(flags: str) -> Path:
        if flags not in folders:
            folders[flags] = run(
                tmp_path_factory.mktemp("together") / "run", make_flags(THREE, flags)
            )
        return folders[flags]

    return made


def assert_same_run(one: Path, two: Path) -> None:
    """Sampled tokens, learning metrics, and the weights."""
    assert any("learn/alice/loss" in row for row in metrics(one))
    for a, b in zip(metrics(one), metrics(two), strict=True):
        names = [n for n in a if n.endswith(COMPARED) and "mismatch" not in n]
        expected = {n: a[n] for n in names}
        assert {n: b.get(n) for n in names} == pytest.approx(expected, abs=1e-5, rel=1e-4)
    assert sampled(one) == sampled(two)
    assert_same_weights(one, two, atol=1e-5, rtol=1e-4)


def sampled(out: Path) -> list:
    """(step, group, episode, actor, tokens of its turns, versions of their weights)"""
    result = []
    for file in out.glob("rollouts/*.zst"):
        for t in trajectories(file):
            completions = [turn["completion"] for turn in t["turns"]]
            tokens = [completion["token_ids"] for completion in completions]
            versions = [completion["policy_version"] for completion in completions]
            step = file.name[: len("step_000001")]
            result.append((step, t["group_id"], t["index"], t["actor"], tokens, versions))
    return sorted(result)


# Name -> ranks, flags of both runs, flags of the one whose actors have ranks.
APART = {
    "one each, and a judge": (
        3,
        "--actors.alice.update_every 2",
        "--actors.alice.ranks 2 --actors.judge.ranks 1",
    ),
    "none learns where episodes are played": (
        3,
        "--algo.kl_coef 0.1",
        "--actors.alice.ranks 1 --actors.bob.ranks 2",
    ),
    "two of a place take turns": (
        2,
        "--learner.offload phase",
        "--actors.alice.ranks 1 --actors.judge.ranks 1 --rollout.engines_awake one",
    ),
    "one and three, adapters": (4, LORA, "--actors.alice.ranks 1-3"),
    "a critic, two halves of each sequence": (
        4,
        "--actors.alice.algorithm ppo --actors.alice.critic.lr 1e-2 --learner.epochs 2",
        "--actors.alice.ranks 1,3 --cp 2",
    ),
    "a teacher of one environment": (
        2,
        "--env_path {env},{slow} --algo.teacher {model} --envs.slow.teacher none",
        "--actors.alice.ranks 1",
    ),
}


@pytest.mark.parametrize("case", APART)
def test_actors_apart_learn_what_they_learn_together(case, make_flags, together, tmp_path):
    num_ranks, flags, apart = APART[case]
    out = run(tmp_path / "apart", make_flags(THREE, flags, apart), ranks=num_ranks)
    assert_same_run(together(flags), out)


def test_ranks_that_take_longer_than_others_are_waited_for(make_flags, together, tmp_path):
    out = tmp_path / "run"
    flags = make_flags(THREE, "--env_path {slow} --actors.alice.ranks 2-3 --optim.name delayed")
    run_ranks(4, __file__, "delayed", *flags, "--out", str(out))
    assert_same_run(together(""), out)


def test_two_places_learn_at_the_same_time(make_flags, together, tmp_path):
    out = tmp_path / "run"
    flags = make_flags(THREE, "--actors.alice.ranks 1 --optim.name meeting --out", out)
    run_ranks(2, __file__, "meeting", *flags)
    spans = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("met_*"))]
    assert len(spans) == 4
    for (_, a, b), (_, c, d) in zip(spans[::2], spans[1::2], strict=True):
        assert max(a, c) < min(b, d), "one had ended before the other began"
    assert_same_run(together(""), out)


RESUMED = "--optim.name adamw --optim.lr 1e-2"


def test_a_resumed_run_is_the_uninterrupted_run(make_flags, tmp_path):
    flags = make_flags(THREE, RESUMED, "--actors.alice.ranks 1-2 --actors.judge.ranks 3")
    flags += words("--num_steps 3 --save_every 1 --keep_checkpoints 0")
    out = run(tmp_path / "run", flags, ranks=4)
    full = resume_after(out, 1, flags, ranks=4)
    assert lasting(steps(full)) == lasting(steps(out))
    assert_same_weights(full, out)
    saved = json.loads((out / "checkpoints/step_000003/state.json").read_text())
    assert saved["optimizers"].keys() == {"bob", "alice"}
    assert {item["steps"] for item in saved["optimizers"].values()} == {3}
    # From a run in which the actors share a rank, and back to one.
    shared = run(tmp_path / "shared", make_flags(THREE, RESUMED, "--num_steps 1"))
    apart = make_flags(THREE, RESUMED, "--num_steps 2 --actors.alice.ranks 1 --resume")
    run(shared, apart, ranks=2)
    run(shared, make_flags(THREE, RESUMED, "--num_steps 3 --resume"))
    assert_same_weights(full, shared, atol=1e-3, rtol=1e-3)


# The rank and the call at which it is killed.
KILLED = {
    "a place learns": (2, "learn", 1),
    "a place samples": (3, "generate", 5),
    "a place saves": (2, "save", 1),
    "rank 0 plays": (0, "generate", 5),
}


SELDOM = {"a place samples", "a place saves"}
WHERE = [pytest.param(name, marks=pytest.mark.slow if name in SELDOM else ()) for name in KILLED]


@pytest.mark.parametrize("where", WHERE)
def test_a_run_that_loses_a_rank_ends_soon_and_goes_on(where, make_flags, together, tmp_path):
    rank, phase, number = KILLED[where]
    out, flags = (
        tmp_path / "run",
        make_flags(THREE, "--actors.alice.ranks 2-3 --save_every 1 --out"),
    )
    hit = [tmp_path / "calls", rank, phase, number, 9]
    done = run_ranks(4, test_kills.__file__, *hit, *flags, out, check=False, timeout_s=60)
    assert done.returncode == 9, done.stderr
    assert done.stderr.count("error: ") <= 1
    run(out, *flags[:-1], "--resume", ranks=4)
    assert_same_weights(together(""), out, atol=1e-5, rtol=1e-4)


def test_what_goes_wrong_in_a_place_is_told_once_with_its_ranks(make_flags, tmp_path):
    flags = make_flags(
        THREE, "--actors.alice.ranks 2-3 --optim.name broken --out", tmp_path / "run"
    )
    done = run_ranks(4, __file__, "broken", *flags, check=False, timeout_s=60)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode and len(errors) == 1, done.stderr
    assert "ranks 2-3 (alice): RuntimeError: the optimizer is out of order" in errors[0]


def test_a_place_that_does_not_come_within_the_deadline_is_named(make_flags, tmp_path):
    flags = make_flags(THREE, "--actors.alice.ranks 1 --optim.name stuck --timeout_s 3 --out")
    done = run_ranks(2, __file__, "stuck", *flags, tmp_path / "run", check=False, timeout_s=60)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode and len(errors) == 1, done.stderr
    assert "rank 1 (alice): gone, or without an answer for --timeout_s=3" in errors[0]


def test_first_lines_evaluations_and_checks_of_engines(make_flags, tmp_path):
    config, out = tmp_path / "config.yaml", tmp_path / "run"
    apart = "--actors.alice.ranks 2-3 --actors.judge.ranks 1 --eval_every 1 --eval.samples 0 "
    apart += "--dp_replicate 1"  # An engine that reads the learner's weights has no check.
    flags = make_flags(THREE, apart, "--eval.num_tasks 2 --keep_best greedy_score")
    config.write_text(to_yaml(parse_config([*flags, "--out", str(out)])))
    done = run_ranks(4, "-m", "rl_core.train", "--config", config)
    assert "(learns on ranks 2-3)" in done.stdout
    assert "(frozen on rank 1)" in done.stdout and "4 x CPU" in done.stdout
    for row in steps(out):
        assert 0 <= row["learn/alice/canary_max_diff"] < 1e-3
        assert row["time/rank_groups_s"] > 0 and row["rollout/alice/tokens"] > 0
    assert sorted(path.name for path in (out / "best").iterdir() if path.is_dir()) == [
        "alice",
        "bob",
    ]


MODEL = "--actors.bob.model b --actors.alice.model a --env_path e.py --out runs/x"
REFUSED = [
    ("--actors.alice.ranks 4-7", "there are ranks 0 to 3"),
    ("--actors.alice.ranks 3-2", "must be numbers of ranks, such as 4-7 or 4,5"),
    ("--actors.alice.ranks one", "must be numbers of ranks"),
    ("--actors.alice.ranks 0-1", "rank 0 plays the episodes"),
    ("--actors.alice.ranks 1-2 --actors.bob.ranks 2-3", "overlap partly"),
    (
        "--actors.alice.ranks 1-3 --actors.bob.train false --tp 2",
        "ranks 1-3 (alice): --dp_replicate 1 * --cp 1 * --tp 2",
    ),
    ("--actors.alice.ranks 3 --tp 2", "ranks 0-2 (bob): "),
    ("--actors.alice.ranks 3 --rollout_ranks 1", "leave one out"),
    ("--actors.alice.ranks 3 --max_staleness 1", "leave one out"),
    (
        "--actors.alice.ranks 3 --rollout.stale_policy_frac 0.5 --rollout.stale_policy_refresh 4",
        "leave one out",
    ),
    (
        "--actors.bob.lora.rank 4 --actors.alice.model b --actors.alice.lora_base bob "
        "--actors.alice.ranks 3",
        "give ranks to bob",
    ),
    ("--actors.alice.ranks 3 --actors.alice.api http://x/v1", "leave one out"),
    ("--actors.alice.ranks 3 --actors.alice.engine_urls http://x:1", "leave one out"),
    (
        "--actors.alice.ranks 3 --actors.bob.algo.teacher alice --actors.bob.algorithm opd",
        "learns on other ranks than bob",
    ),
    ("--actors.alice.ranks 3 --actors.alice.router_replay true", "are not sent over HTTP"),
]


@pytest.mark.parametrize("flags, message", REFUSED)
def test_what_ranks_of_an_actors_own_do_not_go_with_is_refused(flags, message):
    with pytest.raises(ValueError) as refused:  # noqa: PT012 any may raise
        config = parse_config(words(MODEL, flags))
        check_options(config)
        make_rank_groups(config, 4)
    assert message in str(refused.value)


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "rm"])
def test_rows_are_learned_on_all_ranks(algorithm):
    with pytest.raises(ValueError, match=r"actors.policy.ranks=1 has no meaning for --algorithm"):
        parse_config(words("--model m --actors.policy.ranks 1 --out x --algorithm", algorithm))


def test_places_have_what_is_left_first():
    assert numbers("4-6,8") == (4, 5, 6, 8)
    flags = "--actors.bob.lora.rank 4 --actors.alice.ranks 2-3 --actors.carol.lora_base bob"
    config = parse_config(words(MODEL, flags, "--actors.bob.ranks 5,7 --tp 2"))
    assert make_rank_groups(config, 8) == [
        RankGroup(ranks=(0, 1, 4, 6), actors=[], mesh=Mesh(dp_shard=4)),
        RankGroup(ranks=(5, 7), actors=["bob", "carol"], mesh=Mesh(tp=2)),
        RankGroup(ranks=(2, 3), actors=["alice"], mesh=Mesh(tp=2)),
    ]
    assert isinstance(config, Config)


def test_all_of_a_sample_travels():
    """Its environment too, by which a teacher of some environments knows its samples."""
    one = TrainingSample(
        token_ids=[5, 6, 7, 8],
        loss_mask=[0, 0, 1, 1],
        rollout_logprobs=[0, 0, -0.5, -0.25],
        policy_versions=[-1, -1, 3, 4],
        advantages=[0, 0, 1, -2],
        group_id="3:task\n4",
        env="söme.py",
        experts=np.arange(6, dtype=np.int16).reshape(3, 1, 2),
        kept_ids=["7 9", "8"],
        teacher_ids=np.array([30, 31]),
    )
    plain = {name: getattr(one, name) for name in PER_TOKEN}
    other = TrainingSample(group_id="4", env="", **plain)
    result = from_text(to_text([one, other]))
    assert len(result) == 2 and from_text(to_text([])) == []
    for sent, received in zip([one, other], result, strict=True):
        for field in dataclasses.fields(TrainingSample):
            wanted, value = getattr(sent, field.name), getattr(received, field.name)
            np.testing.assert_array_equal(value, wanted, field.name, strict=True)


def meet(folder: Path, actor: str, number: int) -> None:
    """Returns once both actors have begun their update of this number."""
    (folder / f"{actor}_{number}").touch()
    deadline = time.monotonic() + WAIT_S
    while any(not (folder / f"{name}_{number}").exists() for name in ("bob", "alice")):
        assert time.monotonic() < deadline, f"{actor} learns alone"
        time.sleep(0.01)


def optimizer(kind: str, folder: Path):
    """A hook before each optimizer step, in a run that is this file as a program."""
    import torch

    from rl_core.learning.optimizers import parameter_groups

    class Slow(torch.optim.SGD):
        number = 0

        def step(self, closure=None):
            rank = int(os.environ["RANK"])
            self.number += 1
            began = time.time()
            if kind == "delayed":
                time.sleep(random.random() / 2)
            elif kind == "broken" and rank == 3:
                raise RuntimeError("the optimizer is out of order")
            elif kind == "stuck" and rank == 1:
                time.sleep(WAIT_S)
            elif kind == "meeting":
                meet(folder, ("bob", "alice")[rank], self.number)
            super().step(closure)
            if kind == "meeting":
                span = json.dumps([rank, began, time.time()])
                (folder / f"met_{self.number}_{rank}").write_text(span)

    def make(named, config):
        groups = parameter_groups(named, config.weight_decay)
        return Slow(groups, lr=config.lr, momentum=config.betas[0])

    return lambda: make


if __name__ == "__main__":
    from rl_core.learning.options import OPTIMIZERS
    from rl_core.train import main

    kind, *flags = sys.argv[1:]
    out = Path(flags[flags.index("--out") + 1])
    OPTIMIZERS[kind] = optimizer(kind, out.parent)
    sys.exit(main(flags))
