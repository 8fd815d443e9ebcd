"""Runs that sample with SGLang: bash scripts/test_sglang.sh installs it where there is no GPU."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_engine_contract import HAS_SGLANG, needs_sglang
from test_train import metrics

from rl_core.build import make_plan
from rl_core.command_line import parse_config
from rl_core.sampling.server_process import RunningServer, free_port
from rl_core.train import main

ENV = Path(__file__).parent.parent / "envs/sort_digits.py"


def flags(model, data, out, *more) -> list[str]:
    found = ["--model", model, "--env_path", ENV, "--data.train", data / "train.jsonl", "--out", out, *more]
    lengths = ["--max_tokens", 8, "--max_prompt_tokens", 16, "--tasks_per_step", 16, "--group_size", 8]
    return [str(f) for f in (*found, *lengths)]


def children_of(pid: int | str, *more: str) -> list[str]:
    return subprocess.run(["pgrep", "-P", str(pid), *more], capture_output=True, text=True).stdout.split()


@pytest.mark.slow
@needs_sglang
def test_reward_rises_with_sglang_and_nothing_of_it_is_left(torchrun, warm_model, sort_data, tmp_path):
    learn = ["--num_steps", "30", "--optim.lr", "6e-4", "--optim.warmup_steps", "3", "--algo.clip_high", "0.28"]
    out = tmp_path / "run"
    torchrun(1, "-m", "rl_core.train", "--engine", "sglang", *flags(warm_model, sort_data, out, *learn), timeout_s=900)
    rows = metrics(out)
    rewards = [row["rollout/policy/reward_mean"] for row in rows]
    assert len(rewards) == 30 and sum(rewards[-5:]) > sum(rewards[:5]) + 0.5
    assert max(row["learn/policy/mismatch_kl_nats"] for row in rows) < 1e-3
    assert "policy" in (out / "config.yaml").read_text() and (out / "engine_policy_00000.log").stat().st_size
    running = subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True).stdout
    assert str(out) not in running


def two_ways(model, out, *more) -> list[str]:
    """Flags of two actors over one model that learn opposite tasks."""
    found = ["--actors.up.model", model, "--actors.up.lora.rank", 16, "--actors.down.share", "up"]
    found += ["--env_path", ENV.parent / "sort_two_ways.py", "--out", out, "--engine", "sglang", *more]
    return [str(f) for f in (*found, "--max_tokens", 8, "--max_prompt_tokens", 16)]


@needs_sglang
def test_actors_that_share_a_model_are_a_plan_unless_it_is_in_4_bits(tiny_model, tmp_path):
    plan = make_plan(parse_config(two_ways(tiny_model, tmp_path / "run")))
    assert plan.config.engine == "sglang" and plan.config.sharers == {"up": ["down"]}
    with pytest.raises(ValueError, match="the weights before quantize=nf4; leave that out, or take --engine embedded"):
        parse_config(two_ways(tiny_model, tmp_path / "run", "--actors.up.lora.quantize", "nf4"))


@pytest.mark.slow
@needs_sglang
def test_two_actors_over_one_model_and_one_server_learn_opposite_tasks(torchrun, warm_model, tmp_path):
    learn = ["--num_steps", 20, "--tasks_per_step", 16, "--group_size", 8, "--optim.lr", "5e-3"]
    flags = two_ways(warm_model, tmp_path / "run", *learn, "--optim.warmup_steps", 3, "--algo.clip_high", "0.28")
    torchrun(1, "-m", "rl_core.train", *flags, timeout_s=900)
    rows = metrics(tmp_path / "run")
    assert len(rows) == 20 and [p.name for p in (tmp_path / "run").glob("engine_*")] == ["engine_up_00000.log"]
    for name in ("up", "down"):
        rewards = [row[f"rollout/{name}/reward_mean"] for row in rows if f"rollout/{name}/reward_mean" in row]
        print(name, [round(x, 2) for x in rewards])
        assert sum(rewards[-10:]) / 10 > sum(rewards[:4]) / 4 + 0.1
        assert max(row[f"learn/{name}/mismatch_kl_nats"] for row in rows) < 1e-6


@pytest.mark.slow
@needs_sglang
@pytest.mark.parametrize("ranks", [["1"], ["2", "--engine_ranks", "1"]], ids=["in step", "rank of its own"])
def test_a_server_that_is_killed_in_a_rollout_loses_no_group(ranks, warm_model, sort_data, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks[0]]
    command += ["-m", "rl_core.train", "--engine", "sglang"]
    command += [*flags(warm_model, sort_data, out, "--num_steps", 6, *ranks[1:])]
    run = subprocess.Popen(command, cwd=ENV.parent.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while run.poll() is None and (not (out / "metrics.jsonl").exists() or len(metrics(out)) < 2):
            time.sleep(0.02)
        for rank in children_of(run.pid):
            for server in children_of(rank, "-f", "rl_core.sampling.sglang_server"):
                os.kill(int(server), signal.SIGKILL)
        text, _ = run.communicate(timeout=600)
    finally:
        run.kill()
    assert run.returncode == 0, text
    rows = metrics(out)
    assert len(rows) == 6 and sum(row["rollout/policy/engine_restarts"] for row in rows) >= 1
    assert all(row["rollout/policy/failed"] == 0 for row in rows)
    assert max(row["learn/policy/mismatch_kl_nats"] for row in rows) < 1e-3, "the new server has the newest weights"


@pytest.mark.slow
@needs_sglang
def test_one_engine_over_two_ranks_has_both_learners_weights(torchrun, warm_model, sort_data, tmp_path):
    out = tmp_path / "run"
    learn = ["--engine", "sglang", "--engine_tp", "2", "--num_steps", "3", "--optim.lr", "1e-3"]
    torchrun(2, "-m", "rl_core.train", *flags(warm_model, sort_data, out, *learn), timeout_s=900)
    rows = metrics(out)
    assert len(rows) == 3 and max(row["learn/policy/canary_max_diff"] for row in rows) < 1e-4
    assert max(row["learn/policy/mismatch_kl_nats"] for row in rows) < 1e-6
    assert min(row["rollout/policy/tokens"] for row in rows) > 0
    assert (out / "engine_policy_00000.log").exists() and not (out / "engine_policy_00001.log").exists()


def serve(model: Path, port: int, log: Path) -> subprocess.Popen:
    """A server as somebody starts one on a CPU, with a key."""
    command = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        "--model-path",
        model,
        "--port",
        port,
        "--dtype",
        "float32",
    ]
    command += ["--api-key", "its-key", "--max-running-requests", "64", "--max-total-tokens", "8192", "--device", "cpu"]
    command += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph"]
    env = os.environ | {"SGLANG_USE_CPU_ENGINE": "1"}
    with open(log, "a") as file:
        return subprocess.Popen([*map(str, command)], stdout=file, stderr=file, env=env, start_new_session=True)


@pytest.mark.slow
@needs_sglang
def test_a_server_that_runs_already_gets_the_weights_again_if_it_is_started_anew(
    warm_model, sort_data, tmp_path, monkeypatch
):
    monkeypatch.setenv("SGLANG_API_KEY", "its-key")
    out, port = tmp_path / "run", free_port()
    url = ["--actors.policy.engine_urls", f"http://127.0.0.1:{port}", "--num_steps", "6", "--optim.lr", "6e-4"]
    command = [sys.executable, "-m", "rl_core.train", *flags(warm_model, sort_data, out, *url)]
    server = serve(warm_model, port, tmp_path / "server.log")
    run = subprocess.Popen(command, cwd=ENV.parent.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while run.poll() is None and (not (out / "metrics.jsonl").exists() or len(metrics(out)) < 2):
            time.sleep(0.02)
        os.killpg(server.pid, signal.SIGKILL)
        server = serve(warm_model, port, tmp_path / "server.log")
        text, _ = run.communicate(timeout=600)
        assert run.returncode == 0, text
        assert server.poll() is None, "it is not the run's to end"
    finally:
        run.kill()
        os.killpg(server.pid, signal.SIGKILL)
    rows = metrics(out)
    assert len(rows) == 6 and sum(row["rollout/policy/engine_restarts"] for row in rows) == 1
    assert max(row["learn/policy/mismatch_kl_nats"] for row in rows) < 1e-3, "it has the newest weights again"
    assert not (out / "engine_policy_00000.log").exists()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            ["engine_urls", "10.0.0.1:30000"],
            "'10.0.0.1:30000' must be a server's address, such as http://127.0.0.1:30000",
        ),
        (["engine_urls", "http://localhost:3/v1"], "'http://localhost:3/v1' must be a server's address"),
        (["engine_urls", "http://10.0.0.1:3"], r"name a folder that both see .* --actors.policy.engine_folder=/shared"),
        (["engine_urls", "http://localhost:3,http://localhost:3"], "names a server twice"),
        (["engine_urls", "http://localhost:3,http://localhost:4"], "names 2 servers for 1 ranks that sample"),
        (["engine_folder", "/tmp"], "engine_folder=/tmp is for servers, and --actors.policy.engine_urls names none"),
    ],
)
def test_servers_that_cannot_be_this_actors_are_refused(given, says, tiny_model, sort_data, tmp_path):
    given = [f"--actors.policy.{given[0]}", given[1]]
    with pytest.raises(ValueError, match=says):
        make_plan(parse_config([*flags(tiny_model, sort_data, tmp_path / "run"), *given]))


def test_frozen_and_shared_models_are_not_given_to_running_servers(tiny_model, sort_data, tmp_path):
    at, urls = "--actors.judge.", ["--actors.judge.engine_urls", "http://localhost:3"]
    config = [*flags(tiny_model, sort_data, tmp_path / "run"), f"{at}model", str(tiny_model), *urls]
    with pytest.raises(ValueError, match=r"a frozen one is an endpoint: --actors.judge.api=http://localhost:3/v1"):
        parse_config([*config, f"{at}train", "false"])
    shared = [*config[:-4], "--actors.policy.lora.rank", "2", *urls, f"{at}share", "policy", f"{at}lora.rank", "2"]
    with pytest.raises(ValueError, match="get whole weights alone; leave out share"):
        parse_config(shared)


def test_a_running_server_that_does_not_answer_is_named(tiny_model, sort_data, tmp_path, capfd):
    url = ["--actors.policy.engine_urls", f"http://127.0.0.1:{(port := free_port())}", "--timeout_s", "1"]
    assert main([*flags(tiny_model, sort_data, tmp_path / "run"), *url]) == 1
    said = capfd.readouterr().err
    assert f"error: engine policy at http://127.0.0.1:{port} did not answer within 1 s" in said
    assert "Traceback" not in said


def test_requests_that_broke_do_not_end_the_wait_for_a_server_that_is_started_anew():
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n{}")
        writer.close()

    async def wait() -> None:
        server = RunningServer("policy", f"http://127.0.0.1:{(port := free_port())}", "")
        starting = asyncio.create_task(server.start(60))
        await asyncio.sleep(0.1)
        assert "does not answer (ConnectionResetError" in str(await server.gone(ConnectionResetError()))
        assert not server.is_alive
        async with await asyncio.start_server(answer, "127.0.0.1", port):
            await starting
            assert server.is_alive
            await server.gone(ConnectionResetError())  # one that was told late
            assert server.is_alive

    asyncio.run(wait())


@pytest.mark.skipif(HAS_SGLANG, reason="sglang is installed")
def test_an_engine_that_is_not_installed_is_refused_with_its_extra(tiny_model, sort_data, tmp_path):
    with pytest.raises(
        ValueError, match=r"--engine=sglang needs sglang, which is not installed: pip install \.\[sglang\]"
    ):
        parse_config([*flags(tiny_model, sort_data, tmp_path / "run"), "--engine", "sglang"])


def test_auto_is_the_embedded_engine_without_a_gpu(tiny_model, sort_data, tmp_path, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plan = make_plan(parse_config(flags(tiny_model, sort_data, tmp_path / "run")))
    assert plan.config.engine == "embedded"
    config = parse_config([*flags(tiny_model, sort_data, tmp_path / "run"), "--engine_tp", "2"])
    with pytest.raises(ValueError, match="--engine_tp=2: the embedded engine is on each rank by itself"):
        make_plan(config)
