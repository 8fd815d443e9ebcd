"""One trainable model: samples -> microbatches -> loss -> optimizer step. Every algorithm learns here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rl_core.config import Config
from rl_core.data.packing import (
    Entry,
    PackBudget,
    make_entry,
    pack_samples,
    plan_minibatches,
    shard_sequences,
    trimmed,
)
from rl_core.distributed import Ranks, all_gather_json, exchange, local, whole
from rl_core.learning.algorithms import (
    Algorithm,
    gae_advantages,
    kl_k3,
    kl_penalised,
    loss_denominator,
    normalised,
    sums_to_go,
    token_losses,
    token_rewards,
)
from rl_core.learning.critic import value_losses, value_metrics, value_sums
from rl_core.learning.model import Policy, SharedPolicy, named_weights, reads_in_place
from rl_core.learning.nonfinite import NonfiniteUpdates
from rl_core.learning.offload import Offload
from rl_core.learning.optim import learning_rate, make_optimizer
from rl_core.learning.preference import pair_losses, pair_metrics
from rl_core.learning.tensor_parallel import sum_partial_gradients
from rl_core.metrics import Max, Mean, Metric, Sum, add_metrics, count_once
from rl_core.types import PER_TOKEN, PackedBatch, SequenceShard, TrainingSample

TAIL_NATS = 0.5  # a token beyond it counts for mismatch_tail_frac


@dataclass(kw_only=True, slots=True)
class Minibatch:
    """This rank's share of the samples of one optimizer step."""

    denominator: int  # of the sum of losses over all ranks
    num_tokens: int  # that are trained, on all ranks
    batches: list[PackedBatch] = field(default_factory=list)  # as many on every rank


