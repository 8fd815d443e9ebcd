"""From which step which file of a served environment scored the episodes of a run: a service may
load another file while the run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl_core.plugin import Plugin
from rl_core.run_folder import naming
from rl_core.types import Trajectory

FILE = "served_env_code.jsonl"


class ServedCodes(Plugin):
    """Writes each hash with the first step in which this rank saw it; client.py warns of it."""

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self.known: dict[str, set[str]] = {}  # environment -> hashes

    async def on_episodes(self, step: int, name: str, trajectories: list[Trajectory]) -> None:
        envs = self.trainer.plan.envs
        served = [t for t in trajectories if "://" in envs[t.env].path]
        lines = new_codes(self.known, step, served)
        file = self.trainer.out / FILE
        if lines:
            with naming(file), file.open("a", encoding="utf-8") as opened:
                opened.writelines(json.dumps(line) + "\n" for line in lines)


def new_codes(
    known: dict[str, set[str]], step: int, trajectories: Iterable[Trajectory]
) -> list[dict[str, Any]]:
    """A line for each hash that `known` lacks, which gets it."""
    lines = []
    for t in trajectories:
        codes = known.setdefault(t.env, set())
        if t.env_code and t.env_code not in codes:
            codes.add(t.env_code)
            lines.append({"step": step, "env": t.env, "env_code": t.env_code})
    return lines


def described(run: Path) -> list[str]:
    """Lines of a run's folder: each environment's hashes, and from which step any rank saw them."""
    file = run / FILE
    first: dict[tuple[str, str], int] = {}
    for text in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        line = json.loads(text)
        key = line["env"], line["env_code"]
        first[key] = min(line["step"], first.get(key, line["step"]))
    found = sorted(first.items(), key=lambda one: (one[0][0], one[1]))
    return [f"  {env} {code} from step {step}" for (env, code), step in found]
