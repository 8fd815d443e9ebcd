"""On-policy distillation: a frozen teacher judges each token that the student sampled
(arXiv:2306.13649; https://thinkingmachines.ai/blog/on-policy-distillation)."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from rl_core.config import Config
from rl_core.data.pretrained import load_pretrained
from rl_core.learning.learner import LearnerPart, PartSpec, mean_of
from rl_core.learning.policy import Policy
from rl_core.metrics import Metric, add_metrics
from rl_core.plugins.reference import frozen_model
from rl_core.types import PackedBatch


class Teacher(LearnerPart):
    """Adds coef * (log p_teacher - log p_student) of each sampled token to its advantage: the
    gradient is that of -coef * KL(student || teacher) of single tokens."""

    def __init__(self, policy: Policy, temperature: float, coef: float):
        self.policy, self.temperature, self.coef = policy, temperature, coef
        self.models = (policy,)

    def annotate(self, batches: list[PackedBatch]) -> dict[str, Metric]:
        metrics: dict[str, Metric] = {}
        with self.policy.on_device():
            for batch in batches:
                logprobs = self.policy(batch, self.temperature)[0]
                kl = batch.rollout_logprobs - logprobs
                batch.advantages = batch.advantages - self.coef * kl
                add_metrics(metrics, {"teacher_kl_nats": mean_of(kl)})
        return metrics


def make_teacher(learner: PartSpec) -> Teacher:
    """A copy of the teacher's weights in the dtype of compute, sharded as the policy is, and on a
    GPU CPU-offloaded while it is not used."""
    config, algorithm = learner.config, learner.algorithm
    model = frozen_model(learner, teacher_path(config))
    return Teacher(model, config.sampling.temperature, algorithm.teacher_coef)


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
