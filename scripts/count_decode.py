"""Launches and bytes of a decode step of the embedded engine on a GPU, counted without one, and the
least time that they allow on an H200.

    python scripts/count_decode.py                             0.6B, 128 rows of 384 tokens
    python scripts/count_decode.py --size 1.7B --rows 32 --context 4096

Tensors are on torch's meta device, in bf16, and Triton's launches are counted instead of run.
floor_ms: bytes of weights, of the cache and of the logits once, at --tbytes. graph_ms: for each
launch the larger of its bytes at --tbytes and --launch_us, an assumption for kernels of a CUDA
graph that wait for each other. `modules` is the decode step by the model's modules, whose attention
reads every row up to the rounded length of the longest one. Not counted: time on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from bench_learner import QWEN3, model_config
from count_work import Kernels, num_bytes, tensors
from script_tools import Table, make_parser, write_json
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rl_core.engines.cuda_graphs import DecodeGraphs, rounded_length
from rl_core.engines.fused_graphs import FusedGraphs
from rl_core.engines.kv_slots import RowParams, head_weight, sample
from rl_core.engines.llama_slots import LlamaSlots
from rl_core.models.kernels import triton_decode


class Launches(Kernels):
    """Bytes read and written by each kernel launch inside."""

    def __init__(self, cache_bytes: int) -> None:
        """`cache_bytes`: keys and values that a layer's attention reads."""
        super().__init__()
        self.cache_bytes = cache_bytes
        self.sizes: list[tuple[str, int]] = []

    def count(self, name: str, read: list[Tensor], written: list[Tensor]) -> None:
        both = [*read, *written]
        size = num_bytes(both)
        if "flash" in name:
            # The queries of heads that share keys are folded before, and unfolded behind.
            query = both[0].nbytes
            self.sizes += [("fold", 2 * query)] * 2
            size = self.cache_bytes + 2 * query
        elif name in ("index_put_", "embedding", "gather"):  # Few values of a large tensor.
            size = 2 * min(x.nbytes for x in both if x.is_floating_point())
        self.sizes.append((name, size))

    def run_triton(self, kernel, grid, *args, **_) -> None:
        both = tensors(args)
        # A cache, larger than the other tensors, is written at one token of each row.
        self.count(kernel.__name__, [x for x in both if x.nbytes <= 2 * both[0].nbytes], [])

    def run_attention(self, query: Tensor, *_, **options) -> Tensor:
        """On a GPU a mask of truth values becomes one of numbers first, in three launches."""
        if options.get("attn_mask") is not None:
            self.sizes += [("mask", 0)] * 3
        self.sizes.append(("scaled_dot_product_attention", self.cache_bytes + 2 * query.nbytes))
        return torch.empty_like(query)


def count(work: Callable[[], object], cache_bytes: int = 0) -> list[tuple[str, int]]:
    launches = Launches(cache_bytes)
    with (
        patch.object(triton_decode, "run", launches.run_triton),
        patch.object(torch.nn.functional, "scaled_dot_product_attention", launches.run_attention),
        torch.no_grad(),
        launches,
    ):
        work()
    return launches.sizes


def count_layers(slots: LlamaSlots, num_rows: int, context: int) -> list[tuple[str, int]]:
    """Launches of a decode step without logits. Rows have `context` tokens each."""
    rows, cache = slice(0, num_rows), slots.make_cache(num_rows, context)
    tokens = torch.zeros(num_rows, 2, dtype=torch.long, device="meta")
    length = context if isinstance(slots, FusedGraphs) else rounded_length(context)
    with slots.borrowed(), torch.no_grad():
        LlamaSlots.forward(slots, cache, rows, tokens, None, 2)
        keys = cache.layers[0][0]
        per_token = 2 * keys.shape[1] * keys.shape[3] * keys.itemsize
        step = partial(LlamaSlots.forward, slots, cache, rows, tokens[:, :1], tokens[:, 0], length)
        return count(step, num_rows * length * per_token)


def count_sampling(slots: LlamaSlots, num_rows: int) -> list[tuple[str, int]]:
    """Launches of logits and of a sample at temperature 1."""
    head = head_weight(slots.model)
    logits = torch.zeros(num_rows, len(head), device="meta")
    params = RowParams(numbers=torch.ones(5, num_rows, device="meta"), is_scaled=False)
    params.has_no_greedy, uniforms = True, torch.zeros(num_rows, device="meta")
    product = "mm", head.nbytes + logits.nbytes
    return [product, *count(lambda: sample(logits, uniforms, params))]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--size", choices=QWEN3, default="0.6B")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--context", type=int, default=384, help="tokens of each row")
    parser.add_argument("--tbytes", type=float, default=4.3, help="memory bandwidth in TB/s")
    parser.add_argument("--launch_us", type=float, default=2, help="least time of a kernel")
    parser.add_argument("--out", type=Path, help="write the lines as JSON")
    args = parser.parse_args()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(args.size), dtype=torch.bfloat16)
    columns = {"launches": ">8d", "gbytes": ">7.2f", "floor_ms": ">8.2f", "graph_ms": ">8.2f"}
    table, lines = Table(step="<8", **columns), []
    for name, kind in {"modules": DecodeGraphs, "fused": FusedGraphs}.items():
        slots = kind(model.eval())
        sizes = count_layers(slots, args.rows, args.context)
        sizes += count_sampling(slots, args.rows)
        num_bytes = sum(size for _, size in sizes)
        times_us = [max(args.launch_us, size / args.tbytes / 1e6) for _, size in sizes]
        line = {"step": name, "launches": len(sizes), "gbytes": num_bytes / 1e9}
        floor = floor_bytes(model, args.rows, args.context)
        line |= {"floor_ms": floor / args.tbytes / 1e9, "graph_ms": sum(times_us) / 1e3}
        lines.append(line | {"operators": Counter(name for name, _ in sizes)})
        table.add(line)
    write_json(args.out, lines)


def floor_bytes(model: PreTrainedModel, num_rows: int, context: int) -> int:
    config = model.config
    per_token = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    weights = sum(x.nbytes for x in {id(x): x for x in model.parameters()}.values())
    if not config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.nbytes
    return weights + num_rows * (context * per_token + 8 * config.vocab_size)


if __name__ == "__main__":
    main()
