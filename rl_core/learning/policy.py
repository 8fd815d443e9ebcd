"""A model that is trained: loaded, sharded, its forward, its weights by name, its export."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.functional import pad
from transformers import AutoConfig, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from rl_core.config import LearnerConfig, LoraConfig
from rl_core.data.pretrained import load_pretrained
from rl_core.data.rows import rename_into_place
from rl_core.distributed import Ranks, all_gather_json, local, unsharded
from rl_core.learning.attention import AttentionPlan, find_kernel
from rl_core.learning.loading import fill_weights, load_hf_model, load_model_config, take_weights
from rl_core.learning.logprobs import fused_logprobs, head_factors, scores_of
from rl_core.types import PackedBatch, RunError, option

if TYPE_CHECKING:
    import peft

LORA, TP = "rl_core.plugins.lora", "rl_core.plugins.tensor_parallel"
FUSED_LATER = "rl_core.plugins.fused_weights:fused_later"


class PolicyModel(nn.Module):
    """A causal language model that gives logprobs of a packed batch, or a classifier that gives
    scores. The head is applied in here, so that FSDP has gathered its weight. Options set the hooks
    below."""

    def __init__(
        self, hf: nn.Module, export_dtype: torch.dtype, compute_dtype: torch.dtype = torch.float32
    ):
        super().__init__()
        self.hf, self.export_dtype, self.compute_dtype = hf, export_dtype, compute_dtype
        self.cp_group: dist.ProcessGroup | None = None  # ranks that compute each batch together
        self.attention = "auto"  # a name of attention.KERNELS
        self.adapters: dict[str, peft.LoraConfig] = {}  # by name; the model itself is then frozen
        self.sends_adapters = False  # engines apply its adapters beside its weights
        self.compute = packed_outputs  # (self, batch, temperature) -> what forward() gives
        # (adapter): forwards from here on use it; "" is the model without adapters.
        self.activate = do_nothing
        self.on_device = nullcontext  # makes a context in which the weights are on the device
        self.keeps_activations = nullcontext  # makes the context of a forward
        # Completes gradients that are partial sums, before they are clipped.
        self.finish_gradients = do_nothing

    def forward(
        self, batch: PackedBatch, temperature: float, adapter: str = ""
    ) -> tuple[Tensor, Tensor]:
        """(logprobs, entropy), both [M] fp32, of the M trained tokens of the batch in their order;
        of a classifier (scores of the tokens before them, 0)."""
        assert self.is_on_device, "the weights are CPU-offloaded: enter learner.on_device()"
        self.activate(adapter)
        return self.compute(self, batch, temperature)

    def hidden_states(self, **inputs: Any) -> Tensor:
        with self.keeps_activations():
            return backbone(self.hf)(**inputs, use_cache=False).last_hidden_state

    def outputs(
        self, hidden_MD: Tensor, labels: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """What forward() gives of the hidden states before the trained tokens."""
        if self.is_scoring:
            scores = scores_of(self.hf, hidden_MD)
            return scores, torch.zeros_like(scores)
        hidden_MD, weight, temperature, cap = head_factors(self.hf, hidden_MD, temperature)
        return fused_logprobs(hidden_MD, weight, labels, temperature, cap)

    @property
    def is_scoring(self) -> bool:
        return hasattr(self.hf, "score")

    @property
    def is_sharded(self) -> bool:
        return isinstance(self, FSDPModule)

    @property
    def is_on_device(self) -> bool:
        part = local(next(self.parameters()).detach())
        return not part.numel() or part.untyped_storage().nbytes() > 0

    def trained(self, adapter: str = "") -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of what an actor trains: all weights, or one adapter, named as if there
        were no other."""
        for name, parameter in self.named_parameters():
            if parameter.requires_grad and (not adapter or f".{adapter}." in name):
                yield name.replace(f".{adapter}.", ".default.") if adapter else name, parameter


