"""SGLang's HTTP server as the handle of a child process, and the arguments of that process
(sglang_server_main.py)."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Mapping

import torch

from rl_core.engines import sglang_images
from rl_core.engines.server_process import (
    ServerProcess,
    check_own_flags,
    check_package,
    reserved_port,
)
from rl_core.engines.sglang_cuda import (
    GRAPH_SAVER,
    check_tp_devices,
    cuda_args,
    cuda_environment,
    releases_graphs,
    with_room,
)
from rl_core.engines.sglang_images import VARIABLE
from rl_core.engines.sglang_versions import OLDEST, installed_version
from rl_core.engines.weight_transfer import keeps_backup
from rl_core.sampling.engine import EngineSpec

# Flag of the server that --engine_args may not set -> the flag of rl_core that sets it.
OWN_FLAGS = {
    "--model-path": "--model",
    "--model": "--model",
    "--tp-size": "--engine_tp",
    "--tensor-parallel-size": "--engine_tp",
    "--dtype": "--learner.dtype",
    "--random-seed": "--seed",
    "--max-running-requests": "--rollout.max_concurrent",
    "--mem-fraction-static": "--engine_memory_frac",
    "--max-lora-rank": "--actors.NAME.lora.rank",
    "--lora-target-modules": "--actors.NAME.lora.targets",
    "--base-gpu-id": "CUDA_VISIBLE_DEVICES",
    "--host": "",
    "--port": "",
    "--nccl-port": "",
    "--api-key": "",
    "--device": "",
    "--log-level-http": "",
    "--skip-server-warmup": "",
    "--enable-fp32-lm-head": "",
    "--enable-tf32-matmul": "",
    "--mm-feature-transport": "",
    "--enable-memory-saver": "",
    "--enable-weights-cpu-backup": "",
    "--enable-lora": "",
    "--max-loras-per-batch": "",
}
# The only flag of SGLang, other than OWN_FLAGS, that is also the beginning of one of OWN_FLAGS.
LOG_LEVEL = "--log-level"


def check_sglang(args: str = "", is_planned: bool = False) -> None:
    """Raises ValueError if `args` sets a flag that rl_core sets itself, or if SGLang is too old or,
    unless is_planned, not installed. Imports nothing."""
    check_own_flags(args, OWN_FLAGS, "SGLang", {LOG_LEVEL})
    check_package("sglang", OLDEST, is_planned)


class SGLangServer(ServerProcess):
    """SGLang's HTTP server."""

    command = ("-m", "rl_core.engines.sglang_server_main")
    probe, key_name = "model_info", "SGLANG_API_KEY"

    def __init__(self, spec: EngineSpec):
        super().__init__(spec)
        self.group_port: socket.socket | None = None
        if self.is_own and spec.device.type == "cuda":
            first, num_visible = spec.device.index or 0, torch.cuda.device_count()
            check_tp_devices(spec.server.tp, num_visible, first)

    def order(self, env: dict[str, str]) -> tuple[list[str], dict[str, str]]:
        spec = self.spec
        if spec.device.type == "cuda":
            spec = with_room(spec, self.num_starts == 1)
        # Port of the process group of the server's ranks. SGLang itself would look for a free one
        # early and bind it much later. Each start has a new one: ranks of a killed server may hold
        # theirs until the driver has freed their memory.
        self.group_port = reserved_port()
        args = [*server_args(spec), "--nccl-port", str(self.group_port.getsockname()[1])]
        return args, child_environment(spec, env)


def child_environment(
    spec: EngineSpec, environ: Mapping[str, str], version: tuple[int, ...] | None = None
) -> dict[str, str]:
    """Environment variables of the server. `version`: of SGLang; None: the installed one."""
    if spec.vision:
        environ = {**environ, VARIABLE: sglang_images.__name__}
    if spec.device.type == "cuda":
        env = cuda_environment(environ)
        releases = releases_graphs(spec, version or installed_version(), env)
        return env | {GRAPH_SAVER: "true"} if releases else env
    env = {**environ, "SGLANG_USE_CPU_ENGINE": "1"}
    if spec.server.tp > 1:
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(spec.server.tp)))
    return env


def server_args(spec: EngineSpec, version: tuple[int, ...] | None = None) -> list[str]:
    """Arguments of sglang.launch_server. `version`: of SGLang; None: the installed one."""
    dtype, tp = str(spec.dtype).removeprefix("torch."), spec.server.tp
    args = f"--dtype {dtype} --tp-size {tp} --random-seed {spec.seed} "
    args += f"--max-running-requests {max(spec.num_slots, tp)} --log-level-http warning "
    # The warm-up request may come after the first response, and the server crashes if it has to
    # sleep then.
    args += "--skip-server-warmup "
    # The learner computes logits in fp32.
    args += "--enable-fp32-lm-head "
    if spec.adapters:
        configs = spec.adapters.values()
        targets = sorted({name for config in configs for name in config["target_modules"]})
        # Requests without an adapter need a slot too.
        args += (
            f"--enable-lora --max-lora-rank {max(c['r'] for c in configs)} --max-loras-per-batch "
            f"{len(configs) + 1} "
        )
        args += f"--lora-target-modules {' '.join(targets)} "
        args += "--lora-backend torch_native " if spec.device.type == "cpu" else ""
    if spec.device.type == "cpu":
        # Avoids SGLang's own CPU kernels, which few processors can run.
        args += (
            "--device cpu --attention-backend torch_native --sampling-backend pytorch "
            "--disable-cuda-graph "
        )
        args += (
            "--disable-overlap-schedule --max-total-tokens "
            f"{spec.num_slots * spec.max_context_tokens + 256}"
        )
    else:
        args += f"--base-gpu-id {spec.device.index or 0} --mem-fraction-static {spec.memory_frac} "
        args += "--enable-memory-saver "
        args += "--enable-weights-cpu-backup " if keeps_backup(spec) else ""
        args += " ".join(cuda_args(spec, version or installed_version(), os.environ))
    return ["--model-path", spec.model, *args.split(), *shlex.split(spec.server.args)]
