"""Reads environment/docker-compose.yaml of a task in Harbor's format: the service `main` is the
agent's box, the others are its sidecars. They share one network namespace, as the containers of a
Kubernetes pod do. Keys that are not known here are refused, so no file reaches this machine."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from rl_core.sandbox.box_settings import HealthCheck, Sidecar
from rl_core.sandbox.engines import RIGHTS
from rl_core.types import JSON, JSONObject

MAIN = "main"
MAX_BYTES, MAX_VALUES = 1 << 16, 10_000  # Aliases can make a small file very large.
MAX_SERVICES = 16
HOST_LOGS = "@logs"  # Source of Harbor's folders for logs, which a box has without a mount.
TERMINAL_BENCH = {  # Values of its variables T_BENCH_*.
    "TEST_DIR": "/tests",
    "TASK_LOGS_PATH": HOST_LOGS,
    "TASK_AGENT_LOGS_PATH": HOST_LOGS,
    "CONTAINER_LOGS_PATH": "/logs",
    "CONTAINER_AGENT_LOGS_PATH": "/agent-logs",
    "TASK_DOCKER_CLIENT_IMAGE_NAME": "",
    "TASK_DOCKER_CLIENT_CONTAINER_NAME": MAIN,
    "TASK_DOCKER_NAME_PREFIX": "task",
}
VARIABLE = re.compile(r"\$(?:(\$)|(\w+)|\{(\w+)(?:(:?[-?+])([^}]*))?\})")
HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
IDLE = re.compile(r"(?:(?:/bin/)?(?:ba)?sh -l?c )?(?:sleep infinity|tail -f /dev/null)")
MOUNT = re.compile(r"/[\w./@+ -]*")
CONDITIONS = ("service_started", "service_healthy", "service_completed_successfully")
OF_NETWORK = ("driver", "internal", "name", "labels", "attachable")
OF_VOLUME = ("driver", "name", "labels")
TOP = ("services", "networks", "volumes", "version", "name")
# Containers publish no ports, and have the limits of [environment].
IGNORED = "annotations attach cap_drop cpu_shares cpus deploy expose init labels logging "
IGNORED += "mem_limit mem_reservation memswap_limit pids_limit platform ports profiles "
IGNORED += (
    "pull_policy read_only restart shm_size stdin_open stop_grace_period stop_signal tty ulimits"
)
REFUSED = "privileged devices device_cgroup_rules pid ipc uts cgroup cgroup_parent userns_mode "
REFUSED += "sysctls runtime gpus use_api_socket volumes_from extra_hosts dns external_links"
HOST = "reaches this machine; leave it out"


@dataclass(kw_only=True, slots=True)
class ComposeBuild:
    """An image that is built from a folder of environment/."""

    context: Path
    flags: list[str] = field(default_factory=list)  # Flags of docker build.


@dataclass(kw_only=True, slots=True)
class Composition:
    """The services of a compose file."""

    main: Sidecar
    sidecars: list[Sidecar]  # In the order of their start.
    builds: dict[str, ComposeBuild]  # By service. Other services name an image.
    network: bool = True  # False if `main` has network_mode: none.


def read_compose(file: Path, variables: Mapping[str, str]) -> Composition:
    """`variables`: values of ${NAME}. Raises ValueError, with the file and the key, for settings
    that boxes do not have, and for all that reach this machine."""
    try:
        text = file.read_text(encoding="utf-8")
        if len(text) > MAX_BYTES:
            raise ValueError(f"has more than {MAX_BYTES >> 10} KiB")
        values = filled(yaml.safe_load(text), harbor_variables(file) | dict(variables))
        return ComposeReader(file.parent.resolve()).read(values)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{file}: {' '.join(str(error).split())}") from None


def harbor_variables(file: Path) -> dict[str, str]:
    """Variables that Harbor sets for a compose file, and those of Terminal-Bench before it."""
    variables = {"MAIN_IMAGE_NAME": "", "CONTEXT_DIR": str(file.parent.resolve())}
    variables |= {"CPUS": "1", "MEMORY": "2G", "TEST_DIR": "/tests"}
    variables |= {f"T_BENCH_{name}": value for name, value in TERMINAL_BENCH.items()}
    for name, path in {"VERIFIER_LOGS": "verifier", "AGENT_LOGS": "agent"}.items():
        variables |= {f"HOST_{name}_PATH": HOST_LOGS, f"ENV_{name}_PATH": f"/logs/{path}"}
    return variables | {"HOST_ARTIFACTS_PATH": HOST_LOGS, "ENV_ARTIFACTS_PATH": "/logs/artifacts"}


def filled(value: JSON, variables: Mapping[str, str]) -> JSON:
    """The values of a file with each ${NAME} replaced. Raises ValueError for an unknown name."""
    num_values = 0

    def fill(value: JSON) -> JSON:
        nonlocal num_values
        num_values += 1
        if num_values > MAX_VALUES:
            raise ValueError(f"has more than {MAX_VALUES} values")
        if isinstance(value, dict):
            return {str(name): fill(each) for name, each in value.items()}
        if isinstance(value, list):
            return [fill(each) for each in value]
        return VARIABLE.sub(replaced, value) if isinstance(value, str) else value

    def replaced(match: re.Match[str]) -> str:
        if match[1]:
            return "$"
        name, sign, default = match[2] or match[3], match[4] or "", match[5] or ""
        known = variables.get(name)
        if sign.endswith("+"):
            return default if known else ""
        if sign.endswith("-") and (known is None or (sign == ":-" and not known)):
            return default
        if known is None:
            raise ValueError(
                f"${{{name}}} names a variable of this machine, and a box gets none; write the "
                "value, or name it in task.toml: [environment.env]"
            )
        return known

    return fill(value)


class ComposeReader:
    """Reads the values of a file in `folder`, which is environment/."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.volumes: dict[str, str] = {}  # Volume -> service that uses it.
        self.builds: dict[str, ComposeBuild] = {}
        self.network = True

    def read(self, values: JSON) -> Composition:
        top = as_table(values, "the file")
        for key in top:
            if key not in TOP and not key.startswith("x-"):
                raise ValueError(f"{key}: is not supported")
        for key, known in (("networks", OF_NETWORK), ("volumes", OF_VOLUME)):
            for name, each in as_table(top.get(key), key).items():
                settings = as_table(each, f"{key}.{name}")
                if settings.get("driver") not in (None, "bridge", "local"):
                    raise ValueError(f"{key}.{name}.driver: {HOST}")
                if unknown := settings.keys() - {*known}:
                    raise ValueError(f"{key}.{name}.{sorted(unknown)[0]}: {HOST}")
        services = as_table(top.get("services"), "services")
        services = {name: as_table(each, f"services.{name}") for name, each in services.items()}
        services = {name: each for name, each in services.items() if not each.get("profiles")}
        if len(services) > MAX_SERVICES:
            raise ValueError(f"services: {len(services)} are more than {MAX_SERVICES}")
        networks = {name: networks_of(each) for name, each in services.items()}
        read = {name: self.service(name, each) for name, each in services.items()}
        main = read.pop(MAIN, None) or Sidecar(name=MAIN, image="", host_names=[MAIN])
        for name in read:
            if networks[name].isdisjoint(networks.get(MAIN, {"default"})):
                raise ValueError(
                    f"services.{name}.networks: the services of a box share one network, and this "
                    f"one shares none with {MAIN}"
                )
        if self.builds.get(MAIN) == ComposeBuild(context=self.folder):
            del self.builds[MAIN]  # Harbor's default.
        sidecars = in_order(main, read)
        if sidecars:
            sidecars[0].host_names += main.host_names
        return Composition(main=main, sidecars=sidecars, builds=self.builds, network=self.network)

    def service(self, name: str, values: JSONObject) -> Sidecar:
        if not HOST_NAME.fullmatch(name) or name == "localhost":
            raise ValueError(f"services.{name}: is not a host name")
        where = f"services.{name}"
        not_read = {*IGNORED.split(), *REFUSED.split()}
        for key, value in values.items():
            if key in REFUSED.split() and value:
                raise ValueError(f"{where}.{key}: {value!r} {HOST}")
            is_read = key in not_read or hasattr(self, f"read_{key}")
            if value is not None and not is_read:
                raise ValueError(f"{where}.{key}: is not supported; leave it out")
        sidecar = Sidecar(name=name, image="", host_names=[name])
        for key, value in values.items():
            if value is not None and key not in not_read:
                try:
                    getattr(self, f"read_{key}")(sidecar, value)
                except ValueError as error:
                    raise ValueError(f"{where}.{key}: {error}") from None
        if name == MAIN:
            check_main(sidecar, where)
        elif not sidecar.image and name not in self.builds:
            raise ValueError(f"{where}: needs image or build")
        return sidecar

    def inside(self, path: str, base: Path | None = None) -> Path:
        """An existing path in environment/. Raises ValueError for one elsewhere."""
        resolved = ((base or self.folder) / path).resolve()
        if not resolved.is_relative_to(self.folder) or path.startswith("~"):
            raise ValueError(
                f"{path} is not in environment/, and reaches this machine; copy it there"
            )
        if not resolved.exists():
            raise ValueError(f"there is no {resolved}")
        return resolved

    # One method for each key that is read.

    def read_image(self, sidecar: Sidecar, value: JSON) -> None:
        sidecar.image = as_text(value)
        if sidecar.image.startswith("-"):
            raise ValueError(f"{value!r} is not the name of an image")

    def read_build(self, sidecar: Sidecar, value: JSON) -> None:
        table = {"context": value} if isinstance(value, str) else as_table(value, "build")
        unknown = table.keys() - {"context", "dockerfile", "args", "target", "labels", "tags"}
        if unknown:
            raise ValueError(f"{sorted(unknown)[0]} is not supported; leave it out")
        build = ComposeBuild(context=self.inside(as_text(table.get("context", "."))))
        file = self.inside(as_text(table.get("dockerfile", "Dockerfile")), build.context)
        if file != build.context / "Dockerfile":
            build.flags += ["--file", str(file)]
        for name, argument in pairs(table.get("args")):
            build.flags += ["--build-arg", f"{name}={argument}"]
        if target := table.get("target"):
            build.flags += ["--target", as_text(target)]
        self.builds[sidecar.name] = build

    def read_command(self, sidecar: Sidecar, value: JSON) -> None:
        sidecar.command = words_of(value)

    def read_entrypoint(self, sidecar: Sidecar, value: JSON) -> None:
        sidecar.entrypoint = words_of(value)

    def read_environment(self, sidecar: Sidecar, value: JSON) -> None:
        sidecar.environ |= dict(pairs(value))

    def read_env_file(self, sidecar: Sidecar, value: JSON) -> None:
        for each in reversed(value) if isinstance(value, list) else [value]:
            path = each.get("path", "") if isinstance(each, dict) else each
            file = self.inside(as_text(path))
            if not file.is_file():
                raise ValueError(f"{file} is not a file")
            lines = file.read_text(encoding="utf-8").splitlines()
            lines = [line for line in map(str.strip, lines) if line and not line.startswith("#")]
            values = {name: text.strip("\"'") for name, text in pairs(lines)}
            sidecar.environ = values | sidecar.environ

    def read_volumes(self, sidecar: Sidecar, value: JSON) -> None:
        for each in as_list(value):
            source, target = mount_of(each)
            if source == HOST_LOGS:
                continue
            if not MOUNT.fullmatch(target):
                raise ValueError(f"{target!r} is not an absolute path of a mount")
            if source.startswith((".", "/", "~")):
                sidecar.binds[target] = str(self.inside(source))
                if not MOUNT.fullmatch(sidecar.binds[target]):
                    raise ValueError(f"{sidecar.binds[target]!r} is not a path of a mount")
                continue
            if source and self.volumes.setdefault(source, sidecar.name) != sidecar.name:
                raise ValueError(
                    f"{source} is shared with {self.volumes[source]}; services of a box share "
                    "their network alone"
                )
            sidecar.volumes.append(target)

    def read_tmpfs(self, sidecar: Sidecar, value: JSON) -> None:
        for each in value if isinstance(value, list) else [value]:
            path = as_text(each).partition(":")[0]
            if not MOUNT.fullmatch(path):
                raise ValueError(f"{path!r} is not an absolute path of a mount")
            sidecar.tmpfs.append(path)

    def read_healthcheck(self, sidecar: Sidecar, value: JSON) -> None:
        table = as_table(value, "healthcheck")
        test = table.get("test")
        words = test if isinstance(test, list) else ["CMD-SHELL", as_text(test or "")]
        if table.get("disable") or words[:1] == ["NONE"]:
            return
        if len(words) < 2 or words[0] not in ("CMD", "CMD-SHELL"):
            raise ValueError(f"{test!r} must begin with CMD or CMD-SHELL")
        command = as_text(words[1]) if words[0] == "CMD-SHELL" else [*map(as_text, words[1:])]
        sidecar.check = HealthCheck(
            command=command,
            interval_sec=seconds(table.get("interval", "30s")),
            timeout_sec=seconds(table.get("timeout", "30s")),
            start_period_sec=seconds(table.get("start_period", "0s")),
            start_interval_sec=seconds(table.get("start_interval", "5s")),
            retries=int(as_text(table.get("retries", 3))),
        )

    def read_depends_on(self, sidecar: Sidecar, value: JSON) -> None:
        if isinstance(value, list):
            value = dict.fromkeys(map(as_text, value))
        table = as_table(value, "depends_on")
        for name, settings in table.items():
            condition = as_table(settings, name).get("condition", CONDITIONS[0])
            if condition not in CONDITIONS:
                raise ValueError(f"{condition!r} is not one of {', '.join(CONDITIONS)}")
            sidecar.waits_for[as_text(name)] = as_text(condition)

    def read_user(self, sidecar: Sidecar, value: JSON) -> None:
        sidecar.user = as_text(value)

    def read_working_dir(self, sidecar: Sidecar, value: JSON) -> None:
        sidecar.workdir = as_text(value)

    def read_hostname(self, sidecar: Sidecar, value: JSON) -> None:
        name = as_text(value)
        if not HOST_NAME.fullmatch(name) or name == "localhost":
            raise ValueError(f"{name!r} is not a host name")
        sidecar.host_names.append(name)

    read_container_name = read_hostname

    def read_networks(self, sidecar: Sidecar, value: JSON) -> None:
        for name, settings in (
            as_table(value, "networks").items() if isinstance(value, dict) else ()
        ):
            table = as_table(settings, name)
            if unknown := table.keys() - {"aliases"}:
                raise ValueError(f"{name}.{sorted(unknown)[0]} is not supported; leave it out")
            for alias in as_list(table.get("aliases") or []):
                self.read_hostname(sidecar, alias)

    def read_network_mode(self, sidecar: Sidecar, value: JSON) -> None:
        mode = as_text(value)
        if mode == "host" or mode.startswith("container:"):
            raise ValueError(f"{mode!r} {HOST}")
        if mode == "none":
            if sidecar.name != MAIN:
                raise ValueError(f"'none': services of a box share one network; set it on {MAIN}")
            self.network = False
        elif mode != "bridge" and not mode.startswith("service:"):
            raise ValueError(f"{mode!r} is not supported; leave it out")

    def read_cap_add(self, sidecar: Sidecar, value: JSON) -> None:
        for right in map(as_text, as_list(value)):
            if right.upper().removeprefix("CAP_") not in (*RIGHTS, "NET_BIND_SERVICE"):
                raise ValueError(f"the right {right} {HOST}")

    def read_security_opt(self, sidecar: Sidecar, value: JSON) -> None:
        for option in map(as_text, as_list(value)):
            if not option.startswith("no-new-privileges"):
                raise ValueError(f"{option!r} {HOST}")


