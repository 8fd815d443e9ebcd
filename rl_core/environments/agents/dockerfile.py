"""Builds a task's Dockerfile into an image, or carries it out in a box without an image."""

from __future__ import annotations

import asyncio
import glob
import hashlib
import json
import os
import re
import shlex
import subprocess
import tempfile
import textwrap
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from string import Template

from rl_core.data.episodes import WROTE
from rl_core.errors import nearest
from rl_core.sandbox.box_settings import Box, BoxLimits
from rl_core.sandbox.engines import ENGINE_S
from rl_core.sandbox.roots import lock_within

# These describe, start or supervise a container, which a box does not need.
IGNORED = ("FROM", "CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "USER")
IGNORED += ("SHELL", "VOLUME", "MAINTAINER")
CARRIED_OUT = ("ARG", "ENV", "WORKDIR", "COPY", "ADD", "RUN")
NEEDS_IMAGE = "build the image by HARBOR_DRIVER=docker or podman"
MAX_OUTPUT = 500  # Characters of a failed RUN's output.
HEREDOC = re.compile(r"""<<-?\s*(['"]?)([A-Za-z_]\w*)\1""")
STAGES = "/run/stages"  # A build sees copies for COPY --from here.
UV_IMAGE = "ghcr.io/astral-sh/uv"
BUILD_LIMITS = BoxLimits(memory_mib=16384, processes=4096)
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


@dataclass(kw_only=True, slots=True)
class Instruction:
    name: str  # Upper case.
    text: str  # Text after the name, with continued lines joined.
    location: str  # file:line
    documents: list[str] = field(default_factory=list)  # Here-documents with their end markers.

    def __str__(self) -> str:
        return f"{self.location}: {self.name} {self.text[:MAX_OUTPUT]}"

    @property
    def words(self) -> list[str]:
        """Words of the text, without flags."""
        words = exec_form(self.text)
        if words is None:
            words = shlex.split(HEREDOC.sub("", self.text))
        return [word for word in words if not word.startswith("--")]

    def filled(self, values: Mapping[str, str]) -> list[str]:
        """The words with $NAME and ${NAME} replaced; an unknown name stays."""
        return [Template(word).safe_substitute(values) for word in self.words]

    def flag(self, name: str) -> str:
        match = re.search(rf"(?:^|\s)--{name}=(\S+)", self.text)
        return match[1] if match else ""


def exec_form(text: str) -> list[str] | None:
    """The words of a JSON list; None for a shell command, such as `[ -f a ] && b`."""
    try:
        words = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_list = isinstance(words, list) and all(isinstance(word, str) for word in words)
    return words if is_list else None


def read_instructions(path: Path) -> list[Instruction]:
    """Instructions of a Dockerfile. Raises ValueError for one that a box cannot carry out."""
    instructions = []
    for number, line, documents in joined_lines(path.read_text(encoding="utf-8")):
        name, _, text = line.partition(" ")
        instruction = Instruction(
            name=name.upper(), text=text.strip(), location=f"{path}:{number}", documents=documents
        )
        check_instruction(instruction)
        instructions.append(instruction)
    return instructions


def joined_lines(text: str) -> Iterator[tuple[int, str, list[str]]]:
    """(first line's number, text, here-documents) of each instruction, without comments."""
    begun, first = "", 0
    lines = enumerate(text.splitlines(), 1)
    for number, raw in lines:
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        first = first if begun else number
        begun += line.removesuffix("\\").replace("\t", " ")
        if line.endswith("\\"):
            continue
        documents = []
        if begun.split()[0].upper() in ("RUN", "COPY", "ADD"):
            documents = [read_document(lines, match[2]) for match in HEREDOC.finditer(begun)]
        yield first, begun, documents
        begun = ""
    if begun:
        yield first, begun, []


def entrypoint_of(path: Path) -> list[str]:
    """The command of ENTRYPOINT in a Dockerfile's last stage, or in the stage that it is FROM; []
    if these have none."""
    command: list[str] = []
    stages: dict[str, list[str]] = {}
    stage = ""
    for _, line, _ in joined_lines(path.read_text(encoding="utf-8")):
        name, _, text = line.partition(" ")
        if name.upper() == "FROM":
            words = [word.lower() for word in text.split() if not word.startswith("--")]
            command = stages.get(words[0], []) if words else []
            stage = words[2] if len(words) > 2 else ""
        elif name.upper() == "ENTRYPOINT":
            words = exec_form(text.strip())
            command = ["/bin/sh", "-c", text.strip()] if words is None else words
        stages[stage] = command
    return command


def read_document(lines: Iterator[tuple[int, str]], end: str) -> str:
    document = []
    for _, line in lines:
        document.append(line)
        if line.strip("\t") == end:
            break
    return "\n".join(document) + "\n"


def check_instruction(instruction: Instruction) -> None:
    name, text, location = instruction.name, instruction.text, instruction.location
    known = (*IGNORED, *CARRIED_OUT)
    if name not in known:
        raise ValueError(
            f"{location}: {name} cannot be carried out in a box; {nearest(name, known)}"
        )
    if name == "ENTRYPOINT" and text.startswith("[") and exec_form(text) is None:
        raise ValueError(
            f"{location}: ENTRYPOINT {text[:MAX_OUTPUT]} must be a JSON list of strings, such as "
            '["program", "argument"], or a shell command without the bracket'
        )
    allowed = {"RUN": ("--mount=type=cache",), "COPY": ("--chown=", "--chmod=", "--from=")}
    allowed["COPY"] += ("--link",)
    allowed["ADD"] = ("--chown=", "--chmod=", "--link")
    for flag in text.split():
        if name not in allowed or not flag.startswith("--"):
            break
        if not flag.startswith(allowed[name]):
            raise ValueError(f"{location}: {name} {flag} needs an image; {NEEDS_IMAGE}")


def failure(instruction: Instruction, reason: str, details: str = "") -> RuntimeError:
    """An error whose reason comes first, equal for all tasks."""
    text = f"{instruction.name} of the Dockerfile {reason}{WROTE}{instruction}"
    details = details.strip()[-MAX_OUTPUT:]
    return RuntimeError(f"{text}: {details}" if details else text)


def is_fetched(word: str) -> bool:
    return "://" in word or word.endswith(ARCHIVES)


@dataclass(kw_only=True, slots=True)
class Build:
    """A Dockerfile's instructions, carried out in a box one after the other."""

    box: Box
    context: Path  # Source folder of COPY.
    timeout_s: float  # All RUN lines together have this time left.
    environ: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)  # Values of ARG.
    cwd: str = "/"
    installers: dict[str, str] = field(default_factory=dict)  # Variables for RUN only.
    # Copies a path of a stage, or an image, to a folder below STAGES. Raises ValueError.
    take: Callable[[str, str], Awaitable[str]] | None = None
    why_failed: str = "a box has no network, and its system is read-only; " + NEEDS_IMAGE

    async def carry_out(self, instruction: Instruction) -> None:
        if instruction.name == "RUN":
            await self.run(instruction)
        elif instruction.name in ("COPY", "ADD"):
            try:
                await self.copy(instruction)
            except (OSError, ValueError) as error:
                raise failure(instruction, "failed", str(error)) from None
        elif instruction.name == "WORKDIR":
            self.cwd = self.inside(self.filled(instruction.text))
            await self.do(["mkdir", "-p", self.cwd], instruction)
        elif instruction.name == "ENV":
            self.environ |= self.assignments(instruction.text)
        elif instruction.name == "ARG" and "=" in instruction.text:
            self.arguments |= self.assignments(instruction.text)

    async def do(self, command: list[str], instruction: Instruction) -> None:
        done = await self.box.exec(command)
        if done.code != 0:
            raise failure(instruction, f"failed; {NEEDS_IMAGE}", done.stderr)

    def filled(self, text: str) -> str:
        """The text with $NAME and ${NAME} replaced; an unknown name stays."""
        return Template(text).safe_substitute(self.arguments | self.environ)

    def assignments(self, text: str) -> dict[str, str]:
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
        text = re.sub(r"^(--\S+\s+)*", "", instruction.text)
        command: str | list[str] = text
        if words := exec_form(text):
            command = words
        elif instruction.documents:
            command = with_documents(text, instruction.documents)
        begun = time.monotonic()
        done = await self.box.exec(
            command,
            timeout_s=max(self.timeout_s, 0.1),
            environ=self.installers | self.arguments | self.environ,
            cwd=self.cwd,
        )
        self.timeout_s -= time.monotonic() - begun
        if done.code != 0 or done.timed_out:
            wrote = done.stderr or done.stdout
            ending = "ran longer than build_timeout_sec allows" if done.timed_out else "failed"
            raise failure(instruction, f"{ending}; {self.why_failed}", wrote)

    async def copy(self, instruction: Instruction) -> None:
        words = [self.filled(word) for word in instruction.words]
        into = self.inside(words[-1])
        if instruction.documents:
            await self.copy_documents(instruction, into, words[-1].endswith("/"))
        elif stage := instruction.flag("from"):
            await self.copy_from(stage, words[:-1], words[-1], instruction)
        else:
            await self.copy_files(words[:-1], words[-1], instruction)
        if mode := instruction.flag("chmod"):
            await self.do(["chmod", "-R", mode, into], instruction)

    async def copy_documents(self, instruction: Instruction, into: str, is_folder: bool) -> None:
        heads = HEREDOC.findall(instruction.text)
        for (quote, name), document in zip(heads, instruction.documents, strict=True):
            body = document.rstrip("\n").rpartition("\n")[0] + "\n"
            text = body if quote else self.filled(body)
            await self.box.put(f"{into.rstrip('/')}/{name}" if is_folder else into, text)

    async def copy_from(
        self, stage: str, sources: list[str], target: str, instruction: Instruction
    ) -> None:
        if self.take is None:
            raise failure(instruction, f"has --from; {NEEDS_IMAGE}")
        into, many = self.inside(target), len(sources) > 1 or target.endswith(("/", "."))
        for source in sources:
            try:
                path = shlex.quote(await self.take(stage, source))
            except ValueError as error:
                raise failure(instruction, f"failed; {NEEDS_IMAGE}", str(error)) from None
            quoted, name = shlex.quote(into), shlex.quote(PurePosixPath(source).name)
            command = f"if [ -d {path} ]; then mkdir -p {quoted} && cp -a {path}/. {quoted}; "
            if many:
                command += f"else mkdir -p {quoted} && cp -a {path} {quoted}/{name}; fi"
            else:
                command += f"else mkdir -p $(dirname {quoted}) && cp -a {path} {quoted}; fi"
            await self.do(["/bin/sh", "-c", command], instruction)

    async def copy_files(self, patterns: list[str], target: str, instruction: Instruction) -> None:
        into = self.inside(target)
        if instruction.name == "ADD":
            fetched = [word for word in patterns if is_fetched(word)]
            for word in fetched:
                await self.add(word, into, target, instruction)
            patterns = [word for word in patterns if word not in fetched]
            if not patterns:
                return
        sources = [path for pattern in patterns for path in self.matching(pattern, instruction)]
        is_folder = target == "." or target.endswith(("/", "/.")) or len(sources) > 1
        if not is_folder:
            is_folder = (await self.box.exec(["test", "-d", into])).code == 0
        for source in sources:
            # A folder's content is copied, not the folder.
            keeps_name = is_folder and source.is_file()
            await self.box.put(f"{into.rstrip('/')}/{source.name}" if keeps_name else into, source)

    async def add(self, word: str, into: str, target: str, instruction: Instruction) -> None:
        """Unpacks an archive of the context, or fetches a file."""
        if "://" in word:
            if not self.installers:
                raise failure(instruction, "has a URL, and the build has no network")
            data = await asyncio.to_thread(fetch, word, self.timeout_s, instruction)
            name = PurePosixPath(word.partition("?")[0]).name
            await self.box.put(f"{into.rstrip('/')}/{name}" if target.endswith("/") else into, data)
            return
        for archive in self.matching(word, instruction):
            await self.box.put("/tmp/added", archive)
            unpack = 'mkdir -p "$0" && tar -xf /tmp/added -C "$0" && rm /tmp/added'
            await self.do(["/bin/sh", "-c", unpack, into], instruction)

    def matching(self, pattern: str, instruction: Instruction) -> list[Path]:
        """Files of the context that match a pattern of COPY."""
        names = sorted(glob.glob(pattern.lstrip("/") or ".", root_dir=self.context))
        paths = [self.context / name for name in names]
        context = self.context.resolve()
        if not paths or not all(path.resolve().is_relative_to(context) for path in paths):
            raise failure(
                instruction,
                "names a file that environment/ does not have",
                f"there is no {pattern} in {self.context}",
            )
        return paths


