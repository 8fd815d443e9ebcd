"""Images of Dockerfiles for boxes of bubblewrap: layers on disk, built once for each content."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shlex
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath

from rl_core.environments.agents.dockerfile import (
    BUILD_LIMITS,
    NEEDS_IMAGE,
    STAGES,
    UV_IMAGE,
    Build,
    Instruction,
    digest_of,
    read_instructions,
)
from rl_core.environments.agents.verifier_tools import VerifierTools, failed_download
from rl_core.sandbox.box_bubblewrap import SYSTEM_PATH, BubblewrapBox
from rl_core.sandbox.box_settings import Box, BoxSettings, Root
from rl_core.sandbox.engines import ENGINE_S
from rl_core.sandbox.isolation import NOBODY
from rl_core.sandbox.roots import (
    BASE_FILES,
    VERSION,
    Base,
    base_folder,
    base_of,
    cache_folder,
    installers_environ,
    interpreters_folder,
    is_complete,
    making,
    remove,
)

IMAGE_FILE = "image.json"
COPY_S = 600.0  # A copy of a path between stages has this deadline.
# Read-only for agents: programs and settings of the system, and state of its installers.
PROTECTED = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc")
PROTECTED += ("/var/lib/apt", "/var/lib/dpkg", "/var/cache")


@dataclass(kw_only=True, slots=True)
class Image:
    """A built image. It is kept as JSON next to its layers."""

    layers: list[str]  # folders of the host, the topmost first
    environ: dict[str, str]
    cwd: str
    protected: list[str]  # folders that agents cannot write


@dataclass(kw_only=True, slots=True)
class Stage:
    layers: list[str]
    environ: dict[str, str] = field(default_factory=dict)
    cwd: str = "/"


@dataclass(kw_only=True, slots=True)
class ImageBuild:
    """The build of one Dockerfile, stage by stage."""

    context: Path
    folder: Path  # The layers are made here.
    timeout_s: float
    network: bool
    stages: dict[str, Stage] = field(default_factory=dict)  # The key is a number or a name.
    arguments: dict[str, str] = field(default_factory=dict)  # Values of ARG before FROM.
    num_taken: int = 0

    async def run(self, instructions: list[Instruction]) -> Image:
        """Raises ValueError, or RuntimeError with the line that failed."""
        begun = [n for n, each in enumerate(instructions) if each.name == "FROM"]
        for instruction in instructions[: begun[0] if begun else 0]:
            self.arguments |= argument_of(instruction)
        for number, first in enumerate(begun):
            last = begun[number + 1] if number + 1 < len(begun) else len(instructions)
            await self.build_stage(number, instructions[first], instructions[first + 1 : last])
        stage = self.stages[str(len(begun) - 1)]
        protected = await self.folders_of_programs(stage)
        return Image(
            layers=stage.layers,
            environ=stage.environ,
            cwd=stage.cwd,
            protected=[*PROTECTED, *protected],
        )

    async def build_stage(
        self, number: int, begin: Instruction, instructions: list[Instruction]
    ) -> None:
        image, *words = begin.filled(self.arguments)
        before = self.stage_of(image, begin)
        changes = self.folder / f"stage{number}"
        async with self.opened(changes, before.layers) as box:
            build = Build(
                box=box,
                context=self.context,
                timeout_s=self.timeout_s,
                environ={"PATH": SYSTEM_PATH} | before.environ,
                cwd=before.cwd,
                installers=installers_environ() if self.network else {},
                take=self.take,
                why_failed=self.why_failed(image),
            )
            for instruction in instructions:
                if instruction.name == "ARG" and "=" not in instruction.text:
                    name = instruction.text.strip()
                    build.arguments |= {
                        known: value for known, value in self.arguments.items() if known == name
                    }
                await build.carry_out(instruction)
            self.timeout_s = build.timeout_s
        layers = [str(changes / "changes"), *before.layers]
        stage = Stage(layers=layers, environ=build.environ, cwd=build.cwd)
        self.stages[str(number)] = stage
        if len(words) == 2 and words[0].upper() == "AS":
            self.stages[words[1].lower()] = stage

    def why_failed(self, image: str) -> str:
        if not self.network:
            return "the build has no network (--agents.build_network false)"
        if image.lower() in self.stages:
            return NEEDS_IMAGE
        return f"a box has {base_of(image).described} for {image}; otherwise {NEEDS_IMAGE}"

    def stage_of(self, image: str, instruction: Instruction) -> Stage:
        if image.lower() in self.stages:
            return self.stages[image.lower()]
        base = base_at(image, instruction)
        return Stage(layers=[str(base_folder(base)), str(interpreters_folder())])

    def opened(
        self, changes: Path, layers: list[str]
    ) -> AbstractAsyncContextManager[BubblewrapBox]:
        exchange = self.folder / "taken"
        make_folder(exchange)
        return open_build(changes, layers, self.network, ((STAGES, f"{exchange}:rw"),))

    async def take(self, stage: str, source: str) -> str:
        """Copies a path of a stage or a base to where all stages of the build see it."""
        name = PurePosixPath(source).name
        if is_uv(stage) and name in ("uv", "uvx"):
            return f"/usr/local/bin/{name}"
        if stage.lower() in self.stages:
            layers = self.stages[stage.lower()].layers
        else:
            layers = [str(base_folder(base_of(stage)))]
        self.num_taken += 1
        changes = self.folder / f"from{self.num_taken}"
        target = f"{STAGES}/{self.num_taken}"
        async with self.opened(changes, layers) as box:
            command = f"mkdir {target} && cp -a /{shlex.quote(source.strip('/'))} {target}/copied"
            done = await box.exec(["/bin/sh", "-c", command], timeout_s=COPY_S, cwd="/")
            if done.code:
                raise ValueError(f"COPY --from={stage} {source}: {done.stderr.strip()}")
        return f"{target}/copied"

    async def folders_of_programs(self, stage: Stage) -> list[str]:
        """Folders of the image's PATH: a virtual environment as a whole, others only if they are
        outside of the working folder, where agents write."""
        names = stage.environ.get("PATH", "").split(":")
        names = [name for name in names if name.startswith("/") and not is_below(name, PROTECTED)]
        if not names:
            return []
        async with self.opened(self.folder / "looked", stage.layers) as box:
            return await folders_of_programs(box, names, stage.cwd)


def is_uv(image: str) -> bool:
    return image.partition(":")[0].partition("@")[0] == UV_IMAGE


async def folders_of_programs(box: Box, names: list[str], cwd: str) -> list[str]:
    folders = []
    for name in names:
        parent = str(PurePosixPath(name).parent)
        is_venv = await box.exec(["test", "-f", f"{parent}/pyvenv.cfg"], cwd="/")
        if is_venv.code == 0:
            folders.append(parent)
            continue
        exists = await box.exec(["test", "-d", name], cwd="/")
        if exists.code == 0 and not is_below(name, [cwd]):
            folders.append(name)
    return folders


def is_below(path: str, folders: tuple[str, ...] | list[str]) -> bool:
    return any(PurePosixPath(path).is_relative_to(folder) for folder in folders)


def base_at(image: str, instruction: Instruction) -> Base:
    """The packages that replace an image. Raises ValueError, with the line."""
    try:
        return base_of(image)
    except ValueError as error:
        raise ValueError(f"{instruction.location}: {error}; {NEEDS_IMAGE}") from None


def check_bases(instructions: list[Instruction]) -> None:
    """Raises ValueError, with the line, for an image that no packages replace."""
    arguments: dict[str, str] = {}
    stages: set[str] = set()
    for instruction in instructions:
        if instruction.name == "ARG" and not stages:
            arguments |= argument_of(instruction)
        if instruction.name != "FROM":
            continue
        image, *words = instruction.filled(arguments)
        if image.lower() not in stages:
            base_at(image, instruction)
        stages |= {str(len(stages)), *map(str.lower, words)}


def argument_of(instruction: Instruction) -> dict[str, str]:
    """The default of an ARG before FROM."""
    name, _, value = instruction.text.partition("=")
    return {name.strip(): value.strip().strip("\"'")}


@asynccontextmanager
async def open_build(
    changes: Path, layers: list[str], network: bool, binds: tuple[tuple[str, str], ...] = ()
) -> AsyncIterator[BubblewrapBox]:
    """A box on these layers, whose changes are kept in the folder `changes`."""
    for name in ("changes", "work"):
        make_folder(changes / name)
    box = await BubblewrapBox.open(
        BoxSettings(
            driver="bubblewrap",
            root=Root(layers=tuple(layers), changes=str(changes)),
            limits=BUILD_LIMITS,
            network=network,
            binds=binds,
        )
    )
    try:
        yield box
    finally:
        await box.close()


def make_folder(folder: Path) -> None:
    """Makes a folder, and those above it that are missing, for a box's user."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir()
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)


