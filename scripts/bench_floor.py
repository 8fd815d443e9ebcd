"""What a step must cost on this CPU, beside what rl_core and TRL need for it.

    python scripts/bench_floor.py                              GRPO ragged, short and in two turns
                                                               with a tool, SFT, DPO, reward model
    python scripts/bench_floor.py --only grpo_ragged --sizes 64x2 128x3 384x6 --out floor.json
    python scripts/bench_floor.py --only sft_ragged --profile FOLDER    where rl_core's time goes

The works are those of bench_cpu.py, and more of rl_core alone. A floor is the CPU time of plain
torch operations of a step's shapes, one thread, each the median of several repetitions: matrix
products, attention, what stands between them (norms, rotary positions, SwiGLU, softmax), AdamW. It
knows all lengths before, pads nothing, copies nothing and keeps no graph. A group's prompt is
computed once. `bare` has the products, attention and AdamW alone. Rows are as long as the root of
the mean square of a step's lengths, so that attention has as many pairs. Decoding keeps all
samples in one batch, from which those that have ended are left out at once. `outside` is the share
of rl_core's step that is neither generation nor a forward, a backward or the optimizer.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import math
import pstats
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import bench_work
import torch
from bench_cpu import run_apart, run_here
from bench_work import (
    OUR_SETTINGS,
    OWN_WORKS,
    TRL_SETTINGS,
    WORKS,
    Work,
    completion_length,
    make_model,
)
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoTokenizer

from rl_core.data.pretrained import load_pretrained
from rl_core.models.kernels import llama_cpu

ALL_WORKS = WORKS | OWN_WORKS
ROW_TOKENS = 1024  # of one pass over the layers, as in a microbatch
REPEATS = 7


@dataclass(kw_only=True, slots=True)
class Shape:
    """Of a model with gated MLPs; heads of queries and of keys."""

    hidden: int
    layers: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """(in, out) of a layer's products, those of one input together."""
        width = self.head_dim * self.heads
        qkv = width + 2 * self.head_dim * self.kv_heads
        gated = (self.hidden, 2 * self.mlp)
        return [(self.hidden, qkv), (width, self.hidden), gated, (self.mlp, self.hidden)]

    @property
    def block_weights(self) -> int:
        return sum(a * b for a, b in self.matrices)

    @property
    def weights(self) -> int:
        return self.layers * self.block_weights + self.vocab * self.hidden


