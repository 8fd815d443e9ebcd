"""Reads a task's folder in Harbor's format."""

from __future__ import annotations

import difflib
import functools
import os
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from rl_core.environments.agents.dockerfile import (
    base_image,
    first_built,
    network_lines,
    read_instructions,
)
from rl_core.environments.agents.harbor_compose import (
    MAIN,
    ComposeBuild,
    Composition,
    read_compose,
)
from rl_core.environments.agents.verifier_cache import cached_layer
from rl_core.sandbox.box_remote import REMOTE_DRIVERS, SERVICES
from rl_core.sandbox.box_settings import WITH_SIDECARS, BoxLimits, HealthCheck
from rl_core.sandbox.engines import ENGINES
from rl_core.sandbox.images import built_name, find_builder, unpacked_image
from rl_core.types import JSON, Row

UNITS_MIB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}
# A value of an `env` section that names a variable, with its default if there is one.
VARIABLE = re.compile(r"\$\{([^}:-]+)(?::?-(.*))?\}", re.DOTALL)
COMPOSE = ("docker-compose.yaml", "docker-compose.yml")
MAX_ERRORS = 50  # Refused tasks of a folder that are named with their errors.
# Keys of task.toml in the published schema 1.4 and before, by section; "" is the top level.
NETWORK = "network_mode allowed_hosts"
KEYS = {
    "": "version schema_version source artifacts multi_step_reward_strategy task metadata verifier "
    "agent environment solution steps",
    "verifier": f"timeout_sec env user environment_mode environment collect {NETWORK}",
    "agent": f"timeout_sec user {NETWORK}",
    "solution": "env timeout_sec",
    "steps": "name agent verifier min_reward healthcheck artifacts",
    "environment": "build_timeout_sec docker_image os cpus memory memory_mb storage storage_mb "
    f"gpus gpu_types tpu mcp_servers env skills_dir healthcheck workdir allow_internet {NETWORK}",
}


# An allowlist names hosts, which no box can distinguish.
NetworkMode = Literal["public", "no-network", "allowlist"]
NETWORKS = {"build": True, "verify": True}  # phase -> True if it has a network


class TaskRefused(ValueError):
    """A task that cannot be played. `reason` has the same words for all tasks of its kind."""

    def __init__(self, message: str, reason: str):
        super().__init__(message)
        self.reason = reason


@dataclass(kw_only=True, slots=True)
class ScriptSection:
    """[verifier], and [solution]."""

    timeout_sec: float | None = None
    env: dict[str, str] = field(default_factory=dict)
    environment_mode: str | None = None
    environment: object = None  # A table means environment_mode = "separate".
    collect: list[object] = field(default_factory=list)
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] = field(default_factory=list)

    @property
    def limit_s(self) -> float:
        return self.timeout_sec or 600.0


@dataclass(kw_only=True, slots=True)
class AgentSection:
    timeout_sec: float | None = None
    network_mode: NetworkMode | None = None  # None: the environment's.
    allowed_hosts: list[str] = field(default_factory=list)


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
    network_mode: NetworkMode = "public"
    allowed_hosts: list[str] = field(default_factory=list)
    allow_internet: bool | None = None
    gpus: int | None = None
    mcp_servers: list[object] = field(default_factory=list)
    healthcheck: HealthCheck | None = None


@dataclass(kw_only=True, slots=True)
class HarborStep:
    """One of [[steps]]. A task without these has one step, whose folder is the task's."""

    name: str = ""
    verifier: ScriptSection = field(default_factory=ScriptSection)
    agent: AgentSection = field(default_factory=AgentSection)
    # The episode ends if the number `reward` is below this, or if one of these names is.
    min_reward: float | dict[str, float] | None = None
    healthcheck: HealthCheck | None = None
    folder: Path = Path()
    instruction: str = ""

    @property
    def tests(self) -> list[Path]:
        """Folders that are laid over each other in /tests, the last on top."""
        task = self.folder.parents[1] if self.name else self.folder
        return [
            path for path in dict.fromkeys([task / "tests", self.folder / "tests"]) if path.is_dir()
        ]

    @property
    def test_script(self) -> Path:
        return topmost(self.tests, "test.sh")

    @property
    def solution(self) -> Path | None:
        """The folder with this step's solve.sh, if there is one."""
        task = self.folder.parents[1] if self.name else self.folder
        folders = [self.folder / "solution", task / "solution"]
        return next((path for path in folders if (path / "solve.sh").is_file()), None)

    @property
    def agent_timeout_s(self) -> float:
        return self.agent.timeout_sec or 900.0


