"""Several ranks against one with the same global batch: SFT and GRPO on ragged lengths.

    python scripts/bench_ranks.py                            3.1M and 10.7M parameters, 2 ranks
    python scripts/bench_ranks.py --sizes 128x3 --only sft_ragged --flags "" "--dp_replicate 2"

Runs of one rank and of several take turns, one torch thread each. Wall seconds of a step count
waiting for a core that other work has. CPU seconds do not: they are of the rank that takes most,
once for sampling and once for the rest, between which ranks wait for each other. `threads` is the
part of them beside the main thread, such as gloo's. `all` is the sum over ranks. Cores share
memory and caches: what that costs is told by one rank beside another such run.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import bench_ours
import bench_work
from bench_work import WORKS, Work

from rl_core import registry
from rl_core.config import parse_config
from rl_core.distributed import close_ranks, init_ranks
from rl_core.models import is_sharded
from rl_core.plan import make_plan
from rl_core.trainer import Trainer, run_to_end
from rl_core.types import counter_seed

NAMES = ("grpo_ragged", "sft_ragged")
COLUMNS = ("wall", "cpu", "threads", "all", "sample", "rest")


@dataclasses.dataclass(kw_only=True, slots=True)
class Side:
    num_ranks: int = 1
    num_runs: int = 1  # at the same time, of which the first is measured
    flags: str = ""


class Meter:
    """Wall and CPU seconds of each step's two phases on one rank."""

    def __init__(self, work: Work, run: Trainer):
        self.work, self.log = work, run.log
        self.steps: list[list[dict[str, float]]] = []
        self.phases: list[dict[str, float]] = []
        self.before = clocks()
        self.sample, run.sample = run.sample, self.sample_timed
        for engine in run.device.engines:
            engine.generate = self.at_length(engine.generate)
        run.log = self

    def at_length(self, generate: Callable) -> Callable:
        """Completions as long as their seeds say, whichever rank samples them."""

        async def generate_at_length(prompt_ids, params, *, seed: int, **kwargs: Any):
            length = bench_work.completion_length(self.work, 0, counter_seed(seed, "length"))
            params = dataclasses.replace(params, max_tokens=length, stop_token_ids=())
            completion = await generate(prompt_ids, params, seed=seed, **kwargs)
            return dataclasses.replace(completion, finish_reason="stop")

        return generate_at_length

    async def sample_timed(self):
        samples = await self.sample()
        self.end_phase()
        return samples

    def end_phase(self) -> None:
        now = clocks()
        self.phases.append({name: now[name] - self.before[name] for name in now})
        self.before = now

    def write(self, step: int, metrics: dict) -> dict:
        values = self.log.write(step, metrics)
        self.end_phase()
        self.steps.append(self.phases)
        self.phases = []
        return values

    def progress(self, step: int, values: dict) -> None: ...

    def say(self, text: str) -> None: ...


def clocks() -> dict[str, float]:
    cpu = time.process_time()
    return {"wall": time.monotonic(), "cpu": cpu, "threads": cpu - time.thread_time()}


def run_rank(folder: Path, work: Work) -> None:
    """One rank, under torchrun: its seconds go to a file."""
    config = parse_config(json.loads((folder / "flags.json").read_text()))
    plan = make_plan(config)
    ranks = init_ranks(config.timeout_s, plan.mesh, is_sharded(config))
    run = Trainer(plan, ranks)
    meter = Meter(work, run)
    asyncio.run(run_to_end(run))
    (folder / f"rank_{ranks.rank}.json").write_text(json.dumps(meter.steps[work.warmup :]))
    close_ranks(ranks)


def start(folder: Path, work: Work, model: str, num_ranks: int, more: str) -> subprocess.Popen:
    """A run whose seconds go to the folder."""
    flags = bench_ours.flags(work, {}, model, folder) + shlex.split(more)
    (folder / "flags.json").write_text(json.dumps(flags))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(num_ranks), __file__, "--rank_of", str(folder)]
    command += ["--work", json.dumps(dataclasses.asdict(work))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)


