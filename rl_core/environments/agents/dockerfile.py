"""Dockerfiles without an image: the instructions that can be carried out in a box of this machine's
system, or in a remote box of the image of FROM. An engine builds all others. docs/terminal.md"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from string import Template

from rl_core.data.episodes import WROTE
from rl_core.sandbox.box_settings import Box

# These describe, start or supervise a container, which a box does not need.
IGNORED = ("FROM", "CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "USER")
IGNORED += ("SHELL", "VOLUME", "MAINTAINER")
CARRIED_OUT = ("ARG", "ENV", "WORKDIR", "COPY", "RUN")
FLAGS = ("--chown=", "--chmod=", "--link")  # A box has one user.
MAX_OUTPUT = 500  # Characters of a failed RUN's output.
# Where a command begins in a shell's line.
BEGIN = r"(?:^|[;&|(`]|\bthen\b|\bdo\b|\belse\b|\$\(|\bsudo\b|\btimeout\s+\S+)\s*(?:\w+=\S*\s+)*"
NETWORK = re.compile(
    BEGIN + r"(?:apt(?:-get)?\s.*?\b(?:update|install)\b|(?:apk|yum|dnf|microdnf)\s"
    r"|(?:\S*/)?(?:pip3?|python3?(?:\.\d+)?\s+-m\s+pip)\s+(?:install|download|wheel)\b"
    r"|uv\s+(?:pip|tool|sync|add|run|python|venv|init)\b|uvx\s|pipx\s|poetry\s+install|conda\s"
    r"|(?:npm|pnpm|yarn)\s+(?:i|ci|install|add)\b|npx\s|yarn\s*$|curl\s|wget\s"
    r"|git\s+(?:-\S+\s+)*clone\b|go\s+(?:install|get|mod\s+download)\b|cargo\s+(?:install|fetch)"
    r"|gem\s+install|bundle\s+install|playwright\s+install)"
)
LOCAL = re.compile(r"\b(?:curl|wget)\b.*(?:localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1\])")
# Commands that change the system without a network.
SYSTEM = re.compile(
    BEGIN + r"(?:useradd|adduser|groupadd|addgroup|usermod|chpasswd|update-alternatives"
    r"|dpkg|ldconfig|locale-gen|a2en\w+|service\s|systemctl\s)"
    r"|(?:>|>>|\btee\b.*|\bln\b.*|\bcp\b.*|\bmv\b.*|\bmkdir\b.*|\bchmod\b.*|\bsed\s+-i\b.*|\brm\b.*)"
    r"\s+(?:/etc/|/usr/)"
)
SYSTEM_FOLDERS = ("/usr/", "/etc/", "/bin/", "/sbin/", "/lib/")


@dataclass(kw_only=True, slots=True)
class Instruction:
    name: str  # Upper case.
    text: str  # Text after the name and flags, with continued lines joined.
    location: str  # file:line
    flags: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.location}: {' '.join([self.name, *self.flags, self.text])[:MAX_OUTPUT]}"

    @property
    def command(self) -> str | list[str]:
        """The exec form's words, else the text, which is for the shell, as is `[ -f a ] && b`."""
        try:
            words = json.loads(self.text)
        except (ValueError, RecursionError):
            return self.text
        is_list = isinstance(words, list) and all(isinstance(word, str) for word in words)
        return words if is_list else self.text

    @property
    def words(self) -> list[str]:
        return shlex.split(self.command) if isinstance(self.command, str) else self.command

    @property
    def needs_network(self) -> bool:
        return self.name == "RUN" and uses_network(self.text)

    @property
    def needs_build(self) -> bool:
        """True if no box of an image can carry it out."""
        known = self.name in IGNORED or self.name in CARRIED_OUT
        plain = all(self.name == "COPY" and flag.startswith(FLAGS) for flag in self.flags)
        if self.name == "ENTRYPOINT" and self.text.startswith("["):
            plain = self.command != self.text
        return not known or not plain or "<<" in self.text or self.needs_network

    @property
    def changes_system(self) -> bool:
        if self.name == "RUN":
            return bool(SYSTEM.search(self.text))
        is_placed = self.name in ("COPY", "WORKDIR")
        return is_placed and self.words[-1].startswith(SYSTEM_FOLDERS)


def read_instructions(path: Path) -> list[Instruction]:
    """Instructions of a Dockerfile. Lines of a here-document are read as instructions too."""
    instructions = []
    for number, line in joined_lines(path.read_text(encoding="utf-8", errors="replace")):
        name, _, text = line.partition(" ")
        match = re.match(r"((?:--\S+\s+)*)(.*)", text.strip(), re.DOTALL)
        assert match is not None
        instructions.append(
            Instruction(
                name=name.upper(),
                text=match[2],
                location=f"{path}:{number}",
                flags=match[1].split(),
            )
        )
    return instructions


def joined_lines(text: str) -> Iterator[tuple[int, str]]:
    """(first line's number, text) of each instruction or command, without comments."""
    instruction, first = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        first = first if instruction else number
        instruction += line.removesuffix("\\").replace("\t", " ")
        if not line.endswith("\\"):
            yield first, instruction
            instruction = ""
    if instruction:
        yield first, instruction


def uses_network(text: str) -> bool:
    return bool(NETWORK.search(text)) and not LOCAL.search(text)


def network_lines(script: Path) -> list[str]:
    """Lines of a shell script that need a network, with file and number."""
    text = script.read_text(encoding="utf-8", errors="replace")
    lines = [(number, line) for number, line in joined_lines(text) if uses_network(line)]
    return [f"{script}:{number}: {line[:200]}" for number, line in lines]


