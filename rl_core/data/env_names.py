"""Environments by name: files of envs/ in the working folder, then those of the package."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rl_core.errors import nearest

PACKAGE = Path(__file__).parents[1]


def env_folders() -> list[Path]:
    """Folders of environments, in order of precedence."""
    of_checkout = PACKAGE.parent / "envs"
    if not (PACKAGE.parent / "setup.py").is_file():
        of_checkout = PACKAGE / "envs"  # A wheel has them inside the package.
    return [folder for folder in (Path("envs"), of_checkout) if folder.is_dir()]


def env_files(folders: Sequence[Path] | None = None) -> dict[str, Path]:
    """Name -> file of each environment in `folders` (default: env_folders())."""
    files: dict[str, Path] = {}
    for folder in env_folders() if folders is None else folders:
        for file in sorted(folder.glob("*.py")):
            files.setdefault(file.stem, file)
    return files


def env_path(path: str) -> str:
    """The file of the environment with this name. Paths and URLs are returned unchanged. Raises
    ValueError for an unknown name."""
    if not re.fullmatch(r"[A-Za-z_]\w*", path) or Path(path).exists():
        return path
    files = env_files()
    if path not in files:
        raise ValueError(
            f"{path}: neither an environment nor a file has this name; {nearest(path, files)}"
        )
    return str(files[path])
