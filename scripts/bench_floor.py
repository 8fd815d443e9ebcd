"""The least CPU time of a training step on this machine, next to the time of rl_core.

    python scripts/bench_floor.py                              GRPO, SFT, DPO, reward model
    python scripts/bench_floor.py --only grpo_ragged --sizes 64x2 128x3 384x6 --out floor.json

The tasks are those of bench_cpu.py and some of rl_core alone. A floor is the CPU time of plain
torch operations with a step's shapes on one thread, each the median of several repetitions: matrix
products, attention, the operations between them (norms, rotary positions, SwiGLU, softmax), AdamW.
A floor knows all lengths in advance, has no padding, no copies and no graph, and computes a group's
prompt once. The rows of a floor have the root mean square of a step's lengths, which keeps the
number of attention pairs. Decoding keeps all samples in one batch and drops finished ones at once.
`outside_frac` is the share of rl_core's step that is neither generation nor a forward, a backward
or the optimizer.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import bench_work
import torch
from bench_cpu import run_apart
from bench_work import (
    OUR_SETTINGS,
    OWN_WORKS,
    WORKS,
    Work,
    completion_length,
    make_model,
)
from script_tools import Table, make_parser, write_json
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoTokenizer

from rl_core.data.pretrained import load_pretrained
from rl_core.models.kernels import llama_cpu

ALL_WORKS = WORKS | OWN_WORKS
ROW_TOKENS = 1024  # Tokens of one pass over the layers, as in a microbatch.
REPEATS = 7


@dataclass(kw_only=True, slots=True)
class Shape:
    """Sizes of a model with gated MLPs."""

    hidden: int
    layers: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """(in, out) of a layer's matrix products; products of the same input count as one."""
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
    """The lengths, in tokens, that a step computes."""

    prompts: list[int]  # One per group. Empty for SFT, whose rows contain the prompts.
    lengths: list[int]  # Completions, or rows of SFT, without the last token.
    group_size: int
    trained: int  # Number of tokens with a loss.
    turns: list[list[int]] = field(default_factory=list)  # Lengths of sampled completions.
    tool_tokens: int = 0  # Tokens of the tool message between two turns.
    has_reference: bool = False  # True if a frozen model computes the same tokens.

    @property
    def learned(self) -> int:
        return sum(self.prompts) + sum(self.lengths)

    @property
    def sample_tokens(self) -> int:
        """Tokens of all samples, each with its prompt and last token."""
        return self.group_size * sum(self.prompts) + sum(self.lengths) + len(self.lengths)

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs under a causal mask."""
        pairs = sum(n * (n + 1) // 2 for n in self.prompts + self.lengths)
        for number, prompt in enumerate(self.prompts):
            group = self.lengths[number * self.group_size : (number + 1) * self.group_size]
            pairs += prompt * sum(group)
        return pairs


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
    """Lengths of the first measured step."""
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
    pairs = bench_work.pairs(work)[rows.start // 2 : rows.stop // 2]
    is_dpo = work.algorithm == "dpo"
    num_read = 0 if is_dpo else 1  # A score is read at the end token.
    lengths = [size(reply) + num_read for _, *replies in pairs for reply in replies]
    return StepTokens(
        prompts=[size(prompt) + 3 for prompt, *_ in pairs],
        lengths=lengths,
        group_size=2,
        trained=sum(lengths) + len(lengths) if is_dpo else 0,  # A score costs nothing.
        has_reference=is_dpo,
    )


def episode_tokens(work: Work, step: int) -> StepTokens:
    num = bench_work.NUM_SAMPLES
    drawn = [completion_length(work, step, i) for i in range(num * work.turns)]
    turns = [drawn[first : first + num] for first in range(0, len(drawn), num)]
    # A tool message has markers of two messages.
    tool_tokens = work.tool_letters + 4 if work.tool_letters else 0
    return StepTokens(
        prompts=[work.prompt + 3] * bench_work.NUM_PROMPTS,
        # The last token of a completion predicts nothing.
        lengths=[
            sum(sampled) + tool_tokens * (work.turns - 1) - 1
            for sampled in zip(*turns, strict=True)
        ],
        group_size=bench_work.GROUP_SIZE,
        trained=sum(drawn),
        turns=turns,
        tool_tokens=tool_tokens,
    )


def cost_s(call: Callable[[], object]) -> float:
    """Median CPU seconds of a call. A measurement repeats short calls, because the clock is
    coarse."""
    call()
    begin = time.process_time()
    call()
    number = max(1, math.ceil(0.02 / max(1e-6, time.process_time() - begin)))
    times = []
    for _ in range(REPEATS):
        begin = time.process_time()
        for _ in range(number):
            call()
        times.append((time.process_time() - begin) / number)
    return statistics.median(times)


def product_s(tokens: int, matrix: tuple[int, int], is_trained: bool) -> float:
    """CPU seconds of x @ W, and of both gradients if is_trained."""
    num_in, num_out = matrix
    x, w, y = (
        torch.randn(tokens, num_in),
        torch.randn(num_in, num_out),
        torch.randn(tokens, num_out),
    )
    dx, dw = torch.empty_like(x), torch.empty_like(w)
    if not is_trained:
        return faster_s(x, w, y)
    return faster_s(x, w, y) + faster_s(y, w.T, dx) + faster_s(x.T, y, dw)


def faster_s(a: Tensor, b: Tensor, out: Tensor) -> float:
    """CPU seconds of a @ b by MKL, or by oneDNN if the CPU has AVX512 and oneDNN is faster."""
    mkl_s = cost_s(lambda: torch.mm(a, b, out=out))
    if not llama_cpu.has_onednn():
        return mkl_s
    return min(mkl_s, cost_s(lambda: llama_cpu.product(a, b.T)))


def attention_s(shape: Shape, rows: int, queries: int, keys: int, is_trained: bool) -> float:
    """CPU seconds of one layer's attention; causal if there are as many keys as queries."""
    aten = torch.ops.aten
    q = torch.randn(rows, shape.heads, queries, shape.head_dim)
    k, v = torch.randn(2, rows, shape.kv_heads, keys, shape.head_dim)
    options = 0.0, queries == keys  # dropout_p, is_causal

    def forward() -> tuple[Tensor, Tensor]:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, *options)

    if not is_trained:
        return cost_s(forward)
    out, lse = forward()
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return cost_s(forward) + cost_s(lambda: backward(q, q, k, v, out, lse, *options))


