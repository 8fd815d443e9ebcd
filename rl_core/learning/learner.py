"""One trainable model: samples -> microbatches -> loss -> optimizer step. Every algorithm learns
here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rl_core.config import Config, OptimConfig
from rl_core.data.packing import PackBudget
from rl_core.distributed import Ranks, all_gather_json, local, unsharded
from rl_core.learning.algorithms import (
    Algorithm,
    kl_estimate,
    kl_penalised,
    learning_rate,
    mean_and_std,
    token_losses,
)
from rl_core.learning.minibatches import Minibatch, pair_work, shard_samples
from rl_core.learning.policy import PolicyModel, engine_weights, named_weights, reads_in_place
from rl_core.metrics import Max, Mean, Metric, Sum, add_metrics, count_once
from rl_core.types import PackedBatch, RunError, TrainingSample, option

TAIL_NATS = 0.5  # a token beyond it counts for mismatch_tail_frac
MAX_NONFINITE = 3  # updates in a row that are skipped
OPTIMIZERS = {"adamw8bit": "rl_core.plugins.optimizers:adamw8bit"}  # beside torch's
OFFLOAD = "rl_core.plugins.offload"


class Learner:
    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        policy: PolicyModel,
        ranks: Ranks,
        reference: PolicyModel | None = None,
        critic: Any = None,  # rl_core.plugins.critic.Critic
        name: str = "policy",
        adapter: str | None = None,
    ):
        self.config, self.algorithm, self.policy, self.ranks, self.name = (
            config,
            algorithm,
            policy,
            ranks,
            name,
        )
        # That it trains, if any.
        self.adapter = next(iter(policy.adapters), "") if adapter is None else adapter
        # Frozen; or the policy, which then acts as its own without adapters.
        self.reference = reference
        self.critic = critic  # trained beside the policy
        self.temperature = config.sampling.temperature if algorithm.is_rl else 1.0
        self.optimizer = make_optimizer(self.trained_parameters(), config.optim)
        # Makes a context in which the optimizer's state is on the device.
        self.state_on_device = nullcontext
        if config.learner.offload == "phase":
            self.state_on_device = option(f"{OFFLOAD}:offload_state")(self.optimizer, ranks.device)
            # Which others may share.
            if policy.on_device is nullcontext and not reads_in_place(policy):
                policy.on_device = option(f"{OFFLOAD}:offload_weights")(policy, ranks.device)
        self.updates_per_step = config.learner.minibatches * config.learner.epochs
        tokens, mesh = config.learner.microbatch_tokens * ranks.mesh.cp, ranks.mesh
        self.budget = PackBudget(
            max_tokens=tokens, num_ranks=mesh.dp, cp=mesh.cp, pair_work=pair_work(policy.hf)
        )
        self.num_updates = 0  # since the run began, before it was resumed too
        self.nonfinite_in_a_row = 0
        self.experts: Any = None  # an plugins.experts.Experts, where the model has some

    def shard(self, samples: list[TrainingSample]) -> tuple[list[Minibatch], dict[str, Metric]]:
        """This rank's share of every rank's samples, and metrics of their packing. Every rank must
        call it."""
        replay = self.experts and self.experts.replay
        return shard_samples(samples, self.algorithm, self.config, self.budget, self.ranks, replay)

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        with self.experts.of(batch) if self.experts else nullcontext():
            return self.policy(batch, self.temperature, self.adapter)

    @torch.no_grad()
    def annotate(self, minibatches: list[Minibatch]) -> dict[str, Metric]:
        """Fills in old logprobs, where a batch is used for more than one update (the first update's
        ratio is 1 by definition), and what advantages need: the KL to the reference, the critic's
        values, the deviation over the whole batch. Returns the critic's metrics."""
        a, batches = self.algorithm, [b for m in minibatches for b in m.batches]
        if a.is_rl and self.updates_per_step > 1:
            for batch in batches:
                batch.old_logprobs = self.forward(batch)[0]
        if self.reference is not None:
            with self.reference.on_device():
                for batch in batches:
                    batch.ref_logprobs = self.reference(batch, self.temperature)[0]
        metrics = self.critic.annotate(a, batches) if self.critic else {}
        if self.reference is not None and (
            a.kl_in == "advantage" or (a.kl_in == "reward" and not self.critic)
        ):
            for batch in batches:
                batch.advantages = kl_penalised(a, batch)
        if a.normalize == "batch":
            sums = torch.zeros(3, dtype=torch.float64, device=self.ranks.device)
            for v in (b.advantages.double() for b in batches):
                sums += torch.stack([v.sum(), v.square().sum(), torch.ones_like(v).sum()])
            total, squares, count = self.global_sums(sums)
            mean, deviation = mean_and_std(total, squares, max(count, 1))
            for batch in batches:  # 0 where all are equal (REINFORCE++, arXiv:2501.03262)
                batch.advantages = (batch.advantages - mean) * (1 / deviation if deviation else 0.0)
        return metrics

    def global_sums(self, sums: Tensor) -> list[float]:
        """Sums over the ranks."""
        return [
            sum(column) for column in zip(*all_gather_json(sums.tolist(), self.ranks), strict=True)
        ]

    @torch.no_grad()
    def evaluate(self, minibatches: list[Minibatch]) -> dict[str, Metric]:
        """The mean loss of samples that are not trained on; of pairs with their metrics."""
        parts = []
        for batch in (b for m in minibatches for b in m.batches):
            if self.algorithm.loss:
                losses, metrics = self.losses(batch)
            else:
                losses, metrics = -batch.advantages * self.forward(batch)[0], {}
            parts.append(metrics | {"loss": Mean(losses.sum(), losses.numel())})
        return fetched(parts)[0]

    def step(self, minibatches: list[Minibatch], step: int) -> dict[str, Metric]:
        """One optimizer step per minibatch and epoch, until one's KL to the start of the step
        exceeds the target. A minibatch that carries no signal changes nothing."""
        metrics: dict[str, Metric] = {}
        with ExitStack() as states:
            for learner in self.trained("").values():
                states.enter_context(learner.state_on_device())
            for number in range(self.updates_per_step):
                minibatch, at = (
                    minibatches[number % len(minibatches)],
                    step + number / self.updates_per_step,
                )
                has_work, is_done = bool(minibatch.batches and minibatch.denominator), False
                if self.critic and has_work:
                    add_metrics(metrics, self.critic.update(minibatch, at))
                if has_work and (not self.critic or step >= self.config.critic.warmup_steps):
                    of_update, is_done = self.update(minibatch, at)
                    add_metrics(metrics, of_update)
                else:
                    add_metrics(metrics, {"skipped_updates": count_once(self.ranks)})
                if is_done:
                    left_out = self.updates_per_step - number
                    return metrics | {"kl_stopped_updates": Sum(left_out / self.ranks.size)}
        return metrics

    def update(self, minibatch: Minibatch, step: float) -> tuple[dict[str, Metric], bool]:
        """The metrics, and whether the step ends here without this update, because the policy is
        too far from its start. An update whose loss or gradient is not finite changes nothing."""
        parts, experts = [], self.experts
        if experts:
            experts.begin(minibatch.batches)
        for number, batch in enumerate(minibatch.batches, 1):
            # Copies of the weights add up their gradients once.
            if self.ranks.mesh.dp_replicate > 1:
                self.policy.set_requires_all_reduce(number == len(minibatch.batches))
            losses, metrics = self.losses(batch)
            loss = losses.sum() / minibatch.denominator
            # Propagate NaN into the gradient so that all ranks skip this update together.
            one = 1 + (loss - loss).detach()
            # FSDP averages gradients over ranks; undo it, the loss is already a share of a global
            # mean.
            whole = loss * one + (experts.loss() if experts else 0.0)
            (whole * (self.ranks.size / self.ranks.mesh.tp)).backward()
            parts.append(metrics | {"loss": Mean(loss.detach(), 0)})
        if experts:
            parts.append(experts.metrics())
        # The one place in which an update waits for the device.
        metrics, grad_norm = fetched(parts, self.clip_gradients())
        metrics["loss"] = Mean(metrics["loss"].total, 1 / self.ranks.mesh.dp)
        is_finite, is_done = math.isfinite(grad_norm), self.exceeds_target(metrics)
        if is_finite and not is_done:
            lr = learning_rate(self.config.optim, step, self.config.num_steps)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.num_updates += 1
            once = count_once(self.ranks)
            add_metrics(metrics, {"grad_norm": Mean(grad_norm), "lr": Mean(lr), "updates": once})
        for _, parameter in self.trained_parameters():
            parameter.grad = None
        if is_done or is_finite:
            self.nonfinite_in_a_row *= is_done
            return metrics, is_done
        return self.skip(metrics["loss"].total, grad_norm, step), False

    def skip(self, loss: float, grad_norm: float, step: float) -> dict[str, Metric]:
        """Counts an update that was not made. Raises RunError on all ranks alike after too many in
        a row."""
        self.nonfinite_in_a_row += 1
        losses = ", ".join(all_gather_json(repr(loss), self.ranks))  # of each rank
        number = round(step % 1 * self.updates_per_step)
        text = (
            f"step {int(step) + 1}, update {number} of {self.name} is not finite: gradient norm "
            f"{grad_norm}, loss {losses}"
        )
        if self.nonfinite_in_a_row > MAX_NONFINITE:
            raise RunError(
                f"{text}. It is number {self.nonfinite_in_a_row} in a row; weights and optimizer "
                "are as before the first"
            )
        if self.ranks.rank == 0:
            print(f"{text}; skipped ({self.nonfinite_in_a_row} in a row)", flush=True)
        return {"nonfinite_updates": count_once(self.ranks)}

    def losses(self, batch: PackedBatch) -> tuple[Tensor, dict[str, Metric]]:
        """What is minimised, of each trained token or of each pair, and metrics whose numbers are
        still on the device."""
        outputs, entropy = self.forward(batch)
        if self.algorithm.loss:
            return option(self.algorithm.loss)(self.config, batch, outputs)
        losses, is_clipped = token_losses(self.algorithm, batch, outputs, entropy)
        return losses, self.measure(batch, outputs.detach(), entropy.detach(), is_clipped)

    def exceeds_target(self, metrics: dict[str, Metric]) -> bool:
        """Whether the mean KL(old || new) of the minibatch is above the target; the same on all
        ranks."""
        if not self.algorithm.target_kl:
            return False
        kl = metrics["step_kl_nats"]
        total, count = self.global_sums(torch.tensor([kl.total, kl.count], dtype=torch.float64))
        return total > self.algorithm.target_kl * count

    def measure(
        self, batch: PackedBatch, logprobs: Tensor, entropy: Tensor, is_clipped: Tensor
    ) -> dict[str, Metric]:
        n, old = logprobs.numel(), batch.old_logprobs
        metrics: dict[str, Metric] = {"entropy_nats": Mean(entropy.sum(), n)}
        if self.algorithm.is_rl:
            learner, rollout = logprobs if old is None else old, batch.rollout_logprobs
            mismatch = kl_estimate("k3", learner, rollout) if n else logprobs
            metrics |= {
                "clip_frac": Mean(is_clipped.sum(), n),
                "mismatch_kl_nats": Mean(mismatch.sum(), n),
                "mismatch_kl_nats_max": Max(mismatch.max() if n else 0.0),
                "mismatch_tail_frac": Mean(((learner - rollout).abs() > TAIL_NATS).sum(), n),
            }
        if old is not None:
            metrics["step_kl_nats"] = Mean(kl_estimate("k3", old, logprobs).sum(), n)
        if batch.ref_logprobs is not None:
            metrics["ref_kl_nats"] = Mean(kl_estimate("k3", logprobs, batch.ref_logprobs).sum(), n)
        return metrics

    def clip_gradients(self) -> Tensor:
        """The norm before it is bounded, over all ranks."""
        self.policy.finish_gradients()
        # Torch takes the norm of tensors on one mesh.
        by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
        for grad in (p.grad for _, p in self.trained_parameters() if p.grad is not None):
            by_mesh.setdefault(getattr(grad, "device_mesh", None), []).append(grad)
        norms = [unsharded(torch.nn.utils.get_total_norm(grads)) for grads in by_mesh.values()]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if limit := self.config.optim.max_grad_norm:
            scale = (limit / (norm + 1e-6)).clamp(max=1.0)
            for grads in by_mesh.values():
                torch._foreach_mul_([local(g) for g in grads], scale)
        return norm

    def on_device(self) -> ExitStack:
        """A context in which the weights are on the device; outside they are CPU-offloaded, if
        --learner.offload says so. The optimizer's state is there only within step()."""
        stack = ExitStack()
        for learner in self.trained("").values():
            stack.enter_context(learner.policy.on_device())
        return stack

    def leave_device(self) -> None:
        """CPU-offloads, if --learner.offload says so, what was made or loaded on the device."""
        for learner in self.trained("").values():
            with learner.policy.on_device(), learner.state_on_device():
                pass  # each context CPU-offloads at its end

    def trained(self, name: str) -> dict[str, Learner]:
        """All that learns here, by the names that a checkpoint gives it."""
        return {name: self} | ({f"{name}_critic": self.critic.learner} if self.critic else {})

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.policy.trained(self.adapter)

    def models(self) -> list[PolicyModel]:
        """The models that it holds."""
        policies = [learner.policy for learner in self.trained("").values()]
        return list(dict.fromkeys([*policies, *([self.reference] if self.reference else ())]))

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return named_weights(self.policy, self.adapter)

    def engine_weights(self, in_place: bool) -> Iterator[tuple[str, Tensor]] | None:
        return engine_weights(self.policy, self.adapter, in_place)


