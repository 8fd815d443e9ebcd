"""Tensor parallelism: each of `tp` ranks holds a slice of every matrix and computes with it
(Shoeybi et al. 2019, arXiv:1909.08053), by transformers' plan for the model.

A matrix is split by its outputs (colwise) or by its inputs (rowwise); between the two each rank
computes its heads and its slice of the MLP. An all-reduce follows the second. Embedding and head
are split over the vocabulary; of a mixture each rank has whole experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from transformers import PretrainedConfig

from rl_core.config import LoraConfig
from rl_core.models.kernels.torch_logprobs import merged_stats
from rl_core.models.loading import on_meta
from rl_core.models.logprobs import fused_logprobs
from rl_core.models.policy import Policy, backbone, matches

# Style of weights that are replicated, while a rank's gradient covers only its heads.
PARTIAL = "replicated_with_grad_allreduce"
SPLIT = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
MIXTURE = "moe_tp_experts"  # Style of modules with the experts of a layer.
DIVIDED = ("num_attention_heads", "num_key_value_heads")


def tp_plan(model_config: PretrainedConfig) -> dict[str, str]:
    """Layer of the base model, with * for numbers -> style of its split. Without the embedding,
    which some plans name and which is always split over the vocabulary, and without experts."""
    plan = model_config.get_text_config().base_model_tp_plan or {}
    left_out = [f"{name}*" for name, style in plan.items() if style == MIXTURE]
    return {
        name: style
        for name, style in plan.items()
        if style != "embedding_rowwise" and not matches(name, left_out)
    }


def has_experts(model_config: PretrainedConfig) -> bool:
    return MIXTURE in (model_config.get_text_config().base_model_tp_plan or {}).values()


def style_of(name: str, plan: dict[str, str]) -> str | None:
    return next((style for pattern, style in plan.items() if matches(name, [pattern])), None)


def split_layers(base: nn.Module, plan: dict[str, str]) -> dict[str, tuple[nn.Module, str]]:
    """Name -> (linear layer, style) of each layer whose matrix is split."""
    styles = {name: style_of(name, plan) for name, _ in base.named_modules()}
    return {n: (base.get_submodule(n), style) for n, style in styles.items() if style in SPLIT}


def check_tensor_parallel(
    tp: int, model_config: PretrainedConfig, lora: LoraConfig | None = None
) -> None:
    """Raises ValueError if the model cannot be split over `tp` ranks, before any weight is read."""
    if tp == 1:
        return
    if lora is not None and lora.adapts_experts:
        raise ValueError(
            f"--tp={tp} splits no adapters on experts; take --tp 1, or leave experts out of "
            "--actors.NAME.lora.targets"
        )
    if lora is not None and lora.quantize != "none":
        raise ValueError(
            f"--tp={tp} splits no quantized model; take --tp 1, or leave out "
            "--actors.NAME.lora.quantize"
        )
    config, base = model_config.get_text_config(), backbone(on_meta(model_config))
    if problem := problem_of(tp_plan(model_config), base):
        raise ValueError(
            f"--tp={tp}: {problem.format(f'a {config.model_type} model')}; take --tp 1"
        )
    sizes = {name: getattr(config, name, None) or config.num_attention_heads for name in DIVIDED}
    for name, (layer, style) in split_layers(base, tp_plan(model_config)).items():
        width = layer.out_features if style == "colwise" else layer.in_features
        assert isinstance(width, int)
        sizes[f"{name.rpartition('.')[2]} width"] = width
    if has_experts(model_config):
        from rl_core.models.parallel.expert_parallel import num_to_split

        sizes["experts"] = num_to_split(tp, model_config, "tp")
    common = math.gcd(*sizes.values())
    if common % tp:
        actual = ", ".join(f"{name}={size}" for name, size in sizes.items() if size % tp)
        fits = max(n for n in range(1, tp) if common % n == 0)
        raise ValueError(f"--tp={tp} must divide the model's {actual}; try --tp {fits}")


def problem_of(plan: dict[str, str], base: nn.Module) -> str | None:
    """Reason why the matrices of {} cannot be split by this plan, or None."""
    if not plan:
        return "{} has no plan in transformers"
    if unknown := sorted({*plan.values()} - {*SPLIT, PARTIAL}):
        return f"{{}} splits layers as {unknown[0]}, which rl_core does not support"
    if not any("att" in name for name in plan):
        return "the plan for {} splits no attention, so that --ep divides as much"
    if not split_layers(base, plan):
        return "the plan for {} names none of its layers"
    readers = [f"{name.rpartition('.')[0]}.*" for name in split_layers(base, plan)]
    names = (name.rpartition(".")[0] for name, _ in base.named_parameters())
    if left_out := [name for name in names if matches(name, readers) and not matches(name, plan)]:
        return (
            f"the plan for {{}} leaves out {left_out[0]}, whose gradient would cover only a rank's "
            "heads"
        )
    return None


class SplitVocabulary:
    """Merges the results of fused_logprobs() over a group whose ranks have different ids."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    def merged(self, chosen: Tensor, entropy: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mine = torch.stack([chosen, lse, torch.ones_like(lse), -entropy])
        of_ranks = [torch.empty_like(mine) for _ in range(self.group.size())]
        dist.all_gather(of_ranks, mine, group=self.group)
        return merged_stats(*torch.stack(of_ranks, 1))

    def add_up(self, sums: Tensor) -> None:
        dist.all_reduce(sums, group=self.group)


