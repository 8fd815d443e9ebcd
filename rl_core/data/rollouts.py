"""Trajectories in files: rollouts/NAME.jsonl.zst, one JSON object a line."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import zstandard

from rl_core.types import Trajectory


def write_trajectories(file: Path, trajectories: list[Trajectory]) -> None:
    beside, compressor = file.with_name(f".{file.name}.tmp"), zstandard.ZstdCompressor(level=3)
    with open(beside, "wb") as raw, compressor.stream_writer(raw) as writer:
        for trajectory in trajectories:
            writer.write((json.dumps(trajectory, default=jsonable) + "\n").encode())
    os.replace(beside, file)


def jsonable(value: Any) -> Any:
    """A dataclass as a dictionary; what JSON does not know, as text."""
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return str(value)
