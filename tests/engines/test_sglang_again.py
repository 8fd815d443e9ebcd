"""Weights that several learners send again together, with the real SGLang: its servers are killed
between two buckets and in a rollout. bash scripts/test_sglang.sh installs it where there is no GPU.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from kit import make_skeleton, metrics
from test_engine_contract import needs_sglang, spec_of
from test_sglang import flags, free_port

from rl_core.engines import weight_transfer
from rl_core.engines.options import ENGINES
from rl_core.engines.sglang import SGLangEngine
from rl_core.engines.sglang_server import server_args
from rl_core.train import main

BUCKET_BYTES = 100_000


def kill(server) -> None:
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()


class DyingTransfer(weight_transfer.DeviceTransfer):
    """The server of rank 1 dies before the second bucket of the second update."""

    num_updates = num_buckets = 0

    def __init__(self, spec, ask):
        super().__init__(spec, ask)
        self.bucket_bytes = BUCKET_BYTES

    def take(self, named_weights) -> None:
        super().take(named_weights)
        self.num_updates, self.num_buckets = self.num_updates + 1, 0

    async def send_bucket(self, bucket, body) -> None:
        self.num_buckets += 1
        is_second = self.num_updates == self.num_buckets == 2
        if is_second and int(os.environ["RANK"]) == 1:
            kill(self.ask.__self__.server)
        await super().send_bucket(bucket, body)


class DyingEngine(SGLangEngine):
    """The server of rank 0 dies in a rollout."""

    num_requests = 0

    async def generate(self, *args, **more):
        self.num_requests += 1
        if self.num_requests == 150 and int(os.environ["RANK"]) == 0:
            kill(self.server)
        return await super().generate(*args, **more)


def dying_run() -> None:
    weight_transfer.TRANSFERS["device"] = DyingTransfer
    ENGINES["sglang"] = lambda: DyingEngine
    sys.exit(main(sys.argv[1:]))


@needs_sglang
@pytest.mark.parametrize(
    "more", [[], pytest.param(["--max_staleness", "1"], marks=pytest.mark.slow)]
)
def test_two_learners_send_their_shards_again_to_servers_that_died(
    more, torchrun, warm_model, sort_data, tmp_path
):
    """Once in an update, once in a rollout. A save puts servers to sleep, and they keep no copy."""
    out = tmp_path / "run"
    learn = ["--engine", "sglang", "--weight_sync", "device", "--num_steps", "5"]
    learn += ["--optim.lr", "1e-3", "--save_every", "3", *more]
    torchrun(2, __file__, *flags(warm_model, sort_data, out, *learn), timeout_s=900)
    rows = metrics(out)
    assert len(rows) == 5 and sum(row["rollout/policy/engine_restarts"] for row in rows) == 2
    assert all(row["rollout/policy/failed"] == 0 for row in rows), "no group is lost"
    assert max(row["learn/policy/canary_max_diff"] for row in rows) < 1e-3
    if not more:
        assert max(row["learn/policy/mismatch_kl_nats"] for row in rows) < 1e-6
    sent = [row["sync/policy/device_mib"] for row in rows]
    once = sent[0]  # Both servers.
    # The sixth update is not in a row of metrics.
    assert sum(sent) > 7 * once, "five updates, both deaths, and after the save"


@pytest.mark.slow
@needs_sglang
def test_two_learners_broadcast_their_shards_to_a_server_each(
    torchrun, warm_model, sort_data, tmp_path
):
    spec = spec_of(warm_model, tmp_path / "log", make_skeleton(str(warm_model)), None)
    command = [sys.executable, "-m", "sglang.launch_server", *server_args(spec), "--port"]
    env = os.environ | {"SGLANG_USE_CPU_ENGINE": "1"}
    ports, servers = [free_port(), free_port()], []
    learn = ["--weight_sync", "broadcast", "--num_steps", "3", "--optim.lr", "1e-3"]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    learn += ["--actors.policy.engine_urls", ",".join(urls)]
    try:
        with open(tmp_path / "servers.log", "w") as log:
            pipes = {"stdout": log, "stderr": log, "env": env, "start_new_session": True}
            for port in ports:
                servers.append(subprocess.Popen([*command, str(port)], **pipes))
            argv = flags(warm_model, sort_data, tmp_path / "run", *learn)
            torchrun(2, "-m", "rl_core.train", *argv, timeout_s=900)
    finally:
        for server in servers:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    rows = metrics(tmp_path / "run")
    assert len(rows) == 3 and max(row["learn/policy/mismatch_kl_nats"] for row in rows) < 1e-6
    assert min(row["sync/policy/broadcast_mib"] for row in rows) > 0


if __name__ == "__main__":
    dying_run()
