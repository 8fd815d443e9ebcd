"""`--env_path grpc://host:port/name`: a served environment as a module with hooks, like any other
environment."""

from __future__ import annotations

import asyncio
import inspect
import os
import secrets
import socket
import sys
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from types import ModuleType
from typing import Any

from rl_core.environments.service import needing_grpc
from rl_core.sampling.actor import EpisodeActors
from rl_core.sampling.env import ARGUMENTS, OF_GROUP, SESSION_CODES, SPOKEN
from rl_core.types import JSONObject, Row, Task, Trajectory

with needing_grpc("--env_path grpc://..."):
    from rl_core.environments.service import environments_pb2 as pb
    from rl_core.environments.service.address import access_to, read_url, seconds
    from rl_core.environments.service.connection import Connection
    from rl_core.environments.service.speakers import ActorRegistry, plain_turn
    from rl_core.environments.service.wire import (
        VERB_OF,
        Numbered,
        ServiceError,
        from_json,
        to_json,
    )

# Timeout of a request. Covers waits for room on a worker and for a worker's thread; hooks have a
# separate deadline.
ANSWER_S = 600.0
# Actors that answer within this time cost one request; slower ones cost two.
SOON_S = 0.05
MAX_TURNS = 2**31 - 1  # No limit for the service: the trainer counts turns.


@dataclass(kw_only=True, eq=False)
class Served:
    """An environment of a service."""

    url: str  # The URL without settings.
    name: str
    connection: Connection
    owner: str = ""  # Owner name that sessions are started with.
    code: str = ""  # Hash of the environment file of the latest session.
    codes: set[str] = field(default_factory=set)  # Hashes of all sessions.

    def hear_code(self, code: str) -> None:
        """Records a worker's hash of the environment file. Warns on stderr once per new hash,
        because rewards may not be comparable. Workers with the old and the new file may coexist."""
        if code and self.code and code not in self.codes:
            print(
                f"warning: {self.url}: the environment file changed during the run: a newly "
                f"started worker loaded another version (env_code {self.code} -> {code} in "
                "rollouts/); rewards of the two versions may not be comparable",
                file=sys.stderr,
                flush=True,
            )
        if code:
            self.code = code
            self.codes.add(code)

    async def ask(self, hook: str, task_id: str, **verb: Any) -> Any:
        """The reply to a request. Raises ServiceError, worded like a failure of a local hook."""
        try:
            return await self.connection.ask(ANSWER_S, **verb)
        except ServiceError as error:
            why = error.message.removeprefix(f"{hook}() failed for task {task_id}: ")
            error.service_message = f"{self.url}: {why}"
            raise

    def ask_now(self, hook: str, **verb: Any) -> Any:
        """Blocking form of ask()."""
        asked = self.ask(hook, "", **verb)
        if os.getpid() != self.connection.pid:
            return asyncio.run(asked)  # Raises ServiceError: gRPC does not work after a fork.
        return asyncio.run_coroutine_threadsafe(asked, self.connection.loop).result()


