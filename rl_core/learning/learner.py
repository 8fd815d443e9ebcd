"""One trainable model: samples -> microbatches -> loss -> optimizer step. Every algorithm learns
here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rl_core.algorithms import kl_estimate, token_losses
from rl_core.data.packing import PackBudget
from rl_core.distributed import local
from rl_core.learning.minibatches import Minibatch, pair_work, shard_samples
from rl_core.metrics import Mean, Percentile, Sum, add_metrics, count_once, reduce_metrics
from rl_core.models.cpu_offload import HostCopies
from rl_core.models.policy import Policy
from rl_core.types import PackedBatch, RunError, TrainingSample

if TYPE_CHECKING:
    from rl_core.learning.learner_context import LearnerContext, Loss, Losses, Metrics
    from rl_core.learning.learner_extension import LearnerExtension

TAIL_NATS = 0.5  # Larger logprob gaps count for mismatch_tail_frac.
MAX_NONFINITE = 3  # Maximum of skipped updates in a row.


class Learner:
    def __init__(
        self,
        context: LearnerContext,
        extensions: Iterable[LearnerExtension] = (),
        loss: Loss | None = None,
    ):
        """`loss`: of pairs or values, instead of the algorithm's loss of tokens."""
        c, ranks = context, context.ranks
        config = self.config = c.config
        self.algorithm, self.policy, self.ranks = c.algorithm, c.policy, ranks
        self.name, self.adapter, self.temperature = c.name, c.adapter, c.temperature
        self.extensions, self.loss, self.token_loss = tuple(extensions), loss, c.token_loss
        self.optimizer = c.make_optimizer(self.trained_parameters(), config.optim)
        self.state_on_device: Callable[[], AbstractContextManager] = nullcontext
        if config.learner.offload == "phase":
            copies = HostCopies(ranks.device)
            self.state_on_device = partial(copies.on_device, self.optimizer_state)
        self.updates_per_step = config.learner.updates_per_epoch * config.learner.epochs
        mesh = ranks.mesh
        self.budget = PackBudget(
            max_tokens=config.learner.microbatch_tokens * mesh.cp,
            num_ranks=mesh.dp,
            cp=mesh.cp,
            pair_work=pair_work(self.policy.hf),
        )
        self.num_updates = 0  # Since the start of the run, across resumes.
        self.nonfinite_in_a_row = 0

    def shard(self, samples: list[TrainingSample]) -> tuple[list[Minibatch], Metrics]:
        """This rank's share of every rank's samples, and metrics of their packing. Every rank must
        call it."""
        return shard_samples(
            samples, self.algorithm, self.config, self.budget, self.ranks, self.extensions
        )

    def forward(self, batch: PackedBatch) -> tuple[Tensor, ...]:
        """(logprobs, entropy) of the trained tokens, or (scores, 0), and further tensors of an
        extension's outputs()."""
        with ExitStack() as stack:
            outputs = None
            for extension in self.extensions:
                stack.enter_context(extension.around(batch))
                outputs = extension.outputs(self.policy, batch) or outputs
            return self.policy(batch, self.temperature, self.adapter, outputs)

    def annotate(self, minibatches: list[Minibatch]) -> Metrics:
        """Fills in old logprobs, where a batch is used for more than one update (the first update's
        ratio is 1 by definition), and calls annotate() of the extensions: reference logprobs,
        values, GAE advantages. Returns their metrics."""
        is_reused = self.algorithm.is_rl and self.updates_per_step > 1
        if not is_reused and not self.extensions:
            return {}
        from rl_core.learning.no_grad_batches import annotate, num_joined

        num = num_joined(self.config.learner, self.policy, self.ranks.mesh.tp)
        batches = [batch for minibatch in minibatches for batch in minibatch.batches]
        return annotate(batches, num, self.forward if is_reused else None, self.extensions)

    def step(self, minibatches: list[Minibatch], step: int) -> Metrics:
        """One optimizer step per minibatch and epoch, until the KL to the policy at the start of
        the step exceeds the target. A minibatch without signal is skipped."""
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
        for extension in self.extensions:
            for copy in extension.copies:
                copy.after_step(step)
        return metrics

    def update(self, minibatch: Minibatch, step: float) -> tuple[Metrics, bool]:
        """Returns (metrics, is_done). `is_done`: the KL to the start of the step exceeds the
        target, and this update was not applied. An update with a loss or gradient that is not
        finite is skipped."""
        extension_metrics: Metrics = {}
        for extension in self.extensions:
            extension_metrics |= extension.before_update(self, minibatch, step)
        if step < self.config.critic.warmup_steps:
            return extension_metrics | {"skipped_updates": count_once(self.ranks)}, False
        metrics = self.backward(minibatch)
        # Synchronises with the device. A target KL does so once more.
        [grad_norm] = self.clip_gradients().view(1).tolist()
        is_done = self.exceeds_target(metrics)
        if not math.isfinite(grad_norm) and not is_done:
            metrics = self.skip(metrics, grad_norm, step)
        elif not is_done:
            lr = self.config.optim.lr_at(step, self.config.num_steps)
            self.apply(lr)
            metrics |= {"grad_norm": Mean(grad_norm), "lr": Mean(lr)}
            metrics["updates"] = count_once(self.ranks)
            for extension in self.extensions:
                metrics |= extension.after_update()
        self.zero_gradients()
        return extension_metrics | metrics, is_done

    def backward(self, minibatch: Minibatch, losses_of: Losses | None = None) -> Metrics:
        """Accumulates the gradients of the minibatch's loss in the parameters. Returns metrics
        whose values are still on the device. `losses_of` replaces the method losses()."""
        losses_of = losses_of or self.losses
        result: Metrics = {}
        count = 1 / len(minibatch.batches) / self.ranks.mesh.dp
        scale = math.prod(extension.loss_scale for extension in self.extensions)
        for number, batch in enumerate(minibatch.batches, 1):
            is_last = number == len(minibatch.batches)
            if isinstance(self.policy, FSDPModule):
                from rl_core.models.parallel.fsdp import defer_reduction

                is_offloaded = self.config.learner.offload == "always"
                defer_reduction(self.policy, self.ranks.mesh, is_last, is_offloaded)
            if self.policy.vision is not None and not is_last:
                self.policy.vision.prefetch(minibatch.batches[number])
            outputs = self.forward(batch)
            losses, metrics = losses_of(batch, outputs)
            loss = losses.sum() / minibatch.denominator
            # Propagate NaN into the gradient so that all ranks skip this update together.
            one = 1 + (loss - loss).detach()
            added = [extension.loss(batch, minibatch, outputs) for extension in self.extensions]
            total = loss * one + sum(added)
            # Gradients are averaged over ranks; undo it, the loss is already a share of a global
            # mean.
            (total * (scale * self.ranks.size / self.ranks.mesh.tp)).backward()
            add_metrics(result, metrics | {"loss": Mean(loss.detach(), count)})
        for extension in self.extensions:
            extension.after_backward(self)
            add_metrics(result, extension.metrics())
        return result

    def apply(self, lr: float) -> None:
        """One optimizer step with the accumulated gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.num_updates += 1
        self.nonfinite_in_a_row = 0

    def zero_gradients(self) -> None:
        """Drops the gradients of the learner's own parameters: another learner may have an adapter
        of the same policy."""
        for _, parameter in self.trained_parameters():
            parameter.grad = None

    def skip(self, metrics: Metrics, grad_norm: float, step: float) -> Metrics:
        """Counts a skipped update. Raises RunError on all ranks after more than MAX_NONFINITE
        skipped updates in a row."""
        loss = reduce_metrics({"loss": metrics["loss"]}, self.ranks)["loss"]
        for extension in self.extensions:
            if (expected := extension.skipped(self, loss)) is not None:
                return expected
        self.nonfinite_in_a_row += 1
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

    def losses(self, batch: PackedBatch, outputs: tuple[Tensor, ...]) -> tuple[Tensor, Metrics]:
        """Loss of each trained token or each pair, and metrics whose values are still on the
        device. `outputs`: the result of forward()."""
        logprobs, entropy, *_ = outputs
        if self.loss:
            return self.loss(self.config, batch, logprobs)
        compute = self.token_loss or token_losses
        losses, is_clipped = compute(self.algorithm, batch, logprobs, entropy)
        metrics = self.measure(batch, logprobs.detach()) | {"entropy_nats": mean_of(entropy)}
        if is_clipped is not None:
            metrics["clip_frac"] = mean_of(is_clipped)
        return losses, metrics

    def measure(self, batch: PackedBatch, logprobs: Tensor) -> Metrics:
        """KL estimates between the policy and the rollout policy, the policy at the start of the
        step, and the reference."""
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
        """True if the minibatch's mean KL(old || new) over all ranks is above the target."""
        if not self.algorithm.target_kl:
            return False
        mean = reduce_metrics({"kl": metrics["step_kl_nats"]}, self.ranks)["kl"]
        return mean > self.algorithm.target_kl

    def clip_gradients(self, limit: float | None = None) -> Tensor:
        """Clips the gradients to this norm, by default --optim.max_grad_norm; 0 is off. Returns
        their norm over all ranks before clipping."""
        limit = self.config.optim.max_grad_norm if limit is None else limit
        every = [parameter.grad for _, parameter in self.trained_parameters()]
        grads = [grad for grad in every if grad is not None]
        norm = self.policy.gradient_norm(grads)
        if limit:
            scale = (limit / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_([local(grad) for grad in grads], scale)
        return norm

    def on_device(self) -> ExitStack:
        """Context in which the weights are on the device. Outside of it --learner.offload moves
        them to the CPU. The optimizer state is on the device only within step()."""
        stack = ExitStack()
        for learner in self.trained():
            stack.enter_context(learner.policy.on_device())
        return stack

    def optimizer_state(self) -> Iterator[Tensor]:
        for state in self.optimizer.state.values():
            yield from map(local, filter(torch.is_tensor, state.values()))

    def state(self) -> dict[str, float]:
        """State for a checkpoint, in addition to weights and optimizer state."""
        state: dict[str, float] = {}
        for extension in self.extensions:
            state |= extension.state()
        return state

    def load_state(self, state: dict[str, float]) -> None:
        """Loads the result of state()."""
        for extension in self.extensions:
            extension.load_state(state)

    def leave_device(self) -> None:
        """Moves weights and optimizer state to the CPU if --learner.offload is set."""
        for learner in self.trained():
            with learner.policy.on_device(), learner.state_on_device():
                pass  # Leaving the contexts offloads to the CPU.

    def trained(self) -> list[Learner]:
        """This learner and those of its extensions. Checkpoints keep each by name."""
        learners: list[Learner] = [self]
        for extension in self.extensions:
            learners += cast("tuple[Learner, ...]", extension.learners)
        return learners

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.policy.trained(self.adapter)

    def models(self) -> list[Policy]:
        """All models of the learner and its extensions, frozen ones included."""
        models = dict.fromkeys(learner.policy for learner in self.trained())
        for extension in self.extensions:
            models |= dict.fromkeys(extension.models)
        return list(models)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.policy.named_weights(self.adapter)

    def engine_weights(self, in_place: bool = False) -> Iterator[tuple[str, Tensor]] | None:
        return self.policy.engine_weights(self.adapter, in_place)


def mean_of(values: Tensor) -> Mean:
    """Mean over tokens or pairs. Its value is still on the device."""
    return Mean(values.detach().sum(), values.numel())
