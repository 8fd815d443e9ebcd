"""Expert parallelism (--ep): each of `ep` ranks holds a share of the experts of every layer, by
transformers' plan for the model. The ranks have different tokens.

    rank              0                      1
    tokens            a b c                  d e
    gathered          a b c d e .            a b c d e .        padded to the longest
    rows              choices of experts     choices of experts
                      of rank 0              of rank 1
    output            sums of a b c          sums of d e        reduce-scatter of all rows' outputs

A rank computes no row for an expert of another rank, so that nothing has to be masked. All that is
not an expert is replicated or sharded as without --ep.

Legend: T tokens of a rank, N gathered tokens, K experts of a token, P rows of this rank's experts,
D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig, PreTrainedModel

from rl_core.config import Config, LoraConfig
from rl_core.distributed import local, sum_over
from rl_core.models.loading import load_model_config, on_meta
from rl_core.models.parallel.context_parallel import gathered_rows, summed_rows
from rl_core.models.policy import backbone, matches

# Style of weights with a row for each expert, and styles of modules around them.
SPLIT, AROUND = "grouped_gemm", {"ep_dispatch_experts", "ep_router", "moe_tp_experts"}
MAX_AUTO = 8  # More ranks would gather more tokens than an expert's rows are worth.


def ep_plan(model_config: PretrainedConfig) -> dict[str, str]:
    """Layer of the language model, with * for numbers -> style of its split over ranks."""
    return getattr(model_config.get_text_config(), "base_model_ep_plan", None) or {}


def split_weights(model_config: PretrainedConfig) -> list[str]:
    """Weights of the language model with a row for each expert, with * for numbers."""
    return [name for name, style in ep_plan(model_config).items() if style == SPLIT]


def expert_modules(hf: PreTrainedModel) -> dict[str, nn.Module]:
    """Name in the language model -> each module that holds the experts of a layer."""
    owners = {name.rpartition(".")[0] for name in split_weights(hf.config)}
    modules = backbone(hf).named_modules()
    return {name: module for name, module in modules if matches(name, owners)}


def num_experts(model_config: PretrainedConfig) -> int:
    """Experts of a layer. Raises ValueError if they cannot be split over ranks."""
    family, plan = model_config.get_text_config().model_type, ep_plan(model_config)
    if not plan:
        raise ValueError(f"a {family} model has no plan for experts in transformers")
    if unknown := sorted(set(plan.values()) - {SPLIT, *AROUND}):
        raise ValueError(
            f"a {family} model splits layers as {unknown[0]}, which rl_core does not support"
        )
    sizes = set()
    for owner, module in expert_modules(on_meta(model_config)).items():
        for name, weight in module.named_parameters():
            if not matches(f"{owner}.{name}", split_weights(model_config)):
                raise ValueError(f"the plan for a {family} model leaves out its experts' {name}")
            sizes.add(weight.shape[0])
    if len(sizes) != 1:
        raise ValueError(f"layers of a {family} model have {sorted(sizes)} experts")
    return sizes.pop()


def check_expert_parallel(
    ep: int | str, model_config: PretrainedConfig, lora: LoraConfig | None = None
) -> None:
    """Raises ValueError if the experts of a model that is trained cannot be split over `ep` ranks,
    before any weight is read."""
    if ep in (1, "auto"):
        return
    if lora is not None and lora.quantize != "none":
        raise ValueError(
            f"--ep={ep} splits no quantized model; take --ep 1, or leave out "
            "--actors.NAME.lora.quantize"
        )
    num = num_to_split(int(ep), model_config)
    check_division(int(ep), num)
    if ep == num and lora is not None and lora.adapts_experts:
        raise ValueError(
            f"--ep={ep} leaves one of the model's {num} experts to a rank, and peft's adapters on "
            f"experts need two; try --ep {nearest_divisor(num, num - 1)}"
        )


def num_to_split(ep: int, model_config: PretrainedConfig, flag: str = "ep") -> int:
    """num_experts(). Its error names the flag."""
    try:
        return num_experts(model_config)
    except ValueError as error:
        raise ValueError(f"--{flag}={ep}: {error}; take --{flag} 1") from None


def check_division(ep: int, num: int, flag: str = "ep") -> None:
    if num % ep:
        fits = nearest_divisor(num, ep)
        raise ValueError(
            f"--{flag}={ep} must divide the model's {num} experts; try --{flag} {fits}"
        )


def nearest_divisor(num: int, most: int) -> int:
    return max(n for n in range(1, most + 1) if num % n == 0)


def num_expert_ranks(config: Config, num_shards: int, actors: Iterable[str]) -> int:
    """--ep for these actors on `num_shards` ranks of a copy. `auto`: the largest number up to
    MAX_AUTO that divides the ranks and the experts of every model, of critics, references and
    teachers too; 1 where --ep is refused."""
    if config.ep != "auto":
        return config.ep
    try:
        return most_expert_ranks(config, num_shards, actors)
    except (OSError, ValueError):  # why_unsplit() says so.
        return 1


def most_expert_ranks(config: Config, num_shards: int, actors: Iterable[str]) -> int:
    """The largest --ep. Raises ValueError, or OSError for a model that cannot be read, if only 1 is
    possible on any number of ranks."""
    if config.tp > 1:
        raise ValueError(f"--tp={config.tp} cannot be combined with --ep")
    if (kernels := config.learner.kernels) != "default":
        raise ValueError(f"--learner.kernels={kernels} cannot be combined with --ep")
    common, most = num_shards, MAX_AUTO
    for name in actors:
        actor, settings = config.actors[name], config.of(name)
        if actor.lora.quantize != "none":
            raise ValueError(f"the model of actor {name} is quantized")
        if actor.model is None:  # It trains an adapter of another actor's weights.
            continue
        model_config = load_model_config(actor.model)
        if hasattr(model_config, "vision_config"):
            raise ValueError(f"{actor.model} can see images; --ep N splits it to train on text")
        num = num_experts(model_config)
        common = math.gcd(common, num)
        if actor.lora.adapts_experts:
            most = min(most, max(1, num // 2))
        for path in (settings.critic.model or actor.model, *settings.frozen_models.values()):
            other = load_model_config(path)
            if ep_plan(other):  # A dense model is sharded as without --ep.
                common = math.gcd(common, num_experts(other))
    return nearest_divisor(common, most)


def why_unsplit(config: Config, actors: Iterable[str]) -> str:
    """Reason why `--ep auto` is 1 for these actors."""
    try:
        most_expert_ranks(config, 1, actors)
    except (OSError, ValueError) as error:
        return str(error)
    return f"no number from 2 to {MAX_AUTO} divides the ranks of a copy and the experts"


def split_experts(hf: PreTrainedModel, mesh: DeviceMesh) -> list[nn.Module]:
    """Splits the experts of each layer over the mesh of `ep` or `tp` ranks. Returns their modules,
    which FSDP shards over the other ranks of a copy."""
    flag = flag_of(mesh)
    make = SameTokens if flag == "tp" else Dispatch
    modules = list(expert_modules(hf).values())
    for module in modules:
        for name, weight in [*module.named_parameters()]:
            owner, _, kind = name.rpartition(".")
            # Matrices B of adapters have their experts last.
            by_expert = Shard(2 if "lora_B" in name else 0)
            check_division(mesh.size(), weight.shape[by_expert.dim], flag)
            # Each rank has the same unsharded weights, or none yet, so nothing is sent.
            share = distribute_tensor(weight, mesh, [by_expert], src_data_rank=None)
            parameter = nn.Parameter(share, weight.requires_grad)
            module.get_submodule(owner).register_parameter(kind, parameter)
        make(module, mesh)
    return modules


def split_again(parameter: nn.Parameter, num_parts: int) -> Shard | None:
    """The dimension by which FSDP splits a share of experts over `num_parts` ranks: the first that
    divides. Raises ValueError if none can be split evenly."""
    assert isinstance(parameter, DTensor)
    shape = local(parameter).shape
    for dim, size in enumerate(shape):
        if size % num_parts == 0:
            return Shard(dim)
    ep, flag = parameter.device_mesh.size(), flag_of(parameter.device_mesh)
    raise ValueError(
        f"--{flag}={ep}: the other {num_parts} ranks of a copy must divide a size of each weight "
        f"of a rank's experts, and one has {tuple(shape)}; try --{flag} 1, or a multiple of {ep}"
    )


def flag_of(mesh: DeviceMesh) -> str:
    """ep or tp."""
    assert mesh.mesh_dim_names is not None
    return mesh.mesh_dim_names[0]


class Dispatch:
    """Brings the tokens of all ranks to the experts of this rank, and the outputs back, by hooks
    around the experts of a layer and their adapters."""

    def __init__(self, experts: nn.Module, mesh: DeviceMesh):
        self.mesh, self.group, self.num_tokens = mesh, mesh.get_group(), 0
        owners = [m for m in experts.modules() if hasattr(m, "num_experts")]
        total = cast(int, owners[0].num_experts)
        self.num_experts = total // mesh.size()
        self.first = mesh.get_local_rank() * self.num_experts
        for owner in owners:  # The forward counts its experts.
            owner.num_experts = self.num_experts  # pyright: ignore[reportArgumentType]
        self.sharded: list[tuple[nn.Module, dict[str, nn.Parameter]]] = []
        self.tokens_P = torch.empty(0, dtype=torch.long)
        experts.register_forward_pre_hook(self.before)
        experts.register_forward_hook(self.after, always_call=True)

    def before(self, experts: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """(hidden states [T, D], experts [T, K] and their weights [T, K]) of this rank's tokens ->
        the same [P, D], [P, 1], [P, 1] of the rows of this rank's experts."""
        hidden_ND, chosen_NK, weights_NK = self.from_ranks(*args)
        local_NK = chosen_NK - self.first
        is_mine = (local_NK >= 0) & (local_NK < self.num_experts)
        self.tokens_P, choices_P = is_mine.nonzero(as_tuple=True)
        self.size = hidden_ND.shape
        # Without a row of weight 0 a rank whose experts nobody chose would have another graph.
        rows_PD = pad(hidden_ND[self.tokens_P], (0, 0, 0, 1))
        local_P = pad(local_NK[self.tokens_P, choices_P], (0, 1))
        weights_P = pad(weights_NK[self.tokens_P, choices_P], (0, 1))
        self.sharded = [(m, dict(m.named_parameters(recurse=False))) for m in experts.modules()]
        for module, parameters in self.sharded:
            for name, weight in parameters.items():
                plain = local(weight)  # The products need plain tensors.
                is_frozen = not plain.requires_grad  # peft puts a sum in place of a parameter.
                plain = nn.Parameter(plain, False) if is_frozen else plain
                module._parameters[name] = cast(nn.Parameter, plain)
        return rows_PD, local_P[:, None], weights_P[:, None]

    def after(self, experts: nn.Module, args: tuple, rows_PD: Tensor | None) -> Tensor | None:
        """[T, D], the sum over ranks of the rows of this rank's tokens."""
        for module, parameters in self.sharded:
            module._parameters.update(parameters)
        if rows_PD is None:  # The forward failed.
            return None
        kind = torch.promote_types(rows_PD.dtype, torch.float32)
        sums_ND = torch.zeros(self.size, dtype=kind, device=rows_PD.device)
        sums_ND = sums_ND.index_add(0, self.tokens_P, rows_PD[:-1].to(kind))
        return self.to_ranks(sums_ND.to(rows_PD.dtype))

    def from_ranks(
        self, hidden_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same [N, D], [N, K], [N, K] of the tokens of all ranks."""
        self.num_tokens, device = len(hidden_TD), hidden_TD.device
        lengths = gathered_rows(torch.tensor([self.num_tokens], device=device), self.group)
        missing = int(lengths.max()) - self.num_tokens
        hidden_ND, weights_NK = FromRanks.apply(self.group, missing, hidden_TD, weights_TK)
        chosen_NK = gathered_rows(pad(chosen_TK, (0, 0, 0, missing), value=-1), self.group)
        return hidden_ND, chosen_NK, weights_NK

    def to_ranks(self, sums_ND: Tensor) -> Tensor:
        return ToRanks.apply(self.group, self.num_tokens, sums_ND)


class SameTokens(Dispatch):
    """Dispatch between ranks of tensor parallelism, which have the same tokens: nothing is
    gathered, and an all-reduce adds the outputs up."""

    def from_ranks(
        self, hidden_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        shared = []
        for value in (hidden_TD, weights_TK):  # Each rank has a part of their gradients.
            copy = DTensor.from_local(value, self.mesh, [Replicate()], run_check=False)
            shared.append(copy.to_local(grad_placements=[Partial()]))
        return shared[0], chosen_TK, shared[1]

    def to_ranks(self, sums_ND: Tensor) -> Tensor:
        return sum_over(sums_ND, self.mesh)


class FromRanks(torch.autograd.Function):
    """Each tensor [T, ...] -> [N, ...], padded rows of all ranks. The gradient is the sum over
    ranks, scaled as ToRanks undoes it."""

    @staticmethod
    def forward(ctx, group, missing, *tensors):
        ctx.group, ctx.num_tokens = group, len(tensors[0])
        return tuple(gathered_rows(pad(x, (0, 0, 0, missing)), group) for x in tensors)

    @staticmethod
    def backward(ctx, *grads):
        size, sums = ctx.group.size(), []
        for grad, is_needed in zip(grads, ctx.needs_input_grad[2:], strict=True):
            total = summed_rows(grad, ctx.group)[: ctx.num_tokens] * size if is_needed else None
            sums.append(total)
        return None, None, *sums


class ToRanks(torch.autograd.Function):
    """[N, D] -> [T, D], this rank's rows of the sum over ranks. The gradient is divided by the
    number of ranks: an expert gets the gradient of all their tokens, and FSDP averages over other
    ranks only."""

    @staticmethod
    def forward(ctx, group, num_tokens, sums_ND):
        summed = summed_rows(sums_ND, group)
        ctx.group, ctx.missing = group, len(summed) - num_tokens
        # FSDP warns of views.
        return summed[:num_tokens].clone() if ctx.missing else summed

    @staticmethod
    def backward(ctx, grad):
        padded = pad(grad, (0, 0, 0, ctx.missing))
        return None, None, gathered_rows(padded, ctx.group) / ctx.group.size()
