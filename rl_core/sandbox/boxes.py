"""Boxes: agents' commands run in these, each with private files and processes. docs/sandbox.md

from rl_core.sandbox import boxes

async with await boxes.open(row) as box:
    result = await box.exec("ls -l")
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl_core.sandbox import run_flags
from rl_core.sandbox.box_bubblewrap import BubblewrapBox, check_bwrap
from rl_core.sandbox.box_containers import ContainerBox
from rl_core.sandbox.box_remote import REMOTE_DRIVERS, SERVICES, RemoteBox
from rl_core.sandbox.box_settings import (
    WITH_SIDECARS,
    Box,
    BoxEnded,
    BoxSettings,
    ExecResult,
    Root,
    Sidecar,
)
from rl_core.sandbox.box_settings import BoxLimits as Limits
from rl_core.sandbox.engines import ENGINES, find_engine
from rl_core.sandbox.remote_driver import RemoteSettings

__all__ = ["Box", "BoxEnded", "ExecResult", "Limits", "check_machine", "configure", "open"]

run_flags.is_imported = True

MAX_KEPT = 32
DRIVERS = ("bubblewrap", *ENGINES, *REMOTE_DRIVERS)
NO_SANDBOX = "no sandbox"  # Errors for a machine that makes no box begin with this.


def configure(**flags: Any) -> None:
    """Sets what all boxes of this process share: fields of RemoteSettings, which are the flags
    --sandbox.*. Raises ValueError for an unknown driver."""
    settings = RemoteSettings(**flags)
    check_driver(settings.box_driver, "--sandbox.box_driver ")
    SERVICES.configure(settings)


def check_driver(driver: str, name: str) -> None:
    if driver not in ("", *DRIVERS):
        raise ValueError(f"{name}{driver!r} is not one of {', '.join(DRIVERS)}")


def check_machine(driver: str = "", image: str = "", has_agent: bool = False) -> None:
    """Raises RuntimeError or OSError, with the fix, if this machine makes no boxes of this driver;
    with neither driver nor image, no boxes of any driver. `has_agent`: programs in the boxes reach
    the run's endpoint."""
    errors = []
    driver = driver or SERVICES.settings.box_driver
    if driver in REMOTE_DRIVERS:
        return SERVICES.get(driver).check(has_agent)
    if not image and driver in ("", "bubblewrap"):
        try:
            return check_bwrap()
        except OSError as error:
            errors.append(str(error))
    if driver != "bubblewrap":
        try:
            find_engine("a box of an image", (driver,) if driver else ENGINES)
            return
        except ValueError as error:
            errors.append(str(error))
    raise RuntimeError(f"{NO_SANDBOX}: this machine makes no box: {'; '.join(errors)}")


class KeptBoxes:
    """Empty boxes that wait for the next open() of the same settings. Safe in threads and after a
    fork."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.boxes: list[BubblewrapBox] = []

    def take(self, settings: BoxSettings) -> BubblewrapBox | None:
        with self.lock:
            self.drop_those_of_another_process()
            # Where memory ran out, the kernel may have killed one.
            self.boxes = [box for box in self.boxes if box.is_running]
            for box in reversed(self.boxes):
                if box.settings == settings:
                    self.boxes.remove(box)
                    return box
        return None

    def put(self, box: BubblewrapBox) -> BubblewrapBox | None:
        """The box that has waited longest, where there are too many."""
        with self.lock:
            self.drop_those_of_another_process()
            self.boxes.append(box)
            return self.boxes.pop(0) if len(self.boxes) > MAX_KEPT else None

    def drop_those_of_another_process(self) -> None:
        """After a fork they are the parent's."""
        self.boxes = [box for box in self.boxes if box.pid == os.getpid()]


# Boxes outlive the event loop and the hook that opened them, so the process keeps them.
KEPT = KeptBoxes()


