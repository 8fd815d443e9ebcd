"""What a hook sees of the actors: `reply = await actors["bob"].respond(messages)`, and what it makes of a reply."""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rl_core.config import nearest
from rl_core.data.tasks import check_messages, shorten
from rl_core.sampling.hooks import wait_for_all
from rl_core.sampling.rewards import copied, finite_reward, reward_parts
from rl_core.sampling.schedule import check_speaker
from rl_core.types import Message, SamplingParams, Task, Trajectory

if TYPE_CHECKING:
    from rl_core.sampling.actor import Conversation, Speaker

# How tokens are drawn: what is trained must come from the distribution that the learner computes.
DRAWING = ("temperature", "top_p", "top_k", "min_p")
SAMPLING = ("max_tokens", "stop", *DRAWING)


class Voices(dict[str, "Voice"]):
    """Name -> what a hook may ask of that actor, for one episode."""

    def __init__(self, speakers: Mapping[str, Speaker], task: Task):
        super().__init__({name: Voice(speaker, task) for name, speaker in speakers.items()})

    def __missing__(self, name: str) -> Voice:
        raise KeyError(f"{name!r} is no actor; {nearest(str(name), sorted(self))}")


class Voice:
    """One actor in one episode."""

    def __init__(self, speaker: Speaker, task: Task):
        self.name, self._speaker, self._task = speaker.name, speaker, task
        self._asked: Counter[str] = Counter()

    async def respond(
        self, messages: str | Sequence[Message], n: int | None = None, tools: list | None = None, **sampling
    ) -> Reply | list[Reply]:
        """What the actor answers: one Reply, or a list of `n`, drawn side by side. Text is one message of the user.
        `sampling`: max_tokens, stop, and temperature, top_p, top_k, min_p, with which a reply cannot be trained. Raises
        ValueError for what is unknown, and if the chat template refuses the messages."""
        if n is not None and (type(n) is not int or n < 1):
            raise ValueError(f"respond(n={n!r}) must be a whole number of at least 1")
        messages = as_messages(messages)
        params = changed_params(self._speaker.params, sampling)
        # Not a running number: whose turn comes first may hang on the time that others take.
        asked = f"{zlib.crc32(json.dumps([messages, tools], default=str).encode()):08x}"
        replies = []
        for _ in range(n or 1):
            label = f"{asked}-{self._asked[asked]}"
            self._asked[asked] += 1
            conversation = self._speaker.converse(copied(messages), tools, params, label)
            replies.append(
                Reply(self._speaker, self._task, conversation, [name for name in DRAWING if name in sampling])
            )
        await wait_for_all([reply.speak() for reply in replies])
        return replies[0] if n is None else replies


class Reply:
    """What an actor said, at the end of its conversation. `respond` goes on with that conversation, `fork` branches it,
    and `trajectory` scores it: a reply of which no trajectory is returned is not trained."""

    def __init__(self, speaker: Speaker, task: Task, conversation: Conversation, drawn_by: list[str]):
        self.text = ""  # what the actor said last
        self._speaker, self._task, self._conversation, self._drawn_by = speaker, task, conversation, drawn_by
        self._is_busy = False

    @property
    def actor(self) -> str:
        return self._speaker.name

    @property
    def answer(self) -> str:
        """The text without what was thought before it."""
        return without_thoughts(self.text)

    @property
    def messages(self) -> list[Message]:
        """A copy of the conversation, this reply at its end."""
        return copied(self._conversation.messages)

    @property
    def truncated(self) -> bool:
        """It was cut off by max_tokens, or there was no room for it."""
        return self._conversation.truncated

    async def respond(self, messages: str | Sequence[Message] = ()) -> Reply:
        """This reply, which has become the actor's answer to the further messages. Where they leave no room for one its text
        is "" and it is truncated."""
        self._check_idle()
        messages = as_messages(messages) if messages else []
        self._is_busy = True  # for good if this raises: tokens and messages may be out of step
        if self._conversation.add(copied(messages)):
            await self.speak()
        else:
            self.text = ""
        self._is_busy = False
        return self

    async def speak(self) -> None:
        self.text = (await self._conversation.respond()).text

    def fork(self) -> Reply:
        """A second reply with the same conversation so far, to go on with in another way."""
        self._check_idle()
        other = Reply(self._speaker, self._task, self._conversation.fork(), self._drawn_by)
        other.text = self.text
        return other

    def trajectory(
        self, reward: float | dict[str, float], *, seat: str = "", metrics: dict[str, float] | None = None
    ) -> Trajectory:
        """The conversation as it stands, scored; a dict is summed and each part logged. Of one group, trajectories of one
        actor and seat share a baseline. Raises ValueError for a reward that is not finite, and for a reply that was drawn
        otherwise than the learner assumes."""
        self._check_idle()
        if self._drawn_by and self._speaker.is_trainable:
            raise ValueError(
                f"a reply of {self.actor} for which {self._drawn_by[0]} was given cannot be trained or scored, because the run "
                f"says how it draws what it trains on; leave {self._drawn_by[0]} out, or return no trajectory of it"
            )
        try:
            parts = reward_parts(reward, "rollout", "")
        except ValueError:
            raise ValueError(
                f"trajectory(reward={shorten(reward)}) of {self.actor}: it must be a finite number, or a dict of named ones"
            ) from None
        scored = self._conversation.trajectory(
            self._task, reward=math.fsum(parts.values()), reward_parts=parts, metrics=dict(metrics or {})
        )
        scored.seat = seat
        return scored

    def _check_idle(self) -> None:
        if self._is_busy:
            raise ValueError(
                f"this reply of {self.actor} is still being continued, or failed to be; fork() it before each branch"
            )


