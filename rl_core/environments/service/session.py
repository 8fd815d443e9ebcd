"""One episode of a served environment: its state, its conversation, and recent replies."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from google.protobuf.message import Message as ProtoMessage
from grpc import StatusCode

from rl_core.data.canonical_messages import canonical_messages
from rl_core.data.image_columns import with_images
from rl_core.data.image_parts import loaded_messages
from rl_core.environments.service import environments_pb2 as pb
from rl_core.environments.service.actors import (
    CALL,
    HookCall,
    PendingCalls,
    Work,
    read_images,
    read_turn,
)
from rl_core.environments.service.wire import (
    REPLIES,
    VERB_OF,
    Numbered,
    ServiceError,
    from_json,
    to_json,
    wrong,
)
from rl_core.sampling.deadlines import wait_for_all
from rl_core.sampling.env import OF_GROUP, SPOKEN, Env
from rl_core.sampling.episode import read_answer
from rl_core.sampling.hooks import Hook, HookError
from rl_core.sampling.own_rollout import checked
from rl_core.sampling.reward_parts import add_parts, refuse_unscored, reward_values
from rl_core.types import JSONObject, Message, Task, Trajectory

# Replies kept for resent requests. Interactions are sequential, so a client may miss only the reply
# in flight.
KEPT = 2
KEPT_SCORES = 64
ENDED = frozenset(
    {pb.COMPLETED, pb.CANCELLED, pb.LIMIT, pb.AGENT_ERROR, pb.ENVIRONMENT_ERROR, pb.EXPIRED}
)
MAY_SCORE = frozenset({pb.RUNNING, pb.COMPLETED, pb.LIMIT})
# Type of a call's next reply -> its field in AnswerReply.
NEWS = {pb.Asked: "asked"} | {REPLIES[verb]: verb for verb in ("start", "interact", "score", "run")}


class Session:
    def __init__(
        self, name: str, env: Env, task: Task, request: pb.StartRequest, count: Callable[[], None]
    ):
        """`count` is called once per interaction. Raises ServiceError if hooks ask actors and the
        request has no cast."""
        self.name = name
        self.env = env
        self.task = task
        self.count = count
        self.actors = list(request.actors)
        self.max_turns = request.max_turns or env.max_turns
        # Name -> reward hook of one episode.
        self.scores = {hook.name: hook for hook in env.rewards if not hook.batched}
        self.pending_calls = PendingCalls(request.cast) if request.cast else None
        self.cast = self.pending_calls and self.pending_calls.cast
        self.calls: dict[int, HookCall] = {}  # Request number -> its running hooks.
        asking = [hook.name for hook in env.hooks.values() if asks_actors(hook)]
        if asking and not self.pending_calls:
            cast = '"cast": [{"name": "judge"}]; the client then answers for them'
            raise wrong(f"{asking[0]}() of {env.name} names actors: a start needs {cast}")
        self.has_start = "start" in env.hooks and not request.no_start
        self.messages = list(task.messages)
        self.state: object = None
        self.status = pb.RUNNING
        self.reason = ""
        self.num_turns, self.turn_rewards = 0, {}  # Actor -> sum of its rewards of interact().
        self.number = 0
        self.interactions = 0
        self.is_interacting = False
        # Request number -> (hash of the request, future of its reply or error).
        self.replies: dict[int, tuple[int, asyncio.Future]] = {}

    async def start(self) -> pb.StartReply:
        """Starts the episode. Raises ServiceError if the file's start() fails."""
        return await self.begin(0, self.alone(self.make_state()), "start")

    async def make_state(self) -> pb.StartReply:
        if self.has_start:
            only = self.actors[0] if len(self.actors) == 1 else ""
            arguments = {
                "messages": self.messages,
                "prompt": self.task.messages,
                "task": self.task,
                "actors": self.cast,
            }
            self.state = await self.run(self.env.hooks["start"], arguments | {"actor": only})
        tools = self.env.turn_loop.tools_of(self.task) or ""
        tools = tools and to_json(tools, f"{self.env.path}: tools")
        messages = to_json(self.task.messages, "the task's messages")
        return pb.StartReply(messages=messages, tools=tools, code=self.env.code())

    def alone(self, work: Work) -> Work:
        """Wraps work that excludes all other requests of the session."""
        self.forget(KEPT)
        self.calls.clear()
        self.is_interacting = True

        async def run() -> ProtoMessage:
            try:
                return await work
            finally:
                self.is_interacting = False

        return run()

    async def begin(self, number: int, work: Work, verb: str) -> ProtoMessage:
        """Runs work. Returns its result, or a reply with the asks of its hooks."""
        if self.pending_calls is None:
            return await work
        for known in [n for n, call in self.calls.items() if call.task.done()][:-KEPT_SCORES]:
            del self.calls[known]
        call = self.calls[number] = HookCall(work, self.pending_calls)
        news = await call.news()
        return news if isinstance(news, REPLIES[verb]) else REPLIES[verb](asked=news or pb.Asked())

    async def go_on(self, call: HookCall) -> pb.AnswerReply:
        news = await call.news()
        return pb.AnswerReply(**{} if news is None else {NEWS[type(news)]: news})

    async def answer(self, request: Numbered) -> ProtoMessage:
        """Returns the reply to a numbered request; a resent request gets the same reply. Raises
        ServiceError; a malformed or out-of-order request has no effect."""
        number = request.number or self.number + 1
        fingerprint = hash((type(request), request.SerializeToString(deterministic=True)))
        if number in self.replies:
            known, future = self.replies[number]
            if known != fingerprint:
                raise ServiceError(
                    StatusCode.ALREADY_EXISTS,
                    f"number {number} was another request of {self.name}",
                )
            result = await asyncio.shield(future)
        else:
            self.check_order(number, request)
            if isinstance(request, pb.AnswerRequest):
                work = self.hear(request)
            else:
                work = self.begin(number, self.prepare(request), VERB_OF[type(request)])
            future = asyncio.get_running_loop().create_future()
            self.number = number
            self.replies[number] = (fingerprint, future)
            result = await self.settle(work, future)
        if isinstance(result, ServiceError):
            raise result
        return result

    def check_order(self, number: int, request: Numbered) -> None:
        answering = [future for _, future in self.replies.values()]
        answering += [call.task for call in self.calls.values()]
        is_busy = self.is_interacting
        if not self.is_score(request):
            is_busy = is_busy or not all(future.done() for future in answering)
        if number <= self.number:
            message = (
                f"number {number} was answered long ago: session {self.name} is at {self.number}"
            )
        elif number > self.number + 1:
            message = (
                f"number {number} is out of order: session {self.name} expects {self.number + 1}"
            )
        elif is_busy and not isinstance(request, pb.AnswerRequest):
            message = f"request {self.number} of {self.name} is still being answered"
        else:
            return
        raise ServiceError(StatusCode.FAILED_PRECONDITION, message)

    def is_score(self, request: Numbered) -> bool:
        """True if the request only scores. Scores may run concurrently."""
        if isinstance(request, pb.RunRequest):
            return request.hook in self.scores
        return isinstance(request, pb.ScoreRequest)

    def hear(self, request: pb.AnswerRequest) -> Work:
        """Delivers answers of actors. Returns work that gives the call's next reply."""
        if request.call not in self.calls:
            raise ServiceError(
                StatusCode.FAILED_PRECONDITION,
                f"request {request.call} of {self.name} does not wait for answers",
            )
        self.pending_calls.hear(request.answers)
        self.forget(KEPT if len(self.calls) == 1 else KEPT_SCORES)
        return self.go_on(self.calls[request.call])

    def forget(self, num_kept: int) -> None:
        for number in [*self.replies][:-num_kept]:
            del self.replies[number]

    def prepare(self, request: pb.InteractRequest | pb.ScoreRequest | pb.RunRequest) -> Work:
        """Checks a request and applies its messages. Returns the work that answers the request."""
        is_score = self.is_score(request)
        self.must_be(MAY_SCORE if is_score else frozenset({pb.RUNNING}))
        hooks = self.hooks_of(request)
        if isinstance(request, pb.RunRequest) and is_whole(hooks[0]):
            return self.alone(self.play(hooks[0], self.read_arguments(request)))
        new, trajectory = self.read_said(request.said)
        if isinstance(request, pb.RunRequest):
            work = self.call(hooks[0], request.said, trajectory)
        elif is_score:
            work = self.score(request, hooks, trajectory)
        else:
            if not new or new[-1]["role"] != "assistant":
                raise wrong("an interaction must end with an assistant message")
            work = self.interact(request.said, trajectory)
        if is_score:
            self.forget(KEPT_SCORES - 1)
        else:
            work = self.alone(work)
        if request.said.HasField("keep"):
            del self.messages[request.said.keep :]
        self.messages += new
        return work

    def hooks_of(self, request: Numbered) -> list[Hook]:
        """The hooks that a request names. Raises ServiceError."""
        if isinstance(request, pb.InteractRequest):
            return []
        if isinstance(request, pb.RunRequest):
            hook = self.env.hooks.get(request.hook)
            if hook is None or not (is_whole(hook) or hook.ours >= SPOKEN):
                raise wrong(f"{self.env.name} has no {request.hook[:80]!r} of a session")
            return [hook]
        for name in request.hooks:
            if name not in self.scores:
                known = ", ".join(self.scores) or "none"
                raise wrong(f"{self.env.name} has no reward {name!r}; it has {known}")
        return [self.scores[name] for name in request.hooks or self.scores]

    async def settle(self, work: Work, future: asyncio.Future) -> ProtoMessage | ServiceError:
        """Runs work and keeps its result or error for resent requests."""
        try:
            result = await work
        except ServiceError as error:
            result = error
        except asyncio.CancelledError:  # The session was closed.
            future.cancel()
            raise
        except Exception as error:  # A bug in rl_core.
            result = self.fail(f"{type(error).__name__}: {error}", StatusCode.INTERNAL)
        if not future.done():
            future.set_result(result)
        return result

    def read_arguments(self, request: pb.RunRequest) -> dict[str, object]:
        """Arguments of rollout() or of a group's reward. Raises ServiceError."""
        arguments = from_json(request.given or "{}", dict, "given")
        if not isinstance(trajectories := arguments.get("trajectories", []), list):
            raise wrong("given: trajectories must be a list")
        ours = {"task": self.task, "prompt": self.task.messages, "actors": self.cast}
        ours["trajectories"] = [read_trajectory(t) for t in trajectories]
        return dict.fromkeys(OF_GROUP) | arguments | ours

    async def call(self, hook: Hook, news: pb.Said, trajectory: Trajectory | None) -> pb.RunReply:
        """Runs a hook and returns its result."""
        if hook.name not in self.scores:
            self.count_interaction()
        arguments = self.arguments(hook, news, news.actor, trajectory)
        if hook.name == "state_key":  # Both are None before the actor's first turn.
            spoken = news.completion if news.HasField("completion") else None
            arguments |= {"completion": spoken, "trajectory": trajectory}
        value = await self.run(hook, arguments)
        label = f"{self.env.path}: what {hook.name}() returned"
        try:
            text = to_json(sent_answer(value) if hook.name == "interact" else value, label)
        except ServiceError as error:
            raise self.fail(str(error)) from None
        except ValueError as error:
            raise self.fail(f"{label} {error}") from None
        return pb.RunReply(value=text, status=self.status)

    async def play(self, hook: Hook, arguments: dict[str, object]) -> pb.RunReply:
        self.count_interaction()
        value = await self.run(hook, arguments)
        label = f"{self.env.path}: what {hook.name}() returned"
        try:
            if hook.name == "rollout":
                value = [
                    self.pending_calls.packed(t) for t in checked(value, self.env.path, self.cast)
                ]
            value = to_json(value, label)
        except (ValueError, ServiceError) as error:
            raise self.fail(str(error)) from None
        self.end(pb.COMPLETED, "it is over")
        return pb.RunReply(value=value, status=self.status)

    async def interact(self, news: pb.Said, trajectory: Trajectory | None) -> pb.InteractReply:
        self.num_turns += 1
        self.count_interaction()
        hook = self.env.hooks.get("interact")
        ends = self.env.turn_loop.turns is None
        reply = pb.InteractReply(messages="[]", done=ends)
        if hook:
            arguments = self.arguments(hook, news, news.actor, trajectory)
            answer = await self.run(hook, arguments)
            try:
                messages, reward, reply.done = read_answer(answer, self.env.path, ends)
                reply.messages = to_json(messages, f"{self.env.path}: what interact() returned")
            except (ValueError, ServiceError) as error:
                raise self.fail(str(error)) from None
            if reward is not None:
                reply.reward = reward
                self.turn_rewards[news.actor] = self.turn_rewards.get(news.actor, 0.0) + reward
            if reply.done or self.num_turns < self.max_turns:  # No actor answers after the limit.
                self.messages += messages
        if reply.done:
            self.end(pb.COMPLETED, "it is over")
        elif self.num_turns >= self.max_turns:
            self.end(pb.LIMIT, f"it used all its {self.max_turns} turns")
        reply.status = self.status
        return reply

    async def score(
        self, request: pb.ScoreRequest, hooks: list[Hook], trajectory: Trajectory | None
    ) -> pb.ScoreReply:
        news = request.said
        names = list(dict.fromkeys(request.actors)) or [news.actor]
        scores = {name: pb.ActorScore(actor=name) for name in names}
        for name, score in scores.items():
            if not request.hooks and (name in self.turn_rewards or not self.env.rewards):
                score.parts["interact"] = self.turn_rewards.get(name, 0.0)
        calls = [(hook, name) for hook in hooks for name in (names if hook.is_per_actor else [""])]
        running = [
            self.run(hook, self.arguments(hook, news, name or news.actor, trajectory))
            for hook, name in calls
        ]
        values = await wait_for_all(running)
        for (hook, name), value in zip(calls, values, strict=True):
            try:
                parts = reward_values(value, hook.name, f"{hook.path}: what {hook.name}() returned")
                for scored in [name] if hook.is_per_actor else names:
                    add_parts(
                        scores[scored].parts, scores[scored].metrics, hook, parts, self.actors
                    )
            except ValueError as error:
                raise self.fail(str(error)) from None
        for name, score in scores.items():
            try:
                refuse_unscored(self.env.path, name, score.parts, score.metrics)
            except ValueError as error:
                raise self.fail(str(error)) from None
            score.reward = math.fsum(score.parts.values())
        return pb.ScoreReply(scores=scores.values(), status=self.status)

    def read_said(self, news: pb.Said) -> tuple[list[Message], Trajectory | None]:
        """(new messages, trajectory) of a request. Raises ServiceError if they are malformed or
        `keep` exceeds the conversation."""
        new = from_json(news.messages, list, "said.messages") if news.messages else []
        try:
            new = canonical_messages(new) if new else []
        except ValueError as error:
            raise wrong(f"said.messages {error}") from None
        if news.HasField("keep") and news.keep > len(self.messages):
            raise wrong(
                f"said.keep is {news.keep}; the conversation has {len(self.messages)} messages"
            )
        return new, read_trajectory(
            from_json(news.trajectory, dict, "said.trajectory")
        ) if news.trajectory else None

    def arguments(
        self, hook: Hook, news: pb.Said, actor: str, trajectory: Trajectory | None
    ) -> dict[str, object]:
        """Arguments by name for a hook. Expensive ones are made only if the hook names them."""
        arguments = {
            "messages": self.messages,
            "prompt": self.task.messages,
            "task": self.task,
            "actor": actor,
        }
        arguments |= {
            "actors": self.cast,
            "state": self.state,
            "trajectory": trajectory,
            "completion": news.completion,
        }
        names = arguments.keys() if hook.takes_all else hook.named
        is_other = actor != news.actor
        if "completion" in names and (is_other or not news.HasField("completion")):
            arguments["completion"] = last_text(self.messages, actor)
        if "trajectory" in names and (is_other or trajectory is None):
            arguments["trajectory"] = Trajectory(
                task_id=self.task.id,
                env=self.env.name,
                group_id="",
                actor=actor,
                messages=self.messages,
            )
        return arguments

    async def run(self, hook: Hook, arguments: dict[str, object]) -> object:
        """Runs a hook and returns its result. If the hook fails, ends the session and raises
        ServiceError."""
        try:
            return await (
                CALL.get().in_time(hook, self.task, arguments)
                if asks_actors(hook)
                else hook(self.task, arguments)
            )
        except HookError as error:
            raise self.fail(str(error)) from None
        except TimeoutError as error:
            raise self.fail(too_slow(error).message, StatusCode.DEADLINE_EXCEEDED) from None

    def count_interaction(self) -> None:
        self.interactions += 1
        self.count()

    def fail(self, message: str, code: StatusCode = StatusCode.UNKNOWN) -> ServiceError:
        self.end(pb.ENVIRONMENT_ERROR, message)
        return ServiceError(code, message)

    def end(self, status: int, reason: str) -> None:
        if self.status == pb.RUNNING or (
            status == pb.ENVIRONMENT_ERROR and self.status in MAY_SCORE
        ):
            self.status = status
            self.reason = reason

    def must_be(self, wanted: frozenset) -> None:
        if self.status not in wanted:
            raise has_ended(self.name, self.status, self.reason)

    def close(self) -> None:
        for call in self.calls.values():
            call.task.cancel()


