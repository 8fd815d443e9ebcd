"""Levels 1 to 3 of an environment file as a rollout: who speaks in turn, what each sees of it, and its rewards."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl_core.data.tasks import check_messages
from rl_core.sampling.hooks import Hook, wait_for_all
from rl_core.sampling.replies import Voices, without_thoughts
from rl_core.sampling.rewards import Reward, add_rewards, copied, finite_reward, reward_parts, task_copy
from rl_core.types import Message, Task, Trajectory

if TYPE_CHECKING:
    from rl_core.sampling.actor import Conversation, Speaker

# Stands between two turns of an actor in a row: many chat templates, and many servers, refuse two assistants in a row.
CONTINUE = "Continue."


@dataclass(kw_only=True, slots=True)
class Rules:
    """What a user's file says of its episodes."""

    path: str
    start: Hook | None
    interact: Hook | None
    rewards: list[Reward]  # not the batched ones, which score_group calls
    opening: Callable[[Task, str], list[Message]]  # what an actor sees before anybody has spoken
    tools: list[dict[str, Any]] | None
    is_grouped: bool  # it has batched rewards
    has_order: bool  # it has `turns`, which end the episode
    name_prefix: bool
    truncated_reward: float | None


@dataclass(kw_only=True, slots=True)
class View:
    """An episode as one actor sees it."""

    conversation: Conversation
    num_heard: int = 0  # messages of the episode that are in it
    text: str = ""  # what it said last
    parts: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    turn_rewards: list[float] = field(default_factory=list)  # by interact, one for each turn


@dataclass(kw_only=True, slots=True)
class Episode:
    """One attempt by all actors at one task, and what hooks can see of it."""

    rules: Rules
    task: Task
    actors: Mapping[str, Speaker]
    voices: Voices
    messages: list[Message]  # the task's, then what was said, each turn with the speaker's name if there are several
    views: dict[str, View] = field(default_factory=dict)  # of those who spoke
    speaker: str = ""  # who spoke last
    state: Any = None
    truncated: bool = False

    @property
    def has_several(self) -> bool:
        return len(self.actors) > 1

    async def call(self, hook: Hook, actor: str = "") -> Any:
        """What a hook returns, asked about one actor, by default the one that spoke last."""
        task, name = self.task, actor or self.speaker
        # Made only when named, and copied: a hook can spoil neither the conversation nor the task of the next episode.
        given = {
            "messages": lambda: copied(self.messages),
            "prompt": lambda: copied(task.messages),
            "completion": lambda: self.views[name].text,
            "task": lambda: task_copy(task),
            "trajectory": lambda: copy.deepcopy(self.trajectory(name, reward=None)),
            "actor": lambda: name,
            "actors": lambda: self.voices,
            "state": lambda: self.state,
        }
        return await hook(task.id, task.row, given)

    async def speak(self, name: str) -> bool:
        """The actor's next turn. False if it had no room, or was cut off, which ends the episode."""
        view = self.views.get(name)
        if view is None:
            view = View(conversation=self.open_conversation(name))
            has_room = not (self.speaker and view.conversation.truncated)
        else:
            heard = self.heard_by(name, self.messages[view.num_heard :])
            has_room = view.conversation.add(heard or [{"role": "user", "content": CONTINUE}])
        if has_room:
            view.text = (await view.conversation.respond()).text
            view.turn_rewards.append(0.0)
            said = dict(view.conversation.messages[-1])
            self.messages.append(said | {"name": name} if self.has_several else said)
            self.views[name], self.speaker = view, name
        view.num_heard = len(self.messages)
        self.truncated = not has_room or view.conversation.truncated
        return not self.truncated

    def open_conversation(self, name: str) -> Conversation:
        said = self.messages[len(self.task.messages) :]
        messages = self.rules.opening(self.task, name) + self.heard_by(name, said)
        messages = merged(messages) if self.has_several else messages
        return self.actors[name].converse(messages, list(self.rules.tools) if self.rules.tools else None)

    def heard_by(self, name: str, messages: Sequence[Message]) -> list[Message]:
        """Messages as others say them: actors as users, without what they thought, and one after the other as one message,
        because many chat templates refuse two users in a row."""
        if not self.has_several:
            return copied(messages)
        heard = []
        for message in messages:
            speaker = message.get("name") if message["role"] == "assistant" else None
            if speaker is None:
                heard.append(dict(message))
                continue
            text = without_thoughts(message.get("content") or "")
            heard.append({"role": "user", "content": f"{speaker} says: {text}" if self.rules.name_prefix else text})
        return merged(heard)

    def trajectory(self, name: str, reward: float | None) -> Trajectory:
        view = self.views[name]
        found = view.conversation.trajectory(
            self.task, reward=reward, reward_parts=dict(view.parts), metrics=dict(view.metrics)
        )
        if self.truncated:
            found.status = "truncated"
        return found


