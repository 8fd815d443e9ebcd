"""A second set of an actor's trained weights, updated by a rule: for an updated reference and for
the teacher of self-distillation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rl_core.distributed import local
from rl_core.models.policy import Policy
from rl_core.types import PackedBatch


class WeightSnapshot:
    """After every `every`-th step the snapshot becomes decay * snapshot + (1 - decay) * policy;
    with every=0 it never changes.

    The snapshot is kept on the CPU, as each rank's shards, in the dtype of training: an exponential
    moving average in bfloat16 would lose most steps to rounding. To be read it is swapped with the
    policy's weights, shard by shard, so that nothing is gathered or loaded twice. For an actor with
    an adapter it holds the adapter alone.
    """

    def __init__(
        self,
        policy: Policy,
        adapter: str,
        *,
        name: str,
        stride: int,
        every: int = 0,
        decay: float = 0.0,
    ):
        """Copies the policy's current weights. `name`: folder in a checkpoint, which stores the
        snapshot if it is updated. `stride`: the actor is updated every `stride` steps."""
        self.policy, self.adapter, self.name = policy, adapter, name
        self.stride, self.every, self.decay = stride, every, decay
        self.tensors = [on_host(shard) for shard in self.shards()]

    def shards(self) -> list[Tensor]:
        """This rank's shards of the actor's trained weights."""
        self.policy.held()  # Reshards: gathered weights belong to the last forward.
        return [local(weight.detach()) for _, weight in self.policy.trained(self.adapter)]

    def read(self, batch: PackedBatch, temperature: float) -> Tensor:
        """[M] logprobs with the snapshot's weights. Call it inside in_place()."""
        return self.policy(batch, temperature, self.adapter)[0]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the policy has the snapshot's weights."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        for shard, kept in zip(self.shards(), self.tensors, strict=True):
            before = shard.clone()
            shard.copy_(kept)
            kept.copy_(before)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        done = step + 1
        if not self.every or done // self.every == (done - self.stride) // self.every:
            return
        for shard, kept in zip(self.shards(), self.tensors, strict=True):
            before = kept.to(shard.device)
            kept.copy_(self.decay * before + (1 - self.decay) * shard)

    def take(self, other: WeightSnapshot) -> None:
        """Copies another snapshot."""
        for kept, value in zip(self.tensors, other.tensors, strict=True):
            kept.copy_(value)


def on_host(value: Tensor) -> Tensor:
    return torch.empty_like(value, device="cpu", pin_memory=value.is_cuda).copy_(value)
