"""A task's Dockerfile: built into an image, or carried out in a box that has no image."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from string import Template
from typing import IO

from rl_core.rules import nearest
from rl_core.sandbox.box_settings import Box
from rl_core.sandbox.engines import ENGINE_S

# These say how a container is described, started or looked after, which a box is not.
IGNORED = ("FROM", "CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "USER")
CARRIED_OUT = ("ARG", "ENV", "WORKDIR", "COPY", "ADD", "RUN")
MAX_TOLD = 500  # characters of what a failed RUN wrote
# A build by another process is reported after NOTE_S; its lock is tried every LOCK_POLL_S.
NOTE_S, LOCK_POLL_S = 10.0, 0.2
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


@dataclass(kw_only=True, slots=True)
class Instruction:
    name: str  # in capitals
    text: str  # behind the name, its lines joined
    place: str  # file:line


def read_instructions(path: Path) -> list[Instruction]:
    """What a Dockerfile says. Raises ValueError for what a box cannot carry out."""
    found = []
    for number, line in joined_lines(path.read_text(encoding="utf-8")):
        name, _, text = line.partition(" ")
        place = f"{path}:{number}"
        instruction = Instruction(name=name.upper(), text=text.strip(), place=place)
        check_instruction(instruction)
        found.append(instruction)
    if sum(instruction.name == "FROM" for instruction in found) > 1:
        raise ValueError(f"{path}: a box has one stage; {NEEDS_IMAGE}")
    return found


NEEDS_IMAGE = "build the image by HARBOR_DRIVER=docker or podman"


def joined_lines(text: str) -> Iterator[tuple[int, str]]:
    """(number of its first line, text) of each instruction, without comments."""
    begun, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        first = first if begun else number
        begun += line.removesuffix("\\").replace("\t", " ")
        if not line.endswith("\\"):
            yield first, begun
            begun = ""
    if begun:
        yield first, begun


def check_instruction(instruction: Instruction) -> None:
    name, text, place = instruction.name, instruction.text, instruction.place
    known = (*IGNORED, *CARRIED_OUT)
    if name not in known:
        raise ValueError(f"{place}: {name} cannot be carried out in a box; {nearest(name, known)}")
    if name in ("RUN", "COPY", "ADD"):
        flags = [word for word in text.split() if word.startswith("--")]
        for flag in flags[: 1 if text.startswith("--") else 0]:
            if not flag.startswith(("--chown=", "--chmod=")):
                raise ValueError(f"{place}: {name} {flag} needs an image; {NEEDS_IMAGE}")
        if re.search(r"<<-?['\"]?\w", text):
            raise ValueError(f"{place}: {name} with a here-document needs an image; {NEEDS_IMAGE}")
    if name == "ADD" and any(is_fetched(word) for word in text.split()):
        raise ValueError(f"{place}: ADD of a URL or an archive needs an image; {NEEDS_IMAGE}")


def is_fetched(word: str) -> bool:
    return "://" in word or word.endswith(ARCHIVES)


@dataclass(kw_only=True, slots=True)
class Build:
    """A Dockerfile's instructions, carried out in a box one after the other."""

    box: Box
    context: Path  # the folder from which COPY takes
    timeout_s: float  # of each RUN
    environ: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)  # of ARG
    cwd: str = "/"

    async def carry_out(self, instruction: Instruction) -> None:
        if instruction.name == "RUN":
            await self.run(instruction)
        elif instruction.name in ("COPY", "ADD"):
            await self.copy(instruction)
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
            raise RuntimeError(
                f"{instruction.place}: {instruction.name} {instruction.text[:MAX_TOLD]} failed: "
                f"{done.stderr.strip()[-MAX_TOLD:]}; {NEEDS_IMAGE}"
            )

    def filled(self, text: str) -> str:
        """The text with $NAME and ${NAME} replaced; an unknown name stays."""
        return Template(text).safe_substitute(self.arguments | self.environ)

    def assignments(self, text: str) -> dict[str, str]:
        """Of NAME=value ..., or of the older form NAME value."""
        words = shlex.split(text)
        if "=" not in words[0]:
            name, _, value = text.partition(" ")
            return {name: self.filled(value.strip())}
        pairs = [word.partition("=") for word in words]
        return {name: self.filled(value) for name, _, value in pairs}

    def inside(self, path: str) -> str:
        return str(PurePosixPath(self.cwd) / path)

    async def run(self, instruction: Instruction) -> None:
        command: str | list[str] = instruction.text
        if instruction.text.startswith("["):
            command = json.loads(instruction.text)
        done = await self.box.exec(
            command,
            timeout_s=self.timeout_s,
            environ=self.arguments | self.environ,
            cwd=self.cwd,
        )
        if done.code != 0 or done.timed_out:
            wrote = (done.stderr or done.stdout).strip()[-MAX_TOLD:]
            how = f"ran longer than {self.timeout_s:g} s" if done.timed_out else "failed"
            raise RuntimeError(
                f"{instruction.place}: RUN {instruction.text[:MAX_TOLD]} {how}: {wrote}; a box has "
                f"no network, and its system is read-only; {NEEDS_IMAGE}"
            )

    async def copy(self, instruction: Instruction) -> None:
        words = shlex.split(self.filled(instruction.text))
        if instruction.text.startswith("["):
            words = json.loads(self.filled(instruction.text))
        *patterns, target = [word for word in words if not word.startswith("--")]
        sources = [path for pattern in patterns for path in self.matching(pattern, instruction)]
        into = self.inside(target)
        is_folder = target == "." or target.endswith(("/", "/.")) or len(sources) > 1
        if not is_folder:
            is_folder = (await self.box.exec(["test", "-d", into])).code == 0
        for source in sources:
            # A folder's content is copied, not the folder.
            beside = is_folder and source.is_file()
            await self.box.put(f"{into.rstrip('/')}/{source.name}" if beside else into, source)
        for flag in words:
            if flag.startswith("--chmod="):
                mode = flag.removeprefix("--chmod=")
                await self.do(["chmod", "-R", mode, into], instruction)

    def matching(self, pattern: str, instruction: Instruction) -> list[Path]:
        """The files of the context that a pattern of COPY means."""
        names = sorted(glob.glob(pattern.lstrip("/") or ".", root_dir=self.context))
        paths = [self.context / name for name in names]
        context = self.context.resolve()
        if not paths or not all(path.resolve().is_relative_to(context) for path in paths):
            raise ValueError(f"{instruction.place}: there is no {pattern} in {self.context}")
        return paths