def packed_outputs(
    policy: PolicyModel, batch: PackedBatch, temperature: float
) -> tuple[Tensor, Tensor]:
    """What forward() gives, by one row of tokens in which attention knows the sequences."""
    ids, positions, labels, part, group = (
        batch.input_ids,
        batch.position_ids,
        batch.labels,
        batch,
        None,
    )
    if batch.shard is not None:
        part, group = batch.shard, policy.cp_group
        ids, positions, labels = ids[part.tokens], positions[part.tokens], labels[part.trained]
    plan = AttentionPlan(part.cu_seqlens, batch.parents, ids.device, policy.attention, group)
    hidden_1TD = policy.hidden_states(
        input_ids=ids[None], position_ids=positions[None], attention_plan=plan
    )
    outputs, entropy = policy.outputs(hidden_1TD[0, part.sources], labels, temperature)
    if batch.shard is not None:
        outputs, entropy = FromShards.apply(part, policy.cp_group, torch.stack([outputs, entropy]))
    return outputs, entropy


def do_nothing(*_) -> None:
    pass


def backbone(hf: nn.Module) -> nn.Module:
    """What gives hidden states; of a multimodal model the part for text."""
    inner = getattr(hf.base_model, "language_model", hf.base_model).base_model
    has_head = inner.get_output_embeddings() is not None  # as Llama 4's part for text has
    return inner.model if inner is hf or has_head else inner


def blocks_of(hf: nn.Module) -> nn.ModuleList:
    """The transformer's layers."""
    lists = (m for m in backbone(hf).modules() if isinstance(m, nn.ModuleList))
    return max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))


def make_policy(
    path: str,
    dtype: torch.dtype,
    ranks: Ranks,
    how: LearnerConfig | None = None,
    adapters: dict[str, tuple[LoraConfig, int]] | None = None,
    is_scoring: bool = False,
    is_frozen: bool = False,
    attention: str = "auto",
) -> PolicyModel:
    """Weights that are trained in fp32, frozen ones in the dtype of compute; sharded over all ranks
    if there are several or compute is not in fp32. `how`: memory and kernels; with CPU offload each
    block's weights come to the device to compute. `adapters`: by name, each with its seed."""
    find_kernel(attention, ranks.device)  # before the weights are read
    how = how or LearnerConfig()
    cpu_offload = how.offload == "always"
    came_in = load_model_config(path).dtype or torch.float32
    is_split = ranks.size > 1 or dtype != torch.float32 or cpu_offload
    loras = {name: lora for name, (lora, _) in adapters.items()} if adapters else {}
    quantized = (
        option(f"{LORA}:quantization")(loras["default"], dtype, ranks.device) if loras else {}
    )
    kept_in = dtype if is_frozen or (loras and dtype == came_in) else torch.float32
    if is_split and not quantized:
        with option(FUSED_LATER)() as fused:
            hf = load_hf_model(path, "auto", None, is_scoring)
        weights = take_weights(hf, kept_in) | fused
    else:
        # FSDP moves a block at a time from the CPU.
        hf = load_hf_model(
            path,
            kept_in,
            torch.device("cpu") if is_split else ranks.device,
            is_scoring,
            **quantized,
        )
        weights = {}
    policy = PolicyModel(hf, came_in, dtype)
    if loras:
        option(f"{LORA}:add_adapters")(policy, loras, path)
    policy.cp_group, policy.attention = ranks.cp_group, attention
    policy.train()
    if is_frozen:
        policy.requires_grad_(False)
    without_dropout(hf)
    if how.activations == "recompute":
        # transformers 5.23 renamed it; both default to the non-reentrant form.
        getattr(hf, "activation_checkpointing_enable", hf.gradient_checkpointing_enable)()
    if is_split:
        shard_policy(policy, dtype, ranks, cpu_offload)
    if weights:
        # Not to_empty(), which would destroy the buffers. FSDP hears of it through its own _apply.
        weights_on = torch.device("cpu") if cpu_offload else ranks.device
        policy._apply(
            lambda t: torch.empty_like(t, device=weights_on) if t.is_meta else t.to(ranks.device)
        )
        fill_weights(hf, weights)
    for name in loras:
        option(f"{LORA}:draw_adapter")(hf, adapters[name][1], name)
    if how.activations == "offload":
        policy.keeps_activations = option("rl_core.plugins.offload:activations_on_host")
    if how.kernels == "compile":
        compile_blocks(policy)
    return policy


