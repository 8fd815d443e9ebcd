"""Local model paths: a folder exists, and its weights files are complete."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from rl_core.errors import nearest_folder


def check_local(name: str) -> None:
    """Raises ValueError for a local folder that does not exist."""
    path = Path(name)
    if is_local(name) and not path.exists():
        raise ValueError(f"model {path}: no such folder{nearest_folder(path)}")


def check_weights(folder: Path) -> None:
    """Raises ValueError for a weights file that is shorter or longer than its header says."""
    for file in sorted(folder.glob("model*.safetensors")):
        size = file.stat().st_size
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = opened.read(length) if length < size else b""
        expected = None
        with suppress(ValueError, KeyError, AttributeError):
            entries = json.loads(header)
            entries.pop("__metadata__", None)
            ends = [entry["data_offsets"][1] for entry in entries.values()]
            expected = 8 + length + max(ends, default=0)
        if size != expected:
            rule = f"its header asks for {expected}" if expected else "its header is cut"
            raise ValueError(
                f"model {folder}: {file.name} is damaged: it has {size} bytes, and {rule}; copy or "
                "download it again"
            )


def is_local(name: str) -> bool:
    """True if a name that is not an existing folder means one. Names on the hub are org/name."""
    path = Path(name)
    is_written_so = path.is_absolute() or name.startswith(("./", "../", "~"))
    return is_written_so or len(path.parts) > 2 or (path.parent.name != "" and path.parent.is_dir())
