"""What an engine is. An engine samples tokens; it knows nothing of messages, rewards or learning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from rl_core.config import Config
from rl_core.types import Completion, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


class Engine(Protocol):
    policy_version: int  # of the weights that it holds
    capacity: int  # requests that it can decode at once

    async def generate(
        self, prompt_ids: list[int], params: SamplingParams, *, seed: int, session: str = ""
    ) -> Completion:
        """One completion. The same (weights, prompt, params, seed) give the same tokens up to floating-point noise,
        whatever else is in the batch. `session` names a conversation whose next prompt will extend this one."""
        ...

    def end_session(self, session: str) -> None:
        """Frees what is kept for the next turn of a conversation; unknown names are ignored."""
        ...

    async def update_weights(self, named_weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        """Loads (Hugging Face name, full tensor) pairs and drops every cached key and value. Raises on a name or shape
        that the model does not have, and on a parameter that did not arrive. None: the engine reads the learner's own
        parameters, which changed in place."""
        ...

    async def sleep(self) -> None:
        """Frees device memory for others: that of keys and values, and of weights that are the engine's own if it was made
        so. RuntimeError if requests are running."""
        ...

    async def wake(self) -> None:
        """Takes the memory again, with the weights that it had; nothing if it is awake. A request or new weights to an
        engine that sleeps wake it too."""
        ...

    async def pause(self) -> None:
        """Stops all requests between two tokens, before the engine sleeps or gets new weights. They keep their tokens, and
        requests that come now wait with them."""
        ...

    async def resume(self) -> None:
        """Goes on with what waits, by the weights that the engine holds now: each further token is of their version."""
        ...

    async def revive(self) -> None:
        """After EngineDied: it runs again, with the weights that it had; nothing if another caller did it. Raises EngineDied
        where that cannot be."""
        ...

    async def close(self) -> None: ...


class SharedEngine(Engine, Protocol):
    """An engine of one set of weights, beside which each request may ask for an adapter; requests with different ones are
    decoded together."""

    async def generate(
        self, prompt_ids: list[int], params: SamplingParams, *, seed: int, session: str = "", adapter: str = ""
    ) -> Completion:
        """As Engine's, with the adapter of that name; "" is none. The completion has the adapter's version."""
        ...

    async def update_adapter(
        self, name: str, named_weights: Iterable[tuple[str, Tensor]], config: dict[str, Any], version: int
    ) -> None:
        """Loads an adapter, a new one too, from what peft would write: (name, full tensor) pairs of adapter_model.safetensors
        and what adapter_config.json holds. Drops the keys and values that were cached with it, and no others. Raises as
        update_weights."""
        ...


class ActorEngine:
    """A shared engine as one actor has it, who asks for no adapter but its own."""

    def __init__(self, shared: SharedEngine, adapter: str = "", config: dict[str, Any] | None = None):
        self.shared, self.adapter, self.config = shared, adapter, config
        self.policy_version, self.capacity = shared.policy_version, shared.capacity

    async def generate(
        self, prompt_ids: list[int], params: SamplingParams, *, seed: int, session: str = ""
    ) -> Completion:
        return await self.shared.generate(prompt_ids, params, seed=seed, session=session, adapter=self.adapter)

    def end_session(self, session: str) -> None:
        self.shared.end_session(session)

    async def update_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Those of the adapter."""
        await self.shared.update_adapter(self.adapter, named_weights, self.config, version)
        self.policy_version = version

    async def sleep(self) -> None:
        """Of all that share it, as the others below."""
        await self.shared.sleep()

    async def wake(self) -> None:
        await self.shared.wake()

    async def pause(self) -> None:
        await self.shared.pause()

    async def resume(self) -> None:
        await self.shared.resume()

    async def revive(self) -> None:
        await self.shared.revive()

    async def close(self) -> None:
        await self.shared.close()


class StillEngine:
    """What an engine without memory or a process of its own does when it is to sleep, or to stop."""

    def end_session(self, session: str) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def revive(self) -> None: ...

    async def close(self) -> None: ...


class Follower(StillEngine):
    """The engine of a rank whose device is held by another's: it draws no episodes, and takes its part where all ranks have
    one."""

    policy_version = capacity = 0

    async def generate(
        self, prompt_ids: list[int], params: SamplingParams, *, seed: int, session: str = ""
    ) -> Completion:
        raise AssertionError("a rank without an engine was asked for tokens")

    async def update_weights(self, named_weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        """Gathering a weight is a collective."""
        for _ in named_weights or ():
            pass
        self.policy_version = version

    async def update_adapter(
        self, name: str, named_weights: Iterable[tuple[str, Tensor]], config: dict[str, Any], version: int
    ) -> None:
        for _ in named_weights:
            pass


def make_engine(config: Config, model, tokenizer, num_ranks: int = 1, offloads: bool = False) -> Engine:
    """The engine that --engine names, over `model` where it samples in this process. offloads: the model is the engine's
    own, and its weights wait on the host while it sleeps, which it does at first."""
    from rl_core.sampling.embedded_engine import EmbeddedEngine

    # A rank has at most its share at once, of all that may be under way.
    groups = -(-config.tasks_per_step * (1 + config.max_staleness) // num_ranks)
    slots = min(config.rollout.max_concurrent, groups * config.group_size)
    limits = {"num_slots": slots, "max_context_tokens": config.max_context_tokens}
    return EmbeddedEngine(model, **limits, tokenizer=tokenizer, offloads=offloads)
