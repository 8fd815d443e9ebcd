"""A model's config.json, checked against the flags."""

from __future__ import annotations

from pathlib import Path

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from rl_core.config import Config, LoraConfig
from rl_core.models.loading import load_model_config, max_positions


def read_config(path: str) -> PretrainedConfig:
    """The model's config.json. Raises ValueError if there is none, or if it cannot be trained."""
    if not Path(path).exists():
        from rl_core.run.plan.model_errors import check_path

        check_path(path)
    try:
        config = load_model_config(path)
    except (OSError, ValueError) as error:
        from rl_core.run.plan.model_errors import why_no_model

        raise ValueError(why_no_model(path, error)) from None
    check_is_decoder(config, path)
    if Path(path).is_dir():
        from rl_core.run.plan.model_paths import check_weights

        check_weights(Path(path))
    return config


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
