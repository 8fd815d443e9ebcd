"""What a step costs beside the model: trajectories -> advantages, samples, plan and packed batches.

    python scripts/bench_scale.py                      100 to 100,000 trajectories, turns, actors
    python scripts/bench_scale.py --processes 2 8 64   the same samples over gloo processes
    python scripts/bench_scale.py --plan 16384 1000000 what each rank does for all ranks' samples
    python scripts/bench_scale.py --quick              a smoke run; --out result.json

Trajectories are made up: groups of 8 of one prompt, a quarter of whose tokens are sampled. Nothing
is computed by a model. Times are CPU seconds of the process for each million tokens, one thread.
Memory is what the samples, the plan and the batches hold at once, in bytes for each token, by
tracemalloc. `moved` is what a process sends, in bytes for each token of all: entries of the plan,
and samples, its own share included. Python's garbage collector is off: at 100,000 trajectories it
takes a fifth more.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import socket
import sys
import time
import tracemalloc
from collections.abc import Callable
from multiprocessing import SimpleQueue, get_context
from pathlib import Path

import torch

from rl_core.algorithms import make_algorithm
from rl_core.config import Config
from rl_core.data.episodes import baseline_groups
from rl_core.data.packing import PackBudget, Unit, fill_bins, split_groups
from rl_core.distributed import Ranks, close_ranks, init_ranks
from rl_core.learning import minibatches
from rl_core.learning.advantages import samples_of
from rl_core.types import Completion, Trajectory, Turn

GROUP, TURN_TOKENS, MICROBATCH_TOKENS = 8, 64, 16_384
COUNTS = (100, 1_000, 10_000, 100_000)
TURNS, ACTORS = (1, 4, 16, 64), (1, 4, 16)


def make_trajectories(num: int, turns: int, actors: int, rank: int = 0) -> list[Trajectory]:
    """`num` of them, of `turns` turns of 48 new and 16 sampled tokens, dealt out to the actors."""
    draw = random.Random(rank)
    made = []
    for number in range(num):
        first = random.Random(number // GROUP)
        played = []
        for turn in range(turns):
            source = draw if turn else first
            new_ids = [source.randrange(32_000) for _ in range(TURN_TOKENS * 3 // 4)]
            ids = [draw.randrange(32_000) for _ in range(TURN_TOKENS // 4)]
            done = Completion(token_ids=ids, logprobs=[-1.0] * len(ids), policy_version=0)
            name = f"{rank}.{number}.{turn}"
            played.append(Turn(new_ids=new_ids, is_fresh=not turn, completion=done, name=name))
        made.append(
            Trajectory(
                group_id=f"{rank}.{number // GROUP}",
                index=number % GROUP,
                actor=f"a{number // GROUP % actors}",
                turns=played,
                reward=draw.random(),
            )
        )
    return made


def step_of(trajectories: list[Trajectory], actors: int, ranks: Ranks) -> tuple[dict, int]:
    """(CPU seconds of each part, trained tokens of all ranks)."""
    config = Config()
    algorithm = make_algorithm("grpo", config.algo)
    budget = PackBudget(max_tokens=MICROBATCH_TOKENS, num_ranks=ranks.size, pair_work=1e-4)
    seconds, num_trained, held = {"samples": 0.0, "minibatches": 0.0}, 0, []
    for actor in (f"a{number}" for number in range(actors)):
        before = time.process_time()
        groups = baseline_groups(t for t in trajectories if t.actor == actor)
        samples = samples_of(groups, algorithm, config.max_tokens)
        between = time.process_time()
        made, _ = minibatches.shard_samples(samples, algorithm, config, budget, ranks)
        seconds["samples"] += between - before
        seconds["minibatches"] += time.process_time() - between
        num_trained += sum(minibatch.num_tokens for minibatch in made)
        held.append(made)
    return seconds, num_trained


def measure(num: int, turns: int = 1, actors: int = 1, repeats: int = 3) -> dict:
    ranks = Ranks(rank=0, size=1, device=torch.device("cpu"))
    trajectories = make_trajectories(num, turns, actors)
    num_tokens = num * turns * TURN_TOKENS
    best: dict[str, float] = {}
    for _ in range(repeats):
        seconds, num_trained = step_of(trajectories, actors, ranks)
        if not best or sum(seconds.values()) < sum(best.values()):
            best = seconds
    assert num_trained == num_tokens // 4
    tracemalloc.start()
    step_of(trajectories, actors, ranks)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    line = {"trajectories": num, "turns": turns, "actors": actors, "tokens": num_tokens}
    for name, value in best.items():
        line[f"{name}_s_per_m"] = value / num_tokens * 1e6
    return line | {"s_per_m": sum(best.values()) / num_tokens * 1e6, "bytes": peak / num_tokens}


def measure_plan(num: int, unit_size: int, num_ranks: int = 64) -> dict:
    """What each rank does for so many samples of all: from the text that arrives to full bins.
    Samples of about 400 tokens, of which so many begin alike and are one unit."""
    draw = random.Random(0)
    totals, units = [], []
    for number in range(num // unit_size):
        lengths = [min(4096, round(draw.lognormvariate(6, 1)) + 20) for _ in range(unit_size)]
        tokens = sum(lengths)
        totals.append([f"train/000000/{number:06d}", unit_size, tokens, tokens])
        rank = number * num_ranks * unit_size // num
        scores = sum(length**2 for length in lengths)
        units.append(Unit(number, rank, number, unit_size, tokens, scores))
    texts = json.dumps(totals), json.dumps(units)
    before = time.process_time()
    [plan] = split_groups([json.loads(texts[0])], 1)
    budget = PackBudget(max_tokens=MICROBATCH_TOKENS, num_ranks=num_ranks, pair_work=1e-4)
    fill_bins(plan, [json.loads(texts[1])], budget)
    seconds = time.process_time() - before
    line = {"samples": num, "ranks": num_ranks, "samples_of_a_unit": unit_size}
    return line | {"plan_s": seconds, "us_of_a_sample": seconds / num * 1e6}


def of_process(place: dict[str, str], num: int, results: SimpleQueue) -> None:
    """One of several processes: its CPU seconds and what it sent."""
    os.environ |= place
    ranks = init_ranks(600)
    sent = counted(minibatches)
    trajectories = make_trajectories(num, 1, 1, ranks.rank)
    wait_for_all(ranks)
    seconds, num_trained = step_of(trajectories, 1, ranks)
    assert num_trained == num * ranks.size * TURN_TOKENS // 4
    results.put({"cpu_s": sum(seconds.values()), "sent": sum(sent)})
    wait_for_all(ranks)
    close_ranks(ranks)


def wait_for_all(ranks: Ranks) -> None:
    if ranks.size > 1:
        torch.distributed.barrier()


def counted(module: object) -> list[int]:
    """The sizes, in bytes, of what minibatches.py sends from now on."""
    sent: list[int] = []

    def watched(call: Callable, size: Callable) -> Callable:
        def watch(value, *rest):
            sent.append(size(value))
            return call(value, *rest)

        return watch

    module.exchange = watched(module.exchange, lambda parts: sum(map(len, parts)))
    module.all_gather_json = watched(module.all_gather_json, lambda v: len(json.dumps(v)))
    return sent


def measure_processes(num_processes: int, num: int) -> dict:
    """`num` trajectories over so many processes of this machine."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    usual = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num_processes)}
    forking = get_context("fork")  # what is imported is imported once
    results, running = forking.SimpleQueue(), []
    for rank in range(num_processes):
        place = usual | {"RANK": str(rank), "LOCAL_RANK": "0"}
        own = place, num // num_processes, results
        running.append(forking.Process(target=of_process, args=own))
        running[-1].start()
    for process in running:
        process.join()
        if process.exitcode:
            sys.exit(f"a process ended with {process.exitcode}")
    lines = [results.get() for _ in running]
    cpu = [line["cpu_s"] for line in lines]
    tokens = num // num_processes * num_processes * TURN_TOKENS
    return {
        "processes": num_processes,
        "trajectories": num,
        "s_per_m": sum(cpu) / tokens * 1e6,
        "most_s": max(cpu),
        "moved": sum(line["sent"] for line in lines) / tokens,
    }


