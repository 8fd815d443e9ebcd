"""What the actors of a group have been answered so far. A checkpoint keeps it (--max_staleness),
and the run that goes on answers the same again: hooks are called once more, but nothing is sampled
a second time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

from rl_core.types import Completion, Message, SamplingParams, Trajectory, Turn

SCORING = "group"  # in the place of an episode's number: what scores the whole group


@dataclass(kw_only=True, slots=True)
class Answer:
    """To one turn of a conversation."""

    asked: int  # checksum of the prompt, and of how to sample
    completion: Completion  # without a finish_reason while it is sampled
    reply: Message | None = None  # from an actor behind an API


@dataclass(kw_only=True, slots=True)
class EpisodeUnderWay:
    # By conversation and number of the turn.
    answers: dict[str, Answer] = field(default_factory=dict)
    trajectories: list[Trajectory] | None = None  # once it has ended
    gate: Any = None  # an plugins.fixed_order.Gate
    num_asked: Counter[str] = field(default_factory=Counter)  # since it began in this process

    def begin(self) -> None:
        """The episode is played from its beginning, with the answers that are known."""
        self.num_asked.clear()

    def answer(self, turn: str, *asked: Any) -> Answer:
        """What the turn was answered so far. A hook that asks otherwise than before gets a new
        answer, and so does one that begins two conversations of one label."""
        checksum = crc32(repr(asked).encode())
        self.num_asked[turn] += 1
        if self.num_asked[turn] > 1:
            turn = f"{turn}~{self.num_asked[turn]}"
        known = self.answers.get(turn)
        if known is None or known.asked != checksum:
            nothing = Completion(
                token_ids=[], logprobs=[], text="", finish_reason="", policy_version=-1
            )
            known = self.answers[turn] = Answer(asked=checksum, completion=nothing)
        return known

    async def complete(
        self,
        turn: str,
        prompt_ids: list[int],
        params: SamplingParams,
        sample: Callable[..., Awaitable[Completion]],
    ) -> Completion:
        """`sample(params, begun=completion)` continues what was sampled so far."""
        answer = self.answer(turn, list(prompt_ids), params)
        while not answer.completion.finish_reason:
            if self.gate is None:
                answer.completion = await sample(params, begun=answer.completion)
            else:
                answer.completion = await self.gate.sample(turn, params, answer.completion, sample)
        return answer.completion

    async def chat(
        self, turn: str, asked: list, ask: Callable[[], Awaitable[tuple[Message, Completion]]]
    ) -> tuple[Message, Completion]:
        answer = self.answer(turn, *asked)
        if answer.reply is None:
            answer.reply, answer.completion = await ask()
        return dict(answer.reply), answer.completion

    def end(self, trajectories: list[Trajectory]) -> None:
        """Keeps them as they are: what scores the group adds to its own."""
        self.answers.clear()
        self.trajectories = [copy_of(t) for t in trajectories]


@dataclass(kw_only=True, slots=True)
class GroupUnderWay:
    """Of one group. It is empty until the group begins."""

    # By their number, or SCORING.
    episodes: dict[str, EpisodeUnderWay] = field(default_factory=dict)
    make_gate: Callable[[], Any] | None = None

    def episode(self, name: int | str) -> EpisodeUnderWay:
        found = self.episodes.setdefault(str(name), EpisodeUnderWay())
        if self.make_gate is not None and found.gate is None:
            found.gate = self.make_gate()
        return found

    def ended(self, index: int) -> list[Trajectory] | None:
        """The trajectories of an episode that has ended."""
        trajectories = self.episode(index).trajectories
        return trajectories and [copy_of(t) for t in trajectories]


def copy_of(t: Trajectory) -> Trajectory:
    """With rewards and metrics of its own."""
    parts, metrics = dict(t.reward_parts), dict(t.metrics)
    return replace(t, reward_parts=parts, metrics=metrics, turn_rewards=list(t.turn_rewards))


def episodes_from(rows: dict[str, dict[str, Any]]) -> dict[str, EpisodeUnderWay]:
    """Of JSON, as a checkpoint has them."""
    found = {}
    for name, row in rows.items():
        answers = {turn: answer_from(answer) for turn, answer in row["answers"].items()}
        trajectories = row["trajectories"]
        if trajectories is not None:
            trajectories = [trajectory_from(t) for t in trajectories]
        found[name] = EpisodeUnderWay(answers=answers, trajectories=trajectories)
    return found


def answer_from(row: dict[str, Any]) -> Answer:
    return Answer(**row | {"completion": completion_from(row["completion"])})


def trajectory_from(row: dict[str, Any]) -> Trajectory:
    turns = [
        Turn(**turn | {"completion": completion_from(turn["completion"])}) for turn in row["turns"]
    ]
    return Trajectory(**row | {"turns": turns})


def completion_from(row: dict[str, Any]) -> Completion:
    return Completion(**row | {"newer_versions": [tuple(pair) for pair in row["newer_versions"]]})
