"""Liger's Triton kernels for a model's norms, gated MLPs and rotary positions, instead of
transformers' code.

Its losses are unused: they take padded rows with one advantage each, give no entropy, and reduce
over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers import PretrainedConfig, PreTrainedModel

LOSSES_OFF = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def check_liger(model_config: PretrainedConfig) -> None:
    """Raises ValueError without a GPU, and for an architecture that Liger does not know, before any
    weight is read."""
    if not torch.cuda.is_available():
        raise ValueError(
            "--learner.kernels=liger needs a GPU, and torch sees none here; leave it out"
        )
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as KNOWN

    if (kind := model_config.model_type) not in KNOWN:
        raise ValueError(
            f"--learner.kernels=liger has no kernels for {kind!r}; take one of "
            f"{', '.join(sorted(KNOWN))}"
        )


def apply_liger(models: Iterable[PreTrainedModel]) -> None:
    """Gives each model's modules Liger's forward, where Liger has one for the architecture; weights
    stay. Also replaces functions and classes in transformers' module of the architecture: the
    rotary positions of every such model in this process, and all modules of models that are built
    later."""
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance as patch

    for model in models:
        patch(model=model, **LOSSES_OFF)
        assert any("forward" in vars(m) for m in model.modules() if m is not model), type(
            model
        ).__name__