def digest_of(folder: Path) -> str:
    """A hash of the names, modes and contents of a folder's files."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            found.update(f"{name}\0{path.stat().st_mode & 0o777}\0{content}\n".encode())
    return found.hexdigest()[:16]


def lock_within(timeout_s: float, file: IO[str], image: str) -> None:
    """Locks the file. Raises RuntimeError if another process holds the lock for timeout_s."""
    began, is_told = time.monotonic(), False
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        waited_s = time.monotonic() - began
        if waited_s > timeout_s:
            raise RuntimeError(
                f"another process has held {file.name} for {timeout_s:g} s to build {image}; end "
                "that process, or raise build_timeout_sec in task.toml"
            )
        if waited_s > NOTE_S and not is_told:
            print(f"waits until another process has built {image}", file=sys.stderr, flush=True)
            is_told = True
        time.sleep(LOCK_POLL_S)


def build_image(engine: str, folder: Path, timeout_s: float) -> str:
    """The name of the image of a folder with a Dockerfile, built unless the engine has it. Raises
    RuntimeError. Of processes that ask at once, one builds and the others wait."""
    image = f"rl_core_task:{digest_of(folder)}"
    lock = Path(tempfile.gettempdir()) / f"{image.replace(':', '_')}.{os.getuid()}.lock"
    with lock.open("w") as held:
        lock_within(timeout_s + 2 * ENGINE_S, held, image)
        inspecting = [engine, "image", "inspect", image]
        command = [engine, "build", "--tag", image, str(folder)]
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
        raise RuntimeError(f"{shlex.join(command)} failed: {done.stderr.strip()[-MAX_TOLD:]}")
    return image
