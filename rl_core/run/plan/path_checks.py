"""Checks of a run's paths, made before torch is imported, which takes seconds."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from rl_core.config import Config
from rl_core.data.env_names import env_path
from rl_core.data.rows import check_exists
from rl_core.run.plan.model_paths import check_local

ROWS = ("train", "eval")  # Splits of --data.


def check_paths(config: Config) -> None:
    """Raises ValueError for an --out that is in use, and for inputs that do not exist."""
    check_folder(config.folder, config.resume)
    check_inputs(config, ROWS if config.eval_every else ROWS[:1])
    for actor in config.actors.values():
        if actor.model and not actor.api:
            check_local(actor.model)


def check_inputs(config: Config, splits: Collection[str]) -> None:
    """Raises ValueError for environments and rows of these splits that do not exist, and for files
    without a row."""
    for path in config.env_paths.values():
        if "://" not in path:
            check_exists(Path(env_path(path)).expanduser())
    names = [*config.env_paths] or ["data"]
    sources = []
    if "train" in splits:
        sources += [("train", config.env(name).train or config.data.train) for name in names]
    if "eval" in splits:
        from rl_core.data.tasks.eval_sets import held_out

        sources += [("test", path) for *_, path in held_out(config, names)]
    for split_name, path in sources:
        if path:
            from rl_core.run.plan.row_checks import check_source

            check_source(config, path, split_name)


def check_folder(out: Path, is_resumed: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; name a folder that does not exist yet")
    if out.exists() and not is_resumed and any(out.iterdir()):
        raise ValueError(
            f"--out {out} exists already; continue it with --resume, or name another folder"
        )
