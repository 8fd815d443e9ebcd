"""One episode of a served environment: its state, its conversation, and the replies that were given."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from grpc import StatusCode

from rl_core.data.tasks import check_messages
from rl_core.sampling.env import Env
from rl_core.sampling.hooks import Hook, HookError, finite_parts, read_answer
from rl_core.service import environments_pb2 as pb
from rl_core.service.wire import ServiceError, from_json, to_json, wrong
from rl_core.types import Completion, Task, Trajectory, Turn

KEPT = 64  # replies that a session remembers, for requests that come again
ENDED = frozenset({pb.COMPLETED, pb.CANCELLED, pb.LIMIT, pb.AGENT_ERROR, pb.ENVIRONMENT_ERROR, pb.EXPIRED})
MAY_SCORE = frozenset({pb.RUNNING, pb.COMPLETED, pb.LIMIT})


class Session:
    def __init__(self, name: str, env: Env, task: Task, actors: list[str]):
        self.name, self.env, self.task, self.actors = name, env, task, actors
        self.messages = list(task.messages)
        self.state: Any = None
        self.status, self.reason = pb.RUNNING, ""
        self.used_s = time.monotonic()
        self.num_turns, self.turn_rewards = 0, {}  # actor -> what interact gave
        self.number, self.is_interacting = 0, False
        self.replies: OrderedDict[int, tuple[bytes, asyncio.Future]] = OrderedDict()

    async def start(self) -> None:
        """Raises ServiceError if the file's start() fails."""
        if "start" in self.env.hooks:
            given = {"messages": self.messages, "prompt": self.task.messages, "task": self.task, "actors": None}
            self.state = await self.run(
                self.env.hooks["start"], given | {"actor": self.actors[0] if self.actors else ""}
            )

    async def once(self, request: Any, answer: Callable[[], Awaitable[Any]]) -> Any:
        """The reply to a numbered request; its own if the same came before. Raises ServiceError for one out of order."""
        self.used_s = time.monotonic()
        number, digest = (
            request.number or self.number + 1,
            hashlib.sha1(request.SerializeToString(deterministic=True)).digest(),
        )
        if number in self.replies:
            known, future = self.replies[number]
            if known != digest:
                raise ServiceError(StatusCode.ALREADY_EXISTS, f"number {number} was another request of {self.name}")
            return await asyncio.shield(future)
        if number != self.number + 1:
            message = f"number {number} is out of order: session {self.name} expects {self.number + 1}"
            raise ServiceError(StatusCode.FAILED_PRECONDITION, message)
        if self.is_interacting or (isinstance(request, pb.InteractRequest) and self.is_busy):
            raise ServiceError(
                StatusCode.FAILED_PRECONDITION, f"request {self.number} of {self.name} is still answered"
            )
        self.number, future = number, asyncio.ensure_future(answer())
        self.replies[number] = digest, future
        while len(self.replies) > KEPT:
            self.replies.popitem(last=False)
        # A client that goes away does not end what was begun: it may come again and ask for the reply.
        return await asyncio.shield(future)

    @property
    def is_busy(self) -> bool:
        return any(not future.done() for _, future in self.replies.values())

    async def interact(self, request: pb.InteractRequest) -> pb.InteractReply:
        self.must_be(frozenset({pb.RUNNING}))
        self.is_interacting = True
        try:
            said = self.hear(request.said)
            if not said or said[-1]["role"] != "assistant":
                raise wrong("an interaction must end in the assistant's message")
            self.num_turns += 1
            hook, reply = self.env.hooks.get("interact"), pb.InteractReply(messages="[]", done=True)
            if hook:
                ends = self.env.turns is None
                try:
                    answer = read_answer(await self.run(hook, self.given(request.said)), self.env.path, ends)
                except ValueError as error:
                    raise self.fail(str(error)) from None
                messages, reward, reply.done = answer
                reply.messages = to_json(messages, f"{self.env.path}: what interact() returned")
                self.messages += messages
                if reward is not None:
                    reply.reward = reward
                    actor = request.said.actor
                    self.turn_rewards[actor] = self.turn_rewards.get(actor, 0.0) + reward
            if reply.done:
                self.end(pb.COMPLETED, "it is over")
            elif self.num_turns >= self.env.max_turns:
                self.end(pb.LIMIT, f"it had its {self.env.max_turns} turns")
            reply.status = self.status
            return reply
        finally:
            self.is_interacting = False

    async def score(self, request: pb.ScoreRequest) -> pb.ScoreReply:
        self.must_be(MAY_SCORE)
        self.hear(request.said)
        hooks = {hook.name: hook for hook in self.env.rewards if not hook.batched}
        for name in request.hooks:
            if name not in hooks:
                raise wrong(f"{self.env.name} has no reward {name!r}; it has {', '.join(hooks) or 'none'}")
        called = [hooks[name] for name in request.hooks] or list(hooks.values())
        actors = list(request.actors) or [request.said.actor]
        scores = {name: pb.ActorScore(actor=name) for name in actors}
        if not request.hooks:
            for name, score in scores.items():
                if name in self.turn_rewards or not hooks:
                    score.parts["interact"] = self.turn_rewards.get(name, 0.0)
        for hook in called:
            values: dict[str, Any] = {}
            for name, score in scores.items():
                if name not in values and (hook.is_per_actor or not values):
                    given = self.given(request.said) | {"actor": name}
                    what = f"{self.env.path}: what {hook.name}() returned"
                    try:
                        values[name] = finite_parts(await self.run(hook, given), hook.name, what)
                    except ValueError as error:
                        raise self.fail(str(error)) from None
                parts = values.get(name) or next(iter(values.values()))
                for part, value in parts.items():
                    if hook.weight:
                        score.parts[part] = hook.weight * value
                    else:
                        score.metrics[part] = value
        for score in scores.values():
            score.reward = math.fsum(score.parts.values())
        return pb.ScoreReply(scores=scores.values(), status=self.status)

    def hear(self, said: pb.Said) -> list[dict]:
        """Appends what was said to the conversation. Raises ServiceError unless it is messages."""
        new = from_json(said.messages, list, "said.messages") if said.messages else []
        try:
            new = check_messages(new) if new else []
        except ValueError as error:
            raise wrong(f"said.messages {error}") from None
        if said.HasField("keep"):
            if said.keep > len(self.messages):
                raise wrong(f"said.keep is {said.keep}; the conversation has {len(self.messages)} messages")
            del self.messages[said.keep :]
        self.messages += new
        return new

    def given(self, said: pb.Said) -> dict[str, Any]:
        """What hooks may name."""
        last = self.messages[-1].get("content") if self.messages else ""
        given = {"messages": self.messages, "prompt": self.task.messages, "task": self.task, "actor": said.actor}
        given |= {"actors": None, "state": self.state}
        given["completion"] = said.completion if said.HasField("completion") else last
        given["trajectory"] = trajectory_of(said.trajectory) if said.trajectory else None
        return given

    async def run(self, hook: Hook, given: dict[str, Any]) -> Any:
        """What a hook returns. Raises ServiceError, after which the session is over, if it fails."""
        try:
            return await hook(self.task, given)
        except HookError as error:
            raise self.fail(str(error)) from None
        except TimeoutError as error:
            raise self.fail(str(error), StatusCode.DEADLINE_EXCEEDED) from None

    def fail(self, message: str, code: StatusCode = StatusCode.UNKNOWN) -> ServiceError:
        self.end(pb.ENVIRONMENT_ERROR, message)
        return ServiceError(code, message)

    def end(self, status: int, reason: str) -> None:
        if self.status == pb.RUNNING or status == pb.ENVIRONMENT_ERROR:
            self.status, self.reason = status, reason

    def must_be(self, wanted: frozenset) -> None:
        if self.status not in wanted:
            status = pb.Status.Name(self.status).lower().replace("_", " ")
            raise ServiceError(
                StatusCode.FAILED_PRECONDITION, f"session {self.name} has ended ({status}): {self.reason}"
            )


def trajectory_of(text: str) -> Trajectory:
    """A trajectory that came as JSON. Raises ServiceError unless it is one."""
    try:
        value = from_json(text, dict, "said.trajectory")
        turns = [Turn(**turn | {"completion": Completion(**turn["completion"])}) for turn in value.pop("turns", [])]
        return Trajectory(**value, turns=turns)
    except (TypeError, KeyError) as error:
        raise wrong(f"said.trajectory is no trajectory: {error}") from None
