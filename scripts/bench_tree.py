"""Cost of an update on an agent's branches: packed as trees, and with each sample separate.

    python scripts/bench_tree.py                     three kinds of episodes, one torch thread
    python scripts/bench_tree.py --quick             a smoke run; --out result.json

The samples of these episodes have common prefixes:

    chat        8 turns of a template that drops earlier thinking: each turn is a sample
    branches    8 attempts that continue one trunk, each an eighth as long as the trunk
    subagents   a conversation of 6 turns, and 3 sub-agents of 3 turns that share a system prompt

Lengths are in tokens, drawn with a fixed seed. A time is the least CPU time of several updates:
forward, backward and optimizer step. Weights are random. Both sides have the same samples, the
same limit of a microbatch and the same loss.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench_learner import make_learner
from script_tools import Table, make_parser, write_json

from rl_core.data.packing import balanced_bins, pack_samples
from rl_core.data.samples import samples_from_turns
from rl_core.distributed import init_ranks
from rl_core.learning.learner import Learner
from rl_core.learning.minibatches import Minibatch
from rl_core.types import Completion, TrainingSample, Turn

VOCABULARY = 512
LONGEST = 4096  # Most tokens of a sample.


class Writer:
    """Draws the turns of one episode."""

    def __init__(self, seed: int, scale: float):
        self.draw, self.scale, self.num_turns = random.Random(seed), scale, 0

    def tokens(self, num: int) -> list[int]:
        return [self.draw.randrange(VOCABULARY) for _ in range(max(1, round(num * self.scale)))]

    def turn(self, new_ids: list[int], sampled: list[int], is_fresh: bool = False) -> Turn:
        self.num_turns += 1
        completion = Completion(token_ids=sampled, logprobs=[-6.0] * len(sampled), policy_version=0)
        name = f"{self.num_turns}"
        return Turn(new_ids=new_ids, is_fresh=is_fresh, completion=completion, name=name)


def chat(writer: Writer) -> list[list[Turn]]:
    """Conversations of an episode. A turn's thinking is not in the next turn's prompt."""
    history, turns = writer.tokens(200), []
    for _ in range(8):
        history = history + writer.tokens(60)
        thoughts, answer = writer.tokens(200), writer.tokens(100)
        turns.append([writer.turn(history, thoughts + answer, is_fresh=True)])
        history = history + answer
    return turns


def branches(writer: Writer) -> list[list[Turn]]:
    trunk = [writer.turn(writer.tokens(200), writer.tokens(200), is_fresh=True)]
    for _ in range(2):
        trunk.append(writer.turn(writer.tokens(100), writer.tokens(212)))
    ends = [writer.turn(writer.tokens(28), writer.tokens(100)) for _ in range(8)]
    return [[*trunk, end] for end in ends]


def subagents(writer: Writer) -> list[list[Turn]]:
    talk = [writer.turn(writer.tokens(300), writer.tokens(120), is_fresh=True)]
    for _ in range(5):
        talk.append(writer.turn(writer.tokens(80), writer.tokens(120)))
    conversations, system = [talk], writer.tokens(400)
    for _ in range(3):
        asked = system + writer.tokens(60)
        helper = [writer.turn(asked, writer.tokens(100), is_fresh=True)]
        for _ in range(2):
            helper.append(writer.turn(writer.tokens(80), writer.tokens(100)))
        conversations.append(helper)
    return conversations


WORKS: dict[str, Callable[[Writer], list[list[Turn]]]] = {
    "chat": chat,
    "branches": branches,
    "subagents": subagents,
}


def make_samples(work: str, num_episodes: int, scale: float) -> list[TrainingSample]:
    samples = []
    for number in range(num_episodes):
        trained: set[str] = set()
        advantage = 1.0 if number % 2 else -1.0
        for turns in WORKS[work](Writer(number, scale)):
            samples += samples_from_turns(turns, advantage, f"{number:04d}", trained)
    return samples


def unrolled(learner: Learner, samples: list[TrainingSample], packed: Minibatch) -> Minibatch:
    """The same minibatch with separate samples; packing for 2 ranks shares no prefixes."""
    costs = [(len(sample.token_ids) + 4, float(len(sample.token_ids))) for sample in samples]
    batches = []
    for numbers in balanced_bins(costs, learner.budget.max_tokens, 1):
        batches.append(pack_samples([samples[n] for n in numbers], cp=2))
    return Minibatch(denominator=packed.denominator, num_tokens=packed.num_tokens, batches=batches)


def measure(learner: Learner, minibatch: Minibatch, repeats: int) -> dict[str, float]:
    learner.annotate([minibatch])
    times = []
    loss = 0.0
    for _ in range(repeats):
        began = time.process_time()
        loss = float(learner.step([minibatch], 0)["loss"].value)
        times.append(time.process_time() - began)
    tokens = sum(len(batch.input_ids) for batch in minibatch.batches)
    return {"tokens": tokens, "cpu_s": min(times), "loss": loss}


def compare(work: str, args: argparse.Namespace) -> dict:
    # Both have the same initial weights.
    first, second = (make_learner(args.size, LONGEST, args, init_ranks(60)) for _ in range(2))
    samples = make_samples(work, args.episodes, args.scale)
    [packed], _ = first.shard(samples)
    tree = measure(first, packed, args.repeats)
    alone = measure(second, unrolled(second, samples, packed), args.repeats)
    assert abs(tree["loss"] - alone["loss"]) < 1e-4 * max(1, abs(alone["loss"])), (tree, alone)
    return {
        "work": work,
        "samples": len(samples),
        "trained_tokens": packed.num_tokens,
        "unrolled": alone,
        "tree": tree,
        "fewer_tokens": alone["tokens"] / tree["tokens"],
        "less_time": alone["cpu_s"] / tree["cpu_s"],
    }


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--only", choices=WORKS, nargs="+", default=list(WORKS))
    parser.add_argument("--size", default="tiny", help="size of the model, as in bench_learner.py")
    parser.add_argument("--episodes", type=int, default=4)
    parser.add_argument(
        "--repeats", type=int, default=5, help="number of updates, of which the fastest counts"
    )
    parser.add_argument("--microbatch_tokens", type=int, default=LONGEST)
    parser.add_argument("--quick", action="store_true", help="short episodes, one update")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    args.cp, args.recompute, args.scale = 1, False, 1.0
    if args.quick:
        args.repeats, args.scale = 1, 0.1
    return args


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    counts = dict.fromkeys(("samples", "tokens", "tree_tokens"), ">6d")
    ratios = dict.fromkeys(("cpu_s", "tree_cpu_s", "fewer_tokens", "less_time"), ">6.2f")
    table, lines = Table(work="<10", **counts, **ratios), []
    for work in args.only:
        lines.append(line := compare(work, args))
        tree = {f"tree_{name}": value for name, value in line["tree"].items()}
        table.add(line | line["unrolled"] | tree)
    write_json(args.out, lines)


if __name__ == "__main__":
    main()
