"""Episodes: one attempt by all actors at one task, with turns, each actor's view, and rewards."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Protocol, TypeAlias, TypeGuard, TypeVar

from rl_core.data.canonical_messages import canonical_messages
from rl_core.data.episodes import baseline_groups
from rl_core.data.messages import shorten, with_text_arguments, without_prefix
from rl_core.data.task_rows import row_tools
from rl_core.data.thoughts import without_thoughts
from rl_core.errors import nearest
from rl_core.sampling.actor import EpisodeActors
from rl_core.sampling.conversation import Conversation
from rl_core.sampling.hooks import Hook, refuse_none, wait_for_all
from rl_core.sampling.reward_parts import add_parts, finite, plain, reward_values
from rl_core.types import JSON, JSONObject, Message, Task, Trajectory

# Separates two turns of one actor, because many chat templates and servers refuse consecutive
# assistant messages.
CONTINUE = [{"role": "user", "content": "Continue."}]


T = TypeVar("T")
Content: TypeAlias = str | list[JSONObject]  # A text, or parts with texts and images.


class TurnOrder(Protocol):
    """The order in which actors speak; see environments/turn_order.py."""

    text: str
    longest: int  # Number of turns, as far as it is known.

    def speakers(self, names: Sequence[str]) -> list[str] | None: ...
    async def draw(self, task: Task, names: Sequence[str], seed: int) -> list[str]: ...


class PromptTemplate(Protocol):
    """A system prompt; see environments/system_prompts.py."""

    columns: set[str]  # Columns that the template names.

    def render(self, task: Task) -> str: ...


@dataclass(kw_only=True)
class TurnLoop:
    """The default episode of an environment file: actors take turns, hooks answer and score."""

    path: str
    hooks: dict[str, Hook]
    rewards: list[Hook]
    turns: TurnOrder | None  # None if there is one actor.
    tools: list[JSONObject] | None
    system_prompts: Mapping[str, PromptTemplate]  # Key: actor.
    name_prefix: bool
    truncated_reward: float | None

    async def rollout(self, task: Task, actors: EpisodeActors) -> list[Trajectory]:
        """The trajectories of each trainable actor that spoke; if none is trainable, of each actor
        that spoke."""
        episode = Episode(self, task, actors)
        await episode.take_turns()
        learners = actors.learners
        names = [name for name in episode.trajectories if name in learners]
        if names:
            await episode.score(names)
        return [episode.trajectories[name] for name in names]

    def opening(self, task: Task, actor: str) -> list[Message]:
        """An actor's messages before the first turn. Its system prompt replaces the task's own."""
        if actor not in self.system_prompts:
            return list(task.messages)
        has_system = bool(task.messages) and task.messages[0].get("role") == "system"
        text = self.system_prompts[actor].render(task)
        return [{"role": "system", "content": text}, *task.messages[has_system:]]

    def tools_of(self, task: Task) -> list[JSONObject] | None:
        """The tools of the task's row, by default those of the file."""
        return row_tools(task.row) or self.tools


