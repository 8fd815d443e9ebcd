"""Cost of a step without the model: trajectories -> advantages, samples, plan and packed batches.

    python scripts/bench_scale.py                      100 to 100,000 trajectories, turns, actors
    python scripts/bench_scale.py --plan 16384 1000000 each rank's plan for all ranks' samples
    python scripts/bench_scale.py --quick              a smoke run; --out result.json

Trajectories are synthetic: groups of 8 with one prompt, a quarter of the tokens sampled. Times are
CPU seconds per million tokens on one thread. Memory is the peak of samples, plan and batches in
bytes per token, by tracemalloc. Python's garbage collector is off: at 100,000 trajectories it adds
a fifth.
"""

from __future__ import annotations

import gc
import json
import random
import time
import tracemalloc
from pathlib import Path

import torch
from script_tools import Table, make_parser, write_json

from rl_core.algorithms import make_algorithm
from rl_core.config import Config
from rl_core.data.episodes import baseline_groups
from rl_core.data.packing import PackBudget, Unit, fill_bins, split_groups
from rl_core.distributed import Ranks
from rl_core.learning import minibatches
from rl_core.learning.advantages import samples_of
from rl_core.types import Completion, Trajectory, Turn

GROUP, TURN_TOKENS, MICROBATCH_TOKENS = 8, 64, 16_384
COUNTS = (100, 1_000, 10_000, 100_000)
TURNS, ACTORS = (1, 4, 16, 64), (1, 4, 16)


def make_trajectories(num: int, turns: int, actors: int) -> list[Trajectory]:
    """`num` trajectories of `turns` turns, each of 48 new and 16 sampled tokens."""
    draw = random.Random(0)
    made = []
    for number in range(num):
        first = random.Random(number // GROUP)
        played = []
        for turn in range(turns):
            source = draw if turn else first
            new_ids = [source.randrange(32_000) for _ in range(TURN_TOKENS * 3 // 4)]
            ids = [draw.randrange(32_000) for _ in range(TURN_TOKENS // 4)]
            done = Completion(token_ids=ids, logprobs=[-1.0] * len(ids), policy_version=0)
            name = f"{number}.{turn}"
            played.append(Turn(new_ids=new_ids, is_fresh=not turn, completion=done, name=name))
        made.append(
            Trajectory(
                group_id=f"{number // GROUP}",
                index=number % GROUP,
                actor=f"a{number // GROUP % actors}",
                turns=played,
                reward=draw.random(),
            )
        )
    return made


def step_of(trajectories: list[Trajectory], actors: int, ranks: Ranks) -> tuple[dict, int]:
    """(CPU seconds by phase, number of trained tokens)."""
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
    """Cost of a rank's plan for `num` samples of all ranks: from the received text to full bins.
    Samples have about 400 tokens; unit_size of them share a prefix and are packed together."""
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


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--plan", type=int, nargs="+", help="only plans of these many samples")
    parser.add_argument("--quick", action="store_true", help="few trajectories, once")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    if args.plan:
        lines = [measure_plan(num, size) for num in args.plan for size in (GROUP, 1)]
    else:
        repeats = 1 if args.quick else 3
        works = [(num, 1, 1) for num in (COUNTS[:2] if args.quick else COUNTS)]
        works += [(16_000 // turns, turns, 1) for turns in TURNS if not args.quick]
        works += [(10_000, 1, actors) for actors in ACTORS if not args.quick]
        lines = [measure(*work, repeats) for work in works]
    columns = {name: ">8.3f" if isinstance(v, float) else ">8d" for name, v in lines[0].items()}
    table = Table(**columns)
    for line in lines:
        table.add(line)
    write_json(args.out, lines)


if __name__ == "__main__":
    main()
