"""Cost of new weights, sleep and wake for an engine, and growth of memory over many such cycles.

    python scripts/bench_sync.py                       the embedded engine, and SGLang if installed
    torchrun --nproc_per_node 2 scripts/bench_sync.py  sharded weights; figures are rank 0's
    python scripts/bench_sync.py --engine sglang --cycles 50 --model FOLDER --out sync.json
    SGLANG_MEMORY_SAVER_CUDA_GRAPH=1 python scripts/bench_sync.py --engine sglang
                                    sleep frees CUDA graphs, and prompts get none; 0: it does not

A cycle is an update, a wake, four short completions and a sleep. Seconds are medians over cycles,
those of an update also per billion parameters: gather (full tensors of the learner's shards), load
(into the engine's model), transfer (the rest: casts, copies to the host, files, the server's
flush), all in. Memory, file descriptors and new entries of /dev/shm are counted after each cycle:
`at first` is the median of the second tenth of the cycles, `at last` that of the last tenth. The
memory of the device is that of the sleeping engine, and without an engine that of all others.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import psutil
import torch
from bench_logprobs import now_s
from make_tiny_model import make_tiny_model
from script_tools import make_parser, write_json
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from rl_core.data.pretrained import load_pretrained
from rl_core.distributed import Ranks, all_gather_json, barrier, close_ranks
from rl_core.engines.embedded import EmbeddedEngine
from rl_core.engines.kv_slots import SlotModel
from rl_core.learning.policies import make_policy
from rl_core.models.cpu_offload import release_cached_memory
from rl_core.models.parallel.fsdp import shard_policy
from rl_core.models.policy import Policy
from rl_core.run.process.joining import init_ranks
from rl_core.sampling.engine import EmbeddedSpec, Engine, EngineSpec, ServerSpec
from rl_core.types import SamplingParams

SHORT, PROMPTS = SamplingParams(max_tokens=4), [[8, 9, 10 + i] for i in range(4)]
LIMITS = {
    "num_slots": len(PROMPTS),
    "max_context_tokens": 64,
    "start_timeout_s": 600,
    "memory_frac": 0.5,
    "seed": 0,
}
PHASES = ("gather", "transfer", "load", "all in", "wake", "generate", "sleep")
SHARED = "/dev/shm"
DEVICE = "device asleep, MiB"


class Clock:
    """Seconds of each phase, by cycle."""

    def __init__(self):
        self.cycles: list[dict[str, float]] = []

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        began = now_s()
        yield
        self.cycles[-1][phase] += now_s() - began

    def drawn(self, phase: str, items: Iterable) -> Iterator:
        """Yields the items; the phase is the time to make them."""
        items, end = iter(items), object()
        while True:
            with self.timed(phase):
                item = next(items, end)
            if item is end:
                return
            yield item

    def watch(self, phase: str, call: Callable) -> Callable:
        async def watched(*args):
            with self.timed(phase):
                return await call(*args)

        return watched


def make_engine(kind: str, folder: str, policy: Policy, ranks: Ranks, out: Path) -> Engine:
    """An engine with a separate copy of the weights, asleep if it runs in this process. `kind`:
    "embedded", or SGLang's --weight_sync."""
    dtype = policy.compute_dtype
    spec = {
        "name": "policy",
        "model": folder,
        "tokenizer": load_pretrained(AutoTokenizer, folder),
        "dtype": dtype,
        **LIMITS,
    }
    spec |= {"device": ranks.device, "log": out / f"engine_{ranks.rank}.log"}
    if kind == "embedded":
        module = load_pretrained(AutoModelForCausalLM, folder, dtype=dtype)
        embedded = EmbeddedSpec(sampler=SlotModel, offloads_weights=True)
        module = module.to(ranks.device).requires_grad_(False)
        return EmbeddedEngine(EngineSpec(module=module, embedded=embedded, **spec))
    from rl_core.engines.sglang import SGLangEngine
    from rl_core.models.loading import load_model_config, on_meta

    server = ServerSpec(weight_sync=kind)
    spec |= {"server": server, "resend": lambda: policy.engine_weights(in_place=False)}
    return SGLangEngine(EngineSpec(module=on_meta(load_model_config(folder)), **spec))


async def run_cycle(engine: Engine, policy: Policy, clock: Clock, version: int) -> None:
    clock.cycles.append(defaultdict(float))
    with clock.timed("all in"):
        await engine.update(clock.drawn("gather", policy.engine_weights(in_place=False)), version)
    with clock.timed("wake"):
        await engine.wake()
    with clock.timed("generate"):
        completions = await asyncio.gather(
            *(engine.generate(p, SHORT, seed=i) for i, p in enumerate(PROMPTS))
        )
    assert all(one.policy_version == version for one in completions)
    with clock.timed("sleep"):
        await engine.sleep()


