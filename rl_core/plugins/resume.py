"""--resume: the newest checkpoint that is intact, and learners as they were when it was saved, on
any number of ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from rl_core.data.rows import read_object
from rl_core.distributed import Ranks, all_gather_json
from rl_core.learning.checkpoint import checkpoints_in, facts_of, saved_tensors, trained_learners
from rl_core.learning.learner import Learner


def newest_intact(folder: Path, ranks: Ranks) -> Path | None:
    """The newest checkpoint whose files are as they were written; None where there is none at all.
    Says which are damaged. Every rank must call it. Raises ValueError if all are damaged."""
    damages = []
    found = None
    for name in reversed(all_gather_json([path.name for path in checkpoints_in(folder)], ranks)[0]):
        damage = find_damage(folder / name, ranks)
        if not damage:
            found = folder / name
            break
        damages.append(damage)
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
    damages = []
    try:
        read_object(folder / "state.json")
        files = read_manifest(folder)
        for name in sorted(files)[ranks.rank :: ranks.size]:
            damages.append(difference(folder / name, files[name]))
    except (OSError, ValueError) as error:
        damages.append(str(error))
    for part in all_gather_json(damages, ranks):
        for damage in filter(None, part):
            return damage
    return ""


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """File -> its size and checksum. Raises ValueError if it is none."""
    file = folder / "manifest.json"
    found = {}
    try:
        for name, facts in read_object(file).get("files").items():
            found[name] = {"bytes": facts["bytes"], "xxh3_64": facts.get("xxh3_64")}
    except (AttributeError, KeyError, TypeError):
        raise ValueError(f"{file} is damaged: it must name files with their sizes") from None
    return found


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
    known = state["optimizers"]
    for name, learner in trained.items():
        if name not in known:
            raise ValueError(f"{folder} has no actor {name!r}; it has {', '.join(known)}")
        load_learner(folder / name, learner, **known[name])
        learner.num_updates = known[name]["steps"]
    return state


def load_learner(folder: Path, learner: Learner, name: str, steps: int, ranks: int) -> None:
    own = type(learner.optimizer).__name__
    if name != own:
        raise ValueError(
            f"{folder} holds the state of {name}, which {own} cannot use; resume with the "
            "--optim.name that it was saved with"
        )
    if name.endswith("8bit") and steps and ranks != learner.ranks.size:
        raise ValueError(
            f"{folder} holds 8-bit optimizer state of {ranks} ranks, which cannot be cut for "
            f"{learner.ranks.size}; resume with as many ranks"
        )
    if steps:
        make_state(learner, steps)
    reader = dcp.HuggingFaceStorageReader(str(folder))
    saved = reader.read_metadata().state_dict_metadata
    wanted = saved_tensors(learner)
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
    learner.policy.zero_grad()
    for state in learner.optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"] * 0 + steps
