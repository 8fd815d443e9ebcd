"""What an engine is, and what it is made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rl_core.types import Completion, RunError, SamplingParams

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rl_core.config import Config
    from rl_core.metrics import Metric


# Ends the name of an actor's second engine, which samples with older weights. No actor's name has a
# dot.
STALE = ".older"


class EngineDied(RunError):
    """The engine's process ended or does not answer. The message quotes the end of its log."""


class Engine:
    """Samples tokens. Knows nothing of messages, rewards or learning.

    A class says what it can; what it does not override does nothing.
    """

    # True: it samples with the learner's own tensors, where those are unsharded.
    shares_weights: ClassVar[bool] = False
    # True: of EngineSpec.module it needs names and shapes alone, on "meta".
    wants_shapes: ClassVar[bool] = False
    # True: it runs in processes of its own, or on other machines.
    is_elsewhere: ClassVar[bool] = False
    # Last names of the linear layers whose adapters it applies beside its weights at no cost. Where
    # several actors share a model, each engine applies the adapters of all linear layers.
    serves_lora: ClassVar[frozenset[str]] = frozenset()

    # True: it samples in SamplingParams.json_schema, with logprobs over the allowed tokens.
    has_grammars: ClassVar[bool] = False

    version: int  # of the weights that it holds, adapters aside
    capacity: int  # requests that it decodes at once
    weights_way: str = ""  # how new weights get there, if there are several ways
    shortage: str = ""  # why it has less memory than it was to have
    lacks_weights: bool = False  # requests wait for an update, which all ranks must agree on

    @staticmethod
    def check(config: Config, name: str, may_lack: bool) -> None:
        """Raises ValueError if it cannot sample for the actor of this name, or if it is not
        installed and may not lack."""

    async def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        session: str = "",
        adapter: str = "",
        begun: Completion | None = None,
    ) -> Completion:
        """One completion. `session` names a conversation whose next prompt extends this one.
        `adapter` names a LoRA adapter; the completion has the version of the adapter. `begun` is
        continued in place: it has the first tokens, or none. Raises ValueError for an impossible
        request, EngineDied."""
        raise NotImplementedError

    def end_session(self, session: str) -> None:
        """Frees what is kept for its next turn; an unknown name is ignored."""

    async def update(
        self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int, *, adapter: str = ""
    ) -> None:
        """Loads (Hugging Face name, full tensor) pairs and drops the KV cache. With `adapter`, the
        pairs have peft's names and replace that adapter. None: the weights are shared and have
        changed. Raises ValueError on an unknown, missing or misshapen tensor, RuntimeError while
        requests run unless the engine is paused."""

    async def sleep(self) -> None:
        """Frees device memory; RuntimeError while requests run unless it is paused."""

    async def wake(self) -> None:
        """Takes the memory again; after EngineDied starts again with the same weights."""

    async def pause(self) -> None:
        """Stops between two tokens; requests keep theirs, and new ones wait."""

    async def resume(self) -> None:
        """Continues with the newest weights; each further token has their version."""

    async def catch_up(self) -> None:
        """What generate() was given as `begun` has all tokens that were sampled so far."""

    async def take_metrics(self) -> dict[str, Metric]:
        """Since the last call, by their names in metrics.jsonl."""
        return {}

    async def close(self) -> None:
        """Ends what runs and frees everything."""


@dataclass(kw_only=True)
class EngineSpec:
    """What any engine is made from."""

    name: str  # of its actor, with a suffix if the actor has several engines
    model: str  # folder or hub name
    module: PreTrainedModel  # what it samples with, or, on "meta", the shapes of its weights
    tokenizer: PreTrainedTokenizerBase | None
    num_slots: int  # requests that it decodes at once
    max_context_tokens: int
    dtype: torch.dtype
    device: torch.device
    seed: int
    # What adapter_config.json holds, by actor.
    adapters: dict[str, dict[str, Any]] = field(default_factory=dict)
    # The model -> what computes its tokens and keeps their keys and values; embedded engines.
    sampler: Callable[[PreTrainedModel], Any] | None = None
    # The model -> what keeps each token's experts; None: its completions have none.
    recorder: Callable[[PreTrainedModel], Any] | None = None
    owns_weights: bool = False  # they are CPU-offloaded while it sleeps
    log: Path  # of its process
    start_timeout_s: float
    tp: int = 1  # devices that it spans
    args: str = ""  # more of its server's
    memory_frac: float  # of a GPU
    url: str = ""  # of a server that runs already
    folder: str | None = None  # where weights wait for that server
    weights: str = "auto"  # --engine_weights
    bucket_bytes: int = 512 << 20
    # The newest weights once more, without other ranks; None: that is impossible.
    resend: Callable[[], Iterable[tuple[str, torch.Tensor]]] | None = None
    # Without resend(): an engine that lacks weights says so and waits for an update. Otherwise it
    # is an error.
    waits_for_weights: bool = False