def digest_of(folder: Path) -> str:
    """A hash of the names, modes and contents of a folder's files."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{name}\0{path.stat().st_mode & 0o777}\0{content}\n".encode())
    return digest.hexdigest()[:16]


def with_documents(text: str, documents: list[str]) -> str:
    """The command with its here-documents. For `RUN <<END` the document is the script."""
    if HEREDOC.fullmatch(text):
        body = documents[0].rstrip("\n").rpartition("\n")[0]
        return textwrap.dedent(body) if text.startswith("<<-") else body
    return f"{text}\n{''.join(documents)}"


def fetch(url: str, timeout_s: float, instruction: Instruction) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=max(timeout_s, 1.0)) as answer:
            return answer.read()
    except (OSError, ValueError) as error:
        raise failure(instruction, "could not fetch a URL", str(error)) from None


def build_image(
    engine: str, folder: Path, timeout_s: float, network: bool = True, flags: Sequence[str] = ()
) -> str:
    """Builds the image of a folder with a Dockerfile, unless the engine has it, and returns its
    name. Concurrent calls build it once. Raises RuntimeError if the build fails."""
    tag = digest_of(folder)
    if flags:
        tag = hashlib.sha256("\0".join([tag, *flags]).encode()).hexdigest()[:16]
    image = f"rl_core_task:{tag}"
    lock = Path(tempfile.gettempdir()) / f"{image.replace(':', '_')}.{os.getuid()}.lock"
    with lock.open("w") as held:
        lock_within(timeout_s + 2 * ENGINE_S, held, image)
        inspecting = [engine, "image", "inspect", image]
        command = [engine, "build", "--tag", image, *flags, str(folder)]
        if not network:
            command[2:2] = ["--network", "none"]
        try:
            known = subprocess.run(inspecting, capture_output=True, timeout=ENGINE_S)
            if known.returncode == 0:
                return image
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(
                f"{shlex.join(error.cmd)} ran longer than {error.timeout:g} s"
            ) from None
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)} failed: {done.stderr.strip()[-MAX_OUTPUT:]}")
    return image