def table(lines: list[dict]) -> str:
    columns = list(lines[0])
    rows = ["  ".join(f"{name:>19}" for name in columns)]
    for line in lines:
        values = [line[name] for name in columns]
        texts = [f"{v:.3f}" if isinstance(v, float) else f"{v:,}" for v in values]
        rows.append("  ".join(f"{text:>19}" for text in texts))
    return "\n".join(rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", help="only these numbers of processes")
    parser.add_argument("--trajectories", type=int, default=6_400, help="of all processes together")
    parser.add_argument("--plan", type=int, nargs="+", help="only plans of so many samples")
    parser.add_argument("--quick", action="store_true", help="few trajectories, once")
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    gc.disable()
    if args.processes:
        lines = [measure_processes(num, args.trajectories) for num in args.processes]
    elif args.plan:
        lines = [measure_plan(num, size) for num in args.plan for size in (GROUP, 1)]
    else:
        repeats = 1 if args.quick else 3
        works = [(num, 1, 1) for num in (COUNTS[:2] if args.quick else COUNTS)]
        works += [(16_000 // turns, turns, 1) for turns in TURNS if not args.quick]
        works += [(10_000, 1, actors) for actors in ACTORS if not args.quick]
        lines = [measure(*work, repeats) for work in works]
    print(table(lines))
    if args.out:
        args.out.write_text(json.dumps(lines, indent=2))


if __name__ == "__main__":
    main()
