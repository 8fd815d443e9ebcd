"""A model that is trained: its forward, its shards, its weights by name, its export."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from rl_core.data.pretrained import load_pretrained
from rl_core.distributed import Ranks, local, unsharded
from rl_core.models.attention import AttentionPlan
from rl_core.models.cpu_offload import HostCopies
from rl_core.models.heads import head_factors, scores_of
from rl_core.models.kernels.segments import Kernel
from rl_core.models.logprobs import fused_logprobs
from rl_core.models.weight_gathering import DTypes, gathered_weights
from rl_core.types import PackedBatch

if TYPE_CHECKING:
    import peft

    from rl_core.models.vision import Vision

# Names of modules that map features of the vision tower to the language model's width.
PROJECTOR = re.compile(r"merger|projector|connector|embed_vision|image_newline")

# (hidden states before the trained tokens [M, D], labels, temperature) -> tensors of M values.
Outputs = Callable[[Tensor, Tensor, float], tuple[Tensor, ...]]


class ForwardPass(Protocol):
    """The forward of a policy over a packed batch."""

    repeats_prompts: bool  # True if each sequence has a copy of a shared prompt.
    calls_outputs: bool  # False if the model's own head computes the results.

    def __call__(
        self, policy: Policy, batch: PackedBatch, temperature: float, outputs: Outputs
    ) -> tuple[Tensor, ...]: ...
    def tokens(self, batch: PackedBatch) -> Tensor:
        """[n] index of each token of the forward in the batch; -1 for padding."""
        ...


class PackedForward:
    """The forward of a policy over a packed batch: one row of tokens; attention separates the
    sequences."""

    repeats_prompts = False
    calls_outputs = True

    def __init__(self, kernel: Kernel):
        self.kernel = kernel

    def __call__(
        self, policy: Policy, batch: PackedBatch, temperature: float, outputs: Outputs
    ) -> tuple[Tensor, ...]:
        seen = policy.vision and policy.vision.packed(batch, policy.is_sharded)
        inputs = seen or batch
        ids, positions = inputs.input_ids[None], inputs.position_ids[..., None, :]
        plan = AttentionPlan(inputs.cu_seqlens, inputs.parents, self.kernel, ids.device)
        more = {}
        if seen:
            more = seen.tensors
            plan.see_ahead(seen.blocks, seen.in_full_attention)
        hidden_1TD = policy.hidden_states(
            input_ids=ids, position_ids=positions, attention_plan=plan, **more
        )
        return outputs(hidden_1TD[0, batch.logit_indices], batch.labels, temperature)

    def tokens(self, batch: PackedBatch) -> Tensor:
        return torch.arange(len(batch.input_ids), device=batch.input_ids.device)


class Policy(nn.Module):
    """A causal language model that gives logprobs of a packed batch, or a classifier that gives
    scores. The head is applied in here, so that FSDP has gathered its weight."""

    logprobs = staticmethod(fused_logprobs)

    def __init__(
        self,
        hf: PreTrainedModel,
        checkpoint_dtype: torch.dtype,
        compute_dtype: torch.dtype,
        forward_pass: ForwardPass,
        activations: Callable[[], AbstractContextManager] = nullcontext,
        host_copies: HostCopies | None = None,
        logprob_kernel: ModuleType | None = None,
        support_logprobs: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ):
        """`activations`: makes the context in which a forward saves its tensors. `host_copies`:
        memory of the weights outside on_device(). `logprob_kernel`: argument of fused_logprobs().
        `support_logprobs`: its replacement for labels [M, K], the ids that tokens were drawn
        from."""
        super().__init__()
        self.hf, self.forward_pass = hf, forward_pass
        self.checkpoint_dtype, self.compute_dtype = checkpoint_dtype, compute_dtype
        self.activations, self.host_copies = activations, host_copies
        self.logprob_kernel, self.support_logprobs = logprob_kernel, support_logprobs
        self.adapters: dict[str, peft.LoraConfig] = {}  # By name.
        self.vision: Vision | None = None  # None: the model reads text alone.
        self.is_served = False  # The engine applies the adapters itself.
        self.recomputes = False  # The backward recomputes activations.
        # Replaces the forward of the backbone.
        self.decoder: Callable[..., BaseModelOutput] | None = None

    def use_forward(self, forward_pass: ForwardPass) -> None:
        self.forward_pass = forward_pass

    def use_decoder(self, decoder: Callable[..., BaseModelOutput] | None) -> None:
        self.decoder = decoder

    def forward(
        self,
        batch: PackedBatch,
        temperature: float,
        adapter: str = "",
        outputs: Outputs | None = None,
    ) -> tuple[Tensor, ...]:
        """(logprobs, entropy), both [M] fp32, of the M trained tokens of the batch in their order;
        for a classifier (scores of the tokens before them, 0). `outputs` replaces the method
        outputs(), if the forward pass calls it."""
        assert self.is_on_device, "the weights are CPU-offloaded: enter learner.on_device()"
        results = self.forward_pass(self, batch, temperature, outputs or self.outputs)
        # FSDP warns of views: an operation in place would cut them off from FSDP's hooks.
        return tuple(x.clone() for x in results) if self.is_sharded else results

    def hidden_states(self, **inputs: Tensor | AttentionPlan) -> Tensor:
        plan = inputs.get("attention_plan")
        if isinstance(plan, AttentionPlan) and self.recomputes and torch.is_grad_enabled():
            plan.kept = {}
        with self.activations():
            decoder = self.decoder or backbone(self.hf)
            if self.vision is not None and self.vision.is_seen(inputs):
                decoder = self.vision.model
            hidden = decoder(**inputs, use_cache=False).last_hidden_state
        assert hidden is not None
        return hidden

    def outputs(
        self, hidden_MD: Tensor, labels: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """The results of forward(), from the hidden states before the trained tokens."""
        if self.is_scoring:
            scores = scores_of(self.hf, hidden_MD)
            return scores, torch.zeros_like(scores)
        hidden_MD, weight, temperature, cap = head_factors(self.hf, hidden_MD, temperature)
        weight = self.head_weight(weight)
        compute = self.logprobs
        if labels.ndim == 2:
            assert self.support_logprobs is not None
            compute = self.support_logprobs
        return compute(hidden_MD, weight, labels, temperature, cap, self.logprob_kernel)

    def head_weight(self, weight_VD: Tensor) -> Tensor:
        """The head's weight in this forward."""
        return weight_VD

    @property
    def is_scoring(self) -> bool:
        return hasattr(self.hf, "score")

    @property
    def is_sharded(self) -> bool:
        return isinstance(self, FSDPModule)

    @property
    def is_on_device(self) -> bool:
        shard = local(next(self.parameters()).detach())
        return not shard.numel() or shard.untyped_storage().nbytes() > 0

    @property
    def is_shareable(self) -> bool:
        """True if an engine in this process can sample from the tensors of the policy."""
        return not self.is_sharded

    def on_device(self) -> AbstractContextManager:
        """A context in which the weights are on the device."""
        if self.host_copies is None:
            return nullcontext()
        return self.host_copies.on_device(self.held)

    def held(self) -> Iterator[Tensor]:
        """The weights that are on this rank."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                # After a forward without a backward some parameters are still gathered.
                module.reshard()
        return map(local, self.parameters())

    def trained(self, adapter: str = "") -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of each parameter that the actor trains."""
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    def split(self, mesh: DeviceMesh) -> Callable | None:
        """Splits matrices before FSDP does; returns the shard_placement_fn for FSDP."""

    def gradient_norm(self, grads: list[Tensor]) -> Tensor:
        """Over all ranks, of gradients that are complete when it returns."""
        # torch takes the norm only of tensors on one mesh.
        by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
        for grad in grads:
            by_mesh.setdefault(getattr(grad, "device_mesh", None), []).append(grad)
        norms = [unsharded(nn.utils.get_total_norm(grads)) for grads in by_mesh.values()]
        return nn.utils.get_total_norm(norms) if len(norms) != 1 else norms[0]

    def unsharded_weights(self, adapter: str, dtypes: DTypes) -> Iterator[tuple[str, Tensor]]:
        return gathered_weights(self.hf.named_parameters(), dtypes)

    def named_weights(
        self, adapter: str = "", dtypes: DTypes = None
    ) -> Iterator[tuple[str, Tensor]]:
        """(transformers' name, unsharded tensor) of each parameter, the adapter merged; a tied
        weight comes once. Then each buffer that a checkpoint has, in its own dtype. Every rank must
        exhaust it."""
        assert self.is_on_device, "the weights are CPU-offloaded: enter learner.on_device()"
        if isinstance(self, FSDPModule):
            # After a forward without a backward some parameters are still gathered. Their memory
            # goes when state_dict() is called below, and who collects the weights in buckets would
            # hold tensors without memory.
            self.reshard()
        yield from self.unsharded_weights(adapter, dtypes)
        parameters = dict(self.hf.named_parameters(remove_duplicate=False))
        for name, value in self.hf.state_dict(keep_vars=True).items():
            if name not in parameters and isinstance(value, Tensor) and ".base_layer." not in name:
                yield name, value.detach()

    def engine_weights(
        self, adapter: str = "", in_place: bool = False
    ) -> Iterator[tuple[str, Tensor]] | None:
        """The weights that an update sends to the engine, in the compute dtype; None if `in_place`,
        because the engine samples from the policy's tensors. Every rank must exhaust the
        iterator."""
        return None if in_place else self.named_weights(adapter, self.compute_dtype)

    def export_adapter(self, adapter: str, folder: Path, ranks: Ranks) -> None:
        """A folder with the adapter alone, if there is one."""


