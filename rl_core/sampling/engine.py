"""The interface of engines, and the specification from which they are made."""

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


# Suffix of the name of an actor's second engine, which samples with stale weights. Names of actors
# have no dot.
STALE = ".older"


class EngineDied(RunError):
    """Raised if the engine's process ended or does not answer. The message quotes its log."""


class Engine:
    """Samples tokens. Knows nothing of messages, rewards or learning.

    Class variables declare capabilities. Methods without an implementation do nothing.
    """

    # True if the engine samples with the learner's tensors when they are unsharded.
    shares_weights: ClassVar[bool] = False
    # True if EngineSpec.module may be on "meta": only names and shapes are read.
    wants_shapes: ClassVar[bool] = False
    # True if the engine runs in other processes or on other machines.
    is_elsewhere: ClassVar[bool] = False
    # Last names of linear layers whose adapters the engine applies without merging, at no cost. If
    # several actors share a model, engines apply the adapters of all linear layers.
    serves_lora: ClassVar[frozenset[str]] = frozenset()

    # True if SamplingParams.json_schema is enforced, with logprobs over the allowed tokens.
    has_grammars: ClassVar[bool] = False

    version: int  # Policy version of the weights, without adapters.
    capacity: int  # Number of requests that are decoded concurrently.
    weights_way: str = ""  # Weight transfer in use, if there are several.
    shortage: str = ""  # Reason why the engine has fewer slots than requested, or "".
    lacks_weights: bool = False  # True while requests wait for an update, in which all ranks join.

    @staticmethod
    def check(config: Config, name: str, may_lack: bool) -> None:
        """Raises ValueError if the engine cannot sample for the actor of this name, or if its
        package is missing and may_lack is False."""

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
        `adapter` names a LoRA adapter, whose version the completion gets. `begun`, a completion
        with the first tokens or none, is continued in place. Raises ValueError for an impossible
        request, and EngineDied."""
        raise NotImplementedError

    def end_session(self, session: str) -> None:
        """Frees the cache kept for the session's next turn. Unknown names are ignored."""

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
        """Allocates the memory again. After EngineDied, restarts with the same weights."""

    async def pause(self) -> None:
        """Stops between two tokens; requests keep theirs, and new ones wait."""

    async def resume(self) -> None:
        """Continues with the newest weights; each further token has their version."""

    async def catch_up(self) -> None:
        """Updates each `begun` of open generate() calls with all tokens sampled up to now."""

    async def take_metrics(self) -> dict[str, Metric]:
        """Metrics since the last call, under their names in metrics.jsonl."""
        return {}

    async def close(self) -> None:
        """Cancels open requests and frees all resources."""


@dataclass(kw_only=True)
class EngineSpec:
    """Arguments of every engine."""

    name: str  # Name of the actor, with a suffix if the actor has several engines.
    model: str  # Folder or hub name.
    module: PreTrainedModel  # Model to sample with, or, on "meta", the shapes of its weights.
    tokenizer: PreTrainedTokenizerBase | None
    num_slots: int  # Number of requests to decode concurrently.
    max_context_tokens: int
    dtype: torch.dtype
    device: torch.device
    seed: int
    # Actor -> content of adapter_config.json.
    adapters: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Model -> SlotModel or another sampler with a KV cache. Embedded engines only.
    sampler: Callable[[PreTrainedModel], Any] | None = None
    # Model -> recorder of each token's experts; None if completions have none.
    recorder: Callable[[PreTrainedModel], Any] | None = None
    owns_weights: bool = False  # True if sleep() may offload the weights to the CPU.
    log: Path  # Log of the engine's process.
    start_timeout_s: float
    tp: int = 1  # Tensor-parallel size.
    args: str = ""  # --engine_args
    memory_frac: float  # Fraction of a GPU's memory.
    url: str = ""  # Address of a running server; "": the engine starts one.
    folder: str | None = None  # Shared folder for weights of a server on another host.
    weights: str = "auto"  # --weight_sync
    bucket_bytes: int = 512 << 20
    # Yields the newest weights again without other ranks; None if that is impossible.
    resend: Callable[[], Iterable[tuple[str, torch.Tensor]]] | None = None
    # True if an engine without resend() sets lacks_weights and waits for an update; otherwise it
    # raises RunError.
    waits_for_weights: bool = False
