"""Time and peak memory of logprobs and entropy from hidden states and a head, forward and backward.

    python scripts/bench_logprobs.py                     one CPU thread, fp32
    python scripts/bench_logprobs.py --device cuda       bf16, also torch.compile and torch tiles
    python scripts/bench_logprobs.py --only fused --shapes 2048x32000x256 --out result.json

`plain` is log_softmax over all logits, `trl` TRL's selective_log_softmax, `tiles` our torch path on
a GPU. Each side runs in a separate process and counts by the best of three runs, in CPU seconds on
a CPU. Memory is the peak without inputs and gradients. The floor is three M x V x D products
(logits, both gradients) at the rate of one such product.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from script_tools import Table, make_parser, write_json

from rl_core.models.logprobs import fused_logprobs
from rl_core.models.options import choose_logprob_kernel

SHAPES = {
    "cpu": ["3000x104x128", "512x32000x256", "4096x50000x256", "1024x152064x1024"],
    "cuda": ["8192x32000x2048", "8192x152064x2048", "8192x152064x4096", "32768x152064x4096"],
}
TEMPERATURE = 0.9
MIB = 1 << 20


def plain(hidden, weight, labels, temperature):
    logp = ((hidden @ weight.T).float() / temperature).log_softmax(-1)
    return logp.gather(-1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def trl(hidden, weight, labels, temperature):
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    logits = hidden @ weight.T / temperature
    with torch.no_grad():
        entropy = entropy_from_logits(logits)
    return selective_log_softmax(logits, labels), entropy


def fused(hidden, weight, labels, temperature):
    kernel = choose_logprob_kernel(hidden.device)
    return fused_logprobs(hidden, weight, labels, temperature, kernel=kernel)


def compiled(*args):
    return torch.compile(plain)(*args)


SIDES = {"fused": fused, "plain": plain, "trl": trl}
CUDA_SIDES = SIDES | {"tiles": fused_logprobs, "compiled": compiled}


def now_s() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def clock_s(device: str) -> float:
    return now_s() if device == "cuda" else time.process_time()


def peak_mib(device: str) -> float:
    """Peak memory so far."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / MIB
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib / 1024 if sys.platform != "darwin" else kib / MIB


def make_inputs(num_tokens: int, num_words: int, width: int, device: str):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(num_tokens, width, device=device, dtype=dtype)
    weight = torch.randn(num_words, width, device=device, dtype=dtype).div_(width**0.5)
    return (
        hidden.requires_grad_(),
        weight.requires_grad_(),
        torch.randint(num_words, (num_tokens,), device=device),
    )


def run_once(function, hidden, weight, labels, device: str) -> tuple[float, float]:
    """Seconds of the forward and of the backward pass."""
    hidden.grad = weight.grad = None
    start = clock_s(device)
    logprobs, _ = function(hidden, weight, labels, TEMPERATURE)
    middle = clock_s(device)
    logprobs.mean().backward()
    return middle - start, clock_s(device) - middle


def product_s(hidden, weight, device: str) -> float:
    """Seconds of hidden @ weight.T, measured with at most 1,024 tokens to save memory."""
    some, times = hidden.detach()[:1024], []
    for _ in range(8):
        start = clock_s(device)
        some @ weight.detach().T
        times.append(clock_s(device) - start)
    return min(times) * len(hidden) / len(some)


def measure(side: str, shape: str, device: str) -> dict:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    function = CUDA_SIDES[side]
    run_once(function, *make_inputs(4, 8, 16, device), device)  # Libraries load here.
    inputs = make_inputs(*map(int, shape.split("x")), device)
    before = peak_mib(device)
    times = [run_once(function, *inputs, device)]
    used_mib = peak_mib(device) - before - sum(x.nbytes for x in inputs[:2]) / MIB
    times += [run_once(function, *inputs, device) for _ in range(3)]
    forward_s, backward_s = min(times[1:], key=sum)
    floor_s = 3 * product_s(*inputs[:2], device)
    times_ms = {"forward_ms": 1e3 * forward_s, "backward_ms": 1e3 * backward_s}
    return times_ms | {"floors": (forward_s + backward_s) / floor_s, "peak_mib": max(0.0, used_mib)}


def run_apart(*arguments: str) -> dict:
    """The last line, parsed as JSON, of this script run in a separate process; {"error"} if it
    fails."""
    command = [sys.executable, __file__, "--one", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"error": (lines or [f"ended with {done.returncode}"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device", choices=SHAPES, default="cpu")
    parser.add_argument("--shapes", nargs="+", metavar="MxVxD", help="tokens x vocabulary x hidden")
    parser.add_argument("--only", nargs="+", choices=CUDA_SIDES, metavar="SIDE")
    parser.add_argument("--out", type=Path, help="write the lines as JSON")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    shapes = args.shapes or SHAPES[args.device]
    sides = args.only or list(CUDA_SIDES if args.device == "cuda" else SIDES)
    if args.one:
        print(json.dumps(measure(sides[0], shapes[0], args.device)))
        return
    columns = dict.fromkeys(("forward_ms", "backward_ms", "peak_mib"), ">8.1f")
    table = Table(shape="<18", side="<8", **columns, floors=">6.2f", error="<5")
    lines = []
    for shape in shapes:
        for side in sides:
            flags = ("--device", args.device, "--shapes", shape, "--only", side)
            lines.append({"side": side, "shape": shape} | run_apart(*flags))
            table.add(lines[-1])
    write_json(args.out, {"device": args.device, "lines": lines})


if __name__ == "__main__":
    main()
