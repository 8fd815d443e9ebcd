"""A loss or gradient that is NaN or infinite: the update is skipped, its batch kept, and the run stopped after several."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math

import pytest
import torch
from safetensors.torch import load_file
from test_learner import FLAGS, ragged_samples
from test_train import metrics

from rl_core.command_line import parse_config
from rl_core.data.packing import pack_samples, shard_sequences
from rl_core.distributed import init_ranks
from rl_core.learning.algorithms import make_algorithm
from rl_core.learning.learner import Learner
from rl_core.learning.model import make_policy
from rl_core.learning.nonfinite import SkippedUpdate, load_update, save_update
from rl_core.train import main
from rl_core.types import RunError


def make_learner(model, out, *flags) -> Learner:
    flags = [*FLAGS, "--model", str(model), "--out", str(out), "--optim.lr", "1e-3", *flags]
    config = parse_config(flags)
    ranks = init_ranks(60)
    policy = make_policy(str(model), torch.float32, ranks, False)
    return Learner(config, make_algorithm("grpo", config.algo), policy, ranks)


def step_with(learner, advantage, step):
    """One step on samples of which one has this advantage in one token."""
    samples = ragged_samples(seed=step)
    if advantage is not None:
        samples[2].advantages[samples[2].loss_mask.index(1)] = advantage
    return learner.step(learner.shard(samples)[0], step)


def state_of(learner):
    weights = [p.detach().clone() for p in learner.policy.parameters()]
    return weights, copy.deepcopy(learner.optimizer.state_dict()["state"])


def assert_equal_state(a, b):
    assert all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))
    assert a[1].keys() == b[1].keys() and len(a[1]) > 0
    assert all(torch.equal(value, b[1][i][kind]) for i, kinds in a[1].items() for kind, value in kinds.items())


@pytest.mark.parametrize("what", ["advantage inf", "advantage nan", "weights"])
def test_an_update_that_is_not_finite_changes_nothing_and_its_batch_can_be_replayed(what, tiny_model, tmp_path, capsys):
    learner = make_learner(tiny_model, tmp_path, "--learner.microbatch_tokens", "150")
    assert step_with(learner, None, 0)["updates"].value == 1
    if what == "weights":
        with torch.no_grad():  # finite, but what it is multiplied with overflows
            next(learner.policy.parameters()).mul_(1e30)
    before = state_of(learner)
    found = step_with(learner, None if what == "weights" else float(what.split()[1]), 6)
    assert {name: m.value for name, m in found.items()} == {"nonfinite_updates": 1}
    assert_equal_state(before, state_of(learner))
    assert all(p.grad is None for p in learner.policy.parameters())

    file = tmp_path / "nonfinite/policy/step_000007.update_000.rank_00000.safetensors"
    said = capsys.readouterr().out
    assert "step 000007, update 000: not finite on rank 0: gradient norm nan" in said and str(file) in said
    batches, facts = load_update(file)
    assert len(batches) > 1 and ("advantages of the batch" in facts["not_finite"]) == what.startswith("advantage")
    replayed = sum((learner.losses(batch)[0].sum() / facts["denominator"]).item() for batch in batches)
    assert facts["loss"] == repr(replayed)
    # Of such weights the loss is finite and the gradient is not.
    assert math.isfinite(replayed) == (what == "weights")

    if what != "weights":
        assert step_with(learner, None, 7)["updates"].value == 1


def test_the_run_stops_at_one_more_in_a_row_than_are_allowed_and_names_the_batch(tiny_model, tmp_path):
    learner = make_learner(tiny_model, tmp_path, "--learner.max_nonfinite_updates", "1")
    for step, advantage in enumerate([math.inf, None, math.nan, None, -math.inf]):
        assert ("updates" in step_with(learner, advantage, step)) == (advantage is None)
    before = state_of(learner)
    with pytest.raises(RunError, match=r"step 000006.*loss nan.*number 2 in a row.*max_nonfinite_updates=1") as error:
        step_with(learner, math.nan, 5)
    assert_equal_state(before, state_of(learner))
    kept = sorted(path.name for path in (tmp_path / "nonfinite/policy").iterdir())
    names = [f"step_00000{n}.update_000.rank_00000" for n in (5, 6)]
    assert kept == [f"{name}.{kind}" for name in names for kind in ("json", "safetensors")]
    assert str(tmp_path / f"nonfinite/policy/{names[1]}.safetensors") in str(error.value)


def rm_flags(model, folder, margins, *more):
    """A reward model, one pair a rank. A pair's margin of 1e300 is infinite in fp32: so is its loss, but not its gradient."""
    rows = [{"prompt": "52341", "chosen": "12345", "rejected": f"5{i}", "margin": m} for i, m in enumerate(margins)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--algorithm", "rm", "--model", model, "--data.train", folder / "pairs.jsonl", "--data.shuffle", "false"]
    flags += ["--out", folder / "run", "--max_prompt_tokens", 20, "--max_tokens", 8, "--optim.lr", "1e-3"]
    return [
        str(f)
        for f in [
            *flags,
            "--tasks_per_step",
            2,
            "--num_steps",
            len(margins) // 2,
            "--save_every",
            1,
            "--keep_checkpoints",
            0,
            *more,
        ]
    ]


@pytest.mark.parametrize(
    "num_ranks, more", [(1, []), (2, []), pytest.param(2, ["--dp_replicate", 2], marks=pytest.mark.slow)]
)
def test_an_infinite_loss_on_one_rank_skips_the_update_on_all(num_ranks, more, tiny_model, tmp_path, torchrun):
    """Its gradient alone would be finite. Also where each rank has all weights, and a norm of its own."""
    flags = rm_flags(tiny_model, tmp_path, [0, 0.5, 0, 1e300, 0, 0], *more)
    if num_ranks == 1:
        assert main(flags) == 0
    else:
        torchrun(num_ranks, "-m", "rl_core.train", *flags)
    rows = metrics(tmp_path / "run")
    assert [row.get("learn/policy/nonfinite_updates") for row in rows] == [None, pytest.approx(1), None]
    assert [row.get("learn/policy/updates") for row in rows] == [pytest.approx(1), None, pytest.approx(1)]
    assert "learn/policy/loss" not in rows[1] and math.isfinite(rows[2]["learn/policy/grad_norm"])

    facts = {}
    for rank in range(num_ranks):
        name = f"step_000002.update_000.rank_{rank:05d}.safetensors"
        batches, facts[rank] = load_update(tmp_path / "run/nonfinite/policy" / name)
        assert sum(len(b.order) for b in batches) == 4 // num_ranks
    assert sorted(f["loss"] for f in facts.values())[-1] == "inf"
    assert sum("loss inf" in f["not_finite"] for f in facts.values()) == 1
    saved = [{}, {}, {}]  # weights and the optimizer's state of all ranks; those of a copy are saved once
    for step, rank in itertools.product(range(3), range(num_ranks)):
        found = load_file(tmp_path / f"run/checkpoints/step_{step + 1:06d}/policy/rank_{rank:05d}.safetensors")
        saved[step] |= {(rank, name): value for name, value in found.items()}
    one, two, three = saved
    assert one.keys() == two.keys() == three.keys() and any("exp_avg_sq/" in name for _, name in one)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(two[name], three[name]) for name in one)


