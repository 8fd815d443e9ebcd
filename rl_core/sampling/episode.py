"""Episodes: one attempt by all actors at one task, with turns and rewards."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Protocol, TypeGuard, TypeVar

from rl_core.data.canonical_messages import canonical_messages
from rl_core.data.messages import without_prefix
from rl_core.data.task_rows import row_tools
from rl_core.errors import nearest
from rl_core.sampling.actor import EpisodeActors
from rl_core.sampling.conversation import Conversation
from rl_core.sampling.deadlines import wait_for_all
from rl_core.sampling.hooks import Hook
from rl_core.sampling.reward_parts import add_parts, finite, reward_values
from rl_core.types import JSONObject, Message, Task, Trajectory

# Separates two turns of one actor, because many chat templates and servers refuse consecutive
# assistant messages.
CONTINUE = [{"role": "user", "content": "Continue."}]


T = TypeVar("T")


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
            if len(self.actors) > 1:
                from rl_core.sampling.turn_views import accepted

                heard = accepted(heard, conversation)
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
            from rl_core.sampling.turn_views import merged

            messages = merged(messages)
        return self.actors[name].converse(messages, self.turn_loop.tools_of(self.task))

    def new_messages_for(self, name: str) -> list[Message]:
        """Messages since the actor's last turn in the actor's view: turns of other actors and
        responses to their tool calls become user messages. Consecutive user messages are merged,
        because many chat templates refuse them."""
        messages = self.messages[self.num_seen[name] :]
        if len(self.actors) == 1:
            return messages
        from rl_core.sampling.turn_views import heard_by_another

        return heard_by_another(messages, self.turn_loop.name_prefix)

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


def is_list(value: object, kind: type[T] | UnionType) -> TypeGuard[list[T]]:
    return isinstance(value, (list, tuple)) and all(isinstance(item, kind) for item in value)


def check_name(path: str, name: str, names: Collection[str], where: str) -> None:
    """Raises ValueError unless `name` is an actor."""
    if name not in names:
        raise ValueError(
            f"{path}: {where}: {name!r} is not an actor; {nearest(str(name), sorted(names))}"
        )