@dataclass(kw_only=True, slots=True)
class HarborTask:
    """A task's folder. Fields are the sections of its task.toml that are used; others are not
    read."""

    folder: Path
    verifier: ScriptSection = field(default_factory=ScriptSection)
    solution: ScriptSection = field(default_factory=ScriptSection)
    agent: AgentSection = field(default_factory=AgentSection)
    environment: EnvironmentSection = field(default_factory=EnvironmentSection)
    steps: list[HarborStep] = field(default_factory=list)
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    composition: Composition | None = field(init=False, default=None)

    @property
    def dockerfile(self) -> Path:
        return self.folder / "environment" / "Dockerfile"

    @property
    def build(self) -> ComposeBuild | None:
        """The build of the task's image; None if the task only names one."""
        if self.composition is not None and MAIN in self.composition.builds:
            return self.composition.builds[MAIN]
        return ComposeBuild(context=self.dockerfile.parent) if self.dockerfile.is_file() else None

    @property
    def image(self) -> str:
        """The name of the task's image, built if it can be."""
        if build := self.build:
            return built_name(build.context, build.flags)
        return self.environment.docker_image or ""

    @property
    def agent_timeout_s(self) -> float:
        return self.steps[0].agent_timeout_s

    @property
    def has_solution(self) -> bool:
        return all(step.solution for step in self.steps)

    @property
    def allows_network(self) -> bool:
        """True if agents may have a network. One box serves all steps."""
        environment = self.environment
        modes = {step.agent.network_mode or environment.network_mode for step in self.steps}
        is_allowed = "no-network" not in modes and environment.allow_internet is not False
        return is_allowed and self.box_has_network

    @property
    def verifiers_have_network(self) -> bool:
        modes = {step.verifier.network_mode for step in self.steps}
        return "no-network" not in modes and self.box_has_network

    @property
    def box_has_network(self) -> bool:
        return self.composition is None or self.composition.network

    @property
    def limits(self) -> BoxLimits:
        environment = self.environment
        return BoxLimits(
            memory_mib=environment.memory_mb or mebibytes(environment.memory),
            disk_mib=environment.storage_mb or mebibytes(environment.storage),
            cpus=environment.cpus or 0.0,
        )


def mebibytes(size: str) -> int:
    """MiB of a size such as "4G" or "512M"."""
    match = re.fullmatch(r"([0-9.]+)\s*([KMGT])i?B?", size.strip(), re.IGNORECASE)
    if not match:
        raise ValueError(f"{size!r} must be a size such as 4G or 512M")
    return int(float(match[1]) * UNITS_MIB[match[2].upper()])


TASK = TypeAdapter(HarborTask)


def read_task(folder: str | Path) -> HarborTask:
    """Raises TaskRefused, with the file, for a file that is missing, a value of a wrong type, and a
    task of a kind that cannot be played."""
    folder = Path(folder).expanduser().resolve()
    file = folder / "task.toml"
    check_file(folder, "task.toml")
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
        task = TASK.validate_python(values | {"folder": folder})
        _ = task.limits
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise TaskRefused(f"{file}: {where}: {first['msg']}", "a value of a wrong type") from None
    except ValueError as error:
        raise TaskRefused(f"{file}: {error}", "a file that cannot be read") from None
    read_steps(task)
    check_task(task, file)
    note_misspelled(values)
    return task


def check_file(folder: Path, name: str) -> None:
    if not (folder / name).is_file():
        raise TaskRefused(f"{folder}: a task in Harbor's format needs {name}", f"no {name}")