def trained_s(inputs: list[Tensor], function: Callable[..., Tensor], is_trained: bool) -> float:
    """CPU seconds of an operation's forward, and of its backward if is_trained."""
    if not is_trained:
        with torch.no_grad():
            return cost_s(lambda: function(*inputs))
    inputs = [x.requires_grad_() for x in inputs]
    grad = torch.randn_like(function(*inputs))
    return cost_s(lambda: torch.autograd.grad(function(*inputs), inputs, grad))


def between_s(shape: Shape, tokens: int, is_trained: bool) -> float:
    """CPU seconds of one layer's norms, rotary positions, SwiGLU and residuals."""
    both = shape.heads + shape.kv_heads
    x, heads = torch.randn(tokens, shape.hidden), torch.randn(tokens, both, shape.head_dim)
    gates = torch.randn(2, tokens, shape.mlp)
    cos, sin = torch.randn(2, tokens, 1, shape.head_dim // 2)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, 1e-6)

    def rotary(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    seconds = 2 * trained_s([x, torch.ones(shape.hidden)], norm, is_trained)
    seconds += trained_s([heads, torch.ones(shape.head_dim)], norm, is_trained)
    seconds += trained_s([heads], rotary, is_trained)
    seconds += trained_s(list(gates), lambda a, b: functional.silu(a) * b, is_trained)
    return seconds + 2 * cost_s(lambda: x + x)


def adamw_s(shape: Shape) -> float:
    """CPU seconds of gradient clipping and an update, with one tensor per matrix."""
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
    """CPU seconds of an update by kind of operation."""
    seconds = passes_floor(shape, step, True)
    if step.has_reference:
        for name, more_s in passes_floor(shape, step, False).items():
            seconds[name] += more_s
    return seconds | {"optimizer": adamw_s(shape)}


def passes_floor(shape: Shape, step: StepTokens, is_trained: bool) -> dict[str, float]:
    rows = math.ceil(step.learned / ROW_TOKENS)  # Passes over the layers.
    tokens, trained = round(step.learned / rows), max(1, round(step.trained / rows))
    # n rows of length L have n L (L + 1) / 2 pairs; L keeps the step's pairs and tokens.
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
    """CPU seconds of sampling a step's completions: the prompts, then one token at a time of each
    unfinished sample. Eight decode steps are measured as one, at their mean batch size."""
    context = step.prompts[0]
    seconds = dict.fromkeys(("products", "attention", "between"), 0.0)
    passes = [(len(step.prompts), context, context, 1)]
    for number, lengths in enumerate(step.turns):
        if number:
            passes.append((len(lengths), step.tool_tokens, context, 1))
        alive = [sum(n - 1 > i for n in lengths) for i in range(max(lengths) - 1)]
        for begin in range(0, len(alive), 8):
            eight = alive[begin : begin + 8]
            passes.append((round(sum(eight) / len(eight)), 1, context + begin + 4, len(eight)))
        context += round(sum(lengths) / len(lengths)) + step.tool_tokens
    for rows, queries, keys, times in passes:
        tokens = rows * queries
        products = sum(product_s(tokens, matrix, False) for matrix in shape.matrices)
        head = product_s(rows, (shape.hidden, shape.vocab), False)
        seconds["products"] += times * (shape.layers * products + head)
        attention = attention_s(shape, rows, queries, keys, False)
        seconds["attention"] += times * shape.layers * attention
        logits = torch.randn(rows, shape.vocab)
        drawn = cost_s(lambda: torch.multinomial(logits.softmax(-1), 1))  # noqa: B023
        between = between_s(shape, tokens, False)
        seconds["between"] += times * (shape.layers * between + drawn)
    return seconds


def seconds_of(work: Work, model: str, step: StepTokens) -> dict[str, float]:
    """CPU seconds of rl_core's step in the best setting: the median over steps, scaled to the
    floor's number of tokens."""
    results = []
    for setting in OUR_SETTINGS[work.algorithm]:
        m = run_apart(work, "rl_core", setting, model)
        learn, decode, inside = [], [], []
        for i in range(work.warmup, work.all_steps):
            learn.append((m.cpu_s[i] - m.generate_cpu_s[i]) / m.learned_tokens[i])
            decode.append(m.generate_cpu_s[i] / max(1, m.generated_tokens[i]))
            inside.append((m.generate_cpu_s[i] + m.inside_cpu_s[i]) / m.cpu_s[i])
        seconds = {
            "learn_s": step.sample_tokens * statistics.median(learn),
            "decode_s": step.trained * statistics.median(decode),
            "outside_frac": 1 - statistics.median(inside),
        }
        results.append(seconds)
    return min(results, key=lambda seconds: seconds["learn_s"] + seconds["decode_s"])


def measured(work: Work, has_run: bool) -> dict:
    with tempfile.TemporaryDirectory() as model:
        make_model(work, model)
        shape, step = shape_of(model), step_tokens(work, model)
        learn = learn_floor(shape, step)
        decode = decode_floor(shape, step) if step.turns else {}
        line = {"work": work.name, "size": f"{work.hidden}x{work.layers}"}
        line |= {"parameters": shape.weights, "learn_floor": learn, "decode_floor": decode}
        line |= {"learn_floor_s": sum(learn.values()), "decode_floor_s": sum(decode.values())}
        return line | (seconds_of(work, model, step) if has_run else {})


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", choices=ALL_WORKS, nargs="+", default=list(ALL_WORKS))
    parser.add_argument("--sizes", nargs="+", metavar="HIDDENxLAYERS", help="default: each work's")
    parser.add_argument("--floor_only", action="store_true", help="do not run rl_core")
    parser.add_argument("--steps", type=int, help="measured steps, after 2 of warm-up")
    parser.add_argument("--out", type=Path, help="JSON file with every figure")
    args = parser.parse_args()
    torch.set_num_threads(1)
    phases = ("learn_floor_s", "learn_s", "decode_floor_s", "decode_s", "outside_frac")
    table, lines = Table(work="<11", size="<7", **dict.fromkeys(phases, ">7.4f")), []
    for name in args.only:
        work = ALL_WORKS[name]
        for size in args.sizes or [f"{work.hidden}x{work.layers}"]:
            hidden, layers = map(int, size.split("x"))
            sized = replace(work, steps=args.steps or work.steps, hidden=hidden, layers=layers)
            lines.append(measured(sized, not args.floor_only))
            table.add(lines[-1])
    write_json(args.out, {"torch": torch.__version__, "lines": lines})


if __name__ == "__main__":
    main()