def split_logprobs(
    hidden_MD: Tensor, weight_VD: DTensor, labels: Tensor, *options
) -> tuple[Tensor, Tensor]:
    """fused_logprobs() for a weight that is split by rows, with the same result on all ranks."""
    weight_SD, first, split = local_slice(weight_VD)
    return fused_logprobs(hidden_MD, weight_SD, labels - first, *options, split=split)


def local_slice(weight_VD: DTensor) -> tuple[Tensor, int, SplitVocabulary]:
    """(this rank's rows of a weight that is split by rows, index of the first row, object that
    merges ranks)."""
    mesh = weight_VD.device_mesh
    placed = weight_VD.shape, mesh, weight_VD.placements
    _, (first, _) = compute_local_shape_and_global_offset(*placed)
    return weight_VD.to_local(), first, SplitVocabulary(mesh.get_group())


class TensorParallelPolicy(Policy):
    """A policy whose planned matrices, embedding and head are this rank's slices."""

    logprobs = staticmethod(split_logprobs)

    def split(self, mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard | None]:
        """Splits the model; tied weights stay tied. Returns the dimension by which FSDP splits a
        parameter over the other ranks of a replica."""
        self.mesh, hf = mesh["tp"], self.hf
        base = backbone(hf)
        embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
        is_tied = head is not None and head.weight is embedding.weight
        plan = tp_plan(hf.config)
        # Modules whose gradients are sums over ranks. A list of modules would be submodules.
        self.partial = [m for n, m in base.named_modules() if style_of(n, plan) == PARTIAL]
        layers = split_layers(base, plan)
        for layer, style in layers.values():
            self.split_layer(layer, style)
        for name in {name.rpartition(".")[0] for name in layers}:  # Attention and MLP.
            reader = base.get_submodule(name)
            reader.register_forward_pre_hook(partial(share_input, self.mesh), with_kwargs=True)
        self.split_module(embedding, RowwiseParallel(input_layouts=Replicate()))
        if head is not None and is_tied:
            head.weight = embedding.weight
        elif head is not None:  # fused_logprobs() computes its product.
            head.weight = self.split_weight(head.weight, 0)
        experts = []
        if has_experts(hf.config):
            from rl_core.models.parallel.expert_parallel import split_experts

            experts = split_experts(hf, self.mesh)
        of_experts = {weight for module in experts for weight in module.parameters()}
        return partial(split_again, mesh["dp_shard_cp"].size(), of_experts)

    def split_layer(self, layer: nn.Module, style: str) -> None:
        self.split_module(layer, SPLIT[style]())

    def split_module(self, module: nn.Module, style: ParallelStyle) -> None:
        # Each rank has the same unsharded weights, or none yet, so nothing is sent.
        parallelize_module(module, self.mesh, style, src_data_rank=None)

    def split_weight(self, weight: Tensor, dim: int) -> nn.Parameter:
        split = distribute_tensor(weight, self.mesh, [Shard(dim)], src_data_rank=None)
        return nn.Parameter(split, weight.requires_grad)

    def gradient_norm(self, grads: list[Tensor]) -> Tensor:
        self.finish_gradients()
        return super().gradient_norm(grads)

    def finish_gradients(self) -> None:
        """Sums the gradients of replicated weights that act on a rank's share: norms of queries or
        keys, halves of adapters. Called once per optimizer step; every other gradient is
        complete."""
        grads = []
        for module in self.partial:
            for parameter in module.parameters():
                if parameter.grad is not None:
                    grads.append(cast(DTensor, parameter.grad).to_local())
        if not grads:
            return
        total = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(total, group=self.mesh.get_group())
        for grad, values in zip(grads, total.split([g.numel() for g in grads]), strict=True):
            grad.copy_(values.view_as(grad))


def share_input(
    mesh: DeviceMesh, module: nn.Module, args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    """The hidden states of a forward as one DTensor for all matrices that read them: their
    gradients are summed on each rank first, and then over ranks once instead of for every
    matrix."""
    shared = partial(
        DTensor.from_local, device_mesh=mesh, placements=[Replicate()], run_check=False
    )
    if args:
        return (shared(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": shared(kwargs["hidden_states"])}


def split_again(
    num_parts: int, experts: set[nn.Parameter], parameter: nn.Parameter
) -> Shard | None:
    """The dimension that FSDP splits over `num_parts` ranks; None: rows. DTensor misplaces rows
    that are split unevenly over tp and again over other ranks. Raises ValueError if no dimension
    can be split."""
    if parameter in experts:
        from rl_core.models.parallel import expert_parallel

        return expert_parallel.split_again(parameter, num_parts)
    if not isinstance(parameter, DTensor) or parameter.shape[0] % parameter.device_mesh.size() == 0:
        return None
    if parameter.placements[0] != Shard(0) or num_parts == 1:
        return None
    vocab_size, width = parameter.shape
    if width % num_parts:
        raise ValueError(
            f"--tp={parameter.device_mesh.size()} does not divide the model's vocabulary of "
            f"{vocab_size}, so that the other "
            f"ranks of a replica must divide its hidden_size={width}; try "
            f"{math.gcd(width, num_parts)} of them, or --tp 1"
        )
    return Shard(1)
