"""What an engine is. An engine samples tokens; it knows nothing of messages, rewards or learning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

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
        """Frees the memory of keys and values while a learner works; the next request takes it again."""
        ...

    async def pause(self) -> None:
        """Stops all requests between two tokens, before the engine sleeps or gets new weights. They keep their tokens, and
        requests that come now wait with them."""
        ...

    async def resume(self) -> None:
        """Goes on with what waits, by the weights that the engine holds now: each further token is of their version."""
        ...

    async def close(self) -> None: ...


def make_engine(config: Config, model, tokenizer, num_ranks: int = 1) -> Engine:
    """The engine that --engine names, over `model` where it samples in this process."""
    from rl_core.sampling.embedded_engine import EmbeddedEngine

    groups = -(-config.tasks_per_step // num_ranks)  # a rank has at most its share at once
    slots = min(config.rollout.max_concurrent, groups * config.group_size)
    return EmbeddedEngine(model, num_slots=slots, max_context_tokens=config.max_context_tokens, tokenizer=tokenizer)
