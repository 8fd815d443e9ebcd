"""The interface of engines, and the specification from which they are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias

from rl_core.types import Completion, InputImage, JSONObject, RunError, SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from rl_core.config import Config
    from rl_core.data.image_families import ImageFamily
    from rl_core.data.pretrained import Tokenizer
    from rl_core.metrics import Metric


# (Hugging Face name, full tensor) pairs.
NamedWeights: TypeAlias = "Iterable[tuple[str, Tensor]]"
# Suffix of the name of an actor's second engine, which samples with stale weights. Names of actors
# have no dot.
STALE_SUFFIX = ".older"


class EngineDied(RunError):
    """Raised if the engine's process ended or does not answer. The message quotes its log."""


class WeightOwner(Enum):
    """Owner of the tensors that an engine samples with."""

    # The learner, if its weights are unsharded: update(None) says that they have changed. Otherwise
    # as ENGINE.
    LEARNER = "learner"
    # The engine, which has a copy on this device: EngineSpec.module. Updates overwrite the copy.
    ENGINE = "engine"
    # A server in separate processes, which loads the model itself and may die and lose its weights.
    # EngineSpec.module is on "meta": names and shapes.
    SERVER = "server"


class Engine:
    """Samples tokens. Knows nothing of messages, rewards or learning.

    Class variables declare capabilities. Methods without an implementation do nothing.
    """

    weight_owner: ClassVar[WeightOwner] = WeightOwner.ENGINE
    # Last names of linear layers whose adapters the engine applies without merging, at no cost. If
    # several actors share a model, engines apply the adapters of all linear layers.
    lora_layers: ClassVar[frozenset[str]] = frozenset()
    # True if SamplingParams.json_schema is enforced, with logprobs over the allowed tokens.
    has_grammars: ClassVar[bool] = False
    # True if generate() takes images.
    sees: ClassVar[bool] = False
    # Values of model_type whose images it takes; None: all.
    image_families: ClassVar[frozenset[str] | None] = None

    version: int  # Policy version of the weights, without adapters.
    capacity: int  # Number of requests that are decoded concurrently.
    weight_transfer: str = ""  # Name of the weight transfer in use, if there are several.
    shortage: str = ""  # Reason why the engine has fewer slots than requested, or "".
    # True while requests wait for an update by all ranks; see RESENT_BY_RANKS.
    lacks_weights: bool = False

    @staticmethod
    def check(config: Config, name: str, is_planned: bool) -> None:
        """Raises ValueError if the engine cannot sample for the actor of this name, or if its
        package is missing. If is_planned, the run is for another machine, which may have the
        package."""

    async def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        session: str = "",
        adapter: str = "",
        unfinished: Completion | None = None,
        images: Sequence[InputImage] = (),
    ) -> Completion:
        """One completion. `session` names a conversation whose next prompt extends this one.
        `adapter` names a LoRA adapter, whose version the completion gets. `unfinished`, a
        completion with the first tokens or none, is continued in place. `images`: of the prompt's
        negative ids, if the engine `sees`; a caller without images leaves it out. Raises ValueError
        for an impossible request, and EngineDied."""
        raise NotImplementedError

    def end_session(self, session: str) -> None:
        """Frees the cache kept for the session's next turn. Unknown names are ignored."""

    async def update(
        self, weights: NamedWeights | None, version: int, *, adapter: str = ""
    ) -> None:
        """Loads the weights and drops the KV cache. With `adapter`, the pairs have peft's names and
        replace that adapter. None: the weights are shared and have changed. Raises ValueError on an
        unknown, missing or misshapen tensor, RuntimeError while requests run unless the engine is
        paused."""

    async def load_adapter(self, weights: NamedWeights, *, adapter: str) -> None:
        """Replaces an adapter that no request uses, while requests with others run."""
        raise NotImplementedError

    async def sleep(self) -> None:
        """Frees device memory; RuntimeError while requests run unless it is paused."""

    async def wake(self) -> None:
        """Allocates the memory again. After EngineDied, restarts with the same weights."""

    async def pause(self) -> None:
        """Stops between two tokens; requests keep theirs, and new ones wait."""

    async def resume(self) -> None:
        """Continues with the newest weights; each further token has their version."""

    async def update_unfinished(self) -> None:
        """Updates each `unfinished` of open generate() calls with all tokens sampled up to now."""

    async def take_metrics(self) -> dict[str, Metric]:
        """Metrics since the last call, under their names in metrics.jsonl."""
        return {}

    async def close(self) -> None:
        """Cancels open requests and frees all resources."""