def read_steps(task: HarborTask) -> None:
    """Reads the folders of steps, and fills in settings that they take from the task. Raises
    TaskRefused."""
    names = [step.name.casefold() for step in task.steps]
    for number, step in enumerate(task.steps):
        is_name = PurePath(step.name).name == step.name and step.name not in ("", "..")
        step.folder = task.folder / "steps" / step.name
        if not is_name or names[number] in names[:number] or step.folder.is_symlink():
            raise TaskRefused(
                f"{task.folder / 'task.toml'}: steps.{number}.name = {step.name!r}; each step "
                "needs the name of a different folder in steps/",
                "steps without folders",
            )
    if not task.steps:
        task.steps = [HarborStep(folder=task.folder)]
    for step in task.steps:
        check_file(step.folder, "instruction.md")
        if not step.tests or not step.test_script.is_file():
            check_file(step.folder, "tests/test.sh")
        step.instruction = read_text(step.folder / "instruction.md")
        step.agent.timeout_sec = step.agent.timeout_sec or task.agent.timeout_sec
        step.verifier.timeout_sec = step.verifier.timeout_sec or task.verifier.timeout_sec
        step.verifier.env = task.verifier.env | step.verifier.env
        for name in ("environment_mode", "environment", "collect", *NETWORK.split()):
            value = getattr(step.verifier, name) or getattr(task.verifier, name)
            setattr(step.verifier, name, value)
        for name in NETWORK.split():
            setattr(step.agent, name, getattr(step.agent, name) or getattr(task.agent, name))


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except ValueError as error:
        raise TaskRefused(f"{file}: {error}", "a file that cannot be read") from None


def topmost(folders: Sequence[Path], name: str) -> Path:
    """The path of a file in folders that are laid over each other, the last on top."""
    return next(
        (path / name for path in reversed(folders) if (path / name).is_file()), folders[-1] / name
    )


def check_task(task: HarborTask, file: Path) -> None:
    """Fills in defaults of variables. Raises TaskRefused."""
    environment = task.environment
    if environment.os.lower() != "linux":
        raise TaskRefused(
            f"{file}: environment.os = {environment.os!r}; boxes have Linux", "Windows"
        )
    verifiers = [step.verifier for step in task.steps]
    needs = {"a GPU": environment.gpus, "MCP servers": environment.mcp_servers}
    needs["a separate verifier"] = any(map(is_separate, verifiers))
    needs["verifier.collect"] = any(verifier.collect for verifier in verifiers)
    sections = [environment, *verifiers, *(step.agent for step in task.steps)]
    needs["a network of some hosts alone"] = any(
        each.network_mode == "allowlist" or each.allowed_hosts for each in sections
    )
    for need, is_needed in needs.items():
        if is_needed:
            raise TaskRefused(f"{file}: the task needs {need}, and a box has none", need)
    for section in (environment, task.solution, *verifiers):
        section.env = with_defaults(section.env, file)
    read_composition(task)
    if task.build is None and not environment.docker_image:
        raise TaskRefused(
            f"{task.folder}: needs environment/Dockerfile, or docker_image",
            "no environment/Dockerfile",
        )


def read_composition(task: HarborTask) -> None:
    """Reads environment/docker-compose.yaml, if there is one. Raises TaskRefused."""
    environment = task.environment
    files = [task.folder / "environment" / name for name in COMPOSE]
    file = next(filter(Path.is_file, files), None)
    if file is None:
        return
    variables = environment.env | {"PREBUILT_IMAGE_NAME": environment.docker_image or ""}
    try:
        task.composition = composition = read_compose(file, variables)
    except ValueError as error:
        raise TaskRefused(str(error), f"an unsupported {file.name}") from None
    if MAIN not in composition.builds and composition.main.image:
        environment.docker_image = composition.main.image


def is_separate(verifier: ScriptSection) -> bool:
    mode = verifier.environment_mode or ("separate" if verifier.environment else "shared")
    return mode == "separate"


def with_defaults(env: Mapping[str, str], file: Path) -> dict[str, str]:
    """The variables, each ${NAME:-default} replaced by its default. Raises TaskRefused for ${NAME},
    which names a variable of this machine."""
    filled = {}
    for variable, value in env.items():
        match = VARIABLE.fullmatch(value)
        if match and match[2] is None:
            raise TaskRefused(
                f"{file}: {variable} = {value!r} names a variable of this machine, and a box "
                "gets none; write the value",
                "a variable without a value",
            )
        filled[variable] = match[2] if match else value
    return filled


