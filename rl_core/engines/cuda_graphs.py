"""Decode steps of the embedded engine on a GPU, captured as CUDA graphs and replayed.

A decode step of a few hundred rows takes Python and the driver longer to launch than the GPU to
compute; a graph launches at once. A graph has fixed shapes, so rows and cached tokens are rounded
up, and each pair of numbers has a separate graph. A graph reads and writes addresses, not tensors:
all graphs are dropped when the cache is made anew or the weights move. New weights at the old
addresses are read.

Legend: n rows, L cached tokens, E hidden size.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_core.engines.llama_slots import CHANGING_ROTARY, LlamaCache, LlamaSlots
from rl_core.models.cpu_offload import release_cached_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Row counts and lengths are rounded up to multiples of these. Below MANY_ROWS the number of rows is
# a power of two. Long rows grow by at most an eighth.
MANY_ROWS, LENGTHS = 16, 256
MAX_GRAPHS = 64  # The oldest graph is dropped.
# Steps of one shape that run without a graph before it is captured. A capture takes as long as two
# more steps.
FIRST_STEPS = 4

Replay = Callable[[], Tensor]  # Computes the same tensor again and returns it.
Capture = Callable[[Callable[[], Tensor], object], Replay]


def rounded_rows(num: int) -> int:
    if num >= MANY_ROWS:
        return -(-num // MANY_ROWS) * MANY_ROWS
    return 1 << (num - 1).bit_length()


def rounded_length(num: int) -> int:
    step = max(LENGTHS, 1 << max(0, num.bit_length() - 4))
    return -(-num // step) * step


@cache
def capture_stream() -> torch.cuda.Stream:
    """One stream for all graphs: cuBLAS keeps 32 MiB for each stream that it has seen."""
    return torch.cuda.Stream()


def capture_on_gpu(compute: Callable[[], Tensor], pool: object) -> Replay:
    """A graph of the kernels of compute(). Runs compute() once before the capture, so that objects
    made at its first use, such as tables of positions, stay outside of the graph."""
    graph, stream = torch.cuda.CUDAGraph(), capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        compute()
        # Other threads may use the device at the same time.
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            out = compute()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


class DecodeGraphs(LlamaSlots):
    """LlamaSlots with replayed decode steps. A model with hooks, such as those of adapters of
    several actors, runs without graphs."""

    def __init__(self, model: PreTrainedModel, capture: Capture = capture_on_gpu):
        super().__init__(model)
        self.capture = capture
        self.uses: Counter[tuple[int, int]] = Counter()  # Rounded (n, L) -> steps.
        # (n, L) -> input tokens [n, 1], input columns [n], and the graph that reads both.
        self.graphs: dict[tuple[int, int], tuple[Tensor, Tensor, Replay]] = {}
        self.pool: object = None  # Memory that the graphs share, since one runs at a time.
        self.weights_at: list[int] = []  # Addresses.
        self.can_replay = self.can_capture = True

    def make_cache(self, num_slots: int, max_tokens: int) -> LlamaCache:
        self.drop()
        return super().make_cache(num_slots, max_tokens)

    def drop(self) -> None:
        if self.graphs:
            self.graphs.clear()
            self.pool = None
            release_cached_memory()
        self.uses.clear()

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Decides whether graphs are usable, and drops them if the weights moved."""
        is_quantized = getattr(self.model, "is_quantized", False)
        is_changing = self.decoder.rotary_emb.rope_type in CHANGING_ROTARY
        has_hooks = any(module._forward_hooks for module in self.decoder.modules())
        self.can_replay = not (is_quantized or is_changing or has_hooks)
        weights_at = [weight.data_ptr() for weight in self.model.parameters()]
        if weights_at != self.weights_at:
            self.drop()
            self.weights_at = weights_at
        with super().borrowed():
            try:
                yield
            finally:
                # In fp32 the norms are made for each loan, at new addresses.
                if self.model.dtype == torch.float32:
                    self.drop()

    def forward(
        self,
        cache: LlamaCache,
        rows: slice,
        tokens: Tensor,
        starts: Tensor | None,
        length: int,
        sizes: Tensor | None = None,
        is_even: bool = False,
    ) -> Tensor:
        """Like LlamaSlots.forward(). The next step overwrites the returned tensor."""
        is_decode = starts is not None and tokens.shape[1] == 1 and rows.start == 0
        if is_decode and self.can_replay:
            num_rows = min(rounded_rows(len(tokens)), cache.num_slots)
            shape = num_rows, min(rounded_length(length), cache.max_tokens)
            self.uses[shape] += 1
            if shape not in self.graphs and self.uses[shape] > FIRST_STEPS and self.can_capture:
                self.add_graph(cache, *shape, tokens.device)
            if shape in self.graphs:
                return self.replayed(cache, shape, tokens, starts)
        return super().forward(cache, rows, tokens, starts, length, sizes, is_even)

    def add_graph(
        self, cache: LlamaCache, num_rows: int, length: int, device: torch.device
    ) -> None:
        forward = super().forward
        ids = torch.zeros(num_rows, 1, dtype=torch.long, device=device)
        columns = torch.full((num_rows,), cache.max_tokens, device=device)
        if not self.graphs:  # Positions up to the last column are made outside of a graph.
            forward(cache, slice(0, 1), ids[:1], columns[:1], cache.max_tokens + 1)
            if device.type == "cuda":
                self.pool = torch.cuda.graph_pool_handle()

        def compute() -> Tensor:
            return forward(cache, slice(0, num_rows), ids, columns, length)

        try:
            replay = self.capture(compute, self.pool)
        except RuntimeError as error:
            self.can_capture = False
            print(f"decode steps run without CUDA graphs: {error}", file=sys.stderr, flush=True)
            return
        if len(self.graphs) >= MAX_GRAPHS:
            del self.graphs[next(iter(self.graphs))]
        self.graphs[num_rows, length] = ids, columns, replay

    def replayed(
        self, cache: LlamaCache, shape: tuple[int, int], tokens: Tensor, starts: Tensor
    ) -> Tensor:
        """[n, 1, E]. The added rows write to the padding column, and nobody reads them."""
        ids, columns, replay = self.graphs[shape]
        ids[: len(tokens)] = tokens
        columns[: len(starts)] = starts
        columns[len(starts) :] = cache.max_tokens
        return replay()[: len(tokens)]
