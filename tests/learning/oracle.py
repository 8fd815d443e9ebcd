"""The loss and the gradient that papers and flags define: plain autograd over whole logits in fp64, by
transformers, one sequence after the other. No function of the trainer is called here.

Old and rollout logprobs are formulas of the token, so that any layout of a batch has the same.
"""

from __future__ import annotations

import base64
import functools
import inspect
import io
import itertools
import math
from contextlib import contextmanager

import PIL.Image
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)
from transformers.models.auto.image_processing_auto import AutoImageProcessor

MAX_TOKENS = 60  # Flag of kit.make_learner().


def old_logprobs(ids, level: float = -4.6) -> Tensor:
    """Logprobs of tokens by the policy before the step's updates, near those of a random model."""
    return level + 0.5 * torch.sin(3 * torch.as_tensor(ids).double())


def rollout_logprobs(ids, level: float = -4.6) -> Tensor:
    return level + 0.5 * torch.sin(5 * torch.as_tensor(ids).double())


@functools.cache
def frozen(path: str, is_scoring: bool = False):
    """A model of transformers in fp64, in which experts are computed one after the other."""
    options = {"dtype": torch.float64, "experts_implementation": "eager"}
    if is_scoring:
        options = {"dtype": torch.float64, "num_labels": 1}
    kind = AutoModelForSequenceClassification if is_scoring else AutoModelForCausalLM
    config = AutoConfig.from_pretrained(path)
    if hasattr(config, "image_token_id"):
        options.pop("num_labels", None)
        kind = AutoModelForImageTextToText
    if config.model_type == "gemma2":  # The default of older transformers bounds no scores.
        options["attn_implementation"] = "eager"
    model = kind.from_pretrained(path, **options).eval()
    if is_scoring and not hasattr(model, "score"):
        # transformers has no classifier that sees: its model without a head, and the head.
        head = load_file(f"{path}/model.safetensors")["score.weight"]
        model.score = torch.nn.Linear(head.shape[1], 1, bias=False, dtype=torch.float64)
        model.score.weight.data.copy_(head)
    return model


class Policy:
    """A model with gradients. `routed`: (router logits, chosen experts) of each router in each
    forward."""

    def __init__(self, path: str, is_scoring: bool = False):
        self.hf = frozen(path, is_scoring)
        self.hf.zero_grad()
        kinds = ("TopKRouter", "TopkRouter")
        self.routers = [m for m in self.hf.modules() if type(m).__name__.endswith(kinds)]
        self.routed: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def experts(self, s):
        """Context of a forward with the recorded experts of a sample, weighted by Mixtral's
        formula."""

        def route(number: int, router, inputs, output):
            if s.experts is not None:
                chosen = torch.from_numpy(s.experts).long()[:, number]
                logits = inputs[0].reshape(-1, inputs[0].shape[-1]) @ router.weight.T
                weights = logits.softmax(-1).gather(1, chosen)
                output = logits, weights / weights.sum(-1, keepdim=True), chosen
            self.routed.append((output[0], output[2]))
            return output

        hooks = []
        for number, router in enumerate(self.routers):
            hooks.append(router.register_forward_hook(functools.partial(route, number)))
        yield
        for hook in hooks:
            hook.remove()

    def aux_loss(self) -> Tensor:
        """Switch Transformer (arXiv:2101.03961) eq. 4-6 over all layers: E sum_i f_i P_i."""
        logits, experts = (torch.cat(parts) for parts in zip(*self.routed, strict=True))
        counts = torch.nn.functional.one_hot(experts, logits.shape[1]).sum((0, 1))
        return logits.shape[1] * (counts / len(logits) * logits.softmax(-1).mean(0)).sum()

    def gradients(self) -> dict[str, Tensor]:
        named = self.hf.named_parameters()
        grads = {name: p.grad.clone() for name, p in named if p.grad is not None}
        self.hf.zero_grad()
        return grads


