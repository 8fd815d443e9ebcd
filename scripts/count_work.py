"""Launches, FLOPs and bytes of a learner's microbatch and of its logprobs, counted without a GPU,
and the least time that they allow on an H200.

    python scripts/count_work.py                                  both tables
    python scripts/count_work.py --sizes 0.6B --lengths 8192 --activations keep --groups

Tensors are on torch's meta device, in bf16, and Triton's launches are counted instead of run. The
least time is FLOPs at --tflops plus the bytes that pointwise kernels read and write at --tbytes;
operands of matrix products and of attention count as FLOPs alone. Attention counts at the same
rate, which torch's kernel does not reach.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from bench_learner import QWEN3, documents, model_config, update_flops
from script_tools import Table, make_parser, write_json
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from rl_core.data.packing import pack_samples
from rl_core.learning.policies import prepare
from rl_core.models.attention import NAME
from rl_core.models.kernels import triton_logprobs
from rl_core.models.kernels.fused_norms import fuse_norms
from rl_core.models.kernels.gpu_attention import TORCH
from rl_core.models.logprobs import fused_logprobs
from rl_core.models.policy import PackedForward, Policy

META = torch.device("meta")
# Bytes per parameter, counted in a learner in bf16 on one CPU rank. FSDP gathers the weights in
# bf16 twice and sums gradients in fp32 in each microbatch. An update reduces gradients; AdamW reads
# and writes 28, the norm and its clipping 12.
MICROBATCH_BYTES, UPDATE_BYTES, TOKENS_OF_UPDATE = 21 + 10, 26 + 40, 65_536
SHAPES = ["8192x152064x2048", "8192x152064x4096"]
# Operators that launch no kernel.
FREE = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "alias"}
FREE |= {"_unsafe_view", "_reshape_alias", "lift_fresh", "set_"}
GROUPS = {"Norm": "norms", "Attention": "rotary", "MLP": "SwiGLU", "SiLU": "SwiGLU"}
GROUPS |= {"Layer": "residuals", "Embedding": "embedding", "Model": "embedding"}
PRODUCTS = {"mm", "addmm", "addmm_"}
OVERWRITES = {"copy_", "zero_", "fill_"}
COLUMNS = {"launches": ">8d", "tflop": ">7.2f", "gbytes": ">7.1f", "least_ms": ">8.1f"}


class Kernels(TorchDispatchMode):
    """Calls count() for each kernel launch inside."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if not func.is_view and name not in FREE:
            self.count(name, tensors((args, kwargs)), tensors(out))
        return out

    def count(self, name: str, read: list[Tensor], written: list[Tensor]) -> None:
        raise NotImplementedError


def num_bytes(values: list[Tensor]) -> int:
    """Bytes of memory that the tensors span; an expanded one counts once."""
    return sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in values)


class Counts(Kernels):
    """Launches, FLOPs and pointwise bytes by group. A group is the innermost module; a backward has
    the group of its forward."""

    def __init__(self, pairs: float = 0) -> None:
        """`pairs`: queries and keys of a head that attention multiplies."""
        super().__init__()
        self.pairs = pairs
        self.launches, self.flops, self.bytes = Counter(), Counter(), Counter()
        self.modules: list[str] = []
        self.group_of: dict[int, str] = {}  # By sequence number of the autograd node.

    def group(self) -> str:
        node = torch._C._current_autograd_node()
        if node is not None and not self.modules:
            return self.group_of.get(node._sequence_nr(), "gradients")
        group = self.modules[-1] if self.modules else "logprobs"
        self.group_of[torch.autograd._get_sequence_nr() - 1] = group
        return group

    def count(self, name: str, read: list[Tensor], written: list[Tensor]) -> None:
        if name in PRODUCTS:
            a, b = read[:2] if name == "mm" else read[1:3]
            kind = "logprobs" if self.group() == "logprobs" else "products"
            self.add(kind, flops=2 * a.shape[0] * a.shape[1] * b.shape[1])
        elif "flash_attention" in name:
            query = read["backward" in name]
            num_products = 5 if "backward" in name else 2
            self.add("attention", flops=2 * num_products * self.pairs * query[0].numel())
        else:
            if name in OVERWRITES:
                read = read[1:]
            self.add(self.group(), size=num_bytes([*read, *written]))

    def add(self, group: str, flops: float = 0, size: float = 0) -> None:
        self.launches[group] += 1
        self.flops[group] += flops
        self.bytes[group] += size

    def run_triton(self, kernel, grid, h: Tensor, weight: Tensor, *_, **constants) -> None:
        flops, num_logits = 2 * len(h) * len(weight) * h.shape[1], len(h) * len(weight)
        if constants.get("IS_KEPT"):
            self.add("logprobs", size=2 * 2 * num_logits)  # Read in fp16, written in bf16.
        else:
            self.add("logprobs", flops=flops)

    def rms_norm(self, x: Tensor, shape: list[int], weight: Tensor, epsilon: float) -> Tensor:
        return FusedNorm.apply(x, weight, self)

    @contextmanager
    def inside(self) -> Iterator[None]:
        def enter(module: nn.Module, *_) -> None:
            kind = type(module).__name__
            groups = [group for end, group in GROUPS.items() if kind.endswith(end)]
            self.modules.append((groups or self.modules[-1:] or ["logprobs"])[0])

        def leave(*_) -> None:
            self.modules.pop()

        hooks = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]
        with (
            patch.object(triton_logprobs, "run", self.run_triton),
            patch.object(torch.nn.functional, "rms_norm", self.rms_norm),
            self,
        ):
            yield
        for hook in hooks:
            hook.remove()

    def rows(self, args: argparse.Namespace) -> Iterator[dict]:
        """A row of each group, and of their sum."""
        for group in [*sorted(self.launches), ""]:
            launches, flops, size = (
                counter[group] if group else sum(counter.values())
                for counter in (self.launches, self.flops, self.bytes)
            )
            least_s = flops / args.tflops / 1e12 + size / args.tbytes / 1e12
            yield {
                "group": group or "all",
                "launches": launches,
                "tflop": flops / 1e12,
                "gbytes": size / 1e9,
                "least_ms": 1e3 * least_s,
            }


