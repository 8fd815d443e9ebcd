"""What adapters cost that an engine applies row by row, beside copies of the weights into which they were merged.

    python scripts/bench_adapters.py [--hidden 512] [--layers 8] [--rank 16] [--requests 32] [--actors 2]

Each way has the same requests of each actor, and all decode at once where one engine serves them. Tokens per CPU second of
sampling, CPU seconds of one update of all actors, and MiB of weights that engines hold; the best of some rounds in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable

import torch
from make_tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM

from rl_core.config import LoraConfig
from rl_core.distributed import init_ranks
from rl_core.learning.lora import DEFAULT, adapter_weights, merged_weights
from rl_core.learning.model import make_policy
from rl_core.sampling.embedded_engine import EmbeddedEngine
from rl_core.types import SamplingParams


def sample(engines: dict[str, EmbeddedEngine], requests: int, max_tokens: int, with_adapter: bool) -> float:
    """CPU seconds of as many requests of each actor."""
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0)

    async def ask() -> None:
        calls = []
        for i in range(requests):
            for name, engine in engines.items():
                adapter = {"adapter": name} if with_adapter else {}
                calls.append(engine.generate([1, 2, 3 + i % 60], params, seed=i, **adapter))
        await asyncio.gather(*calls)

    return cpu_seconds(lambda: asyncio.run(ask()))


def cpu_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--requests", type=int, default=32, help="of all actors together")
    parser.add_argument("--max_tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder, names = tempfile.mkdtemp(), [f"actor{i}" for i in range(args.actors)]
    make_tiny_model(folder, args.hidden, args.layers, args.hidden // 64, 0, "qwen3")
    lora = LoraConfig(rank=args.rank)
    more = {name: (lora, i) for i, name in enumerate(names[1:], 1)}
    policy = make_policy(folder, torch.float32, init_ranks(60), False, lora, 0, more_adapters=more)
    adapters = dict(zip(names, [DEFAULT, *more], strict=True))
    share, width = args.requests // args.actors, 3 + args.max_tokens + 1

    configs = {name: policy.adapters[adapter].to_dict() for name, adapter in adapters.items()}

    def engine(slots: int) -> EmbeddedEngine:
        model = AutoModelForCausalLM.from_pretrained(folder).requires_grad_(False)
        return EmbeddedEngine(model, num_slots=slots, max_context_tokens=width, adapters=configs)

    shared, copies = engine(args.requests), {name: engine(share) for name in names}

    async def update_shared() -> None:
        for name, adapter in adapters.items():
            await shared.update(adapter_weights(policy.hf, adapter), 1, adapter=name)

    async def update_copies() -> None:
        for name, adapter in adapters.items():
            await copies[name].update(merged_weights(policy.hf, adapter), 1)

    size = sum(p.nbytes for p in shared.model.parameters()) / 2**20
    ways = {
        "a merged copy each": (copies, share, False, update_copies, size * args.actors),
        "one base, adapters by row": (dict.fromkeys(names, shared), share, True, update_shared, size),
        "one base, all rows of one actor": ({names[0]: shared}, args.requests, True, update_shared, size),
        "one base, no adapter": ({"": shared}, args.requests, True, update_shared, size),
    }
    best: dict[str, list[float]] = {name: [float("inf")] * 2 for name in ways}
    for _ in range(args.rounds):
        for name, (engines, requests, with_adapter, update, _) in ways.items():
            updated = cpu_seconds(lambda update=update: asyncio.run(update()))
            found = sample(engines, requests, args.max_tokens, with_adapter), updated
            best[name] = [min(pair) for pair in zip(best[name], found, strict=True)]
    print(f"{size / 4:.1f} M parameters, {args.actors} adapters of rank {args.rank}, {args.requests} requests at once")
    print(f"{'':<32} {'tokens / CPU s':>14} {'ratio':>6} {'update, CPU s':>14} {'MiB':>7}")
    tokens = args.requests * args.max_tokens
    first = best["a merged copy each"][0]
    for name, (sampled, updated) in best.items():
        print(f"{name:<32} {tokens / sampled:>14.0f} {first / sampled:>6.2f} {updated:>14.4f} {ways[name][4]:>7.0f}")


if __name__ == "__main__":
    main()
