"""Checks of a model against options: experts, adapters, critics, teachers and references."""

from __future__ import annotations

from transformers import PretrainedConfig

from rl_core.config import Config, LoraConfig
from rl_core.config.learner import PARTS
from rl_core.errors import split
from rl_core.run.plan.model_configs import check_kernels, check_positions, read_config


def check_model_options(config: Config, name: str, model_config: PretrainedConfig) -> None:
    """Raises ValueError if the model does not support experts' flags, adapters, a critic, a teacher
    or a reference that were asked for."""
    actor, settings = config.actors[name], config.of(name)
    if actor.router_replay:
        from rl_core.learning.router_replay import check_replay

        check_replay(config, name)
    if actor.router_aux_loss_coef or actor.router_replay:
        from rl_core.learning.moe import check_experts

        check_experts(config, name, model_config)
    if not actor.is_trained:
        return
    if settings.learner.train is not None:
        check_trained_parts(config, name, model_config)
    if actor.lora.rank:
        from rl_core.learning.lora import LANGUAGE, check_lora

        parts = split(settings.learner.train) or LANGUAGE
        check_lora(actor.lora, model_config, parts)
    if config.ep != 1:
        from rl_core.models.parallel.expert_parallel import check_expert_parallel

        check_expert_parallel(config.ep, model_config, actor.lora)
    if critic_model := settings.critic.model:
        num_rows = model_config.get_text_config().vocab_size
        num_values = read_other(config, critic_model).get_text_config().vocab_size
        if num_values != num_rows:
            raise ValueError(
                f"--critic.model={critic_model} has a vocabulary of {num_values} tokens, "
                f"that of {name} has {num_rows}: a critic reads the actor's tokens; take a model "
                "of the same family"
            )
    if settings.algo.teacher or settings.algo.reference:
        from rl_core.learning.teachers.build_teacher import check_teachers

        for path in settings.frozen_models.values():
            read_other(config, path)
        check_teachers(settings, name)


def check_trained_parts(config: Config, name: str, model_config: PretrainedConfig) -> None:
    """Raises ValueError if --learner.train names parts that the model lacks or cannot train."""
    actor, train = config.actors[name], config.of(name).learner.train
    flag, names = f"--learner.train={train}", split(train)
    if not names or not set(names) <= {*PARTS}:
        raise ValueError(f"{flag}: name some of {','.join(PARTS)}")
    if not hasattr(model_config, "vision_config"):
        raise ValueError(f"{flag}: model {actor.model} reads text alone; leave it out")
    # Engines apply the adapter of a request by its row, and the vision tower has no rows.
    if (actor.lora_base or config.sharers(name)) and names != ["language"]:
        raise ValueError(
            f"{flag}: adapters of actors that share a model are in its language model; take "
            "--learner.train language, or give each actor its own --actors.NAME.model"
        )


def read_other(config: Config, path: str) -> PretrainedConfig:
    """The config.json of a model that also computes an actor's episodes, such as a reference.
    Raises ValueError if the model cannot."""
    model_config = read_config(path)
    check_positions(config, path, model_config)
    check_kernels(config, model_config, LoraConfig())
    if config.ep != 1:
        from rl_core.models.parallel.expert_parallel import check_expert_parallel, ep_plan

        if ep_plan(model_config):
            try:
                check_expert_parallel(config.ep, model_config)
            except ValueError as error:
                raise ValueError(f"model {path}: {error}") from None
    return model_config