class FusedNorm(torch.autograd.Function):
    """Counts torch's fused CUDA kernels, which torch replaces on the meta device."""

    @staticmethod
    def forward(ctx, x, weight, counts):
        ctx.counts, ctx.weight = counts, weight
        counts.add("norms", size=2 * x.nbytes)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, dy):
        # Reads dy and x, once for dx and once for the weight's gradient.
        ctx.counts.add("norms", size=3 * dy.nbytes)
        ctx.counts.add("norms", size=2 * dy.nbytes)
        return torch.empty_like(dy), torch.empty_like(ctx.weight), None


def tensors(values: object) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def count_learner(size: str, length: int, activations: str) -> Counts:
    """Forward and backward of one document, and its share of an update. Weights are in bf16, as
    FSDP gathers them."""
    options = {"dtype": torch.bfloat16, "attn_implementation": NAME}
    with META:
        hf = AutoModelForCausalLM.from_config(model_config(size), **options)
    fuse_norms(hf)
    forward_pass = PackedForward(TORCH)
    policy = Policy(
        hf, torch.bfloat16, torch.bfloat16, forward_pass, logprob_kernel=triton_logprobs
    )
    prepare(policy, False, recomputes=activations == "recompute")
    batch = pack_samples(documents(length, 1, 1000, 0))
    moved = {}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor) and field.name != "cu_seqlens":
            moved[field.name] = value.to(META)
    counts = Counts(pairs=(length - 1) * length / 2)
    with counts.inside():
        logprobs, _ = policy(dataclasses.replace(batch, **moved), 1.0)
        logprobs.sum().backward()
    per_parameter = MICROBATCH_BYTES + UPDATE_BYTES * length / TOKENS_OF_UPDATE
    num_parameters = sum(weight.numel() for weight in policy.parameters())
    counts.add("FSDP, AdamW", size=per_parameter * num_parameters)
    return counts


def count_logprobs(shape: str) -> Counts:
    num_tokens, num_ids, width = map(int, shape.split("x"))
    hidden, weight = (
        torch.empty(n, width, dtype=torch.bfloat16, device=META, requires_grad=True)
        for n in (num_tokens, num_ids)
    )
    labels = torch.empty(num_tokens, dtype=torch.long, device=META)
    counts = Counts()
    with counts.inside():
        logprobs, _ = fused_logprobs(hidden, weight, labels, 0.9, kernel=triton_logprobs)
        logprobs.mean().backward()
    return counts


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--sizes", nargs="*", choices=QWEN3, default=["0.6B", "1.7B"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 16384])
    parser.add_argument("--activations", nargs="+", default=["keep", "recompute"])
    parser.add_argument("--shapes", nargs="*", metavar="MxVxD", default=SHAPES)
    parser.add_argument("--groups", action="store_true", help="a line for each group")
    parser.add_argument("--tflops", type=float, default=775, help="rate of bf16 products")
    parser.add_argument("--tbytes", type=float, default=4.3, help="memory bandwidth in TB/s")
    parser.add_argument("--out", type=Path, help="write the lines as JSON")
    args = parser.parse_args()
    cases = {}
    for size in args.sizes:
        for length in args.lengths:
            for activations in args.activations:
                flops = update_flops(model_config(size), length, 1)
                cases[size, length, activations] = flops
    table = Table(work="<24", group="<11", **COLUMNS, mfu=">5.0%", floors=">6.2f")
    lines = []
    for (size, length, activations), flops in cases.items():
        counts = count_learner(size, length, activations)
        for row in list(counts.rows(args))[0 if args.groups else -1 :]:
            if row["group"] == "all":
                row["mfu"] = flops / args.tflops / 1e9 / row["least_ms"]
            lines.append({"work": f"{size} {length} {activations}"} | row)
            table.add(lines[-1])
    for shape in args.shapes:
        counts = count_logprobs(shape)
        m, v, d = map(int, shape.split("x"))
        for row in list(counts.rows(args))[-1:]:
            row["floors"] = row["least_ms"] * args.tflops * 1e9 / (6 * m * v * d)
            lines.append({"work": shape} | row)
            table.add(lines[-1])
    write_json(args.out, lines)


if __name__ == "__main__":
    main()
