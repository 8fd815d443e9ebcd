"""What a learner computes of an agent's branches: packed trees against the samples one by one.

    python scripts/bench_tree.py                     the three works, on one torch thread
    python scripts/bench_tree.py --quick             a smoke run; --out result.json

The works are episodes whose samples begin alike:

    chat        8 turns of a template that drops earlier thinking: each turn is a sample
    branches    8 attempts that go on from one trunk, each an eighth of its length
    subagents   a conversation of 6 turns, and 3 sub-agents of 3 turns that share a system prompt

Lengths are in tokens, drawn at random with a fixed seed. A time is CPU seconds of the process for
the forward, backward and optimizer's step of one update, the least of some. Weights are drawn at
random, so nothing is downloaded. Both sides have the same samples, the same limit of a microbatch
and the same loss.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench_learner import make_learner

from rl_core.data.packing import balanced_bins, pack_samples
from rl_core.data.samples import samples_from_turns
from rl_core.distributed import init_ranks
from rl_core.learning.learner import Learner
from rl_core.learning.minibatches import Minibatch
from rl_core.types import Completion, TrainingSample, Turn

VOCABULARY = 512
LONGEST = 4096  # tokens of a sample, at most


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
    """Conversations of an episode. What a turn thought is not in the next one's prompt."""
    history, found = writer.tokens(200), []
    for _ in range(8):
        history = history + writer.tokens(60)
        thoughts, answer = writer.tokens(200), writer.tokens(100)
        found.append([writer.turn(history, thoughts + answer, is_fresh=True)])
        history = history + answer
    return found


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
    found, system = [talk], writer.tokens(400)
    for _ in range(3):
        asked = system + writer.tokens(60)
        helper = [writer.turn(asked, writer.tokens(100), is_fresh=True)]
        for _ in range(2):
            helper.append(writer.turn(writer.tokens(80), writer.tokens(100)))
        found.append(helper)
    return found


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
    """The same minibatch with each sample on its own: padded for 2 ranks, nothing is shared."""
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
    # Each begins with the same weights.
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


def table(lines: list[dict]) -> str:
    form = "{:10} {:>8} {:>10} {:>10} {:>7} {:>12} {:>9} {:>7}"
    titles = "tokens", "tree", "fewer", "CPU s", "tree", "less"
    rows = [form.format("work", "samples", *titles)]
    for line in lines:
        alone, tree = line["unrolled"], line["tree"]
        of_tokens = alone["tokens"], tree["tokens"], f"{line['fewer_tokens']:.2f}"
        of_time = f"{alone['cpu_s']:.2f}", f"{tree['cpu_s']:.2f}", f"{line['less_time']:.2f}"
        rows.append(form.format(line["work"], line["samples"], *of_tokens, *of_time))
    return "\n".join(rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=WORKS, nargs="+", default=list(WORKS))
    parser.add_argument("--size", default="tiny", help="of the model, as of bench_learner.py")
    parser.add_argument("--episodes", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5, help="updates, of which the least counts")
    parser.add_argument("--microbatch_tokens", type=int, default=LONGEST)
    parser.add_argument("--quick", action="store_true", help="short episodes, one update")
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    args = parser.parse_args()
    args.cp, args.recompute, args.scale = 1, False, 1.0
    if args.quick:
        args.repeats, args.scale = 1, 0.1
    return args


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    lines = [compare(work, args) for work in args.only]
    print(table(lines))
    if args.out:
        args.out.write_text(json.dumps(lines, indent=2))


if __name__ == "__main__":
    main()