def first_built(instructions: list[Instruction], in_image: bool = False) -> Instruction | None:
    """The first instruction that needs a build, None if there is none. `in_image`: the box has
    the image of FROM, else this machine's system, which programs cannot change."""
    has_from = False
    for each in instructions:
        is_second = each.name == "FROM" and has_from
        has_from = has_from or each.name == "FROM"
        if is_second or each.needs_build or (each.changes_system and not in_image):
            return each
    return None


def base_image(instructions: list[Instruction]) -> str:
    """The image of the first FROM, with defaults of ARG; "" without one."""
    arguments: dict[str, str] = {}
    for each in instructions:
        if each.name == "ARG":
            name, _, value = each.text.partition("=")
            arguments[name.strip()] = value.strip().strip("\"'")
        elif each.name == "FROM":
            return Template(each.words[0]).safe_substitute(arguments)
    return ""


def entrypoint_of(instructions: list[Instruction]) -> list[str]:
    """The command of ENTRYPOINT in the last stage; [] if that has none."""
    entrypoint: list[str] = []
    for each in instructions:
        if each.name == "FROM":
            entrypoint = []
        elif each.name == "ENTRYPOINT":
            command = each.command
            entrypoint = ["/bin/sh", "-c", command] if isinstance(command, str) else command
    return entrypoint


def failure(instruction: Instruction, reason: str, details: str = "") -> RuntimeError:
    """An error whose reason comes first, equal for all tasks."""
    text = f"{instruction.name} of the Dockerfile {reason}{WROTE}{instruction}"
    details = details.strip()[-MAX_OUTPUT:]
    return RuntimeError(f"{text}: {details}" if details else text)


@dataclass(kw_only=True, slots=True)
class DockerfileRun:
    """Instructions that are carried out in a box one after the other."""

    box: Box
    context: Path  # Source folder of COPY.
    timeout_s: float  # All RUN lines together have this time left.
    environ: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)  # Values of ARG.
    cwd: str = "/"

    async def carry_out(self, instruction: Instruction) -> None:
        text = instruction.text
        if instruction.name == "RUN":
            await self.run(instruction)
        elif instruction.name == "COPY":
            try:
                await self.copy(instruction)
            except OSError as error:
                raise failure(instruction, "failed", str(error)) from None
        elif instruction.name == "WORKDIR":
            self.cwd = self.inside(self.filled(text))
            await self.do(["mkdir", "-p", self.cwd], instruction)
        elif instruction.name == "ENV":
            self.environ |= self.assignments(text)
        elif instruction.name == "ARG" and "=" in text:
            self.arguments |= self.assignments(text)

    async def do(self, command: list[str], instruction: Instruction) -> None:
        done = await self.box.exec(command)
        if done.code != 0:
            raise failure(instruction, "failed", done.stderr)

    def filled(self, text: str) -> str:
        """The text with $NAME and ${NAME} replaced; an unknown name stays."""
        return Template(text).safe_substitute(self.arguments | self.environ)

    def assignments(self, text: str) -> Mapping[str, str]:
        """Variables of `NAME=value ...`, or of the older form `NAME value`."""
        words = shlex.split(text)
        if "=" not in words[0]:
            name, _, value = text.partition(" ")
            return {name: self.filled(value.strip())}
        pairs = [word.partition("=") for word in words]
        return {name: self.filled(value) for name, _, value in pairs}

    def inside(self, path: str) -> str:
        return str(PurePosixPath(self.cwd) / path)

    async def run(self, instruction: Instruction) -> None:
        started_s = time.monotonic()
        done = await self.box.exec(
            instruction.command,
            timeout_s=max(self.timeout_s, 0.1),
            environ=self.arguments | self.environ,
            cwd=self.cwd,
        )
        self.timeout_s -= time.monotonic() - started_s
        if done.code != 0 or done.timed_out:
            ending = "ran longer than build_timeout_sec allows" if done.timed_out else "failed"
            reason = f"{ending}; the box has no network, and on this machine's system is read-only"
            reason += ": HARBOR_DRIVER=podman or docker builds an image"
            raise failure(instruction, reason, done.stderr or done.stdout)

    async def copy(self, instruction: Instruction) -> None:
        *patterns, target = [self.filled(word) for word in instruction.words]
        into = self.inside(target)
        sources = [path for pattern in patterns for path in self.matching(pattern, instruction)]
        is_folder = target == "." or target.endswith(("/", "/.")) or len(sources) > 1
        if not is_folder:
            is_folder = (await self.box.exec(["test", "-d", into])).code == 0
        for source in sources:
            # A folder's content is copied, not the folder.
            keeps_name = is_folder and source.is_file()
            await self.box.put(f"{into.rstrip('/')}/{source.name}" if keeps_name else into, source)
        for flag in instruction.flags:
            if flag.startswith("--chmod="):
                await self.do(["chmod", "-R", flag.partition("=")[2], into], instruction)

    def matching(self, pattern: str, instruction: Instruction) -> list[Path]:
        """Files of the context that match a pattern of COPY."""
        context = self.context.resolve()
        paths = sorted(self.context.glob(pattern.lstrip("/"))) if pattern.strip("/.") else [context]
        if not paths or not all(path.resolve().is_relative_to(context) for path in paths):
            raise failure(
                instruction,
                "names a file that environment/ does not have",
                f"there is no {pattern} in {self.context}",
            )
        return paths
