"""On-policy distillation: a frozen teacher judges each token that the student sampled
(arXiv:2306.13649; https://thinkingmachines.ai/blog/on-policy-distillation)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from rl_core.algorithms import Algorithm
from rl_core.config import Config
from rl_core.data.pretrained import load_pretrained
from rl_core.distributed import unsharded
from rl_core.learning.learner import LearnerPart, PartSpec, mean_of
from rl_core.learning.logprobs import head_factors
from rl_core.learning.minibatches import Minibatch
from rl_core.learning.policy import PackedForward, Policy
from rl_core.metrics import Metric, add_metrics
from rl_core.plugins.divergence import (
    Factors,
    Form,
    WholeVocabulary,
    fused_divergence,
    make_form,
)
from rl_core.plugins.reference import frozen_model
from rl_core.types import PackedBatch, RunError


@dataclass(kw_only=True, slots=True)
class Reading:
    """What a teacher makes of the trained tokens of a batch, this rank's m of them with --cp."""

    logprobs: Tensor  # [M] nats
    # Of the teacher's head, on the CPU where the policy is on a GPU: hidden states [m, D], weight
    # [V, D], temperature, cap. None: not asked for.
    factors: Factors | None = None


class ModelTeacher:
    """A frozen model that reads batches. What else can be asked so may be a teacher too."""

    def __init__(self, policy: Policy, temperature: float):
        self.policy, self.temperature = policy, temperature
        self.models = (policy,)
        self.weight_VD: Tensor | None = None  # of the head, unsharded

    def on_device(self) -> AbstractContextManager:
        return self.policy.on_device()

    def read(self, batch: PackedBatch, is_exact: bool = False) -> Reading:
        """`is_exact`: with what whole distributions are computed from. Every rank must call it,
        inside on_device(). Raises RunError for a model whose head is not a product."""
        view = HeadInputs(self.policy)

        def forward(policy: Policy, *batch: Any) -> tuple[Tensor, ...]:
            return policy.forward_pass(view, *batch)

        logprobs = self.policy(batch, self.temperature, "", forward if is_exact else None)[0]
        if not is_exact:
            return Reading(logprobs=logprobs)
        check_factors(view)
        hidden_MD, weight_VD, *how = view.factors
        if self.weight_VD is None:
            # FSDP frees what it gathered.
            whole = unsharded(weight_VD.detach())
            self.weight_VD = whole.clone().cpu() if self.policy.is_sharded else whole.cpu()
        return Reading(logprobs=logprobs, factors=(hidden_MD.detach().cpu(), self.weight_VD, *how))


class HeadInputs:
    """A policy that keeps what its head multiplies."""

    def __init__(self, policy: Policy):
        self.policy, self.hf = policy, policy.hf
        self.hidden_states, self.activations = policy.hidden_states, policy.activations
        self.factors: Factors | None = None

    def outputs(self, hidden_MD: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, ...]:
        self.factors = head_factors(self.hf, hidden_MD, temperature)
        return self.policy.outputs(hidden_MD, labels, temperature)


class Compared(HeadInputs):
    """A policy with a third output: [m] the divergence of trained tokens from what a teacher
    read."""

    def __init__(self, policy: Policy, reading: Reading, form: Form):
        super().__init__(policy)
        self.reading, self.form = reading, form

    def outputs(self, hidden_MD: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, ...]:
        logprobs, entropy = super().outputs(hidden_MD, labels, temperature)
        hidden_MD, weight_VD, *how = self.factors
        weight_SD, first, split = own_rows(weight_VD)
        theirs_MD, theirs_VD, *their_how = self.reading.factors
        num_ids = min(len(weight_VD), len(theirs_VD)) - first
        num_ids = max(0, min(num_ids, len(weight_SD)))
        theirs_SD = theirs_VD[first : first + num_ids]
        device = hidden_MD.device
        target = WholeVocabulary(
            (theirs_MD.to(device), theirs_SD.to(device), *their_how), self.form
        )
        divergence = fused_divergence((hidden_MD, weight_SD, *how), target, num_ids, split)
        return logprobs, entropy, divergence


class ComparedForward(PackedForward):
    """The policy's own forward, with the divergence from what a teacher read of the batch."""

    def __init__(self, form: Form):
        self.form = form
        self.divergence: Tensor | None = None  # [M] of the last forward

    def __call__(
        self, policy: Policy, batch: PackedBatch, temperature: float
    ) -> tuple[Tensor, ...]:
        self.divergence = None
        if batch.teacher is None:  # it has not read yet
            return policy.forward_pass(policy, batch, temperature)
        view = Compared(policy, batch.teacher, self.form)
        outputs = policy.forward_pass(view, batch, temperature)
        check_factors(view)
        # FSDP gathers weights for the backward of what a forward returns.
        self.divergence = outputs[2]
        return outputs


