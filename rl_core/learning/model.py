"""A policy's weights: load, shard, forward, stream by name, export."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig

from rl_core.config import LoraConfig
from rl_core.distributed import Ranks
from rl_core.learning import attention
from rl_core.learning.logprobs import fused_logprobs
from rl_core.learning.lora import adapter_weights, add_adapters, merged_weights, quantization
from rl_core.types import PackedBatch

if TYPE_CHECKING:
    import peft

EXPORT_SHARD_BYTES = 4 << 30
# Between the last hidden state and the logits these do something that a product with the head's weight leaves out.
LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "mup_width_multiplier")


def load_model_config(path: str) -> PretrainedConfig:
    """The model's config.json, read before any weight. Raises ValueError for a folder without one and for a model whose
    logits are not hidden states times the head's weight."""
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"model {path!r} cannot be loaded: {str(error).splitlines()[0]}") from None
    changes = [k for k in LOGIT_CHANGES if getattr(config, k, None) not in (None, 1.0)]
    if changes:
        raise ValueError(
            f"model {path!r} sets {changes[0]}={getattr(config, changes[0])}, which its logprobs here would "
            "leave out; take a model whose logits are hidden states times the head's weight"
        )
    return config


def load_hf_model(path: str, dtype: torch.dtype, device: torch.device, **how) -> nn.Module:
    """The whole model on this rank's device, with attention over packed batches. Weights come from safetensors alone."""
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attention.NAME, use_safetensors=True, **how
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"model {path!r} cannot be loaded: {str(error).splitlines()[0]}") from None
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ValueError(f"model {path!r} has a head with a bias, which its logprobs here would leave out")
    return model if "device_map" in how else model.to(device)


def load_scoring_model(path: str, device: torch.device) -> nn.Module:
    """A sequence classifier of one label in fp32. Its head `score` is 0, so that no reply is better than another, unless
    the folder holds a trained one."""
    try:
        model, found = AutoModelForSequenceClassification.from_pretrained(
            path,
            num_labels=1,
            dtype=torch.float32,
            attn_implementation=attention.NAME,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"model {path!r} cannot score: {str(error).splitlines()[0]}") from None
    if "score.weight" in found["missing_keys"]:
        nn.init.zeros_(model.score.weight)
    model.config.architectures = [type(model).__name__]
    return model.to(device)


class PolicyModel(nn.Module):
    """A causal language model that gives logprobs of a packed batch, or a classifier that gives scores. The head is
    applied in here, so that sharded weights are whole when it is."""

    def __init__(self, hf: nn.Module, export_dtype: torch.dtype, adapter: peft.LoraConfig | None = None):
        super().__init__()
        self.hf, self.export_dtype, self.adapter = hf, export_dtype, adapter

    def forward(self, batch: PackedBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """(logprobs, entropy), both [M] fp32, of the M trained tokens of the batch in their order; of a classifier (scores
        of the tokens before them, 0)."""
        hidden_TD = self.hf.base_model(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            blocks=attention.attention_blocks(batch),
        ).last_hidden_state[0]
        if self.is_scoring:
            scores = self.hf.score(hidden_TD[batch.sources])[:, 0].float()
            return scores, torch.zeros_like(scores)
        head = self.hf.get_output_embeddings()
        return fused_logprobs(hidden_TD[batch.sources], head.weight, batch.labels, temperature)

    @property
    def is_scoring(self) -> bool:
        return hasattr(self.hf, "score")

    @contextmanager
    def adapter_disabled(self):
        """The model without its adapters, which is where its training began."""
        layers = [m for m in self.hf.modules() if hasattr(m, "_disable_adapters")]
        # peft's own switch changes requires_grad, which FSDP must not see.
        for layer in layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False


def make_policy(
    path: str,
    dtype: torch.dtype,
    ranks: Ranks,
    activation_checkpointing: bool,
    lora: LoraConfig | None = None,
    seed: int = 0,
    is_scoring: bool = False,
) -> PolicyModel:
    """fp32 weights on this rank, sharded over all ranks if there are several or compute is not in fp32. With adapters
    these are in fp32, and what is frozen is as it came, if compute is so."""
    came_in = load_model_config(path).dtype or torch.float32
    if is_scoring:
        policy = PolicyModel(load_scoring_model(path, ranks.device), came_in)
    elif lora is None or not lora.rank:
        policy = PolicyModel(load_hf_model(path, torch.float32, ranks.device), came_in)
    else:
        how = quantization(lora, dtype, ranks.device)
        hf = load_hf_model(path, dtype if dtype == came_in else torch.float32, ranks.device, **how)
        policy = PolicyModel(hf, came_in, add_adapters(hf, lora, path, seed))
    policy.train()
    if activation_checkpointing:
        # transformers 5.23 renamed it; both default to the non-reentrant form.
        enable = getattr(policy.hf, "activation_checkpointing_enable", policy.hf.gradient_checkpointing_enable)
        enable()
    if ranks.size > 1 or dtype != torch.float32:
        shard_policy(policy, dtype, ranks)
    return policy


def make_reference(path: str, dtype: torch.dtype, ranks: Ranks) -> PolicyModel:
    """A frozen copy of the model at the start, sharded as the policy is; it waits on the host."""
    return make_policy(path, dtype, ranks, False).requires_grad_(False).eval().to("cpu")


def shard_policy(policy: PolicyModel, dtype: torch.dtype, ranks: Ranks) -> None:
    """Each block, then the rest, split over all ranks (FSDP2); compute in `dtype`, sums of gradients in fp32."""
    mesh = init_device_mesh(ranks.device.type, (ranks.size,), mesh_dim_names=("dp",))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in policy.hf.base_model.layers:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=dataclasses.replace(precision, output_dtype=torch.float32))


