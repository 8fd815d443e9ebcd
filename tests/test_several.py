"""Several actors and several environments in one run, by the real command."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from test_train import metrics, trajectories

from rl_core.config import parse_config
from rl_core.data.tasks import TaskMix, TaskSource
from rl_core.learning.advantages import has_signal, turn_advantages, turn_returns
from rl_core.learning.algorithms import PRESETS
from rl_core.models import make_api_actor
from rl_core.train import main
from rl_core.types import Completion, SamplingParams, Trajectory, Turn

TALK = """
turns = "bob -> alice -> bob"
system_prompts = {"alice": "you are alice"}
def load_tasks(split): return [{"prompt": f"say {n}", "n": n} for n in range(6)]
def reward_fn(completion, actor): return float(len(completion) if actor == "bob" else -len(completion))
"""
COUNT = """
def load_tasks(split): return [{{"prompt": str(n)}} for n in range(10)]
def reward_fn(completion): return float(completion.count({0!r}))
"""


def sizes(out: Path, steps: int) -> list[str]:
    flags = ["--tasks_per_step", "4", "--group_size", "4", "--num_steps", str(steps), "--optim.lr", "1e-3"]
    return [*flags, "--max_prompt_tokens", "60", "--eval.samples", "2", "--out", str(out)]


def weights(out: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(out / "hf" / name / "model.safetensors")


@pytest.fixture
def two(make_model, tmp_path) -> list[str]:
    (tmp_path / "talk.py").write_text(TALK)
    # An untrained model seldom ends a turn; one that is cut short ends the episode.
    stop = ["--sampling.stop", json.dumps(list("abcdefghijklmnopqrstuvwxyz")), "--max_tokens", "60"]
    models = ["--actors.bob.model", str(make_model()), "--actors.alice.model", str(make_model(arch="llama", seed=1))]
    return [*models, "--env_path", str(tmp_path / "talk.py"), *stop]


def test_two_models_learn_each_from_its_own_turns_and_go_on_as_if_never_stopped(two, tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert main([*two, *sizes(whole, 3), "--eval_every", "3"]) == 0
    last = metrics(whole)[-2]
    for name in ("bob", "alice"):
        assert {f"learn/{name}/loss", f"rollout/{name}/reward_mean", f"learn/{name}/lr"} <= last.keys()
        assert any(key.startswith(f"eval/talk/{name}/avg@2") for key in metrics(whole)[-1])
    found = trajectories(whole / "rollouts/step_000001.jsonl.zst")
    assert len(found) == 2 * 16 and {t["actor"] for t in found} == {"bob", "alice"}
    assert {(t["actor"], len(t["turns"])) for t in found} == {("bob", 2), ("alice", 1)}
    for t in found:
        said = [m["content"] for m in t["messages"] if m["role"] == "assistant"]
        assert t["reward"] == (len(said[-1]) if t["actor"] == "bob" else -len(said[-1]))

    assert main([*two, *sizes(stopped, 3), "--num_steps", "2", "--eval_every", "3"]) == 0
    assert main([*two, *sizes(stopped, 3), "--eval_every", "3", "--resume"]) == 0
    for name in ("bob", "alice"):
        a, b = weights(whole, name), weights(stopped, name)
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_two_models_on_two_ranks_that_wait_on_the_host_in_turn_learn_what_one_rank_does(two, torchrun, tmp_path):
    one, both = tmp_path / "one", tmp_path / "both"
    assert main([*two, *sizes(one, 2), "--optim.name", "sgd"]) == 0
    flags = [*sizes(both, 2), "--optim.name", "sgd", "--learner.offload", "phase"]
    torchrun(2, "-m", "rl_core.train", *two, *flags)
    for name in ("bob", "alice"):
        a, b = weights(one, name), weights(both, name)
        assert all(torch.allclose(a[key], b[key], atol=1e-6) for key in a)
    assert metrics(one)[-1]["rollout/alice/reward_mean"] == metrics(both)[-1]["rollout/alice/reward_mean"]


def test_what_one_actor_said_can_be_imitated(two, make_model, tmp_path, capsys):
    talk, out = tmp_path / "talk", tmp_path / "sft"
    assert main([*two, *sizes(talk, 1)]) == 0
    flags = ["--model", str(make_model()), "--algorithm", "sft", "--data.train", str(talk / "rollouts")]
    flags += ["--max_tokens", "300", "--tasks_per_step", "4", "--num_steps", "1", "--out", str(out)]
    assert main(flags) == 1
    assert "holds what alice, bob said; choose one by --data.actor, such as alice" in capsys.readouterr().err
    assert main([*flags, "--data.actor", "bop"]) == 1
    assert "--data.actor=bop did not speak" in (said := capsys.readouterr().err) and "did you mean 'bob'" in said
    assert main([*flags, "--data.actor", "bob", "--dry_run"]) == 0
    found = trajectories(talk / "rollouts/step_000001.jsonl.zst")
    assert f"{sum(t['actor'] == 'bob' for t in found)} rows to train on" in capsys.readouterr().out
    held_out = ["--data.eval", str(talk / "rollouts/step_000001.jsonl.zst"), "--eval_every", "1"]
    assert main([*flags, "--data.actor", "bob", *held_out]) == 0


def test_a_frozen_actor_speaks_and_stays_as_it_is(two, make_model, tmp_path):
    out = tmp_path / "run"
    assert main([*two, *sizes(out, 2), "--actors.alice.train", "false", "--actors.bob.lr", "1e-2"]) == 0
    assert not (out / "hf/alice").exists() and (out / "hf/bob").is_dir()
    rows = metrics(out)
    assert not any("alice" in key for key in rows[-1])
    assert rows[-1]["learn/bob/lr"] == pytest.approx(1e-2)
    assert rows[-1]["rollout/bob/turns_mean"] == 2
    before = load_file(make_model() / "model.safetensors")
    assert any(not torch.equal(before[key], value) for key, value in weights(out, "bob").items())


def test_two_environments_are_mixed_by_weight_and_their_groups_apart(tiny_model, tmp_path):
    (tmp_path / "a.py").write_text(COUNT.format("a") + "max_turns = 3\n")
    (tmp_path / "b.py").write_text(COUNT.format("b"))
    (tmp_path / "c.py").write_text(COUNT.format("c"))
    out, paths = tmp_path / "run", ",".join(str(tmp_path / f"{name}.py") for name in "abc")
    flags = ["--envs.a.weight", "3", "--envs.c.weight", "0", "--envs.b.max_tokens", "2", "--eval_every", "2"]
    assert main(["--model", str(tiny_model), "--env_path", paths, *sizes(out, 2), "--max_tokens", "6", *flags]) == 0
    for step in (1, 2):
        found = trajectories(out / f"rollouts/step_{step:06d}.jsonl.zst")
        assert sorted(t["env"] for t in found) == ["a"] * 12 + ["b"] * 4
        assert all(len(t["turns"][0]["completion"]["token_ids"]) <= (2 if t["env"] == "b" else 6) for t in found)
        for t in found:
            assert t["reward"] == t["messages"][-1]["content"].count(t["env"])
        assert len({(t["env"], t["group_id"]) for t in found}) == 4
    assert {"rollout/policy/a/reward_mean", "rollout/policy/b/reward_mean"} <= metrics(out)[-2].keys()
    assert {f"eval/{name}/greedy_score" for name in "abc"} <= metrics(out)[-1].keys()
    saved = yaml.safe_load((out / "config.yaml").read_text())
    assert {name: env["max_turns"] for name, env in saved["envs"].items()} == {"a": 3, "b": 1, "c": 1}
    assert main(["--config", str(out / "config.yaml"), "--resume", "--num_steps", "3"]) == 0


def test_tasks_of_a_mix_are_the_same_from_any_position_on():
    def source(name):
        rows = [{"prompt": f"{name}{i}"} for i in range(7)]
        return TaskSource(rows, env=name, split="train", seed=0, shuffle=True)

    weights = [3.0, 1.0, 0.5]
    whole = [t.id + t.env for t in TaskMix([source(n) for n in "xyz"], weights).tasks(0, 90)]
    mix = TaskMix([source(n) for n in "xyz"], weights)
    assert [t.id + t.env for p in reversed(range(90)) for t in mix.tasks(p, 1)] == whole[::-1]
    for n in (9, 18, 45, 90):
        for name, weight in zip("xyz", weights, strict=True):
            assert abs(sum(t.endswith(name) for t in whole[:n]) - n * weight / 4.5) <= 1


def episode(rewards: list[float]) -> Trajectory:
    turn = Turn(
        new_ids=[1],
        is_fresh=True,
        completion=Completion(token_ids=[2, 3], logprobs=[-1.0, -1.0], text="", finish_reason="stop", policy_version=0),
    )
    return Trajectory(
        task_id="t", env="e", group_id="g", turns=[turn] * len(rewards), reward=sum(rewards), turn_rewards=rewards
    )


def test_turns_have_the_discounted_return_from_each_on_over_all_turns_of_the_group():
    group, discount = [episode([1.0, 0.0, 2.0]), episode([0.0, 3.0])], 0.5
    expected = [[1 + 0.5 * 0 + 0.25 * 2, 0 + 0.5 * 2, 2.0], [0 + 0.5 * 3, 3.0]]
    assert [turn_returns(t, 0.0, discount) for t in group] == expected
    flat = torch.tensor([x for row in expected for x in row], dtype=torch.float64)
    centred = iter((flat - flat.mean()).tolist())
    row = dataclasses.replace(PRESETS["dr_grpo"], turn_discount=discount)
    got = turn_advantages(group, [0.0, 0.0], row, None)
    for advantages, returns in zip(got, expected, strict=True):
        assert advantages == pytest.approx([next(centred) for _ in returns])
    whole = turn_advantages(group, [0.0, 0.0], PRESETS["dr_grpo"], None)
    assert whole == [[0.0] * 3, [0.0] * 2]  # both earned 3 in all


def test_a_group_has_signal_where_turns_differ_if_turns_have_advantages_of_their_own():
    whole, turns = PRESETS["dapo"], dataclasses.replace(PRESETS["dapo"], turn_discount=0.9)
    groups = {
        "equal": [episode([1.0, 0.0]), episode([1.0, 0.0])],
        "only in turns": [episode([1.0, 0.0]), episode([0.0, 1.0])],
        "in all": [episode([1.0, 0.0]), episode([0.0, 0.0])],
    }
    found = {name: (has_signal(group, whole), has_signal(group, turns)) for name, group in groups.items()}
    assert found == {"equal": (False, False), "only in turns": (False, True), "in all": (True, True)}
    late, soon = groups["only in turns"]
    late.turn_rewards = soon.turn_rewards = []
    assert not has_signal([late, soon], turns)


@pytest.mark.parametrize(
    "turns, is_refused",
    [
        ('turns = "bob -> bob"', True),
        ('turns = "bob -> (alice*0 -> bob)*2"', True),
        ("turns = ['bob']", True),
        ('turns = "bob -> (bob/alice)"', False),
        ('turns = "* * 2"', False),
        ("def turns(task): return ['bob']", False),
    ],
)
def test_an_actor_that_would_never_speak_is_refused_unless_it_is_frozen(turns, is_refused, two, tmp_path, capsys):
    (tmp_path / "talk.py").write_text(TALK.replace('turns = "bob -> alice -> bob"', turns))
    (tmp_path / "other.py").write_text(TALK)
    flags = [*two, *sizes(tmp_path / "run", 1), "--dry_run"]
    assert main(flags) == int(is_refused)
    said = capsys.readouterr().err
    assert ("--actors.alice would never speak" in said and "--actors.alice.train false" in said) is is_refused
    assert main([*flags, "--actors.alice.train", "false"]) == 0
    assert main([*flags, "--env_path", f"{tmp_path / 'talk.py'},{tmp_path / 'other.py'}"]) == 0
    assert (
        main([*flags, "--env_path", f"{tmp_path / 'talk.py'},{tmp_path / 'other.py'}", "--envs.other.weight", "0"])
        == is_refused
    )


def test_an_actor_may_say_less_in_a_turn_than_the_others(two, tmp_path):
    out = tmp_path / "run"
    more = ["--sampling.stop", "[]", "--max_tokens", "9", "--actors.bob.max_tokens", "4", "--eval_every", "1"]
    assert main([*two, *sizes(out, 1), *more, "--algo.overlong", "soft"]) == 0
    longest = {"bob": 0, "alice": 0}
    env = tmp_path / "alone.py"
    env.write_text(TALK.replace("bob -> alice -> bob", "(bob/alice)"))
    assert main([*two, *sizes(tmp_path / "alone", 1), *more, "--env_path", str(env)]) == 0
    for file in tmp_path.glob("*/rollouts/*.zst"):
        for t in trajectories(file):
            longest[t["actor"]] = max([longest[t["actor"]], *(len(x["completion"]["token_ids"]) for x in t["turns"])])
    assert longest == {"bob": 4, "alice": 9}


def test_evaluations_draw_alike_at_every_step_and_tell_parts_and_metrics(make_model, tmp_path, capsys):
    (tmp_path / "env.py").write_text(
        'turns = "(bob/alice)*(1..3)"\n'
        "from rl_core import reward\n"
        "def load_tasks(split): return [{'prompt': str(n)} for n in range(6)]\n"
        "def reward_fn(messages): return {'some': 0.25, 'length': float(len(messages[-1]['content']))}\n"
        "@reward(weight=0)\n"
        "def spoken(messages): return sum(m['role'] == 'assistant' for m in messages)\n"
    )
    models = [x for n, a in enumerate(("bob", "alice")) for x in (f"--actors.{a}.model", str(make_model(seed=n)))]
    stop = ["--sampling.stop", json.dumps(list("abcdefghijklmnopqrstuvwxyz")), "--max_tokens", "60"]
    out = tmp_path / "run"
    flags = [*models, *stop, "--env_path", str(tmp_path / "env.py"), *sizes(out, 2), "--optim.lr", "0"]
    assert main([*flags, "--eval_every", "1"]) == 0
    for label in ("greedy", "sampled"):
        files = [out / f"rollouts/eval_{step:06d}_{label}.jsonl.zst" for step in (0, 1, 2)]
        first, second, third = (
            [(t["task_id"], t["index"], t["actor"], t["messages"]) for t in trajectories(file)] for file in files
        )
        assert first == second == third and len(first) > 6
    assert len({json.dumps(messages) for *_, messages in first}) > 6  # two samples of a task are not the same
    rows = [row for row in metrics(out) if "eval/env/bob/greedy_score" in row]
    found = trajectories(out / "rollouts/eval_000002_sampled.jsonl.zst")
    for actor in ("bob", "alice"):
        own = [t for t in found if t["actor"] == actor]
        row = rows[-1]
        assert row[f"eval/env/{actor}/greedy_reward/some"] == row[f"eval/env/{actor}/sampled_reward/some"] == 0.25
        for name, values in {
            "reward/length": [t["reward_parts"]["length"] for t in own],
            "spoken": [t["metrics"]["spoken"] for t in own],
        }.items():
            assert row[f"eval/env/{actor}/sampled_{name}"] == pytest.approx(sum(values) / len(own))
    [said, *_] = [line for line in capsys.readouterr().out.splitlines() if "eval at step 2" in line]
    assert "env/bob/greedy_score" in said and "env/bob/pass@2" in said and "some" not in said and "spoken" not in said


def test_an_endpoints_limits_are_flags():
    pytest.importorskip("openai")
    base = ["--actors.bob.model", "m", "--env_path", "x.py", "--out", "x", "--actors.judge.model", "m"]
    base += ["--actors.judge.api", "http://127.0.0.1:9/v1", "--actors.judge.api_key_env", ""]
    usual = make_api_actor(parse_config(base), "judge")
    judge = make_api_actor(parse_config([*base, "--actors.judge.max_tokens", "7"]), "judge")
    assert judge.in_episode(SamplingParams(max_tokens=256), seed=0).params.max_tokens == 7
    assert usual.in_episode(SamplingParams(max_tokens=256), seed=0).params.max_tokens == 256
