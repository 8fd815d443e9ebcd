"""Programs of a Sandbox in remote boxes. docs/remote_boxes.md

A few boxes serve all programs of a process, one program at a time each. Inside, as root,
programs_main.py makes every process another user behind seccomp, which can write its private
folder alone, and afterwards kills the user's processes and removes the folder. A box where that
fails, or that ends, is replaced.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import importlib.util
import json
import math
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl_core.sandbox.box_remote import SERVICES, BoxService, RemoteBox
from rl_core.sandbox.box_settings import BoxEnded, BoxLimits, BoxSettings
from rl_core.sandbox.job import COMPILE_S, WORKERS_IN_BOX, Job, Limits
from rl_core.sandbox.pool import GRACE_S, MAX_WAIT, Outcome
from rl_core.sandbox.remote_driver import RemoteError
from rl_core.scratch import scratch_prefix

IMAGE = "python:3.12"  # With g++ and libseccomp.
MAX_BOXES = 8  # Boxes of programs of one process.
MODULES = "checker engines isolation job judging pool programs_main pytest_files run_flags runner "
MODULES += "sandbox values zygote"
CODE = "/rl_core/code"
BEGIN = f"import sys; sys.path[0] = {CODE!r}; from rl_core.sandbox.programs_main import main; "
BEGIN += "main(sys.argv[1])"
PREPARE_S = 120.0
TRIES = 3


async def play(driver: str, image: str, limits: Limits, job: Job) -> list[Outcome]:
    """The outcomes of Sandbox.play_here() in a box. Raises RuntimeError, ValueError."""
    service = SERVICES.get(driver)
    return await service.run(ProgramBoxes.of(service).play(image or IMAGE, limits, job))


def check(driver: str) -> None:
    """Raises RuntimeError or OSError, with the fix, if no program can run in boxes of the
    driver."""
    filter_source()
    service = SERVICES.get(driver)
    service.check(has_agent=False)
    programs = ProgramBoxes.of(service)
    asyncio.run_coroutine_threadsafe(programs.reserve(), service.loop).result()


class ProgramBoxes:
    """Boxes of programs at one service. Runs in the service's event loop."""

    @classmethod
    def of(cls, service: BoxService) -> ProgramBoxes:
        if service.programs is None:
            service.programs = cls(service)
        return service.programs

    def __init__(self, service: BoxService):
        self.service = service
        self.idle: list[RemoteBox] = []
        self.num_boxes = min(MAX_BOXES, max(1, service.settings.max_boxes // 2))
        self.free_boxes = asyncio.Semaphore(self.num_boxes)
        self.slots = asyncio.Semaphore(self.num_boxes)
        self.reserving: asyncio.Future[None] | None = None

    async def reserve(self) -> None:
        """Takes the slots of its boxes from those of other boxes, once."""
        if self.reserving is None:
            self.reserving = asyncio.ensure_future(self.take_slots())
        await asyncio.shield(self.reserving)

    async def take_slots(self) -> None:
        for _ in range(self.num_boxes):
            await self.service.slots.acquire()

    async def play(self, image: str, limits: Limits, job: Job) -> list[Outcome]:
        await self.reserve()
        wanted = {"job": dataclasses.asdict(job), "limits": dataclasses.asdict(limits)}
        async with self.free_boxes:
            for attempt in range(TRIES):
                try:
                    return await self.play_once(image, limits, json.dumps(wanted), deadline_s(job))
                except (BoxEnded, RemoteError) as error:
                    if attempt == TRIES - 1:
                        raise RuntimeError(f"{error}; {TRIES} boxes were tried") from error
        raise AssertionError

    async def play_once(
        self, image: str, limits: Limits, wanted: str, timeout_s: float
    ) -> list[Outcome]:
        box, is_clean = await self.take(image, limits), False
        try:
            answer = await ask(box, wanted, timeout_s)
            is_clean = answer["is_clean"]
        finally:
            if is_clean:
                self.idle.append(box)
            else:
                self.service.start(close(box))
        if "error" in answer:
            raise RuntimeError(f"{self.service.name}: box of image {image}: {answer['error']}")
        return [outcome_of(data) for data in answer["outcomes"]]

    async def take(self, image: str, limits: Limits) -> RemoteBox:
        """An idle box, or a new one."""
        # A box holds two processes of a program or of its tests.
        memory_mib = 1024 + WORKERS_IN_BOX * limits.memory_mib
        settings = BoxSettings(
            driver=self.service.name, image=image, limits=BoxLimits(memory_mib=memory_mib)
        )
        for box in reversed(self.idle):
            if box.settings == settings:
                self.idle.remove(box)
                return box
        if self.idle and self.slots.locked():
            await close(self.idle.pop(0))
        box = await RemoteBox.open_at(self.service, settings, self.slots)
        try:
            await prepare(box)
        except BaseException:
            self.service.start(close(box))
            raise
        return box


async def close(box: RemoteBox) -> None:
    with suppress(RemoteError):
        await box.close()


async def prepare(box: RemoteBox) -> None:
    """Brings the code of the sandbox into a new box."""
    with tempfile.TemporaryDirectory(prefix=scratch_prefix("programs")) as folder:
        await asyncio.to_thread(copy_code, Path(folder))
        await box.put(CODE, Path(folder))
    done = await box.exec(["python3", "-s", "-c", BEGIN, "prepare"], timeout_s=PREPARE_S)
    if done.code or done.timed_out:
        reason = done.stderr.strip().rpartition("\n")[2] or "it did not answer"
        text = f"image {box.settings.image} cannot run programs of models: {reason}"
        raise RuntimeError(f"{box.service.name}: {text}; it needs python3 (3.10 or later)")


def copy_code(folder: Path) -> None:
    package = folder / "rl_core/sandbox"
    package.mkdir(parents=True)
    for name in MODULES.split():
        shutil.copy(Path(__file__).with_name(f"{name}.py"), package)
    for inner in (package.parent, package):
        (inner / "__init__.py").touch()
    shutil.copy(filter_source(), folder)


def filter_source() -> Path:
    """The file of pyseccomp, which needs no library on this machine."""
    spec = importlib.util.find_spec("pyseccomp")
    if spec is None or spec.origin is None:
        raise RuntimeError(
            "programs of models in remote boxes need pyseccomp: pip install 'rl_core[sandbox]'"
        )
    return Path(spec.origin)


def deadline_s(job: Job) -> float:
    """The time in which a box surely answers."""
    num_waves = math.ceil(len(job.inputs) / WORKERS_IN_BOX) or 1
    return GRACE_S + COMPILE_S + num_waves * ((MAX_WAIT + 1) * job.timeout_s + GRACE_S)


async def ask(box: RemoteBox, wanted: str, timeout_s: float) -> dict[str, Any]:
    """The answer of the box's end. Raises RemoteError if there is none."""
    done = await box.exec(
        ["python3", "-s", "-c", BEGIN, "play"],
        stdin=wanted,
        timeout_s=timeout_s,
        cwd=os.path.dirname(CODE),
    )
    try:
        answer = json.loads(done.stdout)
        if "file" in answer:
            answer = json.loads(await box.get(answer["file"]))
    except ValueError:
        reason = done.stderr.strip()[-300:] or f"exit status {done.code}"
        text = f"box {box.sandbox.id} gave no result of a program: {reason}"
        raise RemoteError(f"{box.service.name}: {text}") from None
    return answer


def outcome_of(data: dict[str, Any]) -> Outcome:
    for name in ("stdout", "stderr", "back"):
        data[name] = base64.b64decode(data[name])
    return Outcome(**data)