def without_dropout(hf: nn.Module) -> None:
    """Turns off all that is random in training, so that the learner's logprobs are those that the
    engine samples with. Not eval(), with which transformers would not recompute activations."""
    for module in hf.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # Seed-OSS's residual_dropout, OPT's dropout and layerdrop, Mixtral's jitter_noise
        for name, value in vars(module).items():
            if isinstance(value, float) and any(word in name for word in ("drop", "jitter")):
                setattr(module, name, 0.0)


def make_reference(path: str, dtype: torch.dtype, ranks: Ranks, attention: str) -> PolicyModel:
    """A frozen copy of the model at the start, in the dtype of compute, sharded as the policy is.
    On a GPU it is CPU-offloaded to pinned memory while it is not used."""
    policy = make_policy(path, dtype, ranks, is_frozen=True, attention=attention)
    if ranks.device.type == "cuda":
        policy.on_device = option("rl_core.plugins.offload:offload_frozen")(policy, ranks.device)
    return policy


def shard_policy(
    policy: PolicyModel, dtype: torch.dtype, ranks: Ranks, cpu_offload: bool = False
) -> None:
    """Matrices split over tp ranks, then each block and the rest over the others of a copy (FSDP2;
    HSDP with several copies); compute in `dtype`, sums of gradients in fp32."""
    split_again = None
    if ranks.mesh.tp > 1:
        split_again = option(f"{TP}:split_matrices")(policy, ranks.weights_mesh)
    dims = ("dp_replicate", "dp_shard_cp") if ranks.mesh.dp_replicate > 1 else ("dp_shard_cp",)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    offload = (
        CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda") if cpu_offload else OffloadPolicy()
    )
    how = {"mesh": ranks.weights_mesh[dims], "offload_policy": offload}
    for block in blocks_of(policy.hf):
        fully_shard(block, mp_policy=precision, **how)
    root = dataclasses.replace(precision, output_dtype=torch.float32)
    fully_shard(policy, mp_policy=root, shard_placement_fn=split_again, **how)


def compile_blocks(policy: PolicyModel) -> None:
    """torch compiles each block's MLP and norms at their first use, once for all blocks and sizes
    of batches. Attention is not compiled: its Python differs from batch to batch."""
    for block in blocks_of(policy.hf):
        for name, part in block.named_children():
            if name != "self_attn":
                part.forward = torch.compile(part.forward, dynamic=True)


def end_token_ids(path: str) -> list[int]:
    """Tokens that a model's generation_config.json, or else its config.json, names as ends of a
    turn; some have several."""
    try:
        generation = load_pretrained(GenerationConfig, path)
    except OSError:
        generation = GenerationConfig.from_model_config(load_pretrained(AutoConfig, path))
    ids = generation.eos_token_id
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def reads_in_place(policy: PolicyModel) -> bool:
    """True if an engine can sample from the policy's own weights: they are unsharded and have no
    adapter, which is slow to apply at every token, unless the engine applies adapters."""
    may_read = (
        not hasattr(policy.hf.config, "quantization_config")
        if policy.sends_adapters
        else not policy.adapters
    )
    return may_read and not policy.is_sharded


def engine_weights(
    policy: PolicyModel, adapter: str = "", in_place: bool = True
) -> Iterator[tuple[str, Tensor]] | None:
    """What an update sends to the engine: the adapter alone, by peft's names, if the engine applies
    it; None if the engine can read in place, and does; else all weights in the dtype of compute.
    Every rank must exhaust it."""
    if policy.sends_adapters:
        return option(f"{LORA}:adapter_weights")(policy.hf, adapter)
    return (
        None
        if in_place and reads_in_place(policy)
        else named_weights(policy, adapter, policy.compute_dtype)
    )


