"""Hashes of a served environment's file, with the first step that each scored: a service may reload
the file during the run."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from rl_core.plugin import Plugin, RunState
from rl_core.run.run_folder import SERVED_CODES, naming
from rl_core.types import JSONObject, Trajectory


class ServedCodes(Plugin):
    """Writes each hash with the first step in which this rank saw it; client.py logs a warning."""

    def __init__(self, trainer: RunState):
        super().__init__(trainer)
        self.known: dict[str, set[str]] = {}  # environment -> hashes

    async def on_episodes(self, step: int, name: str, trajectories: list[Trajectory]) -> None:
        envs = self.trainer.plan.envs
        served = [t for t in trajectories if "://" in envs[t.env].path]
        file = self.trainer.out / SERVED_CODES
        for line in new_codes(self.known, step, served):
            with naming(file), file.open("a", encoding="utf-8") as opened:
                opened.write(json.dumps(line) + "\n")


def new_codes(
    known: dict[str, set[str]], step: int, trajectories: Iterable[Trajectory]
) -> list[JSONObject]:
    """A line for each hash that `known` lacks. Adds the hashes to `known`."""
    lines = []
    for t in trajectories:
        codes = known.setdefault(t.env, set())
        if t.env_code and t.env_code not in codes:
            codes.add(t.env_code)
            lines.append({"step": step, "env": t.env, "env_code": t.env_code})
    return lines


def described(run: Path) -> list[str]:
    """Lines for a run's folder: each environment's hashes, with the first step on any rank."""
    file = run / SERVED_CODES
    if not file.is_file():
        return []
    steps: dict[tuple[str, str], list[int]] = defaultdict(list)
    for text in file.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        steps[line["env"], line["env_code"]].append(line["step"])
    firsts = []
    for (env, code), seen in steps.items():
        firsts.append((env, min(seen), code))
    return [f"  {env} {code} from step {step}" for env, step, code in sorted(firsts)]
