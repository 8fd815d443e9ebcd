"""One episode of a served environment: its state, its conversation, and the replies that were given."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

from grpc import StatusCode

from rl_core.data.tasks import check_messages
from rl_core.sampling.env import Env
from rl_core.sampling.hooks import Hook, HookError, add_parts, finite_parts, read_answer, wait_for_all
from rl_core.service import environments_pb2 as pb
from rl_core.service.wire import ServiceError, from_json, to_json, wrong
from rl_core.types import Completion, Message, Task, Trajectory, Turn

# Replies that are kept for requests that come again: a client that interacts has heard all before, but for one in flight.
KEPT, KEPT_SCORES = 2, 64
ENDED = frozenset({pb.COMPLETED, pb.CANCELLED, pb.LIMIT, pb.AGENT_ERROR, pb.ENVIRONMENT_ERROR, pb.EXPIRED})
MAY_SCORE = frozenset({pb.RUNNING, pb.COMPLETED, pb.LIMIT})


class Session:
    def __init__(self, name: str, env: Env, task: Task, actors: list[str], max_turns: int, count: Callable[[], None]):
        """`max_turns` 0: the file's. `count` is called once for each interaction."""
        self.name, self.env, self.task, self.actors, self.count = name, env, task, actors, count
        self.max_turns = max_turns or env.max_turns
        self.messages = list(task.messages)
        self.state: Any = None
        self.status, self.reason = pb.RUNNING, ""
        self.num_turns, self.turn_rewards = 0, {}  # actor -> what interact gave
        self.number, self.is_interacting = 0, False
        self.replies: dict[int, tuple[int, asyncio.Future]] = {}  # number -> (hash of the request, reply or error)

    async def start(self) -> pb.StartReply:
        """Raises ServiceError if the file's start() fails."""
        if "start" in self.env.hooks:
            only = self.actors[0] if len(self.actors) == 1 else ""
            given = {"messages": self.messages, "prompt": self.task.messages, "task": self.task, "actors": None}
            self.state = await self.run(self.env.hooks["start"], given | {"actor": only})
        tools = to_json(self.env.tools, f"{self.env.path}: tools") if self.env.tools else ""
        return pb.StartReply(messages=to_json(self.task.messages, "the task's messages"), tools=tools)

    async def answer(self, request: pb.InteractRequest | pb.ScoreRequest) -> Any:
        """The reply to a numbered request; the same one if it came before. Raises ServiceError; a request that is refused as
        wrong or out of order changes nothing."""
        number = request.number or self.number + 1
        fingerprint = hash((type(request), request.SerializeToString(deterministic=True)))
        if number in self.replies:
            known, future = self.replies[number]
            if known != fingerprint:
                raise ServiceError(StatusCode.ALREADY_EXISTS, f"number {number} was another request of {self.name}")
            result = await asyncio.shield(future)
        else:
            self.check_order(number, isinstance(request, pb.InteractRequest))
            work = self.prepare(request)
            future = asyncio.get_running_loop().create_future()
            self.number, self.replies[number] = number, (fingerprint, future)
            result = await self.settle(work, future)
        if isinstance(result, ServiceError):
            raise result
        return result

    def check_order(self, number: int, is_interact: bool) -> None:
        if number <= self.number:
            message = f"number {number} was answered long ago: session {self.name} is at {self.number}"
        elif number > self.number + 1:
            message = f"number {number} is out of order: session {self.name} expects {self.number + 1}"
        elif self.is_interacting or (is_interact and any(not future.done() for _, future in self.replies.values())):
            message = f"request {self.number} of {self.name} is still answered"
        else:
            return
        raise ServiceError(StatusCode.FAILED_PRECONDITION, message)

    def prepare(self, request: pb.InteractRequest | pb.ScoreRequest) -> Coroutine[Any, Any, Any]:
        """What answers the request, once all that it says has been checked and heard."""
        new, trajectory = self.read_said(request.said)
        if isinstance(request, pb.InteractRequest):
            self.must_be(frozenset({pb.RUNNING}))
            if not new or new[-1]["role"] != "assistant":
                raise wrong("an interaction must end in the assistant's message")
            for number in [*self.replies][:-KEPT]:
                del self.replies[number]
            self.is_interacting = True
            work = self.interact(request.said, trajectory)
        else:
            self.must_be(MAY_SCORE)
            hooks = {hook.name: hook for hook in self.env.rewards if not hook.batched}
            for name in request.hooks:
                if name not in hooks:
                    raise wrong(f"{self.env.name} has no reward {name!r}; it has {', '.join(hooks) or 'none'}")
            if len(self.replies) >= KEPT_SCORES:
                del self.replies[next(iter(self.replies))]
            work = self.score(request, [hooks[name] for name in request.hooks] or [*hooks.values()], trajectory)
        if request.said.HasField("keep"):
            del self.messages[request.said.keep :]
        self.messages += new
        return work

    async def settle(self, work: Coroutine[Any, Any, Any], future: asyncio.Future) -> Any:
        """What it gives or raises, for this request and for those that come again."""
        try:
            result = await work
        except ServiceError as error:
            result = error
        except asyncio.CancelledError:  # the session was closed
            future.cancel()
            raise
        except Exception as error:  # a fault of ours
            result = self.fail(f"{type(error).__name__}: {error}", StatusCode.INTERNAL)
        finally:
            self.is_interacting = False
        if not future.done():
            future.set_result(result)
        return result

    async def interact(self, said: pb.Said, trajectory: Trajectory | None) -> pb.InteractReply:
        self.num_turns += 1
        self.count()
        hook, ends = self.env.hooks.get("interact"), self.env.turns is None
        reply = pb.InteractReply(messages="[]", done=ends)
        if hook:
            answer = await self.run(hook, self.given(said, said.actor, trajectory))
            try:
                messages, reward, reply.done = read_answer(answer, self.env.path, ends)
                reply.messages = to_json(messages, f"{self.env.path}: what interact() returned")
            except (ValueError, ServiceError) as error:
                raise self.fail(str(error)) from None
            if reward is not None:
                reply.reward = reward
                self.turn_rewards[said.actor] = self.turn_rewards.get(said.actor, 0.0) + reward
            if reply.done or self.num_turns < self.max_turns:  # else nobody would answer
                self.messages += messages
        if reply.done:
            self.end(pb.COMPLETED, "it is over")
        elif self.num_turns >= self.max_turns:
            self.end(pb.LIMIT, f"it had its {self.max_turns} turns")
        reply.status = self.status
        return reply

    async def score(self, request: pb.ScoreRequest, hooks: list[Hook], trajectory: Trajectory | None) -> pb.ScoreReply:
        said = request.said
        names = list(dict.fromkeys(request.actors)) or [said.actor]
        scores = {name: pb.ActorScore(actor=name) for name in names}
        for name, score in scores.items():
            if not request.hooks and (name in self.turn_rewards or not self.env.rewards):
                score.parts["interact"] = self.turn_rewards.get(name, 0.0)
        calls = [(hook, name) for hook in hooks for name in (names if hook.is_per_actor else [""])]
        values = await wait_for_all(
            [self.run(hook, self.given(said, name or said.actor, trajectory)) for hook, name in calls]
        )
        for (hook, name), value in zip(calls, values, strict=True):
            try:
                parts = finite_parts(value, hook.name, f"{hook.path}: what {hook.name}() returned")
                for scored in [name] if hook.is_per_actor else names:
                    add_parts(scores[scored].parts, scores[scored].metrics, hook, parts, self.actors)
            except ValueError as error:
                raise self.fail(str(error)) from None
        for score in scores.values():
            score.reward = math.fsum(score.parts.values())
        return pb.ScoreReply(scores=scores.values(), status=self.status)

    def read_said(self, said: pb.Said) -> tuple[list[Message], Trajectory | None]:
        """Raises ServiceError unless it is messages, and follows what was said before."""
        new = from_json(said.messages, list, "said.messages") if said.messages else []
        try:
            new = check_messages(new) if new else []
        except ValueError as error:
            raise wrong(f"said.messages {error}") from None
        if said.HasField("keep") and said.keep > len(self.messages):
            raise wrong(f"said.keep is {said.keep}; the conversation has {len(self.messages)} messages")
        return new, read_trajectory(from_json(said.trajectory, dict, "said.trajectory")) if said.trajectory else None

    def given(self, said: pb.Said, actor: str, trajectory: Trajectory | None) -> dict[str, Any]:
        """What hooks may name."""
        given = {"messages": self.messages, "prompt": self.task.messages, "task": self.task, "actor": actor}
        given |= {"actors": None, "state": self.state, "trajectory": trajectory, "completion": said.completion}
        if not said.HasField("completion") or actor != said.actor:
            given["completion"] = last_text(self.messages, actor)
        if trajectory is None or actor != said.actor:
            given["trajectory"] = Trajectory(
                task_id=self.task.id, env=self.env.name, group_id="", actor=actor, messages=self.messages
            )
        return given

    async def run(self, hook: Hook, given: dict[str, Any]) -> Any:
        """What a hook returns. Raises ServiceError, after which the session is over, if it fails."""
        try:
            return await hook(self.task, given)
        except HookError as error:
            raise self.fail(str(error)) from None
        except TimeoutError as error:
            raise self.fail(too_slow(error).message, StatusCode.DEADLINE_EXCEEDED) from None

    def fail(self, message: str, code: StatusCode = StatusCode.UNKNOWN) -> ServiceError:
        self.end(pb.ENVIRONMENT_ERROR, message)
        return ServiceError(code, message)

    def end(self, status: int, reason: str) -> None:
        if self.status == pb.RUNNING or (status == pb.ENVIRONMENT_ERROR and self.status in MAY_SCORE):
            self.status, self.reason = status, reason

    def must_be(self, wanted: frozenset) -> None:
        if self.status not in wanted:
            raise has_ended(self.name, self.status, self.reason)

    def close(self) -> None:
        """Nothing but memory to give back."""


def has_ended(name: str, status: int, reason: str) -> ServiceError:
    status = pb.Status.Name(status).lower().replace("_", " ")
    return ServiceError(StatusCode.FAILED_PRECONDITION, f"session {name} has ended ({status}): {reason}")


def too_slow(error: TimeoutError) -> ServiceError:
    """A hook's deadline is the service's here."""
    text = str(error).replace("--rollout.hook_timeout_s", "--hook_timeout_s of rl-core serve")
    return ServiceError(StatusCode.DEADLINE_EXCEEDED, text)


def last_text(messages: list[Message], actor: str) -> str:
    """An actor's last reply."""
    for message in reversed(messages):
        if message["role"] == "assistant" and message.get("name", actor) == actor:
            return content if isinstance(content := message.get("content"), str) else ""
    return ""


def read_trajectory(value: Any) -> Trajectory:
    """A trajectory of JSON. Raises ServiceError unless it is one."""
    try:
        turns = [Turn(**turn | {"completion": Completion(**turn["completion"])}) for turn in value.get("turns", [])]
        return Trajectory(**value | {"turns": turns})
    except (TypeError, KeyError, AttributeError) as error:
        raise wrong(f"it is no trajectory: {error}") from None
