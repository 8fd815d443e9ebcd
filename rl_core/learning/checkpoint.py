"""Save and resume a run: every rank writes its own shards, and any number of ranks reads them.

checkpoints/step_000010/manifest.json                 written last: every file with its size and sha256
                        state.json                    step, data position, optimizer steps
                        policy/rank_00000.safetensors weights and AdamW's moments; metadata tells where each lies
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rl_core.distributed import Ranks, all_gather_json
from rl_core.learning.learner import Learner

MOMENTS = ("exp_avg", "exp_avg_sq")


def local_part(value: Tensor) -> tuple[Tensor, list[int]]:
    """This rank's part of a parameter and where it begins in the whole."""
    if not isinstance(value, DTensor):
        return value, [0] * value.ndim
    _, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return value.to_local(), list(offset)


def saved_tensors(learner: Learner) -> dict[str, Tensor]:
    """Name -> parameter or moment, as the learner holds it (sharded or not)."""
    found = {}
    for name, parameter in learner.policy.hf.named_parameters():
        found[f"param/{name}"] = parameter.detach()
        for moment in MOMENTS:
            if moment in learner.optimizer.state.get(parameter, {}):
                found[f"{moment}/{name}"] = learner.optimizer.state[parameter][moment]
    return found


def save_checkpoint(folder: Path, learners: dict[str, Learner], state: dict, ranks: Ranks, keep: int) -> None:
    """checkpoints/step_N, whole or not there at all. Every rank must call it."""
    beside = folder.with_name(f".{folder.name}.tmp")
    if ranks.rank == 0:
        shutil.rmtree(beside, ignore_errors=True)
        for name in learners:
            (beside / name).mkdir(parents=True)
    all_gather_json(None, ranks)  # the folders are there
    state = state | {"optimizer_steps": {}}
    written = {}
    for name, learner in learners.items():
        parts = {k: local_part(v) for k, v in saved_tensors(learner).items()}
        parts = {k: (v, offset) for k, (v, offset) in parts.items() if v.numel()}
        file = beside / name / f"rank_{ranks.rank:05d}.safetensors"
        save_file(
            {k: v.cpu().contiguous() for k, (v, _) in parts.items()},
            file,
            metadata={"offsets": json.dumps({k: offset for k, (_, offset) in parts.items()})},
        )
        written |= file_facts(file, beside)
        steps = [int(s["step"]) for s in learner.optimizer.state.values()]
        state["optimizer_steps"][name] = max(steps, default=0)
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
    all_gather_json(None, ranks)  # no rank goes on before the checkpoint stands


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
    for name, learner in learners.items():
        if not (folder / name).is_dir():
            raise ValueError(
                f"{folder} has no actor {name!r}; it has {', '.join(p.name for p in folder.iterdir() if p.is_dir())}"
            )
        make_moments(learner, state["optimizer_steps"][name])
        read_shards(sorted((folder / name).glob("*.safetensors")), saved_tensors(learner))
    return state


def make_moments(learner: Learner, steps: int) -> None:
    """AdamW creates its state at the first step; a resumed one needs it before."""
    for group in learner.optimizer.param_groups:
        for parameter in group["params"] if steps else []:
            learner.optimizer.state[parameter] = {m: torch.zeros_like(parameter) for m in MOMENTS} | {
                "step": torch.tensor(float(steps), device=parameter.device)
            }


def read_shards(files: list[Path], into: dict[str, Tensor]) -> None:
    """Copies what overlaps from each file into this rank's parts; only these slices are read."""
    missing = {name: local_part(value)[0].numel() for name, value in into.items()}
    for file in files:
        with safe_open(file, framework="pt") as saved:
            offsets = json.loads(saved.metadata()["offsets"])
            for name in offsets.keys() & into.keys():
                local, start = local_part(into[name])
                source = saved.get_slice(name)
                spans = [
                    overlap(a, n, b, m)
                    for a, n, b, m in zip(offsets[name], source.get_shape(), start, local.shape, strict=True)
                ]
                if all(span is not None for span in spans) and local.numel():
                    values = source[tuple(slice(a, b) for a, b, _, _ in spans)] if spans else saved.get_tensor(name)
                    local[tuple(slice(a, b) for _, _, a, b in spans)] = values.to(local.device)
                    missing[name] -= values.numel()
    short = [name for name, n in missing.items() if n]
    if short:
        raise ValueError(
            f"{files[0].parent if files else 'checkpoint'}: {short[0]} is missing or has another shape; is it of another model?"
        )


def overlap(a: int, n: int, b: int, m: int) -> tuple[int, int, int, int] | None:
    """[a, a+n) in a file and [b, b+m) here -> (from, to) in the file's part and (from, to) in the part here."""
    low, high = max(a, b), min(a + n, b + m)
    return (low - a, high - a, low - b, high - b) if low < high else None
