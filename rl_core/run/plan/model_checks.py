"""Checks of an actor's model against the flags, before it loads; and its chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_core.config import ActorConfig, AlgoConfig, Config, CriticConfig
from rl_core.data.chat import Chat, ToolReader
from rl_core.data.chat_loading import load_chat
from rl_core.run.plan.model_configs import check_kernels, check_positions, read_config

if TYPE_CHECKING:
    from rl_core.engines.api import ApiActor
    from rl_core.run.plan.custom_components import CustomComponents


def make_chats(
    config: Config, custom: CustomComponents | None = None
) -> tuple[dict[str, Chat], dict[str, ApiActor]]:
    """(the chat of each actor that has a model here, the endpoint of each other actor)."""
    chats, endpoints = {}, {}
    for name, actor in config.actors.items():
        if actor.api:
            from rl_core.engines.api import make_api_actor

            endpoints[name] = make_api_actor(config, name)
        else:
            chat = chats[name] = checked_chat(config, name)
            if isinstance(chat.vision, str):
                reason = chat.vision
            else:
                from rl_core.run.plan.image_checks import why_no_images

                reason = why_no_images(config, name, custom)
            if reason:
                chat.vision = f"actor {name} takes none: {reason}"
    return chats, endpoints


def checked_chat(config: Config, name: str) -> Chat:
    """The chat template of an actor with a local model. Raises ValueError if the model does not
    support the flags."""
    actor = config.actors[name]
    assert actor.model
    model_config = read_config(actor.model)
    is_scoring = "ForSequenceClassification" in str(model_config.architectures)
    if is_scoring and config.algorithm != "rm":
        from rl_core.run.plan.model_errors import refuse_reward_model

        refuse_reward_model(actor.model)
    check_positions(config, actor.model, model_config)
    check_kernels(config, model_config, actor.lora if actor.is_trained else None)
    settings = config.of(name)
    is_changed = actor != ActorConfig(model=actor.model) or settings.critic != CriticConfig()
    is_changed |= settings.learner.train is not None or settings.algo != AlgoConfig()
    if is_changed or config.ep != 1:
        from rl_core.run.plan.model_options import check_model_options

        check_model_options(config, name, model_config)
    variables = config.chat_template_kwargs | actor.chat_template_kwargs
    chat = load_chat(actor.model, actor.chat_template, variables, tool_calls, config.data)
    if variables:
        from rl_core.data.template_variables import check_variables

        check_variables(chat.tokenizer, variables, "--chat_template_kwargs")
    check_vocabulary(chat, model_config.get_text_config().vocab_size, actor.model)
    return chat


def tool_calls(chat: Chat) -> ToolReader:
    """A reader of the tool calls in a chat's replies."""
    from rl_core.data.tool_calls import ToolCalls

    return ToolCalls(chat)


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