def inputs(hf, s, ids: Tensor) -> dict[str, Tensor]:
    """Arguments of transformers' forward, which computes positions itself. It has no reading of a
    placeholder without an image, which a model may sample: the model reads id 0 there."""
    placeholder = getattr(hf.config, "image_token_id", None)
    if placeholder is not None:
        ids = ids.masked_fill(ids == placeholder, 0)
    if not (ids < 0).any():
        return {"input_ids": ids}
    known = {image.key: image for image in s.images}
    keys = [key for key, _ in itertools.groupby((-ids[ids < 0]).tolist())]
    pictures = []
    for key in keys:
        data = base64.b64decode(known[key].url.partition(",")[2])
        pictures.append(PIL.Image.open(io.BytesIO(data)))
    processor = AutoImageProcessor.from_pretrained(hf.name_or_path, backend="pil")
    seen = processor(pictures, return_tensors="pt")
    parameters = inspect.signature(hf.forward).parameters
    arguments = seen.keys() & parameters
    is_image = ids < 0
    plain = ids.masked_fill(is_image, placeholder)
    types = "token_type_ids" if "token_type_ids" in parameters else "mm_token_type_ids"
    return {name: seen[name] for name in arguments} | {
        "input_ids": plain,
        types: is_image.int(),
    }


def distributions(hf, s, temperature: float, is_whole: bool = False) -> Tensor:
    """[m, V] log p of each trained token, over the ids that it was drawn from unless `is_whole`."""
    ids, mask = torch.from_numpy(s.token_ids), torch.from_numpy(s.loss_mask[1:])
    logits = hf(**inputs(hf, s, ids[None, :-1]), use_cache=False).logits[0][mask] / temperature
    if s.kept_ids is not None and not is_whole:
        kept = torch.full_like(logits, -torch.inf)
        for row, line in enumerate(s.kept_ids.tobytes().decode().splitlines()):
            kept[row, [int(number) for number in line.split()]] = 0.0
        logits = logits + kept
    return logits.log_softmax(-1)


def chosen(logp: Tensor, s) -> Tensor:
    return logp.gather(1, torch.from_numpy(s.token_ids[s.loss_mask])[:, None])[:, 0]


def logprobs(hf, s, temperature: float = 1.0) -> Tensor:
    """[m] of the trained tokens."""
    return chosen(distributions(hf, s, temperature), s)


def entropies(logp: Tensor) -> Tensor:
    return -torch.where(logp.isneginf(), 0.0, logp.exp() * logp.clamp(min=-1e9)).sum(-1)


def scores(hf, s) -> Tensor:
    """[m] the classifier's output at the token before each trained one."""
    arguments = inputs(hf, s, torch.from_numpy(s.token_ids[None, :-1]))
    hidden = hf.base_model(**arguments, use_cache=False).last_hidden_state[0]
    return hf.score(hidden)[:, 0][torch.from_numpy(s.loss_mask[1:])]


def kl(kind: str, d):
    return {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}[kind]


def gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A(t) = d(t) + gamma lam A(t+1) with d(t) = r(t) + gamma V(t+1) - V(t), from the last step
    back."""
    advantages, following, advantage = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * following - value + gamma * lam * advantage
        following = value
        advantages.append(advantage)
    return advantages[::-1]


def divergence(form: str, beta: float, logp: Tensor, logq: Tensor) -> Tensor:
    """[m] the papers' formulas of log p, the student's, and log q, the teacher's."""
    p, q = logp.exp(), logq.exp()
    if form == "reverse_kl":
        return (p * (logp - logq)).sum(-1)
    if form == "forward_kl":
        return (q * (logq - logp)).sum(-1)
    m = beta * q + (1 - beta) * p
    return (beta * q * (logq - m.log()) + (1 - beta) * p * (logp - m.log())).sum(-1)