class OpenBox:
    """The box of one episode, from open(). At close() the box may be emptied and kept."""

    def __init__(self, box: BubblewrapBox | ContainerBox | RemoteBox, reuse: bool):
        self.box = box
        self.reuse = reuse
        self.is_closed = False
        self.exec, self.put, self.get = box.exec, box.put, box.get
        self.end_processes = box.end_processes

    @property
    def engine(self) -> str:
        """The engine of a container; "" for other boxes."""
        return self.box.engine if isinstance(self.box, ContainerBox) else ""

    async def join(self, network: bool) -> BubblewrapBox:
        """A box of bubblewrap with the same files whose system can be written."""
        return await self.box.join(network)

    async def ended_sidecars(self) -> list[str]:
        """Names of services that should run, and have ended."""
        return await self.box.ended_sidecars() if isinstance(self.box, ContainerBox) else []

    async def __aenter__(self) -> OpenBox:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Kills everything, removes all files. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        if not (self.reuse and self.box.can_be_reset):
            await self.box.close()
            return
        surplus = box = self.box.transfer()
        try:
            await box.reset()
            surplus = KEPT.put(box)
        except (OSError, BoxEnded):
            pass  # What cannot be emptied is not used again.
        finally:
            if surplus is not None:
                await surplus.close()


async def open(
    row: Mapping[str, Any],
    *,
    driver: str = "",
    image: str = "",
    limits: Limits | None = None,
    network: bool = False,
    binds: Mapping[str, str] | None = None,
    reuse: bool = True,
    root: Root | None = None,
    sidecars: Sequence[Sidecar] = (),
) -> OpenBox:
    """A box for one episode. The row's `image` and `box_driver` count before the arguments.
    `driver`: one of DRIVERS; "" takes --sandbox.box_driver, else bubblewrap, and for an image
    docker or podman. `binds`: path inside -> path of the host, read-only unless that ends in
    ":rw"; remote boxes get copies. `root`: of a box by bubblewrap, instead of this machine's
    system. `sidecars`: services, of WITH_SIDECARS. Raises RuntimeError where this machine has
    no such box, with what to install."""
    driver = row.get("box_driver") or driver or SERVICES.settings.box_driver
    check_driver(driver, "driver=")
    of_row = row.get("image")  # A list: the pictures of a prompt.
    settings = BoxSettings(
        driver=driver,
        image=of_row if of_row and isinstance(of_row, str) else image,
        limits=limits or Limits(),
        network=network,
        binds=tuple(sorted((binds or {}).items())),
        root=root,
        sidecars=sidecars,
    )
    if sidecars and (driver not in ("", *WITH_SIDECARS) or not settings.image):
        text = f"a box by {driver or 'bubblewrap'} has no services, and {sidecars[0].name} is one"
        raise ValueError(f"sidecars: {text}; give an image, and {' or '.join(WITH_SIDECARS)}")
    if settings.image and driver == "bubblewrap":
        raise ValueError(f"image={settings.image!r} needs driver docker or podman")
    if driver in ENGINES and not settings.image:
        raise ValueError(f"driver={driver!r} needs an image: image='python:3.12-slim', say")
    if driver in REMOTE_DRIVERS:
        return OpenBox(await open_remote(settings), False)
    if settings.image:
        return OpenBox(await open_container(settings), False)
    settings = replace(settings, driver="bubblewrap")
    box = KEPT.take(settings) if reuse else None
    if box is None:
        try:
            box = await BubblewrapBox.open(settings)
        except OSError as error:
            raise RuntimeError(
                f"{NO_SANDBOX}: this machine makes no box by bubblewrap ({error}); "
                "give an image for docker or podman, or allow user namespaces"
            ) from error
    return OpenBox(box, reuse)


async def open_container(settings: BoxSettings) -> ContainerBox:
    engines = (settings.driver,) if settings.driver else ENGINES
    why = f"a box has image={settings.image!r}"
    try:
        engine = await asyncio.to_thread(find_engine, why, engines)
        return await ContainerBox.open(replace(settings, driver=engine))
    except (OSError, ValueError) as error:
        raise RuntimeError(f"{NO_SANDBOX}: {error}") from error


async def open_remote(settings: BoxSettings) -> RemoteBox:
    for inside, path in settings.binds:
        if path.endswith(":rw"):
            text = f"{inside}: a box by {settings.driver} gets copies, and cannot write to {path}"
            raise ValueError(f"binds: {text}; leave out :rw")
    if settings.root is not None:
        raise ValueError(f"a box by {settings.driver} has no root=; give an image")
    try:
        return await RemoteBox.open(settings)
    except OSError as error:
        raise RuntimeError(str(error)) from error