def without_thoughts(text: str) -> str:
    """What follows </think>; all of it where that does not stand."""
    _, ended, answer = text.rpartition("</think>")
    return answer.lstrip("\n") if ended else text


def as_messages(messages: str | Sequence[Message]) -> list[Message]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else check_messages(messages)


def changed_params(params: SamplingParams, changes: dict[str, Any]) -> SamplingParams:
    """The parameters with what a hook gave. Raises ValueError for an unknown name, or a value that cannot be."""
    for name, value in changes.items():
        if name not in SAMPLING:
            raise ValueError(f"respond({name}=...) is unknown; {nearest(name, ('n', 'tools', *SAMPLING))}")
        if name == "stop":
            value = (value,) if isinstance(value, str) else tuple(value)
            is_good, rule = all(isinstance(s, str) and s for s in value), "a list of strings"
        elif name in ("max_tokens", "top_k"):
            lowest = int(name == "max_tokens")
            is_good, rule = type(value) is int and value >= lowest, f"a whole number of at least {lowest}"
        else:
            is_good = type(value) in (int, float) and 0 <= value < math.inf and (value <= 1 or name == "temperature")
            rule = "a number of at least 0" if name == "temperature" else "a number from 0 to 1"
        if not is_good:
            raise ValueError(f"respond({name}={shorten(value)}) must be {rule}")
        params = replace(params, **{name: value})
    return params


def check_trajectories(found: Any, task: Task, speakers: Mapping[str, Speaker], path: str) -> list[Trajectory]:
    """What a user's rollout() returned, as trajectories of the task. Raises ValueError for whatever else it may be."""
    at = f"{path}: rollout() returned"
    fix = "return [reply.trajectory(reward=...)]"
    if not isinstance(found, (list, tuple)) or not found or not all(isinstance(t, Trajectory) for t in found):
        raise ValueError(f"{at} {shorten(found)}; it must return a list of at least one Trajectory: {fix}")
    seen = set()
    for t in found:
        try:
            check_speaker(t.actor, speakers)
        except ValueError as error:
            raise ValueError(f"{at} a trajectory of an unknown actor: {error}") from None
        if not t.turns and speakers[t.actor].is_trainable:
            raise ValueError(f"{at} a trajectory of {t.actor}, who said nothing in it; {fix} of what an actor said")
        if t.turns and id(t.turns[-1]) in seen:
            raise ValueError(f"{at} two trajectories of {t.actor} that end in the same reply; return each reply once")
        seen.update(map(id, t.turns[-1:]))
        try:
            t.reward = finite_reward(t.reward)
            t.turn_rewards = [finite_reward(value) for value in t.turn_rewards]
        except ValueError as error:
            raise ValueError(f"{at} a trajectory of {t.actor} whose reward {error}") from None
        if t.turn_rewards and len(t.turn_rewards) != len(t.turns):
            raise ValueError(
                f"{at} a trajectory of {t.actor} with {len(t.turn_rewards)} turn_rewards for {len(t.turns)} turns; give one "
                "for each turn, or none"
            )
        if not isinstance(t.seat, str):
            raise ValueError(
                f"{at} a trajectory of {t.actor} with seat={shorten(t.seat)}; a seat is a name, such as 'first'"
            )
        t.task_id, t.env = task.id, task.env
    return list(found)
