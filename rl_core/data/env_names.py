"""Environments by name: files of envs/ in the working folder, then those that rl_core brings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rl_core.rules import nearest

PACKAGE = Path(__file__).parents[1]


def env_folders() -> list[Path]:
    """Folders of environments; those named first win."""
    of_checkout = PACKAGE.parent / "envs"
    if not (PACKAGE.parent / "setup.py").is_file():
        of_checkout = PACKAGE / "envs"  # a wheel has them inside the package
    return [folder for folder in (Path("envs"), of_checkout) if folder.is_dir()]


def env_files(folders: Sequence[Path] | None = None) -> dict[str, Path]:
    """Name -> file of each environment in these folders, by default in all that are known."""
    files: dict[str, Path] = {}
    for folder in env_folders() if folders is None else folders:
        for file in sorted(folder.glob("*.py")):
            files.setdefault(file.stem, file)
    return files


def env_path(path: str) -> str:
    """The file of an environment that is given by name; a path or a URL as it is. Raises ValueError
    for an unknown name."""
    if not re.fullmatch(r"[A-Za-z_]\w*", path) or Path(path).exists():
        return path
    files = env_files()
    if path not in files:
        raise ValueError(
            f"{path}: no environment has this name, and no file; {nearest(path, files)}"
        )
    return str(files[path])