@dataclass(kw_only=True, slots=True)
class StepTokens:
    """What a step computes, by lengths in tokens."""

    prompts: list[int]  # a group's stands once; of SFT none, they are part of the rows
    lengths: list[int]  # of what follows them, or of rows; the last token of each is not read
    group_size: int
    trained: int  # tokens that have a loss
    turns: list[list[int]] = field(default_factory=list)  # lengths of completions that are sampled
    told: int = 0  # tokens between two turns
    has_reference: bool = False  # a frozen model reads the same

    @property
    def learned(self) -> int:
        return sum(self.prompts) + sum(self.lengths)

    @property
    def of_samples(self) -> int:
        """With the prompt and the last token of each."""
        return self.group_size * sum(self.prompts) + sum(self.lengths) + len(self.lengths)

    @property
    def pairs(self) -> int:
        """Of a query and a key that a causal mask leaves."""
        found = sum(n * (n + 1) // 2 for n in self.prompts + self.lengths)
        for number, prompt in enumerate(self.prompts):
            group = self.lengths[number * self.group_size : (number + 1) * self.group_size]
            found += prompt * sum(group)
        return found


def shape_of(folder: str) -> Shape:
    config = load_pretrained(AutoConfig, folder)
    return Shape(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        mlp=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab=config.vocab_size,
    )


def step_tokens(work: Work, folder: str) -> StepTokens:
    """Of the first step that counts."""
    step = work.warmup
    if work.algorithm == "grpo":
        return episode_tokens(work, step)
    tokenizer = load_pretrained(AutoTokenizer, folder)

    def size(text: str) -> int:
        return len(tokenizer(text)["input_ids"])

    rows = slice(step * bench_work.NUM_ROWS, (step + 1) * bench_work.NUM_ROWS)
    if work.algorithm == "sft":
        sizes = [(size(p) + 3, size(reply)) for p, reply in bench_work.sft_rows(work)[rows]]
        lengths = [min(work.longest * 4, prompt + reply) for prompt, reply in sizes]
        trained = sum(reply + 1 for _, reply in sizes)
        return StepTokens(prompts=[], lengths=lengths, group_size=1, trained=trained)
    found = bench_work.pairs(work)[rows.start // 2 : rows.stop // 2]
    is_dpo = work.algorithm == "dpo"
    num_read = 0 if is_dpo else 1  # A score is read at the end token.
    lengths = [size(reply) + num_read for _, *replies in found for reply in replies]
    return StepTokens(
        prompts=[size(prompt) + 3 for prompt, *_ in found],
        lengths=lengths,
        group_size=2,
        trained=sum(lengths) + len(lengths) if is_dpo else 0,  # a score costs nothing
        has_reference=is_dpo,
    )


def episode_tokens(work: Work, step: int) -> StepTokens:
    num = bench_work.NUM_SAMPLES
    drawn = [completion_length(work, step, i) for i in range(num * work.turns)]
    turns = [drawn[first : first + num] for first in range(0, len(drawn), num)]
    told = work.told + 4 if work.told else 0  # with the marks of two messages
    return StepTokens(
        prompts=[work.prompt + 3] * bench_work.NUM_PROMPTS,
        # The last token of a completion is predicted, and predicts nothing.
        lengths=[sum(own) + told * (work.turns - 1) - 1 for own in zip(*turns, strict=True)],
        group_size=bench_work.GROUP_SIZE,
        trained=sum(drawn),
        turns=turns,
        told=told,
    )


def cost_s(call: Callable[[], object]) -> float:
    """CPU seconds of one call, the median. Short ones are repeated within a measurement, since the
    clock of a process is coarse."""
    call()
    begin = time.process_time()
    call()
    number = max(1, math.ceil(0.02 / max(1e-6, time.process_time() - begin)))
    found = []
    for _ in range(REPEATS):
        begin = time.process_time()
        for _ in range(number):
            call()
        found.append((time.process_time() - begin) / number)
    return statistics.median(found)


def product_s(tokens: int, matrix: tuple[int, int], is_trained: bool) -> float:
    """Of x @ W; trained: of the gradients of both too."""
    num_in, num_out = matrix
    x, w, y = (
        torch.randn(tokens, num_in),
        torch.randn(num_in, num_out),
        torch.randn(tokens, num_out),
    )
    dx, dw = torch.empty_like(x), torch.empty_like(w)
    found = faster_s(x, w, y)
    if is_trained:
        found += faster_s(y, w.T, dx)
        found += faster_s(x.T, y, dw)
    return found


def faster_s(a: Tensor, b: Tensor, out: Tensor) -> float:
    """Of a @ b by MKL, or by oneDNN where a CPU has AVX512 and it is faster."""
    found = cost_s(lambda: torch.mm(a, b, out=out))
    if llama_cpu.has_onednn():
        found = min(found, cost_s(lambda: llama_cpu.product(a, b.T)))
    return found


def attention_s(shape: Shape, rows: int, queries: int, keys: int, is_trained: bool) -> float:
    """Of one layer; causal where there are as many keys as queries."""
    aten = torch.ops.aten
    q = torch.randn(rows, shape.heads, queries, shape.head_dim)
    k, v = torch.randn(2, rows, shape.kv_heads, keys, shape.head_dim)
    how = 0.0, queries == keys
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, *how)
    found = cost_s(lambda: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, *how))
    if is_trained:
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        found += cost_s(lambda: backward(q, q, k, v, out, lse, *how))
    return found


def trained_s(inputs: list[Tensor], function: Callable[..., Tensor], is_trained: bool) -> float:
    """Of an operation's forward, and of its backward if it is trained."""
    if not is_trained:
        with torch.no_grad():
            return cost_s(lambda: function(*inputs))
    inputs = [x.requires_grad_() for x in inputs]
    grad = torch.randn_like(function(*inputs))
    return cost_s(lambda: torch.autograd.grad(function(*inputs), inputs, grad))


