"""What the policy reads as its own teacher, before the same reply: teacher_prompt() of the
environment's file is asked once an episode is scored."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl_core.config import Config
from rl_core.data.chat import Chat
from rl_core.data.episodes import succeeded
from rl_core.data.messages import canonical_messages, shorten
from rl_core.data.tasks import row_variables
from rl_core.sampling.env import Env
from rl_core.sampling.episode import is_list
from rl_core.sampling.hooks import wait_for_all
from rl_core.sampling.rollout import EpisodeRunner, Group
from rl_core.types import Message, Task, Trajectory, Turn

HOOK = "teacher_prompt"
SELF = "self"  # the policy, as the name of a teacher
# (actor, environment) -> most tokens of a reply behind what its teacher reads, and which limit it
# is.
Limits = Mapping[tuple[str, str], tuple[int, str]]


def envs_by_teacher(config: Config) -> dict[str, list[str]]:
    """Name of a teacher -> the environments whose samples it reads."""
    if not config.algo.teacher:
        return {}
    found: dict[str, list[str]] = {}
    for env in config.env_paths:
        name = config.env(env).teacher or config.algo.teacher
        if name != "none":
            found.setdefault(name, []).append(env)
    return found


def self_taught(config: Config) -> list[str]:
    """The environments in which the actor is its own teacher."""
    return envs_by_teacher(config).get(SELF, [])


def check_taught(config: Config, name: str, envs: dict[str, Env]) -> None:
    """Raises ValueError unless an actor that is its own teacher has something to read as such."""
    for env in self_taught(config):
        if env in envs and config.env(env).weight and HOOK not in envs[env].hooks:
            raise ValueError(
                f"{envs[env].path}: --algo.teacher self needs def {HOOK}(task, trajectory) here: "
                f"what the teacher of {name} reads before its reply"
            )


def taught_player(base: type[EpisodeRunner], limits: Limits) -> type[EpisodeRunner]:
    """A player of groups that also asks what teachers read."""

    class TaughtPlayer(base):
        async def play_once(self, group: Group) -> list[Trajectory]:
            trajectories = await super().play_once(group)
            env = self.envs[group.task.env]
            if HOOK in env.hooks and not group.label:  # which an evaluation has
                scored = [t for t in succeeded(trajectories) if (t.actor, t.env) in limits]
                await wait_for_all([self.teach(env, group.task, t, scored) for t in scored])
            return trajectories

        async def teach(
            self, env: Env, task: Task, t: Trajectory, scored: list[Trajectory]
        ) -> None:
            """What goes wrong is a failed trajectory with its reason."""
            same = [other for other in scored if (other.actor, other.seat) == (t.actor, t.seat)]
            asking = ask(env, task, t, same)
            try:
                messages = await asyncio.wait_for(asking, self.config.episode_timeout_s)
                if messages:
                    chat = self.actors[t.actor].chat.with_variables(row_variables(task.row))
                    ids = prompt_ids(chat, t, messages, env.turn_loop.tools_of(task))
                    check_length(t, ids, *limits[t.actor, t.env])
                    t.teacher_messages, t.teacher_ids = messages, ids
            except Exception as error:
                reason = self.reason_of(error, f"{HOOK}()", note="")
                t.status, t.error, t.reward = "failed", reason, None

    return TaughtPlayer


async def ask(env: Env, task: Task, t: Trajectory, scored: list[Trajectory]) -> list[Message]:
    """What teacher_prompt() gives, a text as one user message; [] if the episode has no teacher.
    `scored`: the actor's trajectories of the group. Raises ValueError for anything else."""
    replies = [m.get("content") or "" for m in t.messages if m["role"] == "assistant"]
    given = {"task": task, "prompt": task.messages, "messages": t.messages, "actor": t.actor}
    given |= {"trajectory": t, "trajectories": scored, "completion": replies[-1] if replies else ""}
    hook = env.hooks[HOOK]
    value = await hook(task, given)
    what = f"{hook.path}: what {HOOK}() returned"
    if value is None:
        return []
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if not value or not is_list(value, dict):
        raise ValueError(
            f"{what} is {shorten(value)}; it must be a text, a list of messages, or None for no "
            "teacher"
        )
    try:
        messages = canonical_messages(list(value))
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            f"{what} ends in an assistant's message; the reply of the episode follows it: end in "
            "a user's"
        )
    return messages


def prompt_ids(
    chat: Chat, t: Trajectory, messages: list[Message], tools: list[dict[str, Any]] | None
) -> list[list[int]]:
    """For each stream of turns what stands before its first reply where the conversation begins
    with these messages. The streams after the first, which begin where the chat template rewrote
    history, have the turns up to there behind them."""
    replies = [i for i, message in enumerate(t.messages) if message["role"] == "assistant"]
    replies = replies[-len(t.turns) :]
    found = []
    for number, (turn, place) in enumerate(zip(t.turns, replies, strict=True)):
        if number and not turn.is_fresh:
            continue
        history = []
        for message in t.messages[replies[0] : place]:
            if message["role"] == "assistant" and not message.get("tool_calls"):
                message = chat.assistant_message(message.get("content") or "")
            history.append(message)
        found.append(chat.prompt_ids([*messages, *history], tools))
    return found


def check_length(t: Trajectory, ids: Sequence[list[int]], limit: int, name: str) -> None:
    """Raises ValueError if what the teacher reads is too long."""
    streams = []
    for number, turn in enumerate(t.turns):
        if turn.is_fresh or not number:
            streams.append(0)
        else:
            streams[-1] += len(turn.new_ids)
        streams[-1] += len(turn.completion.token_ids)
    for prompt, num_after in zip(ids, streams, strict=True):
        total = len(prompt) + num_after
        if total > limit:
            raise ValueError(
                f"{HOOK}() gave {len(prompt)} tokens for task {t.task_id}: with the reply they are "
                f"{total}, above {name}={limit}; shorten it"
            )


def turns_as_read(t: Trajectory) -> list[Turn]:
    """The turns as the teacher reads them."""
    prompts, turns = iter(t.teacher_ids), []
    for number, turn in enumerate(t.turns):
        is_first = turn.is_fresh or not number
        turns.append(replace(turn, new_ids=next(prompts)) if is_first else turn)
    return turns
