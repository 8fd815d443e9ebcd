"""One attempt by all actors at one task: turns, each actor's view, and rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rl_core.data.tasks import shorten
from rl_core.sampling.actor import Cast, Conversation, without_thoughts
from rl_core.sampling.env import Env, is_list
from rl_core.sampling.hooks import (
    Hook,
    add_parts,
    finite,
    finite_parts,
    plain,
    read_answer,
    saying_truncated,
    wait_for_all,
)
from rl_core.types import Message, Task, Trajectory

# Between two turns of one actor: many chat templates, and many servers, refuse two assistants in a
# row.
CONTINUE = [{"role": "user", "content": "Continue."}]


async def play(env: Env, task: Task, actors: Cast) -> list[Trajectory]:
    """The trajectories of one episode: of each trainable actor that spoke; if none is trainable, of
    each actor that spoke."""
    if "rollout" in env.hooks:
        returned = await env.hooks["rollout"](task, {"task": task, "actors": actors})
        with saying_truncated({"actors": actors}):
            return checked(returned, env, task, actors)
    episode, only = Episode(env, task, actors), next(iter(actors)) if len(actors) == 1 else ""
    if "start" in env.hooks:
        episode.state = await episode.call(env.hooks["start"], only)
    num_turns = env.max_turns if "interact" in env.hooks else 1
    await episode.take_turns(
        [only] * num_turns if env.turns is None else task.info["turns"][: env.max_turns]
    )
    is_frozen = not any(actor.is_trainable for actor in actors.values())
    names = [name for name in episode.conversations if is_frozen or actors[name].is_trainable]
    if names:
        await episode.score(names)
    return [episode.trajectories[name] for name in names]


class Episode:
    """The transcript that hooks see, and the conversation and trajectory of each actor that
    spoke."""

    def __init__(self, env: Env, task: Task, actors: Cast):
        self.env, self.task, self.actors = env, task, actors
        # Then each turn, with its speaker's name if there are several.
        self.messages = list(task.messages)
        self.conversations: dict[str, Conversation] = {}
        # They share messages and turns with the conversations.
        self.trajectories: dict[str, Trajectory] = {}
        # Messages of the episode that an actor's conversation holds.
        self.num_heard: dict[str, int] = {}
        self.speaker = ""  # who spoke last
        self.state: Any = None
        self.truncated = False

    async def call(self, hook: Hook, actor: str = "") -> Any:
        """A hook's result for an actor, by default the last speaker."""
        name, task = actor or self.speaker, self.task
        given = {"messages": self.messages, "prompt": task.messages, "task": task, "actor": name}
        given |= {"actors": self.actors, "state": self.state}
        if name in self.conversations:
            given |= {
                "completion": self.conversations[name].last_text,
                "trajectory": self.trajectories[name],
            }
        return await hook(task, given)

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
                trajectory = self.trajectories[name]
                trajectory.reward_parts["interact"] = (
                    trajectory.reward_parts.get("interact", 0.0) + reward
                )
                trajectory.turn_rewards[-1] += reward
            # Only the reward counts after the last turn, unless it ended the episode: nobody would
            # answer.
            if is_done or number < len(order):
                self.messages += messages
            if is_done:
                break
        for name, conversation in self.conversations.items():
            # For readers of the trajectory: the actor does not answer it, so it has no tokens.
            conversation.history += self.unheard_by(name)

    async def speak(self, name: str) -> bool:
        """The actor's next turn. False if it was cut off or the context is full, which ends the
        episode."""
        conversation = self.conversations.get(name) or self.open(name)
        num_replies = conversation.num_replies
        if num_replies:
            await conversation.respond(self.unheard_by(name) or CONTINUE)
        elif not (
            conversation.is_full and self.speaker
        ):  # where nobody has spoken yet, the task is too long: an error
            await conversation.respond()
        if conversation.num_replies > num_replies:
            self.add_turn(name, conversation)
        self.num_heard[name] = len(self.messages)
        self.truncated = conversation.truncated
        if self.truncated:
            for trajectory in self.trajectories.values():
                trajectory.status = "truncated"
        return not self.truncated

    def add_turn(self, name: str, conversation: Conversation) -> None:
        reply = conversation.history[-1]
        self.messages.append(reply | {"name": name} if len(self.actors) > 1 else reply)
        if name not in self.conversations:
            self.conversations[name] = conversation
            shared = {name: getattr(conversation, name) for name in ("turns", "metrics")}
            self.trajectories[name] = Trajectory(
                task_id=self.task.id,
                env=self.task.env,
                group_id="",
                actor=name,
                messages=conversation.history,
                **shared,
            )
        self.trajectories[name].turn_rewards.append(0.0)
        self.trajectories[name].places.append(len(self.messages))
        self.speaker = name

    def open(self, name: str) -> Conversation:
        messages = self.env.opening(self.task, name)
        self.num_heard[name] = len(self.task.messages)
        messages += self.unheard_by(name)
        return self.actors[name].converse(
            merged(messages) if len(self.actors) > 1 else messages, self.env.tools
        )

    def unheard_by(self, name: str) -> list[Message]:
        """The messages since the actor's last turn in its view: other actors are users, without
        their thoughts. User messages in a row become one, because many chat templates refuse
        two."""
        messages = self.messages[self.num_heard[name] :]
        if len(self.actors) == 1:
            return messages
        heard = []
        for message in messages:
            speaker = message.get("name") if message["role"] == "assistant" else None
            if speaker is not None:
                text = without_thoughts(message.get("content") or "")
                message = {
                    "role": "user",
                    "content": f"{speaker} says: {text}" if self.env.name_prefix else text,
                }
            heard.append(message)
        return merged(heard)

    async def score(self, names: Sequence[str]) -> None:
        """Fills in each actor's reward."""
        if self.truncated and self.env.truncated_reward is not None:
            for name in names:
                self.trajectories[name].reward_parts["truncated"] = self.env.truncated_reward
        else:
            await self.call_rewards(names)
        for name in names:
            t = self.trajectories[name]
            t.reward = math.fsum(t.reward_parts.values())
            if "interact" in t.reward_parts and t.turns:
                t.turn_rewards[-1] += math.fsum(
                    v for part, v in t.reward_parts.items() if part != "interact"
                )
            else:
                t.turn_rewards = []

    async def call_rewards(self, names: Sequence[str]) -> None:
        """Adds the parts that hooks give. A hook that names `actor` or `trajectory` is called for
        each actor."""
        single = [hook for hook in self.env.rewards if not hook.batched]
        calls = [(hook, name) for hook in single for name in (names if hook.is_per_actor else [""])]
        values = await wait_for_all([self.call(hook, name) for hook, name in calls])
        for (hook, name), value in zip(calls, values, strict=True):
            with saying_truncated({"trajectories": self.trajectories.values()}):
                parts = finite_parts(value, hook.name, f"{hook.path}: what {hook.name}() returned")
            for t in [self.trajectories[scored] for scored in ([name] if name else names)]:
                add_parts(t.reward_parts, t.metrics, hook, parts, self.actors)
        if not self.env.rewards:
            for name in names:
                # It never gave one.
                self.trajectories[name].reward_parts.setdefault("interact", 0.0)


