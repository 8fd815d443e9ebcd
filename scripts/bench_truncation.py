"""What truncated sampling costs: a step with --sampling.top_k against one without, in one run.

    python scripts/bench_truncation.py               three vocabularies, on one torch thread
    python scripts/bench_truncation.py --quick       a smoke run; --out result.json

A step samples completions of one length by the embedded engine and learns from them: forward,
backward and optimizer's step of one update. Sides take turns; a time is CPU seconds of the process,
the median of some steps. Weights are drawn at random, so nothing is downloaded, and nearly all ids
are as likely: each token has top_k ids, which is the worst case beside top_p.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.algorithms import make_algorithm
from rl_core.config import parse_config
from rl_core.data.samples import samples_from_turns
from rl_core.distributed import init_ranks
from rl_core.engines.embedded import EmbeddedEngine
from rl_core.learning.learner import Learner
from rl_core.models import make_learner
from rl_core.plugins.row_sampling import choose_sampler
from rl_core.sampling.engine import EngineSpec
from rl_core.types import Completion, SamplingParams, TrainingSample, Turn

VOCABULARIES = (1_000, 32_000, 151_936)
HIDDEN, LAYERS, PROMPT = 128, 3, 32


class Side:
    """A learner and the engine that reads its weights."""

    def __init__(self, model: Path, top_k: int, args: argparse.Namespace):
        self.args, self.top_k = args, top_k
        flags = f"--model {model} --env_path none --out none --sampling.top_k {top_k} "
        sizes = f"--max_prompt_tokens {PROMPT} --max_tokens {args.tokens} --engine embedded"
        config = parse_config((flags + sizes).split())
        algorithm = make_algorithm("grpo", config.algo)
        self.learner: Learner = make_learner(config, algorithm, "policy", init_ranks(60))
        spec = EngineSpec(
            name="policy",
            model=str(model),
            module=self.learner.policy.hf,
            tokenizer=None,
            num_slots=args.completions,
            max_context_tokens=PROMPT + args.tokens,
            dtype=torch.float32,
            device=torch.device("cpu"),
            seed=0,
            sampler=choose_sampler,
            log=Path("none"),
            start_timeout_s=60,
            memory_frac=0.5,
        )
        self.engine = EmbeddedEngine(spec)
        self.times: dict[str, list[float]] = {"sample": [], "learn": []}

    def step(self, number: int) -> None:
        began = time.process_time()
        samples = asyncio.run(self.sample(number))
        between = time.process_time()
        [minibatch], _ = self.learner.shard(samples)
        self.learner.step([minibatch], number)
        self.times["sample"].append(between - began)
        self.times["learn"].append(time.process_time() - between)

    async def sample(self, number: int) -> list[TrainingSample]:
        await self.engine.update(None, number)
        draw = random.Random(number)
        how = {"max_tokens": self.args.tokens, "top_k": self.top_k, "keeps_ids": True}
        params = SamplingParams(**how)
        prompts = []
        for _ in range(self.args.completions):
            prompts.append([draw.randrange(1_000) for _ in range(PROMPT)])
        asked = [self.engine.generate(p, params, seed=i) for i, p in enumerate(prompts)]
        done: list[Completion] = await asyncio.gather(*asked)
        await self.engine.sleep()
        samples = []
        for i, (prompt, completion) in enumerate(zip(prompts, done, strict=True)):
            turn = Turn(new_ids=prompt, is_fresh=True, completion=completion)
            samples += samples_from_turns([turn], 1.0 if i % 2 else -1.0, str(i))
        return samples


def compare(vocabulary: int, args: argparse.Namespace) -> dict:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 3 * HIDDEN, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": HIDDEN // 4}
    model_config = AutoConfig.for_model(
        "qwen3", vocab_size=vocabulary, tie_word_embeddings=True, **sizes, **heads
    )
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(model_config).save_pretrained(folder)
        sides = {top_k: Side(Path(folder), top_k, args) for top_k in (0, args.top_k)}
    for number in range(1 + args.steps):
        for side in sides.values():
            side.step(number)
    found: dict = {"vocabulary": vocabulary, "top_k": args.top_k}
    for top_k, side in sides.items():
        # The first step warms up.
        times = {name: statistics.median(values[1:]) for name, values in side.times.items()}
        found["plain" if top_k == 0 else "truncated"] = times | {"step": sum(times.values())}
    plain, truncated = found["plain"], found["truncated"]
    return found | {"ratio": {name: truncated[name] / plain[name] for name in plain}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabularies", type=int, nargs="+", default=VOCABULARIES)
    parser.add_argument("--top_k", type=int, default=20)
    parser.add_argument("--completions", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32, help="of a completion")
    parser.add_argument("--steps", type=int, default=5, help="that count")
    parser.add_argument("--quick", action="store_true", help="one short step")
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    args = parser.parse_args()
    if args.quick:
        args.vocabularies, args.completions, args.tokens, args.steps = (1_000,), 4, 4, 1
    torch.set_num_threads(1)
    lines = []
    for vocabulary in args.vocabularies:
        line = compare(vocabulary, args)
        lines.append(line)
        for name, ratio in line["ratio"].items():
            plain, truncated = line["plain"][name], line["truncated"][name]
            told = f"{plain:.3f} CPU s plain, {truncated:.3f} with top_k {args.top_k}: {ratio:.2f}"
            print(f"{vocabulary:>8} ids  {name:8} {told}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(lines, indent=2))


if __name__ == "__main__":
    main()
