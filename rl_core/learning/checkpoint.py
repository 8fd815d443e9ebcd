"""Save and resume a run: every rank writes its own shards, and any number of ranks reads them.

checkpoints/step_000010/manifest.json                 written last: every file with its size and sha256
                        state.json                    step, data position
                        policy.lagged.safetensors     weights of an engine's older version, whole, where it has one
                        policy/rank_00000.safetensors trained weights and the optimizer's state; metadata tells where
                                                      each part lies in the whole
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rl_core.distributed import Ranks, all_gather_json, barrier
from rl_core.learning.learner import Learner
from rl_core.learning.loading import local_part
from rl_core.learning.model import whole_model


def trained_weights(learner: Learner) -> dict[str, Tensor]:
    """Name -> parameter as the learner holds it, sharded or not. What is frozen is loaded from where it came from."""
    if isinstance(model := whole_model(learner.policy), FSDPModule):
        model.reshard()  # after a forward without a backward some parameters are still whole
    return {n: p.detach() for n, p in learner.policy.named_parameters() if p.requires_grad}


def optimized(learner: Learner) -> Iterator[tuple[str, Tensor, dict, int]]:
    """(name, tensor that the optimizer changes, its group, its index) of each trained parameter."""
    for group in learner.optimizer.param_groups:
        for i, (name, parameter) in enumerate(zip(group["param_names"], group["params"], strict=True)):
            yield name, parameter, group, i


def saved_parts(learner: Learner) -> dict[str, tuple[Tensor, list[int]]]:
    """Name -> this rank's part of weights and optimizer state, and where it begins in the whole. State that has a number
    for each weight can be cut anew for other numbers of ranks; what is in 8 bits cannot, so its name tells whose it is."""
    weights, ranks = trained_weights(learner), learner.ranks
    found = {f"param/{name}": local_part(weight) for name, weight in weights.items()}
    for name, parameter, _, _ in optimized(learner):
        weight, offset = local_part(weights[name])
        for kind, value in learner.optimizer.state.get(parameter, {}).items():
            if kind == "step" or value is None:
                continue
            value, _ = local_part(value)
            if value.shape == weight.shape and value.is_floating_point():
                found[f"{kind}/{name}"] = value, offset
            else:
                found[f"{kind}@{ranks.rank}of{ranks.size}/{name}"] = value, [0] * value.ndim
    return {k: (v, offset) for k, (v, offset) in found.items() if v.numel()}


def is_written_here(value: Tensor, ranks: Ranks) -> bool:
    """Whether this rank is the first of those that hold the same part of a parameter."""
    if not isinstance(value, DTensor):
        return True
    is_split = zip(value.device_mesh.mesh_dim_names, value.placements, strict=True)
    split = {name for name, placement in is_split if not placement.is_replicate()}
    place = zip(ranks.weights_mesh.mesh_dim_names, ranks.weights_mesh.get_coordinate(), strict=True)
    return all(index == 0 for name, index in place if name not in split)


OlderWeights = tuple[int, dict[str, Tensor]]  # their version, and name -> whole tensor on the host


def save_checkpoint(
    folder: Path,
    learners: dict[str, Learner],
    state: dict,
    ranks: Ranks,
    keep: int,
    older: dict[str, OlderWeights] | None = None,
) -> None:
    """checkpoints/step_N, whole or not there at all: of each actor's learner all that it trains. `older`, of rank 0 alone: of
    actors whose engine has them. Every rank must call it."""
    beside = folder.with_name(f".{folder.name}.tmp")
    if ranks.rank == 0:
        shutil.rmtree(beside, ignore_errors=True)
        for name in (name for actor, learner in learners.items() for name in learner.trained(actor)):
            (beside / name).mkdir(parents=True)
    barrier(ranks)  # the folders are there
    written, state = {}, state | {"optimizers": {}}
    for actor, owner in learners.items():
        with owner.on_device():
            for name, learner in owner.trained(actor).items():
                file = beside / name / f"rank_{ranks.rank:05d}.safetensors"
                write_parts(learner, file)
                written |= file_facts(file, beside)
                steps = [int(s["step"]) for s in learner.optimizer.state.values() if "step" in s]
                state["optimizers"][name] = {"name": type(learner.optimizer).__name__, "steps": max(steps, default=0)}
    for actor, (version, weights) in (older or {}).items():
        file = older_file(beside, actor)
        save_file(weights, file, metadata={"version": str(version)})
        written |= file_facts(file, beside)
    everything = all_gather_json(written, ranks)
    if ranks.rank == 0:
        (beside / "state.json").write_text(json.dumps(state, indent=1))
        files = {k: v for part in everything for k, v in part.items()} | file_facts(beside / "state.json", beside)
        (beside / "manifest.json").write_text(json.dumps({"files": files}, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(beside, folder)
        if keep:
            for old in checkpoints_in(folder.parent)[:-keep]:
                shutil.rmtree(old)
    barrier(ranks)  # no rank goes on before the checkpoint stands


def older_file(folder: Path, actor: str) -> Path:
    return folder / f"{actor}.lagged.safetensors"  # no actor's folder has such a name


def load_older_weights(folder: Path, actor: str) -> OlderWeights | None:
    """What a checkpoint holds for an engine with older weights; None if they were no older than the learner's."""
    file = older_file(folder, actor)
    if not file.is_file():
        return None
    with safe_open(file, framework="pt") as saved:
        return int(saved.metadata()["version"]), {name: saved.get_tensor(name) for name in saved.keys()}  # noqa: SIM118


