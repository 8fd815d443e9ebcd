"""The teachers of an actor: how they are made, and checks of them before a model loads."""

from __future__ import annotations

from itertools import zip_longest

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rl_core.config import Config
from rl_core.config.algorithm import SELF, is_url
from rl_core.data.pretrained import load_pretrained
from rl_core.errors import require
from rl_core.learning.kl import frozen_model
from rl_core.learning.learner_context import LearnerContext
from rl_core.learning.teachers.distill import (
    ActorTeacher,
    ExactTeacher,
    ModelTeacher,
    SampledTeacher,
    Teacher,
    TeacherRouter,
)
from rl_core.learning.teachers.self_distill import SelfTeacher


def make_teacher(context: LearnerContext) -> SampledTeacher:
    """The extension that learns from the teachers of an actor's environments. Each teacher is made
    once."""
    config, algorithm = context.config, context.algorithm
    by_name = config.envs_by_teacher
    teachers = []
    for name, envs in by_name.items():
        teacher = teacher_named(context, name)
        # A self-teacher reads the samples that have a teacher's prompt.
        if len(envs) < len(config.env_paths) and name != SELF:
            teacher = TeacherRouter(teacher, envs, context.ranks)
        teachers.append(teacher)
    if algorithm.teacher_loss == "sampled":
        return SampledTeacher(teachers, algorithm.teacher_coef)
    return ExactTeacher(teachers, algorithm)


def teacher_named(context: LearnerContext, name: str) -> Teacher:
    """The teacher `name`: a server, the policy itself, another trained actor, or a frozen model in
    the compute dtype, sharded like the policy and, on a GPU, CPU-offloaded while it is not used."""
    config = context.config
    if is_url(name):
        from rl_core.learning.teachers.teacher_server import ServerTeacher

        num_top, at_once = context.algorithm.teacher_top_k, config.rollout.max_concurrent
        # Half of --timeout_s, since the other ranks wait for this rank.
        return ServerTeacher(name, num_top, context.ranks, at_once, config.timeout_s / 2)
    if name == SELF:
        return SelfTeacher(context)
    temperature = config.sampling.temperature
    if name in config.trained:
        return ActorTeacher(context.learners, name, temperature)
    return ModelTeacher(frozen_model(context, config.model_path(name)), temperature)


def order_by_teacher(config: Config) -> list[str]:
    """Trained actors, each before its teachers, since a teacher has the weights from before the
    step. Raises ValueError for actors that teach each other."""
    teachers = {name: config.of(name).envs_by_teacher for name in config.trained}
    order: list[str] = []
    left = list(config.trained)
    while left:
        ready = [name for name in left if not any(name in teachers[other] for other in left)]
        if not ready:
            raise ValueError(
                f"--algo.teacher: of {', '.join(left)} each is taught by a trained actor that "
                "would be updated before it reads; give one of them a frozen teacher"
            )
        order += ready
        left = [name for name in left if name not in ready]
    return order


def check_teachers(config: Config, name: str) -> None:
    """Raises ValueError unless an actor's teachers and reference have the actor's tokenizer and are
    reachable."""
    order_by_teacher(config)
    path = config.model_path(name)
    if config.algo.reference:
        check_same_tokens(f"--algo.reference={config.algo.reference}", config.algo.reference, path)
    for teacher in config.envs_by_teacher:
        flag = f"--algo.teacher={teacher}"
        if is_url(teacher):
            require("httpx", flag, "api")
            from rl_core.learning.teachers.teacher_server import check_same_texts

            check_same_texts(teacher, load_pretrained(AutoTokenizer, path), path)
            continue
        if teacher == SELF:
            continue
        actor = config.actors.get(teacher)
        if actor is not None and actor.api:
            raise ValueError(
                f"{flag} is an actor behind an API, which returns only text; name its server if "
                "that supports prompt_logprobs: --algo.teacher http://host:port/v1"
            )
        check_same_tokens(flag, config.model_path(teacher), path)


def check_same_tokens(flag: str, path: str, own_path: str) -> None:
    """Raises ValueError unless both models have the same tokens."""
    first = load_pretrained(AutoTokenizer, own_path)
    second = load_pretrained(AutoTokenizer, path)
    pairs = zip_longest(tokens_by_id(first), tokens_by_id(second))
    for token_id, (token, other_token) in enumerate(pairs):
        if token != other_token:
            raise ValueError(
                f"{flag} has another tokenizer than {own_path}: token {token_id} is "
                f"{other_token!r} instead of {token!r}; take a model of the same family"
            )


def tokens_by_id(tokenizer: PreTrainedTokenizerBase) -> list[str | None]:
    ids = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    return [ids.get(token_id) for token_id in range(max(ids) + 1)]
