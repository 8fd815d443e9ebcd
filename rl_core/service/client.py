"""`--env_path grpc://host:port/name`: a served environment as a module with hooks, so that a run
treats it as any other."""

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

from rl_core.sampling.actor import EpisodeActors
from rl_core.sampling.env import ARGUMENTS, OF_GROUP, SESSION_CODES, SPOKEN
from rl_core.service import needing_grpc
from rl_core.types import Task, Trajectory

with needing_grpc("--env_path grpc://..."):
    from grpc import StatusCode

    from rl_core.service import environments_pb2 as pb
    from rl_core.service.address import access_to, read_url, seconds
    from rl_core.service.connection import Connection
    from rl_core.service.speakers import Speakers, plain_turn
    from rl_core.service.wire import VERB_OF, ServiceError, from_json, to_json

# Until an answer: room for a session, or a thread of the worker for a hook, is waited for. Hooks
# have a deadline of their own.
ANSWER_S = 600.0
SOON_S = 0.05  # an actor that speaks within it costs one request, others two
MAX_REPLAYS = 3  # of one session: an environment that ends its workers shall not end all of them
MAX_TURNS = 2**31 - 1  # of a session: the trainer counts turns itself


@dataclass(kw_only=True, eq=False)
class Served:
    """An environment behind an address."""

    url: str  # without settings
    name: str
    connection: Connection
    is_replaying: bool  # whether a session that is lost is played again
    owner: str = ""  # of its sessions
    code: str = ""  # hash of the file, as the last session began with
    codes: set[str] = field(default_factory=set)  # all that were heard

    def hear_code(self, code: str) -> None:
        """Tells on stderr that a worker loaded another file: rewards may not compare. Told once of
        each file, for workers with the old one and with the new one may serve side by side."""
        if code and self.code and code not in self.codes:
            print(
                f"warning: {self.url}: the environment's file has changed while the run goes on: "
                f"a newly started worker loaded another one (env_code {self.code} -> {code} in "
                "rollouts/), "
                "and rewards of the two may not compare",
                file=sys.stderr,
                flush=True,
            )
        if code:
            self.code = code
            self.codes.add(code)

    async def ask(self, hook: str, task_id: str, **verb: Any) -> Any:
        """The verb's reply. Raises ServiceError, which reads as if the hook had failed here."""
        try:
            return await self.connection.ask(ANSWER_S, **verb)
        except ServiceError as error:
            why = error.message.removeprefix(f"{hook}() failed for task {task_id}: ")
            error.told_by_service = f"{self.url}: {why}"
            raise

    def ask_now(self, hook: str, **verb: Any) -> Any:
        """As ask(), for a thread that may wait."""
        asked = self.ask(hook, "", **verb)
        if os.getpid() != self.connection.pid:
            return asyncio.run(asked)  # says that it was forked; the loop's thread is its parent's
        return asyncio.run_coroutine_threadsafe(asked, self.connection.loop).result()


