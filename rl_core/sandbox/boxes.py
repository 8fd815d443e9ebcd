"""Boxes: private places where agents' commands run, with files of their own. docs/sandbox.md

from rl_core.sandbox import boxes

async with await boxes.open(row) as box:
    result = await box.exec("ls -l")
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from rl_core.sandbox.box_bubblewrap import BubblewrapBox
from rl_core.sandbox.box_settings import Box, BoxEnded, BoxSettings, ExecResult, Limits

__all__ = ["Box", "BoxEnded", "ExecResult", "Limits", "open"]

MAX_KEPT = 32
DRIVERS = ("bubblewrap", "docker", "podman")


class KeptBoxes:
    """Empty boxes that wait for the next open() of the same settings. Safe in threads and after a
    fork."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.boxes: list[BubblewrapBox] = []

    def take(self, settings: BoxSettings) -> BubblewrapBox | None:
        with self.lock:
            self.drop_those_of_another_process()
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
    """What open() returns: the box of one episode. At close() it may be emptied and kept."""

    def __init__(self, box: BubblewrapBox, reuse: bool):
        self.box = box
        self.reuse = reuse
        self.is_closed = False
        self.exec, self.put, self.get = box.exec, box.put, box.get
        self.end_processes = box.end_processes

    async def __aenter__(self) -> OpenBox:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Kills everything, removes all files. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        surplus = self.box
        if self.reuse and self.box.can_be_reset:
            try:
                await self.box.reset()
                surplus = KEPT.put(self.box)
            except (OSError, BoxEnded):
                pass  # What cannot be emptied is not used again.
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
) -> OpenBox:
    """A box for one episode. The row's `image` counts before the argument. `driver`: bubblewrap,
    docker or podman; "" takes the first that works, and docker or podman for an image. `binds`:
    path inside -> path of the host, read-only unless that ends in ":rw". Raises RuntimeError where
    this machine has no such box, with what to install."""
    settings = BoxSettings(
        driver=driver or "bubblewrap",
        image=row.get("image") or image,
        limits=limits or Limits(),
        network=network,
        binds=tuple(sorted((binds or {}).items())),
    )
    if driver not in ("", *DRIVERS):
        raise ValueError(f"driver={driver!r} is not one of {', '.join(DRIVERS)}")
    box = KEPT.take(settings) if reuse else None
    if box is None:
        try:
            box = await BubblewrapBox.open(settings)
        except OSError as error:
            raise RuntimeError(f"this machine makes no box by bubblewrap: {error}") from error
    return OpenBox(box, reuse)
