"""Checks of an actor's model against the flags, before it loads; and its chat template."""

from __future__ import annotations

from pathlib import Path

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from rl_core.config import ActorConfig, AlgoConfig, Config, CriticConfig, LoraConfig
from rl_core.config.learner import PARTS
from rl_core.data.chat import Chat, ToolReader, load_chat
from rl_core.errors import split
from rl_core.models.loading import load_model_config, max_positions


def checked_chat(config: Config, name: str) -> Chat:
    """The chat template of an actor with a local model. Raises ValueError if the model does not
    support the flags."""
    actor = config.actors[name]
    assert actor.model
    model_config = read_config(actor.model)
    is_scoring = "ForSequenceClassification" in str(model_config.architectures)
    if is_scoring and config.algorithm != "rm":
        from rl_core.run.plan.model_paths import refuse_reward_model

        refuse_reward_model(actor.model)
    check_positions(config, actor.model, model_config)
    check_kernels(config, model_config, actor.lora if actor.is_trained else None)
    settings = config.of(name)
    is_changed = actor != ActorConfig(model=actor.model) or settings.critic != CriticConfig()
    is_changed |= settings.learner.train is not None or settings.algo != AlgoConfig()
    if is_changed or config.ep != 1:
        check_model_options(config, name, model_config)
    variables = config.chat_template_kwargs | actor.chat_template_kwargs
    chat = load_chat(actor.model, actor.chat_template, variables, tool_calls, config.data)
    if variables:
        from rl_core.data.template_variables import check_variables

        check_variables(chat.tokenizer, variables, "--chat_template_kwargs")
    check_vocabulary(chat, model_config.get_text_config().vocab_size, actor.model)
    return chat


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
        from rl_core.learning.teachers.build_teacher import check_teachers, frozen_models

        for path in frozen_models(settings).values():
            read_other(config, path)
        check_teachers(settings, name)


def tool_calls(chat: Chat) -> ToolReader:
    """A reader of the tool calls in a chat's replies."""
    from rl_core.data.tool_calls import ToolCalls

    return ToolCalls(chat)


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


def read_config(path: str) -> PretrainedConfig:
    """The model's config.json. Raises ValueError if there is none, or if it cannot be trained."""
    if not Path(path).exists():
        from rl_core.run.plan.model_paths import check_path

        check_path(path)
    try:
        config = load_model_config(path)
    except (OSError, ValueError) as error:
        from rl_core.run.plan.model_paths import why_no_model

        raise ValueError(why_no_model(path, error)) from None
    check_is_decoder(config, path)
    if Path(path).is_dir():
        from rl_core.run.plan.model_paths import check_weights

        check_weights(Path(path))
    return config


def read_other(config: Config, path: str) -> PretrainedConfig:
    """The config.json of a model that also computes an actor's episodes, such as a reference.
    Raises ValueError if the model cannot."""
    model_config = read_config(path)
    check_positions(config, path, model_config)
    check_kernels(config, model_config, LoraConfig())
    return model_config


def check_is_decoder(config: PretrainedConfig, path: str) -> None:
    """Raises ValueError for a model that cannot continue a text: an encoder, or an encoder with a
    decoder."""
    family, kind = config.model_type, None
    if config.is_encoder_decoder:
        kind = "an encoder-decoder"
    elif family in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        kind = "an encoder"
    if kind:
        raise ValueError(
            f"model {path!r} is {kind} ({family}); take a decoder-only language model, such as "
            "Qwen3"
        )


def check_positions(config: Config, path: str, model_config: PretrainedConfig) -> None:
    """Raises ValueError if an episode, or a row of data, may have more tokens than the model has
    positions."""
    positions, key = max_positions(model_config)
    if positions and config.max_context_tokens > positions:
        raise ValueError(
            f"--max_prompt_tokens={config.max_prompt_tokens} and --max_turns={config.turn_limit} "
            f"turns of --max_tokens={config.max_tokens} are {config.max_context_tokens} tokens, "
            f"and {path} has {positions} positions ({key}); lower them"
        )


def num_positions(path: str | None) -> int | None:
    """Positions of a model; None if they are unlimited or the model cannot be read."""
    try:
        model_config = read_config(path or "")
    except ValueError:  # make_plan() reads the model again and raises this.
        return None
    return max_positions(model_config)[0]


def check_kernels(config: Config, model_config: PretrainedConfig, lora: LoraConfig | None) -> None:
    """Raises ValueError if the kernels or tensor parallelism do not support the model. `lora`: of a
    trained model, else None."""
    if config.tp > 1 and lora is not None:
        from rl_core.models.parallel.tensor_parallel import check_tensor_parallel

        check_tensor_parallel(config.tp, model_config, lora)
    if config.learner.kernels == "liger":
        from rl_core.models.kernels.liger import check_liger

        check_liger(model_config)


def check_vocabulary(chat: Chat, num_rows: int, path: str) -> None:
    """Raises ValueError if text, the template or an end of turn can have an id without a row in the
    embedding."""
    written = {*chat.prompt_ids([{"role": "user", "content": "x"}]), *chat.stop_token_ids}
    for token, token_id in chat.tokenizer.get_vocab().items():
        # Special tokens that do not occur in a text conversation, such as an image's, may lack a
        # row.
        is_used = token not in chat.special_ids or token_id in written
        if token_id >= num_rows and is_used:
            raise ValueError(
                f"model {path}: its tokenizer gives {token!r} the id {token_id}, and its embedding "
                f"has {num_rows} rows; take the tokenizer that belongs to the model, or resize the "
                "embedding"
            )