class Learner:
    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        policy: Policy,
        ranks: Ranks,
        reference: Policy | None = None,
        critic: Learner | None = None,
        name: str = "policy",
    ):
        self.config, self.algorithm, self.policy, self.ranks = config, algorithm, policy, ranks
        self.reference = reference  # frozen, on the host while it is not used; or the policy, without its adapters
        self.critic = critic  # trained beside the policy
        self.temperature = config.sampling.temperature if algorithm.is_rl else 1.0
        self.optimizer = make_optimizer(policy, config.optim)
        self.updates_per_step = config.learner.minibatches * config.learner.epochs
        mesh = ranks.mesh
        tokens = config.learner.microbatch_tokens * mesh.cp
        self.budget = PackBudget(max_tokens=tokens, num_ranks=mesh.dp, cp=mesh.cp, pair_work=pair_work(policy.hf))
        self.nonfinite = NonfiniteUpdates(ranks)
        learners = self.trained("").values() if config.learner.offload == "phase" else ()
        shared = policy.offload if isinstance(policy, SharedPolicy) else None
        models = [learner.policy for learner in learners if not reads_in_place(learner.policy)]
        models = [model for model in models if not isinstance(model, SharedPolicy)]
        self.offload = Offload(models, [learner.optimizer for learner in learners], ranks.device, shared)

    def shard(self, samples: list[TrainingSample]) -> tuple[list[Minibatch], dict[str, Metric]]:
        """Every rank's samples -> balanced minibatches, each sample moved at most once, from the rank that has it to the
        ranks that train on it. Every rank must call it; the plan is computed alike on all of them."""
        me, dp, cp, config = self.ranks.dp_rank, self.ranks.mesh.dp, self.ranks.mesh.cp, self.config.learner
        samples = [trimmed(s) for s in samples]
        facts = [make_entry(s, self.ranks.rank, i) for i, s in enumerate(samples)]
        entries = [Entry(*fact) for part in all_gather_json(facts, self.ranks) for fact in part]
        skip, is_pairs = self.algorithm.skips_zero_advantages, self.algorithm.is_pairs
        plans = plan_minibatches(entries, config.minibatches, self.budget, skip, is_pairs)
        trainer = {plan.entries[i]: b % dp for plan in plans for b, part in enumerate(plan.bins) for i in part}
        here = self.move(samples, trainer)
        minibatches, metrics = [], {}
        for plan in plans:
            mine = [[here[plan.entries[i]] for i in part] for part in plan.bins[me::dp]]
            batches = [pack_samples(part, cp) for part in mine]
            if cp > 1:
                batches = [shard_sequences(b, cp, self.ranks.cp_rank) for b in batches]
            batches = [to_device(b, self.ranks.device) for b in batches]
            longest = self.config.max_tokens * self.config.turn_limit
            denominator = loss_denominator(self.algorithm.aggregation, plan.num_tokens, plan.num_sequences, longest)
            minibatches.append(Minibatch(denominator=denominator, num_tokens=plan.num_tokens, batches=batches))
            fullest = max(plan.bin_work, default=0) * len(plan.bin_work)  # bins run in step across the ranks
            share = dp / self.ranks.size  # of what the ranks compute together
            packing = {
                "fill_frac": Mean(sum(plan.bin_work), fullest),
                "microbatches": Sum(len(mine) * share),
                "tokens": Sum(sum(len(s.token_ids) for part in mine for s in part) * share),
                "computed_tokens": Sum(sum(plan.bin_tokens[me::dp]) * share),
            }
            add_metrics(metrics, packing, prefix="pack/")
        return minibatches, metrics

    def move(self, samples: list[TrainingSample], trainer: dict[Entry, int]) -> dict[Entry, TrainingSample]:
        """The samples that this rank trains on. `trainer` says which data parallel rank does."""
        me, size, dp_rank_of = self.ranks.rank, self.ranks.size, self.ranks.dp_rank_of
        outgoing = [[e for e in trainer if e.rank == me and trainer[e] == dp_rank_of(r)] for r in range(size)]
        if size == 1:
            return {e: samples[e.index] for e in outgoing[0]}
        incoming = [[e for e in trainer if e.rank == r and trainer[e] == dp_rank_of(me)] for r in range(size)]
        flat = [flattened([samples[e.index] for e in part]) for part in outgoing]
        received = exchange(flat, [sum(e.length for e in part) * len(PER_TOKEN) for part in incoming], self.ranks)
        here = {}
        for part, numbers in zip(incoming, received, strict=True):
            pieces = numbers.split([e.length * len(PER_TOKEN) for e in part])
            here |= {e: unflattened(piece) for e, piece in zip(part, pieces, strict=True)}
        return here

    @torch.no_grad()
    def annotate(self, minibatches: list[Minibatch]) -> dict[str, Metric]:
        """Old logprobs, where a batch is used for more than one update (the first update's ratio is 1 by definition), and
        what the advantages still lack: the KL to the reference, what a critic expects, their scale over the whole batch.
        Gives the metrics of the critic."""
        a, batches = self.algorithm, [b for m in minibatches for b in m.batches]
        metrics: dict[str, Metric] = {}
        if a.is_rl and self.updates_per_step > 1:
            for batch in batches:
                batch.old_logprobs = self.policy(batch, self.temperature)[0]
        if self.reference is not None:
            if self.reference is not self.policy:
                self.reference.to(self.ranks.device)
            for batch in batches:
                with self.reference.adapter_disabled():
                    batch.ref_logprobs = self.reference(batch, self.temperature)[0]
            if self.reference is not self.policy:
                self.reference.to("cpu")
        if self.critic is not None:
            sums = [self.ask_critic(batch) for batch in batches]
            metrics = value_metrics(self.global_sums(sums, 5))
        for batch in batches:
            if batch.ref_logprobs is not None and (
                a.kl_in == "advantage" or (a.kl_in == "reward" and not a.has_critic)
            ):
                batch.advantages = kl_penalised(a, batch)
        if a.normalize == "batch":
            values = [b.advantages.double() for b in batches]
            sums = [[v.sum().item(), v.square().sum().item(), v.numel()] for v in values]
            total, squares, count = self.global_sums(sums, 3)
            for batch in batches if count else []:
                batch.advantages = normalised(batch.advantages, total, squares, count)
        return metrics

    def ask_critic(self, batch: PackedBatch) -> list[float]:
        """Turns a batch's rewards into advantages over what the critic expects, and gives sums for value_metrics()."""
        config, rewards = self.config.critic, token_rewards(self.algorithm, batch)
        batch.values = self.critic.policy(batch, 1.0)[0]
        batch.advantages = gae_advantages(rewards, batch.values, batch.sequences, config.gamma, config.gae_lambda)
        batch.returns = batch.advantages + batch.values
        return value_sums(batch.values, sums_to_go(rewards, batch.sequences, config.gamma))

    def global_sums(self, rows: list[list[float]], num: int) -> list[float]:
        """Of each of `num` columns, over the rows of all ranks."""
        local = [sum(column) for column in zip(*rows, strict=True)] or [0.0] * num
        return [sum(column) for column in zip(*all_gather_json(local, self.ranks), strict=True)]

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
                add_metrics(metrics, {"loss": Mean(-(batch.advantages * logprobs).sum().item(), logprobs.numel())})
        return metrics

    def step(self, minibatches: list[Minibatch], step: int) -> dict[str, Metric]:
        """One optimizer step per minibatch and epoch, until one's KL to the start of the step exceeds the target. A
        minibatch that carries no signal changes nothing."""
        metrics: dict[str, Metric] = {}
        for number in range(self.updates_per_step):
            minibatch = minibatches[number % len(minibatches)]
            at, name = step + number / self.updates_per_step, f"step {step + 1}, update {number}"
            is_done, has_work = False, bool(minibatch.batches and minibatch.denominator)
            if self.critic is not None and has_work:
                lr = learning_rate(self.critic.config.optim, at, self.config.num_steps)
                of_tokens = dataclasses.replace(minibatch, denominator=minibatch.num_tokens)
                add_metrics(metrics, self.critic.update(of_tokens, lr, f"{name} of the critic")[0], prefix="critic_")
            if has_work and (self.critic is None or step >= self.config.critic.warmup_steps):
                lr = learning_rate(self.config.optim, at, self.config.num_steps)
                found, is_done = self.update(minibatch, lr, name)
                add_metrics(metrics, found)
            else:
                add_metrics(metrics, {"skipped_updates": count_once(self.ranks)})
            if is_done:
                left_out = self.updates_per_step - number
                return metrics | {"kl_stopped_updates": Sum(left_out / self.ranks.size)}
        return metrics

    def update(self, minibatch: Minibatch, lr: float, name: str = "update") -> tuple[dict[str, Metric], bool]:
        """The metrics, and whether the step ends here without this update, because the policy is too far from its start. An
        update whose loss or gradient is not finite changes nothing."""
        metrics: dict[str, Metric] = {}
        for batch in minibatch.batches:
            losses, found = self.losses(batch)
            loss = losses.sum() / minibatch.denominator
            # An infinite loss may have a finite gradient. Times NaN it has not, on every rank once they are reduced.
            one = 1 + (loss - loss).detach()
            # FSDP averages gradients over ranks; undo it, the loss is already a share of a global mean.
            (loss * one * (self.ranks.size / self.ranks.mesh.tp)).backward()
            add_metrics(metrics, found | {"loss": Mean(loss.item(), 0)})
        metrics["loss"] = Mean(metrics["loss"].total, 1 / self.ranks.mesh.dp)
        if self.exceeds_target(metrics):
            self.policy.zero_grad()
            return metrics, True
        grad_norm = self.clip_gradients()
        if not math.isfinite(grad_norm):
            self.policy.zero_grad()
            return self.nonfinite.skip(name, minibatch.batches, metrics["loss"].total, grad_norm), False
        self.nonfinite.in_a_row = 0
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.policy.zero_grad()
        add_metrics(metrics, {"grad_norm": Mean(grad_norm), "lr": Mean(lr), "updates": count_once(self.ranks)})
        return metrics, False

    def losses(self, batch: PackedBatch) -> tuple[Tensor, dict[str, Metric]]:
        """What is to be made small, of each trained token or of each pair, and other facts about it."""
        outputs, entropy = self.policy(batch, self.temperature)
        if self.algorithm.objective == "value":
            losses, is_clipped = value_losses(outputs, batch.values, batch.returns, self.config.critic.value_clip)
            return losses, {"clip_frac": Mean(is_clipped.sum().item(), losses.numel())}
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
        total, count = self.global_sums([[kl.total, kl.count]], 2)
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
                "mismatch_tail_frac": Mean(((learner - batch.rollout_logprobs).abs() > TAIL_NATS).sum().item(), n),
            }
        for name, pair in {
            "step_kl_nats": (batch.old_logprobs, logprobs),
            "ref_kl_nats": (logprobs, batch.ref_logprobs),
        }.items():
            if all(x is not None for x in pair):
                metrics[name] = Mean(kl_k3(*pair).sum().item(), n)
        return metrics

    def clip_gradients(self) -> float:
        """The norm before it is bounded, over all ranks."""
        if self.ranks.mesh.tp > 1:
            sum_partial_gradients(self.policy.hf, self.ranks.weights_mesh["tp"])
        by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}  # torch takes the norm of tensors on one mesh
        for grad in (p.grad for p in self.policy.parameters() if p.grad is not None):
            by_mesh.setdefault(getattr(grad, "device_mesh", None), []).append(grad)
        norms = [whole(torch.nn.utils.get_total_norm(grads)) for grads in by_mesh.values()]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if limit := self.config.optim.max_grad_norm:
            scale = (limit / (norm + 1e-6)).clamp(max=1.0)
            for grads in by_mesh.values():
                torch._foreach_mul_([local(g) for g in grads], scale)
        return norm.item()

    def on_device(self):
        """A context in which weights, gradients and optimizer state are on the device; outside they wait on the host, if
        --learner.offload says so. Weights that an engine reads in place stay."""
        return self.offload.on_device()

    def trained(self, name: str) -> dict[str, Learner]:
        """All that learns here, by the names that a checkpoint gives it."""
        return {name: self} | ({} if self.critic is None else {f"{name}_critic": self.critic})

    def models(self) -> list[Policy]:
        """All that it holds, each once."""
        held = [self.policy, self.reference, *(self.critic.models() if self.critic else ())]
        return list({id(model): model for model in held if model is not None}.values())

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return named_weights(self.policy)


