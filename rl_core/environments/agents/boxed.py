"""An agent's command in a box of its own: it sees the files that it was given, and reaches the
run's endpoint and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from rl_core.environments.agents import forward
from rl_core.environments.agents.endpoint import BOX_FOLDER, FORWARDER, SOCKET, Endpoint
from rl_core.environments.agents.program import TASK_FILE, CommandResult, files_named, folder_of
from rl_core.errors import nearest
from rl_core.sandbox import boxes
from rl_core.scratch import scratch_prefix

# Paths inside a box.
WORKSPACE = "/app"
PROGRAMS = "/agent"  # files that lie beside the environment's file
NO_DEADLINE_S = 1e6  # The episode has one.


@dataclass(kw_only=True)
class CommandBox:
    """What an environment's file says by `box`."""

    driver: str = ""
    image: str = ""
    network: bool = False
    limits: boxes.Limits = field(default_factory=boxes.Limits)
    hides: Sequence[str] = ()  # columns that task.json leaves out
    shown: dict[str, Path] = field(default_factory=dict)  # path below PROGRAMS -> of the host

    @cached_property
    def programs(self) -> tempfile.TemporaryDirectory:
        """Copies of the files that are shown. They can be read whatever user a box has."""
        made = tempfile.TemporaryDirectory(prefix=scratch_prefix("programs"))
        folder = Path(made.name, "shown")
        folder.mkdir(mode=0o755)
        for name, path in self.shown.items():
            inside = folder / name
            if path.is_dir():
                inside.mkdir(parents=True, exist_ok=True)  # where the folder is mounted
            else:
                inside.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, inside)
                inside.chmod(0o755)
        return made

    async def open(self, row: Mapping[str, Any], llm: Endpoint) -> boxes.Box:
        """A box for one episode. The row's `image` wins."""
        binds = await llm.binds() | {PROGRAMS: f"{self.programs.name}/shown"}
        for name, path in self.shown.items():
            if path.is_dir():
                binds[f"{PROGRAMS}/{name}"] = str(path)
        return await boxes.open(
            row,
            driver=self.driver,
            image=self.image,
            limits=self.limits,
            network=self.network,
            binds=binds,
        )

    def placed(self, command: Sequence[str], path: str) -> list[str]:
        """The command with the paths inside of the files that it names."""
        named = files_named(command, path)
        return [f"{PROGRAMS}/{part}" if part in named else part for part in command]

    async def run(
        self, box: boxes.Box, command: Sequence[str], row: Mapping[str, Any], llm: Endpoint
    ) -> CommandResult:
        """How the command ended. What it wrote stays in the box; no process of it does."""
        file = f"{WORKSPACE}/{TASK_FILE}"
        shown = {name: value for name, value in row.items() if name not in self.hides}
        await box.put(file, json.dumps(shown, default=str))
        return await run_boxed(
            box, command, llm, environ={"RL_CORE_TASK": file}, workspace=WORKSPACE
        )


async def run_boxed(
    box: boxes.Box,
    command: Sequence[str],
    llm: Endpoint,
    *,
    environ: Mapping[str, str] | None = None,
    workspace: str = "",
    timeout_s: float = NO_DEADLINE_S,
) -> CommandResult:
    """Runs a command in a box that was opened with llm.binds(): it finds the endpoint by its
    variables. Then every process in the box is killed."""
    of_endpoint = {}
    for name, value in llm.environ.items():
        of_endpoint[name] = value.replace(llm.address, forward.ADDRESS)
    forwarder = ["python3", f"{BOX_FOLDER}/{FORWARDER}", f"{BOX_FOLDER}/{SOCKET}"]
    done = await box.exec(
        [*forwarder, *command],
        timeout_s=timeout_s,
        environ=dict(environ or {}) | of_endpoint,
        cwd=workspace,
    )
    await box.end_processes()
    return CommandResult(
        exit_code=done.code, stdout=done.stdout, stderr=done.stderr, workspace=workspace
    )


def make_box(value: Any, path: str, command: Sequence[str]) -> CommandBox:
    """Of the setting `box` of the environment's file at `path`. Files that the command names are
    shown to it. Raises ValueError."""
    given = {} if value is True else dict(value)
    of_limits = [each.name for each in fields(boxes.Limits)]
    known = ("driver", "image", "network", "files", "hides", *of_limits)
    for name in given:
        if name not in known:
            raise ValueError(f"{path}: box: {name!r} is unknown; {nearest(str(name), known)}")
    limits = boxes.Limits(**{name: given.pop(name) for name in of_limits if name in given})
    shown = {}
    beside = folder_of(path)
    for name in (*given.pop("files", ()), *files_named(command, path)):
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise ValueError(f"{path}: box: files: {name!r} must lie beside this file, or below")
        if not (beside / name).exists():
            raise ValueError(f"{path}: box: files: there is no {beside / name}")
        shown[name] = beside / name
    return CommandBox(limits=limits, shown=shown, **given)
