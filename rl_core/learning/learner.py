"""One trainable model: samples -> microbatches -> loss -> optimizer step. Every algorithm learns here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rl_core.config import Config
from rl_core.data.packing import Entry, pack_samples, plan_minibatches, prompt_length, trained_span
from rl_core.distributed import Ranks, all_gather_json, exchange
from rl_core.learning.algorithms import Algorithm, kl_k3, kl_penalised, loss_denominator, normalised, token_losses
from rl_core.learning.model import PolicyModel, named_weights
from rl_core.learning.optim import learning_rate, make_optimizer
from rl_core.learning.preference import pair_losses, pair_metrics
from rl_core.metrics import Max, Mean, Metric, Sum, add_metrics
from rl_core.types import PackedBatch, TrainingSample, counter_seed

PER_TOKEN = ("token_ids", "loss_mask", "rollout_logprobs", "policy_versions", "advantages")


@dataclass(kw_only=True, slots=True)
class Minibatch:
    """This rank's share of the samples of one optimizer step."""

    denominator: int  # of the sum of losses over all ranks
    batches: list[PackedBatch] = field(default_factory=list)  # as many on every rank


class Learner:
    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        policy: PolicyModel,
        ranks: Ranks,
        reference: PolicyModel | None = None,
    ):
        self.config, self.algorithm, self.policy, self.ranks = config, algorithm, policy, ranks
        self.reference = reference  # frozen, on the host while it is not used; or the policy, without its adapters
        self.temperature = config.sampling.temperature if algorithm.is_rl else 1.0
        self.optimizer = make_optimizer(policy, config.optim)
        self.updates_per_step = config.learner.minibatches * config.learner.epochs

    def shard(self, samples: list[TrainingSample]) -> tuple[list[Minibatch], dict[str, Metric]]:
        """Every rank's samples -> balanced minibatches, each sample moved at most once, from the rank that has it to the
        rank that trains on it. Every rank must call it; the plan is computed alike on all of them."""
        me, size, config = self.ranks.rank, self.ranks.size, self.config.learner
        samples = [trimmed(s) for s in samples]
        facts = [entry_of(s, me, i) for i, s in enumerate(samples)]
        entries = [Entry(*fact) for part in all_gather_json(facts, self.ranks) for fact in part]
        skip = self.algorithm.skips_zero_advantages
        plans = plan_minibatches(
            entries, config.minibatches, config.microbatch_tokens, size, skip, self.algorithm.is_pairs
        )
        trainer = {plan.entries[i]: b % size for plan in plans for b, part in enumerate(plan.bins) for i in part}
        here = self.move(samples, trainer)
        minibatches, metrics = [], {}
        for plan in plans:
            mine = [[here[plan.entries[i]] for i in part] for part in plan.bins[me::size]]
            batches = [to_device(pack_samples(part), self.ranks.device) for part in mine]
            longest = self.config.max_tokens * self.config.turn_limit
            denominator = loss_denominator(self.algorithm.aggregation, plan.num_tokens, plan.num_sequences, longest)
            minibatches.append(Minibatch(denominator=denominator, batches=batches))
            room = max(plan.bin_tokens, default=0) * len(plan.bin_tokens)  # bins run in step across the ranks
            packing = {
                "fill_frac": Mean(sum(plan.bin_tokens), room),
                "microbatches": Sum(len(mine)),
                "tokens": Sum(sum(len(s.token_ids) for part in mine for s in part)),
                "computed_tokens": Sum(sum(plan.bin_tokens[me::size])),
            }
            add_metrics(metrics, packing, prefix="pack/")
        return minibatches, metrics

    def move(self, samples: list[TrainingSample], trainer: dict[Entry, int]) -> dict[Entry, TrainingSample]:
        """The samples that this rank trains on."""
        me, size = self.ranks.rank, self.ranks.size
        outgoing = [[e for e in trainer if e.rank == me and trainer[e] == r] for r in range(size)]
        if size == 1:
            return {e: samples[e.index] for e in outgoing[0]}
        incoming = [[e for e in trainer if e.rank == r and trainer[e] == me] for r in range(size)]
        flat = [flattened([samples[e.index] for e in part]) for part in outgoing]
        received = exchange(flat, [sum(e.length for e in part) * len(PER_TOKEN) for part in incoming], self.ranks)
        here = {}
        for part, numbers in zip(incoming, received, strict=True):
            pieces = numbers.split([e.length * len(PER_TOKEN) for e in part])
            here |= {e: unflattened(piece) for e, piece in zip(part, pieces, strict=True)}
        return here

    @torch.no_grad()
    def annotate(self, minibatches: list[Minibatch]) -> None:
        """Old logprobs, where a batch is used for more than one update (the first update's ratio is 1 by definition), and
        what the advantages still lack: the KL to the reference, and their scale over the whole batch."""
        a, batches = self.algorithm, [b for m in minibatches for b in m.batches]
        if a.is_rl and self.updates_per_step > 1:
            for batch in batches:
                batch.old_logprobs = self.policy(batch, self.temperature)[0]
        if self.reference is not None:
            self.reference.to(self.ranks.device)
            for batch in batches:
                with self.reference.adapter_disabled():
                    batch.ref_logprobs = self.reference(batch, self.temperature)[0]
                if a.kl_in != "loss":
                    batch.advantages = kl_penalised(a, batch)
            if self.reference is not self.policy:
                self.reference.to("cpu")
        if a.advantage == "batch_norm":
            values = [b.advantages.double() for b in batches]
            facts = [sum(v.sum().item() for v in values), sum(v.square().sum().item() for v in values)]
            facts = all_gather_json([*facts, sum(v.numel() for v in values)], self.ranks)
            total, squares, count = (sum(column) for column in zip(*facts, strict=True))
            for batch in batches if count else []:
                batch.advantages = normalised(batch.advantages, total, squares, count)

    @torch.no_grad()
    def evaluate(self, minibatches: list[Minibatch]) -> dict[str, Metric]:
        """The loss of samples that are not trained on."""
        metrics: dict[str, Metric] = {}
        for batch in (b for m in minibatches for b in m.batches):
            if self.algorithm.is_pairs:
                losses, found = self.losses(batch)
                add_metrics(metrics, found | {"loss": Mean(losses.sum().item(), losses.numel())})
            else:
                logprobs, _ = self.policy(batch, self.temperature)
                add_metrics(metrics, {"loss": Mean(-logprobs.sum().item(), logprobs.numel())})
        return metrics

    def step(self, minibatches: list[Minibatch], step: int) -> dict[str, Metric]:
        """One optimizer step per minibatch and epoch, until one's KL to the start of the step exceeds the target. A
        minibatch that carries no signal changes nothing."""
        metrics: dict[str, Metric] = {}
        for number in range(self.updates_per_step):
            minibatch = minibatches[number % len(minibatches)]
            lr = learning_rate(self.config.optim, step + number / self.updates_per_step, self.config.num_steps)
            is_done = False
            if minibatch.batches and minibatch.denominator:
                found, is_done = self.update(minibatch, lr)
                add_metrics(metrics, found)
            else:
                add_metrics(metrics, {"skipped_updates": Sum(1 / self.ranks.size)})
            if is_done:
                left_out = self.updates_per_step - number
                return metrics | {"kl_stopped_updates": Sum(left_out / self.ranks.size)}
        return metrics

    def update(self, minibatch: Minibatch, lr: float) -> tuple[dict[str, Metric], bool]:
        """The metrics, and whether the step ends here without this update, because the policy is too far from its start."""
        metrics: dict[str, Metric] = {}
        for batch in minibatch.batches:
            losses, found = self.losses(batch)
            loss = losses.sum() / minibatch.denominator
            # FSDP averages gradients over ranks; undo it, the loss is already a share of a global mean.
            (loss * self.ranks.size).backward()
            add_metrics(metrics, found | {"loss": Mean(loss.item(), 0)})
        metrics["loss"] = Mean(metrics["loss"].total, 1 / self.ranks.size)
        if self.exceeds_target(metrics):
            self.policy.zero_grad()
            return metrics, True
        grad_norm = self.clip_gradients()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.policy.zero_grad()
        add_metrics(metrics, {"grad_norm": Mean(grad_norm), "lr": Mean(lr), "updates": Sum(1 / self.ranks.size)})
        return metrics, False

    def losses(self, batch: PackedBatch) -> tuple[Tensor, dict[str, Metric]]:
        """What is to be made small, of each trained token or of each pair, and other facts about it."""
        outputs, entropy = self.policy(batch, self.temperature)
        if self.algorithm.is_pairs:
            result = pair_losses(self.algorithm.objective, batch, outputs, self.config.preference)
            return result.losses, pair_metrics(result)
        result = token_losses(self.algorithm, batch, outputs, entropy)
        return result.losses, self.measure(batch, outputs.detach(), entropy.detach(), result.is_clipped)

    def exceeds_target(self, metrics: dict[str, Metric]) -> bool:
        """Whether the mean KL(old || new) of the minibatch is above the target; the same on all ranks."""
        if not self.algorithm.target_kl:
            return False
        kl = metrics["step_kl_nats"]
        total, count = (sum(column) for column in zip(*all_gather_json([kl.total, kl.count], self.ranks), strict=True))
        return total > self.algorithm.target_kl * count

    def measure(self, batch: PackedBatch, logprobs: Tensor, entropy: Tensor, is_clipped: Tensor) -> dict[str, Metric]:
        n = logprobs.numel()
        metrics: dict[str, Metric] = {"entropy_nats": Mean(entropy.sum().item(), n)}
        if self.algorithm.is_rl:
            learner = logprobs if batch.old_logprobs is None else batch.old_logprobs
            mismatch = kl_k3(learner, batch.rollout_logprobs) if n else logprobs
            metrics |= {
                "clip_frac": Mean(is_clipped.sum().item(), n),
                "mismatch_kl_nats": Mean(mismatch.sum().item(), n),
                "mismatch_kl_nats_max": Max(mismatch.max().item() if n else 0.0),
            }
        for name, pair in {
            "step_kl_nats": (batch.old_logprobs, logprobs),
            "ref_kl_nats": (logprobs, batch.ref_logprobs),
        }.items():
            if all(x is not None for x in pair):
                metrics[name] = Mean(kl_k3(*pair).sum().item(), n)
        return metrics

    def clip_gradients(self) -> float:
        limit = self.config.optim.max_grad_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), limit)
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return named_weights(self.policy)


