"""Sandbox: runs and tests code that a model wrote. docs/sandbox.md lists the guarantees."""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_core.sandbox import run_flags
from rl_core.sandbox.isolation import CONTAINERS, LEVELS, REMOTE
from rl_core.sandbox.job import COMPILE_MIB, COMPILE_S, LANGUAGES, Job, Limits
from rl_core.sandbox.judging import Result, is_pair, judge_calls, judge_runs, not_compiled
from rl_core.sandbox.pool import MAX_WAIT, Outcome, Pool, WorkerLostError, run_process
from rl_core.sandbox.runner import NO_COMPILER
from rl_core.sandbox.values import encode

run_flags.is_imported = True

CHECKER_S = 5.0  # Time of the tests in addition to the program's.
# One kill of the warm process can cost three tries: the running one, a queued one, the next launch.
TRIES = 5


@dataclass(slots=True)
class Sandbox:
    """Runs programs, `workers` of them at a time; others wait. One warm process per Sandbox is
    started with the first program and ends with this process. `level`: one of LEVELS instead of the
    strongest that works here, docker or podman, or a remote driver: then programs run in its boxes,
    which --sandbox.box_driver makes the default."""

    workers: int = 0  # 0: this rank's share of the cores.
    limits: Limits = field(default_factory=Limits)
    level: str = ""
    image: str = ""  # With Python 3.10 or later, for containers and remote boxes.
    flags: Sequence[str] = ()  # Flags for `docker run`.
    _pool: Pool = field(init=False, repr=False)
    _slots: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        levels = (*LEVELS, *CONTAINERS, *REMOTE)
        if self.level and self.level not in levels:
            raise ValueError(f"level={self.level!r} is not one of {', '.join(levels)}")
        if (self.level in CONTAINERS and not self.image) or (self.level in LEVELS and self.image):
            raise ValueError(
                f"image={self.image!r} is for remote boxes, and for level=docker and podman, where "
                "they need one"
            )
        self._pool = Pool([self.level] if self.level else list(LEVELS), self.image, self.flags)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self.workers = self.workers or max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        self._slots = weakref.WeakKeyDictionary()  # Event loop -> its semaphore.

    @property
    def has_seccomp(self) -> bool:
        """True if system calls of programs are filtered; known after start(). Needs pyseccomp in a
        folder that the level shows."""
        return self._pool.has_seccomp

    def start(self) -> str:
        """Starts the warm process and returns the level of isolation. Raises RuntimeError if no
        level works here."""
        return self._pool.start()

    def check(self) -> None:
        """Raises RuntimeError or OSError, with the fix, if programs cannot run."""
        if driver := self.driver:
            from rl_core.sandbox.remote_programs import check

            check(driver)
        else:
            self.start()

    def close(self) -> None:
        """Ends the warm process. Running programs continue to their end or deadline; cancel run()
        to end one."""
        self._pool.close()

    async def run(
        self,
        code: str,
        *,
        stdin: str = "",
        tests: Sequence[str | dict[str, Any] | tuple[str, str]] = (),
        setup: str = "",
        timeout_s: float = 5.0,
        language: str = "python",
    ) -> Result:
        """Runs a program, or tests it.

        `tests` of Python functions: strings of statements, such as "assert f(2) == 4", which pass
        if they raise nothing; or {"call": "f(2)", "expected": 4}, which passes if the value is the
        same in type and value at every depth. Names that tests do not define are the program's.
        `setup`: trusted Python that defines names for the tests. The program is then a module, not
        __main__.

        `tests` of whole programs, in any language: pairs (stdin, stdout). Each pair is a
        separate run, and passes if the run ends with status 0 and prints stdout; spaces at ends of
        lines and empty lines at the end do not count.

        `timeout_s`: deadline of one run, or of all calls together, in wall-clock seconds without
        those in which no core was free; also, rounded up, the limit in CPU seconds.

        Raises ValueError for a wrong argument, RuntimeError if the machine has no isolation or the
        kernel ends a supervisor.
        """
        if language not in LANGUAGES:
            raise ValueError(f"language={language!r} is not one of {', '.join(LANGUAGES)}")
        if not (0 < timeout_s < 86400):
            raise ValueError(f"timeout_s={timeout_s} must be above 0, and below a day")
        calls = all(
            isinstance(test, str)
            or (isinstance(test, dict) and test.keys() == {"call", "expected"})
            for test in tests
        )
        if not (calls and language == "python") and not all(is_pair(test) for test in tests):
            raise ValueError(
                "tests are all pairs (stdin, stdout) of texts; or, for Python, strings such as "
                '"assert f(2) == 4" and '
                '{"call": "f(2)", "expected": 4}'
            )
        job = Job(code=code, language=language, timeout_s=timeout_s, setup=setup)
        if tests and calls:
            job.calls = [
                t if isinstance(t, str) else t | {"expected": encode(t["expected"])} for t in tests
            ]
        else:
            job.inputs = [test[0] for test in tests] if tests else [stdin]
        outcomes = await self._play(job)
        if job.calls:
            return judge_calls(*outcomes, tests, math.ceil(timeout_s))
        if len(outcomes) > len(job.inputs):
            return not_compiled(outcomes[-1], len(tests))
        return judge_runs(outcomes, tests, math.ceil(timeout_s))

    async def _play(self, job: Job) -> list[Outcome]:
        if driver := self.driver:
            from rl_core.sandbox.remote_programs import play

            return await play(driver, self.image, self.limits, job)
        return await self.play_here(job)

    @property
    def driver(self) -> str:
        """The remote driver of boxes for the programs; "" for this machine."""
        from rl_core.sandbox.box_remote import REMOTE_DRIVERS, SERVICES

        driver = self.level or SERVICES.settings.box_driver
        return driver if driver in REMOTE_DRIVERS else ""

    async def play_here(self, job: Job) -> list[Outcome]:
        """Outcomes of the program and of the tests' process, or of each run. If the program does
        not compile, the compiler's outcome, once more than there are runs."""
        if job.calls:
            return await self._call(job)
        binary = None
        if build := LANGUAGES[job.language][1]:
            limit_s = max(job.timeout_s, COMPILE_S)
            parts = frames(job.language, job.code, "compile")
            done = await self._process("compile", parts, limit_s, COMPILE_MIB)
            if done.exit == NO_COMPILER:
                raise RuntimeError(f"language={job.language!r} needs {build[0]}; install it")
            if done.exit != 0 or len(done.back) < 4:
                return [done] * (len(job.inputs) + 1)
            binary = done.back
        return await asyncio.gather(*(self._program(job, binary, text) for text in job.inputs))

    async def _program(self, job: Job, binary: bytes | None, stdin: str) -> Outcome:
        runs_command = LANGUAGES[job.language][2]
        parts = frames(job.language, job.code, "execute" if runs_command else "program")
        if runs_command:
            parts.append(binary or bytes(4))
        return await self._process(
            "program", [*parts, stdin.encode(errors="surrogatepass")], job.timeout_s
        )

    async def _call(self, job: Job) -> list[Outcome]:
        """Runs two processes: the program's, and the tests' with the expected values. They exchange
        plain values."""
        async with self._slot():
            for attempt in range(TRIES):
                ours, theirs = socket.socketpair()
                ended = asyncio.Event()
                try:
                    program = asyncio.ensure_future(
                        self._try(
                            "program",
                            frame({"do": "call", "code": job.code}),
                            job.timeout_s,
                            rpc=ours,
                            stop=ended,
                        )
                    )
                    await asyncio.sleep(0)
                    spec = frame({"tests": job.calls, "setup": job.setup})
                    try:
                        checked = await self._try("check", spec, job.timeout_s, rpc=theirs)
                    except BaseException:
                        program.cancel()
                        raise
                    ended.set()
                    return [await program, checked]
                except WorkerLostError:
                    if attempt == TRIES - 1:
                        raise
                finally:
                    ours.close()
                    theirs.close()
        raise AssertionError

    def _slot(self) -> asyncio.Semaphore:
        return self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.workers))

    async def _process(
        self, role: str, parts: list[bytes], timeout_s: float, memory_mib: int = 0
    ) -> Outcome:
        async with self._slot():
            for attempt in range(TRIES):
                try:
                    return await self._try(role, parts, timeout_s, memory_mib)
                except WorkerLostError:
                    if attempt == TRIES - 1:
                        raise
        raise AssertionError

    async def _try(
        self, role: str, parts: list[bytes], timeout_s: float, memory_mib: int = 0, **more: Any
    ) -> Outcome:
        if self._pool.control is None or self._pool.pid != os.getpid():
            await asyncio.to_thread(self._pool.start)
        limits = {name: getattr(self.limits, name) for name in Limits.__slots__} | {
            "cpu_s": math.ceil(timeout_s)
        }
        limits["memory_mib"] = max(memory_mib, limits["memory_mib"])
        header = {"role": role, "limits": limits, "timeout_s": timeout_s, "max_wait": MAX_WAIT}
        if role == "check":  # The tests wait for the program, which may take longer.
            header["timeout_s"] = (MAX_WAIT + 1) * timeout_s + CHECKER_S
        return await run_process(self._pool, header, parts, **more)


def frame(value: Any) -> list[bytes]:
    data = json.dumps(value).encode()
    return [len(data).to_bytes(4, "big") + data]


def frames(language: str, code: str, do: str) -> list[bytes]:
    """The first frame that a program's process reads."""
    file, build, run = LANGUAGES[language]
    return frame(
        {
            "do": do,
            "code": code,
            "files": {file: code} if build or run else {},
            "argv": build if do == "compile" else run,
        }
    )
