"""Boxes in a cluster or at a sandbox service, which need no privilege on this machine.
docs/remote_boxes.md

A driver speaks the language of one service (remote_driver.py). Shell commands, deadlines, bounded
output, folders, retries, the number of boxes and their end are common, and here.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures.thread  # Registers its end before SERVICES.close.
import os
import random
import secrets
import shlex
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from rl_core.errors import keep_ends
from rl_core.sandbox import run_flags, tunnel
from rl_core.sandbox.box_containers import (
    ENTER,
    KILL_MARKED,
    MARK,
    NO_FILE,
    NOT_REGULAR,
    UNPACK,
    packed,
    shell_argv,
)
from rl_core.sandbox.box_settings import (
    MAX_FILE_BYTES,
    BoxEnded,
    BoxSettings,
    ExecResult,
    make_upload,
)
from rl_core.sandbox.output import Output
from rl_core.sandbox.remote_driver import (
    BoxRequest,
    EndUnknown,
    Fault,
    RemoteDriver,
    RemoteError,
    RemoteSandbox,
    RemoteSettings,
)

T = TypeVar("T")

OPEN_S = 300.0  # An image may have to be pulled.
CREATE_S = 1200.0  # A service may have to build a template of the image.
TRANSFER_S = 120.0
CHECK_S = 10.0
KILLED = 137  # Exit status after SIGKILL.
NO_RUN = "none"  # The name of no run.
CLOSE_S = 15.0  # Time to end all boxes when the process ends.
OPEN_TUNNEL_S, TUNNEL_PAUSE_S = 60.0, 0.5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
NOT_STARTED = (429, 503)  # Statuses of commands that the service did not start.
MAX_ARGV_BYTES = 2500  # Longer commands become files, as some services send them in a URL.
# Arguments: a new name, the working folder, variables, and the command. It ends with the command,
# and holds no stream open then, though background processes still write: services end a
# command with its streams. Output that is in the pipes is awaited for 2 seconds.
START = """
t=/tmp/.rl_core_$1; mkfifo "$t.o" "$t.e" || exit 125
exec 4>&2 2>/dev/null
pump() { exec 3<&0; cat <&3 & c=$!; trap "kill $c" USR1; wait $c; exec cat <&3 >&2 4>&2; }
pump <"$t.o" & p=$!
pump <"$t.e" >&4 & q=$!
( rm -f "$t.o" "$t.e"; [ -z "$2" ] || cd "$2" || exit 126; shift 2; exec env "$@"
) >"$t.o" 2>"$t.e" 4>&-
code=$?
trap "kill -USR1 $p $q; exit $code" ALRM
( sleep 2 & s=$!; trap 'kill $s; exit' TERM; wait $s && kill -ALRM $$ ) >&2 4>&2 & w=$!
wait $p; wait $q; kill $w; exit $code
"""
MOVE = ENTER + 'mkdir -p "$(dirname "$1")" && rm -f "$1" && mv "$3" "$1" && chmod "$2" "$1"'
COPY = ENTER + (
    f'[ -e "$1" ] || exit {NO_FILE}; [ -f "$1" ] || exit {NOT_REGULAR}; head -c "$2" "$1" > "$3"'
)
LIST_PIDS = "cd /proc && echo [0-9]*"
# Ends all but the box's first processes, since the service's own may run next to the agent's, and
# the parents of this command, of which one may report its end.
KILL_OTHERS = (
    'p=$$; kept=" $1 "; while [ "$p" -gt 0 ]; do kept="$kept$p "; parent=0; '
    'while read -r name value; do [ "$name" != PPid: ] || parent=$value; done '
    '<"/proc/$p/status"; p=$parent; done; '
    "for _ in 1 2 3; do for p in /proc/[0-9]*; do p=${p#/proc/}; "
    'case "$kept" in *" $p "*) ;; *) kill -9 "$p" 2>/dev/null;; esac; done; done; true'
)


def load_kubernetes() -> type[RemoteDriver]:
    from rl_core.sandbox.box_kubernetes import Driver

    return Driver


def load_e2b() -> type[RemoteDriver]:
    from rl_core.sandbox.box_e2b import E2BDriver

    return E2BDriver


def load_daytona() -> type[RemoteDriver]:
    from rl_core.sandbox.box_daytona import DaytonaDriver

    return DaytonaDriver


def load_modal() -> type[RemoteDriver]:
    from rl_core.sandbox.box_modal import ModalDriver

    return ModalDriver


# A driver is imported when it is used. Its extra in setup.py has the same name.
REMOTE_DRIVERS: dict[str, Callable[[], type[RemoteDriver]]] = {
    "kubernetes": load_kubernetes,
    "e2b": load_e2b,
    "daytona": load_daytona,
    "modal": load_modal,
}


def make_driver(name: str, settings: RemoteSettings) -> RemoteDriver:
    """Raises RuntimeError if its extra or its key is missing."""
    try:
        driver = REMOTE_DRIVERS[name]()
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"box driver {name} needs the package {error.name}: pip install 'rl_core[{name}]'"
        ) from error
    return driver(settings)


class BoxService:
    """A driver and its boxes of this process. Its calls run in one event loop of a thread: boxes
    outlive the event loops that open them, and a busy loop must not hold up a tunnel."""

    def __init__(self, name: str, settings: RemoteSettings, may_reap: bool):
        self.name = name
        self.settings = settings
        self.may_reap = may_reap
        if not settings.max_boxes:
            raise RuntimeError(
                f"box driver {name}: --sandbox.max_boxes is less than the number of ranks that "
                "sample, or of workers, and each needs a box; raise it to that number or more"
            )
        self.driver = make_driver(name, settings)
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self.slots = asyncio.Semaphore(settings.max_boxes)
        # ProgramBoxes of remote_programs.py, which imports this file. Their slots are of `slots`.
        self.programs: Any = None
        self.sandboxes: dict[str, tuple[RemoteSandbox, asyncio.Semaphore]] = {}
        self.reaped: asyncio.Future[None] | None = None
        self.renewing: asyncio.Task[Any] | None = None
        self.tasks: set[asyncio.Future[Any]] = set()  # Kept from the garbage collector.
        threading.Thread(target=self.loop.run_forever, name=f"{name} boxes", daemon=True).start()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` in the service's event loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task that may outlive the call that starts it."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def clean(self, text: str) -> str:
        """The text without keys, in one line."""
        for secret in filter(None, self.driver.secrets):
            text = text.replace(secret, "***")
        return keep_ends(" ".join(text.split()), 1000)

    async def attempt(
        self,
        action: str,
        request: Callable[[], Awaitable[T]],
        *,
        retry_s: float = TRANSFER_S,
        is_repeatable: bool = True,
    ) -> T:
        """Calls the service, again for `retry_s` while it is overloaded or out of reach. Raises
        RemoteError."""
        started_s, pause_s = time.monotonic(), FIRST_PAUSE_S
        while True:
            try:
                return await request()
            except RemoteError:
                raise
            except EndUnknown as error:
                fault = Fault(message=str(error))
            except self.driver.errors as error:
                fault = self.driver.fault(error)
            is_safe = is_repeatable or fault.status in NOT_STARTED or not fault.was_sent
            wait_s = max(fault.retry_after_s, pause_s * random.uniform(0.5, 1.5))
            left_s = started_s + retry_s - time.monotonic()
            if not (fault.is_transient and is_safe) or wait_s > left_s:
                status = f"{fault.status}: " if fault.status else ""
                text = self.clean(f"{status}{fault.message}")
                raise RemoteError(f"{self.name}: {action}: {text}") from None
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def open(self, settings: BoxSettings, slots: asyncio.Semaphore) -> RemoteSandbox:
        """A running sandbox. Waits for a slot. Raises RemoteError."""
        request = BoxRequest(
            name=f"rl-core-box-{secrets.token_hex(6)}",
            image=settings.image,
            limits=settings.limits,
            network=settings.network,
            run=self.run_name,
            idle_s=self.settings.idle_s,
            lifetime_s=self.settings.lifetime_s,
            sidecars=settings.sidecars,
        )
        if slots is self.slots and self.programs and self.settings.max_boxes == 1:
            text = "--sandbox.max_boxes leaves this rank one box, and programs of rewards have it"
            raise RemoteError(f"{self.name}: {text}; give at least 2 per rank")
        await slots.acquire()
        try:
            await self.reap()
            sandbox = await asyncio.wait_for(self.create(request), CREATE_S)
        except TimeoutError:
            slots.release()
            image = request.image or "the default image"
            text = (
                f"no box of {image} within {CREATE_S:.0f} s: the service still pulls or builds it"
            )
            raise RemoteError(f"{self.name}: {text}, or does not answer") from None
        except BaseException:
            slots.release()
            raise
        self.sandboxes[sandbox.id] = sandbox, slots
        try:
            starting = self.attempt("starting a box", sandbox.wait, retry_s=OPEN_S)
            await asyncio.wait_for(starting, OPEN_S)
        except BaseException as error:
            reason = ""
            if isinstance(error, TimeoutError):
                with suppress(RemoteError):
                    reason = await self.attempt("its state", sandbox.end_reason, retry_s=0.0)
            self.start(self.kill(sandbox))
            if isinstance(error, TimeoutError):
                text = f"box {sandbox.id} did not start within {OPEN_S:.0f} s"
                raise RemoteError(f"{self.name}: {text}: {self.clean(reason)}") from None
            raise
        return sandbox

    async def create(self, request: BoxRequest) -> RemoteSandbox:
        """A new sandbox. If this is cancelled, the sandbox is killed when it comes."""
        creating = asyncio.ensure_future(
            self.attempt("creating a box", lambda: self.driver.create(request), retry_s=OPEN_S)
        )
        try:
            return await asyncio.shield(creating)
        except asyncio.CancelledError:
            self.start(self.kill_late(creating))
            raise

    async def kill_late(self, creating: asyncio.Future[RemoteSandbox]) -> None:
        with suppress(RemoteError):
            sandbox = await creating
            await self.attempt("ending a box", sandbox.kill)

    async def reap(self) -> None:
        """Before the first box: removes those of an earlier process of this run, and begins to
        renew the open ones."""
        if self.reaped is None or (self.reaped.done() and self.reaped.exception()):
            self.reaped = asyncio.ensure_future(self.begin())
        await asyncio.shield(self.reaped)

    async def begin(self) -> None:
        if self.renewing is None:
            self.renewing = self.start(self.renew_all())
        if self.may_reap and (name := self.run_name):
            reaping = self.attempt("removing old boxes", lambda: self.driver.reap(name))
            try:
                await asyncio.wait_for(reaping, TRANSFER_S)
            except TimeoutError:
                text = f"old boxes of this run were not removed within {TRANSFER_S:.0f} s"
                raise RemoteError(f"{self.name}: {text}") from None

    @cached_property
    def run_name(self) -> str:
        """A label for boxes of this rank of the run; "" without a run. It is equal when the run is
        resumed, and never that of another run."""
        file = Path(self.settings.run_file)
        if not self.settings.run_file or not file.parent.is_dir():
            return ""
        if not file.exists():
            # Ranks on other hosts may have the same process id.
            draft = file.with_suffix(f".{secrets.token_hex(4)}")
            draft.write_text(secrets.token_hex(8))
            try:
                os.link(draft, file)
            except FileExistsError:  # Another rank was faster.
                pass
            except OSError:  # The file system has no links.
                draft.replace(file)
            draft.unlink(missing_ok=True)
        return f"{file.read_text()}-{self.settings.rank}"

    async def renew_all(self) -> None:
        while True:
            await asyncio.sleep(self.settings.idle_s / 3)
            for sandbox, _ in [*self.sandboxes.values()]:
                self.start(self.renew(sandbox))

    async def renew(self, sandbox: RemoteSandbox) -> None:
        with suppress(RemoteError, TimeoutError):  # The next command says that it ended.
            retry_s = self.settings.idle_s / 3
            await asyncio.wait_for(
                self.attempt("renewing", sandbox.renew, retry_s=retry_s), retry_s
            )

    async def kill(self, sandbox: RemoteSandbox) -> None:
        _, slots = self.sandboxes.pop(sandbox.id, (None, None))
        if slots is None:
            return
        try:
            await asyncio.wait_for(self.attempt("ending a box", sandbox.kill), TRANSFER_S)
        except (TimeoutError, RemoteError) as error:
            print(
                f"warning: box {sandbox.id} could not be ended ({error}); it ends by itself in "
                f"{self.settings.idle_s:.0f} to {self.settings.lifetime_s:.0f} s",
                file=sys.stderr,
                flush=True,
            )
        finally:
            slots.release()

    def abandon(self, sandbox: RemoteSandbox) -> None:
        """Kills the sandbox of a box that was not closed. A fork of the owner kills nothing."""
        if os.getpid() == self.pid and self.loop.is_running():
            asyncio.run_coroutine_threadsafe(self.kill(sandbox), self.loop)

    def close(self) -> None:
        """Kills all boxes."""
        ending = asyncio.run_coroutine_threadsafe(self.end(), self.loop)
        with suppress(concurrent.futures.TimeoutError):
            ending.result(CLOSE_S)
        self.loop.call_soon_threadsafe(self.loop.stop)

    def check(self, has_agent: bool) -> None:
        """Raises RemoteError if the service does not answer, refuses this user, or cannot run
        agents that a box would hold."""
        if has_agent:
            self.check_stdin()
        asking = self.attempt("a request", lambda: self.driver.reap(NO_RUN), retry_s=CHECK_S)
        asking = asyncio.wait_for(asking, TRANSFER_S)
        try:
            asyncio.run_coroutine_threadsafe(asking, self.loop).result()
        except TimeoutError:
            text = f"{self.name}: the service did not answer within {TRANSFER_S:.0f} s"
            raise RemoteError(text) from None

    def check_stdin(self) -> None:
        if not self.driver.has_stdin:
            raise RemoteError(
                f"box driver {self.name} cannot run agents in boxes: it gives no way from the box "
                "to the run's endpoint; take another driver"
            )

    async def end(self) -> None:
        if self.renewing is not None:
            self.renewing.cancel()
        killing = [self.kill(sandbox) for sandbox, _ in [*self.sandboxes.values()]]
        await asyncio.gather(*killing, return_exceptions=True)
        await self.driver.close()


@dataclass(kw_only=True)
class BoxServices:
    """BoxServices of this process, by name."""

    settings: RemoteSettings = field(default_factory=RemoteSettings)
    pid: int = 0  # The process that called configure(). Its forks must not remove its boxes.
    lock: threading.Lock = field(default_factory=threading.Lock)
    by_key: dict[tuple[int, str, RemoteSettings], BoxService] = field(default_factory=dict)

    def configure(self, settings: RemoteSettings) -> None:
        self.settings, self.pid = settings, os.getpid()

    def get(self, name: str) -> BoxService:
        key = (os.getpid(), name, self.settings)
        with self.lock:
            if key not in self.by_key:
                may_reap = self.pid == os.getpid()
                self.by_key[key] = BoxService(name, self.settings, may_reap)
            return self.by_key[key]

    def close(self) -> None:
        """Kills all remote boxes of this process, but none of its parent's."""
        with self.lock:
            services = [service for key, service in self.by_key.items() if key[0] == os.getpid()]
            self.by_key.clear()
        for service in services:
            service.close()


