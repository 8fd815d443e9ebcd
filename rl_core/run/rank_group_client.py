"""Actors with separate ranks (--actors.NAME.ranks), from the side of the ranks that play episodes.

A rank group is a separate process group: no collective spans two of them. Its engines and learners
answer HTTP requests (rank_group_server.py). Samples are sent as safetensors in JSON, metrics as
JSON.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_core.distributed import Ranks, all_gather_json
from rl_core.engines.rank_groups import RankGroup
from rl_core.engines.remote import EngineClient, RemoteEngine, engines_at, received_metrics
from rl_core.learning.sample_exchange import from_bytes, to_bytes
from rl_core.plugin import Plugin, RunState
from rl_core.sampling.engine import EngineDied
from rl_core.types import AnyJSON, JSONObject, RunError, TrainingSample


def connect_rank_groups(
    groups: list[RankGroup], ranks: Ranks, timeout_s: float
) -> dict[str, RemoteEngine]:
    """The engine of each actor with separate ranks. Waits until these ranks have loaded it."""
    engines = {}
    for number, group in enumerate(groups[1:], 1):
        engines |= engines_at(number, len(group.ranks), group.actors, ranks, timeout_s)
    return engines


def pairs_of(first: int, step: int, num_playing: int, num_learning: int) -> range:
    """Numbers of the (playing rank, learning rank) pairs from `first` on. Pair n has the ranks
    n % num_playing and n % num_learning, so each rank is in at least one."""
    return range(first, max(num_playing, num_learning), step)


class RankGroupClient(Plugin):
    """Sends samples as soon as they are made. Local learners learn in the meantime, and the step
    ends when the other groups have learned too."""

    def __init__(self, trainer: RunState):
        super().__init__(trainer)
        self.groups: list[RankGroup] = trainer.plan.rank_groups[1:]
        # Facts of the learners that were saved last, and of their snapshots that are updated.
        self.optimizers: dict[str, JSONObject] = {}
        self.copies: dict[str, None] = {}
        self.waited_for: list[RankGroup] = []  # Groups that learn in this step.

    def servers(self, group: RankGroup) -> list[EngineClient]:
        """The server on each rank of the group."""
        engine = self.trainer.actors[group.actors[0]].engine
        assert isinstance(engine, RemoteEngine)
        return engine.servers

    async def start(self) -> None:
        """Checks that all groups have the same checkpoint."""
        await self.ask_all("begin", step=self.trainer.step)

    async def on_samples(self, step: int, samples: dict[str, list[TrainingSample]]) -> None:
        config = self.trainer.config
        self.waited_for = []
        for group in self.groups:
            names = [name for name in group.actors if name in samples]
            names = [name for name in names if not (step + 1) % config.actors[name].update_every]
            if not names:
                continue
            self.waited_for.append(group)
            # The group's first rank gets all samples; the others get an empty list.
            sent = [to_text(samples[name]) for name in names]
            empty = [to_text([]) for _ in names]
            asked = []
            for number, server in self.pairs(group):
                content = sent if number == self.trainer.ranks.rank else empty
                content = dict(zip(names, content, strict=True))
                asked.append(self.ask(server, "learn", sender=number, step=step, samples=content))
            with self.naming(group):
                await asyncio.gather(*asked)

    async def after_learn(self, step: int) -> None:
        for group in self.waited_for:
            with self.trainer.timed("rank_groups"), self.naming(group):
                asked = []
                for number, server in self.pairs(group):
                    asked.append(self.ask(server, "learned", sender=number, step=step))
                for answer in await asyncio.gather(*asked):
                    self.trainer.add_metrics("", received_metrics(answer))

    async def files(self, scratch: Path) -> list[Path]:
        """The folder of each learner and of each snapshot."""
        is_last = self.trainer.step == self.trainer.config.num_steps
        self.optimizers, self.copies = {}, {}
        for optimizers, copies in await self.ask_all("save", folder=str(scratch), is_last=is_last):
            self.optimizers |= optimizers
            self.copies |= dict.fromkeys(copies)
        return [scratch / name for name in (*self.optimizers, *self.copies)]

    def state(self) -> JSONObject:
        return {"optimizers": self.optimizers, "copies": [*self.copies]}

    async def export(self, folder: Path) -> None:
        await self.ask_all("export", folder=str(folder))

    async def finish(self) -> None:
        await self.ask_all("finish")

    async def ask_all(self, verb: str, **body: AnyJSON) -> list[AnyJSON]:
        """The answers of all groups' ranks to rank 0, on all ranks. Every rank must call it. Raises
        RunError on all ranks."""
        answers: list[AnyJSON] = []
        error = ""
        if self.trainer.ranks.rank == 0:
            try:
                for group in self.groups:
                    with self.naming(group):
                        asked = [self.ask(server, verb, **body) for server in self.servers(group)]
                        answers += await asyncio.gather(*asked)
            except (RunError, ValueError) as failure:
                error = str(failure)
        error, answers = all_gather_json((error, answers), self.trainer.ranks)[0]
        if error:
            raise RunError(error)
        return answers

    def pairs(self, group: RankGroup) -> Iterator[tuple[int, EngineClient]]:
        """(number of the pair, server of its other rank) of the pairs that this rank is in."""
        ranks, servers = self.trainer.ranks, self.servers(group)
        for number in pairs_of(ranks.rank, ranks.size, ranks.size, len(servers)):
            yield number, servers[number % len(servers)]

    async def ask(self, server: EngineClient, verb: str, **body: AnyJSON) -> AnyJSON:
        return await server.ask(verb, timeout_s=self.trainer.config.timeout_s, **body)

    @contextmanager
    def naming(self, group: RankGroup) -> Iterator[None]:
        """Adds the group's name to errors."""
        try:
            yield
        except EngineDied as error:
            raise RunError(
                f"{group}: gone, or without an answer for "
                f"--timeout_s={self.trainer.config.timeout_s:g}: {error}"
            ) from error
        except (RunError, ValueError) as error:
            raise type(error)(f"{group}: {error}") from error


def to_text(samples: list[TrainingSample]) -> str:
    """Samples as text for from_text()."""
    return base64.b64encode(to_bytes(samples)).decode()


def from_text(text: str) -> list[TrainingSample]:
    return from_bytes(base64.b64decode(text))
