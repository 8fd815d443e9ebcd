"""One attempt by all actors at one task: turns, each actor's view, and rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl_core.data.tasks import check_messages, shorten
from rl_core.sampling.actor import Cast, Conversation, copied, without_thoughts
from rl_core.sampling.hooks import Hook, finite, finite_parts, wait_for_all
from rl_core.types import Message, Task, Trajectory

# Between two turns of one actor: many chat templates, and many servers, refuse two assistants in a row.
CONTINUE = [{"role": "user", "content": "Continue."}]


@dataclass(kw_only=True, slots=True, frozen=True)
class Reward:
    """A hook that scores: reward_fn, group_reward_fn, or a function marked by @reward."""

    hook: Hook
    weight: float = 1.0  # 0: only logged
    batched: bool = False  # called once for a group

    @property
    def is_per_actor(self) -> bool:
        return self.hook.names("actor") or self.hook.names("trajectory")

    def add(self, trajectory: Trajectory, parts: dict[str, float]) -> None:
        if not self.weight:
            trajectory.metrics |= parts
            return
        for part, value in parts.items():
            if part in trajectory.reward_parts:
                raise ValueError(f"{self.hook.path}: two hooks give the reward part {part!r}; rename it in one of them")
            trajectory.reward_parts[part] = self.weight * value


class Episode:
    """The transcript that hooks see, and each actor's conversation."""

    def __init__(self, env: Any, task: Task, actors: Cast):  # env: an Env, whose file imports this one
        self.env, self.task, self.actors = env, task, actors
        self.messages = copied(task.messages)  # then each turn, with its speaker's name if there are several
        self.conversations: dict[str, Conversation] = {}  # of the actors that spoke
        self.scores: dict[str, Trajectory] = {}  # their rewards, as they are given
        self.num_heard: dict[str, int] = {}  # messages of the episode that its conversation holds
        self.speaker = ""  # who spoke last
        self.state: Any = None
        self.truncated = False

    async def call(self, hook: Hook, actor: str = "") -> Any:
        """A hook's result for an actor, by default the last speaker. The hook gets copies of the arguments that it names."""
        name = actor or self.speaker
        given = {
            "messages": lambda: copied(self.messages),
            "prompt": lambda: copied(self.task.messages),
            "completion": lambda: self.conversations[name].last_text,
            "task": lambda: task_copy(self.task),
            "trajectory": lambda: trajectory_copy(self.trajectory(name)),
            "actor": lambda: name,
            "actors": lambda: self.actors,
            "state": lambda: self.state,
        }
        return await hook(self.task.id, self.task.row, given)

    async def take_turns(self, order: Sequence[str]) -> None:
        interact = self.env.hooks.get("interact")
        for number, name in enumerate(order, 1):
            if not await self.speak(name):
                break
            if interact is None:
                continue
            ends = self.env.turns is None  # with an order only "done" ends the episode
            messages, reward, is_done = read_answer(await self.call(interact), self.env.path, ends)
            if reward is not None:
                score = self.scores[name]
                score.reward_parts["interact"] = score.reward_parts.get("interact", 0.0) + reward
                score.turn_rewards[-1] += reward
            # Only the reward counts after the last turn, unless it ended the episode: nobody would answer.
            if is_done or number < len(order):
                self.messages.extend(messages)
            if is_done:
                break
        for name, conversation in self.conversations.items():
            # For readers of the trajectory: the actor does not answer it, so it has no tokens.
            conversation.history += self.heard_by(name, self.messages[self.num_heard[name] :])

    async def speak(self, name: str) -> bool:
        """The actor's next turn. False if it was cut off or the context is full, which ends the episode."""
        conversation = self.conversations.get(name) or self.open(name)
        num_replies = conversation.num_replies
        if num_replies:
            await conversation.respond(self.heard_by(name, self.messages[self.num_heard[name] :]) or CONTINUE)
        elif not (conversation.is_full and self.speaker):  # where nobody has spoken yet, the task is too long: an error
            await conversation.respond()
        if conversation.num_replies > num_replies:
            said = dict(conversation.history[-1])
            self.messages.append(said | {"name": name} if len(self.actors) > 1 else said)
            self.conversations[name], self.speaker = conversation, name
            self.scores.setdefault(name, conversation.record()).turn_rewards.append(0.0)
        self.num_heard[name] = len(self.messages)
        self.truncated = conversation.truncated
        return not self.truncated

    def open(self, name: str) -> Conversation:
        said = self.messages[len(self.task.messages) :]
        messages = self.env.opening(self.task, name) + self.heard_by(name, said)
        messages = merged(messages) if len(self.actors) > 1 else messages
        return self.actors[name].converse(messages, list(self.env.tools) if self.env.tools else None)

    def heard_by(self, name: str, messages: Sequence[Message]) -> list[Message]:
        """Messages in an actor's view: other actors are users, without their thoughts. User messages in a row become one,
        because many chat templates refuse two."""
        if len(self.actors) == 1:
            return copied(messages)
        heard = []
        for message in messages:
            speaker = message.get("name") if message["role"] == "assistant" else None
            if speaker is not None:
                text = without_thoughts(message.get("content") or "")
                message = {"role": "user", "content": f"{speaker} says: {text}" if self.env.name_prefix else text}
            heard.append(message)
        return merged(heard)

    async def score(self, names: Sequence[str]) -> None:
        """Fills in the parts of each actor's reward. A hook that names `actor` or `trajectory` is called for each actor."""
        env = self.env
        if self.truncated and env.truncated_reward is not None:
            for name in names:
                self.scores[name].reward_parts["truncated"] = env.truncated_reward
            return
        single = [reward for reward in env.rewards if not reward.batched]
        asked = [(reward, name) for reward in single for name in (names if reward.is_per_actor else [""])]
        values = await wait_for_all([self.call(reward.hook, name) for reward, name in asked])
        for (reward, name), value in zip(asked, values, strict=True):
            hook = reward.hook.name
            parts = finite_parts(value, hook, f"{env.path}: what {hook}() returned")
            if len(self.actors) > 1 and (named := parts.keys() & self.actors.keys()):
                raise ValueError(
                    f"{env.path}: {hook}() returned a part named {min(named)!r}, which is an actor; parts are summed. For a "
                    "reward of each actor name `actor` among its arguments"
                )
            for spoken in [name] if name else names:
                reward.add(self.scores[spoken], parts)
        if not env.rewards:
            for name in names:
                self.scores[name].reward_parts.setdefault("interact", 0.0)  # it never gave one

    def trajectory(self, name: str) -> Trajectory:
        now, task = self.conversations[name].record(), self.task
        status = "truncated" if self.truncated else now.status
        same = {"task_id": task.id, "env": task.env, "messages": now.messages, "turns": now.turns}
        return replace(self.scores[name], status=status, **same)

    def scored(self, name: str) -> Trajectory:
        found = self.trajectory(name)
        parts = found.reward_parts
        found.reward = math.fsum(parts.values())
        if "interact" in parts and found.turns:
            found.turn_rewards[-1] += math.fsum(value for part, value in parts.items() if part != "interact")
        else:
            found.turn_rewards = []
        return found