class Episode:
    """The transcript that hooks see, and the conversation and trajectory of each actor that
    spoke."""

    def __init__(self, turn_loop: TurnLoop, task: Task, actors: EpisodeActors):
        self.turn_loop = turn_loop
        self.task = task
        self.actors = actors
        # The task's messages, then each turn, with the actor's name if there are several. The first
        # turn holds the text that it continues.
        self.messages = list(without_prefix(task.messages)[0])
        self.num_asked = len(self.messages)
        self.conversations: dict[str, Conversation] = {}
        # Trajectories share messages and turns with the conversations.
        self.trajectories: dict[str, Trajectory] = {}
        # Actor -> number of messages of the episode in its conversation.
        self.num_seen: dict[str, int] = {}
        self.speaker = ""  # Actor of the last turn.
        self.state: object = None
        self.truncated = False

    async def call(self, hook: Hook, actor: str = "") -> object:
        """A hook's result for an actor, by default the last speaker."""
        name = actor or self.speaker
        arguments = {"messages": self.messages, "prompt": self.task.messages, "task": self.task}
        arguments |= {"actor": name, "actors": self.actors, "state": self.state}
        if name in self.conversations:
            arguments["completion"] = self.conversations[name].last_text
            arguments["trajectory"] = self.trajectories[name]
        return await hook(self.task, arguments)

    async def take_turns(self) -> None:
        hooks, max_turns = self.turn_loop.hooks, self.actors.max_turns
        only = next(iter(self.actors)) if len(self.actors) == 1 else ""
        if "start" in hooks:
            self.state = await self.call(hooks["start"], only)
        order = [only] * (max_turns if "interact" in hooks else 1)
        if self.turn_loop.turns is not None:
            order = self.task.info["turns"][:max_turns]
        for number, name in enumerate(order, 1):
            if not await self.speak(name):
                break
            if "interact" in hooks and await self.interact(name, is_last=number == len(order)):
                break
        for name, conversation in self.conversations.items():
            # Messages after the actor's last turn have no tokens; they are kept for readers.
            conversation.history += self.new_messages_for(name)

    async def speak(self, name: str) -> bool:
        """Samples the actor's next turn. Returns False if the turn was truncated or the context is
        full, which ends the episode."""
        conversation = self.conversations.get(name) or self.open(name)
        num_replies, key = conversation.num_replies, None
        if "state_key" in self.turn_loop.hooks:
            key = await self.call(self.turn_loop.hooks["state_key"], name)
        if num_replies:
            heard = self.new_messages_for(name) or CONTINUE
            joined = joined_to_tools(heard) if len(self.actors) > 1 else heard
            if len(joined) < len(heard) and not conversation.accepts(heard):
                heard = joined
            await conversation.respond(heard, state_key=key)
        elif not (conversation.tokens_left < 1 and self.speaker):
            # A task without room for the first turn raises an error; a later actor is skipped.
            await conversation.respond(state_key=key)
        if conversation.num_replies > num_replies:
            self.add_turn(name, conversation)
        self.num_seen[name] = len(self.messages)
        self.truncated = conversation.truncated
        if self.truncated:
            for trajectory in self.trajectories.values():
                trajectory.status = "truncated"
        return not self.truncated

    def add_turn(self, name: str, conversation: Conversation) -> None:
        reply = conversation.history[-1]
        if len(self.actors) > 1:
            reply = reply | {"name": name}
        self.messages.append(reply)
        if name not in self.conversations:
            self.conversations[name] = conversation
            self.trajectories[name] = Trajectory(
                task_id=self.task.id,
                env=self.task.env,
                actor=name,
                messages=conversation.history,
                turns=conversation.turns,
                metrics=conversation.metrics,
            )
        self.trajectories[name].turn_rewards.append(0.0)
        self.trajectories[name].message_indices.append(len(self.messages))
        self.speaker = name

    async def interact(self, name: str, is_last: bool) -> bool:
        """Calls interact() after an actor's turn and adds its messages and reward. Returns True if
        it ends the episode."""
        answer = await self.call(self.turn_loop.hooks["interact"])
        ends = self.turn_loop.turns is None  # With `turns`, only "done" ends the episode.
        messages, reward, is_done = read_answer(answer, self.turn_loop.path, ends)
        if reward is not None:
            parts = self.trajectories[name].reward_parts
            parts["interact"] = parts.get("interact", 0.0) + reward
            self.trajectories[name].turn_rewards[-1] += reward
        # Nobody answers messages after the last turn: they are dropped, unless interact() ended
        # the episode with them.
        if is_done or not is_last:
            self.messages += messages
        return is_done

    def open(self, name: str) -> Conversation:
        messages = self.turn_loop.opening(self.task, name)
        self.num_seen[name] = self.num_asked
        if self.speaker:
            messages = without_prefix(messages)[0]
        messages += self.new_messages_for(name)
        if len(self.actors) > 1:
            messages = merged(messages)
        return self.actors[name].converse(messages, self.turn_loop.tools_of(self.task))

    def new_messages_for(self, name: str) -> list[Message]:
        """Messages since the actor's last turn in the actor's view: turns of other actors and
        responses to their tool calls become user messages. Consecutive user messages are merged,
        because many chat templates refuse them."""
        messages = self.messages[self.num_seen[name] :]
        if len(self.actors) == 1:
            return messages
        prefix, heard, has_spoken = self.turn_loop.name_prefix, [], False
        for message in messages:
            if message["role"] == "assistant" and "name" in message:
                has_spoken = True
                message = as_user(message, turn_text(message), prefix)
            elif message["role"] == "tool" and has_spoken:
                # This actor's conversation does not hold the call that the message answers.
                message = as_user(message, message.get("content") or "", prefix)
            heard.append(message)
        return merged(heard)

    async def score(self, names: Sequence[str]) -> None:
        """Sets each actor's reward."""
        if self.truncated and self.turn_loop.truncated_reward is not None:
            for name in names:
                self.trajectories[name].reward_parts["truncated"] = self.turn_loop.truncated_reward
        else:
            await self.call_rewards(names)
        for name in names:
            t = self.trajectories[name]
            t.reward = math.fsum(t.reward_parts.values())
            if "interact" in t.reward_parts and t.turns:
                t.turn_rewards[-1] += t.reward - t.reward_parts["interact"]
            else:
                t.turn_rewards = []

    async def call_rewards(self, names: Sequence[str]) -> None:
        """Adds the reward parts of all hooks. A hook that names `actor` or `trajectory` is called
        once per actor."""
        calls = []
        for hook in self.turn_loop.rewards:
            if not hook.batched:
                calls += [(hook, name) for name in (names if hook.is_per_actor else [""])]
        values = await wait_for_all([self.call(hook, name) for hook, name in calls])
        for (hook, name), value in zip(calls, values, strict=True):
            parts = reward_values(value, hook.name, f"{hook.path}: what {hook.name}() returned")
            for scored in [name] if name else names:
                t = self.trajectories[scored]
                add_parts(t.reward_parts, t.metrics, hook, parts, self.actors)
        if not self.turn_loop.rewards:
            for name in names:
                # interact() returned no reward.
                self.trajectories[name].reward_parts.setdefault("interact", 0.0)