# Value of EngineSpec.resend: all ranks send an update together, as gathering is a collective.
RESENT_BY_RANKS: Literal["ranks"] = "ranks"


class Sampler(Protocol):
    """A model's forward with a cache of keys and values in rows; see SlotModel in
    engines/kv_slots.py."""

    model: PreTrainedModel
    is_batched: bool

    def make_cache(self, num_slots: int, max_tokens: int, /) -> Any: ...
    def borrowed(self) -> AbstractContextManager[None]: ...
    @property
    def forward(self) -> Callable[..., Tensor]: ...
    def logits(self, hidden: Tensor, /) -> Tensor: ...


class ExpertRecorder(Protocol):
    """Records the experts of each token in a Sampler's cache; see engines/router_recorder.py."""

    def experts_of(self, cache: Any, row: int, length: int) -> np.ndarray: ...


@dataclass(kw_only=True)
class EmbeddedSpec:
    """Arguments of engines that sample in this process (WeightOwner.LEARNER and ENGINE)."""

    sampler: Callable[[PreTrainedModel], Sampler]
    # Makes the recorder of each token's experts; None if completions have none.
    recorder: Callable[[PreTrainedModel], ExpertRecorder] | None = None
    # True if the weights are on the CPU while the engine sleeps: engines take turns on a device.
    offloads_weights: bool = False


@dataclass(kw_only=True)
class ServerSpec:
    """Arguments of engines in separate processes (WeightOwner.SERVER)."""

    tp: int = 1  # Tensor-parallel size.
    args: str = ""  # --engine_args
    url: str = ""  # Address of a running server; "": the engine starts one.
    folder: str | None = None  # Shared folder for weights of a server on another host.
    weight_sync: str = "auto"  # --weight_sync
    bucket_bytes: int = 512 << 20
    # Returns the bytes that learners on this device have yet to allocate, and keep while engines
    # sample.
    reserved: Callable[[], float] = lambda: 0.0


@dataclass(kw_only=True)
class EngineSpec:
    """Arguments of an engine."""

    name: str  # Name of the actor, with a suffix if the actor has several engines.
    model: str  # Folder or hub name.
    module: PreTrainedModel  # See WeightOwner.
    tokenizer: Tokenizer | None
    num_slots: int  # Number of requests to decode concurrently.
    max_context_tokens: int
    memory_frac: float  # Fraction of a GPU's memory.
    dtype: torch.dtype
    device: torch.device
    seed: int  # For an engine that ignores the seeds of requests.
    # Actor -> content of adapter_config.json.
    adapters: dict[str, JSONObject] = field(default_factory=dict)
    vision: ImageFamily | None = None  # None: the model reads text alone.
    embedded: EmbeddedSpec | None = None  # None for an engine in separate processes.
    # The remaining fields are read by engines in separate processes alone.
    server: ServerSpec = field(default_factory=ServerSpec)
    log: Path  # Output of the engine's process.
    start_timeout_s: float
    # Source of the newest weights for a server that lost them: a function that yields them;
    # RESENT_BY_RANKS: the engine sets lacks_weights and waits for an update; None: there is none,
    # and the engine keeps a copy or raises RunError.
    resend: Callable[[], NamedWeights] | Literal["ranks"] | None = None