def note_misspelled(values: Mapping[str, JSON]) -> None:
    """Warns once of each key that is nearly one of the published keys."""
    for section, text in KEYS.items():
        tables = values.get(section, {}) if section else values
        known = text.split()
        unknown = [key for table in as_list(tables) for key in table if key not in known]
        for key in unknown:
            # A shorter key than 4 letters has too many neighbours.
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.8) if len(key) > 3 else []
            if close:
                where = f"[{section}] {key}" if section else key
                warn_once(f"task.toml: {where} is not read; did you mean {close[0]!r}?")


def as_list(tables: JSON) -> list:
    return tables if isinstance(tables, list) else [tables]


@functools.cache
def warn_once(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"warning: {text}", file=sys.stderr, flush=True)


def check_driver(
    task: HarborTask, driver: str, networks: Mapping[str, bool] = NETWORKS
) -> str | None:
    """The line by which a box of bubblewrap needs an image that the cache lacks. Raises TaskRefused
    for a Dockerfile that boxes of a service cannot carry out, and for a line that needs a network
    which its phase lacks."""
    check_services(task, driver)
    if driver in REMOTE_DRIVERS:
        remote_image(task, driver)
        return None
    if driver not in ("", "bubblewrap") or (task.environment.docker_image and not driver):
        return None
    line = image_line(task)
    if line is None:
        return None
    check_networks(task, networks)
    return None if "build" in cached_phases(task) else line


def image_line(task: HarborTask) -> str | None:
    """The line by which a task needs an image; None if this machine's system suffices."""
    if not task.dockerfile.is_file() or (task.composition and MAIN in task.composition.builds):
        return f"{task.folder}: names an image or its build"
    line = first_built(read_instructions(task.dockerfile))
    return str(line) if line else next(iter(lines_of_tests(task)), None)


def check_services(task: HarborTask, driver: str) -> None:
    """Raises TaskRefused for services that boxes of this driver do not have."""
    composition = task.composition
    if composition is None or driver in ENGINES:
        return
    services = {sidecar.name: sidecar for sidecar in composition.sidecars}
    faults = []
    if driver not in WITH_SIDECARS:
        faults += [f"{name} is a service" for name in services]
    unpacks = driver in ("", "bubblewrap")
    faults += [f"{name} is built" for name in composition.builds if name != MAIN or not unpacks]
    faults += [f"{name} mounts files" for name, each in services.items() if each.binds]
    for name, each in services.items():
        faults += [f"{name} has a user by name"] if not (each.user or "0").isdecimal() else []
    if faults:
        raise TaskRefused(
            f"{task.folder}: docker-compose.yaml: {faults[0]}, which a box by "
            f"{driver or 'bubblewrap'} does not have; set HARBOR_DRIVER=docker or podman",
            "services that need docker or podman",
        )


def remote_image(task: HarborTask, driver: str) -> str:
    """The image of a remote box: docker_image, else the image of the Dockerfile's FROM, in which
    the other instructions are carried out. Raises TaskRefused for a Dockerfile that must be
    built."""
    if task.environment.docker_image:
        return task.environment.docker_image
    instructions = read_instructions(task.dockerfile) if task.dockerfile.is_file() else []
    built, image = first_built(instructions, in_image=True), base_image(instructions)
    if built or not image:
        raise TaskRefused(
            f"{built or f'{task.dockerfile}: has no FROM'}: a box by {driver} has no build; push "
            "the image to a registry, and name it in task.toml: [environment] docker_image",
            f"a Dockerfile that {driver} does not build",
        )
    return image


def driver_of(driver: str) -> str:
    """The driver of a task's boxes, by default --sandbox.box_driver."""
    return driver or SERVICES.settings.box_driver


def lines_of_tests(task: HarborTask) -> list[str]:
    """Lines of the steps' test.sh that need a network."""
    scripts = dict.fromkeys(step.test_script for step in task.steps)
    return [line for script in scripts for line in network_lines(script)]


def check_networks(task: HarborTask, networks: Mapping[str, bool]) -> None:
    """Raises TaskRefused for a line of the Dockerfile or test.sh that needs a network which its
    phase lacks, unless the cache has all that the phase fetches."""
    if all(networks.values()):
        return
    instructions = read_instructions(task.dockerfile) if task.dockerfile.is_file() else []
    lines = {"build": [str(each) for each in instructions if each.needs_network]}
    lines["verify"] = lines_of_tests(task)
    cached = cached_phases(task)
    for phase in lines:
        if lines[phase] and not networks[phase] and phase not in cached:
            raise TaskRefused(
                f"{lines[phase][0]}: needs a network; set --agents.{phase}_network true",
                f"a line that needs --agents.{phase}_network",
            )