def read_answer(answer: object, path: str, ends: bool) -> tuple[list[Message], float | None, bool]:
    """(messages, reward, is_done) from the result of interact(). `ends`: True if the episode ends
    without messages."""
    source = f"{path}: what interact() returned"
    if not isinstance(answer, dict):
        answer = {"messages": answer}
    for key in answer.keys() - {"messages", "reward", "done"}:
        raise ValueError(f"{source} has an unknown key {key!r}; known: messages, reward, done")
    reward = answer.get("reward")
    if reward is not None:
        reward = finite(reward, f"the reward in {source}")
    messages = answer.get("messages")
    if messages is None or messages in ([], ()):
        return [], reward, bool(answer.get("done")) or ends
    try:
        return canonical_messages(messages), reward, bool(answer.get("done"))
    except ValueError as error:
        raise ValueError(f"{source} {error}") from None


def turn_text(message: Message) -> str:
    """Text of an actor's turn for other actors: without thoughts, and each tool call as a line
    NAME(ARGUMENTS) with the arguments as JSON."""
    text = without_thoughts(message.get("content") or "")
    lines = [text] if text else []
    for call in message.get("tool_calls") or ():
        function = with_text_arguments(call)["function"]
        lines.append(f"{function['name']}({function['arguments']})")
    return "\n".join(lines)


def as_user(message: Message, content: Content, name_prefix: bool) -> Message:
    """The content of another actor or of a tool as a user message, optionally behind its name."""
    if name_prefix:
        content = joined(f"{message.get('name', message['role'])} says: ", content)
    return {"role": "user", "content": content}


def joined(*contents: Content) -> Content:
    """One content: a text, or a list of parts if one of them has an image."""
    parts: list[JSONObject] = []
    for content in contents:
        for item in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if parts and parts[-1]["type"] == item["type"] == "text":
                item = {"type": "text", "text": parts.pop()["text"] + item["text"]}
            parts.append(item)
    return parts if len(parts) > 1 or parts[0]["type"] == "image" else parts[0]["text"]


def joined_to_tools(messages: Sequence[Message]) -> list[Message]:
    """Messages in which each user message behind a tool message is appended to the tool message,
    for chat templates that allow only an assistant after a tool."""
    result: list[Message] = []
    for message in messages:
        if result and result[-1]["role"] == "tool" and message.get("role") == "user":
            last = result.pop()
            content = joined(last.get("content") or "", "\n\n", message["content"])
            message = last | {"content": content}
        result.append(message)
    return result