class Oracle:
    """Reads the values of flags from a run's configuration `c` and its algorithm's fields `a`."""

    def __init__(self, c, a, level: float = -4.6):
        self.c, self.a, self.level = c, a, level
        self.model = c.actors["policy"].model
        self.policy = Policy(self.model, a.is_scoring)
        self.temperature = c.sampling.temperature if a.is_rl else 1.0
        self.critic = Policy(c.critic.model, is_scoring=True) if a.advantage == "gae" else None
        self.values: list[tuple[Tensor, Tensor]] = []  # (values, returns) of each sequence

    def penalties(self, target: str, rollout: Tensor, ref: Tensor | None) -> Tensor:
        """[m] coefficient times KL of the terms in `target`."""
        a, total = self.a, torch.zeros_like(rollout)
        of_target = [a.kl_reward if target == "reward" else None]
        of_target.append(a.kl_loss if target == "loss" else None)
        of_target.append((a.kl, a.kl_coef) if target == a.kl_in and a.kl_coef else None)
        for kind, coef in filter(None, of_target):
            total = total + coef * kl(kind, rollout - ref)
        return total

    def reference(self, s) -> Tensor:
        with torch.no_grad():
            hf = frozen(self.a.reference or self.model)
            return logprobs(hf, s, self.temperature)

    def teacher(self, s):
        """(path of the teacher's model, sample as the teacher reads it); None if it has none."""
        of_env = self.c.envs[s.env].teacher if s.env in self.c.envs else None
        path = of_env or self.a.teacher
        if path in (None, "none"):
            return None
        if path != "self":
            return path, s
        if s.teacher_ids is None:
            return None
        first, before = int(s.loss_mask.argmax()), len(s.teacher_ids)
        columns = {}
        for name in ("token_ids", "loss_mask", "rollout_logprobs", "advantages"):
            start = s.teacher_ids if name == "token_ids" else [0] * before
            columns[name] = [*start, *getattr(s, name)[first:]]
        columns["policy_versions"] = columns["loss_mask"]
        read = type(s)(**columns, kept_ids=s.kept_ids, images=s.images)
        return self.model, read

    def advantages(self, s, rollout: Tensor, ref: Tensor | None) -> Tensor:
        a = self.a
        advantages = torch.from_numpy(s.advantages[s.loss_mask]).double()
        penalty = self.penalties("reward", rollout, ref)
        if self.critic:
            rewards = -penalty
            rewards[-1] += advantages[-1]
            values, critic = scores(self.critic.hf, s), self.c.critic
            settings = critic.gamma, critic.gae_lambda
            advantages = torch.tensor(gae(rewards.tolist(), values.tolist(), *settings)).double()
            self.values.append((values, advantages + values.detach()))
        else:
            to_go = [penalty[t:].sum() for t in range(len(penalty))]
            advantages = advantages - torch.stack(to_go)
        advantages = advantages - self.penalties("advantage", rollout, ref)
        if a.teacher_loss == "sampled" and (taught := self.teacher(s)):
            path, read = taught
            with torch.no_grad():
                theirs = logprobs(frozen(path), read, self.temperature)
            advantages = advantages + a.teacher_coef * (theirs - rollout)
        return advantages

    def divergence(self, s, logp: Tensor) -> Tensor:
        """[m] from the teacher's distributions, over the vocabulary."""
        a, taught = self.a, self.teacher(s) if self.a.teacher_loss != "sampled" else None
        if not taught:
            return torch.zeros(len(logp)).double()
        with torch.no_grad():
            logq = distributions(frozen(taught[0]), taught[1], self.temperature, is_whole=True)
        if s.kept_ids is not None:
            logp = distributions(self.policy.hf, s, self.temperature, is_whole=True)
        return a.teacher_coef * divergence(a.teacher_loss, a.teacher_beta, logp, logq)

    def correction(self, log_c: Tensor) -> Tensor:
        """[m] weights of tokens whose probability is exp(log_c) that of the engine."""
        (low, high), kind = self.a.correction_range, self.a.importance_correction
        weights = []
        for value in log_c.tolist():
            c = math.exp(log_c.mean().item() if kind == "sequence_mask" else value)
            inside = float(low <= c <= high)
            each = {"none": 1.0, "tis": min(c, high), "mask": c * inside, "sequence_mask": inside}
            weights.append(each[kind])
        return torch.tensor(weights).double()

    def objective(self, new: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
        a = self.a
        ratio = torch.exp(new - old)
        if a.objective == "gspo":
            ratio = torch.exp((new - old).mean()).expand(len(new))
        low, high = 1 - a.clip_low, 1 + a.clip_high
        if a.objective == "cispo":
            return -ratio.detach().clamp(low, high) * advantages * new
        gain = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        if a.dual_clip:
            bounded = torch.maximum(gain, a.dual_clip * advantages)
            gain = torch.where(advantages < 0, bounded, gain)
        return -gain

    def token_losses(self, samples) -> tuple[list[Tensor], list[Tensor]]:
        """Losses of the tokens of each sample, and divergences from the teacher."""
        a, rows, divergences = self.a, [], []
        needs_reference = a.kl_coef or a.kl_reward or a.kl_loss
        for s in samples:
            ids = s.token_ids[s.loss_mask]
            with self.policy.experts(s):
                logp = distributions(self.policy.hf, s, self.temperature)
            rollout, ref = rollout_logprobs(ids, self.level), None
            if needs_reference:
                ref = self.reference(s)
            rows.append((chosen(logp, s), ids, rollout, ref, self.advantages(s, rollout, ref)))
            rows[-1] += (entropies(logp),)
            divergences.append(self.divergence(s, logp))
        every = torch.cat([row[4] for row in rows])
        losses = []
        for new, ids, rollout, ref, advantages, entropy in rows:
            if a.normalize == "batch":
                advantages = (advantages - every.mean()) / every.std(correction=0)
            if a.is_rl:
                old = old_logprobs(ids, self.level)
                loss = self.objective(new, old, advantages) * self.correction(old - rollout)
                loss = loss + self.penalties("loss", new, ref) - a.entropy_coef * entropy
            else:
                loss = -advantages * new
            losses.append(loss)
        return losses, divergences

    def mean(self, losses: list[Tensor]) -> Tensor:
        num, tokens = len(losses), sum(map(len, losses))
        divisors = {"token": tokens, "constant": MAX_TOKENS * num}
        total = 0.0
        for loss in losses:
            total = total + loss.sum() / divisors.get(self.a.aggregation, len(loss) * num)
        return total

    def pair_losses(self, samples) -> Tensor:
        """Bradley-Terry with a margin on last tokens; the papers' losses of sums or means of
        logprobs."""
        losses, kind, flags = [], self.a.objective, self.c.preference
        if kind == "kto":
            logratios = []
            for s in samples:
                logratio = logprobs(self.policy.hf, s).sum() - self.reference(s).sum()
                logratios.append(logratio)
            reached = torch.stack(logratios[1::2]).mean().detach().clamp(min=0)
            for s, logratio in zip(samples[::2], logratios[::2], strict=True):
                gain, weight = logratio - reached, flags.desirable_weight
                if s.advantages.min() < 0:
                    gain, weight = -gain, flags.undesirable_weight
                losses.append(weight * (1 - torch.sigmoid(flags.beta * gain)))
            return torch.stack(losses).mean()
        for one, other in zip(samples[::2], samples[1::2], strict=True):
            if self.a.is_scoring:
                won, lost = (scores(self.policy.hf, s)[-1] for s in (one, other))
                gap = won - lost - float(one.advantages.max())
            elif kind != "dpo":
                means = [logprobs(self.policy.hf, s).mean() for s in (one, other)]
                gap = flags.beta * (means[0] - means[1]) - flags.simpo_gamma
                if kind == "orpo":
                    odds = [mean.exp() / (1 - mean.exp()) for mean in means]
                    ratio = torch.nn.functional.logsigmoid((odds[0] / odds[1]).log())
                    losses.append(-means[0] - flags.beta * ratio)
                    continue
            else:
                won, lost = (
                    logprobs(self.policy.hf, s).sum() - self.reference(s).sum()
                    for s in (one, other)
                )
                gap = (flags.beta or 0.1) * (won - lost)
            losses.append(-torch.nn.functional.logsigmoid(gap))
        return torch.stack(losses).mean()

    def __call__(self, samples) -> tuple[float, dict[str, Tensor]]:
        """(the loss without those of extensions, gradients by the names of learner and weight)"""
        if self.a.is_pairs:
            loss = total = self.pair_losses(samples)
        else:
            losses, divergences = self.token_losses(samples)
            loss = self.mean(losses)
            total = loss + self.mean(divergences)
        if coef := self.c.actors["policy"].router_aux_loss_coef:
            total = total + coef * self.policy.aux_loss()
        total.backward()
        grads = {f"policy {name}": grad for name, grad in self.policy.gradients().items()}
        if self.critic:
            values, returns = (torch.cat(parts) for parts in zip(*self.values, strict=True))
            ((values - returns) ** 2 / 2).mean().backward()
            of_critic = self.critic.gradients().items()
            grads |= {f"policy_critic {name}": grad for name, grad in of_critic}
        return loss.item(), grads