class Session:
    """The trainer's side of an episode: the `state` that hooks share."""

    def __init__(self, served: Served, start: pb.StartRequest, actors: EpisodeActors | None = None):
        self.served = served
        self.start = start
        self.speakers = Speakers(actors, served.is_replaying)
        self.start.cast = self.speakers.described() if actors else ""
        self.name, self.number = "", 0  # no name: it begins with the next request
        self.messages: list[dict] = []  # that the server has heard
        self.past: list[tuple[pb.RunRequest, str]] = []  # and what it gave, for a replay
        self.num_lost = 0
        self.lock = asyncio.Lock()
        # What the end needs, when this object is gone.
        self.kept = {"session": "", "status": pb.CANCELLED}
        self.end = weakref.finalize(
            self, lambda end, kept: end(**kept), served.connection.end, self.kept
        )

    async def begin(self, hook: str) -> None:
        """A new session, in which all is said again that was said. Raises ServiceError."""
        served = self.served
        task_id = self.start.task_id
        self.start.key = secrets.token_hex(8)
        reply = await served.ask(hook, task_id, start=self.start)
        served.hear_code(reply.code)
        if reply.code:
            SESSION_CODES.get([]).append(reply.code)
        served.connection.end(**self.kept)
        lost = self.kept["session"]
        self.kept["session"] = reply.session
        served.connection.hold(reply.session, reply.idle_s)
        name = reply.session
        self.number = 0
        self.speakers.begin()
        reply = await self.result(hook, name, 0, reply)
        for turn, (past, before) in enumerate(self.past, 1):
            request = pb.RunRequest(hook=past.hook, said=past.said)
            if (await self.numbered(hook, name, request)).value != before:
                message = (
                    f"session {lost} was lost, and its replay differs: turn {turn} was answered "
                    "otherwise"
                )
                error = ServiceError(StatusCode.ABORTED, message)
                error.told_by_service = f"{served.url}: {message}"
                raise error
        # After a replay the rest is sent once more.
        self.messages = from_json(reply.messages, list, "messages")
        self.name = name

    async def ask(self, hook: pb.Hook, make: Callable[[], Any]) -> tuple[Any, Any]:
        """The result of a request that make() gives, and the request. Raises ServiceError, after
        which the session is over."""
        while True:
            asked = ""
            try:
                async with self.lock:
                    if not self.name:
                        await self.begin(hook.name)
                # From here to the sending nothing else runs: requests are sent in the order of
                # their numbers.
                asked = self.name
                request = make()
                result = await self.numbered(hook.name, asked, request)
                if self.num_lost and not hook.is_reward:
                    self.speakers.check_replay()
                return result, request
            except ServiceError as error:
                if not self.may_replay(error, asked):
                    self.end()
                    error.told_by_service = error.told_by_service.replace(
                        "the session", f"session {asked}", 1
                    )
                    raise
                if asked == self.name:
                    self.name = ""
                    self.num_lost = self.num_lost + 1

    async def call(self, hook: pb.Hook, given: dict[str, Any]) -> Any:
        """What a hook of this session returns."""
        reply, request = await self.ask(
            hook, lambda: pb.RunRequest(hook=hook.name, said=self.said(hook, given))
        )
        if self.served.is_replaying and not hook.is_reward:
            self.past.append((request, reply.value))
        self.kept["status"] = pb.COMPLETED
        return from_json(reply.value, object, "a value")

    def may_replay(self, error: BaseException, session: str) -> bool:
        """Whether a new session may take the place of one that is lost; of each loss, the first
        hook that hears it decides."""
        is_lost = isinstance(error, ServiceError) and error.code is StatusCode.DATA_LOSS
        return (
            is_lost
            and self.served.is_replaying
            and (session != self.name or self.num_lost < MAX_REPLAYS)
        )

    async def numbered(self, hook: str, session: str, request: Any) -> Any:
        """The result of a numbered request."""
        reply = await self.send(hook, session, request)
        return await self.result(hook, session, request.number, reply)

    async def send(self, hook: str, session: str, request: Any) -> Any:
        # Another hook's request heard it first: numbers are of the new one.
        if session != self.kept["session"]:
            raise ServiceError(StatusCode.DATA_LOSS, f"session {session} was lost")
        request.session = session
        request.number = self.number + 1
        self.number = self.number + 1
        return await self.served.ask(hook, self.start.task_id, **{VERB_OF[type(request)]: request})

    async def result(self, hook: str, session: str, call: int, reply: Any) -> Any:
        """The result of a request whose hook asks actors. They speak while the service listens to
        it."""
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
                # Once an actor has spoken, a new request listens, and the one before ends.
                older = listening
                listening = None if listening.done() else answer()
                reply = await older
                if (news := reply.WhichOneof("news")) not in (None, "asked"):
                    if listening:
                        await asyncio.wait({listening})
                    return getattr(reply, news)
        except BaseException as error:
            if not self.may_replay(error, session):
                self.end()  # now: the tasks of actors and this frame hold each other
            elif running:  # what they say is told to the session that takes its place
                await asyncio.wait(running)
            raise
        finally:
            for task in (*running, *filter(None, [listening])):
                task.cancel()

    def said(self, hook: pb.Hook, given: dict[str, Any]) -> pb.Said:
        """What the server has not heard."""
        messages = given["messages"]
        keep = 0
        for known, now in zip(self.messages, messages, strict=False):
            if known != now:
                break
            keep += 1
        self.messages = messages
        said = pb.Said(
            keep=keep, actor=given.get("actor") or "", completion=given.get("completion")
        )
        said.messages = to_json(messages[keep:], "messages")
        names_trajectory = hook.takes_all or "trajectory" in {*hook.required, *hook.optional}
        if names_trajectory and given["trajectory"] is not None:  # None before the first turn
            said.trajectory = to_json(plain(given["trajectory"]), "the trajectory")
        return said


@cache
def connect(
    address: str, token_file: str, ca: str, is_tls: bool, reconnect_s: float | None
) -> Connection:
    """The one of this process."""
    return Connection(address, access_to(token_file, ca, is_tls), reconnect_s)


def parse(url: str) -> Served:
    """What a URL names. Raises ValueError, or OSError for a file that is not there."""
    parts, settings = read_url(url, "--env_path", "HOST:PORT/NAME")
    plain_url = url.partition("?")[0]
    name = parts.path.strip("/")
    if not name:
        raise ValueError(
            f"{plain_url} must be grpc://HOST:PORT/NAME: which environment of the service?"
        )
    if (on_lost := settings.get("on_lost", "fail")) not in ("fail", "replay"):
        raise ValueError(f"{plain_url}: on_lost={on_lost} must be fail or replay")
    wait = settings.get("reconnect_s")
    reconnect_s = None if wait is None else seconds(wait, f"{plain_url}: reconnect_s")
    files = settings.get("token_file", ""), settings.get("ca", "")
    connection = connect(parts.netloc, *files, parts.scheme == "grpcs", reconnect_s)
    owner = settings.get("owner") or f"{socket.gethostname()}/{os.getpid()}"
    replays = on_lost == "replay"
    return Served(
        url=plain_url, name=name, connection=connection, is_replaying=replays, owner=owner
    )


