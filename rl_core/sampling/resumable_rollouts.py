"""--max_staleness: checkpoints save the completions of unfinished episodes. A resumed run replays
them instead of sampling again: hooks are called once more, but nothing is sampled twice."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

from pydantic import TypeAdapter

from rl_core.data.image_parts import load_images, set_images
from rl_core.data.row_files import read_json
from rl_core.sampling.conversation import Conversation, TokenConversation
from rl_core.sampling.groups import Group
from rl_core.types import Completion, JSONObject, Message, SamplingParams, Trajectory

if TYPE_CHECKING:
    from rl_core.sampling.deterministic_rollouts import Episode, Window

FILE = "under_way.rank_"  # Prefix of each rank's file in a checkpoint.
TRAJECTORIES = TypeAdapter(list[Trajectory])


@dataclass(kw_only=True, slots=True)
class SavedCompletion:
    """The completion of one turn of a conversation."""

    asked: int  # checksum of the prompt and the sampling parameters
    completion: Completion  # no finish_reason until it is complete
    reply: Message | None = None  # message from an actor behind an API


ANSWERS = TypeAdapter(dict[str, SavedCompletion])


class EpisodeReplay:
    """The turns of one episode: those that were sampled before, and those of this process."""

    def __init__(
        self, episode: Episode, answers: dict[str, SavedCompletion], window: Window | None
    ):
        self.episode = episode
        self.answers = answers  # Keys: conversation and number of the turn.
        self.window = window
        self.used: set[str] = set()  # Keys of turns since the episode began.

    def answer(self, turn: str, *asked: object) -> SavedCompletion:
        """The saved completion of a turn. A hook that asks for something else than before gets a
        new one, and so does a second conversation with the same label."""
        while turn in self.used:
            turn += "~"
        self.used.add(turn)
        checksum = crc32(repr(asked).encode())
        known = self.answers.get(turn)
        if known is None or known.asked != checksum:
            known = SavedCompletion(asked=checksum, completion=Completion())
            self.answers[turn] = known
        return known

    async def generate(
        self, talk: TokenConversation, params: SamplingParams, seed: int
    ) -> Completion:
        answer = self.answer(talk.next_turn, list(talk.stream.prompt_ids), params)
        while not answer.completion.finish_reason:
            if self.window is None:
                sampling = talk.generate(params, seed, answer.completion)
            else:
                sampling = self.window.generate(self.episode, talk, params, seed, answer.completion)
            answer.completion = await sampling
        return answer.completion

    async def chat(self, talk: Conversation, seed: int) -> tuple[Message, Completion]:
        answer = self.answer(talk.next_turn, talk.history, talk.tools, talk.turn_params)
        if answer.reply is None:
            answer.reply, answer.completion = await talk.chat(seed)
        return dict(answer.reply), answer.completion


class Replays:
    """The replays of all running groups of a rank."""

    def __init__(self, window: Window | None = None):
        """`window`: bounds the tokens of turns; see deterministic_rollouts.py."""
        self.window = window
        # Group -> episode, or episode_runner.SCORING -> replay.
        self.groups: dict[str, dict[str, EpisodeReplay]] = defaultdict(dict)

    def start(self, group: Group, name: int | str) -> EpisodeReplay:
        """The replay of an episode that begins, or begins again."""
        episodes = self.groups[group.id]
        if str(name) not in episodes:
            episodes[str(name)] = EpisodeReplay((group.id, str(name)), {}, self.window)
        episodes[str(name)].used.clear()
        return episodes[str(name)]

    def end(self, group: Group) -> None:
        self.groups.pop(group.id, None)

    def row_of(self, group: Group) -> JSONObject:
        """The row of a checkpoint for a group that has begun."""
        episodes: dict[str, JSONObject] = {}
        for name, replay in self.groups.get(group.id, {}).items():
            episodes[name] = {"answers": replay.answers, "trajectories": None}
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
                self.groups[group.id][name] = EpisodeReplay((group.id, name), answers, self.window)


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
