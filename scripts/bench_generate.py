"""The embedded engine next to transformers' `model.generate`: completions of GRPO steps, without
a trainer.

    python scripts/bench_generate.py                             ragged and short completions
    python scripts/bench_generate.py --only grpo_ragged --sizes 64x2 128x3 384x6 --steps 4
    python scripts/bench_generate.py --device cuda --sizes 1024x28     bf16, wall time, heads of 64

The tasks are those of bench_cpu.py: 16 prompts with 8 completions each, of forced lengths.
`model.generate` keeps all completions in one batch until the longest has ended. The engine starts
each step without a cache, as after an update, returns logprobs and decodes texts. Both take turns
in one process with one torch thread; figures are medians of CPU time. On a GPU `eager` is the
engine without CUDA graphs.
"""

from __future__ import annotations

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
from bench_logprobs import clock_s
from bench_work import WORKS, Work, completion_length, make_model
from script_tools import Table, make_parser
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria

from rl_core.data.pretrained import load_pretrained
from rl_core.engines.embedded import EmbeddedEngine
from rl_core.engines.llama_slots import LlamaSlots
from rl_core.engines.options import make_sampler
from rl_core.sampling.engine import EmbeddedSpec, EngineSpec
from rl_core.types import SamplingParams, counter_seed

WARMUP = 2  # Number of steps.
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


def measured(work: Work, device: torch.device) -> dict[str, str | float]:
    """A line of the table: tokens per second of each side."""
    with tempfile.TemporaryDirectory() as folder:
        make_model(work, folder)
        tokenizer = load_pretrained(AutoTokenizer, folder)
        model = load_pretrained(AutoModelForCausalLM, folder).eval()
    sides = {"engine": make_sampler}
    if device.type == "cuda":
        model.to(device, torch.bfloat16)
        sides["eager"] = LlamaSlots
    engines = {
        name: make_engine(work, model, tokenizer, sampler) for name, sampler in sides.items()
    }
    prompts = bench_work.rl_prompts(work)
    times: dict[str, list[float]] = defaultdict(list)  # Seconds per token, by side.
    for step in range(WARMUP + work.steps):
        first = step * bench_work.NUM_PROMPTS
        ids = []
        for prompt in prompts[first : first + bench_work.NUM_PROMPTS]:
            messages = [bench_work.says("user", prompt)]
            encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            ids += [encoded["input_ids"]] * bench_work.GROUP_SIZE
        lengths = [completion_length(work, step, i) for i in range(bench_work.NUM_SAMPLES)]
        calls = {name: partial(run_engine, engine) for name, engine in engines.items()}
        calls["generate"] = partial(generate_plainly, model)
        for name, call in calls.items():
            begin = clock_s(device.type)
            call(ids, lengths)
            times[name].append((clock_s(device.type) - begin) / sum(lengths))
    seconds = {name: statistics.median(of_steps[WARMUP:]) for name, of_steps in times.items()}
    line = {"work": work.name, "size": f"{work.hidden}x{work.layers}"}
    line |= {name: 1 / per_token_s for name, per_token_s in seconds.items()}
    return line | {"ratio": seconds["generate"] / seconds["engine"]}


def run_engine(engine: EmbeddedEngine, prompts: list[list[int]], lengths: list[int]) -> None:
    asyncio.run(generate(engine, prompts, lengths))


def main() -> None:
    parser = make_parser(__doc__)
    names = [name for name, work in WORKS.items() if work.algorithm == "grpo"]
    parser.add_argument("--only", choices=names, nargs="+", default=names)
    parser.add_argument("--sizes", nargs="+", metavar="HIDDENxLAYERS", default=["128x3"])
    parser.add_argument(
        "--steps", type=int, default=16, help=f"measured steps, after {WARMUP} of warm-up"
    )
    parser.add_argument("--device", type=torch.device, default="cpu", help="cpu or cuda")
    args = parser.parse_args()
    torch.set_num_threads(1)
    is_gpu = args.device.type == "cuda"
    print(f"tokens per {'second' if is_gpu else 'CPU second'}; ratio: engine to model.generate")
    columns = dict.fromkeys(["engine", "generate", *["eager"] * is_gpu], ">8.0f")
    table = Table(work="<11", size="<7", **columns, ratio=">6.2f")
    for name in args.only:
        for size in args.sizes:
            hidden, layers = map(int, size.split("x"))
            heads = {"heads": hidden // 64} if is_gpu else {}
            work = replace(WORKS[name], hidden=hidden, layers=layers, steps=args.steps, **heads)
            table.add(measured(work, args.device))


if __name__ == "__main__":
    main()
