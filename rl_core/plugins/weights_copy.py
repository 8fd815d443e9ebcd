"""A second set of the weights that an actor trains, which follows them by a rule: a reference that
is renewed, and the teacher of self-distillation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rl_core.distributed import local
from rl_core.learning.learner import LearnerContext
from rl_core.types import PackedBatch


class WeightSnapshot:
    """After every `every`-th step it becomes decay * copy + (1 - decay) * policy; 0: it stays.

    The copy waits on the host, each rank's shards there, in the dtype in which they are trained: an
    exponential mean in bfloat16 would lose most steps to rounding. While it is read it takes the
    place of the policy's weights, shard by shard, so that nothing is gathered or loaded twice. Of
    an actor with an adapter it is the adapter alone.
    """

    def __init__(self, spec: LearnerContext, name: str, every: int = 0, decay: float = 0.0):
        """It begins as the policy is. `name`: of its folder in a checkpoint, which has it if it is
        renewed."""
        self.policy, self.adapter = spec.policy, spec.adapter
        self.name, self.every, self.decay = f"{spec.name}_{name}", every, decay
        # An actor may learn in every so many-th step alone.
        self.stride = spec.config.actors[spec.name].learn_every
        self.tensors = [on_host(shard) for shard in self.shards()]

    def shards(self) -> list[Tensor]:
        """This rank's part of what the actor trains."""
        self.policy.held()  # what a forward left gathered has the weights of that forward
        return [local(weight.detach()) for _, weight in self.policy.trained(self.adapter)]

    def read(self, batch: PackedBatch, temperature: float) -> Tensor:
        """[M] logprobs, inside in_place()."""
        return self.policy(batch, temperature, self.adapter)[0]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the policy has the copy's weights."""
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
        """Becomes as another one."""
        for kept, value in zip(self.tensors, other.tensors, strict=True):
            kept.copy_(value)


def on_host(value: Tensor) -> Tensor:
    return torch.empty_like(value, device="cpu", pin_memory=value.is_cuda).copy_(value)
