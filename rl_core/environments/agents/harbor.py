"""Boxes of tasks in Harbor's format: opened for an agent, then scored by test.sh."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import re
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from rl_core.data.episodes import WROTE, failure_reason
from rl_core.environments.agents.dockerfile import (
    DockerfileRun,
    entrypoint_of,
    network_lines,
    read_instructions,
)
from rl_core.environments.agents.harbor_compose import MAIN, ComposeBuild
from rl_core.environments.agents.harbor_tasks import (
    NETWORKS,
    HarborStep,
    HarborTask,
    check_networks,
    check_services,
    driver_of,
    image_line,
    read_task,
    remote_image,
    warn_once,
)
from rl_core.environments.agents.verifier_cache import HOME, NotFetched, fetched_layer
from rl_core.environments.agents.verifier_tools import VerifierTools, first_failed_install
from rl_core.errors import without_middle
from rl_core.sampling.reward_parts import finite_parts
from rl_core.sandbox import boxes
from rl_core.sandbox.box_remote import REMOTE_DRIVERS
from rl_core.sandbox.box_settings import Box, Root, Sidecar
from rl_core.sandbox.images import (
    Image,
    build_image,
    find_builder,
    image_settings,
    installers_environ,
    is_below,
    pull_image,
    unpack_image,
    unpacked_image,
)
from rl_core.sandbox.remote_driver import RemoteError
from rl_core.sandbox.sidecars import is_healthy

TESTS, SOLUTION, LOGS = "/tests", "/solution", "/logs"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Variables of the Dockerfile that could make the verifier run the agent's code.
RUNS_CODE = ("PYTHONPATH", "PYTHONSTARTUP", "PYTHONHOME", "BASH_ENV", "ENV", "LD_PRELOAD")
RUNS_CODE += ("LD_LIBRARY_PATH", "NODE_OPTIONS", "NODE_PATH", "PERL5LIB", "PERL5OPT", "RUBYOPT")
# Files that pytest reads in the folders above a test.
READ_BY_PYTEST = ("conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg")
READ_BY_PYTEST += ("pyproject.toml", "pytest.toml", ".pytest.toml")
SIGNALLED = range(129, 193)  # Exit codes of processes that a signal ended.
MAX_APART = 1e-3  # Largest difference between reward.json and reward.txt.
MAX_WROTE = 8000  # Characters of a script's output that an episode keeps.
MAX_IN_ERROR = 2000  # Characters of a script's output in an error.
READ_ONLY = "Read-only file system"  # The kernel's text for EROFS.
# A name in the home folder, as shells and Python write it. Hidden files configure programs.
IN_HOME = re.compile(
    r"""(?:~/|\$HOME/|\$\{HOME\}/|home\(\)\s*/\s*["']|~["']\)\s*[,/]\s*["'])(\w[\w.-]*)"""
)
# Starts a command with a shell that sleeps as its arguments, as Harbor does. Waits at most 10 s
# until the shell runs; the exit code is the command's if it ends before.
ENTER = """log=$(mktemp); begun=$log.begun
setsid "$@" /bin/sh -c ': > "$0"; exec sleep infinity' "$begun" > "$log" 2>&1 < /dev/null &
n=0; code=0
while [ ! -e "$begun" ] && kill -0 $! 2>/dev/null && [ $((n += 1)) -le 100 ]; do sleep 0.1; done
[ -e "$begun" ] || kill -0 $! 2>/dev/null || { wait $!; code=$?; }
tail -n 1 "$log"; rm -f "$log" "$begun"; exit $code"""
# Prints the text files next to the reward, such as pytest.log.
LOG_FILES = f"""for file in {LOGS}/verifier/*; do case $file in
*/reward.*|*.json|*.xml) ;;
*) [ -f "$file" ] && [ ! -L "$file" ] && echo "== $file" && head -c 4000 "$file" &&
tail -c +4001 "$file" | tail -c 8000
esac; done | head -c 100000"""
LOG_FILES_S = 20.0  # Bounded because the agent may have left many or large files.


@dataclass(kw_only=True, slots=True)
class VerifierScore:
    """The result of a test.sh."""

    parts: dict[str, float]  # The reward is their sum.
    metrics: dict[str, float]  # Numbers next to a `reward`.
    wrote: str = ""  # Output of test.sh, bounded.
    missing: str = ""  # The line that reports a missing tool of test.sh.
    # The metric that names why an agent's box could not be scored, which scores 0.
    fault: str = ""

    @property
    def reward(self) -> float:
        return math.fsum(self.parts.values())

    @classmethod
    def zero(cls, fault: str) -> VerifierScore:
        return cls(parts={"reward": 0.0}, metrics={fault: 1.0}, fault=fault)

    @property
    def named(self) -> dict[str, float]:
        """Numbers of the verifier by name, none for a box that could not be scored."""
        numbers = {} if self.fault else self.parts | self.metrics
        return {name: value for name, value in numbers.items() if name != "verifier_s"}


@dataclass(kw_only=True, slots=True)
class TaskBox:
    """A task's box, prepared by its Dockerfile."""

    box: boxes.OpenBox
    task: HarborTask
    environ: dict[str, str]  # Variables of the Dockerfile and task.toml.
    cwd: str  # Working folder of commands.
    # Opens another box of the task, in which no agent worked.
    reopen: Callable[[], AbstractAsyncContextManager[TaskBox]]
    note_tools_missing: Callable[[str], None]  # Later episodes of the task fail with this error.
    step: HarborStep  # The current step.
    num_begun: int = 0
    scores: list[VerifierScore] = field(default_factory=list)  # One for each step so far.
    wrote: str = ""  # Output of the last script.
    not_installed: RuntimeError | None = None  # Reason why solve.sh could not install software.
    image: Image | None = None  # Set for a box of bubblewrap that has an image.
    entrypoint: list[str] = field(default_factory=list)
    verify_network: bool = False
    programs: str = ""  # Hash of the folders in PATH after the Dockerfile.

    async def exec(self, command: str | Sequence[str], timeout_s: float) -> boxes.ExecResult:
        """Runs a command in the box, in the task's working folder and with its variables."""
        return await self.box.exec(command, timeout_s=timeout_s, environ=self.environ, cwd=self.cwd)

    async def enter(self) -> None:
        """Runs the image's ENTRYPOINT, whose processes stay until test.sh. Warns once if it
        fails."""
        if not (command := self.entrypoint):
            return
        done = await self.exec(["/bin/sh", "-c", ENTER, "sh", *command], timeout_s=60.0)
        if done.code:
            warn_once(
                f"{self.task.folder}: ENTRYPOINT {shlex.join(command)} {ended(done)}: "
                f'{done.stdout.strip()[-200:]}; it must end by exec "$@"'
            )

    async def steps(self) -> AsyncIterator[HarborStep]:
        """Prepares and gives each step, for an agent and then verify(), until a step ends the
        episode. Raises RuntimeError if the first step cannot be prepared."""
        for number, step in enumerate(self.task.steps):
            self.step, self.wrote = step, ""
            if fault := await self.prepare(number):
                if number == 0:
                    raise self.failure(fault)
                self.wrote = f"{fault}\n{self.wrote}"
                self.add_score(VerifierScore.zero("step_not_begun"))
                return
            self.num_begun += 1
            yield step
            if len(self.scores) <= number:
                raise RuntimeError(f"{step.folder}: this step ended without a call of verify()")
            if self.ends_episode(self.scores[number]):
                return

    async def prepare(self, number: int) -> str:
        """Removes the tests of the step before, and puts this step's files into the working folder.
        Returns why the step cannot begin, or ""."""
        workdir = self.step.folder / "workdir"
        try:
            if number > 0 and not await self.clear():
                return "files of the agent cannot be removed"
            if self.step.name and workdir.is_dir():
                await self.box.put(self.cwd, workdir)
        except OSError as error:
            # A service that fails is not the agent's fault.
            if isinstance(error, RemoteError) and not await self.is_full():
                raise
            return f"the step's files cannot be copied: {error}"
        if self.step.name and (workdir / "setup.sh").is_file():
            done = await self.run("setup.sh", self.environ, self.step.agent_timeout_s, shell="bash")
            if done.timed_out or done.code != 0:
                return f"workdir/setup.sh {ended(done)}"
        if not await is_healthy(self.step.healthcheck, self.exec):
            return "the step's healthcheck failed"
        return ""

    def add_score(self, score: VerifierScore) -> None:
        """Adds the current step's score. A box that could not be scored counts for all steps that
        remain."""
        score.wrote = without_middle(self.wrote.strip(), MAX_WROTE)
        num_left = len(self.task.steps) - len(self.scores)
        self.scores += [score] * (num_left if score.fault else 1)

    def ends_episode(self, score: VerifierScore) -> bool:
        least = self.step.min_reward
        if not isinstance(least, dict):
            least = {} if least is None else {"reward": least}
        named = score.named
        is_below = [named.get(name, -math.inf) < value for name, value in least.items()]
        return bool(score.fault) or any(is_below)

    def score(self) -> VerifierScore:
        """The score of all steps: the last step's, or the mean of each number."""
        if len(self.task.steps) == 1:
            return self.scores[0]
        score = score_of_steps(self.scores, self.task.multi_step_reward_strategy or "mean")
        score.metrics["steps"] = float(self.num_begun)
        lines = []
        for step, each in zip(self.task.steps, self.scores, strict=False):
            lines.append(f"== steps/{step.name}: reward {each.reward:g}\n{each.wrote}")
        score.wrote = without_middle("\n".join(lines), MAX_WROTE)
        return score

    async def solve(self) -> None:
        """Runs the solve.sh of the task or the step. Its exit code is only shown. Raises
        RuntimeError if it runs out of time."""
        if self.step.solution is None:
            raise ValueError(f"{self.step.folder}: there is no solution/solve.sh")
        await self.box.put(SOLUTION, self.step.solution)
        environ = self.environ | self.task.solution.env
        done = await self.run(f"{SOLUTION}/solve.sh", environ, self.step.agent_timeout_s)
        if done.timed_out:
            raise self.failure(f"solution/solve.sh {ended(done)}")
        if done.code != 0:
            self.wrote += f"\n[{ended(done)}]"
        if READ_ONLY in self.wrote or first_failed_install(self.wrote):
            self.not_installed = self.failure(
                "solution/solve.sh could not install: agents have no network unless "
                "HARBOR_NETWORK=1, and with bubblewrap the box's system is read-only; install in "
                "environment/Dockerfile"
            )
        self.wrote = without_middle(self.wrote.strip(), MAX_WROTE)

    async def verify(self) -> VerifierScore:
        """Scores the step as the agent left the box, also if the agent removed tools of test.sh.
        Raises RuntimeError if test.sh lacks its tools in an untouched box too, if it leaves no
        verdict there, or if score_step() raises one."""
        if self.num_begun == 0 and len(self.task.steps) > 1:
            raise RuntimeError(
                f"{self.task.folder}: has {len(self.task.steps)} steps; call verify() for each of "
                "box.steps(), as envs/harbor.py does"
            )
        score = await self.score_step()
        if score.missing:
            await self.check_untouched(score.missing)
            # A network that failed for a moment may be back.
            score = await self.score_step()
        self.add_score(score)
        return score

    async def check_untouched(self, missing: str) -> None:
        """Runs test.sh in a box in which no agent worked. Raises RuntimeError if its tools are
        missing there too, or if it leaves no verdict. `missing`: the line that names the tool
        that the agent's box lacks."""
        async with self.reopen() as untouched:
            untouched.step = self.step
            try:
                score = await untouched.score_step()
            except RuntimeError as error:
                raise untouched.failure(
                    f"the tools of tests/test.sh are missing ({missing}), and an untouched box "
                    f"does not show why: {failure_reason(str(error), '')}"
                ) from None
        if score.missing:
            fault = (
                f"the tools of tests/test.sh are missing, in an untouched box too: {score.missing}"
            )
            if (installing := first_failed_install(score.wrote)) not in ("", score.missing):
                fault += f" ({installing})"
            fault += "; give the box a network, or install them in the Dockerfile"
            error = untouched.failure(fault)
            self.note_tools_missing(str(error))
            raise error

    async def score_step(self) -> VerifierScore:
        """Runs test.sh in the box as the agent left it, after removing the agent's processes, files
        in /tests and /logs, and shell settings. The score is 0 if files cannot be removed. Raises
        RuntimeError if test.sh leaves no reward, or is killed or runs out of time: the agent's code
        may have killed it and written the reward."""
        await self.box.end_processes()
        if not await self.clear():
            return VerifierScore.zero("not_cleared")
        try:
            for folder in self.step.tests:
                await self.box.put(TESTS, folder)
        except OSError:
            if not await self.is_full():
                raise
            # An agent that leaves no room for tests has solved nothing.
            return VerifierScore.zero("no_room_for_tests")
        await self.link_home()
        started_s = time.monotonic()
        environ, limit_s = await self.verifier_environ(), self.step.verifier.limit_s
        done = await self.run_tests(environ, limit_s)
        await self.box.end_processes()
        if done.timed_out or done.code in SIGNALLED:
            raise self.failure(f"tests/test.sh {ended(done)}")
        score = await self.read_reward(done)
        score.metrics["verifier_s"] = time.monotonic() - started_s
        if score.reward <= 0:
            shown = await self.run_in_root(LOG_FILES, timeout_s=LOG_FILES_S)
            self.wrote += f"\n{shown.stdout}"
            if ended_services := await self.box.ended_sidecars():
                self.wrote += f"\n[services that have ended: {', '.join(ended_services)}]"
                score.metrics["services_ended"] = float(len(ended_services))
            score.missing = VerifierTools.of(*self.step.tests).missing(self.wrote, done.code)
        score.wrote = without_middle(self.wrote.strip(), MAX_WROTE)
        return score

    def failure(self, why: str) -> RuntimeError:
        """An error with the script's output. The reason comes first, equal for all tasks."""
        wrote = without_middle(self.wrote.strip(), MAX_IN_ERROR)
        return RuntimeError(f"{why}{WROTE}{self.step.folder}: {wrote}")

    async def run(
        self,
        script: str,
        environ: dict[str, str],
        timeout_s: float,
        box: Box | None = None,
        shell: str = "",
    ) -> boxes.ExecResult:
        """Runs a script of the task in the working folder, or in / if the agent removed it. The box
        bounds the output while it is read."""
        enter = f"cd {shlex.quote(self.cwd)} 2>/dev/null || cd /"
        command = ["/bin/sh", "-c", f"{enter}; chmod +x {script}; exec {shell} {script} 2>&1"]
        done = await (box or self.box).exec(command, timeout_s=timeout_s, environ=environ, cwd="/")
        self.wrote = f"{done.stdout}{done.stderr}".strip()
        return done

    async def run_tests(self, environ: dict[str, str], timeout_s: float) -> boxes.ExecResult:
        """Runs test.sh. The box of an image gets a writable system and the verifiers' network."""
        script = f"{TESTS}/test.sh"
        if self.image is None:
            return await self.run(script, environ, timeout_s)
        environ = installers_environ() | environ
        if not self.verify_network:
            environ |= {"UV_OFFLINE": "1"}
        joined = await self.box.join(self.verify_network)
        try:
            return await self.run(script, environ, timeout_s, joined)
        finally:
            await joined.close()

    async def clear(self) -> bool:
        """Recreates /tests and /logs. False if a file of the agent cannot be removed. Raises
        RuntimeError for a mount there, which no agent can make."""
        planted = [f"/{name}" for name in READ_BY_PYTEST]
        old = [TESTS, SOLUTION, LOGS, *planted]
        made = [f"{LOGS}/verifier", f"{LOGS}/agent", f"{LOGS}/artifacts", HOME]
        # The agent may have removed the permissions of these folders.
        command = f"chmod u+rwx /; chmod -R u+rwX {shlex.join(old)} 2>/dev/null; "
        command += f"rm -rf {shlex.join(old)} || exit 1; "
        # A folder that cannot be made fails when the tests are copied there.
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

    async def link_home(self) -> None:
        """Links files of the agent's home that tests look up into the verifier's home."""
        names = names_in_home(self.step.tests)
        if not names:
            return
        command = (
            f"home={shlex.quote(self.environ.get('HOME', ''))}; for name in {shlex.join(names)}; "
        )
        command += 'do file="${home:-$HOME}/$name"; if [ -e "$file" ]; then '
        await self.run_in_root(command + f'ln -s "$file" {HOME}/; fi; done')

    async def run_in_root(self, command: str, timeout_s: float = 60.0) -> boxes.ExecResult:
        """Runs a trusted command in the system's shell."""
        return await self.box.exec(
            ["/bin/sh", "-c", command],
            timeout_s=timeout_s,
            environ={"PATH": SYSTEM_PATH},
            cwd="/",
        )

    async def verifier_environ(self) -> dict[str, str]:
        environ = {name: value for name, value in self.environ.items() if name not in RUNS_CODE}
        environ |= {"HOME": HOME, "PYTHONNOUSERSITE": "1"}
        # Empty values override the image's; all of these programs treat empty as unset.
        environ |= dict.fromkeys(RUNS_CODE, "")
        if "PATH" in environ:
            environ["PATH"] = await self.verifier_path(environ["PATH"])
        return environ | self.step.verifier.env

    async def verifier_path(self, path: str) -> str:
        """The image's PATH, with folders that the agent could write moved behind the system's."""
        names = path.split(":")
        safe = [*SYSTEM_PATH.split(":")]
        if self.image is not None:
            safe += [name for name in names if is_below(name, self.image.protected)]
        elif self.programs and self.programs == await self.hash_programs():
            safe += [name for name in names if is_below(name, await self.program_folders())]
        first = [name for name in names if name in safe]
        first += [name for name in SYSTEM_PATH.split(":") if name not in first]
        return ":".join([*first, *(name for name in names if name not in first)])

    async def program_folders(self) -> list[str]:
        """Virtual environments in the PATH of a box on this machine's system."""
        names = self.environ.get("PATH", "").split(":")
        outside = [name for name in names if name.startswith("/") and name not in SYSTEM_PATH]
        outside = [name for name in outside if name != str(Path(sys.executable).parent)]
        parents = [str(PurePosixPath(name).parent) for name in outside]
        return [
            parent
            for parent in parents
            if (await self.box.exec(["test", "-f", f"{parent}/pyvenv.cfg"], cwd="/")).code == 0
        ]

    async def hash_programs(self) -> str:
        """A hash of names, modes, links and contents in program_folders(); "" without any."""
        folders = shlex.join(await self.program_folders())
        if not folders:
            return ""
        command = f"find {folders} -printf '%p %y %m %l\\0' | sort -z | sha256sum && "
        command += f"find {folders} -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum"
        done = await self.run_in_root(command)
        return done.stdout if done.code == 0 else ""

    async def is_full(self) -> bool:
        """True if the box has no room for a file of 1 MiB."""
        file = "/room_for_tests"
        done = await self.run_in_root(
            f"head -c {1 << 20} /dev/zero > {file}; code=$?; rm -f {file}; exit $code"
        )
        return done.code != 0

    async def read_reward(self, done: boxes.ExecResult) -> VerifierScore:
        """Reads reward.json, else reward.txt, as Harbor does. If both exist they must agree: the
        agent's code, which test.sh runs, may have written one."""
        scores = []
        source = f"{self.step.folder}: the output of tests/test.sh in {LOGS}/verifier/"
        for name in ("reward.json", "reward.txt"):
            try:
                data = await self.box.get(f"{LOGS}/verifier/{name}")
            except FileNotFoundError:
                continue
            scores.append(read_score(data, f"{source}{name}"))
        if not scores:
            failed = first_failed_install(self.wrote)
            raise self.failure(
                f"tests/test.sh wrote no {LOGS}/verifier/reward.txt and no reward.json; it "
                f"{ended(done)}{f': {failed}' if failed else ''}"
            )
        if abs(scores[0].reward - scores[-1].reward) > MAX_APART:
            raise RuntimeError(
                f"{source}reward.json is {scores[0].reward:g}, and reward.txt "
                f"{scores[-1].reward:g}; write one of them"
            )
        return scores[0]


