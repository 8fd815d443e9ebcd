"""Peak memory, and time, of logprobs, entropies and their backward pass over length and vocabulary,
in fp32 on a CPU.

    python scripts/bench_memory.py --out result.json           three lengths, two vocabularies;
    minutes
    python scripts/bench_memory.py --lengths 1024 --vocabularies 32000 --sides naive ours
    python scripts/bench_memory.py --device cuda               bf16, on a GPU

`naive` is log_softmax over all logits, `selective` TRL's selective_log_softmax and
entropy_from_logits over them, `trl` the chunked head that TRL's GRPO trainer puts on its model,
`ours` fused_logprobs. The gradient is that of the logprobs; entropies are figures. Each cell runs
once, in a process of its own, and is left out if this machine has not the memory for it. The peak
is resident memory (on a GPU allocated memory) above that before, less the two gradients, [M, D] and
[V, D], which are the result. Time is CPU seconds of one thread, on a GPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch
from bench_logprobs import MIB, TEMPERATURE, clock_s, make_inputs, plain, run_apart
from bench_logprobs import trl as selective

from rl_core.learning.logprobs import fused_logprobs
from rl_core.registry import logprob_kernel

LENGTHS, VOCABULARIES, WIDTH = [1024, 8192, 32_768], [32_000, 151_936], 128
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def trl(hidden, weight, labels, temperature):
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    outputs = ("log_probs", "entropy")
    rest = temperature, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, outputs
    return ChunkedLogProbFunction.apply(hidden, weight, None, labels, *rest)[:2]


def fused(hidden, weight, labels, *more):
    kernel = logprob_kernel(hidden.device)
    return fused_logprobs(hidden, weight, labels, *more, kernel=kernel)


SIDES = {"naive": plain, "selective": selective, "trl": trl, "ours": fused}
# The logits of which a side holds copies at once, and about how many in fp32; ours is bounded by a
# GiB.
COPIES = {"naive": (10**9, 10**9, 4), "selective": (10**9, 10**9, 4), "trl": (4096, 32_768, 9)}


def need_bytes(side: str, num_tokens: int, num_words: int, width: int) -> int:
    """About what a cell takes, inputs and gradients included."""
    extra = 1 << 30
    if side in COPIES:
        most_tokens, most_words, copies = COPIES[side]
        extra = 4 * copies * min(num_tokens, most_tokens) * min(num_words, most_words)
    return extra + 8 * (num_tokens + num_words) * width


def free_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    if (info := Path("/proc/meminfo")).exists():
        return 1024 * int(info.read_text().split("MemAvailable:")[1].split()[0])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def reset_peak(device: str) -> int:
    """Bytes that are held at this moment, which is the peak from here on; where that cannot be set,
    the peak so far."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    with suppress(OSError):
        CLEAR_REFS.write_text("5")
    return peak_bytes(device)


def peak_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    if STATUS.exists():
        return 1024 * int(STATUS.read_text().split("VmHWM:")[1].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def measure(
    side: str, num_tokens: int, num_words: int, width: int, device: str, most_gib: float | None
) -> dict:
    """One cell: peak_mib and seconds, or need_gib and most_gib where it does not fit."""
    need_gib = need_bytes(side, num_tokens, num_words, width) / 2**30
    most_gib = most_gib or 0.9 * free_bytes(device) / 2**30
    if need_gib > most_gib:
        return {"need_gib": need_gib, "most_gib": most_gib}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    function = SIDES[side]
    # Libraries load here.
    function(*make_inputs(4, 8, 16, device), TEMPERATURE)[0].mean().backward()
    hidden, weight, labels = make_inputs(num_tokens, num_words, width, device)
    before, start = reset_peak(device), clock_s(device)
    logprobs, entropies = function(hidden, weight, labels, TEMPERATURE)
    logprobs.mean().backward()
    seconds = clock_s(device) - start
    assert entropies.isfinite().all() and weight.grad.isfinite().all()
    extra = peak_bytes(device) - before - hidden.nbytes - weight.nbytes
    return {"peak_mib": max(0.0, extra / MIB), "seconds": seconds}


def shown(cell: dict) -> str:
    if "error" in cell:
        return f"failed: {cell['error']}"
    if "need_gib" in cell:
        return f"would need {cell['need_gib']:.1f} GiB, may take {cell['most_gib']:.1f}"
    return f"{cell['peak_mib']:10.0f} {cell['seconds']:9.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=LENGTHS, metavar="M", help="trained tokens"
    )
    parser.add_argument("--vocabularies", nargs="+", type=int, default=VOCABULARIES, metavar="V")
    parser.add_argument(
        "--width",
        type=int,
        default=WIDTH,
        metavar="D",
        help="of hidden states; hardly changes the peak",
    )
    parser.add_argument(
        "--most_gib",
        type=float,
        help="leave out cells that need more; default: 90 %% of what is free",
    )
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--out", type=Path, help="write the cells as JSON")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        cell = args.sides[0], args.lengths[0], args.vocabularies[0], args.width, args.device
        print(json.dumps(measure(*cell, args.most_gib)))
        return
    cells = []
    print(f"{'tokens':>7} {'vocabulary':>10} {'side':>9} {'peak MiB':>10} {'seconds':>9}")
    for num_tokens in args.lengths:
        for num_words in args.vocabularies:
            for side in args.sides:
                cell = {"side": side, "tokens": num_tokens, "vocabulary": num_words}
                flags = [
                    "--sides",
                    side,
                    "--lengths",
                    num_tokens,
                    "--vocabularies",
                    num_words,
                    "--device",
                    args.device,
                ]
                flags += [
                    "--width",
                    args.width,
                    *(["--most_gib", args.most_gib] if args.most_gib else []),
                ]
                cells.append(cell | run_apart(__file__, "--one", *flags))
                print(f"{num_tokens:7} {num_words:10} {side:>9} {shown(cells[-1])}", flush=True)
    if args.out:
        args.out.write_text(
            json.dumps({"device": args.device, "width": args.width, "cells": cells}, indent=2)
        )


if __name__ == "__main__":
    main()
