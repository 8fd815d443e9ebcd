"""Runs an agent's command in a separate box, which holds the declared files and reaches only the
run's endpoint."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path

from rl_core.environments.agents import forward
from rl_core.environments.agents.endpoint import BOX_FOLDER, FORWARDER, SOCKET, Endpoint
from rl_core.environments.agents.program import TASK_FILE, CommandResult, files_named, folder_of
from rl_core.errors import nearest
from rl_core.sandbox import boxes
from rl_core.scratch import scratch_prefix
from rl_core.types import AnyJSON, Row

# Paths inside a box.
WORKSPACE = "/app"
PROGRAMS = "/agent"  # Files next to the environment's file.
NO_DEADLINE_S = 1e6  # The episode has one.


@dataclass(kw_only=True)
class CommandBox:
    """The setting `box` of an environment's file."""

    driver: str = ""
    image: str = ""
    network: bool = False
    limits: boxes.Limits = field(default_factory=boxes.Limits)
    hides: Sequence[str] = ()  # Columns that task.json leaves out.
    shown: dict[str, Path] = field(default_factory=dict)  # Path below PROGRAMS -> host path.

    @cached_property
    def programs(self) -> tempfile.TemporaryDirectory:
        """Copies of the shown files, readable by every user."""
        made = tempfile.TemporaryDirectory(prefix=scratch_prefix("programs"))
        folder = Path(made.name, "shown")
        folder.mkdir(mode=0o755)
        for name, path in self.shown.items():
            inside = folder / name
            if path.is_dir():
                inside.mkdir(parents=True, exist_ok=True)  # The folder's mount point.
            else:
                inside.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, inside)
                inside.chmod(0o755)
        return made

    async def open(self, row: Row, llm: Endpoint) -> boxes.OpenBox:
        """Opens a box for one episode. The row's `image` takes precedence."""
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
        """The command, with the names of shown files replaced by their paths in the box."""
        named = files_named(command, path)
        return [f"{PROGRAMS}/{word}" if word in named else word for word in command]

    async def run(
        self, box: boxes.Box, command: Sequence[str], row: Row, llm: Endpoint
    ) -> CommandResult:
        """Runs the command and returns its result. Its files stay in the box; its processes end."""
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
    """Runs a command in a box that was opened with llm.binds(), then kills every process in the
    box. Environment variables give the command the endpoint's address."""
    endpoint_environ = {}
    for name, value in llm.environ.items():
        endpoint_environ[name] = value.replace(llm.address, forward.ADDRESS)
    forwarder = ["python3", f"{BOX_FOLDER}/{FORWARDER}", f"{BOX_FOLDER}/{SOCKET}"]
    done = await box.exec(
        [*forwarder, *command],
        timeout_s=timeout_s,
        environ=dict(environ or {}) | endpoint_environ,
        cwd=workspace,
    )
    await box.end_processes()
    return CommandResult(
        exit_code=done.code, stdout=done.stdout, stderr=done.stderr, workspace=workspace
    )


def make_box(value: AnyJSON, path: str, command: Sequence[str]) -> CommandBox:
    """Reads the setting `box` of the environment's file at `path`. The box shows the files that
    the command names. Raises ValueError for a wrong setting."""
    settings = {} if value is True else dict(value)
    of_limits = [each.name for each in fields(boxes.Limits)]
    known = ("driver", "image", "network", "files", "hides", *of_limits)
    for name in settings:
        if name not in known:
            raise ValueError(f"{path}: box: {name!r} is unknown; {nearest(str(name), known)}")
    limits = boxes.Limits(**{name: settings.pop(name) for name in of_limits if name in settings})
    shown = {}
    env_folder = folder_of(path)
    for name in (*settings.pop("files", ()), *files_named(command, path)):
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise ValueError(f"{path}: box: files: {name!r} must lie next to this file, or below")
        if not (env_folder / name).exists():
            raise ValueError(f"{path}: box: files: there is no {env_folder / name}")
        shown[name] = env_folder / name
    return CommandBox(limits=limits, shown=shown, **settings)