def entry_of(sample: TrainingSample, rank: int, index: int) -> Entry:
    prompt = sample.token_ids[: prompt_length(sample.loss_mask)]
    return Entry(
        group_id=sample.group_id,
        rank=rank,
        index=index,
        length=len(sample.token_ids),
        prompt_length=len(prompt),
        prompt=counter_seed(*prompt),
        num_trained=sum(sample.loss_mask),
        has_signal=any(sample.advantages),
    )


def flattened(samples: list[TrainingSample]) -> Tensor:
    """Every per-token array of every sample, end to end, as float64, which holds token ids exactly."""
    return torch.tensor([x for s in samples for name in PER_TOKEN for x in getattr(s, name)], dtype=torch.float64)


def unflattened(numbers: Tensor) -> TrainingSample:
    token_ids, loss_mask, rollout_logprobs, policy_versions, advantages = numbers.view(len(PER_TOKEN), -1).tolist()
    return TrainingSample(
        token_ids=list(map(int, token_ids)),
        loss_mask=list(map(int, loss_mask)),
        rollout_logprobs=rollout_logprobs,
        policy_versions=list(map(int, policy_versions)),
        advantages=advantages,
    )


def trimmed(sample: TrainingSample) -> TrainingSample:
    """Without what follows the last trained token."""
    keep = trained_span(sample.loss_mask) + 1
    if keep == len(sample.token_ids):
        return sample
    return dataclasses.replace(sample, **{name: getattr(sample, name)[:keep] for name in PER_TOKEN})


def to_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    if device.type == "cpu":
        return batch
    moved = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.name != "cu_seqlens"}
    moved = {name: value.to(device) for name, value in moved.items() if isinstance(value, Tensor)}
    return dataclasses.replace(batch, **moved)