def merged(messages: Sequence[Message]) -> list[Message]:
    """The messages; user texts in a row become one, with a blank line in between."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else {}
        if all(m.get("role") == "user" and isinstance(m.get("content"), str) for m in (last, message)):
            found[-1] = last | {"content": f"{last['content']}\n\n{message['content']}"}
        else:
            found.append(dict(message))
    return found


def read_answer(answer: Any, path: str, ends: bool) -> tuple[list[Message], float | None, bool]:
    """(messages, reward, is_done) of what interact returned. `ends`: the episode ends without messages."""
    what, reward, is_done = f"{path}: what interact() returned", None, False
    if isinstance(answer, dict):
        for key in answer.keys() - {"messages", "reward", "done"}:
            raise ValueError(f"{what} has an unknown key {key!r}; known: messages, reward, done")
        reward = None if answer.get("reward") is None else finite(answer["reward"], f"the reward in {what}")
        is_done, answer = bool(answer.get("done")), answer.get("messages")
    if answer is None or answer in ([], ()):
        return [], reward, is_done or ends
    try:
        return check_messages(answer), reward, is_done
    except ValueError as error:
        raise ValueError(f"{what} {error}") from None


async def play(env: Any, task: Task, actors: Cast) -> list[Trajectory]:
    """One episode by turns. It leaves a trajectory of each trainable actor that spoke; if none is trainable, of each actor
    that spoke."""
    episode, only = Episode(env, task, actors), next(iter(actors)) if len(actors) == 1 else ""
    if "start" in env.hooks:
        episode.state = await episode.call(env.hooks["start"], only)
    limit = max(actor.max_turns for actor in actors.values())
    order = [only] * (limit if "interact" in env.hooks else 1) if env.turns is None else task.info["turns"][:limit]
    await episode.take_turns(order)
    is_frozen = not any(actor.is_trainable for actor in actors.values())
    names = [name for name in episode.conversations if is_frozen or actors[name].is_trainable]
    if names:
        await episode.score(names)
    return [episode.scored(name) for name in names]


async def score_group(rewards: Sequence[Reward], task: Task, trajectories: Sequence[Trajectory], actors: Cast) -> None:
    """Adds the batched rewards to the trajectories of one group that did not fail. Each hook is called once for every actor
    and seat. Raises what it raises, ValueError unless it gives one finite number for each."""
    groups: dict[tuple[str, str], list[Trajectory]] = {}
    for trajectory in trajectories:
        if trajectory.status != "failed":
            groups.setdefault((trajectory.actor, trajectory.seat), []).append(trajectory)
    asked = [(reward, group) for reward in rewards for group in groups.values()]
    given = await wait_for_all([group_values(reward.hook, task, group, actors) for reward, group in asked])
    for (reward, group), values in zip(asked, given, strict=True):
        for trajectory, value in zip(group, values, strict=True):
            reward.add(trajectory, {reward.hook.name: value})
            trajectory.reward += reward.weight * value
            if trajectory.turn_rewards:
                trajectory.turn_rewards[-1] += reward.weight * value


async def group_values(hook: Hook, task: Task, group: Sequence[Trajectory], actors: Cast) -> list[float]:
    given = {
        "trajectories": lambda: [trajectory_copy(t) for t in group],
        "task": lambda: task_copy(task),
        "prompt": lambda: copied(task.messages),
        "actor": lambda: group[0].actor,
        "actors": lambda: actors,
    }
    values, what = await hook(task.id, task.row, given), f"{hook.path}: what {hook.name}() returned"
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)) or len(values) != len(group):
        raise ValueError(
            f"{what} is {shorten(values)}; it must be a list of {len(group)} numbers, one for each trajectory"
        )
    return [finite(value, f"a number in {what}") for value in values]


def task_copy(task: Task) -> Task:
    """For a hook, which may change it."""
    return replace(task, row=dict(task.row), messages=copied(task.messages), info=dict(task.info))


def trajectory_copy(trajectory: Trajectory) -> Trajectory:
    """For a hook, which may change it. Faster than copy.deepcopy, because an episode may have many tokens."""
    t, turns = trajectory, []
    for turn in t.turns:
        done = turn.completion
        own = replace(done, token_ids=list(done.token_ids), logprobs=list(done.logprobs))
        turns.append(replace(turn, new_ids=list(turn.new_ids), completion=own))
    own = {"reward_parts": dict(t.reward_parts), "turn_rewards": list(t.turn_rewards), "metrics": dict(t.metrics)}
    return replace(t, messages=copied(t.messages), turns=turns, **own)
