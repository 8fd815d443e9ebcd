"""What is wrong with a path that holds no model, and what to name instead."""

from __future__ import annotations

import difflib
from pathlib import Path


def why_no_model(name: str, error: Exception) -> str:
    """`error`: what transformers says of its config.json."""
    path = Path(name)  # without the ./ of the name
    reason = str(error).splitlines()[0]
    if (path / "hf").exists():
        found = exported(path / "hf")
        return f"model {path} is a run's folder; name the model that it exported: {found}"
    if (path / "manifest.json").exists():
        found = exported(path.parent.parent / "hf")
        return f"model {path} is a checkpoint; name the model of its run: {found}"
    if (path / "adapter_config.json").exists():
        merged = path.with_name(path.name.removesuffix("_adapter"))
        return f"model {path} is an adapter; name a whole model, such as the merged one in {merged}"
    if path.is_dir():
        return f"model {name!r} cannot be loaded: {reason}"
    near = nearest_folder(path)
    if path.is_absolute() or name.startswith(("./", "../", "~")) or len(path.parts) > 2:
        return f"model {path}: no such folder{near}"
    # "org/name" may mean a folder too, of which transformers says nothing.
    return f"model {name!r} is no folder here, and the hub does not give it: {reason}{near}"


def exported(folder: Path) -> str:
    models = sorted(str(file.parent) for file in folder.glob("*/config.json"))
    return " or ".join(models) or f"{folder} has none yet"


def nearest_folder(path: Path) -> str:
    """`; did you mean models/qwen3?`, or nothing if no folder beside it has a name like that."""
    names = []
    if path.parent.is_dir():
        names = [folder.name for folder in path.parent.iterdir() if folder.is_dir()]
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""
