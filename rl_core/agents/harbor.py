"""The box of a task in Harbor's format: opened, worked in by an agent, and scored by test.sh."""

from __future__ import annotations

import asyncio
import json
import math
import shlex
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rl_core.agents.dockerfile import Build, build_image, read_instructions
from rl_core.agents.harbor_task import HarborTask, read_task
from rl_core.sampling.hooks import finite_parts
from rl_core.sandbox import boxes
from rl_core.sandbox.box_settings import Box

TESTS, SOLUTION, LOGS = "/tests", "/solution", "/logs"
HOME = "/logs/home"  # of the verifier: the agent's may hold what a shell or Python runs at start
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# By these a variable of the Dockerfile would make the verifier run what the agent wrote.
RUNS_CODE = ("PYTHONPATH", "PYTHONSTARTUP", "PYTHONHOME", "BASH_ENV", "ENV", "LD_PRELOAD")
RUNS_CODE += ("LD_LIBRARY_PATH", "NODE_OPTIONS", "NODE_PATH", "PERL5LIB", "PERL5OPT", "RUBYOPT")
# pytest reads these in the folders above a test.
READ_BY_PYTEST = ("conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg")
READ_BY_PYTEST += ("pyproject.toml", "pytest.toml", ".pytest.toml")
SIGNALLED = range(129, 193)  # exit codes of what a signal ended
MAX_APART = 1e-3  # of one reward in two files
MAX_TOLD = 500  # characters of what a script wrote, in an error


@dataclass(kw_only=True, slots=True)
class Score:
    """What test.sh said."""

    parts: dict[str, float]  # of the reward, which is their sum
    metrics: dict[str, float]  # what it said beside a `reward`

    @property
    def reward(self) -> float:
        return math.fsum(self.parts.values())


@dataclass(kw_only=True, slots=True)
class TaskBox:
    """A task's box, as its Dockerfile wants it."""

    box: Box
    task: HarborTask
    environ: dict[str, str]  # of the Dockerfile and task.toml
    cwd: str  # of commands

    async def exec(self, command: str | Sequence[str], timeout_s: float) -> boxes.ExecResult:
        """As the box's, in the task's working folder with its variables."""
        return await self.box.exec(command, timeout_s=timeout_s, environ=self.environ, cwd=self.cwd)

    async def solve(self) -> None:
        """Runs the task's own solution. Raises RuntimeError if it fails."""
        folder = self.task.folder / "solution"
        if not (folder / "solve.sh").is_file():
            raise ValueError(f"{self.task.folder}: there is no solution/solve.sh to play")
        await self.box.put(SOLUTION, folder)
        said = self.task.solution
        environ = self.environ | said.env
        done = await self.run(f"{SOLUTION}/solve.sh", environ, self.task.agent_timeout_s)
        if done.code != 0 or done.timed_out:
            raise RuntimeError(f"{folder / 'solve.sh'} {ended(done)}")

    async def verify(self) -> Score:
        """What test.sh says of the box as the agent left it. Nothing that the agent left running,
        planted in /tests or /logs, or set for shells takes part. An agent that leaves what cannot
        be removed there scores 0. Raises RuntimeError if test.sh
        leaves no reward, or does not come to its end: a program of the agent that it ran may have
        ended it, and have written the reward."""
        await self.box.end_processes()
        if not await self.clear():
            return Score(parts={"reward": 0.0}, metrics={"not_cleared": 1.0})
        try:
            await self.box.put(TESTS, self.task.folder / "tests")
        except OSError:
            if not await self.is_full():
                raise
            # An agent that leaves no room for tests has solved nothing.
            return Score(parts={"reward": 0.0}, metrics={"no_room_for_tests": 1.0})
        said = self.task.verifier
        environ = self.verifier_environ()
        begun = time.monotonic()
        done = await self.run(f"{TESTS}/test.sh", environ, said.timeout_sec)
        await self.box.end_processes()
        if done.timed_out or done.code in SIGNALLED:
            raise RuntimeError(f"{self.task.folder}: tests/test.sh {ended(done)}")
        score = await self.read_reward(done)
        score.metrics["verifier_s"] = time.monotonic() - begun
        return score

    async def run(self, script: str, environ: dict[str, str], timeout_s: float) -> boxes.ExecResult:
        """Runs a script of the task in the working folder, if the agent left one."""
        enter = f"cd {shlex.quote(self.cwd)} 2>/dev/null || cd /"
        command = ["/bin/sh", "-c", f"{enter}; chmod +x {script}; exec {script}"]
        return await self.box.exec(command, timeout_s=timeout_s, environ=environ, cwd="/")

    async def clear(self) -> bool:
        """Makes /tests and /logs anew. False if something that the agent left there cannot be
        removed. Raises RuntimeError for a mount there, which no agent can make."""
        planted = [f"/{name}" for name in READ_BY_PYTEST]
        old = [TESTS, SOLUTION, LOGS, *planted]
        made = [f"{LOGS}/verifier", f"{LOGS}/agent", f"{LOGS}/artifacts", HOME]
        # The agent may have taken its own rights to these folders away.
        command = f"chmod u+rwx /; chmod -R u+rwX {shlex.join(old)} 2>/dev/null; "
        command += f"rm -rf {shlex.join(old)} || exit 1; "
        # A folder that cannot be made is seen when the tests are put there.
        command += f"mkdir -p {shlex.join([*made, self.cwd])} || :"
        done = await self.run_in_root(command)
        if done.code == 0:
            return True
        mounts = await self.run_in_root("cat /proc/self/mounts")
        if held := mounts_below(old, mounts.stdout):
            raise RuntimeError(
                f"{self.task.folder}: {TESTS}, {SOLUTION} or {LOGS} cannot be removed before the "
                f"tests, as {', '.join(held)} is mounted there; mount it elsewhere"
            )
        return False

    async def run_in_root(self, command: str) -> boxes.ExecResult:
        """Runs a command of ours, in a shell of the system's."""
        return await self.box.exec(
            ["/bin/sh", "-c", command], environ={"PATH": SYSTEM_PATH}, cwd="/"
        )

    def verifier_environ(self) -> dict[str, str]:
        own = {name: value for name, value in self.environ.items() if name not in RUNS_CODE}
        own |= {"HOME": HOME, "PYTHONNOUSERSITE": "1"}
        # What an image sets for itself is emptied, which all of these take as unset.
        own |= dict.fromkeys(RUNS_CODE, "")
        if "PATH" in own:
            own["PATH"] = f"{SYSTEM_PATH}:{own['PATH']}"
        return own | self.task.verifier.env

    async def is_full(self) -> bool:
        """Whether the box has no room for a file of 1 MiB."""
        try:
            await self.box.put("/room_for_tests", b"\0" * (1 << 20))
        except OSError:
            return True
        await self.box.exec(["rm", "-f", "/room_for_tests"])
        return False

    async def read_reward(self, done: boxes.ExecResult) -> Score:
        """Of reward.json, else of reward.txt, as Harbor reads them. If both are there they must
        agree: one may be of a program of the agent that test.sh ran."""
        found = []
        place = f"{self.task.folder}: what tests/test.sh wrote into {LOGS}/verifier/"
        for name in ("reward.json", "reward.txt"):
            try:
                data = await self.box.get(f"{LOGS}/verifier/{name}")
            except FileNotFoundError:
                continue
            found.append(read_score(data, f"{place}{name}"))
        if not found:
            raise RuntimeError(
                f"{self.task.folder}: tests/test.sh wrote no {LOGS}/verifier/reward.txt and no "
                f"reward.json; it {ended(done)}"
            )
        if abs(found[0].reward - found[-1].reward) > MAX_APART:
            raise RuntimeError(
                f"{place}reward.json is {found[0].reward:g}, and reward.txt {found[-1].reward:g}; "
                "write one of them"
            )
        return found[0]