def check_main(main: Sidecar, where: str) -> None:
    """Raises ValueError for settings of a service that the agent's box does not have."""
    for key in ("command", "entrypoint"):
        words = getattr(main, key)
        if words and not IDLE.fullmatch(" ".join(words)):
            raise ValueError(f"{where}.{key}: is not run in the agent's box; make it a service")
    for key in ("user", "tmpfs"):
        if getattr(main, key):
            raise ValueError(f"{where}.{key}: is not supported; leave it out")


def networks_of(service: JSONObject) -> set[str]:
    networks = service.get("networks") or ["default"]
    return set(networks if isinstance(networks, dict) else map(as_text, as_list(networks)))


def in_order(main: Sidecar, services: Mapping[str, Sidecar]) -> list[Sidecar]:
    """Services, each after those that it waits for. Raises ValueError for a circle."""
    ordered: dict[str, Sidecar] = {}

    def add(sidecar: Sidecar, waiting: list[str]) -> None:
        if sidecar.name in ordered:
            return
        if sidecar.name in waiting:
            raise ValueError(f"services wait in a circle: {', '.join([*waiting, sidecar.name])}")
        sidecar.waits_for.pop(MAIN, None)  # The agent's box is there first.
        for name, condition in sidecar.waits_for.items():
            if name not in services:
                raise ValueError(f"services.{sidecar.name}.depends_on: there is no service {name}")
            if condition == "service_healthy" and services[name].check is None:
                raise ValueError(
                    f"services.{name}: {sidecar.name} waits for its healthcheck; add one"
                )
            add(services[name], [*waiting, sidecar.name])
        if sidecar is not main:
            ordered[sidecar.name] = sidecar

    for sidecar in (main, *services.values()):
        add(sidecar, [])
    return list(ordered.values())


