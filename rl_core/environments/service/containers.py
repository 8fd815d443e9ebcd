"""One container per session with docker or podman, for environment files with `image = "..."`.
docs/service.md"""

from __future__ import annotations

import ast
import asyncio
import re
import secrets
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtoMessage
from grpc import StatusCode

from rl_core.data.task_rows import shorten
from rl_core.environments.service import environments_pb2 as pb
from rl_core.environments.service.hosted import check_capacity
from rl_core.environments.service.session import Session
from rl_core.environments.service.wire import (
    CODES,
    MAX_MESSAGE,
    VERB_OF,
    Numbered,
    ServiceError,
    wrong,
)
from rl_core.sandbox.engines import (
    ENGINE_S,
    bind_flags,
    find_engine,
    memory_flags,
    remove_line,
    run_line,
)

SETTINGS = ("image", "network", "cpus", "memory", "capacity")
CAPACITY = 16  # Default number of containers, one per session, of one worker.
CONFINED = ["--interactive", "--init", "--read-only", "--env", "HOME=/tmp"]
CONFINED += ["--tmpfs", "/tmp:rw,nosuid,nodev,size=256m"]
OPEN_S = 300.0  # Timeout of a start, which may include a pull of the image.
GRACE_S = 2.0  # Time between closing a container's stdin and its removal by force.


@dataclass(kw_only=True, slots=True)
class Settings:
    image: str
    network: bool = False
    cpus: float = 1.0
    memory: str = "1g"
    capacity: int = CAPACITY


def container_settings(path: str) -> Settings | None:
    """The container settings of a file; None without `image`. The file is parsed, not executed,
    because its imports are in the image. Raises ValueError for settings that are not literals or
    out of range."""
    try:
        tree = ast.parse(Path(path).expanduser().read_bytes(), path)
    except (OSError, SyntaxError):
        return None  # Loading the file reports the error in detail.
    values: dict[str, ast.expr] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for name in [t.id for t in targets if isinstance(t, ast.Name) and t.id in SETTINGS]:
            values[name] = node.value
    if "image" not in values:
        return None
    try:
        values = {name: ast.literal_eval(value) for name, value in values.items()}
    except ValueError:
        raise ValueError(
            f"{path}: {', '.join(values)} must be literals in a file with an image"
        ) from None
    settings = Settings(**values)
    rules = [
        (
            "image",
            isinstance(settings.image, str) and re.fullmatch(r"\w\S*", settings.image),
            "an image's name",
        ),
        ("network", isinstance(settings.network, bool), "True or False"),
        ("cpus", type(settings.cpus) in (int, float) and settings.cpus > 0, "a number above 0"),
        (
            "memory",
            re.fullmatch(r"[1-9]\d*[bkmg]", str(settings.memory)),
            'text such as "512m" or "2g"',
        ),
    ]
    for name, is_good, rule in rules:
        if not is_good:
            raise ValueError(f"{path}: {name} = {shorten(getattr(settings, name))} must be {rule}")
    check_capacity(path, settings.capacity)
    return settings


@dataclass(kw_only=True)
class Runtime:
    program: str  # docker or podman
    worker: str
    closing: set[asyncio.Task] = field(default_factory=set)

    def argv(self, name: str, path: str, settings: Settings, hook_timeout_s: float) -> list[str]:
        """The command that starts a container and connects to its stdin and stdout."""
        file = Path(path).expanduser().resolve()
        flags = [*CONFINED, "--name", name, "--label", f"rl_core.worker={self.worker}"]
        flags += ["--cpus", f"{settings.cpus:g}", *memory_flags(settings.memory)]
        flags += [*bind_flags(file.parent, "/env"), "--entrypoint", "python"]
        inside = ["-m", "rl_core.environments.service.contained", f"/env/{file.name}"]
        inside += ["--hook_timeout_s", f"{hook_timeout_s:g}"]
        line = run_line(self.program, network=settings.network)
        return [*line, *flags, settings.image, *inside]

    def remove_argv(self, names: list[str]) -> list[str]:
        return remove_line(self.program, names)

    async def open(
        self, path: str, settings: Settings, hook_timeout_s: float, died: Callable[[str], None]
    ) -> EnvContainer:
        name = f"rl-core-{self.worker}-{secrets.token_hex(4)}"
        argv = self.argv(name, path, settings, hook_timeout_s)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=pipe,
            stdout=pipe,
            start_new_session=True,  # The server handles Ctrl-C.
            cwd=tempfile.gettempdir(),  # podman writes a file `oom` here on out of memory.
        )
        return EnvContainer(self, name, process, died)

    async def close(self) -> None:
        while self.closing:  # Canceled starts add removal tasks.
            await asyncio.gather(*self.closing, return_exceptions=True)


