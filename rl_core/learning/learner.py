"""One trainable model: samples -> microbatches -> loss -> optimizer step. Every algorithm learns
here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rl_core.algorithms import Algorithm, kl_estimate, token_losses
from rl_core.config import Config, OptimConfig
from rl_core.data.packing import PackBudget
from rl_core.distributed import Ranks, local
from rl_core.host_copies import HostCopies
from rl_core.learning.minibatches import Minibatch, pair_work, shard_samples
from rl_core.learning.policy import PackedForward, Policy
from rl_core.metrics import Mean, Metric, Percentile, Sum, add_metrics, count_once, reduce_metrics
from rl_core.types import PackedBatch, RunError, TrainingSample

TAIL_NATS = 0.5  # a token beyond it counts for mismatch_tail_frac
MAX_NONFINITE = 3  # updates in a row that are skipped
WSD_DECAY_FRAC = 0.2

Metrics = dict[str, Metric]
# (config, batch, what the policy gives) -> losses of its tokens or pairs, and metrics whose numbers
# are still on the device.
Loss = Callable[[Config, PackedBatch, Tensor], tuple[Tensor, Metrics]]
Named = Iterable[tuple[str, nn.Parameter]]


class LearnerPart:
    """What an option adds to a learner: a reference model, a critic, a loss of experts. A part
    overrides what it needs and changes only its own state. Every rank has the same parts."""

    models: tuple[Policy, ...] = ()  # that it only reads
    learners: tuple[Learner, ...] = ()  # that it trains
    copies: tuple[Any, ...] = ()  # plugins/weights_copy.py's, of what the actor trains
    forward_pass: PackedForward | None = None  # instead of the policy's own

    def packed(self, batch: PackedBatch, samples: list[TrainingSample]) -> PackedBatch:
        """The batch, or one with more of what these samples carry."""
        return batch

    def around(self, batch: PackedBatch) -> AbstractContextManager:
        """A context for a forward of the learner's policy."""
        return nullcontext()

    def annotate(self, batches: list[PackedBatch]) -> Metrics:
        """Fills in what losses need. It is called once for a step, without gradients."""
        return {}

    def before_update(self, learner: Learner, minibatch: Minibatch, step: float) -> Metrics:
        return {}

    def after_step(self, step: int) -> None:
        """The weights are those that the step has made."""

    def loss(self) -> Tensor | float:
        """Added to the loss of the last forward."""
        return 0.0

    def metrics(self) -> Metrics:
        """Of the update's forwards; numbers may still be on the device."""
        return {}


@dataclass(kw_only=True)
class PartSpec:
    """What parts of a learner are made from."""

    config: Config  # with the actor's own learning rate
    algorithm: Algorithm
    name: str  # of the actor
    policy: Policy
    adapter: str  # of the policy, which the actor trains, if any
    ranks: Ranks
    load: Callable[..., Policy]  # a further model from its folder
    make: Callable[..., Learner]  # a further learner
    learners: Mapping[str, Learner] = field(default_factory=dict)  # all actors', once made