SERVICES = BoxServices(settings=RemoteSettings(**run_flags.flags), pid=run_flags.process)
run_flags.at_end.append(SERVICES.close)
# Connections need threads of concurrent.futures, which ends before functions of atexit are called,
# but after functions that are registered here later than its own.
getattr(threading, "_register_atexit", atexit.register)(SERVICES.close)


class RemoteBox:
    """One box. It is never emptied for another."""

    can_be_reset = False

    def __init__(self, service: BoxService, settings: BoxSettings, sandbox: RemoteSandbox):
        self.service = service
        self.settings = settings
        self.sandbox = sandbox
        self.first_pids = ""
        self.tunnels: list[BoxTunnel] = []
        self.is_closed = False
        self.finalizer = weakref.finalize(self, service.abandon, sandbox)
        self.finalizer.atexit = False

    @classmethod
    async def open(cls, settings: BoxSettings) -> RemoteBox:
        """Raises RemoteError if the service makes no such box, RuntimeError without the extra or a
        key."""
        service = SERVICES.get(settings.driver)
        return await cls.open_at(service, settings, service.slots)

    @classmethod
    async def open_at(
        cls, service: BoxService, settings: BoxSettings, slots: asyncio.Semaphore
    ) -> RemoteBox:
        box = cls(service, settings, await service.run(service.open(settings, slots)))
        try:
            await service.run(box.prepare(settings))
        except BaseException:
            await box.close()
            raise
        return box

    async def prepare(self, settings: BoxSettings) -> None:
        if self.service.driver.shares_processes:
            _, pids, _ = await self.ask([LIST_PIDS, "sh"])
            self.first_pids = " ".join(pids.decode().split())
        for inside, path in settings.binds:
            await self.upload(inside, Path(path))
            for name in await asyncio.to_thread(sockets_below, Path(path)):
                await self.open_tunnel(f"{inside}/{name}", f"{path}/{name}")

    async def open_tunnel(self, inside: str, socket: str) -> None:
        """Makes a socket of this machine reachable in the box."""
        self.service.check_stdin()
        program = await self.upload_file(await asyncio.to_thread(Path(tunnel.__file__).read_bytes))
        self.tunnels.append(BoxTunnel(self, program, inside, socket))

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float = 60.0,
        stdin: str = "",
        environ: dict[str, str] | None = None,
        cwd: str = "",
    ) -> ExecResult:
        """The command's result. At its deadline, or when this is cancelled, its processes are
        killed, but for those that hide: end_processes() ends these too."""
        mark = f"{MARK}={secrets.token_hex(8)}"
        shown = [mark, *(f"{name}={value}" for name, value in (environ or {}).items())]
        run = ["/bin/sh", "-c", START, "sh", secrets.token_hex(8), cwd, *shown]
        argv = [*run, "/bin/sh", "-c", *shell_argv(command)]
        data = stdin.encode(errors="surrogateescape")
        return await self.service.run(self.run_command(argv, mark, data, timeout_s))

    async def run_command(
        self, argv: list[str], mark: str, stdin: bytes, timeout_s: float
    ) -> ExecResult:
        stdout, stderr = Output(), Output()
        timed_out = False
        for each in self.tunnels:
            await each.start()
        try:
            code = await asyncio.wait_for(
                self.start_command(argv, stdin, stdout, stderr, timeout_s), timeout_s
            )
        except TimeoutError:
            timed_out, code = True, KILLED
        except BaseException:
            # The connection was cut, or the call was cancelled.
            self.service.start(self.kill_quietly(mark))
            raise
        if timed_out:
            await self.kill_marked(mark)
        return ExecResult(
            code=code, stdout=stdout.text(), stderr=stderr.text(), timed_out=timed_out
        )

    async def start_command(
        self, argv: list[str], stdin: bytes, stdout: Output, stderr: Output, timeout_s: float
    ) -> int:
        """Long commands, and a stdin, are files."""
        if stdin:
            file = await self.upload_file(stdin)
            argv = ["/bin/sh", "-c", f'exec <{file}; rm -f {file}; exec "$@"', "sh", *argv]
        if sum(map(len, argv)) > MAX_ARGV_BYTES:
            file = await self.upload_file(f"rm -f $0; exec {shlex.join(argv)}".encode())
            argv = ["/bin/sh", file]
        return await self.call_exec(argv, stdout, stderr, timeout_s)

    async def call_exec(
        self, argv: list[str], stdout: Output, stderr: Output, timeout_s: float
    ) -> int:
        """Exit status of a command, which is not started twice. Raises BoxEnded, RemoteError."""
        if self.is_closed:
            raise BoxEnded(f"the box {self.sandbox.id} is closed")
        outputs = {1: stdout, 2: stderr}
        try:
            code = await self.service.attempt(
                "running a command",
                lambda: self.sandbox.exec(
                    argv, lambda stream, data: outputs[stream].add(data), timeout_s=timeout_s
                ),
                is_repeatable=False,
            )
        except RemoteError as error:
            await self.check_running(error)
            raise
        if code == KILLED:  # Perhaps with all others of the box.
            await self.check_running()
        return code

    async def check_running(self, error: RemoteError | None = None) -> None:
        """Raises BoxEnded with the service's reason if the box has ended."""
        if self.is_closed:
            raise BoxEnded(f"the box {self.sandbox.id} is closed") from None
        with suppress(RemoteError, TimeoutError):
            reason = await asyncio.wait_for(
                self.service.attempt("its state", self.sandbox.end_reason, retry_s=10.0), 30.0
            )
            if reason:
                text = self.service.clean(reason)
                raise BoxEnded(f"the box {self.sandbox.id} has ended: {text}") from error

    async def ask(self, argv: list[str]) -> tuple[int, bytes, str]:
        """(exit status, stdout, stderr) of `sh -c argv[0]`, by our own commands."""
        stdout, stderr = Output(), Output()
        calling = self.call_exec(["/bin/sh", "-c", *argv], stdout, stderr, TRANSFER_S)
        try:
            code = await asyncio.wait_for(calling, TRANSFER_S)
        except TimeoutError:
            text = f"box {self.sandbox.id} did not answer within {TRANSFER_S:.0f} s"
            raise RemoteError(f"{self.service.name}: {text}") from None
        return code, stdout.data(), stderr.text().strip()

    async def kill_marked(self, mark: str) -> None:
        await self.ask([KILL_MARKED, "sh", mark])

    async def kill_quietly(self, mark: str) -> None:
        with suppress(RemoteError, BoxEnded):
            await self.kill_marked(mark)

    async def upload_file(self, data: bytes) -> str:
        """Path of a new file in the box's /tmp."""
        path = f"/tmp/.rl_core_{secrets.token_hex(8)}"
        await self.transfer(lambda: self.sandbox.upload(path, data))
        return path

    async def transfer(self, request: Callable[[], Awaitable[T]]) -> T:
        if self.is_closed:
            raise BoxEnded(f"the box {self.sandbox.id} is closed")
        try:
            return await asyncio.wait_for(
                self.service.attempt("moving a file", request), 2 * TRANSFER_S
            )
        except TimeoutError:
            text = f"box {self.sandbox.id}: moving a file took over {2 * TRANSFER_S:.0f} s"
            raise RemoteError(f"{self.service.name}: {text}") from None
        except RemoteError as error:
            await self.check_running(error)
            raise

    async def put(self, path: str, data: bytes | str | Path) -> None:
        """Writes a file, or a folder of the host with all below it. Raises OSError."""
        await self.service.run(self.upload(path, data))

    async def upload(self, path: str, data: bytes | str | Path) -> None:
        upload = await asyncio.to_thread(make_upload, "", data)
        if upload.folders:
            file = await self.upload_file(await asyncio.to_thread(packed, upload))
            script = f"{{ {UNPACK}; }} <{file}; code=$?; rm -f {file}; exit $code"
            code, _, complaint = await self.ask([script, "sh", path])
        else:
            [(_, mode, content)] = upload.files
            file = await self.upload_file(content)
            code, _, complaint = await self.ask([MOVE, "sh", path, f"{mode:o}", file])
        if code:
            raise OSError(f"{path}: {complaint}")

    async def get(self, path: str) -> bytes:
        """A file's content, at most 64 MiB. Raises FileNotFoundError, OSError."""
        return await self.service.run(self.download(path))

    async def download(self, path: str) -> bytes:
        copy = f"/tmp/.rl_core_{secrets.token_hex(8)}"
        code, _, complaint = await self.ask([COPY, "sh", path, str(MAX_FILE_BYTES + 1), copy])
        if code == NO_FILE:
            raise FileNotFoundError(path)
        if code == NOT_REGULAR:
            raise OSError(f"{path} is not a file")
        if code:
            raise OSError(f"{path}: {complaint}")
        data = await self.transfer(lambda: self.sandbox.download(copy))
        await self.ask([f"rm -f {copy}", "sh"])
        if len(data) > MAX_FILE_BYTES:
            raise OSError(f"{path}: over 64 MiB")
        return data

    async def end_processes(self) -> None:
        """Kills everything that runs in the box, except the service's processes."""
        script = [KILL_OTHERS, "sh", self.first_pids] if self.first_pids else ["kill -9 -1", "sh"]
        await self.service.run(self.kill_all(script))

    async def kill_all(self, script: list[str]) -> None:
        for each in self.tunnels:
            await each.stop()
        await self.ask(script)

    async def close(self) -> None:
        """Removes the box. Idempotent."""
        if not self.is_closed:
            self.is_closed = True
            self.finalizer.detach()
            await self.service.run(self.end())

    async def end(self) -> None:
        for each in self.tunnels:
            await each.stop()
        await self.service.kill(self.sandbox)