def end_token_ids(policy: PolicyModel) -> list[int]:
    """Tokens that the model's generation_config.json names as ends of a turn; some have several."""
    ids = getattr(policy.hf.generation_config, "eos_token_id", None)
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def is_sharded(policy: PolicyModel) -> bool:
    return any(isinstance(p, DTensor) for p in policy.parameters())


def reads_in_place(policy: PolicyModel) -> bool:
    """Whether an engine can sample from the policy's own weights: whole, and without adapters, which are slow to apply at
    every token. Else it has a copy that named_weights() updates."""
    return policy.adapter is None and not is_sharded(policy)


def named_weights(policy: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor), one whole tensor at a time, adapters merged. Every rank must exhaust it."""
    return merged_weights(policy.hf)


def export_policy(policy: PolicyModel, tokenizer, folder: Path, ranks: Ranks) -> None:
    """A Hugging Face folder that from_pretrained loads, in the dtype that the model came in, adapters merged; these also
    on their own in FOLDER_adapter. Written beside its place and renamed, so that an old export stays whole until the new
    one is."""
    if policy.adapter is not None:
        export_adapter(policy, folder.with_name(folder.name + "_adapter"), ranks)
    beside = folder.with_name(folder.name + ".tmp")
    if ranks.rank == 0:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
    part, size, weight_map = {}, 0, {}

    def flush() -> None:
        nonlocal part, size
        file = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(part, beside / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
        part, size = {}, 0

    for name, value in named_weights(policy):
        if ranks.rank == 0:
            part[name] = value.to("cpu", policy.export_dtype).contiguous()
            size += part[name].nbytes
            if size >= EXPORT_SHARD_BYTES:
                flush()
    if ranks.rank > 0:
        return
    if part:
        flush()
    config = copy.deepcopy(policy.hf.config)
    config.dtype = policy.export_dtype
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if policy.is_scoring:  # the classifier's forward finds a sequence's end by it
        config.pad_token_id = tokenizer.pad_token_id
    config.save_pretrained(beside)
    if not policy.is_scoring and policy.hf.generation_config is not None:
        policy.hf.generation_config.save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    if len(files := set(weight_map.values())) == 1:
        os.rename(beside / files.pop(), beside / "model.safetensors")
    else:
        (beside / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    put_in_place(beside, folder)


def export_adapter(policy: PolicyModel, folder: Path, ranks: Ranks) -> None:
    """A folder that peft loads beside the model it began with."""
    weights = {name: value.cpu().contiguous() for name, value in adapter_weights(policy.hf)}
    if ranks.rank == 0:
        beside = folder.with_name(folder.name + ".tmp")
        shutil.rmtree(beside, ignore_errors=True)
        policy.adapter.save_pretrained(beside)
        save_file(weights, beside / "adapter_model.safetensors", metadata={"format": "pt"})
        put_in_place(beside, folder)


def put_in_place(beside: Path, folder: Path) -> None:
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(beside, folder)
    shutil.rmtree(old, ignore_errors=True)