def mount_of(value: JSON) -> tuple[str, str]:
    """(source or "", path inside) of an entry of `volumes`."""
    if isinstance(value, dict):
        if value.get("type", "volume") not in ("bind", "volume"):
            raise ValueError(f"type {value.get('type')!r} is not supported")
        source = as_text(value.get("source") or "")
        is_relative = value.get("type") == "bind" and source[:1] not in (".", "/", "~", "@")
        return f"./{source}" if is_relative else source, as_text(value.get("target", ""))
    source, separator, rest = as_text(value).partition(":")
    return (source, rest.partition(":")[0]) if separator else ("", source)


def pairs(value: JSON) -> Iterator[tuple[str, str]]:
    """Names and values of `environment` and `args`. Raises ValueError for a name alone, whose value
    is this machine's."""
    items = value.items() if isinstance(value, dict) else map(split_pair, as_list(value or []))
    for name, each in items:
        if each is None:
            raise ValueError(f"{name} names a variable of this machine; write its value")
        yield name, str(each).lower() if isinstance(each, bool) else as_text(each)


def split_pair(value: JSON) -> tuple[str, str | None]:
    name, separator, text = as_text(value).partition("=")
    return name, text if separator else None


def words_of(value: JSON) -> list[str]:
    return [*map(as_text, value)] if isinstance(value, list) else shlex.split(as_text(value))


def seconds(value: JSON) -> float:
    """Seconds of a duration such as "1m30s", "500ms" or 5."""
    units = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
    text = as_text(value)
    if re.fullmatch(r"[0-9.]+", text):
        return float(text)
    if not re.fullmatch(r"(?:[0-9.]+(?:us|ms|s|m|h))+", text):
        raise ValueError(f"{text!r} must be a duration such as 1m30s")
    return sum(float(n) * units[unit] for n, unit in re.findall(r"([0-9.]+)([a-z]+)", text))


def as_table(value: JSON, name: str) -> JSONObject:
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{name} must be a mapping")
    return value or {}


def as_list(value: JSON) -> list[JSON]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} must be a list")
    return value


def as_text(value: JSON) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{value!r} must be a text")
    if "\0" in str(value):
        raise ValueError("a text has no NUL characters")
    return str(value)
