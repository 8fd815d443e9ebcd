"""Actors with ranks of their own (--actors.NAME.ranks), as the ranks that play episodes see them.

A place is a process group of its own: no collective spans two places. Its engines and its learners
are asked over HTTP (place_rank.py). Samples travel as safetensors in JSON, metrics as JSON.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl_core.distributed import Ranks, all_gather_json
from rl_core.engines.remote import EngineClient, RemoteEngine, engines_at, received_metrics
from rl_core.learning.minibatches import from_bytes, to_bytes
from rl_core.plugin import Plugin
from rl_core.plugins.place_rules import RankGroup
from rl_core.sampling.engine import EngineDied
from rl_core.types import RunError, TrainingSample


def connect_places(plan: Any, ranks: Ranks) -> dict[str, RemoteEngine]:
    """The engine of each actor with ranks of its own. Waits until these ranks have loaded it."""
    engines, timeout_s = {}, plan.config.timeout_s
    for number, place in enumerate(plan.places[1:], 1):
        engines |= engines_at(number, len(place.ranks), place.actors, ranks, timeout_s)
    return engines


def pairs_of(first: int, step: int, num_playing: int, num_learning: int) -> range:
    """Numbers of the pairs of a rank that plays and a rank that learns, from `first` on. Pair n is
    n % num_playing and n % num_learning: each rank is in one at least."""
    return range(first, max(num_playing, num_learning), step)


class RankGroupClient(Plugin):
    """Sends samples when they are made. Learners here learn meanwhile, and the step ends when the
    others have learned, too."""

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self.places: list[RankGroup] = trainer.plan.places[1:]
        # Of the learners that were saved last, and of their copies that are renewed.
        self.optimizers: dict[str, dict[str, Any]] = {}
        self.copies: dict[str, None] = {}
        self.waited_for: list[RankGroup] = []  # they learn in this step

    def servers(self, place: Place) -> list[EngineClient]:
        """One on each rank of the place."""
        return self.trainer.actors[place.actors[0]].engine.servers

    async def start(self) -> None:
        """They have the same checkpoint."""
        await self.tell_all("begin", step=self.trainer.step)

    async def on_samples(self, step: int, samples: dict[str, list[TrainingSample]]) -> None:
        config = self.trainer.config
        self.waited_for = []
        for place in self.places:
            names = [name for name in place.actors if name in samples]
            names = [name for name in names if not (step + 1) % config.actors[name].learn_every]
            if not names:
                continue
            self.waited_for.append(place)
            # All in the first message; what further ranks of a place get is empty.
            sent = [to_text(samples[name]) for name in names]
            empty = [to_text([]) for _ in names]
            asked = []
            for number, server in self.pairs(place):
                own = sent if number == self.trainer.ranks.rank else empty
                content = dict(zip(names, own, strict=True))
                asked.append(self.ask(server, "learn", sender=number, step=step, samples=content))
            with self.explained(place):
                await asyncio.gather(*asked)

    async def after_learn(self, step: int) -> None:
        for place in self.waited_for:
            with self.trainer.timed("places"), self.explained(place):
                asked = []
                for number, server in self.pairs(place):
                    asked.append(self.ask(server, "learned", sender=number, step=step))
                for answer in await asyncio.gather(*asked):
                    self.trainer.note("", received_metrics(answer))

    async def files(self, scratch: Path) -> list[Path]:
        """The folder of each learner, and of each copy."""
        is_last = self.trainer.step == self.trainer.config.num_steps
        self.optimizers, self.copies = {}, {}
        for optimizers, copies in await self.tell_all("save", folder=str(scratch), is_last=is_last):
            self.optimizers |= optimizers
            self.copies |= dict.fromkeys(copies)
        return [scratch / name for name in (*self.optimizers, *self.copies)]

    def state(self) -> dict[str, Any]:
        return {"optimizers": self.optimizers, "copies": [*self.copies]}

    async def export(self, folder: Path) -> None:
        await self.tell_all("export", folder=str(folder))

    async def finish(self) -> None:
        await self.tell_all("finish")

    async def tell_all(self, verb: str, **body: Any) -> list[Any]:
        """What the ranks of all places answer to the first rank here. Every rank must call it.
        Raises RunError on all of them."""
        answers: list[Any] = []
        error = ""
        if self.trainer.ranks.rank == 0:
            try:
                for place in self.places:
                    with self.explained(place):
                        asked = [self.ask(server, verb, **body) for server in self.servers(place)]
                        answers += await asyncio.gather(*asked)
            except (RunError, ValueError) as failure:
                error = str(failure)
        error, answers = all_gather_json([error, answers], self.trainer.ranks)[0]
        if error:
            raise RunError(error)
        return answers

    def pairs(self, place: Place) -> Iterator[tuple[int, EngineClient]]:
        """(number of the pair, the other's server) of the pairs that this rank is in."""
        ranks, servers = self.trainer.ranks, self.servers(place)
        for number in pairs_of(ranks.rank, ranks.size, ranks.size, len(servers)):
            yield number, servers[number % len(servers)]

    async def ask(self, server: EngineClient, verb: str, **body: Any) -> Any:
        return await server.ask(verb, timeout_s=self.trainer.config.timeout_s, **body)

    @contextmanager
    def explained(self, place: RankGroup) -> Iterator[None]:
        try:
            yield
        except EngineDied as error:
            raise RunError(
                f"{place}: gone, or without an answer for "
                f"--timeout_s={self.trainer.config.timeout_s:g}: {error}"
            ) from error
        except (RunError, ValueError) as error:
            raise type(error)(f"{place}: {error}") from error


def to_text(samples: list[TrainingSample]) -> str:
    """As from_text() reads them."""
    return base64.b64encode(to_bytes(samples)).decode()


def from_text(text: str) -> list[TrainingSample]:
    return from_bytes(base64.b64decode(text))