class RemoteSession:
    """The trainer's side of an episode: the `state` that hooks share."""

    def __init__(self, served: Served, start: pb.StartRequest, actors: EpisodeActors | None = None):
        self.served = served
        self.start = start
        self.speakers = ActorRegistry(actors)
        self.start.cast = self.speakers.described() if actors else ""
        self.name, self.number = "", 0  # Without a name, the next request starts a session.
        self.messages: list[dict] = []  # Messages that the server knows.
        self.lock = asyncio.Lock()
        # Arguments of connection.end() when this object is garbage-collected.
        self.kept = {"session": "", "status": pb.CANCELLED}
        self.end = weakref.finalize(
            self, lambda end, kept: end(**kept), served.connection.end, self.kept
        )

    async def begin(self, hook: str) -> None:
        """Starts the session. Raises ServiceError."""
        served = self.served
        self.start.key = secrets.token_hex(8)
        reply = await served.ask(hook, self.start.task_id, start=self.start)
        served.hear_code(reply.code)
        if reply.code:
            SESSION_CODES.get([]).append(reply.code)
        name = self.kept["session"] = reply.session
        served.connection.hold(name, reply.idle_s)
        reply = await self.result(hook, name, 0, reply)
        # The server keeps the start's messages; said_since() sends the rest again.
        self.messages = from_json(reply.messages, list, "messages")
        self.name = name

    async def ask(self, hook: pb.Hook, make: Callable[[], Numbered]) -> Any:
        """The result of a request that make() creates. Raises ServiceError and ends the session on
        failure."""
        try:
            async with self.lock:
                if not self.name:
                    await self.begin(hook.name)
            # No await between here and the send: requests are sent in the order of their numbers.
            return await self.numbered(hook.name, self.name, make())
        except ServiceError as error:
            self.end()
            error.service_message = error.service_message.replace(
                "the session", f"session {self.name}", 1
            )
            raise

    async def call(self, hook: pb.Hook, arguments: dict[str, object]) -> object:
        """Runs a hook of this session and returns its result."""
        reply = await self.ask(
            hook, lambda: pb.RunRequest(hook=hook.name, said=self.said_since(hook, arguments))
        )
        self.kept["status"] = pb.COMPLETED
        return from_json(reply.value, object, "a value")

    async def numbered(self, hook: str, session: str, request: Numbered) -> Any:
        """Sends a numbered request and returns its result."""
        reply = await self.send(hook, session, request)
        return await self.result(hook, session, request.number, reply)

    async def send(self, hook: str, session: str, request: Numbered) -> Any:
        request.session = session
        request.number = self.number + 1
        self.number = self.number + 1
        return await self.served.ask(hook, self.start.task_id, **{VERB_OF[type(request)]: request})

    async def result(self, hook: str, session: str, call: int, reply: Any) -> Any:
        """The result of a request whose hooks may ask actors. Actors speak here while a request
        waits for the service's next reply."""
        if not reply.HasField("asked"):
            return reply
        running = set()
        listening = None
        speakers = self.speakers

        def answer() -> asyncio.Task:
            done = {task for task in running if task.done()}
            running.difference_update(done)
            request = pb.AnswerRequest(call=call, answers=[task.result() for task in done])
            return asyncio.ensure_future(self.send(hook, session, request))

        try:
            while True:
                for opening in reply.asked.openings:
                    speakers.open(opening)
                running |= {asyncio.ensure_future(speakers.speak(ask)) for ask in reply.asked.asks}
                if listening is None:
                    if running:
                        await asyncio.wait(
                            running, timeout=SOON_S, return_when=asyncio.FIRST_COMPLETED
                        )
                    listening = answer()
                await asyncio.wait({listening, *running}, return_when=asyncio.FIRST_COMPLETED)
                # Once an actor has spoken, a new request takes over the waiting, and the service
                # answers the earlier one.
                older = listening
                listening = None if listening.done() else answer()
                reply = await older
                if (news := reply.WhichOneof("news")) not in (None, "asked"):
                    if listening:
                        await asyncio.wait({listening})
                    return getattr(reply, news)
        except BaseException:
            self.end()  # At once: reference cycles with the actors' tasks delay finalize().
            raise
        finally:
            for task in (*running, *filter(None, [listening])):
                task.cancel()

    def said_since(self, hook: pb.Hook, arguments: dict[str, object]) -> pb.Said:
        """The messages that the server does not know, and the hook's other arguments."""
        messages = arguments["messages"]
        keep = 0
        for known, now in zip(self.messages, messages, strict=False):
            if known != now:
                break
            keep += 1
        self.messages = messages
        news = pb.Said(
            keep=keep, actor=arguments.get("actor") or "", completion=arguments.get("completion")
        )
        news.messages = to_json(messages[keep:], "messages")
        names_trajectory = hook.takes_all or "trajectory" in {*hook.required, *hook.optional}
        if names_trajectory and arguments["trajectory"] is not None:  # None before the first turn.
            news.trajectory = to_json(plain(arguments["trajectory"]), "the trajectory")
        return news


@cache
def connect(
    address: str, token_file: str, ca: str, is_tls: bool, reconnect_s: float | None
) -> Connection:
    """This process's connection to a service."""
    return Connection(address, access_to(token_file, ca, is_tls), reconnect_s)


