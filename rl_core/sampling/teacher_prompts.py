"""Prompts of self-teachers, which replace the student's prompt before the same reply. The hook
teacher_prompt() returns one after an episode is scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from rl_core.config import Config
from rl_core.data.canonical_messages import canonical_messages
from rl_core.data.chat import Chat
from rl_core.data.episodes import succeeded
from rl_core.data.image_parts import images_of
from rl_core.data.messages import shorten
from rl_core.data.task_rows import row_variables
from rl_core.sampling.actor import Actor
from rl_core.sampling.deadlines import run_within, wait_for_all
from rl_core.sampling.env import Env
from rl_core.sampling.episode import is_list
from rl_core.sampling.episode_runner import EpisodeRunner
from rl_core.sampling.groups import Group
from rl_core.types import JSONObject, Message, Task, Trajectory, Turn

HOOK = "teacher_prompt"
# (actor, environment) -> (most tokens of prompt and reply that its teacher reads, the limit's
# name).
Limits = Mapping[tuple[str, str], tuple[int, str]]


def check_taught(config: Config, name: str, envs: dict[str, Env]) -> None:
    """Raises ValueError if a self-taught actor plays in an environment without teacher_prompt()."""
    for env in config.self_taught:
        if env in envs and config.env(env).is_trained_in and HOOK not in envs[env].hooks:
            raise ValueError(
                f"{envs[env].path}: --algo.teacher self needs def {HOOK}(task, trajectory), which "
                f"returns the prompt of {name}'s teacher; define it"
            )


class TeacherPrompts:
    """Asks teacher_prompt() of the environment once an episode is scored. EpisodeRunner calls it
    after each group."""

    def __init__(self, limits: Limits):
        self.limits = limits

    async def __call__(
        self, player: EpisodeRunner, group: Group, trajectories: list[Trajectory]
    ) -> None:
        env = player.envs[group.task.env]
        if HOOK not in env.hooks or group.label:  # Groups of an evaluation have a label.
            return
        scored = [t for t in succeeded(trajectories) if (t.actor, t.env) in self.limits]
        await wait_for_all([self.ask(player, env, group.task, t, scored) for t in scored])

    async def ask(
        self, player: EpisodeRunner, env: Env, task: Task, t: Trajectory, scored: list[Trajectory]
    ) -> None:
        """Adds the teacher's prompt to a trajectory. An error fails the trajectory."""
        same = [other for other in scored if (other.actor, other.player) == (t.actor, t.player)]
        asking = ask(env, task, t, same)
        try:
            messages = await run_within(asking, player.config.episode_timeout_s)
            if messages:
                speaker = cast(Actor, player.actors[t.actor])  # Trained, so that it has a chat.
                assert speaker.chat is not None
                chat = speaker.chat.with_variables(row_variables(task.row))
                ids = prompt_ids(chat, t, messages, env.turn_loop.tools_of(task))
                check_length(t, ids, *self.limits[t.actor, t.env])
                t.teacher_messages, t.teacher_ids = messages, ids
        except Exception as error:
            reason = player.reason_of(error, f"{HOOK}()", note="")
            t.status, t.error, t.reward = "failed", reason, None


def teacher_limits(config: Config) -> Limits:
    """The largest number of tokens of a reply and its teacher's prompt, for each actor that is its
    own teacher."""
    # Imported here because it imports torch, which rl-core check does not need.
    from rl_core.models.loading import load_model_config, max_positions

    limits = {}
    for name in config.trained:
        envs = config.of(name).self_taught
        if not envs:
            continue
        model = config.actors[name].model
        assert model
        positions, key = max_positions(load_model_config(model))
        limit = config.of(name).learner.microbatch_tokens * config.cp, "--learner.microbatch_tokens"
        if positions and positions < limit[0]:
            limit = positions, f"the model's {key}"
        limits |= {(name, env): limit for env in envs}
    return limits


async def ask(env: Env, task: Task, t: Trajectory, scored: list[Trajectory]) -> list[Message]:
    """Messages of teacher_prompt(), where a text is one user message; [] if the episode has no
    teacher. `scored`: the actor's trajectories of the group. Raises ValueError for other values."""
    replies = [m.get("content") or "" for m in t.messages if m["role"] == "assistant"]
    arguments = {"task": task, "prompt": task.messages, "messages": t.messages, "actor": t.actor}
    completion = replies[-1] if replies else ""
    arguments |= {"trajectory": t, "trajectories": scored, "completion": completion}
    hook = env.hooks[HOOK]
    value = await hook(task, arguments)
    source = f"{hook.path}: the value of {HOOK}()"
    if value is None:
        return []
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if not value or not is_list(value, dict):
        raise ValueError(
            f"{source} is {shorten(value)}; it must be a text, a list of messages, or None for no "
            "teacher"
        )
    try:
        messages = canonical_messages(list(value))
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            f"{source} ends with an assistant's message; the reply of the episode follows it: end "
            "with a user's"
        )
    return messages


def prompt_ids(
    chat: Chat, t: Trajectory, messages: list[Message], tools: list[JSONObject] | None
) -> list[list[int]]:
    """For each token stream of the conversation the ids before its first reply, if the conversation
    began with these messages. Streams after the first begin where the chat template rewrote
    history, and contain the turns up to there."""
    replies = [i for i, message in enumerate(t.messages) if message["role"] == "assistant"]
    replies = replies[-len(t.turns) :]
    prompts = []
    for number, (turn, index) in enumerate(zip(t.turns, replies, strict=True)):
        if number and not turn.is_fresh:
            continue
        history = []
        for message in t.messages[replies[0] : index]:
            if message["role"] == "assistant" and not message.get("tool_calls"):
                message = chat.template.assistant_message(message.get("content") or "")
            history.append(message)
        prompts.append(chat.prompt_ids([*messages, *history], tools))
    return prompts


def check_length(t: Trajectory, ids: Sequence[list[int]], limit: int, name: str) -> None:
    """Raises ValueError if a stream with the teacher's prompt is too long."""
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
    """The turns with the teacher's prompts. Images of both prompts are with the first turn."""
    prompts, turns = iter(t.teacher_ids), []
    images = tuple(images_of(t.teacher_messages))
    for number, turn in enumerate(t.turns):
        if turn.is_fresh or not number:
            turn = replace(turn, new_ids=next(prompts), images=images + turn.images)
        turns.append(turn)
    return turns
