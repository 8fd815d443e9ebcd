"""The device of this process, by --device, the GPUs that torch sees and LOCAL_RANK."""

from __future__ import annotations

import os
import re

import torch

from rl_core.distributed import MPS

NAMES_A_GPU = re.compile(r"\s*(\d|GPU-|MIG-)")  # A value of CUDA_VISIBLE_DEVICES.


def device_of_rank(local_rank: int, num_visible: int, visible: str | None) -> torch.device:
    """The device of a rank if torch sees `num_visible` GPUs, which it numbers from 0 in the order
    of CUDA_VISIBLE_DEVICES (`visible`). A launcher may show each rank a different single GPU, whose
    number is 0. Raises ValueError if the rank would have no GPU, or if the variable names GPUs and
    torch sees none."""
    if num_visible == 0:
        if NAMES_A_GPU.match(visible or ""):
            raise ValueError(
                f"CUDA_VISIBLE_DEVICES={visible} names GPUs and torch sees none: an id is unknown "
                "or comes twice, or the driver is missing. Correct it (nvidia-smi -L lists ids), "
                "or set CUDA_VISIBLE_DEVICES='' to run on the CPU"
            )
        return torch.device("cpu")
    if 1 < num_visible <= local_rank:
        raise ValueError(
            f"LOCAL_RANK={local_rank} needs {local_rank + 1} GPUs and torch sees {num_visible} "
            f"(CUDA_VISIBLE_DEVICES={visible}): each rank needs its own GPU. Lower "
            f"--nproc_per_node to {num_visible}, or make more GPUs visible"
        )
    return torch.device("cuda", 0 if num_visible == 1 else local_rank)


def this_device(name: str = "auto") -> torch.device:
    """The device of this process, by --device and LOCAL_RANK. Raises the errors of check_device()
    and device_of_rank(). "auto" never takes an Apple GPU: results are those of other CPUs."""
    num_visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    num_ranks = int(os.environ.get("WORLD_SIZE", 1))
    check_device(name, num_visible, torch.backends.mps.is_available(), num_ranks)
    if name == MPS:
        return torch.device(MPS)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if torch.backends.cuda.is_built() else None
    return device_of_rank(int(os.environ.get("LOCAL_RANK", 0)), num_visible, visible)


def check_device(name: str, num_visible: int, has_mps: bool, num_ranks: int) -> None:
    """Raises ValueError if a machine with these GPUs lacks the device that --device names, or if
    several ranks cannot use that device."""
    if name == "cuda" and not num_visible:
        raise ValueError("--device=cuda: torch sees no GPU; leave --device out to run on the CPU")
    if name == "cpu" and num_visible:
        raise ValueError(
            f"--device=cpu: torch sees {num_visible} GPUs; hide them by CUDA_VISIBLE_DEVICES=''"
        )
    if name == MPS and not has_mps:
        raise ValueError(
            "--device=mps: torch sees no Apple GPU, which needs macOS on Apple silicon; leave "
            "--device out to run on the CPU"
        )
    if name == MPS and num_ranks > 1:
        raise ValueError(
            f"--device=mps: {num_ranks} ranks cannot exchange tensors of an Apple GPU, since gloo "
            "does not support MPS; start one rank, or leave --device out"
        )
