"""A policy's weights: made and sharded, its forward, streamed by name, exported."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rl_core.config import LoraConfig
from rl_core.distributed import FromShards, Ranks
from rl_core.learning.attention import AttentionPlan
from rl_core.learning.loading import (
    allocate,
    load_hf_model,
    load_model_config,
    load_scoring_model,
    make_empty_model,
    read_weights,
)
from rl_core.learning.logprobs import fused_logprobs
from rl_core.learning.lora import (
    DEFAULT,
    adapter_parameters,
    adapter_weights,
    add_adapters,
    draw_adapters,
    merged_weights,
    quantization,
)
from rl_core.learning.offload import Offload
from rl_core.learning.tensor_parallel import split_again, split_matrices
from rl_core.types import PackedBatch

if TYPE_CHECKING:
    import peft

EXPORT_SHARD_BYTES = 4 << 30


class PolicyModel(nn.Module):
    """A causal language model that gives logprobs of a packed batch, or a classifier that gives scores. The head is
    applied in here, so that sharded weights are whole when it is."""

    def __init__(self, hf: nn.Module, export_dtype: torch.dtype, adapters: dict[str, peft.LoraConfig] | None = None):
        super().__init__()
        self.hf, self.export_dtype, self.adapters = hf, export_dtype, adapters or {}
        self.adapter_name, self.active = DEFAULT, DEFAULT if len(self.adapters) < 2 else None
        self.is_away = False  # its weights wait on the host
        self.keeps_activations = nullcontext  # makes the context of a forward
        self.cp_group: dist.ProcessGroup | None = None  # that computes each batch together
        self.attention = "auto"  # a name of attention.KERNELS

    def forward(self, batch: PackedBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """(logprobs, entropy), both [M] fp32, of the M trained tokens of the batch in their order; of a classifier (scores
        of the tokens before them, 0)."""
        assert not self.is_away, "the weights wait on the host: enter learner.on_device()"
        part, ids, positions, sources = batch.shard, batch.input_ids, batch.position_ids, batch.sources
        labels = batch.labels
        starts, parents, group = batch.cu_seqlens, batch.parents, None
        if part is not None:
            ids, positions = ids[part.tokens], positions[part.tokens]
            sources, labels = part.sources, labels[part.trained]
            starts, group = part.cu_seqlens, self.cp_group
        plan = AttentionPlan(starts, parents, ids.device, self.attention, group)
        with self.keeps_activations():
            hidden_TD = self.hf.base_model(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, attention_plan=plan
            ).last_hidden_state[0]
        if self.is_scoring:
            outputs = self.hf.score(hidden_TD[sources])[:, 0].float()
            entropy = torch.zeros_like(outputs)
        else:
            head = self.hf.get_output_embeddings()
            outputs, entropy = fused_logprobs(hidden_TD[sources], head.weight, labels, temperature)
        if part is not None:
            outputs, entropy = FromShards.apply(part, self.cp_group, outputs, entropy)
        return outputs, entropy

    @property
    def adapter(self) -> peft.LoraConfig | None:
        return self.adapters.get(DEFAULT)

    @property
    def is_scoring(self) -> bool:
        return hasattr(self.hf, "score")

    @contextmanager
    def adapter_disabled(self):
        """The model without its adapters, which is where its training began."""
        layers = self.adapted_layers()
        # peft's own switch changes requires_grad, which FSDP must not see.
        for layer in layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False

    def activate(self, adapter: str) -> None:
        """Forwards from here on are with that adapter. It stays after one, for what is recomputed in the backward."""
        if self.active != adapter:
            for layer in self.adapted_layers():
                layer._active_adapter = adapter  # for the same reason
            self.active = adapter

    def adapted_layers(self) -> list[nn.Module]:
        return [m for m in self.hf.modules() if hasattr(m, "_disable_adapters")]


class SharedPolicy:
    """A model that several actors share, as one of them has it: with the adapter that it alone trains."""

    is_scoring = False

    def __init__(self, model: PolicyModel, adapter_name: str, offload: Offload):
        self.model, self.adapter_name = model, adapter_name
        self.offload = offload  # of the weights that all share, and all adapters
        self.hf, self.export_dtype, self.adapter = model.hf, model.export_dtype, model.adapters[adapter_name]

    def __call__(self, batch: PackedBatch, temperature: float) -> tuple[Tensor, Tensor]:
        self.model.activate(self.adapter_name)
        return self.model(batch, temperature)

    @property
    def is_away(self) -> bool:
        return self.model.is_away

    def adapter_disabled(self):
        return self.model.adapter_disabled()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Of its adapter, by the names that they would have if it were alone."""
        return adapter_parameters(self.model, self.adapter_name)

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def zero_grad(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None


def make_policy(
    path: str,
    dtype: torch.dtype,
    ranks: Ranks,
    activation_checkpointing: bool,
    lora: LoraConfig | None = None,
    seed: int = 0,
    is_scoring: bool = False,
    on_host: bool = False,
    more_adapters: dict[str, tuple[LoraConfig, int]] | None = None,
) -> PolicyModel:
    """fp32 weights on this rank, sharded over all ranks if there are several or compute is not in fp32; each then reads its
    own part alone, where the files' names are the model's. With adapters these are in fp32, and what is frozen is as it
    came, if compute is so; more of them, each with its seed, by their names. on_host: all wait on the host, and each block's
    come to the device to compute."""
    came_in = load_model_config(path).dtype or torch.float32
    is_split = ranks.size > 1 or dtype != torch.float32 or on_host
    has_adapters = lora is not None and lora.rank > 0
    how = quantization(lora, dtype, ranks.device) if has_adapters else {}
    kept_in = dtype if has_adapters and dtype == came_in else torch.float32
    empty = make_empty_model(path, kept_in, is_scoring) if is_split and not how else None
    if empty is not None:
        hf, weights = empty
    else:
        # FSDP moves a block at a time from the host.
        device = torch.device("cpu") if is_split else ranks.device
        hf = load_scoring_model(path, device) if is_scoring else load_hf_model(path, kept_in, device, **how)
    adapters = {DEFAULT: (lora, seed)} | (more_adapters or {}) if has_adapters else {}
    found = add_adapters(hf, {name: lora for name, (lora, _) in adapters.items()}, path) if adapters else {}
    policy = PolicyModel(hf, came_in, found)
    policy.cp_group = ranks.cp_group
    policy.train()
    without_dropout(policy.hf)
    if activation_checkpointing:
        # transformers 5.23 renamed it; both default to the non-reentrant form.
        enable = getattr(policy.hf, "activation_checkpointing_enable", policy.hf.gradient_checkpointing_enable)
        enable()
    if is_split:
        shard_policy(policy, dtype, ranks, on_host)
    if empty is not None:
        allocate(policy, torch.device("cpu") if on_host else ranks.device, ranks.device)
        read_weights(hf, weights)
    for name, (_, seed) in adapters.items():
        draw_adapters(hf, seed, name)
    return policy


def without_dropout(hf: nn.Module) -> None:
    """The learner's logprobs are to be those that the engine samples by, the same at each look and on each rank."""
    for module in hf.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if getattr(module, "attention_dropout", 0.0):
            module.attention_dropout = 0.0


def make_reference(path: str, dtype: torch.dtype, ranks: Ranks) -> PolicyModel:
    """A frozen copy of the model at the start, sharded as the policy is; it waits on the host."""
    return make_policy(path, dtype, ranks, False).requires_grad_(False).eval().to("cpu")


def shard_policy(policy: PolicyModel, dtype: torch.dtype, ranks: Ranks, on_host: bool = False) -> None:
    """Matrices split over tp ranks, then each block and the rest over the others of a copy (FSDP2; HSDP with several
    copies); compute in `dtype`, sums of gradients in fp32."""
    if ranks.mesh.tp > 1:
        split_matrices(policy.hf, ranks.weights_mesh["tp"])
    dims = ("dp_replicate", "dp_shard_cp") if ranks.mesh.dp_replicate > 1 else ("dp_shard_cp",)
    mesh = ranks.weights_mesh[dims]
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda") if on_host else OffloadPolicy()
    for block in policy.hf.base_model.layers:
        fully_shard(block, mesh=mesh, mp_policy=precision, offload_policy=offload)
    whole = dataclasses.replace(precision, output_dtype=torch.float32)
    placement = {"shard_placement_fn": lambda p: split_again(p, mesh.size(-1))}
    fully_shard(policy, mesh=mesh, mp_policy=whole, offload_policy=offload, **placement)


def compile_blocks(policy: PolicyModel) -> None:
    """Each block's MLP and norms are compiled by torch at their first use, once for all blocks and sizes of batches.
    Attention is not: its Python differs from batch to batch."""
    for block in policy.hf.base_model.layers:
        for name, part in block.named_children():
            if name != "self_attn":
                part.forward = torch.compile(part.forward, dynamic=True)


def end_token_ids(path: str) -> list[int]:
    """Tokens that a model's generation_config.json, or else its config.json, names as ends of a turn; some have several."""
    from transformers import AutoConfig, GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:
        generation = GenerationConfig.from_model_config(AutoConfig.from_pretrained(path))
    ids = generation.eos_token_id
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


Policy = PolicyModel | SharedPolicy


def whole_model(policy: Policy) -> PolicyModel:
    """With what others train of it."""
    return policy.model if isinstance(policy, SharedPolicy) else policy


def is_sharded(policy: Policy) -> bool:
    return any(isinstance(p, DTensor) for p in policy.parameters())


def is_in_4_bits(policy: Policy) -> bool:
    return hasattr(policy.hf.config, "quantization_config")


def reads_in_place(policy: Policy) -> bool:
    """Whether an engine can sample from the policy's own weights: whole, and not beside an adapter, which is slow to apply at
    every token, unless several actors share them. Else it has a copy."""
    may_read = not is_in_4_bits(policy) if isinstance(policy, SharedPolicy) else policy.adapter is None
    return may_read and not is_sharded(policy)


def engine_weights(policy: Policy, in_place: bool = True) -> Iterator[tuple[str, Tensor]] | None:
    """What an update sends to the engine: of a shared model the adapter, by peft's names; nothing if the engine can read in
    place, and does; else all. Every rank must exhaust it."""
    assert not policy.is_away, "the weights wait on the host: enter learner.on_device()"
    if isinstance(policy, SharedPolicy):
        return adapter_weights(policy.hf, policy.adapter_name)
    return None if in_place and reads_in_place(policy) else named_weights(policy)


def named_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor), one whole tensor at a time, the adapter merged. Every rank must exhaust it."""
    assert not policy.is_away, "the weights wait on the host: enter learner.on_device()"
    return merged_weights(policy.hf, policy.adapter_name)


def export_policy(policy: Policy, tokenizer, folder: Path, ranks: Ranks) -> None:
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


def export_adapter(policy: Policy, folder: Path, ranks: Ranks) -> None:
    """A folder that peft loads beside the model it began with."""
    weights = {name: value.cpu().contiguous() for name, value in adapter_weights(policy.hf, policy.adapter_name)}
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
