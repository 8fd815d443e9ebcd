"""rl-core eval --folder DIR: keeps every episode of every model and environment as it ends. A
killed command resumes where it stopped.

    DIR/settings.yaml                      the flags of all episodes
    DIR/episodes/MODEL_ENVIRONMENT.jsonl   a group of episodes per line
    DIR/episodes/MODEL_ENVIRONMENT.yaml    weights, environment file and rows that played them
    DIR/episodes/ENVIRONMENT.yaml          environment file, rows and other actors of all models
    DIR/episodes/images/                   their images
    DIR/scores.json, DIR/table.md          written at the end
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from zlib import crc32

import yaml
from pydantic import TypeAdapter

from rl_core.config import Config, flat, to_yaml
from rl_core.data.image_parts import with_stored_images
from rl_core.data.rows import write_whole
from rl_core.run.evaluation.played_by import PlayedBy
from rl_core.run.saving.run_files import jsonable, keep_first
from rl_core.sampling.groups import Group
from rl_core.types import JSONObject, Trajectory

# The flags that change an evaluation's episodes or scores. Weights, templates, endpoints, files of
# environments and rows are compared by their content. An evaluation draws by eval.sampling, and
# takes of sampling.* the strings that end a turn alone.
COMPARED = re.compile(
    r"seed|max_(prompt_)?tokens|max_turns|eval\..+|(actors\.[^.]+\.)?chat_template_kwargs(\..+)?"
    r"|(actors\.[^.]+\.)?(sampling\.stop|learner\.dtype)|actors\.[^.]+\.(train|max_tokens)"
    r"|data\.(eval|skip_long|max_images|max_image_pixels|columns(\..+)?)"
    r"|envs\.[^.]+\.(eval|max_tokens|max_turns)"
    r"|agents\.(response_format|build_network|verify_network)"
)
TRAJECTORIES = TypeAdapter(list[Trajectory])


class EvalFolder:
    def __init__(self, folder: str | Path, config: Config):
        """Raises ValueError if the folder's episodes were played with other flags."""
        self.folder = Path(folder)
        (self.folder / "episodes").mkdir(parents=True, exist_ok=True)
        kept = {}
        for name, value in flat(yaml.safe_load(to_yaml(config))).items():
            if COMPARED.fullmatch(name):
                kept[name] = value
        for name, (was, value) in keep_first(
            self.folder / "settings.yaml", yaml.safe_dump(kept)
        ).items():
            raise ValueError(
                f"--folder {folder} holds episodes that were played with --{name} {was}, and this "
                f"is {value}; name another folder"
            )

    def cell(
        self, model: str, env: str, facts: Mapping[str, str], shared: Mapping[str, str]
    ) -> Cell:
        """The episodes of one model in one environment. Raises ValueError if they were played with
        other `facts`, or those of any model in this environment with others that are `shared`."""
        cell = cell_of(self.folder, model, env)
        where, name = f"--folder {self.folder}", re.sub(r"[^\w.-]", "_", env)
        others = self.folder.glob(f"episodes/*_????????_{name}.jsonl")
        has_episodes = any(file.stat().st_size for file in others)
        PlayedBy(self.folder / "episodes" / f"{name}.yaml", where, has_episodes).check(shared)
        PlayedBy(cell.file.with_suffix(".yaml"), where, bool(cell.groups)).check(facts)
        return cell

    def write(self, scores: str, table: str) -> None:
        write_whole(self.folder / "scores.json", scores + "\n")
        write_whole(self.folder / "table.md", table + "\n")


def cell_of(folder: Path, model: str, env: str) -> Cell:
    # Two models in different folders may have one name.
    name = "_".join([*Path(model).parts[-2:], f"{crc32(model.encode()):08x}", env])
    return Cell(folder / "episodes" / (re.sub(r"[^\w.-]", "_", name) + ".jsonl"))


class Cell:
    def __init__(self, file: Path):
        """Leaves out lines that were cut short. The last line of a group counts."""
        self.file = file
        self.groups: dict[tuple[str, int, str], list[Trajectory]] = {}
        lines = file.read_text(errors="replace").splitlines() if file.exists() else []
        complete = []
        for line in lines:
            try:
                row = json.loads(line)
                played = TRAJECTORIES.validate_python(row["trajectories"])
            except (ValueError, KeyError, TypeError):
                continue
            self.groups[row["label"], row["number"], row["task"]] = played
            complete.append(line + "\n")
        if len(complete) < len(lines) or not "".join(complete).endswith("\n"):
            write_whole(file, "".join(complete))

    def find(self, group: Group) -> list[Trajectory] | None:
        """Saved episodes of a group; None if there are none, or if one of them failed."""
        played = self.groups.get((group.label, group.number, group.task.id))
        if played is None or any(t.status == "failed" for t in played):
            return None
        return played

    def add(self, group: Group) -> None:
        """Appends the group. Returns once the data is on disk."""
        row: JSONObject = {"label": group.label, "number": group.number, "task": group.task.id}
        row["trajectories"] = group.trajectories
        line = with_stored_images(json.dumps(row, default=jsonable), self.file.parent)
        with open(self.file, "a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