def named_weights(
    policy: PolicyModel, adapter: str = "", dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(transformers' name, unsharded tensor) of each parameter, in `dtype` or its own, the adapter
    merged; a tied weight comes once. Then each buffer that a checkpoint has. Every rank must
    exhaust it."""
    assert policy.is_on_device, "the weights are CPU-offloaded: enter learner.on_device()"
    if policy.is_sharded:
        # After a forward without a backward some parameters are still gathered. Their memory goes
        # when state_dict() is called below, and who collects the weights in buckets would hold
        # tensors without memory.
        policy.reshard()
    if policy.adapters:
        yield from option(f"{LORA}:merged_weights")(policy.hf, adapter, dtype)
    else:
        for name, value in policy.hf.named_parameters():
            yield name, unsharded(value.detach().to(dtype or value.dtype))  # cast before it travels
    parameters = dict(policy.hf.named_parameters(remove_duplicate=False))
    for name, value in policy.hf.state_dict(keep_vars=True).items():
        if name not in parameters and isinstance(value, Tensor) and ".base_layer." not in name:
            yield name, value.detach()


def checkpoint_weights(
    hf: nn.Module, named: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """The weights under the names that published checkpoints of this model have, such as one tensor
    for each expert. Weights of one layer must come together, as named_weights() gives them."""
    if not get_model_conversion_mapping(hf, add_legacy=False) and not getattr(
        hf, "_weight_conversions", None
    ):
        yield from named
        return
    number = lambda item: next((part for part in item[0].split(".") if part.isdigit()), "")  # noqa: E731
    for _, layer in itertools.groupby(named, number):
        yield from revert_weight_conversion(hf, dict(layer)).items()


def export_policy(
    policy: PolicyModel, tokenizer: Any, folder: Path, ranks: Ranks, adapter: str = ""
) -> None:
    """A Hugging Face folder that from_pretrained loads, in the dtype that the model came in, the
    adapter merged; the adapter also on its own in FOLDER_adapter. An old export stays until the new
    one is complete. Raises RunError on all ranks, and leaves it as it was, if a weight is not
    finite in that dtype."""
    weights = {}
    broken = []
    buffers = dict(policy.hf.named_buffers())  # a mask may be infinite
    for name, value in named_weights(policy, adapter, policy.export_dtype):
        if ranks.rank == 0:
            if name not in buffers and not value.isfinite().all():
                broken.append(name)
            weights[name] = value.to("cpu")
    refuse_nonfinite(all_gather_json(broken, ranks)[0], f"{folder} stays as it was")
    if policy.adapters:
        option(f"{LORA}:export_adapter")(
            policy, adapter, folder.with_name(folder.name + "_adapter"), ranks
        )
    if ranks.rank == 0:
        config = copy.deepcopy(policy.hf.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        if policy.is_scoring:  # the classifier's forward finds a sequence's end by it
            config.pad_token_id = tokenizer.pad_token_id
        with torch.device("meta"):  # a plain model of this kind: not sharded, quantized or adapted
            plain = type(policy.hf)(config).to(policy.export_dtype)
        if not policy.is_scoring:
            plain.generation_config = policy.hf.generation_config
        with replaced(folder) as beside:
            # By the names that checkpoints of it have.
            plain.save_pretrained(beside, state_dict=weights)
            tokenizer.save_pretrained(beside)


def refuse_nonfinite(names: list[str], what_stays: str) -> None:
    """Raises RunError if there are such weights."""
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise RunError(
            f"weights are NaN or infinite ({names[0]}{more}): {what_stays}; go on from the newest "
            "checkpoint by --resume, "
            "with a lower --optim.lr"
        )


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """A new folder that takes the place of `folder` once it is complete."""
    beside = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    yield beside
    rename_into_place(beside, folder)


class FromShards(torch.autograd.Function):
    """[n, m] values of this rank's trained tokens -> [n, M] those of the whole batch. Every rank
    goes on to compute the same loss from all of them; a gradient goes back to this rank's tokens
    alone, since the other ranks send theirs."""

    @staticmethod
    def forward(ctx, shard, group, values):
        ctx.trained = shard.trained
        padded = pad(values, (0, max(shard.counts) - values.shape[1]))
        gathered = [torch.empty_like(padded) for _ in shard.counts]
        dist.all_gather(gathered, padded, group=group)
        parts = [part[:, :n] for part, n in zip(gathered, shard.counts, strict=True)]
        return torch.cat(parts, 1)[:, shard.places]

    @staticmethod
    def backward(ctx, grad):
        return None, None, grad[:, ctx.trained]