class BoxTunnel:
    """The way from a box to a Unix socket of this machine: connections to a socket inside are
    carried over the streams of a command. It is started before a command, again if its connection
    is cut, and stopped when the box's processes end."""

    def __init__(self, box: RemoteBox, program: str, inside: str, socket: str):
        self.box = box
        self.argv = ["/bin/sh", "-c", 'exec python3 "$@"', "sh", program, inside]
        self.socket = socket
        self.error = ""
        self.ready = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when clients in the box can connect. Raises RemoteError."""
        if self.task is None or self.task.done():
            self.task = self.box.service.start(self.keep())
        listening = asyncio.ensure_future(self.ready.wait())
        await asyncio.wait(
            {self.task, listening}, timeout=OPEN_TUNNEL_S, return_when=asyncio.FIRST_COMPLETED
        )
        listening.cancel()
        if not self.ready.is_set():
            raise RemoteError(
                f"{self.box.service.name}: box {self.box.sandbox.id} has no way to the run's "
                f"endpoint, which needs python3 in the image: {self.error or 'no answer'}"
            )

    async def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait({self.task})
            self.ready.clear()

    async def keep(self) -> None:
        """Runs the other end, anew when its connection is cut. Returns if it never listens."""
        while True:
            try:
                await self.run_once()
            except (RemoteError, ValueError) as error:
                self.error = str(error)
            if not self.ready.is_set():
                return
            self.ready.clear()
            await asyncio.sleep(TUNNEL_PAUSE_S)

    async def run_once(self) -> None:
        """Runs the other end until its connection is cut. Raises RemoteError, ValueError."""
        lines = asyncio.StreamReader(limit=tunnel.MAX_LINE_BYTES)
        complaint = Output(2000)
        to_send: asyncio.Queue[bytes] = asyncio.Queue(64)
        outputs = {1: lines.feed_data, 2: complaint.add}
        multiplexer = tunnel.Multiplexer(to_send.put, self.connect, self.ready)

        async def outgoing() -> AsyncIterator[bytes]:
            while True:
                yield await to_send.get()

        async def run_command() -> int:
            return await self.box.sandbox.exec(
                self.argv,
                lambda stream, data: outputs[stream](data),
                timeout_s=self.box.service.settings.lifetime_s,
                stdin=outgoing(),
            )

        calling = asyncio.ensure_future(
            self.box.service.attempt("the way to the endpoint", run_command, is_repeatable=False)
        )
        calling.add_done_callback(lambda _: lines.feed_eof())
        try:
            await multiplexer.run(lines)
        finally:
            calling.cancel()
            await asyncio.wait({calling})
            self.error = self.box.service.clean(complaint.text())
        if not calling.cancelled():
            calling.result()

    def connect(self) -> Coroutine[Any, Any, tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        return asyncio.open_unix_connection(self.socket)


def sockets_below(folder: Path) -> list[str]:
    """Paths of Unix sockets, relative to the folder."""
    return [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_socket()]
