"""SGLang's server: what it is started with, and the process that it is. `python -m rl_core.sampling.sglang_server` is the child;
there alone sglang is imported."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from rl_core.sampling.server_process import child_environment, die_with

OLDEST = (0, 5, 17)


def check_sglang() -> None:
    """Raises ValueError if SGLang is not installed, or too old. Imports nothing."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError("--engine=sglang needs sglang, which is not installed: pip install .[sglang]") from None
    if numbers(version) < OLDEST:
        raise ValueError(f"--engine=sglang needs sglang >= {'.'.join(map(str, OLDEST))}, {version} is installed")


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


@dataclass(kw_only=True, slots=True)
class ServerOptions:
    """What the server is started with."""

    model: str  # folder or hub name
    dtype: torch.dtype
    device: torch.device  # of the first of its GPUs
    tp: int
    memory_frac: float
    seed: int
    num_slots: int
    max_context_tokens: int
    adapters: list[dict[str, Any]] = field(default_factory=list)  # adapter_config.json of each that will come

    def args(self) -> list[str]:
        name = str(self.dtype).removeprefix("torch.")
        args = f"--host 127.0.0.1 --port {{port}} --dtype {name} --tp-size {self.tp} --random-seed {self.seed} "
        args += f"--max-running-requests {max(self.num_slots, self.tp)} --log-level-http warning "
        # Its own first request comes about when it first answers; it dies if it is then told to sleep.
        args += "--skip-server-warmup "
        if self.adapters:
            rank, targets = max(x["r"] for x in self.adapters), {n for x in self.adapters for n in x["target_modules"]}
            # A slot more than adapters: requests with none have one, too.
            args += f"--enable-lora --max-lora-rank {rank} --max-loras-per-batch {len(self.adapters) + 1} "
            args += f"--lora-target-modules {' '.join(sorted(targets))} "
            args += "--lora-backend torch_native " if self.device.type == "cpu" else ""
        if self.device.type == "cpu":
            # Nothing of SGLang's own kernels is needed so; they are built for processors that few machines have.
            args += "--device cpu --attention-backend torch_native --sampling-backend pytorch --disable-cuda-graph "
            args += f"--disable-overlap-schedule --max-total-tokens {self.num_slots * self.max_context_tokens + 256}"
        else:
            args += f"--base-gpu-id {self.device.index or 0} --mem-fraction-static {self.memory_frac} "
            args += "--enable-memory-saver --enable-weights-cpu-backup"
        return ["--model-path", self.model.replace("{", "{{").replace("}", "}}"), *args.split()]

    def environment(self) -> dict[str, str]:
        if self.device.type != "cpu":
            return child_environment()
        more = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(self.tp)))} if self.tp > 1 else {}
        return child_environment(SGLANG_USE_CPU_ENGINE="1", **more)


def main() -> None:
    order = json.load(sys.stdin)
    die_with(order["parent"])
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args([*order["args"], "--api-key", order["key"]]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