def build_root(dockerfile: Path, timeout_s: float, network: bool) -> Image:
    """The image of a Dockerfile, built unless a process of this user has built the same. Raises
    ValueError and RuntimeError."""
    context, folder = dockerfile.parent, build_folder(dockerfile)
    if image := built_image(folder):
        return image
    if folder.is_dir():  # Its base has been removed.
        (folder / IMAGE_FILE).unlink(missing_ok=True)
    with making(folder, timeout_s + 2 * ENGINE_S, [IMAGE_FILE]) as made:
        if made is not None:
            build = ImageBuild(context=context, folder=made, timeout_s=timeout_s, network=network)
            image = asyncio.run(build.run(read_instructions(dockerfile)))
            layers = [layer.replace(str(made), str(folder), 1) for layer in image.layers]
            (made / IMAGE_FILE).write_text(json.dumps(asdict(replace(image, layers=layers))))
    return Image(**json.loads((folder / IMAGE_FILE).read_text()))


def build_folder(dockerfile: Path) -> Path:
    key = hashlib.sha256(f"{VERSION} {digest_of(dockerfile.parent)} {os.geteuid()}".encode())
    return cache_folder() / "build" / key.hexdigest()[:16]


def built_image(folder: Path) -> Image | None:
    """The image in a folder of the cache; None unless all its layers are complete."""
    try:
        image = Image(**json.loads((folder / IMAGE_FILE).read_text()))
    except FileNotFoundError:
        return None
    bases = [layer for layer in map(Path, image.layers) if layer.parent.name == "base"]
    complete = all(is_complete(layer, base_files(layer)) for layer in bases)
    return image if complete and all(map(os.path.isdir, image.layers)) else None