class Learner:
    scale = 1.0  # of the loss, while gradients are in fp16

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        policy: Policy,
        ranks: Ranks,
        make_optimizer: Callable[[Named, OptimConfig], Optimizer],
        *,
        parts: Iterable[LearnerPart] = (),
        loss: Loss | None = None,
        name: str = "policy",
        adapter: str = "",
    ):
        """`loss`: instead of the algorithm's own. `adapter`: that it trains, if any."""
        self.config, self.algorithm, self.policy, self.ranks = config, algorithm, policy, ranks
        self.parts, self.loss, self.name, self.adapter = tuple(parts), loss, name, adapter
        self.temperature = config.sampling.temperature if algorithm.is_rl else 1.0
        self.optimizer = make_optimizer(self.trained_parameters(), config.optim)
        self.state_on_device: Callable[[], AbstractContextManager] = nullcontext
        if config.learner.offload == "phase":
            copies = HostCopies(ranks.device)
            self.state_on_device = partial(copies.on_device, self.optimizer_state)
        self.updates_per_step = config.learner.minibatches * config.learner.epochs
        mesh = ranks.mesh
        self.budget = PackBudget(
            max_tokens=config.learner.microbatch_tokens * mesh.cp,
            num_ranks=mesh.dp,
            cp=mesh.cp,
            pair_work=pair_work(policy.hf),
        )
        self.num_updates = 0  # since the run began, before it was resumed too
        self.nonfinite_in_a_row = 0

    def shard(self, samples: list[TrainingSample]) -> tuple[list[Minibatch], Metrics]:
        """This rank's share of every rank's samples, and metrics of their packing. Every rank must
        call it."""
        how = self.algorithm, self.config, self.budget, self.ranks
        return shard_samples(samples, *how, self.parts)

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        with ExitStack() as stack:
            forward_pass = None
            for part in self.parts:
                stack.enter_context(part.around(batch))
                forward_pass = part.forward_pass or forward_pass
            return self.policy(batch, self.temperature, self.adapter, forward_pass)[:2]

    @torch.no_grad()
    def annotate(self, minibatches: list[Minibatch]) -> Metrics:
        """Fills in old logprobs, where a batch is used for more than one update (the first update's
        ratio is 1 by definition), and what parts do: logprobs of the reference, the critic's
        values, advantages of these. Returns the parts' metrics."""
        batches = []
        for minibatch in minibatches:
            batches += minibatch.batches
        if self.algorithm.is_rl and self.updates_per_step > 1:
            for batch in batches:
                batch.old_logprobs = self.forward(batch)[0]
        metrics: Metrics = {}
        for part in self.parts:
            metrics |= part.annotate(batches)
        return metrics

    def step(self, minibatches: list[Minibatch], step: int) -> Metrics:
        """One optimizer step per minibatch and epoch, until one's KL to the start of the step
        exceeds the target. A minibatch that carries no signal changes nothing."""
        metrics: Metrics = {}
        with ExitStack() as states:
            for learner in self.trained():
                states.enter_context(learner.state_on_device())
            for number in range(self.updates_per_step):
                minibatch = minibatches[number % len(minibatches)]
                if not minibatch.batches or not minibatch.denominator:
                    add_metrics(metrics, {"skipped_updates": count_once(self.ranks)})
                    continue
                of_update, is_done = self.update(minibatch, step + number / self.updates_per_step)
                add_metrics(metrics, of_update)
                if is_done:
                    num_left_out = self.updates_per_step - number
                    metrics["kl_stopped_updates"] = Sum(num_left_out / self.ranks.size)
                    break
        for part in self.parts:
            part.after_step(step)
        return metrics

    def update(self, minibatch: Minibatch, step: float) -> tuple[Metrics, bool]:
        """The metrics, and whether the step ends here without this update, because the policy is
        too far from its start. An update whose loss or gradient is not finite changes nothing."""
        of_parts: Metrics = {}
        for part in self.parts:
            of_parts |= part.before_update(self, minibatch, step)
        if step < self.config.critic.warmup_steps:
            return of_parts | {"skipped_updates": count_once(self.ranks)}, False
        metrics = self.backward(minibatch)
        # The one place in which an update waits for the device.
        grad_norm = self.clip_gradients().tolist()
        is_done = self.exceeds_target(metrics)
        if not math.isfinite(grad_norm) and not is_done:
            metrics = self.skip(metrics, grad_norm, step)
        elif not is_done:
            lr = learning_rate(self.config.optim, step, self.config.num_steps)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.num_updates += 1
            self.nonfinite_in_a_row = 0
            metrics |= {"grad_norm": Mean(grad_norm), "lr": Mean(lr)}
            metrics["updates"] = count_once(self.ranks)
        self.policy.zero_grad()
        return of_parts | metrics, is_done

    def backward(self, minibatch: Minibatch) -> Metrics:
        """Metrics whose numbers are still on the device; gradients of the minibatch's loss are in
        the parameters."""
        found: Metrics = {}
        count = 1 / len(minibatch.batches) / self.ranks.mesh.dp
        for number, batch in enumerate(minibatch.batches, 1):
            # Copies of the weights add up their gradients once.
            if self.policy.is_sharded and self.ranks.mesh.dp_replicate > 1:
                self.policy.set_requires_all_reduce(number == len(minibatch.batches))
            losses, metrics = self.losses(batch)
            loss = losses.sum() / minibatch.denominator
            # Propagate NaN into the gradient so that all ranks skip this update together.
            one = 1 + (loss - loss).detach()
            total = loss * one + sum(part.loss() for part in self.parts)
            # Gradients are averaged over ranks; undo it, the loss is already a share of a global
            # mean.
            (total * (self.scale * self.ranks.size / self.ranks.mesh.tp)).backward()
            add_metrics(found, metrics | {"loss": Mean(loss.detach(), count)})
        for part in self.parts:
            add_metrics(found, part.metrics())
        return found

    def skip(self, metrics: Metrics, grad_norm: float, step: float) -> Metrics:
        """Counts an update that was not made. Raises RunError on all ranks alike after too many in
        a row."""
        self.nonfinite_in_a_row += 1
        loss = reduce_metrics({"loss": metrics["loss"]}, self.ranks)["loss"]
        number = round(step % 1 * self.updates_per_step)
        text = (
            f"step {int(step) + 1}, update {number} of {self.name} is not finite: gradient norm "
            f"{grad_norm}, loss {loss}; skipped, number {self.nonfinite_in_a_row} in a row"
        )
        if self.nonfinite_in_a_row > MAX_NONFINITE:
            raise RunError(f"{text}; weights and optimizer are as before the first")
        if self.ranks.rank == 0:
            print(text, flush=True)
        return {"nonfinite_updates": count_once(self.ranks)}

    def losses(self, batch: PackedBatch) -> tuple[Tensor, Metrics]:
        """What is minimised, of each trained token or of each pair, and metrics whose numbers are
        still on the device."""
        outputs, entropy = self.forward(batch)
        if self.loss:
            return self.loss(self.config, batch, outputs)
        losses, is_clipped = token_losses(self.algorithm, batch, outputs, entropy)
        metrics = self.measure(batch, outputs.detach()) | {"entropy_nats": mean_of(entropy)}
        if is_clipped is not None:
            metrics["clip_frac"] = mean_of(is_clipped)
        return losses, metrics

    def measure(self, batch: PackedBatch, logprobs: Tensor) -> Metrics:
        """How far the policy is from what sampled, from the start of the step, from the
        reference."""
        metrics: Metrics = {}
        old, rollout = batch.old_logprobs, batch.rollout_logprobs
        if self.algorithm.is_rl:
            learner = logprobs if old is None else old
            mismatch = kl_estimate("k3", learner, rollout)
            metrics["mismatch_kl_nats"] = mean_of(mismatch)
            largest = [mismatch.max()] if len(mismatch) else []
            metrics["mismatch_kl_nats_max"] = Percentile(100, largest)
            metrics["mismatch_tail_frac"] = mean_of((learner - rollout).abs() > TAIL_NATS)
        if old is not None:
            metrics["step_kl_nats"] = mean_of(kl_estimate("k3", old, logprobs))
        if batch.ref_logprobs is not None:
            metrics["ref_kl_nats"] = mean_of(kl_estimate("k3", logprobs, batch.ref_logprobs))
        return metrics

    def exceeds_target(self, metrics: Metrics) -> bool:
        """Whether the mean KL(old || new) of the minibatch is above the target; the same on all
        ranks."""
        if not self.algorithm.target_kl:
            return False
        mean = reduce_metrics({"kl": metrics["step_kl_nats"]}, self.ranks)["kl"]
        return mean > self.algorithm.target_kl

    def clip_gradients(self) -> Tensor:
        """The norm before it is bounded, over all ranks."""
        found = [parameter.grad for _, parameter in self.trained_parameters()]
        grads = [grad for grad in found if grad is not None]
        norm = self.policy.gradient_norm(grads)
        if limit := self.config.optim.max_grad_norm:
            scale = (limit / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_([local(grad) for grad in grads], scale)
        return norm

    def on_device(self) -> ExitStack:
        """A context in which the weights are on the device; outside they are CPU-offloaded, if
        --learner.offload says so. The optimizer's state is there only within step()."""
        stack = ExitStack()
        for learner in self.trained():
            stack.enter_context(learner.policy.on_device())
        return stack

    def optimizer_state(self) -> Iterator[Tensor]:
        for state in self.optimizer.state.values():
            yield from map(local, filter(torch.is_tensor, state.values()))

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps beside weights and the optimizer's state."""
        return {}

    def load_state(self, state: dict[str, float]) -> None:
        """What state() gave."""

    def leave_device(self) -> None:
        """CPU-offloads, if --learner.offload says so, what was made or loaded on the device."""
        for learner in self.trained():
            with learner.policy.on_device(), learner.state_on_device():
                pass  # each context CPU-offloads at its end

    def trained(self) -> list[Learner]:
        """All that learns here. A checkpoint has each by its name."""
        learners = [self]
        for part in self.parts:
            learners += part.learners
        return learners

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.policy.trained(self.adapter)

    def models(self) -> list[Policy]:
        """The models that it holds."""
        models = dict.fromkeys(learner.policy for learner in self.trained())
        for part in self.parts:
            models |= dict.fromkeys(part.models)
        return list(models)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.policy.named_weights(self.adapter)

    def engine_weights(self, in_place: bool) -> Iterator[tuple[str, Tensor]] | None:
        return self.policy.engine_weights(self.adapter, in_place)


def mean_of(values: Tensor) -> Mean:
    """Over tokens, or pairs; its number is still on the device."""
    return Mean(values.detach().sum(), values.numel())


def learning_rate(config: OptimConfig, step: float, num_steps: int) -> float:
    """The learning rate of an update that starts `step` (a fraction for later minibatches) of
    num_steps. wsd: constant until the last fifth of the run, then linear (Hu et al. 2024,
    arXiv:2404.06395, section 4)."""
    warmup = config.warmup_steps or config.warmup_frac * num_steps
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, num_steps - warmup)
    heights = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "wsd": min(1.0, (num_steps - step) / (WSD_DECAY_FRAC * max(1, num_steps))),
    }
    return config.lr * (config.min_lr_frac + (1 - config.min_lr_frac) * heights[config.schedule])