def cached_phases(task: HarborTask) -> set[str]:
    """Phases whose results this machine's cache has: "build", "verify"."""
    image = unpacked_image(task.image) if is_one_host() else None
    if image is None:
        return set()
    fetching = [step.tests for step in task.steps if network_lines(step.test_script)]
    is_fetched = all(cached_layer(image, tests).is_dir() for tests in fetching)
    return {"build", "verify"} if is_fetched else {"build"}


def is_one_host() -> bool:
    """False if other hosts may have another cache, and all ranks must read the same rows."""
    world = os.environ.get("WORLD_SIZE", "1")
    return os.environ.get("LOCAL_WORLD_SIZE", world) == world


def task_rows(folder: str | Path, networks: Mapping[str, bool] = NETWORKS) -> list[Row]:
    """A row for each task of a folder of tasks, or of a task's folder, by name. Tasks that cannot
    be played are left out, and named with their reasons in one warning. `networks`: phases that
    have one. Raises TaskRefused if none can be played, ValueError if images are needed and no
    engine is here."""
    tasks, refused = read_tasks(folder, networks)
    num_refused, errors = sum(map(len, refused.values())), errors_of(refused)
    if refused and not tasks:
        if num_refused > 1:
            counts = f"{folder}: none of {num_refused} tasks can be played: {counted(refused)}"
            errors.insert(0, counts)
        raise TaskRefused("\n".join(errors), next(iter(refused)))
    if refused:
        counts = f"{num_refused} of {num_refused + len(tasks)} tasks are left out"
        warn_once("\n".join([f"{folder}: {counts}: {counted(refused)}", *errors]))
    rows = []
    for task in tasks:
        row = {"name": task.folder.name, "prompt": task.steps[0].instruction}
        rows.append(row | {"task_folder": str(task.folder)})
    return rows


RefusedTasks = dict[str, list[tuple[str, str]]]  # reason -> (name, error) of each task


def read_tasks(
    folder: str | Path, networks: Mapping[str, bool] = NETWORKS
) -> tuple[list[HarborTask], RefusedTasks]:
    """The tasks of a folder that can be played, and those that cannot. Raises ValueError if the
    folder holds no task, and if tasks need images and no engine is here."""
    folder = Path(folder).expanduser()
    folders = [folder]
    if not (folder / "task.toml").is_file():
        folders = sorted(file.parent for file in folder.glob("*/task.toml"))
    if not folders:
        raise ValueError(
            f"{folder}: neither this folder nor a folder in it has a task.toml; name a folder of "
            "tasks in Harbor's format"
        )
    tasks: list[HarborTask] = []
    refused: RefusedTasks = {}
    driver, needing = driver_of(os.environ.get("HARBOR_DRIVER", "")), []
    for task_folder in folders:
        try:
            task = read_task(task_folder)
            line = check_driver(task, driver, networks)
        except TaskRefused as error:
            refused.setdefault(error.reason, []).append((task_folder.name, str(error)))
        else:
            tasks.append(task)
            needing += [line] if line else []
    if needing:
        try:
            find_builder()
        except ValueError as error:
            raise ValueError(
                f"{folder}: {len(needing)} of {len(folders)} tasks need an image, and {error}. "
                f"The first is {needing[0]}"
            ) from None
    return tasks, refused


def errors_of(refused: RefusedTasks) -> list[str]:
    """A line for each task, by reason. Each error begins with its task's folder."""
    lines = [" ".join(error.split()) for tasks in refused.values() for _, error in tasks]
    if len(lines) > MAX_ERRORS:
        lines[MAX_ERRORS:] = [f"and {len(lines) - MAX_ERRORS} more"]
    return lines


def counted(refused: RefusedTasks) -> str:
    """Reasons with their numbers of tasks and a first task, most frequent first."""
    reasons = sorted(refused.items(), key=lambda item: -len(item[1]))
    parts = []
    for reason, tasks in reasons:
        of = "of which the first is " if len(tasks) > 1 else ""
        parts.append(f"{len(tasks)} with {reason} ({of}{tasks[0][0]})")
    return ", ".join(parts)
