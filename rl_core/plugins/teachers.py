"""Which teachers an actor has: what they are made from, and what is wrong with them, told before a
model loads."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from transformers import AutoTokenizer

from rl_core.config import Config
from rl_core.data.pretrained import load_pretrained
from rl_core.learning.learner import LearnerContext
from rl_core.plugins.algorithm_rules import is_url
from rl_core.plugins.reference import frozen_model
from rl_core.plugins.self_distillation import SelfTeacher
from rl_core.plugins.teacher import (
    ActorTeacher,
    ExactTeacher,
    ModelTeacher,
    SampledTeacher,
    TeacherRouter,
)
from rl_core.plugins.teacher_prompts import SELF, envs_by_teacher
from rl_core.rules import require


def make_teacher(learner: LearnerContext) -> SampledTeacher:
    """What learns from the teachers of an actor's environments, each made once."""
    config, algorithm = learner.config, learner.algorithm
    by_name = envs_by_teacher(config)
    teachers = []
    for name, envs in by_name.items():
        teacher = make_reader(learner, name)
        # What the policy reads as its own teacher says which samples it reads.
        if len(envs) < len(config.env_paths) and name != SELF:
            teacher = TeacherRouter(teacher, envs, learner.ranks)
        teachers.append(teacher)
    if algorithm.teacher_loss == "sampled":
        return SampledTeacher(teachers, algorithm.teacher_coef)
    return ExactTeacher(teachers, algorithm)


def make_reader(learner: LearnerContext, name: str) -> Any:
    """The teacher of this name: a server; the policy itself; another actor that learns; else a copy
    of the weights in the dtype of compute, sharded as the policy is, and on a GPU CPU-offloaded
    while it is not used."""
    config = learner.config
    if is_url(name):
        from rl_core.plugins.teacher_server import ServerTeacher

        num_top, at_once = learner.algorithm.teacher_top_k, config.rollout.max_concurrent
        # Other ranks wait for this one's answers as long as for anything.
        return ServerTeacher(name, num_top, learner.ranks, at_once, config.timeout_s / 2)
    if name == SELF:
        return SelfTeacher(learner)
    temperature = config.sampling.temperature
    if name in config.trained:
        return ActorTeacher(learner.learners, name, temperature)
    return ModelTeacher(frozen_model(learner, teacher_path(config, name)), temperature)


def teacher_path(config: Config, name: str) -> str:
    """Of a folder, a hub name, or the model of an actor of the run."""
    actor = config.actors.get(name)
    return name if actor is None else actor.model


def pupils_first(config: Config) -> list[str]:
    """The actors that learn, each before those that teach it: a teacher is as it was when the step
    began. Raises ValueError for actors that teach each other."""
    teachers = {name: envs_by_teacher(config.of(name)) for name in config.trained}
    order: list[str] = []
    left = list(config.trained)
    while left:
        ready = [name for name in left if not any(name in teachers[pupil] for pupil in left)]
        if not ready:
            raise ValueError(
                f"--algo.teacher: of {', '.join(left)} each is taught by an actor that learns and "
                "would change before it reads; give one of them a frozen teacher"
            )
        order += ready
        left = [name for name in left if name not in ready]
    return order


def frozen_models(config: Config) -> dict[str, str]:
    """What it is -> path of the models that an actor is compared with and that are loaded beside
    its own."""
    paths = {}
    if config.algo.reference:
        paths["reference"] = config.algo.reference
    for name, envs in envs_by_teacher(config).items():
        if not is_url(name) and name not in (SELF, *config.trained):
            is_of_all = len(envs) == len(config.env_paths)
            what = "teacher" if is_of_all else f"teacher of {', '.join(envs)}"
            paths[what] = teacher_path(config, name)
    return paths


def check_teachers(config: Config, name: str) -> None:
    """Raises ValueError unless an actor's teachers and reference read the actor's tokens, and can
    be asked."""
    pupils_first(config)
    path = config.actors[name].model
    if config.algo.reference:
        check_same_tokens(f"--algo.reference={config.algo.reference}", config.algo.reference, path)
    for teacher in envs_by_teacher(config):
        flag = f"--algo.teacher={teacher}"
        if is_url(teacher):
            require("httpx", flag, "api")
            from rl_core.plugins.teacher_server import check_same_texts

            check_same_texts(teacher, load_pretrained(AutoTokenizer, path), path)
            continue
        if teacher == SELF:
            continue
        actor = config.actors.get(teacher)
        if actor is not None and actor.api:
            raise ValueError(
                f"{flag} is an actor behind an api, of which only texts are known; name its server "
                "if that gives prompt_logprobs: --algo.teacher http://host:port/v1"
            )
        check_same_tokens(flag, teacher_path(config, teacher), path)


def check_same_tokens(flag: str, path: str, own_path: str) -> None:
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