def test_two_ranks_stop_together_with_one_message(tiny_model, tmp_path, torchrun):
    flags = rm_flags(tiny_model, tmp_path, [0, 1e300] * 4, "--learner.max_nonfinite_updates", 1)
    done = torchrun(2, "-m", "rl_core.train", *flags, check=False)
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "step 000002" in line and "loss inf" in line and "number 2 in a row" in line
    (row,) = metrics(tmp_path / "run")
    assert row["learn/policy/nonfinite_updates"] == pytest.approx(1)


@pytest.mark.parametrize("algorithm, learners", [("grpo", [""]), ("ppo", ["critic_", ""])])
def test_rewards_beyond_the_range_of_fp32_stop_a_run(algorithm, learners, tiny_model, tmp_path, capsys):
    """Its critic counts, and keeps what it skipped, on its own."""
    (tmp_path / "env.py").write_text(
        """def load_tasks(split): return [{"prompt": str(n)} for n in range(8)]
def reward_fn(completion): return 1e300 * len(completion)"""
    )
    flags = ["--algorithm", algorithm, "--model", tiny_model, "--env_path", tmp_path / "env.py", "--max_tokens", 8]
    flags += ["--algo.advantage", "group_mean"] if algorithm == "grpo" else []
    flags += ["--tasks_per_step", 2, "--num_steps", 4, "--learner.max_nonfinite_updates", 1, "--out", tmp_path / "run"]
    assert main([str(f) for f in flags]) == 1
    error = capsys.readouterr().err
    assert "error: step 000002" in error and "advantages of the batch" in error and "number 2 in a row" in error
    (row,) = metrics(tmp_path / "run")
    assert [row[f"learn/policy/{name}nonfinite_updates"] for name in learners] == [1] * len(learners)
    kept = {path.name for path in (tmp_path / "run/nonfinite/policy").glob("step_000001*.safetensors")}
    assert kept == {f"step_000001.update_000.{name.replace('_', '.')}rank_00000.safetensors" for name in learners}


def test_the_shard_of_a_batch_is_saved_with_it(tmp_path):
    batches = [shard_sequences(pack_samples(ragged_samples(seed=i), 2), 2, 1) for i in range(2)]
    update = SkippedUpdate(name="update", batches=batches, denominator=7, loss=math.nan, grad_norm=math.inf, lr=0.1)
    found, facts = load_update(save_update(update, ["loss nan"], tmp_path, init_ranks(60)))
    assert [float(facts[name]) for name in ("denominator", "grad_norm", "lr")] == [7, math.inf, 0.1]
    for a, b in zip(batches, found, strict=True):
        for one, two in ((a, b), (a.shard, b.shard)):
            for f in dataclasses.fields(one):
                x, y = getattr(one, f.name), getattr(two, f.name)
                if f.name != "shard":
                    assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y, f.name


def test_a_limit_below_nothing_is_refused(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="max_nonfinite_updates=-1 must be at least 0"):
        make_learner(tiny_model, tmp_path, "--learner.max_nonfinite_updates", "-1")
