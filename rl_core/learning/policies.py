"""Builds policies: weights, adapters, shards, kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_core.config import LearnerConfig, LoraConfig
from rl_core.data.vision_models import load_family
from rl_core.distributed import Ranks
from rl_core.errors import split
from rl_core.models.cpu_offload import HostCopies
from rl_core.models.loading import load_hf_model, load_model_config
from rl_core.models.options import (
    activation_context,
    choose_attention,
    choose_logprob_kernel,
    use_cpu_decoder,
)
from rl_core.models.policy import PackedForward, Policy, blocks_of, freeze_parts, without_dropout

if TYPE_CHECKING:
    from rl_core.data.image_families import ImageFamily


# An adapter's settings and its seed.
Adapter = tuple[LoraConfig, int]


def make_policy(
    path: str,
    dtype: torch.dtype,
    ranks: Ranks,
    learner: LearnerConfig | None = None,
    adapters: dict[str, Adapter] | None = None,
    *,
    is_scoring: bool = False,
    is_frozen: bool = False,
    attention: str = "auto",
    is_served: bool = False,
    max_image_pixels: int | None = None,
) -> Policy:
    """Weights that are trained in fp32, frozen ones in the dtype of compute; sharded over all ranks
    of a copy if there are several or compute is not in fp32. `learner`: memory and kernels.
    `adapters`: by name."""
    # The forward pass is made before the weights are read.
    forward_pass = make_forward(attention, ranks)
    learner, adapters = learner or LearnerConfig(), adapters or {}
    config = load_model_config(path)
    checkpoint_dtype = config.dtype or config.get_text_config().dtype or torch.float32
    assert isinstance(checkpoint_dtype, torch.dtype), checkpoint_dtype
    cpu_offload = learner.offload == "always"
    is_split = ranks.mesh.num_shards > 1 or dtype != torch.float32 or cpu_offload
    trains_no_weight = is_frozen or (adapters and dtype == checkpoint_dtype)
    dtype_held = dtype if trains_no_weight else torch.float32
    make, quantized = Policy, {}
    if adapters or ranks.mesh.tp > 1:
        from rl_core.learning.policy_classes import policy_maker

        make, quantized = policy_maker(path, dtype, ranks, learner, adapters, is_served)
    weights = {}
    if is_split and not quantized:
        from rl_core.models.parallel import fsdp

        hf, weights = fsdp.load_on_meta(path, dtype_held, is_scoring)
    else:
        hf = load_hf_model(path, dtype_held, ranks.device, is_scoring, **quantized)
    policy = make(
        hf=hf,
        checkpoint_dtype=checkpoint_dtype,
        compute_dtype=dtype,
        forward_pass=forward_pass,
        activations=activation_context(learner),
        logprob_kernel=choose_logprob_kernel(ranks.device),
        support_logprobs=support_logprobs,
    )
    if hasattr(config, "vision_config"):
        add_vision(policy, load_family(path, max_image_pixels), dtype)
        if learner.train and not adapters:
            freeze_parts(hf, split(learner.train))
    prepare(policy, is_frozen, recomputes=learner.activations == "recompute")
    if is_split:
        from rl_core.models.parallel import fsdp

        fsdp.shard_policy(policy, dtype, ranks, cpu_offload)
        if weights:
            fsdp.load_shards(policy, weights, ranks.device, "cpu" if cpu_offload else ranks.device)
    # Weights that an engine shares stay on the device.
    leaves_device = learner.offload == "phase" and not policy.is_shareable
    if ranks.device.type == "cuda" if is_frozen else leaves_device:
        policy.host_copies = HostCopies(ranks.device, is_constant=is_frozen)
    for name, (_, seed) in adapters.items():
        from rl_core.learning import lora

        lora.draw_adapter(hf, seed, name)
    if learner.kernels == "compile":
        compile_blocks(policy)
    use_cpu_decoder(policy, learner)
    return policy


def add_vision(policy: Policy, family: ImageFamily | str, dtype: torch.dtype) -> None:
    if not isinstance(family, str):
        from rl_core.models.vision import Vision

        policy.vision = Vision(family, policy.hf, dtype)


def support_logprobs(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    labels_MK: Tensor,
    temperature: float,
    cap: float | None,
    *_: object,
) -> tuple[Tensor, Tensor]:
    from rl_core.learning.truncation import support_logprobs

    return support_logprobs(hidden_MD, weight_VD, labels_MK, temperature, cap)


def prepare(policy: Policy, is_frozen: bool, recomputes: bool) -> None:
    policy.train()
    without_dropout(policy.hf)
    if is_frozen:
        policy.requires_grad_(False)
    policy.recomputes = recomputes
    if recomputes:
        # transformers 5.23 renamed it; both default to the non-reentrant form.
        older = policy.hf.gradient_checkpointing_enable
        getattr(policy.hf, "activation_checkpointing_enable", older)()


def make_forward(attention: str, ranks: Ranks) -> PackedForward:
    """The forward pass of a model with the attention kernel of this name."""
    kernel = choose_attention(attention, ranks.device)
    if ranks.mesh.cp > 1:
        from rl_core.models.parallel.context_parallel import RingForward

        assert ranks.cp_group is not None
        return RingForward(kernel, ranks.cp_group)
    return PackedForward(kernel)


def compile_blocks(policy: Policy) -> None:
    """torch compiles each block's MLP and norms at their first use, once for all blocks and sizes
    of batches. Attention is not compiled: its Python differs from batch to batch."""
    for block in blocks_of(policy.hf):
        for name, module in block.named_children():
            if name != "self_attn":
                module.compile(dynamic=True)