def parse(url: str) -> Served:
    """The environment that a URL names. Raises ValueError, or OSError for a missing file."""
    parts, settings = read_url(url, "--env_path", "HOST:PORT/NAME")
    plain_url = url.partition("?")[0]
    name = parts.path.strip("/")
    if not name:
        raise ValueError(
            f"{plain_url} must be grpc://HOST:PORT/NAME: add the name of an environment"
        )
    wait = settings.get("reconnect_s")
    reconnect_s = None if wait is None else seconds(wait, f"{plain_url}: reconnect_s")
    files = settings.get("token_file", ""), settings.get("ca", "")
    connection = connect(parts.netloc, *files, parts.scheme == "grpcs", reconnect_s)
    owner = settings.get("owner") or f"{socket.gethostname()}/{os.getpid()}"
    return Served(url=plain_url, name=name, connection=connection, owner=owner)


def load_module(url: str) -> ModuleType:
    """The served environment as a module. Raises ValueError if the service lacks the environment
    or does not answer."""
    try:
        served = parse(url)
        [described] = served.ask_now("", describe=pb.DescribeRequest(env=served.name)).envs
    except ServiceError as error:
        raise ValueError(error.service_message) from None
    except OSError as error:
        raise ValueError(f"{url.partition('?')[0]}: {error}") from None
    module = ModuleType(f"rl_core_env_{served.name}")
    served.hear_code(described.code)
    module.heard_code = lambda: served.code
    module.max_turns = described.max_turns
    hooks = {hook.name: hook for hook in described.hooks}
    if described.tools:
        module.tools = from_json(described.tools, list, "tools")
    if described.turns:
        module.turns = described.turns
    if described.system_prompts:
        module.system_prompts = from_json(described.system_prompts, dict, "system_prompts")
    if described.HasField("truncated_reward"):
        module.truncated_reward = described.truncated_reward
    if "rollout" not in hooks:  # rollout() excludes hooks and settings of turns.
        module.name_prefix = described.name_prefix
        module.start = start_hook(
            served, hooks.get("start"), any(map(asks_actors, described.hooks))
        )
    for hook in described.hooks:
        if hook.name != "start":
            function = make_proxy(served, hook)
            if hook.is_reward:
                function.reward_mark = (hook.weight, hook.batched)
            setattr(module, hook.name, function)
    for value in vars(module).values():
        if callable(value):
            value.__module__ = module.__name__
    return module


def make_proxy(served: Served, hook: pb.Hook) -> Callable:
    """A function that calls a hook on the service."""
    if hook.batched:
        return group_hook(served, hook)
    if hook.is_reward or ARGUMENTS.get(hook.name, frozenset()) >= SPOKEN:
        return session_hook(served, hook)
    if hook.name == "rollout":
        return rollout_hook(served, hook)
    if hook.name == "load_tasks":
        return tasks_hook(served)
    if hook.name == "advantage_fn":
        hook = pb.Hook(name=hook.name, required=["rewards"])
        call = plain_hook(served, hook)
        return lambda rewards: call(rewards=rewards)
    if hook.name in ARGUMENTS:
        return plain_hook(served, hook)
    raise ValueError(
        f"{served.url} has an unknown hook {hook.name}(); install the service's version of rl_core"
    )


def signed(function: Callable, hook: pb.Hook, *more: str) -> Callable:
    """The function with the signature of the served hook, plus parameters `more`. The run checks
    data columns by the signature, as for a file."""
    names = {*hook.required, *more}
    values = dict.fromkeys(names, inspect.Parameter.empty) | dict.fromkeys({*hook.optional} - names)
    parameters = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=values[n])
        for n in sorted(values)
    ]
    if hook.takes_all:
        parameters.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD))
    function.__signature__ = inspect.Signature(parameters)
    function.__name__ = hook.name
    return function


def asks_actors(hook: pb.Hook) -> bool:
    """True if the hook gets actors. turns() gets only their names."""
    return hook.name == "rollout" or (
        "actors" in {*hook.required, *hook.optional} and hook.name != "turns"
    )


