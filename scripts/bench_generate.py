"""The embedded engine beside transformers' `model.generate` on a CPU: completions of GRPO steps,
without a trainer.

    python scripts/bench_generate.py                             ragged and short completions
    python scripts/bench_generate.py --only grpo_ragged --sizes 64x2 128x3 384x6 --steps 4

The works are those of bench_cpu.py: 16 prompts of 8 completions each, whose lengths are forced.
`model.generate` has all of them in one batch until the longest has ended. The engine begins each
step without a cache, as after a learner's turn, gives logprobs and decodes texts. Both run in one
process, one torch thread, in turn; what counts are the medians of CPU time. The floor is that of
bench_floor.py.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import bench_work
import torch
from bench_floor import decode_floor, shape_of, step_tokens
from bench_work import WORKS, Work, completion_length, make_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria

from rl_core.data.pretrained import load_pretrained
from rl_core.engines.embedded import EmbeddedEngine
from rl_core.registry import choose_sampler
from rl_core.sampling.engine import EngineSpec
from rl_core.types import SamplingParams, counter_seed

WARMUP = 2  # steps
REPLACED = {"do_sample": True, "top_k": 0, "top_p": 1.0, "eos_token_id": None, "pad_token_id": 0}


class Lengths(StoppingCriteria):
    """Ends each row of a batch at its own length."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = torch.tensor(lengths)

    def __call__(self, ids: Tensor, scores: Tensor, **_) -> Tensor:
        return ids.shape[1] >= self.lengths


def make_engine(work: Work, model: torch.nn.Module, tokenizer) -> EmbeddedEngine:
    spec = EngineSpec(
        name="policy",
        model="",
        module=model,
        tokenizer=tokenizer,
        num_slots=bench_work.NUM_SAMPLES,
        max_context_tokens=work.longest_prompt + work.longest,
        dtype=torch.float32,
        device=torch.device("cpu"),
        seed=0,
        sampler=choose_sampler,
        log=Path(),
        start_timeout_s=600,
        memory_frac=0.5,
    )
    return EmbeddedEngine(spec)


async def generate(engine: EmbeddedEngine, prompts: list[list[int]], lengths: list[int]) -> None:
    calls = []
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        params = SamplingParams(max_tokens=length)
        session = f"episode {i}"
        call = engine.generate(prompt, params, seed=counter_seed(0, i), session=session)
        calls.append(call)
    done = await asyncio.gather(*calls)
    assert [len(completion.token_ids) for completion in done] == lengths
    await engine.sleep()


@torch.inference_mode()
def generate_plainly(model: torch.nn.Module, prompts: list[list[int]], lengths: list[int]) -> None:
    ids = torch.tensor(prompts)
    ends = Lengths([ids.shape[1] + length for length in lengths])
    settings = REPLACED | {"max_new_tokens": max(lengths), "stopping_criteria": [ends]}
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)


def measured(work: Work) -> str:
    """A line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        make_model(work, folder)
        tokenizer = load_pretrained(AutoTokenizer, folder)
        model = load_pretrained(AutoModelForCausalLM, folder).eval()
        shape, tokens = shape_of(folder), step_tokens(work, folder)
    floor = sum(decode_floor(shape, tokens).values()) / tokens.trained
    engine = make_engine(work, model, tokenizer)
    prompts = bench_work.rl_prompts(work)
    found: dict[str, list[float]] = {"engine": [], "generate": []}
    for step in range(WARMUP + work.steps):
        first = step * bench_work.NUM_PROMPTS
        ids = []
        for prompt in prompts[first : first + bench_work.NUM_PROMPTS]:
            said = [bench_work.says("user", prompt)]
            encoded = tokenizer.apply_chat_template(said, add_generation_prompt=True)
            ids += [encoded["input_ids"]] * bench_work.GROUP_SIZE
        lengths = [completion_length(work, step, i) for i in range(bench_work.NUM_SAMPLES)]
        begin = time.process_time()
        asyncio.run(generate(engine, ids, lengths))
        middle = time.process_time()
        generate_plainly(model, ids, lengths)
        end = time.process_time()
        if step >= WARMUP:
            found["engine"].append((middle - begin) / sum(lengths))
            found["generate"].append((end - middle) / sum(lengths))
    ours, plain = map(statistics.median, found.values())
    rates = "  ".join(f"{1 / seconds:8.0f}" for seconds in (ours, plain, floor))
    return f"{work.name:<12}{work.hidden}x{work.layers:<4}{rates}  {plain / ours:5.2f} times"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [name for name, work in WORKS.items() if work.algorithm == "grpo"]
    parser.add_argument("--only", choices=names, nargs="+", default=names)
    parser.add_argument("--sizes", nargs="+", metavar="HIDDENxLAYERS", default=["128x3"])
    parser.add_argument("--steps", type=int, default=16, help=f"after {WARMUP} of warm-up")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("tokens per CPU second: engine, model.generate, floor; engine / model.generate")
    for name in args.only:
        for size in args.sizes:
            hidden, layers = map(int, size.split("x"))
            work = replace(WORKS[name], hidden=hidden, layers=layers, steps=args.steps)
            print(measured(work), flush=True)


if __name__ == "__main__":
    main()
