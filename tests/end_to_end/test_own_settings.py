"""Settings of one actor instead of the global ones."""

import argparse

import pytest
import torch
from kit import run, steps, trajectories, weights, words

from rl_core.config import (
    ActorConfig,
    Config,
    OptimConfig,
    checked,
    parse_config,
    read_config,
    to_yaml,
)
from rl_core.tools.cli import main
from rl_core.tools.model_player import read_flags
from rl_core.tools.replay import replay

# Each actor answers by itself, so that nothing of one reaches the other.
APART = """
def load_tasks(split):
    return [{"messages": [{"role": "user", "content": text}]} for text in ("ab?", "cd?", "ef?")]


async def rollout(task, actors):
    found = []
    for name, actor in actors.items():
        reply = await actor.respond(task.messages)
        found.append(reply.trajectory(float(sum(map(ord, reply.text)) % 7)))
    return found
"""
TWO = (
    "--actors.bob.model {model} --actors.alice.model {model} --env_path {env} "
    "--max_tokens 6 --tasks_per_step 2 --group_size 4 --num_steps 3"
)


def test_an_actor_has_its_own_settings_before_the_global_ones():
    config = parse_config(
        words(
            "--actors.bob.model b --actors.alice.model a --env_path e.py --out runs/x --optim.lr 1e-3 "
            "--optim.eps 1e-5 --actors.bob.optim.lr 2e-3 --actors.bob.algorithm ppo "
            "--actors.bob.optim.betas 0.5,0.6 --actors.bob.sampling.stop [x] --actors.bob.engine_tp 2"
        )
    )
    bob, alice = config.of("bob"), config.of("alice")
    assert (bob.optim.lr, bob.optim.eps, bob.optim.betas) == (2e-3, 1e-5, (0.5, 0.6))
    assert (bob.algorithm, bob.sampling.stop, bob.engine_tp) == ("ppo", ["x"], 2)
    assert alice == config and alice.optim == OptimConfig(lr=1e-3, eps=1e-5)
    assert (alice.algorithm, alice.engine_tp) == ("grpo", 1)


def test_the_same_in_python_and_from_the_file_that_a_run_keeps(tmp_path):
    arguments = words(
        "--actors.bob.model b --env_path e.py --out runs/x --actors.bob.optim.lr 2e-3"
    )
    bob = ActorConfig(model="b", optim={"lr": 2e-3})
    in_python = checked(Config(actors={"bob": bob}, env_path="e.py", out="runs/x"))
    assert in_python == parse_config(arguments)
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(in_python))
    assert read_config(["--config", str(file)]) == in_python


def test_settings_of_learning_do_not_count_without_learning():
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+")
    flags = (
        "m --env_path sort_digits --actors.bob.model m --actors.bob.learner.microbatch_tokens 64 "
        "--actors.bob.learner.dtype bfloat16 --actors.bob.algorithm opd "
        "--actors.bob.algo.teacher t --algo.teacher u --critic.model v"
    )
    _, config = read_flags(parser, words(flags), "out")
    bob = config.of("bob")
    assert bob.learner.dtype == "bfloat16", "the engine computes in it"
    assert (bob.algo.teacher, bob.critic.model) == (None, None)


@pytest.fixture
def two(tmp_path, tiny_model):
    env = tmp_path / "apart.py"
    env.write_text(APART)

    def play(name, *flags):
        out = tmp_path / name
        run(out, *words(TWO.format(model=tiny_model, env=env)), *words(*flags))
        return out

    return play


def test_an_actors_settings_train_as_global_ones(two, capsys):
    one = "--optim.lr 1e-2 --learner.updates_per_epoch 2 --sampling.temperature 0.7"
    other = (
        "--optim.lr 3e-3 --optim.name sgd --algorithm ppo --algo.kl_coef 0.1 "
        "--learner.updates_per_epoch 1 --sampling.temperature 1 --critic.lr 2e-3 --critic.gae_lambda 0.9 "
        "--critic.warmup_steps 1"
    )
    mixed = two("mixed", one, other.replace("--", "--actors.bob."))
    all_one, all_other = two("one", one), two("other", other)
    for name, alike in (("alice", all_one), ("bob", all_other)):
        expected = weights(alike, name)
        for key, value in weights(mixed, name).items():
            assert torch.equal(value, expected[key]), (name, key)
        # Losses and gradients too: of the policy, and of the critic.
        for row, other_row in zip(steps(mixed), steps(alike), strict=True):
            learned = {key: row[key] for key in row if key.startswith(f"learn/{name}/")}
            assert learned == {key: other_row[key] for key in learned}
            assert ("critic_grad_norm" in str(learned)) == (name == "bob")
    row = steps(mixed)[-1]
    assert row["learn/bob/lr"] == pytest.approx(3e-3) and row["learn/alice/lr"] == pytest.approx(
        1e-2
    )
    assert main(["info", str(mixed)]) == 0
    message = capsys.readouterr().out
    assert "bob by separate settings: algorithm ppo, algo.kl_coef 0.1" in message
    assert "== actor bob\n" in message and "\n  optim.name sgd\n" in message
    values = {name for name in row if name.endswith("critic_value_mean")}
    assert values == {"learn/bob/critic_value_mean"}


def test_an_actor_that_learns_every_second_step_changes_in_these_alone(two, capsys):
    out = two("every", "--optim.lr 1e-2 --actors.bob.update_every 2")
    learned = [("learn/bob/loss" in row, "learn/alice/loss" in row) for row in steps(out)]
    assert learned == [(False, True), (True, True), (False, True)]
    assert "bob by separate settings: update_every 2" in capsys.readouterr().out
    result = replay(out, 3, [])
    assert result.replayed == result.recorded and result.between == 0.0


def test_episodes_are_collected_by_the_actors_own_temperature(tmp_path, tiny_model):
    (tmp_path / "apart.py").write_text(APART)
    flags = words(TWO.format(model=tiny_model, env=tmp_path / "apart.py"))
    message = {}
    for flag in ("--sampling.temperature", "--actors.bob.sampling.temperature"):
        out = tmp_path / flag
        assert main(["collect", str(tiny_model), *flags, f"--out={out}", f"{flag}=3"]) == 0
        rows = trajectories(out / "rollouts" / "step_000001.jsonl.zst")
        message[flag] = [turn["completion"]["logprobs"] for t in rows for turn in t["turns"]]
    assert len(message[flag]) == 8
    assert message["--sampling.temperature"] == message["--actors.bob.sampling.temperature"]


def test_logprobs_are_of_the_actors_own_temperature(two):
    out = two("hot", "--actors.bob.sampling.temperature 3 --optim.lr 0")
    for row in steps(out):
        assert (
            row["learn/bob/mismatch_kl_nats"] < 1e-6 and row["learn/alice/mismatch_kl_nats"] < 1e-6
        )
    spread = {"bob": [], "alice": []}
    for t in trajectories(out / "rollouts" / "step_000001.jsonl.zst"):
        for turn in t["turns"]:
            spread[t["actor"]] += turn["completion"]["logprobs"]
    # A hotter distribution is flatter: sampled tokens have less probability on average.
    assert sum(spread["bob"]) / len(spread["bob"]) < sum(spread["alice"]) / len(spread["alice"])
