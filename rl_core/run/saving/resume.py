"""--resume: finds the newest intact checkpoint and restores the learners, on any number of
ranks."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from rl_core.distributed import Ranks, all_gather_json
from rl_core.learning.learner import Learner
from rl_core.run.saving.checkpoint import (
    copied_tensors,
    facts_of,
    named_checkpoints,
    read_object,
    renewed_copies,
    saved_tensors,
    trained_learners,
)


def newest_intact(folder: Path, ranks: Ranks) -> Path | None:
    """The newest checkpoint whose files are intact; None if there is no checkpoint. Prints the
    damaged ones. Every rank must call it. Raises ValueError if all are damaged."""
    damages = []
    names = [path.name for path in named_checkpoints(folder)]
    for name in reversed(all_gather_json(names, ranks)[0]):
        damage = find_damage(folder / name, ranks)
        if not damage:
            for text in damages:
                if ranks.is_writer:
                    print(f"warning: {text}; resumes from {name}, the one before it", flush=True)
            return folder / name
        damages.append(damage)
    if damages:
        raise ValueError(
            f"{damages[0]}; no earlier checkpoint is intact: remove them, to begin at step 0"
        )
    return None


def find_damage(folder: Path, ranks: Ranks) -> str:
    """The damage of a checkpoint's files; "" if there is none. Each rank reads a share of the
    files. Every rank must call it."""
    manifest = folder / "manifest.json"
    damage = ""
    try:
        read_object(folder / "state.json")
        files = read_object(manifest)["files"]
        for name in sorted(files)[ranks.rank :: ranks.size]:
            if files[name] != facts_of(folder / name):
                damage = (
                    f"{folder / name} is damaged: its size or checksum is not that of {manifest}"
                )
    except (OSError, ValueError) as error:
        damage = str(error)
    except (AttributeError, KeyError, TypeError):
        damage = f"{manifest} is damaged: it must name files with their sizes"
    return max(all_gather_json(damage, ranks))


def load_checkpoint(folder: Path, learners: dict[str, Learner], is_verified: bool = False) -> dict:
    """Restores the learners and returns the saved state. Raises ValueError if a file is damaged,
    unless `is_verified`, or if the checkpoint belongs to another model."""
    trained = trained_learners(learners)
    if not is_verified:
        ranks = next(iter(trained.values())).ranks
        if damage := find_damage(folder, ranks):
            raise ValueError(f"{damage}; resume from another checkpoint")
    state = read_object(folder / "state.json")
    known = state["optimizers"]
    for name, learner in trained.items():
        if name not in known:
            raise ValueError(f"{folder} has no actor {name!r}; it has {', '.join(known)}")
        load_learner(folder / name, learner, **known[name])
    for name, copy in renewed_copies(learners).items():
        if name in state.get("copies", ()):
            with copy.policy.on_device(), copy.in_place():
                fill(folder / name, copied_tensors(copy))
        elif next(iter(trained.values())).ranks.rank == 0:
            print(f"warning: {folder} has no {name}: it begins as in a new run", flush=True)
    return state


def load_learner(
    folder: Path,
    learner: Learner,
    name: str,
    steps: int,
    layout: str,
    state: dict[str, float],
    is_saved: bool,
    fewer_steps: dict[str, int] | None = None,
) -> None:
    """Restores one learner. `is_saved`: the checkpoint has the optimizer's state. `state`: state of
    the learner class. `fewer_steps`: of make_state()."""
    if is_saved and steps:
        check_optimizer(folder, learner, name, layout)
        make_state(learner, steps, fewer_steps)
    elif steps and learner.ranks.rank == 0:
        print(
            f"{folder} has no optimizer state (--save_optimizer false): {learner.name}'s optimizer "
            "begins anew",
            flush=True,
        )
    wanted = saved_tensors(learner)
    check_frozen(folder, wanted)
    fill(folder, wanted)
    learner.num_updates = steps
    learner.load_state(state)


def check_optimizer(folder: Path, learner: Learner, name: str, layout: str) -> None:
    """Raises ValueError unless the learner's optimizer can use the state of optimizer `name` that
    ranks of this layout saved."""
    current = type(learner.optimizer).__name__
    if name != current:
        raise ValueError(
            f"{folder} holds the state of {name}, which {current} cannot use; resume with the "
            "--optim.name that it was saved with"
        )
    if name.endswith("8bit") and layout != learner.ranks.layout:
        raise ValueError(
            f"{folder} holds 8-bit optimizer state of {layout}, which cannot be resharded for "
            f"{learner.ranks.layout}; resume with the same ranks and flags"
        )


def fill(folder: Path, wanted: dict[str, Tensor]) -> None:
    """Reads these tensors from a learner's folder of a checkpoint."""
    reader = dcp.HuggingFaceStorageReader(str(folder))
    saved = reader.read_metadata().state_dict_metadata
    for key, value in wanted.items():
        if key not in saved or getattr(saved[key], "size", None) != value.shape:
            raise ValueError(
                f"{folder}: {key} is missing or has another shape; does the checkpoint belong to "
                "another model, or to one with other adapters?"
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(wanted, storage_reader=reader)


def check_frozen(folder: Path, wanted: dict[str, Tensor]) -> None:
    """Raises ValueError if the checkpoint has trained weights that this run freezes: the base
    model's would take their place."""
    for key in dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata:
        if key.startswith("param/") and key not in wanted:
            raise ValueError(
                f"{folder}: {key} was trained, and is frozen here; give the --learner.train and "
                "--actors.NAME.lora.* of the checkpoint"
            )


def make_state(learner: Learner, steps: int, fewer_steps: dict[str, int] | None = None) -> None:
    """Creates the optimizer's state as after `steps` steps, by a step with learning rate 0.
    `fewer_steps`: parameter -> its number of steps where that is less."""
    for _, parameter in learner.trained_parameters():
        parameter.grad = torch.zeros_like(parameter)
    for group in learner.optimizer.param_groups:
        group["lr"] = 0.0
    learner.optimizer.step()
    learner.zero_gradients()
    for group in learner.optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            num = (fewer_steps or {}).get(name, steps)
            state = learner.optimizer.state.get(parameter, {})
            if not num:
                learner.optimizer.state.pop(parameter, None)
            elif "step" in state:
                state["step"] = state["step"] * 0 + num