def usage(engine: Engine | None, others_mib: float = 0.0) -> dict[str, float]:
    """Memory and descriptors of this process and of the engine's server. Memory of the host is
    resident and not shared (Linux); `others_mib` of the device are not the engine's."""
    groups = {"this process": [psutil.Process()]}
    if server := getattr(engine, "server", None):
        groups["server"] = [psutil.Process(server.process.pid)]
        groups["server"] += groups["server"][0].children(recursive=True)
    counts: dict[str, float] = {}
    for name, processes in groups.items():
        memory = [process.memory_info() for process in processes]
        counts[f"{name}, MiB"] = sum(m.rss - m.shared for m in memory) / 2**20
        counts[f"{name}, descriptors"] = sum(process.num_fds() for process in processes)
    counts["entries in /dev/shm"] = len(os.listdir(SHARED)) if os.path.isdir(SHARED) else 0
    if torch.cuda.is_available():
        release_cached_memory()  # Of the learner.
        free, total = torch.cuda.mem_get_info()
        counts[DEVICE] = (total - free) / 2**20 - others_mib
    return counts


async def measure(
    kind: str, folder: str, args: argparse.Namespace, ranks: Ranks, out: Path
) -> dict:
    dtype, clock, counts = getattr(torch, args.dtype), Clock(), []
    policy = make_policy(folder, dtype, ranks)
    # An unsharded fp32 policy would be read in place.
    if not isinstance(next(policy.hf.parameters()), DTensor):
        shard_policy(policy, dtype, ranks)
    before = usage(None)
    engine = make_engine(kind, folder, policy, ranks, out)
    if kind != "embedded":
        await engine.wake()  # The first update does not include the start.
        engine._load = clock.watch("load", engine._load)
    try:
        for version in range(1, args.cycles + 1):
            await run_cycle(engine, policy, clock, version)
            counts.append(usage(engine, before.get(DEVICE, 0.0)))
    finally:
        await engine.close()
    tenth = max(1, args.cycles // 10)
    ends = {"at first": counts[tenth:][:tenth] or counts[:1], "at last": counts[-tenth:]}
    growth = {
        name: {end: median(c[name] for c in tenth_of) for end, tenth_of in ends.items()}
        for name in counts[0]
    }
    for name, values in growth.items():
        values["before"] = before.get(name, 0)
    for cycle in clock.cycles:
        if kind == "embedded":
            cycle["load"] = cycle["all in"] - cycle["gather"]
        cycle["transfer"] = cycle["all in"] - cycle["gather"] - cycle["load"]
    seconds = {phase: median(cycle[phase] for cycle in clock.cycles) for phase in PHASES}
    params = sum(p.numel() for p in policy.hf.parameters())
    return {
        "engine": kind,
        "params": params,
        "cycles": args.cycles,
        "seconds": seconds,
        "held": growth,
    }


def show(line: dict) -> None:
    billions = line["params"] / 1e9
    print(f"\n{line['engine']}, {billions * 1e3:.1f} M parameters, {line['cycles']} cycles")
    print(f"{'':<26} {'seconds':>10} {'per billion':>12}")
    for phase, s in line["seconds"].items():
        print(f"{phase:<26} {s:10.4f} {'' if phase == 'generate' else f'{s / billions:12.2f}'}")
    print(f"{'':<26} {'at first':>10} {'at last':>12} {'no engine':>12}")
    for name, at in line["held"].items():
        print(f"{name:<26} {at['at first']:10.1f} {at['at last']:12.1f} {at['before']:12.1f}")


def main() -> None:
    engines = ["embedded", "sglang"] if importlib.util.find_spec("sglang") else ["embedded"]
    has_gpu = torch.cuda.is_available()
    parser = make_parser(__doc__)
    parser.add_argument("--engine", nargs="+", choices=["embedded", "sglang"], default=engines)
    parser.add_argument(
        "--weights",
        nargs="+",
        choices=["files", "device"],
        default=["files", "device"],
        help="--weight_sync of SGLang; with both the script prints their ratio",
    )
    parser.add_argument("--model", help="folder; default: a model with random weights")
    parser.add_argument(
        "--hidden",
        type=int,
        default=512,
        help="width of the random model; 512 and 8 layers are 27M parameters",
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="bfloat16" if has_gpu else "float32"
    )
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    disable_progress_bar()
    ranks = init_ranks(600, is_sharded=True)
    if not has_gpu:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    results = []
    with tempfile.TemporaryDirectory() as local:
        folder = all_gather_json(local, ranks)[0]
        model = args.model or f"{folder}/model"
        if not args.model and ranks.is_writer:
            make_tiny_model(model, args.hidden, args.layers, args.hidden // 64)
        barrier(ranks)  # Waits for the model's files.
        kinds = [
            way for name in args.engine for way in (args.weights if name == "sglang" else [name])
        ]
        for kind in kinds:
            results.append(asyncio.run(measure(kind, model, args, ranks, Path(folder))))
            if ranks.is_writer:
                show(results[-1])
        barrier(ranks)  # Waits for ranks that read the folder.
    if not ranks.is_writer:
        results = []
    if {"files", "device"} <= (by_way := {one["engine"]: one["seconds"] for one in results}).keys():
        for phase in ("all in", "wake"):
            ratio = by_way["files"][phase] / by_way["device"][phase]
            print(f"{phase}: files take {ratio:.2f} times as long as device")
    if ranks.is_writer:
        line = {"device": ranks.device.type, "dtype": args.dtype, "engines": results}
        write_json(args.out, line)
    close_ranks(ranks)


if __name__ == "__main__":
    main()