def backbone(hf: PreTrainedModel) -> PreTrainedModel:
    """The module that returns hidden states; the language model of a multimodal model."""
    text = hf.base_model
    for name in ("language_model", "text_model"):  # Idefics3's name is the second.
        text = getattr(text, name, text)
    inner = cast(PreTrainedModel, text.base_model)
    has_head = inner.get_output_embeddings() is not None  # Llama 4's language model has a head.
    return cast(PreTrainedModel, inner.model) if inner is hf or has_head else inner


def matches(name: str, patterns: Iterable[str]) -> bool:
    """True if transformers' plans for parallelism mean this module or weight by a pattern."""
    return any(fnmatch(name, pattern) for pattern in patterns)


def blocks_of(hf: PreTrainedModel) -> nn.ModuleList:
    """The transformer's layers."""
    return largest_list(backbone(hf).modules())


def tower_blocks(hf: PreTrainedModel) -> nn.ModuleList:
    """The layers of the vision tower."""
    text = set(backbone(hf).modules())
    return largest_list(module for module in hf.modules() if module not in text)


def freeze_parts(hf: PreTrainedModel, trained: Sequence[str]) -> None:
    """Freezes all parts of a model that sees but those of `trained` and a classifier's head."""
    head = hf.get_output_embeddings()
    text = {*backbone(hf).parameters(), *(() if head is None else head.parameters())}
    for name, parameter in hf.named_parameters():
        is_trained = ("language" if parameter in text else seeing_part(name)) in trained
        parameter.requires_grad_(is_trained or name.startswith("score."))


def seeing_part(name: str) -> str:
    """The part of a weight or module by its name, if it is not of the language model."""
    return "projector" if PROJECTOR.search(name) else "vision"


def largest_list(modules: Iterable[nn.Module]) -> nn.ModuleList:
    lists = (m for m in modules if isinstance(m, nn.ModuleList))
    return max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))


def without_dropout(hf: PreTrainedModel) -> None:
    """Turns off all that is random in training, so that the learner's logprobs are those that the
    engine samples with. Not eval(), with which transformers would not recompute activations."""
    for module in hf.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # Seed-OSS's residual_dropout, OPT's dropout and layerdrop, Mixtral's jitter_noise
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(module, name, 0.0)


def end_token_ids(path: str) -> list[int]:
    """Tokens that a model's generation_config.json, or else its config.json, names as ends of a
    turn; some have several."""
    try:
        generation = load_pretrained(GenerationConfig, path)
    except OSError:
        generation = GenerationConfig.from_model_config(load_pretrained(AutoConfig, path))
    ids = generation.eos_token_id
    if ids is None:
        return []
    return ids if isinstance(ids, list) else [ids]