def between_s(shape: Shape, tokens: int, is_trained: bool) -> float:
    """Of one layer: two norms, those of queries and keys, rotary positions, SwiGLU, residuals."""
    both = shape.heads + shape.kv_heads
    x, heads = torch.randn(tokens, shape.hidden), torch.randn(tokens, both, shape.head_dim)
    gates = torch.randn(2, tokens, shape.mlp)
    cos, sin = torch.randn(2, tokens, 1, shape.head_dim // 2)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, 1e-6)

    def rotary(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    found = 2 * trained_s([x, torch.ones(shape.hidden)], norm, is_trained)
    found += trained_s([heads, torch.ones(shape.head_dim)], norm, is_trained)
    found += trained_s([heads], rotary, is_trained)
    found += trained_s(list(gates), lambda a, b: functional.silu(a) * b, is_trained)
    return found + 2 * cost_s(lambda: x + x)


def adamw_s(shape: Shape) -> float:
    """Of the norm of the gradient and an update, with a tensor for each matrix."""
    sizes = shape.layers * shape.matrices + [(shape.vocab, shape.hidden)]
    weights = [torch.randn(size, requires_grad=True) for size in sizes]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW(weights, fused=True)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()

    return cost_s(update)


def learn_floor(shape: Shape, step: StepTokens) -> dict[str, float]:
    """CPU seconds of an update by what they are for."""
    found = passes_floor(shape, step, True)
    if step.has_reference:
        for name, seconds in passes_floor(shape, step, False).items():
            found[name] += seconds
    return found | {"optimizer": adamw_s(shape)}


def passes_floor(shape: Shape, step: StepTokens, is_trained: bool) -> dict[str, float]:
    rows = math.ceil(step.learned / ROW_TOKENS)  # passes over the layers
    tokens, trained = round(step.learned / rows), max(1, round(step.trained / rows))
    # Rows of one length that have the step's pairs and tokens: n rows of L with n L (L + 1) / 2.
    length = max(2, round(2 * step.pairs / step.learned - 1))
    products = sum(product_s(tokens, matrix, is_trained) for matrix in shape.matrices)
    head = (shape.hidden, shape.vocab)
    logits = torch.randn(trained, shape.vocab)
    labels = torch.randint(shape.vocab, (trained,))
    softmax = trained_s([logits], lambda x: functional.cross_entropy(x, labels), is_trained)
    times = shape.layers * rows
    return {
        "products": times * products + rows * product_s(trained, head, is_trained),
        "attention": times
        * attention_s(shape, max(1, tokens // length), length, length, is_trained)
        * (tokens / length / max(1, tokens // length)),
        "between": times * between_s(shape, tokens, is_trained) + rows * softmax,
    }


def decode_floor(shape: Shape, step: StepTokens) -> dict[str, float]:
    """CPU seconds of sampling a step's completions: prompts, then one token of each sample that has
    not ended, measured at some numbers of samples and taken between them from the nearest above."""
    context = step.prompts[0]
    found = dict.fromkeys(("products", "attention", "between"), 0.0)
    passes = [(len(step.prompts), context, context, 1)]
    for number, lengths in enumerate(step.turns):
        if number:
            passes.append((len(lengths), step.told, context, 1))
        alive = [sum(n - 1 > i for n in lengths) for i in range(max(lengths) - 1)]
        for begin in range(0, len(alive), 8):  # eight steps together, at their mean
            part = alive[begin : begin + 8]
            passes.append((round(sum(part) / len(part)), 1, context + begin + 4, len(part)))
        context += round(sum(lengths) / len(lengths)) + step.told
    for rows, queries, keys, times in passes:
        tokens = rows * queries
        products = sum(product_s(tokens, matrix, False) for matrix in shape.matrices)
        head = product_s(rows, (shape.hidden, shape.vocab), False)
        found["products"] += times * (shape.layers * products + head)
        attention = attention_s(shape, rows, queries, keys, False)
        found["attention"] += times * shape.layers * attention
        logits = torch.randn(rows, shape.vocab)
        drawn = cost_s(lambda: torch.multinomial(logits.softmax(-1), 1))  # noqa: B023
        between = between_s(shape, tokens, False)
        found["between"] += times * (shape.layers * between + drawn)
    return found


def work_of(shape: Shape, step: StepTokens) -> dict[str, float]:
    """FLOPs and bytes of an update, and of decoding: 2 FLOPs a weight and token, 4 a pair, head dim
    and head; thrice that with a backward. Bytes are of weights, gradients and AdamW's two averages
    in fp32, each read and written once, and of each layer's input in both directions."""
    pairs = 4 * shape.layers * shape.heads * shape.head_dim * step.pairs
    blocks = 2 * shape.layers * shape.block_weights * step.learned
    head = 2 * shape.vocab * shape.hidden * step.trained
    states = 4 * 7 * shape.weights
    passes = 4 if step.has_reference else 3
    return {
        "learn_gflop": passes * (pairs + blocks + head) / 1e9,
        "learn_gbyte": (states + 4 * 4 * shape.layers * shape.hidden * step.learned) / 1e9,
        "decode_gflop": (pairs + blocks + head) / 1e9 if step.turns else 0.0,
        "decode_gbyte": 4 * shape.weights * sum(map(max, step.turns)) / 1e9,
    }


def seconds_of(work: Work, side: str, model: str, step: StepTokens) -> dict[str, float]:
    """CPU seconds of a step as large as the floor's, for steps differ in their lengths: the median
    of a side's steps, in its best setting."""
    settings = (OUR_SETTINGS if side == "rl_core" else TRL_SETTINGS)[work.algorithm]
    found = []
    for setting in settings:
        m = run_apart(work, side, setting, model)
        learn, decode, inside = [], [], []
        for i in range(work.warmup, work.all_steps):
            learn.append((m.cpu_s[i] - m.generate_cpu_s[i]) / m.learned_tokens[i])
            decode.append(m.generate_cpu_s[i] / max(1, m.generated_tokens[i]))
            inside.append((m.generate_cpu_s[i] + m.inside_cpu_s[i]) / m.cpu_s[i])
        seconds = {
            "learn_s": step.of_samples * statistics.median(learn),
            "decode_s": step.trained * statistics.median(decode),
            "outside_frac": 1 - statistics.median(inside),
        }
        found.append(seconds)
    return min(found, key=lambda seconds: seconds["learn_s"] + seconds["decode_s"])


def measured(work: Work, sides: list[str]) -> dict:
    with tempfile.TemporaryDirectory() as model:
        make_model(work, model)
        shape, step = shape_of(model), step_tokens(work, model)
        learn = learn_floor(shape, step)
        decode = decode_floor(shape, step) if step.turns else {}
        found = {"work": work.name, "size": f"{work.hidden}x{work.layers}"}
        found |= {"parameters": shape.weights, "tokens": step.learned}
        found |= work_of(shape, step) | {"learn": learn, "decode": decode}
        for side in sides:
            if side == "trl" and work.name in OWN_WORKS:
                continue
            print(f"{work.name} {found['size']}: {side}", file=sys.stderr, flush=True)
            found[side] = seconds_of(work, side, model, step)
    return found


def row(line: dict) -> str:
    """Milliseconds of learning and decoding: bare floor, floor, each side; how near it is."""
    cells = [f"{line['work']:<12}{line['size']:>7}"]
    for part in ("learn", "decode"):
        floor = line[part]
        if not floor:
            continue
        bare = sum(s for name, s in floor.items() if name != "between")
        total = sum(floor.values())
        size = f"{line[f'{part}_gflop']:.2f} GFLOP {line[f'{part}_gbyte']:.2f} GB"
        cells.append(f"{part}: {size} bare {1e3 * bare:6.1f} floor {1e3 * total:6.1f} ms")
        for side in ("rl_core", "trl"):
            if side in line:
                seconds = line[side][f"{part}_s"]
                cells.append(f"{side} {1e3 * seconds:6.1f} ({100 * total / seconds:.0f} %)")
    if "rl_core" in line:
        cells.append(f"outside {100 * line['rl_core']['outside_frac']:.1f} %")
    return "  ".join(cells)


def profile(work: Work, folder: Path) -> None:
    """Writes rl_core's own time by file and by operator, and what a browser shows as a flame graph
    (about:tracing, ui.perfetto.dev, speedscope)."""
    folder.mkdir(parents=True, exist_ok=True)
    setting = next(iter(OUR_SETTINGS[work.algorithm]))
    with tempfile.TemporaryDirectory() as model:
        make_model(work, model)
        calls = cProfile.Profile()
        calls.runcall(run_here, work, "rl_core", setting, model)
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as operators:
            run_here(replace(work, steps=2, warmup=1), "rl_core", setting, model)
    files: dict[str, float] = defaultdict(float)
    for (file, _, _), (_, _, own_s, _, _) in pstats.Stats(calls).stats.items():
        files[file] += own_s
    ordered = sorted(files.items(), key=lambda pair: -pair[1])[:30]
    (folder / "files.txt").write_text("".join(f"{s:9.3f} s  {name}\n" for name, s in ordered))
    table = operators.key_averages().table(sort_by="self_cpu_time_total", row_limit=30)
    (folder / "operators.txt").write_text(table)
    operators.export_chrome_trace(str(folder / "trace.json"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [name for name in ALL_WORKS if name != "sft_file"]
    parser.add_argument("--only", choices=ALL_WORKS, nargs="+", default=names)
    parser.add_argument("--sizes", nargs="+", metavar="HIDDENxLAYERS", help="default: each work's")
    parser.add_argument("--sft_file", type=Path, help="rows of the work sft_file")
    parser.add_argument(
        "--sides", choices=["rl_core", "trl"], nargs="*", default=["rl_core", "trl"]
    )
    parser.add_argument("--steps", type=int, help="that count, after 2 of warm-up")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="where rl_core's time goes")
    parser.add_argument("--out", type=Path, help="JSON file with every figure")
    args = parser.parse_args()
    if "sft_file" in args.only and not args.sft_file:
        parser.error("--only sft_file needs --sft_file FILE")
    torch.set_num_threads(1)
    lines = []
    for name in args.only:
        work = ALL_WORKS[name]
        work = replace(work, steps=args.steps or work.steps)
        if args.sft_file:
            work = replace(work, file=str(args.sft_file.resolve()))
        for size in args.sizes or [f"{work.hidden}x{work.layers}"]:
            hidden, layers = map(int, size.split("x"))
            sized = replace(work, hidden=hidden, layers=layers)
            if args.profile:
                profile(sized, args.profile)
                continue
            lines.append(measured(sized, args.sides))
            print(row(lines[-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps({"torch": torch.__version__, "lines": lines}, indent=1))


if __name__ == "__main__":
    main()
