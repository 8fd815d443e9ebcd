"""rl-core replay: a recorded step is learned again, from checkpoints and rollouts alone."""

from __future__ import annotations

import json

import pytest
import torch
import zstandard
from kit import STOP, run, run_ranks, steps, trajectories, words
from transformers import AutoModelForCausalLM

from rl_core.data.row_files import read_json
from rl_core.tools.cli import main

RL = (
    "--max_tokens 10 --max_prompt_tokens 40 --tasks_per_step 4 --group_size 4 --optim.lr 1e-2 "
    f"{STOP}"
)
ASK = "--model {model} --env_path {dir}/ask.py " + RL
TALK = (
    "--actors.bob.model {model} --actors.alice.lora_base bob --actors.bob.lora.rank 4 "
    "--actors.alice.optim.lr 3e-3"
)
TALK += " --env_path {dir}/talk.py --max_tokens 20 --algo.kl_coef 0.1 " + RL


def replayed(capsys, out, *flags) -> dict:
    capsys.readouterr()
    assert main(words("replay", out, "--json", *flags)) == 0
    return json.loads(capsys.readouterr().out)


def exact(result: dict, row: dict) -> None:
    """Every loss and gradient norm is the recorded one, to the last bit, not only in the
    words of the command."""
    names = [name for name in row if name.endswith(("loss", "grad_norm"))]
    assert names and all(result["replayed"][n] == result["recorded"][n] == row[n] for n in names)
    assert min(row[name] for name in names if name.endswith("grad_norm")) > 1e-4


@pytest.mark.parametrize(
    "flags, saved, begins",
    [
        (ASK, "--save_every 3 --eval_every 4 --eval.samples 0 --eval.num_tasks 1", "/checkpoints/step_000003"),
        (ASK + " --learner.updates_per_epoch 2", "--save_every 2", "/checkpoints/step_000002, and step 3 learned again"),
        (ASK + " --algorithm ppo --optim.warmup_steps 2", "", "the model with which the run began, and steps 1 to 3"),
        (TALK, "--save_every 2", "/checkpoints/step_000002, and step 3"),
    ],
    ids=["checkpoint", "minibatches", "ppo-from-the-start", "two-adapters"],
)  # fmt: skip
def test_a_replayed_step_has_the_loss_and_gradient_norm_that_were_recorded(
    flags, saved, begins, places, tmp_path, capsys
):
    out = run(tmp_path / "run", flags.format(**places), "--num_steps 4", saved)
    result = replayed(capsys, out, "--step 4")
    assert begins in result["begins"] and result["between"] == 0.0
    exact(result, steps(out)[3])
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    # A difference in an earlier step is reported, too.
    kept = '{"step": 4' if result["begins"].endswith("again") else "none"
    lines = [
        line if line.startswith(kept) else line.replace('/grad_norm": ', '/grad_norm": 1')
        for line in lines
    ]
    (out / "metrics.jsonl").write_text("".join(lines))
    assert main(words("replay", out)) == 0  # The newest step.
    assert "warning: loss or gradient norm is not the recorded one" in capsys.readouterr().out


@pytest.mark.parametrize("algorithm", ["grpo", "ppo --critic.lr 1e-2"])
def test_another_objective_begins_with_the_runs_weights(algorithm, places, tmp_path, capsys):
    flags = (
        ASK.format(**places)
        + f" --actors.policy.optim.lr 3e-3 --algorithm {algorithm} --learner.epochs 2"
    )
    out = run(tmp_path / "run", flags, "--num_steps 2 --save_every 1")
    same = replayed(capsys, out, "--step 2 --algo.clip_low 0.2")  # The run's value.
    assert same["is_other"]
    exact(same, steps(out)[1])  # Two updates: the second depends on the optimizer's state.
    other = replayed(capsys, out, "--step 2 --algorithm gspo")[
        "replayed"
    ]  # Some metrics of the run have no meaning for it.
    assert other["learn/policy/updates"] == 2 and "learn/policy/critic_loss" not in other


