"""Save and resume a run: every rank writes its own shards, and any number of ranks reads them.

checkpoints/step_000010/manifest.json               written last: every file with its size and
checksum
                        state.json                  step, data position
                        policy.lagged.safetensors   unsharded weights of an engine's older version,
                        where it has one
                        policy/*.safetensors        trained weights and the optimizer's state, by
                        torch.distributed.checkpoint
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rl_core.data.rows import read_object, rename_into_place
from rl_core.distributed import Ranks, all_gather_json, barrier, local
from rl_core.learning.learner import Learner
from rl_core.learning.policy import refuse_nonfinite

NAME = re.compile(r"step_[0-9]{6,}")
READ_BYTES = 16 << 20


def saved_tensors(learner: Learner) -> dict[str, Tensor]:
    """Name -> trained weight or optimizer state, as this rank holds it. State in 8 bits cannot be
    cut for another number of ranks: its names tell whose it is."""
    if isinstance(learner.policy, FSDPModule):
        # After a forward without a backward some parameters are still gathered.
        learner.policy.reshard()
    ranks, weights = learner.ranks, {n: p.detach() for n, p in learner.trained_parameters()}
    tensors, shared = {f"param/{name}": weight for name, weight in weights.items()}, set()
    for group in learner.optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            for kind, value in learner.optimizer.state.get(parameter, {}).items():
                if kind != "step" and isinstance(value, Tensor) and id(value) not in shared:
                    shared.add(id(value))  # bitsandbytes' tables are the same for all parameters
                    is_cut_alike = isinstance(value, DTensor) or not isinstance(
                        weights[name], DTensor
                    )
                    owner = "" if is_cut_alike else f"@{ranks.rank}of{ranks.size}"
                    tensors[f"{kind}{owner}/{name}"] = value
    return tensors


def trained_learners(learners: dict[str, Learner]) -> dict[str, Learner]:
    """All that actors' learners train, critics included."""
    return {learner.name: learner for owner in learners.values() for learner in owner.trained()}


def save_checkpoint(
    folder: Path,
    learners: dict[str, Learner],
    state: dict,
    ranks: Ranks,
    keep: int,
    files: Iterable[Path] = (),
) -> None:
    """checkpoints/step_N, complete or not there at all: all that each actor's learner trains, and a
    copy of further files of rank 0. Then deletes those before the newest `keep`. Every rank must
    call it. Raises RunError on all of them, and writes nothing, if a weight is not finite."""
    trained = trained_learners(learners)
    broken = all_gather_json(
        [name for actor in trained for name in broken_weights(actor, trained[actor])], ranks
    )
    refuse_nonfinite([name for part in broken for name in part], f"{folder} is not written")
    beside = folder.with_name(f".{folder.name}.tmp")
    if ranks.rank == 0:
        shutil.rmtree(beside, ignore_errors=True)
        for name in trained:
            (beside / name).mkdir(parents=True)
    barrier(ranks)  # the folders are there
    optimizers = {name: save_learner(beside / name, learner) for name, learner in trained.items()}
    if ranks.rank == 0:
        for file in files:
            shutil.copy(file, beside)
        (beside / "state.json").write_text(json.dumps(state | {"optimizers": optimizers}, indent=1))
    barrier(ranks)  # every rank has written
    manifest = make_manifest(beside, ranks)
    if ranks.rank == 0:
        (beside / "manifest.json").write_text(json.dumps({"files": manifest}, indent=1))
        rename_into_place(beside, folder)
        # While updates are skipped the weights may be ruined, and an older checkpoint the only way
        # back.
        if keep and not any(learner.nonfinite_in_a_row for learner in trained.values()):
            delete_old(folder, keep)
    barrier(ranks)  # no rank goes on before the checkpoint stands


def broken_weights(actor: str, learner: Learner) -> list[str]:
    """Names of trained weights of which this rank holds a number that is NaN or infinite."""
    with learner.on_device():  # elsewhere its memory may be given back
        return [
            f"{actor}: {name}"
            for name, p in learner.trained_parameters()
            if not local(p).isfinite().all()
        ]


def save_learner(folder: Path, learner: Learner) -> dict[str, Any]:
    """Writes this rank's part. What a run that resumes must know of the optimizer."""
    with learner.on_device(), learner.state_on_device():
        writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
        with warnings.catch_warnings(action="ignore"):  # of torch, about a single process
            dcp.save(saved_tensors(learner), storage_writer=writer)
    return {
        "name": type(learner.optimizer).__name__,
        "steps": learner.num_updates,
        "ranks": learner.ranks.size,
    }


def make_manifest(folder: Path, ranks: Ranks) -> dict[str, dict]:
    """File -> its size and checksum. Each rank reads a part of the files. Every rank must call
    it."""
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    names = all_gather_json(names, ranks)[0]  # a shared file system may show others later
    own = {name: facts_of(folder / name) for name in names[ranks.rank :: ranks.size]}
    manifest = {}
    for part in all_gather_json(own, ranks):
        manifest |= part
    return manifest


def facts_of(file: Path) -> dict[str, Any]:
    """Size and checksum of a file; the checksum finds damage at the speed of the disk, and no
    forgery."""
    digest = xxhash.xxh3_64()
    with open(file, "rb") as opened:
        while part := opened.read(READ_BYTES):
            digest.update(part)
    return {"bytes": file.stat().st_size, "xxh3_64": digest.hexdigest()}


