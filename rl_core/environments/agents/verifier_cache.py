"""Downloads of a task's test.sh, fetched once and kept as a layer of its image."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rl_core.environments.agents.verifier_tools import VerifierTools, failed_download
from rl_core.sandbox.box_bubblewrap import BubblewrapBox
from rl_core.sandbox.box_settings import BoxLimits, BoxSettings, Root
from rl_core.sandbox.images import (
    TOOLS,
    Image,
    cache_folder,
    cache_key,
    digest_of,
    installers_environ,
    make_folder,
    making,
)

HOME = "/logs/home"  # The verifier's home. The agent's may hold start-up files of shells, Python.
LIMITS = BoxLimits(memory_mib=16384, processes=4096, disk_mib=8192)
KEPT = "/kept"
KEEP = f"""for folder in {TOOLS} /var/lib/apt/lists; do
[ ! -d $folder ] || cp -a --parents $folder {KEPT}
done"""
COPY_S = 600.0


class NotFetched(Exception):
    """The network did not give all that a test.sh fetches."""


def cached_layer(image: Image, tests: Sequence[Path]) -> Path:
    names = [*map(digest_of, tests), *image.layers]
    return cache_folder() / cache_key("verifier", *names)


def fetched_layer(
    image: Image, tests: Sequence[Path], environ: dict[str, str], timeout_s: float
) -> str:
    """A layer with the packages that test.sh fetches. They are fetched once, by playing test.sh in
    a box that no agent has seen. Raises NotFetched; nothing is kept then."""
    folder = cached_layer(image, tests)
    with making(folder, timeout_s + COPY_S) as made:
        if made is not None:
            make_folder(made / "kept")
            asyncio.run(fetch_packages(image, tests, environ, timeout_s, made / "kept"))
    return str(folder / "kept")


async def fetch_packages(
    image: Image, tests: Sequence[Path], environ: dict[str, str], timeout_s: float, into: Path
) -> None:
    root = Root(layers=tuple(image.layers))
    settings = BoxSettings(
        driver="bubblewrap", root=root, limits=LIMITS, network=True, binds=((KEPT, f"{into}:rw"),)
    )
    box = await BubblewrapBox.open(settings)
    try:
        for layer in tests:
            await box.put("/tests", layer)
        command = f"mkdir -p /logs/verifier {HOME}; chmod +x /tests/test.sh; exec /tests/test.sh"
        done = await box.exec(
            ["/bin/sh", "-c", command],
            timeout_s=timeout_s,
            environ=installers_environ() | environ | {"HOME": HOME},
            cwd=image.cwd,
        )
        wrote = f"{done.stdout}{done.stderr}"
        missing = VerifierTools.of(*tests).missing(wrote, done.code) or failed_download(wrote)
        if done.timed_out or missing:
            raise NotFetched
        copied = await box.exec(["/bin/sh", "-c", KEEP], timeout_s=COPY_S, cwd="/")
        if copied.code:
            raise NotFetched
    finally:
        await box.close()
