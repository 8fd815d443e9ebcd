"""The embedded engine beside transformers' `model.generate`: completions of GRPO steps, without a
trainer.

    python scripts/bench_generate.py                             ragged and short completions
    python scripts/bench_generate.py --only grpo_ragged --sizes 64x2 128x3 384x6 --steps 4
    python scripts/bench_generate.py --device cuda --sizes 1024x28     bf16, seconds of the clock;
                                                                       heads of 64

The works are those of bench_cpu.py: 16 prompts of 8 completions each, whose lengths are forced.
`model.generate` has all of them in one batch until the longest has ended. The engine begins each
step without a cache, as after a learner's turn, gives logprobs and decodes texts. Both run in one
process, one torch thread, in turn; what counts are the medians of CPU time. The floor is that of
bench_floor.py. On a GPU `eager` is the engine without CUDA graphs, in the floor's place.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import bench_work
import torch
from bench_floor import decode_floor, shape_of, step_tokens
from bench_logprobs import clock_s
from bench_work import WORKS, Work, completion_length, make_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria

from rl_core.data.pretrained import load_pretrained
from rl_core.engines.embedded import EmbeddedEngine
from rl_core.engines.llama_slots import LlamaSlots
from rl_core.engines.options import make_sampler
from rl_core.sampling.engine import EmbeddedSpec, EngineSpec
from rl_core.types import SamplingParams, counter_seed

WARMUP = 2  # steps
REPLACED = {"do_sample": True, "top_k": 0, "top_p": 1.0, "eos_token_id": None, "pad_token_id": 0}


class Lengths(StoppingCriteria):
    """Ends each row of a batch at its own length."""

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        self.lengths = torch.tensor(lengths, device=device)

    def __call__(self, ids: Tensor, scores: Tensor, **_) -> Tensor:
        return ids.shape[1] >= self.lengths


def make_engine(
    work: Work, model: torch.nn.Module, tokenizer, sampler: Callable = make_sampler
) -> EmbeddedEngine:
    spec = EngineSpec(
        name="policy",
        model="",
        module=model,
        tokenizer=tokenizer,
        num_slots=bench_work.NUM_SAMPLES,
        max_context_tokens=work.longest_prompt + work.longest,
        dtype=model.dtype,
        device=model.device,
        seed=0,
        embedded=EmbeddedSpec(sampler=sampler),
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
    ids = torch.tensor(prompts, device=model.device)
    ends = Lengths([ids.shape[1] + length for length in lengths], model.device)
    settings = REPLACED | {"max_new_tokens": max(lengths), "stopping_criteria": [ends]}
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)


def measured(work: Work, device: torch.device) -> str:
    """A line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        make_model(work, folder)
        tokenizer = load_pretrained(AutoTokenizer, folder)
        model = load_pretrained(AutoModelForCausalLM, folder).eval()
        shape, tokens = shape_of(folder), step_tokens(work, folder)
    sides = {"engine": make_sampler}
    if device.type == "cuda":
        model.to(device, torch.bfloat16)
        sides["eager"] = LlamaSlots
    engines = {name: make_engine(work, model, tokenizer, how) for name, how in sides.items()}
    prompts = bench_work.rl_prompts(work)
    found = defaultdict(list)  # seconds of a token
    for step in range(WARMUP + work.steps):
        first = step * bench_work.NUM_PROMPTS
        ids = []
        for prompt in prompts[first : first + bench_work.NUM_PROMPTS]:
            said = [bench_work.says("user", prompt)]
            encoded = tokenizer.apply_chat_template(said, add_generation_prompt=True)
            ids += [encoded["input_ids"]] * bench_work.GROUP_SIZE
        lengths = [completion_length(work, step, i) for i in range(bench_work.NUM_SAMPLES)]
        calls = {name: partial(run_engine, engine) for name, engine in engines.items()}
        calls["generate"] = partial(generate_plainly, model)
        for name, call in calls.items():
            begin = clock_s(device.type)
            call(ids, lengths)
            found[name].append((clock_s(device.type) - begin) / sum(lengths))
    seconds = {name: statistics.median(of_steps[WARMUP:]) for name, of_steps in found.items()}
    if device.type == "cpu":
        seconds["floor"] = sum(decode_floor(shape, tokens).values()) / tokens.trained
    names = "engine", "generate", "floor" if device.type == "cpu" else "eager"
    rates = "  ".join(f"{1 / seconds[name]:8.0f}" for name in names)
    times = seconds["generate"] / seconds["engine"]
    return f"{work.name:<12}{work.hidden}x{work.layers:<4}{rates}  {times:5.2f} times"


def run_engine(engine: EmbeddedEngine, prompts: list[list[int]], lengths: list[int]) -> None:
    asyncio.run(generate(engine, prompts, lengths))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [name for name, work in WORKS.items() if work.algorithm == "grpo"]
    parser.add_argument("--only", choices=names, nargs="+", default=names)
    parser.add_argument("--sizes", nargs="+", metavar="HIDDENxLAYERS", default=["128x3"])
    parser.add_argument("--steps", type=int, default=16, help=f"after {WARMUP} of warm-up")
    parser.add_argument("--device", type=torch.device, default="cpu", help="cpu or cuda")
    args = parser.parse_args()
    torch.set_num_threads(1)
    what = "CPU second: engine, model.generate, floor"
    if args.device.type == "cuda":
        what = "second: engine, model.generate, engine without CUDA graphs"
    print(f"tokens per {what}; engine / model.generate")
    for name in args.only:
        for size in args.sizes:
            hidden, layers = map(int, size.split("x"))
            heads = {"heads": hidden // 64} if args.device.type == "cuda" else {}
            work = replace(WORKS[name], hidden=hidden, layers=layers, steps=args.steps, **heads)
            print(measured(work, args.device), flush=True)


if __name__ == "__main__":
    main()
