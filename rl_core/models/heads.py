"""The head of a model: its weight, and what its family does to logits."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PretrainedConfig, PreTrainedModel

from rl_core.models.kernels.torch_logprobs import sum_dtype

# Families whose own forward multiplies logits by a power of a value of config.json. Others may
# have the key, and ignore it.
LOGIT_SCALES = {
    ("logit_scale", 1): "cohere cohere2 cohere2_moe cohere_compass cohere_compass_text",
    ("logits_scaling", -1): """granite granite4_vision granite_docling granite_swa granitemoe
    granitemoe_swa granitemoehybrid granitemoeshared minicpm3""",
    ("logits_scaling", 1): "hyperclovax hyperclovax_vision_v2",
    ("lm_head_multiplier", 1): "falcon_h1",
    ("logits_mup_width_multiplier", -1): "inkling_mm_model inkling_text",
    ("output_multiplier", 1): "muse_glimmer muse_spark",
}
# Families whose own forward bounds logits to (-value, value) by a tanh.
LOGIT_CAPS = {
    "final_logit_softcapping": """beam gemma2 gemma3_text gemma3n gemma3n_text gemma4 gemma4_text
    gemma4_unified gemma4_unified_text inkling2 inkling2_loop inkling2_loop_text inkling2_text
    mistral_large4 muse_glimmer muse_spark nanochat paligemma vaultgemma""",
    "logits_soft_cap": "recurrent_gemma",
    "output_logit_soft_cap": "xlstm",
}


def logit_change(config: PretrainedConfig) -> tuple[float, float | None]:
    """(scale, cap) by a transformers configuration: logits are cap * tanh(scale * head(hidden) /
    cap); None: without tanh. A family that neither table names has (1, None); the probe at the
    start of a run compares the result with the model's own logits."""
    family, text = config.model_type, config.get_text_config()
    scale, cap = 1.0, None
    for (key, power), families in LOGIT_SCALES.items():
        if family in families.split():
            scale = (getattr(text, key) or 1.0) ** power
    for key, families in LOGIT_CAPS.items():
        if family in families.split():
            cap = getattr(text, key, None)
    return scale, cap


def head_factors(
    hf: PreTrainedModel, hidden_MD: Tensor, temperature: float
) -> tuple[Tensor, Tensor, float, float | None]:
    """(hidden, weight, temperature, cap) for fused_logprobs. A bias is one more column of the
    weight. A scale divides temperature and cap, because hidden states times it would be rounded."""
    scale, cap = logit_change(hf.config)
    head = cast(nn.Linear, hf.get_output_embeddings())
    weight = head.weight
    if getattr(head, "bias", None) is not None:
        hidden_MD = torch.cat([hidden_MD, torch.ones_like(hidden_MD[:, :1])], 1)
        weight = torch.cat([weight, head.bias[:, None]], 1)
    return hidden_MD, weight, temperature / scale, None if cap is None else cap / scale


def scores_of(hf: PreTrainedModel, hidden_MD: Tensor) -> Tensor:
    """[M] fp32 scores that a classifier gives hidden states. The weights are cast to fp32, so that
    scores are not rounded."""
    dtype = sum_dtype(hidden_MD)
    head = hf.get_submodule("score")
    assert isinstance(head, nn.Linear), head
    bias = None if head.bias is None else head.bias.to(dtype)
    return linear(hidden_MD.to(dtype), head.weight.to(dtype), bias)[:, 0]