def merged(messages: Sequence[Message]) -> list[Message]:
    """The messages, in which users' texts that follow each other are one, with a blank line in between."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else {}
        is_text = all(m.get("role") == "user" and isinstance(m.get("content"), str) for m in (last, message))
        if is_text:
            found[-1] = last | {"content": f"{last['content']}\n\n{message['content']}"}
        else:
            found.append(dict(message))
    return found


async def play(
    rules: Rules, task: Task, actors: Mapping[str, Speaker], order: Sequence[str] | None
) -> list[Trajectory]:
    """One episode: start, then turns and interact, then the rewards. A trajectory of each actor with a learner that spoke,
    or of each that spoke if none has one. Without an order the only actor speaks."""
    only = next(iter(actors)) if len(actors) == 1 else ""
    episode = Episode(
        rules=rules, task=task, actors=actors, voices=Voices(actors, task), messages=copied(task.messages)
    )
    if rules.start:
        episode.state = await episode.call(rules.start, only)
    limit = max(speaker.max_turns for speaker in actors.values())
    await take_turns(episode, list(order)[:limit] if order is not None else [only] * (limit if rules.interact else 1))
    is_frozen = not any(speaker.is_trainable for speaker in actors.values())
    scored = [name for name in episode.views if is_frozen or actors[name].is_trainable]
    if scored:
        await score(episode, scored)
    return [scored_trajectory(episode, name) for name in scored]


async def take_turns(episode: Episode, turns: Sequence[str]) -> None:
    rules = episode.rules
    for number, name in enumerate(turns, 1):
        if not await episode.speak(name):
            break
        if rules.interact is None:
            continue
        messages, reward, is_done = check_reply(await episode.call(rules.interact), rules.path, rules.has_order)
        if reward is not None:
            view = episode.views[name]
            view.parts["interact"] = view.parts.get("interact", 0.0) + reward
            view.turn_rewards[-1] += reward
        # After the last turn only its reward counts, unless it ended the episode: what it says would stand unanswered.
        if is_done or number < len(turns):
            episode.messages.extend(messages)
        if is_done:
            break
    for name, view in episode.views.items():
        # Seen by who reads the trajectory, but not answered, so that they need no room among the tokens.
        view.conversation.messages.extend(episode.heard_by(name, episode.messages[view.num_heard :]))


async def score(episode: Episode, scored: Sequence[str]) -> None:
    """Fills in the parts of each actor's reward: by a hook that names `actor` or `trajectory` each its own."""
    rules, views = episode.rules, episode.views
    if episode.truncated and rules.truncated_reward is not None:
        for name in scored:
            add_rewards(views[name].parts, {"truncated": rules.truncated_reward}, rules.path)
        return
    asked = [(reward, name) for reward in rules.rewards for name in (scored if reward.is_per_actor else [""])]
    values = await wait_for_all([episode.call(reward.hook, name) for reward, name in asked])
    for (reward, name), value in zip(asked, values, strict=True):
        parts = reward_parts(value, reward.hook.name, rules.path)
        if episode.has_several and (named := parts.keys() & episode.actors.keys()):
            raise ValueError(
                f"{rules.path}: {reward.hook.name}() returned a part named {min(named)!r}, which is an actor; parts are summed. "
                "For a reward of each actor name `actor` among its arguments: it is then called for each"
            )
        for view in [views[n] for n in ([name] if name else scored)]:
            if reward.weight:
                add_rewards(view.parts, {part: reward.weight * v for part, v in parts.items()}, rules.path)
            else:
                view.metrics.update(parts)
    if not rules.rewards and not rules.is_grouped:
        for name in scored:
            views[name].parts.setdefault("interact", 0.0)  # it never gave one


def scored_trajectory(episode: Episode, name: str) -> Trajectory:
    parts, turn_rewards = episode.views[name].parts, episode.views[name].turn_rewards
    found = episode.trajectory(name, reward=math.fsum(parts.values()))
    if "interact" in parts and found.turns:
        final = math.fsum(value for part, value in parts.items() if part != "interact")
        found.turn_rewards = [*turn_rewards[:-1], turn_rewards[-1] + final]
    return found


def check_reply(reply: Any, path: str, goes_on: bool = False) -> tuple[list[Message], float | None, bool]:
    """(messages, reward, whether the episode is over) of what interact returned; nothing ends it unless it goes on."""
    if reply is None or (isinstance(reply, (list, tuple)) and not reply):
        return [], None, not goes_on
    reward, is_done = None, False
    try:
        if isinstance(reply, dict):
            for key in reply.keys() - {"messages", "reward", "done"}:
                raise ValueError(f"has an unknown key {key!r}; known: messages, reward, done")
            reward, is_done = reply.get("reward"), bool(reply.get("done"))
            reward = None if reward is None else finite_reward(reward)
            reply = reply.get("messages")
            if reply is None or (isinstance(reply, (list, tuple)) and not reply):
                return [], reward, is_done or not goes_on
        return check_messages(reply), reward, is_done
    except ValueError as error:
        raise ValueError(f"{path}: what interact() returned {error}") from None
