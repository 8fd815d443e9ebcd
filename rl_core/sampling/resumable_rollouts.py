"""--max_staleness: checkpoints save the completions of unfinished episodes. A resumed run replays
them instead of sampling again: hooks are called once more, but nothing is sampled twice."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from zlib import crc32

from pydantic import TypeAdapter

from rl_core.data.images import load_images, set_images
from rl_core.data.rows import read_json
from rl_core.sampling.actor import Conversation, EpisodeActors
from rl_core.sampling.env import Env
from rl_core.sampling.rollout import EpisodeRunner, Group, Key, RolloutWorker
from rl_core.types import Completion, JSONObject, Message, SamplingParams, Trajectory

FILE = "under_way.rank_"  # Prefix of each rank's file in a checkpoint.
TRAJECTORIES = TypeAdapter(list[Trajectory])


@dataclass(kw_only=True, slots=True)
class SavedCompletion:
    """The completion of one turn of a conversation."""

    asked: int  # checksum of the prompt and the sampling parameters
    completion: Completion  # no finish_reason until it is complete
    reply: Message | None = None  # message from an actor behind an API


ANSWERS = TypeAdapter(dict[str, SavedCompletion])


@dataclass(kw_only=True, slots=True)
class EpisodeRecord:
    # Keys: conversation and number of the turn.
    answers: dict[str, SavedCompletion] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)  # keys of turns since the episode began
    num_sampled: int = 0  # turns that are being sampled, with --deterministic
    held_in: int = -1  # the last window in which a turn waited


class ResumableConversation(Conversation):
    """A conversation that replays saved completions instead of sampling."""

    def __init__(self, player: ResumablePlayer, group: str, episode: EpisodeRecord, *args):
        super().__init__(*args)
        self.player = player
        self.group = group
        self.episode = episode

    def answer(self, *asked: object) -> SavedCompletion:
        """The saved completion of the next turn. A hook that asks for something else than before
        gets a new one, and so does a second conversation with the same label."""
        turn = self.next_turn
        while turn in self.episode.used:
            turn += "~"
        self.episode.used.add(turn)
        checksum = crc32(repr(asked).encode())
        known = self.episode.answers.get(turn)
        if known is None or known.asked != checksum:
            known = self.episode.answers[turn] = SavedCompletion(
                asked=checksum, completion=Completion()
            )
        return known

    async def _generate(self, params: SamplingParams, seed: int, **begun: Completion) -> Completion:
        assert self.stream
        answer = self.answer(list(self.stream.prompt_ids), params)
        while not answer.completion.finish_reason:
            answer.completion = await self.continue_turn(params, seed, answer.completion)
        return answer.completion

    async def continue_turn(
        self, params: SamplingParams, seed: int, begun: Completion
    ) -> Completion:
        return await super()._generate(params, seed, begun=begun)

    async def _chat(self, seed: int) -> tuple[Message, Completion]:
        answer = self.answer(self.history, self.tools, self.turn_params)
        if answer.reply is None:
            answer.reply, answer.completion = await super()._chat(seed)
        return dict(answer.reply), answer.completion


class ResumablePlayer(EpisodeRunner):
    conversation = ResumableConversation

    def __init__(self, *args):
        super().__init__(*args)
        # Group -> episode, or rollout.SCORING -> record.
        self.records: dict[str, dict[str, EpisodeRecord]] = defaultdict(dict)

    async def play(self, group: Group) -> list[Trajectory]:
        trajectories = await super().play(group)
        self.records.pop(group.id, None)
        return trajectories

    def players(self, env: Env, group: Group, name: int | str, seed: int) -> EpisodeActors:
        players = super().players(env, group, name, seed)
        record = self.records[group.id].setdefault(str(name), EpisodeRecord())
        record.used.clear()
        make = partial(self.conversation, self, group.id, record)
        for actor_name, actor in players.items():
            players[actor_name] = replace(actor, make_conversation=make)
        return players

    def row_of(self, group: Group) -> JSONObject:
        """The row of a checkpoint for a group that has begun."""
        episodes: dict[str, JSONObject] = {}
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

    def restore(self, group: Group, row: JSONObject) -> None:
        """Restores a group from its row of the checkpoint."""
        group.version = row["version"]
        group.trajectories = read_trajectories(row["trajectories"])
        for name, episode in row["episodes"].items():
            if episode["trajectories"]:
                group.ended[int(name)] = read_trajectories(episode["trajectories"])
            else:
                answers = ANSWERS.validate_python(episode["answers"])
                self.records[group.id][name] = EpisodeRecord(answers=answers)


class ResumableWorker(RolloutWorker):
    """A worker with a ResumablePlayer, which first continues the groups of an earlier process."""

    player: ResumablePlayer
    restored: Callable[[Group], Group]
    numbers: Iterator[int]
    num_restored: int

    def resume_groups(self, positions: list[int], restored: Callable[[Group], Group]) -> None:
        """Starts with the groups at these positions, as `restored` returns them. The positions are
        assigned to ranks round-robin."""
        numbers = [n for n, position in enumerate(positions) if self.is_own(position)]
        self.numbers = iter(numbers)
        self.num_restored = len(positions)
        self.restored = restored

    def is_own(self, position: int) -> bool:
        return position % self.ranks.size == self.ranks.rank

    def _draw(self, label: str = "") -> int:
        if label:
            return super()._draw(label)
        number = next(self.numbers, None)
        return self.num_restored + super()._draw() if number is None else number

    def _begin(self, key: Key) -> None:
        self.pending[key] = self.restored(self.pending[key])
        super()._begin(key)


def read_trajectories(values: list[JSONObject]) -> list[Trajectory]:
    trajectories = TRAJECTORIES.validate_python(values)
    for trajectory in trajectories:
        set_images(trajectory)
    return trajectories


def with_loaded_images(row: JSONObject, folder: Path) -> JSONObject:
    """The row of a checkpoint with the images of its trajectories' messages."""
    of_episodes = [episode["trajectories"] or [] for episode in row["episodes"].values()]
    for trajectory in itertools.chain(row["trajectories"], *of_episodes):
        load_images(trajectory, folder)
    return row


def read_groups(
    checkpoint: Path, positions: Container[int], oldest: int, images: Path | None = None
) -> dict[int, JSONObject]:
    """Position -> row of row_of(), for these positions. Leaves out groups that began before version
    `oldest`, which would be too stale. `images`: folder of images/, by default the
    checkpoint."""
    rows = {}
    for file in sorted(checkpoint.glob(f"{FILE}*")):
        for row in read_json(file):
            if row["position"] in positions and row["version"] >= oldest:
                rows[row["position"]] = with_loaded_images(row, images or checkpoint)
    return rows