def test_another_algorithm_has_the_advantages_of_the_recorded_rewards(places, tmp_path, capsys):
    out = run(tmp_path / "run", ASK.format(**places), "--num_steps 2 --save_every 1")
    rows = trajectories(out / "rollouts/step_000002.jsonl.zst")
    total, num = 0.0, 0
    for row in rows:
        group = [other["reward"] for other in rows if other["group_id"] == row["group_id"]]
        sampled = sum(len(turn["completion"]["token_ids"]) for turn in row["turns"])
        total -= (row["reward"] - sum(group) / len(group)) * sampled
        num += sum(turn["is_fresh"] for turn in row["turns"])
    # Over as many tokens as a sequence may have.
    result = replayed(capsys, out, "--step 2 --algorithm dr_grpo")
    assert result["replayed"]["learn/policy/loss"] == pytest.approx(
        total / (num * 10 * 3), rel=1e-5, abs=1e-9
    )
    with_kl = replayed(capsys, out, "--step 2 --algo.kl_coef 0.5")
    assert "learn/policy/ref_kl_nats" in with_kl["replayed"]
    file = out / "rollouts/step_000002.jsonl.zst"
    # No group has a signal.
    lines = "".join(json.dumps(row | {"reward": 1.0}) + "\n" for row in read_json(file))
    file.write_bytes(zstandard.compress(lines.encode()))
    replayed(capsys, out, "--step 2 --tokens")
    turns = [
        turn for line in read_json(out / "tokens/step_000002.jsonl.zst") for turn in line["turns"]
    ]
    sampled = [len(turn["completion"]["token_ids"]) for row in rows for turn in row["turns"]]
    assert [(len(turn["logprobs"]), set(turn["advantages"])) for turn in turns] == [
        (num, {0.0}) for num in sampled
    ]


def test_ranks_replay_their_own_rollouts_and_one_process_those_of_all(places, tmp_path, capsys):
    out = run(tmp_path / "run", ASK.format(**places), "--num_steps 1", ranks=2)
    output = run_ranks(
        2, "-m", "rl_core.tools.cli", "replay", out, *words("--step 1 --json --tokens")
    ).stdout
    exact(json.loads(output), steps(out)[0])
    alone = replayed(capsys, out, "--step 1")["replayed"]
    for name in ("learn/policy/loss", "learn/policy/grad_norm"):
        assert alone[name] == pytest.approx(steps(out)[0][name], rel=1e-5)
    checked = 0
    with torch.no_grad():
        before, after = (
            AutoModelForCausalLM.from_pretrained(m) for m in (places["model"], out / "hf/policy")
        )
        for rank in range(2):
            name = f"step_000001.rank_{rank:05d}.jsonl.zst"
            pairs = zip(
                read_json(out / "tokens" / name), trajectories(out / "rollouts" / name), strict=True
            )
            for line, row in pairs:
                assert all(
                    line[key] == row[key]
                    for key in ("task_id", "group_id", "index", "actor", "player")
                )
                for values, turn in zip(line["turns"], row["turns"], strict=True):
                    old, entropy = by_transformers(before, turn)
                    new, _ = by_transformers(after, turn)
                    assert values["logprobs"] == pytest.approx(old.tolist(), abs=1e-4)
                    assert values["entropy_nats"] == pytest.approx(entropy.tolist(), abs=1e-4)
                    assert values["ratios"] == pytest.approx((new - old).exp().tolist(), abs=1e-3)
                    assert len(set(values["advantages"])) == 1
                    checked += 1
    assert checked > 16


def by_transformers(model, turn: dict) -> tuple[torch.Tensor, torch.Tensor]:
    output = turn["completion"]["token_ids"]
    logits = model(torch.tensor([turn["prompt_ids"] + output])).logits[
        0, len(turn["prompt_ids"]) - 1 : -1
    ]
    all_logprobs = logits.log_softmax(-1)
    return all_logprobs.gather(1, torch.tensor(output)[:, None])[:, 0], -(
        all_logprobs.exp() * all_logprobs
    ).sum(-1)


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--step 1 --max_tokens 5", "--max_tokens is for sampling, or for more than one step"),
        ("--step 1 --algorithm sft", "--algorithm sft: replay is for reinforcement learning"),
        ("--step 2 --algo.clip_low 0.1", "needs the checkpoint of the step before"),
        ("--step 3", "--step 3: no episodes in"),
        ("--step 0", "steps with step episodes: 1, 2"),
        ("--step 2 --rewards rescord.zst", "error: rescord.zst: no such file in "),
    ],
)
def test_what_cannot_be_replayed_is_refused(flags, says, places, tmp_path, capsys):
    out = run(tmp_path / "run", ASK.format(**places), "--num_steps 2 --save_every 2")
    assert main(words("replay", out, flags)) == 1
    assert says in capsys.readouterr().err