def write_parts(learner: Learner, file: Path) -> None:
    weights = trained_weights(learner)
    parts = {
        key: part
        for key, part in saved_parts(learner).items()
        if "@" in key or is_written_here(weights[key.partition("/")[2]], learner.ranks)
    }
    save_file(
        # What has an owner is small, and parameters may share it.
        {k: v.cpu().clone() if "@" in k else v.cpu().contiguous() for k, (v, _) in parts.items()},
        file,
        metadata={"offsets": json.dumps({k: offset for k, (_, offset) in parts.items()})},
    )


def file_facts(file: Path, root: Path) -> dict:
    with open(file, "rb") as handle:
        digest = (
            hashlib.file_digest(handle, "sha256").hexdigest()
            if hasattr(hashlib, "file_digest")
            else hashlib.sha256(handle.read()).hexdigest()
        )
    with open(file, "rb+") as handle:
        os.fsync(handle.fileno())
    return {str(file.relative_to(root)): {"bytes": file.stat().st_size, "sha256": digest}}


def checkpoints_in(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p for p in folder.glob("step_*") if (p / "manifest.json").is_file())


def saved_step(folder: Path) -> int:
    """How many steps of the run were done."""
    return json.loads((folder / "state.json").read_text())["step"]


def load_checkpoint(folder: Path, learners: dict[str, Learner]) -> dict:
    """Fills the learners and gives the saved state. Raises ValueError if a file is missing or cut short, or if the
    checkpoint is of another model."""
    for file, facts in json.loads((folder / "manifest.json").read_text())["files"].items():
        size = (folder / file).stat().st_size if (folder / file).is_file() else -1
        if size != facts["bytes"]:
            raise ValueError(
                f"{folder / file} has {size} bytes, its manifest says {facts['bytes']}: the checkpoint is "
                f"damaged; remove {folder} to go on from the one before it"
            )
    state = json.loads((folder / "state.json").read_text())
    for name, learner in {k: v for actor, x in learners.items() for k, v in x.trained(actor).items()}.items():
        if not (folder / name).is_dir():
            raise ValueError(
                f"{folder} has no actor {name!r}; it has {', '.join(p.name for p in folder.iterdir() if p.is_dir())}"
            )
        files, saved = sorted((folder / name).glob("*.safetensors")), state["optimizers"][name]
        if saved["name"] != (ours := type(learner.optimizer).__name__):
            raise ValueError(
                f"{folder} holds the state of {saved['name']} for {name!r}, which {ours} cannot use; resume with the "
                "--optim.name that it was saved with"
            )
        make_state(learner, saved["steps"], files)
        read_shards(files, saved_parts(learner))
    return state


def make_state(learner: Learner, steps: int, files: list[Path]) -> None:
    """An optimizer creates its state at the first step; a resumed one needs it before, of the kinds that were saved."""
    kinds: dict[str, set[str]] = {}
    for file in files:
        with safe_open(file, framework="pt") as saved:
            for kind, _, name in (key.partition("/") for key in saved.keys()):  # noqa: SIM118
                kinds.setdefault(name, set()).add(kind)
    size = learner.ranks.size
    owners = {kind.partition("of")[2] for found in kinds.values() for kind in found if "@" in kind}
    if owners - {str(size)}:
        raise ValueError(
            f"{files[0].parent} holds 8-bit optimizer state of {owners.pop()} ranks, which cannot be cut for {size}; "
            "resume with as many ranks"
        )
    for name, parameter, group, index in optimized(learner):
        state_kinds = kinds.get(name, set()) - {"param"}
        if not state_kinds:
            continue
        state = learner.optimizer.state[parameter]
        if hasattr(learner.optimizer, "init_state"):  # of bitsandbytes
            learner.optimizer.init_state(group, parameter, 0, index)
            state["step"] = steps
        else:
            state |= {kind: torch.zeros_like(parameter) for kind in sorted(state_kinds)}
            if steps:
                state["step"] = torch.tensor(float(steps), device=parameter.device)


def read_shards(files: list[Path], into: dict[str, tuple[Tensor, list[int]]]) -> None:
    """Copies what overlaps from each file into this rank's parts, given where they begin; only these slices are read."""
    missing = {name: local.numel() for name, (local, _) in into.items()}
    for file in files:
        with safe_open(file, framework="pt") as saved:
            offsets = json.loads(saved.metadata()["offsets"])
            for name in offsets.keys() & into.keys():
                local, start = into[name]
                source = saved.get_slice(name)
                spans = [
                    overlap(a, n, b, m)
                    for a, n, b, m in zip(offsets[name], source.get_shape(), start, local.shape, strict=True)
                ]
                if all(span is not None for span in spans):
                    values = source[tuple(slice(a, b) for a, b, _, _ in spans)] if spans else saved.get_tensor(name)
                    local[tuple(slice(a, b) for _, _, a, b in spans)] = values.to(local.device)
                    missing[name] -= values.numel()
    short = [name for name, n in missing.items() if n]
    if short:
        raise ValueError(
            f"{files[0].parent if files else 'checkpoint'}: {short[0]} is missing or has another shape; is it of another "
            "model, or of one with other adapters?"
        )


def overlap(a: int, n: int, b: int, m: int) -> tuple[int, int, int, int] | None:
    """[a, a+n) in a file and [b, b+m) here -> (from, to) in the file's part and (from, to) in the part here."""
    low, high = max(a, b), min(a + n, b + m)
    return (low - a, high - a, low - b, high - b) if low < high else None