def base_files(layer: Path) -> tuple[str, ...]:
    return () if layer.name.startswith("interpreters-") else BASE_FILES


def cached_phases(dockerfile: Path, tests: Sequence[Sequence[Path]]) -> set[str]:
    """Phases of a task that need no network, as all that they fetch is in the cache: "build",
    "verify". `tests`: the folders of each test.sh that fetches."""
    image = built_image(build_folder(dockerfile))
    if image is None:
        return set()
    is_warm = all(warm_folder(image, folders).is_dir() for folders in tests)
    return {"build", "verify"} if is_warm else {"build"}


# These folders of a fetching verifier are kept for the next verifier.
FETCHED = ("var/cache/rl_core", "var/lib/apt/lists")
HOME_OF_TESTS = "/logs/home"
# The file by which test scripts find a uv that its installer fetched.
UV_ENV = 'export PATH="$HOME/.local/bin:$PATH"\n'


async def prepare_home(box: Box) -> None:
    """Puts the image's uv where its installer would put one, for scripts whose installer cannot be
    fetched."""
    await box.put(f"{HOME_OF_TESTS}/.local/bin/env", UV_ENV)
    link = f"cd {HOME_OF_TESTS}/.local/bin && ln -sf /usr/local/bin/uv /usr/local/bin/uvx ."
    await box.exec(["/bin/sh", "-c", link], environ={"PATH": SYSTEM_PATH}, cwd="/")


def warm_layer(
    image: Image, tests: Sequence[Path], environ: dict[str, str], timeout_s: float
) -> str:
    """A layer with the packages that test.sh fetches. They are fetched once, by playing test.sh in
    a box that no agent has seen. Raises NotFetched; nothing is kept then."""
    folder = warm_folder(image, tests)
    with making(folder, timeout_s + 2 * ENGINE_S) as made:
        if made is not None:
            asyncio.run(fetch_packages(image, tests, environ, timeout_s, made))
    return str(folder / "kept")


def warm_folder(image: Image, tests: Sequence[Path]) -> Path:
    names = [*map(digest_of, tests), *image.layers]
    key = hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
    return cache_folder() / "warm" / key


class NotFetched(Exception):
    """The network did not give all that a test.sh fetches."""


async def fetch_packages(
    image: Image, tests: Sequence[Path], environ: dict[str, str], timeout_s: float, folder: Path
) -> None:
    async with open_build(folder, image.layers, network=True) as box:
        for layer in tests:
            await box.put("/tests", layer)
        await prepare_home(box)
        command = "mkdir -p /logs/verifier; chmod +x /tests/test.sh; exec /tests/test.sh"
        environ = installers_environ() | environ | {"HOME": HOME_OF_TESTS}
        done = await box.exec(
            ["/bin/sh", "-c", command], timeout_s=timeout_s, environ=environ, cwd=image.cwd
        )
    wrote = f"{done.stdout}{done.stderr}"
    missing = VerifierTools.of(*tests).missing(wrote, done.code) or failed_download(wrote)
    if done.timed_out or missing:
        raise NotFetched
    for name in FETCHED:
        if (folder / "changes" / name).is_dir():
            make_folder(folder / "kept" / Path(name).parent)
            (folder / "changes" / name).rename(folder / "kept" / name)
    make_folder(folder / "kept")
    for name in ("changes", "work"):
        remove(folder / name)