def run_ranks(work: Work, model: str, side: Side, both: str) -> list[dict[str, float]]:
    """Seconds of each step."""
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as other:
        how = work, model, side.num_ranks, f"{both} {side.flags}"
        runs = [start(Path(folder), *how) for folder in (name, other)[: side.num_runs]]
        for run in runs:
            if run.wait():
                sys.exit(f"a run ended with {run.returncode}")
        by_rank = [json.loads(path.read_text()) for path in sorted(Path(name).glob("rank_*.json"))]
    steps = []
    for phases in zip(*by_rank, strict=True):
        steps.append(seconds_of([*zip(*phases, strict=True)]))
    return steps


def seconds_of(phases: list[tuple[dict[str, float], ...]]) -> dict[str, float]:
    """Of one step: for each phase the seconds of every rank."""
    slowest = [max(ranks, key=lambda rank: rank["cpu"]) for ranks in phases]
    found = {"wall": sum(max(rank["wall"] for rank in ranks) for ranks in phases)}
    for name in ("cpu", "threads"):
        found[name] = sum(rank[name] for rank in slowest)
    found["all"] = sum(rank["cpu"] for ranks in phases for rank in ranks)
    found["sample"], found["rest"] = (rank["cpu"] for rank in slowest)
    return found


def measure(work: Work, model: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for one rank, one for one rank beside another run, then one for several ranks with
    each of --flags."""
    sides = [Side(), Side(num_runs=2)]
    sides += [Side(num_ranks=args.ranks, flags=more) for more in args.flags]
    steps: list[list[dict[str, float]]] = [[] for _ in sides]
    for _ in range(args.rounds):
        for found, side in zip(steps, sides, strict=True):
            found += run_ranks(work, model, side, args.both)
    lines: list[dict[str, Any]] = []
    for found, side in zip(steps, sides, strict=True):
        line: dict[str, Any] = {name: median(step[name] for step in found) for name in COLUMNS}
        note = "beside another run" if side.num_runs > 1 else side.flags
        line |= {"ranks": side.num_ranks, "flags": note, "work": work.name}
        line |= {f"{name} ratio": (lines or [line])[0][name] / line[name] for name in COLUMNS[:2]}
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["256x4", "384x6"], help="width x layers")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=16, help="of a step of GRPO, each 8 times")
    parser.add_argument("--flags", nargs="+", default=[""], help="further flags of several ranks")
    parser.add_argument("--both", default="", help="further flags of all runs")
    parser.add_argument("--steps", type=int, default=4, help="of a run that count")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side, in turn")
    parser.add_argument("--out", type=Path, help="write the lines as JSON")
    parser.add_argument("--rank_of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        run_rank(args.rank_of, Work(**json.loads(args.work)))
        registry.watchdog().exit_process(0)
    results = []
    names = " ".join(f"{name:>8}" for name in COLUMNS)
    print(f"{'work':<12} {'size':>6} {'ranks':>5} {names} {'wall x':>7} {'CPU x':>7}  flags")
    for size in args.sizes:
        hidden, layers = map(int, size.split("x"))
        for name in args.only:
            shape = {"hidden": hidden, "layers": layers, "heads": hidden // 64}
            shape["num_prompts"] = args.prompts
            work = dataclasses.replace(WORKS[name], steps=args.steps, warmup=1, **shape)
            with tempfile.TemporaryDirectory() as model:
                bench_work.make_model(work, model)
                for line in measure(work, model, args):
                    results.append(line | {"size": size})
                    show(results[-1])
    if args.out:
        args.out.write_text(json.dumps(results, indent=2))


def show(line: dict[str, Any]) -> None:
    values = " ".join(f"{line[name]:8.3f}" for name in COLUMNS)
    ratios = " ".join(f"{line[f'{name} ratio']:7.2f}" for name in COLUMNS[:2])
    start = f"{line['work']:<12} {line['size']:>6} {line['ranks']:>5}"
    print(f"{start} {values} {ratios}  {line['flags']}", flush=True)


if __name__ == "__main__":
    main()