def mounts_below(folders: Sequence[str], mounts: str) -> list[str]:
    """Mount points at these paths and below them. `mounts`: of /proc/self/mounts."""
    points = [PurePosixPath(line.split()[1]) for line in mounts.splitlines()]
    return [str(point) for point in points if any(map(point.is_relative_to, folders))]


def read_score(data: bytes, place: str) -> Score:
    """The reward in a file that a verifier wrote. Raises ValueError unless it is one finite number,
    or an object of them. Of an object `reward` is the reward and the others are metrics; without
    it, they are the parts of the reward."""
    try:
        text = data.decode()
        found = json.loads(text) if place.endswith(".json") else float(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is {data[:80]!r}, no number: {error}") from None
    parts = finite_parts(found, "reward", place)
    if "reward" not in parts:
        return Score(parts=parts, metrics={})
    return Score(parts={"reward": parts.pop("reward")}, metrics=parts)


def ended(done: boxes.ExecResult) -> str:
    """How a script ended, for an error."""
    wrote = (done.stderr or done.stdout).strip()[-MAX_TOLD:]
    how = "ran out of time" if done.timed_out else f"ended with exit code {done.code}"
    return f"{how}: {wrote}"


@asynccontextmanager
async def open_task(
    folder: str,
    *,
    driver: str = "",
    network: bool = False,
    binds: Mapping[str, str] | None = None,
) -> AsyncIterator[TaskBox]:
    """The box of a task, in which its Dockerfile was carried out or whose image it gave. `driver`:
    and `binds`: as boxes.open(). `network`: the box has one if the task wants it too."""
    task = read_task(folder)
    said = task.environment
    image = said.docker_image or ""
    if driver == "bubblewrap":
        image = ""
    elif driver and not image:
        context, limit_s = task.dockerfile.parent, said.build_timeout_sec
        image = await asyncio.to_thread(build_image, driver, context, limit_s)
    box = await boxes.open(
        {},
        driver=driver,
        image=image,
        limits=task.limits,
        network=network and task.allows_network,
        binds=binds,
    )
    async with box:
        environ, cwd = dict(said.env), said.workdir or ""
        if image:
            cwd = cwd or (await box.exec("pwd")).stdout.rstrip("\n")
        else:
            build = await carried_out(task, box)
            environ, cwd = build.environ | environ, cwd or build.cwd
        yield TaskBox(box=box, task=task, environ=environ, cwd=cwd)


async def carried_out(task: HarborTask, box: Box) -> Build:
    """The task's Dockerfile, in a box without an image."""
    if not task.dockerfile.is_file():
        raise ValueError(
            f"{task.folder}: has an image and no environment/Dockerfile, so it needs HARBOR_DRIVER="
            "docker or podman"
        )
    limit_s = task.environment.build_timeout_sec
    path = f"{SYSTEM_PATH}:{Path(sys.executable).parent}"
    build = Build(
        box=box, context=task.dockerfile.parent, timeout_s=limit_s, environ={"PATH": path}
    )
    for instruction in read_instructions(task.dockerfile):
        await build.carry_out(instruction)
    return build