class SampledTeacher(LearnerPart):
    """Adds coef * (log p_teacher - log p_student) of each sampled token to its advantage: the
    gradient is that of -coef * KL(student || teacher) of single tokens."""

    is_exact = False

    def __init__(self, teacher: ModelTeacher, coef: float):
        self.teacher, self.coef = teacher, coef
        self.models = teacher.models

    def annotate(self, batches: list[PackedBatch]) -> dict[str, Metric]:
        metrics: dict[str, Metric] = {}
        with self.teacher.on_device():
            for batch in batches:
                reading = self.teacher.read(batch, self.is_exact)
                kl = batch.rollout_logprobs - reading.logprobs
                self.learn_from(batch, reading, kl)
                add_metrics(metrics, {"teacher_kl_nats": mean_of(kl)})
        return metrics

    def learn_from(self, batch: PackedBatch, reading: Reading, kl: Tensor) -> None:
        batch.advantages = batch.advantages - self.coef * kl


class ExactTeacher(SampledTeacher):
    """Adds coef * the divergence of the distributions of each trained token to the loss, averaged
    as the loss is."""

    is_exact = True

    def __init__(self, teacher: ModelTeacher, algorithm: Algorithm):
        super().__init__(teacher, algorithm.teacher_coef)
        self.algorithm = algorithm
        form = make_form(algorithm.teacher_loss, algorithm.teacher_beta)
        self.forward_pass = ComparedForward(form)
        self.denominator = 1
        self.found: dict[str, Metric] = {}

    def learn_from(self, batch: PackedBatch, reading: Reading, kl: Tensor) -> None:
        batch.teacher = reading

    def before_update(self, learner: Any, minibatch: Minibatch, step: float) -> dict[str, Metric]:
        self.denominator = minibatch.denominator
        return {}

    def loss(self) -> Tensor:
        divergence = self.forward_pass.divergence
        add_metrics(self.found, {"teacher_loss_nats": mean_of(divergence)})
        return self.coef * divergence.sum() / self.denominator

    def metrics(self) -> dict[str, Metric]:
        found, self.found = self.found, {}
        return found


def check_factors(view: HeadInputs) -> None:
    if view.factors is None:
        raise RunError(
            f"--algo.teacher_loss: {view.hf.name_or_path} has a head of its own, whose logits "
            "cannot be compared in tiles; take sampled"
        )


def own_rows(weight_VD: Tensor) -> tuple[Tensor, int, Any]:
    """(the rows of a head's weight that are on this rank, the first one's id, what merges)."""
    if not isinstance(weight_VD, DTensor):
        return weight_VD, 0, None
    from rl_core.plugins.tensor_parallel import own_slice

    return own_slice(weight_VD)


def make_teacher(learner: PartSpec) -> SampledTeacher:
    """A copy of the teacher's weights in the dtype of compute, sharded as the policy is, and on a
    GPU CPU-offloaded while it is not used."""
    config, algorithm = learner.config, learner.algorithm
    model = frozen_model(learner, teacher_path(config))
    teacher = ModelTeacher(model, config.sampling.temperature)
    if algorithm.teacher_loss == "sampled":
        return SampledTeacher(teacher, algorithm.teacher_coef)
    return ExactTeacher(teacher, algorithm)


def teacher_path(config: Config) -> str:
    """Of a folder, a hub name, or the model of a frozen actor of the run. Raises ValueError for an
    actor that learns, or that is behind a URL."""
    name = config.algo.teacher
    actor = config.actors.get(name)
    if actor is None:
        return name
    if actor.api or actor.is_trained:
        raise ValueError(
            f"--algo.teacher={name} is an actor that learns or has an api; name a folder, a hub "
            "name, or an actor that is frozen here"
        )
    return actor.model


def judges(config: Config) -> dict[str, str]:
    """Flag -> path of the models that an actor is compared with, but for its own."""
    paths = {}
    if config.algo.reference:
        paths["reference"] = config.algo.reference
    if config.algo.teacher:
        paths["teacher"] = teacher_path(config)
    return paths


def check_tokens(config: Config, name: str) -> None:
    """Raises ValueError unless an actor's teacher and reference read the actor's tokens."""
    for flag, path in judges(config).items():
        check_same_tokens(f"--algo.{flag}={path}", path, config.actors[name].model)


def check_same_tokens(flag: str, path: str, own_path: str) -> None:
    from transformers import AutoTokenizer

    own = load_pretrained(AutoTokenizer, own_path)
    other = load_pretrained(AutoTokenizer, path)
    pairs = zip_longest(tokens_by_id(own), tokens_by_id(other))
    for token_id, (token, other_token) in enumerate(pairs):
        if token != other_token:
            raise ValueError(
                f"{flag} has another tokenizer than {own_path}: token {token_id} is "
                f"{other_token!r} instead of {token!r}; take a model of the same family"
            )


def tokens_by_id(tokenizer: Any) -> list[str | None]:
    ids = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    return [ids.get(token_id) for token_id in range(max(ids) + 1)]