def merged(messages: Sequence[Message]) -> list[Message]:
    """The messages; user texts in a row become one, with a blank line in between."""
    result: list[Message] = []
    for message in messages:
        last = result[-1] if result else {}
        if all(
            m.get("role") == "user" and isinstance(m.get("content"), str) for m in (last, message)
        ):
            result[-1] = last | {"content": f"{last['content']}\n\n{message['content']}"}
        else:
            result.append(message)
    return result


def checked(returned: Any, env: Env, task: Task, actors: Cast) -> list[Trajectory]:
    """What the user's rollout() returned. Raises ValueError unless it is a list of scored
    trajectories."""
    if not returned or not is_list(returned, Trajectory):
        fix = "it must be a list of at least one Trajectory: return [reply.trajectory(reward=...)]"
        raise ValueError(f"{env.path}: what rollout() returned is {shorten(returned)}; {fix}")
    last = [id(t.turns[-1]) for t in returned if t.turns]
    if len(set(last)) < len(last):
        raise ValueError(
            f"{env.path}: two trajectories of rollout() end in the same reply; fork() it before"
        )
    for t in returned:
        what = f"{env.path}: a trajectory of {t.actor!r} that rollout() returned"
        env.check_name(t.actor, actors, "a trajectory that rollout() returned")
        t.reward = finite(t.reward, f"the reward of {what}")
        if t.turn_rewards and len(t.turn_rewards) != len(t.turns):
            raise ValueError(
                f"{what} has {len(t.turn_rewards)} turn_rewards for {len(t.turns)} turns"
            )
        # Records and checkpoints are JSON.
        t.turn_rewards = [plain(value) for value in t.turn_rewards]
        t.metrics = {name: plain(value) for name, value in t.metrics.items()}
        t.task_id, t.env = task.id, task.env
    return list(returned)


async def score_group(
    env: Env, task: Task, trajectories: Sequence[Trajectory], actors: Cast
) -> None:
    """Adds the batched rewards to the trajectories of one group that did not fail. Each hook is
    called once for every actor and seat. Raises what it raises, ValueError unless it gives one
    finite number for each."""
    groups: dict[tuple[str, str], list[Trajectory]] = {}
    for trajectory in trajectories:
        if trajectory.status != "failed":
            groups.setdefault((trajectory.actor, trajectory.seat), []).append(trajectory)
    calls = [(hook, group) for hook in env.group_rewards for group in groups.values()]
    results = await wait_for_all([group_values(hook, task, group, actors) for hook, group in calls])
    for (hook, group), values in zip(calls, results, strict=True):
        for trajectory, value in zip(group, values, strict=True):
            add_parts(trajectory.reward_parts, trajectory.metrics, hook, {hook.name: value})
            trajectory.reward += hook.weight * value
            if trajectory.turn_rewards:
                trajectory.turn_rewards[-1] += hook.weight * value


async def group_values(
    hook: Hook, task: Task, group: Sequence[Trajectory], actors: Cast
) -> list[float]:
    given = {
        "trajectories": group,
        "task": task,
        "prompt": task.messages,
        "actor": group[0].actor,
        "actors": actors,
    }
    values, what = await hook(task, given), f"{hook.path}: what {hook.name}() returned"
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)) or len(values) != len(group):
        raise ValueError(
            f"{what} is {shorten(values)}; it must be a list of {len(group)} numbers, one for each "
            "trajectory"
        )
    with saying_truncated(given):
        return [finite(value, f"a number in {what}") for value in values]