def pair_work(hf: nn.Module) -> float:
    """What it costs a token to see one other in attention, as a share of the token's matrix products."""
    text = hf.config.get_text_config()
    width = text.num_attention_heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    return 2 * width * text.num_hidden_layers / sum(p.numel() for p in hf.parameters())


def flattened(samples: list[TrainingSample]) -> Tensor:
    """Every per-token array of every sample, end to end, as float64, which holds token ids exactly."""
    arrays = [getattr(s, name) for s in samples for name in PER_TOKEN]
    return torch.from_numpy(np.concatenate(arrays, dtype=np.float64) if arrays else np.zeros(0))


def unflattened(numbers: Tensor) -> TrainingSample:
    return TrainingSample(**dict(zip(PER_TOKEN, numbers.view(len(PER_TOKEN), -1).numpy(), strict=True)))


def to_device(batch: PackedBatch | SequenceShard, device: torch.device) -> PackedBatch | SequenceShard:
    if device.type == "cpu":
        return batch
    moved = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.name != "cu_seqlens"}
    moved = {name: value.to(device) for name, value in moved.items() if isinstance(value, Tensor)}
    if isinstance(batch, PackedBatch) and batch.shard is not None:
        moved["shard"] = to_device(batch.shard, device)
    return dataclasses.replace(batch, **moved)
