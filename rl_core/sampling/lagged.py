"""An engine beside another with older weights: a part of the calls goes to the older, so that episodes mix policies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rl_core.types import Completion, SamplingParams, counter_seed

if TYPE_CHECKING:
    from torch import Tensor

    from rl_core.sampling.embedded_engine import EmbeddedEngine
    from rl_core.sampling.sglang_engine import SGLangEngine

    WeightyEngine = EmbeddedEngine | SGLangEngine


class LaggedEngine:
    """An Engine over `fresh`, which has the newest weights, and `older`, whose own are replaced by them at every `every`-th
    version from version `first` on. Which of the two answers a call is drawn from its seed alone; the completion has
    version and logprobs of the one that did. A call with params.lagged_frac 0 goes to `fresh`."""

    def __init__(self, fresh: WeightyEngine, older: WeightyEngine, every: int, first: int = 0):
        self.fresh, self.older, self.every, self.first = fresh, older, every, first
        self.capacity = fresh.capacity

    @property
    def policy_version(self) -> int:
        return self.fresh.policy_version

    async def generate(
        self, prompt_ids: list[int], params: SamplingParams, *, seed: int, session: str = ""
    ) -> Completion:
        is_older = counter_seed("lagged", seed) < params.lagged_frac * 2**32
        engine = self.older if is_older else self.fresh
        return await engine.generate(prompt_ids, params, seed=seed, session=session)

    def end_session(self, session: str) -> None:
        self.fresh.end_session(session)
        self.older.end_session(session)

    async def update_weights(self, named_weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        """Of the fresh one; the older one's too, when their turn comes."""
        await self.fresh.update_weights(named_weights, version)
        if (version - self.first) % self.every == 0:
            await self.refresh()

    async def refresh(self) -> None:
        """The older weights become the newest."""
        await self.older.update_weights(await self.weights_of(self.fresh), self.fresh.policy_version)

    async def older_weights(self) -> dict[str, Tensor]:
        """Name -> copy on the host."""
        weights = await self.weights_of(self.older)
        found = {name: weight.detach().to("cpu", copy=True) for name, weight in weights}
        await self.older.sleep()  # its next request wakes it
        return found

    async def weights_of(self, engine: WeightyEngine) -> Iterator[tuple[str, Tensor]]:
        if not hasattr(engine, "server"):  # whose weights wait on the host as they were sent
            await engine.wake()
        return engine.named_weights()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The newest."""
        return self.fresh.named_weights()

    async def sleep(self) -> None:
        await self.fresh.sleep()
        await self.older.sleep()

    async def wake(self) -> None:
        await self.fresh.wake()
        await self.older.wake()

    async def pause(self) -> None:
        await self.fresh.pause()
        await self.older.pause()

    async def resume(self) -> None:
        await self.fresh.resume()
        await self.older.resume()

    async def revive(self) -> None:
        await self.fresh.revive()
        await self.older.revive()

    async def close(self) -> None:
        await self.fresh.close()
        await self.older.close()
