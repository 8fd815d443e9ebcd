"""Options of engines: which engine a run samples with, and how each one is made.

Each function imports its module when the option is used.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from rl_core.config import Config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rl_core.sampling.engine import Engine, ExpertRecorder, Sampler


def embedded() -> type[Engine]:
    from rl_core.engines.embedded import EmbeddedEngine

    return EmbeddedEngine


def sglang() -> type[Engine]:
    from rl_core.engines.sglang import SGLangEngine

    return SGLangEngine


def vllm() -> type[Engine]:
    from rl_core.engines.vllm import VLLMEngine

    return VLLMEngine


# Values of --engine.
ENGINES: dict[str, Callable[[], type[Engine]]] = {
    "embedded": embedded,
    "sglang": sglang,
    "vllm": vllm,
}
# Packages of engines in separate processes; --engine auto takes the first that is installed.
PACKAGES = ("sglang", "vllm")


def auto_engine(config: Config) -> tuple[str, str]:
    """(name, reason) of the engine that --engine auto stands for on this machine. Without a GPU
    there is no choice, and the reason is ""."""
    import torch

    if config.device == "mps" or not torch.cuda.is_available():
        return "embedded", ""
    return engine_on_gpu(config)


def engine_on_gpu(config: Config) -> tuple[str, str]:
    actors = config.actors
    owners = [actors[actor.lora_base] for actor in actors.values() if actor.lora_base in actors]
    if any(owner.lora.quantize != "none" for owner in owners):
        return "embedded", "it alone reads a shared model in 4 bits"
    for name in PACKAGES:
        if find_spec(name) is not None:
            return name, "it is installed"
    return "embedded", f"none of {', '.join(PACKAGES)} is installed"


def engine_classes(config: Config, engine: type[Engine] | None = None) -> dict[str, type[Engine]]:
    """The engine class of each actor with a model."""
    classes: dict[str, type[Engine]] = {}
    for name, actor in config.actors.items():
        if not actor.api:
            classes[name] = engine or engine_class(config.engine, bool(actor.servers))
    return classes


def engine_class(name: str, has_servers: bool) -> type[Engine]:
    """has_servers: the actor samples with servers that run already, which are SGLang's unless the
    engine of this name has servers."""
    from rl_core.sampling.engine import WeightOwner

    result = ENGINES[name]()
    return sglang() if has_servers and result.weight_owner is not WeightOwner.SERVER else result


def make_sampler(model: PreTrainedModel) -> Sampler:
    """The decoder of an embedded engine: Llama's layout in KV slots, else the model's own forward
    with a cache per row."""
    from rl_core.engines.hf_sampling import choose_sampler
    from rl_core.models.options import LLAMA_LAYOUT

    if model.config.model_type not in LLAMA_LAYOUT:
        return choose_sampler(model)
    if model.device.type == "cuda":
        from rl_core.engines.cuda_graphs import DecodeGraphs
        from rl_core.engines.fused_graphs import FusedGraphs

        fused = [FusedGraphs] if FusedGraphs.fits(model) else []
        return choose_sampler(model, *fused, DecodeGraphs)
    from rl_core.engines.llama_slots import LlamaSlots

    return choose_sampler(model, LlamaSlots)


def make_recorder(model: PreTrainedModel) -> ExpertRecorder:
    """Records each token's experts, for --router_replay."""
    from rl_core.engines.router_recorder import Recorder

    return Recorder(model)