def start_request(served: Served, task: Task, **more: object) -> pb.StartRequest:
    request = pb.StartRequest(env=served.name, task_id=task.id, max_turns=MAX_TURNS, **more)
    request.row = to_json(task.row, f"the row of {task.id}")
    request.messages = to_json(task.messages, f"the messages of {task.id}")
    request.info = to_json(task.info, f"the info of {task.id}")
    request.owner = served.owner
    return request


def start_hook(served: Served, hook: pb.Hook | None, asks: bool) -> Callable:
    """Makes start(). `asks`: a hook of the file asks actors."""

    async def start(
        task: Task, actor: str, actors: EpisodeActors | None = None, **_: object
    ) -> RemoteSession:
        session = RemoteSession(
            served, start_request(served, task, actors=[actor] if actor else []), actors
        )
        if hook:
            async with session.lock:
                await session.begin("start")
        return session  # Without start(), the first request starts the session.

    return signed(start, hook or pb.Hook(name="start"), "task", "actor", *["actors"] * asks)


def session_hook(served: Served, hook: pb.Hook) -> Callable:
    async def call(state: RemoteSession, **arguments: object) -> object:
        return await state.call(hook, arguments)

    sent = ("messages", "completion") if hook.is_reward else ("messages", "completion", "actor")
    return signed(call, hook, "state", *sent)


def rollout_hook(served: Served, hook: pb.Hook) -> Callable:
    async def rollout(task: Task, actors: EpisodeActors, **_: object) -> list[Trajectory]:
        session = RemoteSession(served, start_request(served, task), actors)
        reply = await session.ask(hook, lambda: pb.RunRequest(hook=hook.name))
        return session.speakers.trajectories(reply.value)

    return signed(rollout, hook, "task", "actors")


def group_hook(served: Served, hook: pb.Hook) -> Callable:
    async def score(
        task: Task,
        trajectories: list[Trajectory],
        actors: EpisodeActors | None = None,
        **arguments: object,
    ) -> list[float]:
        arguments = {name: value for name, value in arguments.items() if name in OF_GROUP}
        arguments |= {"trajectories": list(map(plain, trajectories)), "task": plain_task(task)}
        of_hook = {"hook": hook.name, "given": to_json(arguments, "the group")}
        if asks_actors(hook):
            session = RemoteSession(served, start_request(served, task, no_start=True), actors)
            reply = await session.ask(hook, lambda: pb.RunRequest(**of_hook))
        else:
            reply = await served.ask(
                hook.name, task.id, call=pb.CallRequest(env=served.name, **of_hook)
            )
        return from_json(reply.value, list, "the rewards of a group")

    return signed(score, hook, "task", "trajectories")


def tasks_hook(served: Served) -> Callable:
    def load_tasks(split: str) -> list[Row]:
        rows: list[Row] = []
        while True:
            request = pb.TasksRequest(env=served.name, split=split, first=len(rows))
            reply = served.ask_now("load_tasks", tasks=request)
            rows += [from_json(row, dict, "a row") for row in reply.rows]
            if not reply.rows or len(rows) >= reply.total:
                return rows

    return load_tasks


def plain_hook(served: Served, hook: pb.Hook) -> Callable:
    """Makes a synchronous function that runs without a session."""

    def call(**arguments: object) -> object:
        if "task" in arguments:
            arguments["task"] = plain_task(arguments["task"])
        if "trajectory" in arguments:
            arguments["trajectory"] = plain(arguments["trajectory"])
        if "trajectories" in arguments:
            arguments["trajectories"] = list(map(plain, arguments["trajectories"]))
        request = pb.CallRequest(
            env=served.name,
            hook=hook.name,
            given=to_json(arguments, f"arguments of {hook.name}()"),
        )
        return from_json(served.ask_now(hook.name, call=request).value, object, "a value")

    return signed(call, hook, *ARGUMENTS.get(hook.name, frozenset()) & {"task"})


def plain(trajectory: Trajectory) -> JSONObject:
    """A trajectory as JSON values, without expert routing."""
    return asdict(replace(trajectory, turns=[])) | {
        "turns": list(map(plain_turn, trajectory.turns))
    }


def plain_task(task: Task) -> JSONObject:
    return {"id": task.id, "row": task.row, "messages": task.messages, "info": task.info}