def names_in_home(tests: Sequence[Path]) -> list[str]:
    """Names in the home folder that Python files of these folders look up. Excludes names in shell
    scripts, which may create them, such as a virtual environment."""
    by_scripts: set[str] = set()
    by_python: set[str] = set()
    for file in (file for folder in tests for file in folder.rglob("*")):
        if file.suffix in (".py", ".sh") and file.is_file():
            names = IN_HOME.findall(file.read_text(encoding="utf-8", errors="replace"))
            (by_scripts if file.suffix == ".sh" else by_python).update(names)
    return sorted(by_python - by_scripts)


def mounts_below(folders: Sequence[str], mounts: str) -> list[str]:
    """Mount points at these paths and below them. `mounts`: text of /proc/self/mounts."""
    points = [PurePosixPath(line.split()[1]) for line in mounts.splitlines()]
    return [str(point) for point in points if any(map(point.is_relative_to, folders))]


def read_score(data: bytes, source: str) -> VerifierScore:
    """The reward in a verifier's file: a finite number, or an object of finite numbers. In an
    object `reward` is the reward and the rest are metrics; without `reward` all are parts of the
    reward. Raises ValueError for other contents."""
    try:
        text = data.decode()
        value = json.loads(text) if source.endswith(".json") else float(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is {data[:80]!r}, not a number: {error}") from None
    return score_of(finite_parts(value, "reward", source))


def score_of(named: dict[str, float]) -> VerifierScore:
    if "reward" not in named:
        return VerifierScore(parts=named, metrics={})
    rest = {name: value for name, value in named.items() if name != "reward"}
    return VerifierScore(parts={"reward": named["reward"]}, metrics=rest)


def score_of_steps(scores: Sequence[VerifierScore], strategy: str) -> VerifierScore:
    """The last score for "final", the mean of each number for "mean", a missing one as 0."""
    counted = [score.named for score in (scores[-1:] if strategy == "final" else scores)]
    names = dict.fromkeys(name for named in counted for name in named)
    means = {}
    for name in names:
        means[name] = math.fsum(named.get(name, 0.0) for named in counted) / len(counted)
    score = score_of(means or {"reward": 0.0})
    score.metrics |= {score.fault: 1.0 for score in scores if score.fault}
    score.metrics["verifier_s"] = math.fsum(s.metrics.get("verifier_s", 0.0) for s in scores)
    return score


def ended(done: boxes.ExecResult) -> str:
    """The way a script ended, for an error."""
    return "ran out of time" if done.timed_out else f"ended with exit code {done.code}"


@dataclass(kw_only=True, slots=True)
class TaskBoxes:
    """Opens boxes of tasks. If a task's verifier lacks tools, the task's episodes fail before their
    agents start; the verifier is tried again after retry_s seconds."""

    driver: str = ""  # Argument of boxes.open().
    network: bool = False  # True gives agents a network if their task allows one.
    networks: dict[str, bool] = field(default_factory=NETWORKS.copy)
    retry_s: float = 600.0
    without_tools: dict[Path, tuple[float, str]] = field(default_factory=dict)  # (time, error)
    # Folder of a task -> time at which packages of its test.sh could not be fetched.
    not_fetched: dict[Path, float] = field(default_factory=dict)

    @asynccontextmanager
    async def open(
        self, folder: str, *, binds: Mapping[str, str] | None = None
    ) -> AsyncIterator[TaskBox]:
        """Opens the box of a task by its image or Dockerfile. `binds`: argument of boxes.open()."""
        task = read_task(folder)
        noted_at, error = self.without_tools.get(task.folder, (-math.inf, ""))
        if time.monotonic() - noted_at < self.retry_s:
            raise RuntimeError(error)
        driver = driver_of(self.driver)
        check_services(task, driver)
        name, image, root = await self.image_name(task, driver), None, None
        sidecars = await self.build_sidecars(task, driver)
        main = task.composition.main if task.composition else Sidecar(name=MAIN, image="")
        workdir = task.environment.workdir or main.workdir
        if driver in ("", "bubblewrap") and not name and (image := await self.image_of(task)):
            workdir = workdir or image.cwd
            layers, protected = tuple(image.layers), tuple(image.protected)
            root = Root(layers=layers, protected=protected, workdir=workdir)
        try:
            box = await boxes.open(
                {},
                driver=driver,
                image=name,
                limits=task.limits,
                network=self.network and task.allows_network,
                binds=main.binds | dict(binds or {}),
                root=root,
                sidecars=sidecars,
            )
        except RuntimeError as error:
            if not task.environment.docker_image or not task.dockerfile.is_file():
                raise
            raise RuntimeError(
                f"{error}; the task has a Dockerfile too: set HARBOR_DRIVER=bubblewrap, or remove "
                "docker_image from task.toml, to build it"
            ) from error
        async with box:
            environ, entrypoint = main.environ | task.environment.env, []
            is_built = driver not in REMOTE_DRIVERS or task.environment.docker_image
            if name and is_built:
                workdir = workdir or (await box.exec("pwd")).stdout.rstrip("\n")
                entrypoint = await asyncio.to_thread(self.entrypoint, task, box.engine, name)
            elif image is not None:
                environ, entrypoint = image.environ | environ, image.entrypoint
            else:
                run = await carried_out(task, box, name)
                environ, workdir = run.environ | environ, workdir or run.cwd
                entrypoint = self.entrypoint(task)
            opened = TaskBox(
                box=box,
                task=task,
                environ=environ,
                cwd=workdir,
                reopen=functools.partial(self.open, folder),
                note_tools_missing=functools.partial(self.note_tools_missing, task.folder),
                step=task.steps[0],
                image=image,
                entrypoint=entrypoint,
                verify_network=self.networks["verify"] and task.verifiers_have_network,
            )
            if image is None and not name:
                opened.programs = await opened.hash_programs()
            if main.entrypoint is None:
                await opened.enter()
            for check in (task.environment.healthcheck, main.check):
                if not await is_healthy(check, opened.exec):
                    raise RuntimeError(f"{task.folder}: the box's healthcheck failed")
            yield opened

    def note_tools_missing(self, folder: Path, error: str) -> None:
        self.without_tools[folder] = (time.monotonic(), error)

    def entrypoint(self, task: HarborTask, engine: str = "", image: str = "") -> list[str]:
        """The ENTRYPOINT of an engine's image, else of the Dockerfile."""
        if engine:
            return (image_settings(engine, image) or {}).get("Entrypoint") or []
        is_file = task.dockerfile.is_file()
        return entrypoint_of(read_instructions(task.dockerfile)) if is_file else []

    async def image_name(self, task: HarborTask, driver: str) -> str:
        """Name of a task's image; "" for a box of bubblewrap."""
        if driver == "bubblewrap":
            return ""
        if driver in REMOTE_DRIVERS:
            return remote_image(task, driver)
        if task.environment.docker_image or not driver:
            return task.environment.docker_image or ""
        assert task.build is not None
        return await self.build(task, driver, task.build)

    async def build(self, task: HarborTask, engine: str, build: ComposeBuild) -> str:
        limit_s, network = task.environment.build_timeout_sec, self.networks["build"]
        return await asyncio.to_thread(
            build_image, engine, build.context, limit_s, network, build.flags
        )

    async def build_sidecars(self, task: HarborTask, engine: str) -> list[Sidecar]:
        """The services of a task's compose file, with their images."""
        sidecars = []
        for sidecar in task.composition.sidecars if task.composition else ():
            assert task.composition is not None
            build = task.composition.builds.get(sidecar.name)
            image = await self.build(task, engine, build) if build else sidecar.image
            sidecars.append(replace(sidecar, image=image))
        return sidecars

    async def image_of(self, task: HarborTask) -> Image | None:
        """The image of a task for a box of bubblewrap; None for a task that runs on this machine's
        system. Raises TaskRefused for a line that needs a network that its phase lacks."""
        if image_line(task) is None:
            return None
        await asyncio.to_thread(check_networks, task, self.networks)
        image = await asyncio.to_thread(task_image, task, self.networks["build"])
        tried_at = self.not_fetched.get(task.folder, -math.inf)
        if time.monotonic() - tried_at >= self.retry_s:
            try:
                image.layers[:0] = await asyncio.to_thread(fetched_layers, image, task)
            except NotFetched:
                self.not_fetched[task.folder] = time.monotonic()
        return image


def task_image(task: HarborTask, network: bool) -> Image:
    """The unpacked image of a task: the cache's, else one that an engine builds or pulls. Raises
    ValueError without an engine, RuntimeError if that fails."""
    limit_s, build, name = task.environment.build_timeout_sec, task.build, task.image
    if image := unpacked_image(name):
        return image
    engine = find_builder()
    if build:
        build_image(engine, build.context, limit_s, network, build.flags)
    else:
        pull_image(engine, name, limit_s)
    return unpack_image(engine, name, limit_s)


def fetched_layers(image: Image, task: HarborTask) -> list[str]:
    """Layers with the packages that the steps' test.sh fetch. Raises NotFetched."""
    layers = []
    for step in task.steps:
        if network_lines(step.test_script):
            environ = image.environ | task.environment.env | step.verifier.env
            layers.append(fetched_layer(image, step.tests, environ, step.verifier.limit_s))
    return list(dict.fromkeys(layers))


async def carried_out(task: HarborTask, box: Box, image: str = "") -> DockerfileRun:
    """Carries out the task's Dockerfile in a box of this machine's system, or of the `image` of its
    FROM."""
    limit_s = task.environment.build_timeout_sec
    path, cwd = f"{SYSTEM_PATH}:{Path(sys.executable).parent}", "/"
    if image:
        path, cwd = (await box.exec('echo "$PATH"; pwd')).stdout.splitlines()
    run = DockerfileRun(
        box=box, context=task.dockerfile.parent, timeout_s=limit_s, environ={"PATH": path}, cwd=cwd
    )
    for instruction in read_instructions(task.dockerfile):
        await run.carry_out(instruction)
    return run
