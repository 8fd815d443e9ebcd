"""config.yaml of a run that is resumed."""

from __future__ import annotations

from pathlib import Path

import yaml

from rl_core.algorithms import PRESETS
from rl_core.config import Config, flat
from rl_core.run.saving.checkpoint import checkpoints_in, read_object
from rl_core.types import JSON, JSONObject


def check_resumed(config: Config) -> None:
    """Raises ValueError if --resume cannot continue the run in this folder: its checkpoints belong
    to an algorithm with other data or another critic, or have more steps than
    --num_steps; or best.json is damaged."""
    out = config.folder
    best = out / "best/best.json"
    if config.keep_best and best.is_file():
        read_object(best)
    checkpoints = checkpoints_in(out / "checkpoints")
    if not checkpoints or not (out / "config.yaml").is_file():
        return
    flags = read_config(out / "config.yaml")
    before = flags.get("algorithm", Config.algorithm)
    kinds = []
    for name in (before, config.algorithm):
        preset = PRESETS[name]
        kinds.append((preset.is_rl or preset.objective, preset.has_critic))
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"--algorithm {config.algorithm}: {out} was trained by {before}, whose checkpoints do "
            f"not fit; leave out --resume and give --model {out}/hf/{config.trained[0]} with a new "
            f"--out, or resume with --algorithm {before}"
        )
    done = int(checkpoints[-1].name.removeprefix("step_"))
    if config.num_steps < done:
        raise ValueError(
            f"--num_steps={config.num_steps} is less than the {done} steps that {out} has done; "
            "give more, or nothing is left to do"
        )


def changes_of(path: Path, text: str) -> dict[str, tuple[JSON, JSON]]:
    before, after = flat(read_config(path)), flat(yaml.safe_load(text))
    changes = {}
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) != after.get(name):
            changes[name] = before.get(name), after.get(name)
    return changes


def read_config(path: Path) -> JSONObject:
    """The flags of a run's config.yaml. Raises ValueError if it holds none."""
    try:
        flags = yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, UnicodeDecodeError):
        flags = None
    if not isinstance(flags, dict):
        raise ValueError(
            f"{path} is damaged: it is empty or not a YAML file of flags; remove it, and --resume "
            "writes it anew"
        )
    return flags