def fetched(parts: list[dict[str, Metric]], *more: Tensor) -> tuple:
    """The sum of the parts, whose numbers may be on the device, and further numbers: all in one
    transfer from each device that has some. With --learner.offload always the gradient's norm is on
    the CPU."""
    places = [
        (m, "total" if isinstance(m, Mean) else "value") for part in parts for m in part.values()
    ]
    places = [place for place in places if isinstance(getattr(*place), Tensor)]
    tensors = [getattr(*place) for place in places] + list(more)
    numbers = numbers_of(tensors)
    for place, number in zip(places, numbers, strict=False):
        setattr(*place, number)
    metrics: dict[str, Metric] = {}
    for part in parts:
        add_metrics(metrics, part)
    return metrics, *numbers[len(places) :]


def numbers_of(tensors: list[Tensor]) -> list[float]:
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(index)
    numbers = [math.nan] * len(tensors)
    for indices in by_device.values():
        values = torch.stack([tensors[index].double() for index in indices]).tolist()
        for index, value in zip(indices, values, strict=True):
            numbers[index] = value
    return numbers


def make_optimizer(
    named: Iterator[tuple[str, nn.Parameter]], config: OptimConfig
) -> torch.optim.Optimizer:
    if config.name in OPTIMIZERS:
        return option(OPTIMIZERS[config.name])(list(named), config)
    groups = parameter_groups(named, config.weight_decay)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.betas[0])
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def parameter_groups(named: Iterator[tuple[str, Tensor]], weight_decay: float) -> list[dict]:
    """Weight decay on matrices, not on norms and biases. torch computes with a group's parameters
    together, which must therefore be sharded over one mesh."""
    kinds: dict[tuple, list] = {}
    for name, p in named:
        kinds.setdefault((p.ndim > 1, getattr(p, "device_mesh", None)), []).append((name, p))
    return [
        {"params": part, "weight_decay": weight_decay * is_matrix}
        for (is_matrix, _), part in kinds.items()
    ]
