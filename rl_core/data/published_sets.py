"""Recipes of data sets of the hub that are used most (published_sets.yaml)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import yaml

from rl_core.types import JSONObject

# The keys of published_sets.yaml, "tried" and "command".
Recipe = dict[str, str]


@cache
def recipes() -> dict[str, Recipe]:
    """Name on the hub -> its recipe."""
    table: JSONObject = yaml.safe_load(
        Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    )
    tried = str(table["tried"])
    known = {}
    for name, recipe in table["sets"].items():
        recipe = {"data": name} | recipe
        known[name] = recipe | {"tried": tried, "command": command_of(name, recipe)}
    return known


def command_of(name: str, recipe: Recipe) -> str:
    """The command that trains model M on the set, or scores M if the set is for evaluation."""
    is_eval = recipe["algorithm"] == "eval"
    words = ["rl-core eval M" if is_eval else "rl-core train --model M"]
    if not is_eval:
        words.append(f"--algorithm {recipe['algorithm']}")
    if "env" in recipe:
        words.append(f"--env_path {recipe['env']}")
    words.append(f"--data.{'eval' if is_eval else 'train'} {recipe['data']}")
    if "columns" in recipe:
        words.append(f"--data.columns {recipe['columns']}")
    words.append(recipe["flags"])
    if not is_eval:
        words.append(f"--out runs/{short_name(name)}")
    return "\n".join([*filter(None, [recipe.get("get")]), " ".join(words)])


def short_name(name: str) -> str:
    return name.rpartition("/")[2].lower()
