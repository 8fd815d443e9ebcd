"""Learners and engines take turns on a device: real runs, whose SGLang server is a stand-in that
writes down when it has memory."""

from __future__ import annotations

import ast
from collections import Counter

import pytest
import torch
from kit import ROOT, metrics, run, words

from rl_core.distributed import local
from rl_core.engines.sglang_server import SGLangServer
from rl_core.learning.learner import Learner
from rl_core.models.policy import Policy
from rl_core.train import main

MEMORY = {"weights", "kv_cache", "cuda_graph"}


@pytest.fixture
def diary(own_server, monkeypatch):
    """The server's diary. What learners do, and each time that torch's cache is emptied, stand in
    it too."""
    learners = own_server.learners = []

    def noted(cls, name, line):
        original = getattr(cls, name)

        def wrapper(self, *args, **more):
            line(self)
            return original(self, *args, **more)

        monkeypatch.setattr(cls, name, wrapper)

    def starts(server):
        held = [p for one in learners for p in one.policy.parameters()]
        for one in learners:
            held += [value for state in one.optimizer.state.values() for value in state.values()]
        num_bytes = sum(local(tensor).untyped_storage().nbytes() for tensor in held)
        own_server.note(server.port.getsockname()[1], "start", num_bytes)

    noted(Learner, "__init__", learners.append)
    noted(Learner, "on_device", lambda learner: own_server.note("learner enters"))
    noted(Policy, "forward", lambda policy: own_server.note("learner computes"))
    noted(SGLangServer, "start", starts)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: own_server.note("emptied"))
    return own_server


def breaches(lines: list[str]) -> list[str]:
    """Lines at which a learner used the device together with an engine, or left it a cache."""
    awake, is_clean, periods = {}, True, []
    for number, line in enumerate(lines):
        server, _, call = line.partition(" ")
        verb, *tags = call.split() or [""]
        if line == "emptied":
            is_clean = True
        elif server == "learner":
            is_clean = False
            if any(awake.values()):
                periods.append(f"{number}: {line}, and engines have {awake}")
        elif verb in ("start", "resume_memory_occupation"):
            awake[server] = awake.get(server, set()) | (MEMORY if verb == "start" else set(tags))
            if not is_clean:
                periods.append(f"{number}: {line}, and torch keeps a learner's memory")
        elif verb == "release_memory_occupation":
            awake[server] = awake[server] - set(tags)
    return periods


# Rewards differ: the stand-in says another digit each time.
ENV = """
def load_tasks(split):
    return [{"prompt": str(n), "speaker": ("up", "down")[n % 2]} for n in range(16)]

def reward_fn(messages):
    return ord(messages[-1]["content"]) % 7
"""
SPEAKERS = """
def turns(task):
    yield task.row["speaker"]
"""
ONE = "--model {model} --eval_every 1 --keep_best greedy_score"
TWO = "--actors.up.model {model} --actors.down.model {model}"
RUNS = {
    "evaluations, saving, CPU offload": f"{ONE} --learner.offload phase",
    "episodes across steps": f"{ONE} --max_staleness 1",
    "two engines, one awake": f"{TWO} --learner.offload phase",
    "two engines awake": f"{TWO} --rollout.engines_awake all",
    "older weights": f"{ONE} --rollout.stale_policy_frac 0.5 --rollout.stale_policy_refresh 2",
    "older weights, episodes across steps": f"{ONE} --rollout.stale_policy_frac 0.5 --rollout.stale_policy_refresh 2 --max_staleness 1",
}
SIZES = (
    "--tasks_per_step 2 --group_size 2 --max_tokens 8 --max_prompt_tokens 16 --eval.num_tasks 2 "
    "--save_every 2"
)


@pytest.mark.parametrize("name", RUNS)
def test_no_learner_has_the_device_beside_an_engine(name, diary, tiny_model, tmp_path):
    flags = RUNS[name].format(model=tiny_model)
    (tmp_path / "env.py").write_text(ENV + SPEAKERS * ("actors.up" in flags))
    rest = (
        f"--env_path {tmp_path}/env.py --out {tmp_path}/run --engine sglang --canary_tolerance "
        "1000 --learner.dtype bfloat16"
    )
    assert main(words(flags, rest, SIZES, "--num_steps 3")) == 0
    if name == "evaluations, saving, CPU offload":
        diary.learners.clear()
        assert main(words(flags, rest, SIZES, "--num_steps 4 --resume")) == 0
    lines = diary.lines()
    assert not breaches(lines), "\n".join(breaches(lines))
    assert lines.count("learner computes") >= 3 and [
        line for line in lines if "resume_memory" in line
    ]
    for line in lines:
        if "--learner.offload phase" in flags and " start " in line:
            assert line.endswith(" start 0"), (
                "learners left the device before an engine was started"
            )


# Besides actors.py: code that the lease enters, code called inside of it, and a tool without engines.
MAY_ENTER = {
    "server_spec.py",  # For a server that died, before it takes the rest of the device.
    "learner.py",
    "checkpoint.py",
    "kl.py",
    "replay.py",
    "resume.py",  # Before engines begin.
    "distill.py",
    "weight_recovery.py",  # While all engines sleep.
}


def test_the_lease_alone_brings_a_learner_to_the_device():
    counts = Counter()
    for file in (ROOT / "rl_core").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.With):
                entered = [item.context_expr for item in node.items]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("enter_context"):
                entered = node.args
            else:
                continue
            counts[file.name] += sum(".on_device()" in ast.unparse(e) for e in entered)
    assert {name for name, number in counts.items() if number} == MAY_ENTER | {"actors.py"}
    assert counts["actors.py"] == 1, "in ActorRuntime.learning(), where engines sleep"


def test_rows_are_evaluated_by_a_learner_that_was_cpu_offloaded(tiny_model, sort_data, tmp_path):
    data = f"--data.train {sort_data}/few.jsonl --data.eval {sort_data}/few.jsonl --eval_every 1"
    sizes = (
        "--num_steps 2 --tasks_per_step 2 --max_tokens 8 --max_prompt_tokens 16 --eval.num_tasks 2"
    )
    flags = f"--algorithm sft --model {tiny_model} --learner.offload phase --learner.dtype bfloat16"
    out = run(tmp_path / "run", words(flags, data, sizes))
    assert [row for row in metrics(out) if "eval/loss" in row]
