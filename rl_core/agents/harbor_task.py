"""A task's folder in Harbor's format, as it is read."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rl_core.sandbox.box_settings import Limits

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

UNITS_MIB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}


@dataclass(kw_only=True, slots=True)
class ScriptSection:
    """[verifier], and [solution]."""

    timeout_sec: float = 600.0
    env: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class AgentSection:
    timeout_sec: float | None = None


@dataclass(kw_only=True, slots=True)
class EnvironmentSection:
    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    memory: str = "2G"
    storage_mb: int | None = None
    storage: str = "1G"
    workdir: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    os: str = "linux"
    network_mode: str = "public"
    allow_internet: bool | None = None


@dataclass(kw_only=True, slots=True)
class HarborTask:
    """A task's folder. Fields are the sections of its task.toml that are used; others are not
    read."""

    folder: Path
    instruction: str
    verifier: ScriptSection = field(default_factory=ScriptSection)
    solution: ScriptSection = field(default_factory=ScriptSection)
    agent: AgentSection = field(default_factory=AgentSection)
    environment: EnvironmentSection = field(default_factory=EnvironmentSection)
    steps: list[Any] = field(default_factory=list)

    @property
    def dockerfile(self) -> Path:
        return self.folder / "environment" / "Dockerfile"

    @property
    def agent_timeout_s(self) -> float:
        return self.agent.timeout_sec or 900.0

    @property
    def allows_network(self) -> bool:
        return self.environment.network_mode != "no-network" and (
            self.environment.allow_internet is not False
        )

    @property
    def limits(self) -> Limits:
        said = self.environment
        return Limits(
            memory_mib=said.memory_mb or mebibytes(said.memory),
            disk_mib=said.storage_mb or mebibytes(said.storage),
            cpus=said.cpus or 0.0,
        )


def mebibytes(size: str) -> int:
    """Of "4G" or "512M"."""
    match = re.fullmatch(r"([0-9.]+)\s*([KMGT])i?B?", size.strip(), re.IGNORECASE)
    if not match:
        raise ValueError(f"{size!r} must be a size such as 4G or 512M")
    return int(float(match[1]) * UNITS_MIB[match[2].upper()])


def read_task(folder: str | Path) -> HarborTask:
    """Raises ValueError, with the file, for what is missing, of a wrong type, or not played
    here."""
    folder = Path(folder).expanduser().resolve()
    file = folder / "task.toml"
    for name in ("task.toml", "instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            hint = "; tasks of several steps are not played" if (folder / "steps").is_dir() else ""
            raise ValueError(f"{folder}: a task in Harbor's format needs {name}{hint}")
    instruction = (folder / "instruction.md").read_text(encoding="utf-8").strip()
    try:
        said = tomllib.loads(file.read_text(encoding="utf-8"))
        own = said | {"folder": folder, "instruction": instruction}
        task = TypeAdapter(HarborTask).validate_python(own)
        _ = task.limits
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{file}: {where}: {first['msg']}") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    check_task(task, file)
    return task


def check_task(task: HarborTask, file: Path) -> None:
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (task.folder / "environment" / name).exists():
            raise ValueError(
                f"{task.folder}: environment/{name} wants several containers, and a box is one; "
                "leave this task out"
            )
    if task.steps:
        raise ValueError(f"{file}: steps: tasks of several steps are not played; leave it out")
    if task.environment.os.lower() != "linux":
        raise ValueError(f"{file}: environment.os = {task.environment.os!r}; boxes have Linux")
    for section in (task.environment, task.verifier, task.solution):
        for variable, value in section.env.items():
            if "${" in value:
                raise ValueError(
                    f"{file}: {variable} = {value!r} names a variable of this machine, and a box "
                    "gets none; write the value"
                )
    if not task.dockerfile.is_file() and not task.environment.docker_image:
        raise ValueError(f"{task.folder}: needs environment/Dockerfile, or docker_image")


def is_tasks_folder(folder: Path) -> bool:
    """Whether a folder is a task, or holds some."""
    return (folder / "task.toml").is_file() or any(folder.glob("*/task.toml"))


def task_rows(folder: str | Path) -> list[dict[str, Any]]:
    """A row for each task of a folder of tasks, or of a task's own folder, by name. Raises
    ValueError, as read_task."""
    folder = Path(folder).expanduser()
    folders = [folder]
    if not (folder / "task.toml").is_file():
        folders = sorted(file.parent for file in folder.glob("*/task.toml"))
    if not folders:
        raise ValueError(
            f"{folder}: neither this folder nor a folder in it has a task.toml; name a folder of "
            "tasks in Harbor's format"
        )
    rows = []
    for own in folders:
        task = read_task(own)
        row = {"name": task.folder.name, "prompt": task.instruction}
        rows.append(row | {"task_folder": str(task.folder)})
    return rows
