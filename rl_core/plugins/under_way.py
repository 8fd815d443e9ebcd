"""--max_staleness: what the actors of a group have been answered so far. A checkpoint keeps it, and
the run that goes on answers the same again: hooks are called once more, but nothing is sampled a
second time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Container, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

from pydantic import TypeAdapter

from rl_core.data.rows import read_json
from rl_core.plugins.run_files import write_trajectories
from rl_core.sampling.rollout import Group
from rl_core.types import Completion, Message, SamplingParams, Trajectory

FILE = "under_way.rank_"  # begins the name of each rank's file in a checkpoint


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
    gate: Any = None  # a plugins.fixed_order.Gate
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
            known = self.answers[turn] = Answer(asked=checksum, completion=Completion())
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
        self, turn: str, asked: tuple, ask: Callable[[], Awaitable[tuple[Message, Completion]]]
    ) -> tuple[Message, Completion]:
        answer = self.answer(turn, *asked)
        if answer.reply is None:
            answer.reply, answer.completion = await ask()
        return dict(answer.reply), answer.completion

    def ended(self) -> list[Trajectory] | None:
        """Its trajectories, if it has ended."""
        return self.trajectories and [copy_of(t) for t in self.trajectories]

    def end(self, trajectories: list[Trajectory]) -> None:
        """Keeps them as they are: what scores the group adds to its own."""
        self.answers.clear()
        self.trajectories = [copy_of(t) for t in trajectories]


@dataclass(kw_only=True, slots=True)
class GroupUnderWay:
    """Of one group. It is empty until the group begins."""

    # By their number, or rollout.SCORING.
    episodes: dict[str, EpisodeUnderWay] = field(default_factory=dict)
    make_gate: Callable[[], Any] | None = None

    def episode(self, name: int | str) -> EpisodeUnderWay:
        found = self.episodes.setdefault(str(name), EpisodeUnderWay())
        if self.make_gate is not None and found.gate is None:
            found.gate = self.make_gate()
        return found


def copy_of(t: Trajectory) -> Trajectory:
    """With rewards and metrics of its own."""
    parts, metrics = dict(t.reward_parts), dict(t.metrics)
    return replace(t, reward_parts=parts, metrics=metrics, turn_rewards=list(t.turn_rewards))


def write_groups(file: Path, groups: Iterable[Group]) -> None:
    """Groups that have begun, one a line."""
    write_trajectories(file, [group_row(group) for group in groups])


def group_row(group: Group) -> dict[str, Any]:
    episodes = {}
    for name, episode in group.under_way.episodes.items() if group.under_way else ():
        episodes[name] = {"answers": episode.answers, "trajectories": episode.trajectories}
    return {
        "position": group.position,
        "version": group.version,
        "env": group.task.env,
        "task": group.task.id,
        "trajectories": group.trajectories,
        "episodes": episodes,
    }


def read_groups(
    checkpoint: Path, positions: Container[int], oldest: int
) -> dict[int, dict[str, Any]]:
    """Position -> what group_row() gave, of these positions. Groups that began before version
    `oldest` are left out: they would be too stale."""
    found = {}
    for file in sorted(checkpoint.glob(f"{FILE}*")):
        for row in read_json(file):
            if row["position"] in positions and row["version"] >= oldest:
                found[row["position"]] = row
    return found


def restore(group: Group, row: dict[str, Any]) -> None:
    """The group goes on where the run before ended."""
    group.version = row["version"]
    group.trajectories = TypeAdapter(list[Trajectory]).validate_python(row["trajectories"])
    episodes = TypeAdapter(dict[str, EpisodeUnderWay]).validate_python(row["episodes"])
    group.under_way = GroupUnderWay(episodes=episodes)
