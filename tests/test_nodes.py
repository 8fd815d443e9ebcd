"""Two nodes are two of torchrun's agents: here both on this machine, meeting over the loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start_nodes(num: int, ranks_each: int, *flags: str) -> list[subprocess.Popen]:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={num}", f"--nproc_per_node={ranks_each}"]
    command += ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}", "--rdzv_id=test"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [*command, "-m", "rl_core.train", *flags],
            cwd=ROOT,
            env=env,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for _ in range(num)
    ]


def ended(nodes: list[subprocess.Popen], within_s: float) -> list[str]:
    """Each node's errors. What is left of them is killed."""
    deadline, errors = time.monotonic() + within_s, []
    for node in nodes:
        try:
            errors.append(node.communicate(timeout=max(1, deadline - time.monotonic()))[1])
        except subprocess.TimeoutExpired:
            for n in nodes:
                os.killpg(n.pid, signal.SIGKILL)
            pytest.fail(f"a node was still running after {within_s} s")
    return errors


@pytest.fixture
def flags(tiny_model, sort_data, tmp_path) -> list[str]:
    data = str(sort_data / "sft.jsonl")
    sizes = ["--max_tokens", "8", "--max_prompt_tokens", "16", "--tasks_per_step", "8", "--optim.lr", "1e-3"]
    return ["--algorithm", "sft", "--model", str(tiny_model), "--data.train", data, *sizes]


def test_two_nodes_of_one_rank_learn_what_one_node_of_two_does(flags, tmp_path):
    weights = []
    for num, each in [(1, 2), (2, 1)]:
        out = tmp_path / f"{num}_nodes"
        nodes = start_nodes(num, each, *flags, "--num_steps", "4", "--out", str(out))
        errors = ended(nodes, 120)
        assert [n.returncode for n in nodes] == [0] * num, errors
        weights.append(load_file(out / "hf/policy/model.safetensors"))
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_node_that_is_lost_ends_the_other_within_half_a_minute(flags, tmp_path):
    out = tmp_path / "run"
    nodes = start_nodes(2, 1, *flags, "--num_steps", "1000000", "--out", str(out), "--timeout_s", "20")
    deadline = time.monotonic() + 60
    while not (out / "metrics.jsonl").exists():
        assert time.monotonic() < deadline and not any(n.poll() for n in nodes), "the nodes did not start"
        time.sleep(0.2)
    os.killpg(nodes[1].pid, signal.SIGKILL)  # its agent; the rank of it must not live on
    errors = ended(nodes, 30)
    assert nodes[0].returncode != 0
    told = [line for line in errors[0].splitlines() if line.startswith("error: ")]
    assert len(told) <= 1 and ("waited in the phase" in errors[0] or "RendezvousConnectionError" in errors[0]), errors[
        0
    ]