def find_runtime(worker: str, why: str) -> Runtime:
    """The runtime for docker or podman, whichever works. Raises ValueError if neither does."""
    return Runtime(program=find_engine(why), worker=worker)


class EnvContainer:
    """A container with its connection: sends Requests to it and reads Replies."""

    def __init__(
        self,
        runtime: Runtime,
        name: str,
        process: asyncio.subprocess.Process,
        died: Callable[[str], None],
    ):
        self.runtime = runtime
        self.name = name
        self.process = process
        self.died = died
        self.waiting: dict[int, asyncio.Future] = {}
        self.next_id = 0
        self.end = ""
        self.removal: asyncio.Task | None = None
        self.reader = asyncio.ensure_future(self._read())

    async def ask(self, timeout_s: float, **verb: Any) -> Any:
        """Sends a request and returns its reply. Raises ServiceError."""
        self.next_id += 1
        request = pb.Request(id=self.next_id, **verb)
        future = asyncio.get_running_loop().create_future()
        if self.end:
            raise ServiceError(StatusCode.UNKNOWN, self.end)
        self.waiting[request.id] = future
        try:
            data = request.SerializeToString()
            self.process.stdin.write(len(data).to_bytes(4, "big") + data)
            reply = await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            message = f"container {self.name} did not answer in {timeout_s:g} s"
            raise ServiceError(StatusCode.DEADLINE_EXCEEDED, message) from None
        finally:
            del self.waiting[request.id]
        if reply.code:
            raise ServiceError(CODES.get(reply.code, StatusCode.UNKNOWN), reply.error)
        return getattr(reply, next(iter(verb)))

    async def _read(self) -> None:
        try:
            while True:
                size = int.from_bytes(await self.process.stdout.readexactly(4), "big")
                if size > MAX_MESSAGE:
                    break
                reply = pb.Reply.FromString(await self.process.stdout.readexactly(size))
                future = self.waiting.get(reply.id)
                if future and not future.done():
                    future.set_result(reply)
        except (asyncio.IncompleteReadError, DecodeError):
            pass
        self.close()
        code = await self.process.wait()
        why = ", killed, perhaps out of memory" if code in (137, -9) else ""
        self.end = f"container {self.name} ended (exit code {code}{why})"
        self.died(self.end)
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(ServiceError(StatusCode.UNKNOWN, self.end))

    @property
    def is_over(self) -> bool:
        return self.removal is not None or bool(self.end)

    def close(self) -> None:
        if self.removal is None:
            self.process.stdin.close()
            self.removal = asyncio.ensure_future(self._remove())
            self.runtime.closing.add(self.removal)
            self.removal.add_done_callback(self.runtime.closing.discard)

    async def _remove(self) -> None:
        """Waits for the container to end after its stdin closed. Removes it by force after GRACE_S,
        or if the engine's client was killed."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.process.wait(), GRACE_S)
        if self.process.returncode is None or self.process.returncode < 0:
            argv = self.runtime.remove_argv([self.name])
            null = asyncio.subprocess.DEVNULL
            remover = await asyncio.create_subprocess_exec(*argv, stdout=null, stderr=null)
            with suppress(asyncio.TimeoutError):  # A hanging engine must not block the worker.
                await asyncio.wait_for(remover.wait(), ENGINE_S)
            for process in (remover, self.process):
                if process.returncode is None:
                    process.kill()


class ContainedSession:
    """A session in its own container, with the interface of Session that a worker uses."""

    def __init__(self, name: str, env: ContainedEnv, request: pb.StartRequest):
        self.name = name
        self.env = env
        self.request = request
        self.status = pb.RUNNING
        self.reason = ""
        self.box: EnvContainer | None = None
        # The session's name in the container, and the last answered number.
        self.inner = ""
        self.number = 0
        self.interactions = 0

    async def start(self) -> pb.StartReply:
        """Starts the session. Raises ServiceError if no container starts or the file's start()
        fails."""
        self.box = await self.env.open_box(self.fail)
        request = pb.StartRequest()
        request.CopyFrom(self.request)
        request.key = ""
        self.request = None
        reply = await self.ask(OPEN_S, start=request)
        self.inner = reply.session
        return reply

    async def answer(self, request: Numbered) -> ProtoMessage:
        passed = type(request)()
        passed.CopyFrom(request)
        passed.session = self.inner
        verb = VERB_OF[type(request)]
        reply = result = await self.ask(self.env.patience_s, **{verb: passed})
        number = request.number or self.number + 1
        if number > self.number:  # Lower numbers are retries or concurrent scores.
            self.number = number
            is_score = verb == "score" or getattr(request, "hook", "") in self.env.scores
            is_interaction = verb != "answer" and not is_score
            self.interactions += is_interaction
            self.env.interactions += is_interaction
        if verb == "answer":
            result = getattr(reply, reply.WhichOneof("news") or "asked")
        status = getattr(result, "status", pb.RUNNING)
        if status in (pb.COMPLETED, pb.LIMIT):
            self.end(status, "it is over" if status == pb.COMPLETED else "it used all its turns")
        return reply

    async def ask(self, timeout_s: float, **verb: Any) -> Any:
        try:
            return await self.box.ask(timeout_s, **verb)
        except ServiceError as error:
            if error.code in (
                StatusCode.UNKNOWN,
                StatusCode.DEADLINE_EXCEEDED,
                StatusCode.INTERNAL,
            ):
                self.fail(error.message)
            raise

    def fail(self, reason: str) -> None:
        self.end(pb.ENVIRONMENT_ERROR, reason)

    end = Session.end

    def close(self) -> None:
        if self.box:
            self.box.close()


class ContainedEnv:
    """An environment file whose sessions run in containers. One shared container answers requests
    without a session."""

    def __init__(
        self,
        path: str,
        settings: Settings,
        runtime: Runtime,
        *,
        hook_timeout_s: float,
        idle_s: float,
    ):
        self.name = Path(path).stem
        self.path = path
        self.settings = settings
        self.runtime = runtime
        self.hook_timeout_s = hook_timeout_s
        self.capacity = settings.capacity
        self.idle_s = idle_s
        self.patience_s = hook_timeout_s
        self.described = pb.Environment()
        self.interactions = 0
        self.scores: set[str] = set()  # Names of rewards of one episode.
        self.common: EnvContainer | None = None
        self.lock = asyncio.Lock()

    @classmethod
    async def open(
        cls, path: str, settings: Settings, runtime: Runtime, **limits: float
    ) -> ContainedEnv:
        """Loads a file in its shared container. Raises ValueError if the container does not start
        or the file cannot be served."""
        env = cls(path, settings, runtime, **limits)
        try:
            env.described = (await env.ask(OPEN_S, describe=pb.DescribeRequest())).envs[0]
        except ServiceError as error:
            raise ValueError(f"{path}: {settings.image}: {error}; its output is above") from None
        env.described.idle_s = env.idle_s
        hooks = env.described.hooks
        env.scores = {hook.name for hook in hooks if hook.is_reward and not hook.batched}
        # Longer than the hooks' deadline, which the container enforces.
        env.patience_s = 2 * env.hook_timeout_s + 30.0
        return env

    async def open_box(self, died: Callable[[str], None]) -> EnvContainer:
        return await self.runtime.open(self.path, self.settings, self.hook_timeout_s, died)

    async def ask(self, timeout_s: float, **verb: Any) -> Any:
        """Asks the shared container. If that container ends meanwhile, starts another one and
        retries."""
        for is_last in (False, True):
            async with self.lock:
                if self.common is None or self.common.end:
                    self.common = await self.open_box(lambda why: None)
            box = self.common
            try:
                return await box.ask(timeout_s, **verb)
            except ServiceError:
                if is_last or not box.end or not self.described.name:
                    raise

    async def session(self, name: str, request: pb.StartRequest) -> ContainedSession:
        if not (request.row or request.task_id):
            raise wrong("a start needs a row or a task_id")
        return ContainedSession(name, self, request)

    async def tasks(self, request: pb.TasksRequest) -> pb.TasksReply:
        return await self.ask(OPEN_S, tasks=request)

    async def call(self, request: pb.CallRequest) -> pb.CallReply:
        return await self.ask(self.patience_s, call=request)

    def close(self) -> None:
        if self.common:
            self.common.close()