def merged(messages: Sequence[Message]) -> list[Message]:
    """Messages with consecutive user messages merged, separated by a blank line."""
    result: list[Message] = []
    for message in messages:
        if result and result[-1].get("role") == message.get("role") == "user":
            last = result.pop()
            message = last | {"content": joined(last["content"], "\n\n", message["content"])}
        result.append(message)
    return result


def checked(returned: object, path: str, actors: EpisodeActors) -> list[Trajectory]:
    """Validated result of the user's rollout(). Raises ValueError unless it is a list of scored
    trajectories."""
    refuse_none(returned, "rollout()", path)
    if not returned or not is_list(returned, Trajectory):
        raise ValueError(
            f"{path}: what rollout() returned is {shorten(returned)}; it must be a list of at "
            "least one Trajectory: return [reply.trajectory(reward=...)]"
        )
    last = [id(t.turns[-1]) for t in returned if t.turns]
    if len(set(last)) < len(last):
        raise ValueError(
            f"{path}: two trajectories of rollout() end in the same reply; fork() it before"
        )
    for t in returned:
        check_name(path, t.actor, actors, "a trajectory that rollout() returned")
        source = f"{path}: a trajectory of {t.actor!r} that rollout() returned"
        t.reward = finite(t.reward, f"the reward of {source}")
        if t.turn_rewards and len(t.turn_rewards) != len(t.turns):
            raise ValueError(
                f"{source} has {len(t.turn_rewards)} turn_rewards for {len(t.turns)} turns"
            )
        # Records and checkpoints are JSON.
        t.turn_rewards = [plain(value) for value in t.turn_rewards]
        t.metrics = {name: plain(value) for name, value in t.metrics.items()}
    return list(returned)


def is_list(value: object, kind: type[T] | UnionType) -> TypeGuard[list[T]]:
    return isinstance(value, (list, tuple)) and all(isinstance(item, kind) for item in value)


def check_name(path: str, name: str, names: Collection[str], where: str) -> None:
    """Raises ValueError unless `name` is an actor."""
    if name not in names:
        raise ValueError(
            f"{path}: {where}: {name!r} is not an actor; {nearest(str(name), sorted(names))}"
        )


async def group_rewards(
    hooks: Sequence[Hook], task: Task, trajectories: Sequence[Trajectory], actors: EpisodeActors
) -> list[tuple[Hook, list[Trajectory], list[float | None]]]:
    """(hook, trajectories, a value for each) of the batched rewards of one group. Each hook is
    called once per actor and player, with the trajectories that did not fail. Raises the errors of
    hooks, and ValueError unless a hook returns one finite number for each trajectory."""
    calls = []
    for group in baseline_groups(trajectories):
        calls += [group_reward(hook, task, group, actors) for hook in hooks]
    return await wait_for_all(calls)


async def group_reward(
    hook: Hook, task: Task, group: list[Trajectory], actors: EpisodeActors
) -> tuple[Hook, list[Trajectory], list[float | None]]:
    arguments = {"trajectories": group, "task": task, "prompt": task.messages}
    values: JSON = await hook(task, arguments | {"actor": group[0].actor, "actors": actors})
    source = f"{hook.path}: what {hook.name}() returned"
    refuse_none(values, f"{hook.name}()", hook.path)
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)) or len(values) != len(group):
        raise ValueError(
            f"{source} is {shorten(values)}; it must be a list of {len(group)} numbers, one for "
            "each trajectory"
        )
    numbers = [v if v is None else finite(v, f"a number in {source}") for v in values]
    return hook, group, numbers


def add_group_rewards(rewards: list[tuple[Hook, list[Trajectory], list[float | None]]]) -> None:
    """Adds the result of group_rewards() to the trajectories."""
    for hook, group, values in rewards:
        for t, value in zip(group, values, strict=True):
            add_parts(t.reward_parts, t.metrics, hook, {hook.name: value})
            if value is None:
                continue
            assert t.reward is not None
            t.reward += hook.weight * value
            if t.turn_rewards:
                t.turn_rewards[-1] += hook.weight * value
