"""Decode steps of the embedded engine on a GPU, captured as CUDA graphs and replayed.

A decode step of a few hundred rows takes Python and the driver longer to launch than the GPU to
compute. A graph is launched at once. It is of fixed shapes, so that rows and cached tokens are
rounded up, and each pair of numbers has a graph of its own. A graph reads and writes memory, not
tensors: all graphs go where the cache is made anew or weights lie elsewhere. Weights that arrive in
their old place are read.

Legend: n rows, L cached tokens, E hidden size.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_core.engines.llama_slots import CHANGING_ROTARY, LlamaCache, LlamaSlots
from rl_core.host_copies import release_cached_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Rounded up to multiples of these. Few rows are a power of two. Long rows are at most an eighth
# longer.
MANY_ROWS, LENGTHS = 16, 256
MAX_GRAPHS = 64  # The oldest goes.
# Steps of one shape that run without a graph before it is captured. To capture it takes as long as
# two more.
FIRST_STEPS = 4

Replay = Callable[[], Tensor]  # the same tensor each time, computed again
Capture = Callable[[Callable[[], Tensor], Any], Replay]


def rounded_rows(num: int) -> int:
    if num >= MANY_ROWS:
        return -(-num // MANY_ROWS) * MANY_ROWS
    return 1 << (num - 1).bit_length()


def rounded_length(num: int) -> int:
    step = max(LENGTHS, 1 << max(0, num.bit_length() - 4))
    return -(-num // step) * step


@cache
def capture_stream() -> torch.cuda.Stream:
    """One for all graphs: cuBLAS keeps 32 MiB for each stream that it has seen."""
    return torch.cuda.Stream()


def capture_on_gpu(compute: Callable[[], Tensor], pool: Any) -> Replay:
    """The kernels of compute(), launched at once. It runs once before: what it makes at its first
    use, such as tables of positions, is no part of the graph."""
    graph, stream = torch.cuda.CUDAGraph(), capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        compute()
        # Other threads may use the device meanwhile.
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
    """Its decode steps are replayed. A model with hooks, such as those of adapters of several
    actors, runs without graphs."""

    def __init__(self, model: PreTrainedModel, capture: Capture = capture_on_gpu):
        super().__init__(model)
        self.capture = capture
        self.uses: Counter[tuple[int, int]] = Counter()  # by (n, L), rounded
        # By (n, L): tokens [n, 1] and columns [n] to be filled, and what computes with them.
        self.graphs: dict[tuple[int, int], tuple[Tensor, Tensor, Replay]] = {}
        self.pool: Any = None  # memory that the graphs share, since one runs at a time
        self.weights_at: list[int] = []  # addresses
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
        """As LlamaSlots'."""
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
                if self.model.dtype == torch.float32:  # whose norms are made for each loan
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
        """As LlamaSlots'. What it returns is overwritten by the next step."""
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
        if not self.graphs:  # positions up to the last column are made outside of a graph
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
        """[n, 1, E]. Rows behind the last one write where padding does, and are read by nobody."""
        ids, columns, replay = self.graphs[shape]
        ids[: len(tokens)] = tokens
        columns[: len(starts)] = starts
        columns[len(starts) :] = cache.max_tokens
        return replay()[: len(tokens)]