def delete_old(folder: Path, keep: int) -> None:
    """Deletes those before the newest `keep`, of which `folder` is the last: later ones were
    damaged when the run resumed."""
    saved = checkpoints_in(folder.parent)
    until = saved.index(folder) + 1
    for old in saved[:until][:-keep]:
        shutil.rmtree(old)


def checkpoints_in(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first. Other names are a user's own."""
    found = [path for path in folder.glob("step_*") if NAME.fullmatch(path.name)]
    found = [path for path in found if (path / "manifest.json").is_file()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def newest_intact(folder: Path, ranks: Ranks) -> Path | None:
    """The newest checkpoint whose files are as they were written; None where there is none at all.
    Says which are damaged. Every rank must call it. Raises ValueError if all are damaged."""
    names = all_gather_json([path.name for path in checkpoints_in(folder)], ranks)[0]
    damages = []
    found = None
    while names and not found:
        checkpoint = folder / names.pop()
        if damage := find_damage(checkpoint, ranks):
            damages.append(damage)
        else:
            found = checkpoint
    if damages and not found:
        raise ValueError(
            f"{damages[0]}; no checkpoint before it is whole: remove them, to begin at step 0"
        )
    if ranks.rank == 0:
        for damage in damages:
            print(f"warning: {damage}; goes on from {found.name}, the one before it", flush=True)
    return found


def find_damage(folder: Path, ranks: Ranks) -> str:
    """What is wrong with a checkpoint's files; "" if nothing is. Each rank reads a part of them.
    Every rank must call it."""
    try:
        read_object(folder / "state.json")
        files = read_manifest(folder)
        found = [
            difference(folder / name, files[name])
            for name in sorted(files)[ranks.rank :: ranks.size]
        ]
    except (OSError, ValueError) as error:
        found = [str(error)]
    every = all_gather_json([text for text in found if text], ranks)
    return next((text for part in every for text in part), "")


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """File -> its size and checksum. Raises ValueError if it is none."""
    file = folder / "manifest.json"
    files = read_object(file).get("files")
    try:
        return {
            name: {"bytes": facts["bytes"], "xxh3_64": facts.get("xxh3_64")}
            for name, facts in files.items()
        }
    except (AttributeError, KeyError, TypeError):
        raise ValueError(f"{file} is damaged: it must name files with their sizes") from None


def difference(file: Path, facts: dict[str, Any]) -> str:
    """What a file differs in from its manifest; "" if it is as it was written. Old manifests have
    sizes alone."""
    size = file.stat().st_size if file.is_file() else "no"
    if size != facts["bytes"]:
        return f"{file} is damaged: it has {size} bytes, its manifest says {facts['bytes']}"
    if facts["xxh3_64"] and facts_of(file) != facts:
        return f"{file} is damaged: its checksum is not that of its manifest"
    return ""


def load_checkpoint(folder: Path, learners: dict[str, Learner], is_verified: bool = False) -> dict:
    """Fills the learners and returns the saved state. Raises ValueError if a file is damaged,
    unless that `is_verified`, or if the checkpoint is of another model."""
    trained = trained_learners(learners)
    if trained and not is_verified:
        damage = find_damage(folder, next(iter(trained.values())).ranks)
        if damage:
            raise ValueError(f"{damage}; go on from another checkpoint")
    state = read_object(folder / "state.json")
    for name, learner in trained.items():
        if name not in state["optimizers"]:
            raise ValueError(
                f"{folder} has no actor {name!r}; it has {', '.join(state['optimizers'])}"
            )
        load_learner(folder / name, learner, **state["optimizers"][name])
        learner.num_updates = state["optimizers"][name]["steps"]
    return state


def load_learner(folder: Path, learner: Learner, name: str, steps: int, ranks: int) -> None:
    if name != (ours := type(learner.optimizer).__name__):
        raise ValueError(
            f"{folder} holds the state of {name}, which {ours} cannot use; resume with the "
            "--optim.name that it was saved with"
        )
    if name.endswith("8bit") and steps and ranks != learner.ranks.size:
        raise ValueError(
            f"{folder} holds 8-bit optimizer state of {ranks} ranks, which cannot be cut for "
            f"{learner.ranks.size}; "
            "resume with as many ranks"
        )
    if steps:
        make_state(learner, steps)
    reader, wanted = dcp.HuggingFaceStorageReader(str(folder)), saved_tensors(learner)
    saved = reader.read_metadata().state_dict_metadata
    for key, value in wanted.items():
        if key not in saved or saved[key].size != value.shape:
            raise ValueError(
                f"{folder}: {key} is missing or has another shape; is it of another model, or of "
                "one with other adapters?"
            )
    with warnings.catch_warnings(action="ignore"):
        dcp.load(wanted, storage_reader=reader)


def make_state(learner: Learner, steps: int) -> None:
    """Lets the optimizer create its state, which it does at its first step, as after `steps`."""
    for _, parameter in learner.trained_parameters():
        parameter.grad = torch.zeros_like(parameter)
    for group in learner.optimizer.param_groups:
        group["lr"] = 0.0
    learner.optimizer.step()
    for _, parameter in learner.trained_parameters():
        parameter.grad = None
    for state in learner.optimizer.state.values():
        if "step" in state:
            state["step"] = (
                torch.full_like(state["step"], steps)
                if isinstance(state["step"], Tensor)
                else steps
            )