def is_whole(hook: Hook) -> bool:
    """True if the hook's call is the only one of its session: rollout(), or a group's reward that
    asks actors."""
    return hook.name == "rollout" or (hook.batched and asks_actors(hook))


def asks_actors(hook: Hook) -> bool:
    """True if the hook gets actors. turns() gets only their names."""
    return hook.name == "rollout" or ("actors" in hook.named and hook.name != "turns")


def has_ended(name: str, status: int, reason: str) -> ServiceError:
    status = pb.Status.Name(status).lower().replace("_", " ")
    return ServiceError(
        StatusCode.FAILED_PRECONDITION, f"session {name} has ended ({status}): {reason}"
    )


def too_slow(error: TimeoutError) -> ServiceError:
    """The error for a hook's timeout; names the flag of rl-core serve."""
    text = str(error).replace("--rollout.hook_timeout_s", "--hook_timeout_s of rl-core serve")
    return ServiceError(StatusCode.DEADLINE_EXCEEDED, text)


def sent_answer(answer: object) -> object:
    """The result of interact() with its images as data: URLs. Raises ValueError for an image that
    cannot be read."""
    if isinstance(answer, dict):
        return with_images(answer, None)
    return loaded_messages(answer, None) or answer


def last_text(messages: list[Message], actor: str) -> str:
    """The text of an actor's last reply, or ""."""
    for message in reversed(messages):
        if message["role"] == "assistant" and message.get("name", actor) == actor:
            return content if isinstance(content := message.get("content"), str) else ""
    return ""


def read_trajectory(value: JSONObject) -> Trajectory:
    """A Trajectory from JSON values. Raises ServiceError if the value is not a trajectory."""
    try:
        ids = {name: value[name] for name in ("task_id", "env", "group_id")}
        turns = [read_turn(turn) for turn in value.get("turns", [])]
        trajectory = Trajectory(**value | ids | {"turns": turns})
        read_images(trajectory)
        return trajectory
    except KeyError as error:
        raise wrong(f"not a trajectory: {error} is missing") from None
    except (TypeError, AttributeError) as error:
        raise wrong(f"not a trajectory: {error}") from None
