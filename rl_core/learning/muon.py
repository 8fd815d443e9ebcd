"""Muon for the matrices of blocks, AdamW for all other parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rl_core.config import OptimConfig
from rl_core.distributed import local
from rl_core.learning.learner_context import Named
from rl_core.learning.optimizers import parameter_groups
from rl_core.models.weight_gathering import unsharded_together

# Defaults of torch.optim.Muon: momentum, coefficients of the Newton-Schulz iteration.
MOMENTUM, NEWTON_SCHULZ = 0.95, (3.4445, -4.775, 2.0315)


def muon(named: Named, config: OptimConfig) -> Optimizer:
    """Muon for the matrices of blocks, AdamW for all other parameters."""
    groups: dict[str, list] = {"muon": [], "adamw": []}
    for name, parameter in named:
        groups["muon" if is_block_matrix(name, parameter) else "adamw"].append((name, parameter))
    made = []
    for rule, parameters in groups.items():
        for group in parameter_groups(parameters, config.weight_decay):
            made.append({**group, "rule": rule})
    return Muon(made, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def is_block_matrix(name: str, parameter: Tensor) -> bool:
    """True for the matrices of numbered blocks, and for stacks of experts' matrices; embeddings,
    heads, biases, norms and convolutions are none."""
    is_expert = parameter.ndim == 3 and ".experts." in name
    is_matrix = parameter.ndim == 2 or is_expert
    return is_matrix and bool(re.search(r"\.\d+\.", name)) and not re.search("embed|bias", name)


class Muon(torch.optim.AdamW):
    """torch.optim.Muon with adjust_lr_fn="match_rms_adamw" for groups of the rule muon, so that the
    learning rate is that of AdamW, which steps the other groups (Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv:2502.16982, eq. 4). Of a
    sharded matrix each rank has a shard of the momentum; the update is computed from the whole
    matrix, one matrix on one rank. Every rank must call step()."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        from rl_core.models.parallel.fsdp import local_slices

        for group in self.param_groups:
            if group["rule"] != "muon":
                continue
            parameters = [p for p in group["params"] if p.grad is not None]
            updates = orthogonal_updates(parameters, self.momentum_update)
            for parameter, update in zip(parameters, updates, strict=True):
                weight, slices = local_slices(parameter)
                rate = group["lr"] * 0.2 * math.sqrt(max(parameter.shape[-2:]))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                # Matrices that were not gathered: the update is the shard's already.
                mine = update if update.shape == weight.shape else update[slices]
                weight.add_(mine.to(weight.device), alpha=-rate)
                parameter.grad = None  # AdamW skips it.
        return super().step(closure)

    def momentum_update(self, parameter: Tensor) -> Tensor:
        """Nesterov momentum of the gradient, sharded like it, in bf16 on the mesh's device."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - MOMENTUM)
        update = gradient.lerp(buffer, MOMENTUM).bfloat16()
        if not isinstance(update, DTensor):
            return update
        mesh, on_mesh = update.device_mesh, local(update).to(update.device_mesh.device_type)
        layout = {"shape": update.shape, "stride": update.stride()}
        return DTensor.from_local(on_mesh, mesh, update.placements, run_check=False, **layout)


def orthogonal_updates(
    parameters: list[Tensor], update_of: Callable[[Tensor], Tensor]
) -> Iterator[Tensor]:
    """The orthogonalised update of each matrix; of this rank's shard if no matrix is split. Split
    matrices are gathered, and the ranks of the mesh's largest dimension take turns: each
    orthogonalises one and sends it to the others. update_of(parameter) is called as late as
    possible, because its result takes memory."""
    mesh = getattr(parameters[0], "device_mesh", None) if parameters else None
    if mesh is None:
        for parameter in parameters:
            yield newton_schulz(update_of(parameter))
        return
    dim = max(range(mesh.ndim), key=mesh.size)
    group, size, rank = mesh.get_group(dim), mesh.size(dim), mesh.get_local_rank(dim)
    for start in range(0, len(parameters), size):
        chunk, results = list(map(update_of, parameters[start : start + size])), []
        gathered = iter(unsharded_together([update for update in chunk if not is_whole(update)]))
        for owner, update in enumerate(chunk):
            if is_whole(update):
                results.append(newton_schulz(local(update)))
                continue
            matrix = next(gathered)
            results.append(newton_schulz(matrix) if owner == rank else matrix)
        for owner, (update, result) in enumerate(zip(chunk, results, strict=True)):
            if not is_whole(update):
                dist.broadcast(result, group=group, group_src=owner)
            yield result


def is_whole(update: Tensor) -> bool:
    """True if no matrix is split over ranks; a stack of matrices may be."""
    assert isinstance(update, DTensor)
    dims = [getattr(placement, "dim", None) for placement in update.placements]
    return all(dim is None or dim < update.ndim - 2 for dim in dims)


def newton_schulz(matrices: Tensor) -> Tensor:
    """Nearly U V^T of matrices [..., m, n] = U S V^T in bf16, as torch.optim.Muon computes it:
    singular values between about 0.5 and 1.5."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(5):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).contiguous()