def load_module(url: str) -> ModuleType:
    """The served environment as a module. Raises ValueError if it is not there."""
    try:
        served = parse(url)
        [described] = served.ask_now("", describe=pb.DescribeRequest(env=served.name)).envs
    except ServiceError as error:
        raise ValueError(error.told_by_service) from None
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
    if "rollout" not in hooks:  # which nothing stands beside that is for turns
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
    """A function that has the service call this hook."""
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
        f"{served.url} has a hook {hook.name}() that is not known here; take the service's version "
        "of rl_core"
    )


def signed(function: Callable, hook: pb.Hook, *more: str) -> Callable:
    """With the parameters of the served function, so that columns are checked as for a file, and
    some of ours."""
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
    """Whether it gets actors, and not their names alone."""
    return hook.name == "rollout" or (
        "actors" in {*hook.required, *hook.optional} and hook.name != "turns"
    )


def start_request(served: Served, task: Task, **more: Any) -> pb.StartRequest:
    request = pb.StartRequest(env=served.name, task_id=task.id, max_turns=MAX_TURNS, **more)
    request.row = to_json(task.row, f"the row of {task.id}")
    request.messages = to_json(task.messages, f"the messages of {task.id}")
    request.info = to_json(task.info, f"the info of {task.id}")
    request.owner = served.owner
    return request


def start_hook(served: Served, hook: pb.Hook | None, asks: bool) -> Callable:
    """`asks`: a hook of the file asks actors."""

    async def start(
        task: Task, actor: str, actors: EpisodeActors | None = None, **_: Any
    ) -> Session:
        session = Session(
            served, start_request(served, task, actors=[actor] if actor else []), actors
        )
        if hook:
            async with session.lock:
                await session.begin("start")
        return session  # without a start() it takes no room before it must

    return signed(start, hook or pb.Hook(name="start"), "task", "actor", *["actors"] * asks)


def session_hook(served: Served, hook: pb.Hook) -> Callable:
    async def call(state: Session, **given: Any) -> Any:
        return await state.call(hook, given)

    said = ("messages", "completion") if hook.is_reward else ("messages", "completion", "actor")
    return signed(call, hook, "state", *said)


def rollout_hook(served: Served, hook: pb.Hook) -> Callable:
    async def rollout(task: Task, actors: EpisodeActors, **_: Any) -> list[Trajectory]:
        session = Session(served, start_request(served, task), actors)
        reply, _ = await session.ask(hook, lambda: pb.RunRequest(hook=hook.name))
        return session.speakers.trajectories(reply.value)

    return signed(rollout, hook, "task", "actors")


def group_hook(served: Served, hook: pb.Hook) -> Callable:
    async def score(
        task: Task,
        trajectories: list[Trajectory],
        actors: EpisodeActors | None = None,
        **given: Any,
    ) -> list[float]:
        given = {name: value for name, value in given.items() if name in OF_GROUP}
        given |= {"trajectories": list(map(plain, trajectories)), "task": plain_task(task)}
        of_hook = {"hook": hook.name, "given": to_json(given, "the group")}
        if asks_actors(hook):
            session = Session(served, start_request(served, task, no_start=True), actors)
            reply, _ = await session.ask(hook, lambda: pb.RunRequest(**of_hook))
        else:
            reply = await served.ask(
                hook.name, task.id, call=pb.CallRequest(env=served.name, **of_hook)
            )
        return from_json(reply.value, list, "the rewards of a group")

    return signed(score, hook, "task", "trajectories")


def tasks_hook(served: Served) -> Callable:
    def load_tasks(split: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        while True:
            request = pb.TasksRequest(env=served.name, split=split, first=len(rows))
            reply = served.ask_now("load_tasks", tasks=request)
            rows += [from_json(row, dict, "a row") for row in reply.rows]
            if not reply.rows or len(rows) >= reply.total:
                return rows

    return load_tasks


def plain_hook(served: Served, hook: pb.Hook) -> Callable:
    """Of a function that belongs to no session and is not async."""

    def call(**given: Any) -> Any:
        if "task" in given:
            given["task"] = plain_task(given["task"])
        if "trajectory" in given:
            given["trajectory"] = plain(given["trajectory"])
        if "trajectories" in given:
            given["trajectories"] = list(map(plain, given["trajectories"]))
        request = pb.CallRequest(
            env=served.name, hook=hook.name, given=to_json(given, f"what {hook.name}() is given")
        )
        return from_json(served.ask_now(hook.name, call=request).value, object, "a value")

    return signed(call, hook, *ARGUMENTS.get(hook.name, frozenset()) & {"task"})


def plain(trajectory: Trajectory) -> dict[str, Any]:
    """For JSON, without the routes of experts."""
    return asdict(replace(trajectory, turns=[])) | {
        "turns": list(map(plain_turn, trajectory.turns))
    }


def plain_task(task: Task) -> dict[str, Any]:
    return {"id": task.id, "row": task.row, "messages": task.messages, "info": task.info}
