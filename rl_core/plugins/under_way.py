"""--max_staleness: what the actors of a group have been answered so far. A checkpoint keeps it, and
the run that goes on answers the same again: hooks are called once more, but nothing is sampled a
second time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

from pydantic import TypeAdapter

from rl_core.data.rows import read_json
from rl_core.sampling.actor import Conversation, EpisodeActors
from rl_core.sampling.env import Env
from rl_core.sampling.rollout import EpisodeRunner, Group, Key, RolloutWorker
from rl_core.types import Completion, Message, SamplingParams, Trajectory

FILE = "under_way.rank_"  # begins the name of each rank's file in a checkpoint
TRAJECTORIES = TypeAdapter(list[Trajectory])


@dataclass(kw_only=True, slots=True)
class Answer:
    """To one turn of a conversation."""

    asked: int  # checksum of the prompt, and of how to sample
    completion: Completion  # without a finish_reason while it is sampled
    reply: Message | None = None  # from an actor behind an API


ANSWERS = TypeAdapter(dict[str, Answer])


@dataclass(kw_only=True, slots=True)
class EpisodeRecord:
    # By conversation and number of the turn.
    answers: dict[str, Answer] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)  # those that were given since it began
    num_sampled: int = 0  # turns that are sampled, with --rollout.fixed_order
    held_in: int = -1  # the window in which one was held last


class ResumableConversation(Conversation):
    """What was answered before the run was stopped is not sampled again."""

    def __init__(self, player: ResumablePlayer, group: str, episode: EpisodeRecord, *args: Any):
        super().__init__(*args)
        self.player = player
        self.group = group
        self.episode = episode

    def answer(self, *asked: Any) -> Answer:
        """What the turn was answered so far. A hook that asks otherwise than before gets a new
        answer, and so does one that begins two conversations of one label."""
        turn = self.next_turn
        while turn in self.episode.taken:
            turn += "~"
        self.episode.taken.add(turn)
        checksum = crc32(repr(asked).encode())
        known = self.episode.answers.get(turn)
        if known is None or known.asked != checksum:
            known = self.episode.answers[turn] = Answer(asked=checksum, completion=Completion())
        return known

    async def _generate(self, params: SamplingParams, seed: int, **begun: Any) -> Completion:
        answer = self.answer(list(self.stream.prompt_ids), params)
        while not answer.completion.finish_reason:
            answer.completion = await self.go_on(params, seed, answer.completion)
        return answer.completion

    async def go_on(self, params: SamplingParams, seed: int, begun: Completion) -> Completion:
        return await super()._generate(params, seed, begun=begun)

    async def _chat(self, seed: int) -> tuple[Message, Completion]:
        answer = self.answer(self.history, self.tools, self.turn_params)
        if answer.reply is None:
            answer.reply, answer.completion = await super()._chat(seed)
        return dict(answer.reply), answer.completion


class RecordingPlayer(EpisodeRunner):
    conversation = RecordedConversation

    def __init__(self, *args: Any):
        super().__init__(*args)
        # By group, and by episode or rollout.SCORING.
        self.records: dict[str, dict[str, EpisodeRecord]] = defaultdict(dict)

    async def play(self, group: Group) -> list[Trajectory]:
        trajectories = await super().play(group)
        self.records.pop(group.id, None)
        return trajectories

    def players(self, env: Env, group: Group, name: int | str, seed: int) -> EpisodeActors:
        players = super().players(env, group, name, seed)
        record = self.records[group.id].setdefault(str(name), EpisodeRecord())
        record.taken.clear()
        make = partial(self.conversation, self, group.id, record)
        for actor_name, actor in players.items():
            players[actor_name] = replace(actor, make_conversation=make)
        return players

    def row_of(self, group: Group) -> dict[str, Any]:
        """What a checkpoint keeps of a group that has begun."""
        episodes: dict[str, dict[str, Any]] = {}
        for name, record in self.records.get(group.id, {}).items():
            episodes[name] = {"answers": record.answers, "trajectories": None}
        for index, trajectories in group.ended.items():
            episodes[str(index)] = {"answers": {}, "trajectories": trajectories}
        return {
            "position": group.position,
            "version": group.version,
            "env": group.task.env,
            "task": group.task.id,
            "trajectories": group.trajectories,
            "episodes": {} if group.trajectories else episodes,
        }

    def restore(self, group: Group, row: dict[str, Any]) -> None:
        """The group goes on where the run before ended."""
        group.version = row["version"]
        group.trajectories = TRAJECTORIES.validate_python(row["trajectories"])
        for name, episode in row["episodes"].items():
            if episode["trajectories"]:
                group.ended[int(name)] = TRAJECTORIES.validate_python(episode["trajectories"])
            else:
                answers = ANSWERS.validate_python(episode["answers"])
                self.records[group.id][name] = EpisodeRecord(answers=answers)


class ResumableWorker(RolloutWorker):
    """Its player is a ResumablePlayer. It begins with the groups that were under way when a run
    ended."""

    restored: Callable[[Group], Group]
    own: Iterator[int]
    num_restored: int

    def go_on(self, positions: list[int], restored: Callable[[Group], Group]) -> None:
        """The first groups without a label are those at these positions, and go on as `restored`
        gives them. Ranks take them in turn."""
        self.own = iter([n for n, position in enumerate(positions) if self.is_own(position)])
        self.num_restored = len(positions)
        self.restored = restored

    def is_own(self, position: int) -> bool:
        return position % self.ranks.size == self.ranks.rank

    def _draw(self, label: str = "") -> int:
        if label:
            return super()._draw(label)
        number = next(self.own, None)
        return self.num_restored + super()._draw() if number is None else number

    def _begin(self, key: Key) -> None:
        self.pending[key] = self.restored(self.pending[key])
        super()._begin(key)


def read_groups(
    checkpoint: Path, positions: Container[int], oldest: int
) -> dict[int, dict[str, Any]]:
    """Position -> what row_of() gave, of these positions. Groups that began before version `oldest`
    are left out: they would be too stale."""
    found = {}
    for file in sorted(checkpoint.glob(f"{FILE}*")):
        for row in read_json(file):
            if row["position"] in positions and row["version"] >= oldest:
                found[row["position"]] = row
    return found
