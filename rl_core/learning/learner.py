"""One trainable model: samples -> microbatches -> loss -> optimizer step. Every algorithm learns here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rl_core.config import Config, OptimConfig
from rl_core.data.packing import balanced_bins, fill_frac, pack_samples, trained_span
from rl_core.distributed import Ranks, all_gather_json, exchange
from rl_core.learning.algorithms import Algorithm, kl_k3, token_losses
from rl_core.learning.model import PolicyModel, named_weights
from rl_core.metrics import Max, Mean, Metric, Sum, add_metrics
from rl_core.types import PackedBatch, TrainingSample

PER_TOKEN = ("token_ids", "loss_mask", "rollout_logprobs", "policy_versions", "advantages")


@dataclass(kw_only=True, slots=True)
class Minibatch:
    """This rank's share of the samples of one optimizer step."""

    num_tokens: int  # trained tokens over all ranks: the one denominator
    batches: list[PackedBatch] = field(default_factory=list)  # as many on every rank


class Learner:
    def __init__(self, config: Config, algorithm: Algorithm, policy: PolicyModel, ranks: Ranks):
        self.config, self.algorithm, self.policy, self.ranks = config, algorithm, policy, ranks
        self.temperature = config.sampling.temperature if algorithm.is_rl else 1.0
        self.optimizer = make_optimizer(policy, config.optim)
        self.updates_per_step = config.learner.minibatches * config.learner.epochs

    def shard(self, samples: list[TrainingSample]) -> tuple[list[Minibatch], dict[str, Metric]]:
        """Every rank's samples -> balanced minibatches, each sample moved at most once, from the rank that has it to the
        rank that trains on it. Every rank must call it; the plan is computed alike on all of them."""
        samples = [trimmed(s) for s in samples]
        facts = [[s.group_id, len(s.token_ids), sum(s.loss_mask), any(s.advantages)] for s in samples]
        entries = [
            (group, rank, i, length, trained, signal)
            for rank, part in enumerate(all_gather_json(facts, self.ranks))
            for i, (group, length, trained, signal) in enumerate(part)
        ]
        entries.sort(key=lambda e: (e[0], e[1], e[2]))
        groups = {g: n for n, g in enumerate(dict.fromkeys(e[0] for e in entries))}
        count = self.config.learner.minibatches
        plans: list[list] = [[] for _ in range(count)]
        for e in entries:
            plans[groups[e[0]] * count // len(groups)].append(e)
        used = [[e for e in plan if e[5] or not self.algorithm.skips_zero_advantages] for plan in plans]
        bins = [
            balanced_bins([e[3] for e in plan], self.config.learner.microbatch_tokens, self.ranks.size) for plan in used
        ]
        trainer = {
            plan[i][1:3]: b % self.ranks.size
            for plan, parts in zip(used, bins, strict=True)
            for b, part in enumerate(parts)
            for i in part
        }  # (rank, index there) -> rank that trains on it
        here = self.move(samples, trainer, {e[1:3]: e[3] for e in entries})
        minibatches = []
        metrics: dict[str, Metric] = {}
        for plan, chosen, parts in zip(plans, used, bins, strict=True):
            mine = parts[self.ranks.rank :: self.ranks.size]
            minibatch = Minibatch(num_tokens=sum(e[4] for e in plan))
            for part in mine if chosen else []:
                keys = [chosen[i][1:3] for i in part]
                minibatch.batches.append(to_device(pack_samples([here[k] for k in keys]), self.ranks.device))
            minibatches.append(minibatch)
            filled, room = fill_frac(parts, [e[3] for e in chosen])
            add_metrics(
                metrics,
                {
                    "pack/fill_frac": Mean(filled / self.ranks.size, room / self.ranks.size),
                    "pack/microbatches": Sum(len(minibatch.batches)),
                    "pack/tokens": Sum(sum(b.input_ids.numel() for b in minibatch.batches)),
                },
            )
        return minibatches, metrics

    def move(
        self, samples: list[TrainingSample], trainer: dict, lengths: dict
    ) -> dict[tuple[int, int], TrainingSample]:
        """(rank, index there) -> the samples that this rank trains on."""
        me, size = self.ranks.rank, self.ranks.size
        outgoing = [[i for i in range(len(samples)) if trainer.get((me, i)) == r] for r in range(size)]
        if size == 1:
            return {(0, i): samples[i] for i in outgoing[0]}
        incoming = [[key for key in trainer if key[0] == r and trainer[key] == me] for r in range(size)]
        flat = [
            torch.tensor(
                [x for i in part for name in PER_TOKEN for x in getattr(samples[i], name)], dtype=torch.float64
            )
            for part in outgoing
        ]
        received = exchange(flat, [sum(lengths[k] for k in part) * len(PER_TOKEN) for part in incoming], self.ranks)
        here = {}
        for part, numbers in zip(incoming, received, strict=True):
            at = 0
            for key in sorted(part):
                arrays = numbers[at : at + len(PER_TOKEN) * lengths[key]].view(len(PER_TOKEN), -1).tolist()
                at += len(PER_TOKEN) * lengths[key]
                ids, mask, logprobs, versions, advantages = arrays
                here[key] = TrainingSample(
                    token_ids=list(map(int, ids)),
                    loss_mask=list(map(int, mask)),
                    advantages=advantages,
                    rollout_logprobs=logprobs,
                    policy_versions=list(map(int, versions)),
                )
        return here

    @torch.no_grad()
    def annotate(self, minibatches: list[Minibatch]) -> None:
        """Old logprobs, where a batch is used for more than one update; the first update's ratio is 1 by definition."""
        if self.algorithm.is_rl and self.updates_per_step > 1:
            for batch in (b for m in minibatches for b in m.batches):
                batch.old_logprobs = self.policy(batch, self.temperature)[0]

    @torch.no_grad()
    def evaluate(self, minibatches: list[Minibatch]) -> dict[str, Metric]:
        """The loss of samples that are not trained on."""
        metrics: dict[str, Metric] = {}
        for batch in (b for m in minibatches for b in m.batches):
            logprobs, _ = self.policy(batch, self.temperature)
            add_metrics(metrics, {"loss": Mean(-logprobs.sum().item(), logprobs.numel())})
        return metrics

    def step(self, minibatches: list[Minibatch], step: int) -> dict[str, Metric]:
        """One optimizer step per minibatch and epoch. A minibatch that carries no signal changes nothing."""
        metrics: dict[str, Metric] = {}
        for epoch in range(self.config.learner.epochs):
            for i, minibatch in enumerate(minibatches):
                update = step + (epoch * len(minibatches) + i) / self.updates_per_step
                if minibatch.batches and minibatch.num_tokens:
                    add_metrics(
                        metrics, self.update(minibatch, learning_rate(self.config.optim, update, self.config.num_steps))
                    )
                else:
                    add_metrics(metrics, {"skipped_updates": Sum(1 / self.ranks.size)})
        return metrics

    def update(self, minibatch: Minibatch, lr: float) -> dict[str, Metric]:
        metrics: dict[str, Metric] = {}
        for batch in minibatch.batches:
            logprobs, entropy = self.policy(batch, self.temperature)
            result = token_losses(
                self.algorithm, logprobs, batch.old_logprobs, batch.advantages[batch.loss_mask], entropy
            )
            loss = result.losses.sum() / minibatch.num_tokens
            # FSDP averages gradients over ranks; undo it, the loss is already a share of a global mean.
            (loss * self.ranks.size).backward()
            add_metrics(
                metrics, self.measure(batch, logprobs.detach(), entropy.detach(), result.is_clipped, loss.item())
            )
        grad_norm = self.clip_gradients()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        add_metrics(metrics, {"grad_norm": Mean(grad_norm), "lr": Mean(lr), "updates": Sum(1 / self.ranks.size)})
        metrics["loss"] = Mean(metrics["loss"].total, 1 / self.ranks.size)
        return metrics

    def measure(
        self, batch: PackedBatch, logprobs: Tensor, entropy: Tensor, is_clipped: Tensor, loss: float
    ) -> dict[str, Metric]:
        n = logprobs.numel()
        metrics: dict[str, Metric] = {"loss": Mean(loss, 0), "entropy_nats": Mean(entropy.sum().item(), n)}
        if self.algorithm.is_rl:
            learner = logprobs if batch.old_logprobs is None else batch.old_logprobs
            mismatch = kl_k3(learner, batch.rollout_logprobs[batch.loss_mask]) if n else logprobs
            metrics |= {
                "clip_frac": Mean(is_clipped.sum().item(), n),
                "mismatch_kl_nats": Mean(mismatch.sum().item(), n),
                "mismatch_kl_nats_max": Max(mismatch.max().item() if n else 0.0),
            }
        return metrics

    def clip_gradients(self) -> float:
        limit = self.config.optim.max_grad_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), limit)
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return named_weights(self.policy)


def trimmed(sample: TrainingSample) -> TrainingSample:
    """Without what follows the last trained token."""
    keep = trained_span(sample.loss_mask) + 1
    if keep == len(sample.token_ids):
        return sample
    return dataclasses.replace(sample, **{name: getattr(sample, name)[:keep] for name in PER_TOKEN})


def to_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    if device.type == "cpu":
        return batch
    moved = {
        f.name: getattr(batch, f.name).to(device)
        for f in dataclasses.fields(batch)
        if f.name != "cu_seqlens" and getattr(batch, f.name) is not None
    }
    return dataclasses.replace(batch, **moved)


def make_optimizer(policy: PolicyModel, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices, not on norms and biases."""
    parameters = [p for p in policy.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def learning_rate(config: OptimConfig, step: float, num_steps: int) -> float:
    """The learning rate of an update that starts `step` (a fraction for later minibatches) of num_steps."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    done = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[config.schedule]
    return config.lr * (
        shape if config.schedule == "constant" else config.min_lr_frac + (1 - config.min_lr_frac) * shape
    )
