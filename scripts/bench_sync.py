"""What it costs that an engine gets new weights, sleeps and wakes, and whether anything grows when it does so again and again.

    python scripts/bench_sync.py                       the embedded engine, and SGLang where it is installed
    python scripts/bench_sync.py --engine sglang --cycles 50 --model FOLDER --out sync.json

A cycle is an update, waking, four short completions, sleeping. Seconds are medians over cycles, those of an update also per
billion parameters: gather (whole tensors of the learner's shards), load (into the engine's model), transfer (the rest: casts,
copies to the host, files, the server's flush), all in. Memory, file descriptors and new entries of /dev/shm are counted after
each cycle: at first is the median of the second tenth of them, at last that of the last tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import torch
from make_tiny_model import make_tiny_model
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from rl_core.distributed import Ranks, close_ranks, init_ranks
from rl_core.engines.embedded import EmbeddedEngine
from rl_core.learning.model import PolicyModel, engine_weights, make_policy, shard_policy
from rl_core.sampling.engine import Engine, EngineSpec
from rl_core.types import SamplingParams

SHORT, PROMPTS = SamplingParams(max_tokens=4), [[8, 9, 10 + i] for i in range(4)]
LIMITS = {"num_slots": len(PROMPTS), "max_context_tokens": 64}
MIB = 1 << 20


class Clock:
    """Seconds of each phase, by cycle."""

    def __init__(self, device: torch.device):
        self.device, self.cycles = device, []

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        began = self.now()
        try:
            yield
        finally:
            self.cycles[-1][phase] += self.now() - began

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def drawn(self, phase: str, items: Iterable) -> Iterator:
        """The same items; the phase is that of making them."""
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


def make_engine(kind: str, folder: str, dtype: torch.dtype, ranks: Ranks, out: Path) -> Engine:
    """With weights of its own, and asleep if it runs in this process."""
    if kind == "embedded":
        module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(ranks.device).requires_grad_(False)
    else:
        from rl_core.engines.sglang import SGLangEngine, make_skeleton

        module = make_skeleton(folder)
    spec = EngineSpec(
        name="policy", model=folder, module=module, tokenizer=AutoTokenizer.from_pretrained(folder), **LIMITS, owns_weights=True,
        dtype=dtype, device=ranks.device, seed=0, log=out / f"engine_{ranks.rank}.log", start_timeout_s=600, memory_frac=0.5,
    )  # fmt: skip
    return EmbeddedEngine(spec) if kind == "embedded" else SGLangEngine(spec)


async def run_cycle(engine: Engine, policy: PolicyModel, clock: Clock, version: int) -> None:
    with clock.timed("all in"):
        await engine.update(clock.drawn("gather", engine_weights(policy, in_place=False)), version)
    with clock.timed("wake"):
        await engine.wake()
    with clock.timed("generate"):
        said = await asyncio.gather(*(engine.generate(p, SHORT, seed=i) for i, p in enumerate(PROMPTS)))
    assert all(one.policy_version == version for one in said)
    with clock.timed("sleep"):
        await engine.sleep()


def processes_below(pid: int) -> list[int]:
    """It and all that descend from it (Linux)."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def held_by(pids: list[int]) -> tuple[float, int]:
    """MiB of memory that is resident and not shared, and file descriptors (Linux)."""
    kib = files = 0
    for pid in pids:
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            kib += sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
            files += len(os.listdir(f"/proc/{pid}/fd"))
    return kib / 1024, files


def shared_entries() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def held(engine: Engine, before: set[str]) -> dict[str, float]:
    own, files = held_by([os.getpid()])
    found = {"this process, MiB": own, "its descriptors": files}
    if server := getattr(engine, "server", None):
        of_server, files = held_by(processes_below(server.process.pid))
        found |= {"server, MiB": of_server, "its descriptors (server)": files}
    found["new in /dev/shm"] = len(shared_entries() - before)
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found["device asleep, MiB"] = (total - free) / MIB
    return found


async def measure(kind: str, folder: str, args: argparse.Namespace, ranks: Ranks, out: Path) -> dict:
    dtype, clock, before = getattr(torch, args.dtype), Clock(ranks.device), shared_entries()
    policy = make_policy(folder, dtype, ranks, False)
    if not isinstance(next(policy.hf.parameters()), DTensor):  # of one rank in fp32, which would be read in place
        shard_policy(policy, dtype, ranks)
    empty = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
    engine, counts = make_engine(kind, folder, dtype, ranks, out), []
    if kind == "sglang":
        await engine.wake()  # not a part of the first update
        engine._load = clock.watch("load", engine._load)
    try:
        for version in range(1, args.cycles + 1):
            clock.cycles.append(defaultdict(float))
            await run_cycle(engine, policy, clock, version)
            counts.append(held(engine, before))
    finally:
        await engine.close()
    tenth = max(1, args.cycles // 10)
    ends = {"at first": counts[tenth:][:tenth] or counts[:1], "at last": counts[-tenth:]}
    found = {name: {end: median(c[name] for c in part) for end, part in ends.items()} for name in counts[0]}
    if "device asleep, MiB" in found:
        found["device asleep, MiB"]["more than without it"] = (
            counts[-1]["device asleep, MiB"] - (torch.cuda.mem_get_info()[1] - empty) / MIB
        )
    for cycle in clock.cycles:
        if kind == "embedded":
            cycle["load"] = cycle["all in"] - cycle["gather"]
        cycle["transfer"] = cycle["all in"] - cycle["gather"] - cycle["load"]
    phases = ("gather", "transfer", "load", "all in", "wake", "generate", "sleep")
    seconds = {phase: median(cycle[phase] for cycle in clock.cycles) for phase in phases}
    params = sum(p.numel() for p in policy.hf.parameters())
    return {"engine": kind, "params": params, "cycles": args.cycles, "seconds": seconds, "held": found}


def show(found: dict) -> None:
    billions, seconds = found["params"] / 1e9, found["seconds"]
    print(f"\n{found['engine']}, {billions * 1e3:.1f} M parameters, {found['cycles']} cycles")
    print(f"{'':<26} {'seconds':>10} {'per billion':>12}")
    for phase, s in seconds.items():
        each = "" if phase == "generate" else f"{s / billions:12.2f}"
        print(f"{phase:<26} {s:10.4f} {each}")
    print(f"{'':<26} {'at first':>10} {'at last':>12}")
    for name, ends in found["held"].items():
        more = f"   {left:.0f} more than without it" if (left := ends.get("more than without it")) is not None else ""
        print(f"{name:<26} {ends['at first']:10.1f} {ends['at last']:12.1f}{more}")


def main() -> None:
    engines = ["embedded", "sglang"] if importlib.util.find_spec("sglang") else ["embedded"]
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", choices=["embedded", "sglang"], default=engines)
    parser.add_argument("--model", help="folder; without it one with random weights is made")
    parser.add_argument(
        "--hidden", type=int, default=512, help="of that one: width; 512 and 8 layers are 27M parameters"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16" if has_gpu else "float32")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    disable_progress_bar()
    ranks = init_ranks(600, is_sharded=True)
    if not has_gpu:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    results = []
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or f"{folder}/model"
        if not args.model:
            make_tiny_model(model, args.hidden, args.layers, args.hidden // 64)
        for kind in args.engine:
            results.append(asyncio.run(measure(kind, model, args, ranks, Path(folder))))
            show(results[-1])
    if args.out:
        args.out.write_text(
            json.dumps({"device": ranks.device.type, "dtype": args.dtype, "engines": results}, indent=2)
        )
    close_ranks(ranks)


if __name__ == "__main__":
    main()
