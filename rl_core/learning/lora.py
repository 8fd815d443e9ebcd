"""LoRA adapters on a frozen model, through peft: y = W x + alpha/rank B A x (Hu et al. 2021,
arXiv:2106.09685). W may be held in 4 bits (QLoRA, Dettmers et al. 2023, arXiv:2305.14314)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from rl_core.config import LoraConfig
from rl_core.data.rows import replaced
from rl_core.distributed import Ranks
from rl_core.errors import split
from rl_core.models.loading import load_model_config, on_meta
from rl_core.models.parallel.fsdp import local_slices
from rl_core.models.policy import Outputs, Policy, backbone, seeing_part
from rl_core.models.weight_gathering import DTypes, dtype_of, gathered_weights
from rl_core.types import PackedBatch, counter_seed

if TYPE_CHECKING:
    import peft
    from peft.tuners.lora import LoraLayer

Parts = Sequence[str]  # Of a model that sees: vision, projector, language.
LANGUAGE = ("language",)
EXPERTS = "experts"  # Targets in addition to linear layers.
HEAD = "head"  # Not of the flag: exports with the adapter merged would lose it.
WEIGHTS = "adapter_model.safetensors"  # File of an adapter.
NAMED_AS_EXPERTS = {"gate_proj", "up_proj", "down_proj"}
# Model types for which peft refuses out_proj.
STATE_SPACES = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")


def check_lora(lora: LoraConfig, model_config: PretrainedConfig, parts: Parts = LANGUAGE) -> None:
    """Raises ValueError if the model has no such layers, before any weight is read. `parts`: those
    that get adapters."""
    model = on_meta(model_config)
    known = set(map(last_name, linear_layers(model, parts)))
    if not known:
        raise ValueError(
            f"--actors.policy.lora.rank={lora.rank}: this model has no linear layers "
            "(torch.nn.Linear) for adapters"
        )
    known.add("all-linear")
    if experts_of(model, parts):
        known.add(EXPERTS)
    for name in split(lora.targets):
        if name not in known:
            raise ValueError(
                f"--actors.policy.lora.targets={lora.targets}: {name!r} is not a linear layer of a "
                f"block of this model; take some of {', '.join(sorted(known))}"
            )


def last_name(name: str) -> str:
    return name.rpartition(".")[2]


def experts_of(model: PreTrainedModel, parts: Parts = LANGUAGE) -> list[str]:
    """Names of the expert weights in a layer. Only the language model has experts."""
    names = set()
    if "language" not in parts:
        return []
    for name, weight in backbone(model).named_parameters():
        if EXPERTS in name and weight.ndim == 3:
            names.add(".".join(plain(name).split(".")[-2:]))
    return sorted(names)


def plain(name: str) -> str:
    """A weight's name in the model without adapters."""
    return name.replace(".base_layer", "")


def is_served(path: str, lora: LoraConfig, served: frozenset[str]) -> bool:
    """True if an engine that serves adapters of the layers `served` can apply such an adapter to
    the model at `path`."""
    config = load_model_config(path)
    # In servers the layers of a multimodal model have other names.
    if config.get_text_config() is not config or lora.adapts_experts or lora.quantize != "none":
        return False
    return served.issuperset(target_names(lora, linear_layers(on_meta(config))))


def linear_layers(model: PreTrainedModel, parts: Parts = LANGUAGE) -> dict[str, nn.Linear]:
    """Name -> layer of these parts that may have an adapter. Not the head, since logprobs use its
    plain weight; not experts, nor layers with their names, which peft mistakes for experts; not
    routers and gates of one number; not the convolution that reads pixels."""
    text, left_out = set(backbone(model).modules()), set()
    if experts_of(model):
        left_out |= NAMED_AS_EXPERTS
    if model.config.model_type in STATE_SPACES:
        left_out.add("out_proj")
    layers = {}
    inside = {*model.base_model.modules(), *text}
    for name, module in model.named_modules():
        is_router = type(module).__name__.endswith("Router")
        if module not in inside or not isinstance(module, nn.Linear) or is_router:
            continue
        if module not in text:
            if seeing_part(name) in parts:
                layers[name] = module
        elif "language" in parts and module.out_features > 1 and last_name(name) not in left_out:
            layers[name] = module
    return layers


def target_names(lora: LoraConfig, layers: dict[str, nn.Linear]) -> list[str]:
    """Last names of the linear layers that get adapters."""
    names = split(lora.targets)
    if "all-linear" in names:
        names = [*sorted(map(last_name, layers)), *names]
    return [name for name in dict.fromkeys(names) if name not in ("all-linear", EXPERTS, HEAD)]


def quantization(
    adapters: dict[str, tuple[LoraConfig, int]], dtype: torch.dtype, device: torch.device
) -> dict:
    """Arguments of from_pretrained for linear layers in 4 bits."""
    kind = adapters["default"][0].quantize
    if kind == "none":
        return {}
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=dtype
    )
    return {"quantization_config": config, "device_map": {"": device}}


class AdapterPolicy(Policy):
    """A frozen model with fp32 adapters on its layers, several by name; draw_adapter() initializes
    them. `is_served`: its engine applies adapters to the model's weights."""

    def __init__(
        self,
        adapters: dict[str, tuple[LoraConfig, int]],
        path: str,
        is_served: bool,
        parts: Parts,
        hf: PreTrainedModel,
        **settings: Any,
    ):
        """`adapters`: by name, each with its seed. `parts`: those that get adapters. `settings`:
        arguments of Policy()."""
        import peft
        from peft.tuners.lora.layer import ParamWrapper
        from peft.tuners.tuners_utils import BaseTunerLayer

        super().__init__(hf, **settings)
        self.is_served, self.active = is_served, ""
        self.adapters = {n: peft_config(lora, hf, path, parts) for n, (lora, _) in adapters.items()}
        with warnings.catch_warnings():
            # The second actor's adapter is intended.
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
            for name, config in self.adapters.items():
                peft.inject_adapter_in_model(config, hf, name)
        for name in adapters:
            for _, parameter in adapter_parameters(hf, name):
                parameter.data = torch.zeros(parameter.shape, device=parameter.device)
                parameter.requires_grad_(True)  # Versions of peft differ for a second adapter.
        self.layers = [m for m in hf.modules() if isinstance(m, BaseTunerLayer)]
        for layer in self.layers:
            if isinstance(layer, ParamWrapper):
                # [out, rank, experts], which --ep splits by expert. peft reads it so too, but
                # writes two dimensions.
                for linear in layer.lora_B.values():
                    weight = linear.get_parameter("weight")
                    weight.data = weight.unflatten(1, (-1, layer.num_experts)).data
        self.of_head: set[str] = set()  # Adapters with a product of the head that is not 0.

    def forward(
        self,
        batch: PackedBatch,
        temperature: float,
        adapter: str = "",
        outputs: Outputs | None = None,
    ) -> tuple[Tensor, ...]:
        """Forward with this adapter, or none. The adapter stays active, since the backward
        recomputes."""
        # peft's switches change requires_grad, which FSDP must not see.
        for layer in self.layers:
            layer._disable_adapters = not adapter
            if adapter:
                layer._active_adapter = adapter
        self.active = adapter
        return super().forward(batch, temperature, adapter, outputs)

    def head_weight(self, weight_VD: Tensor) -> Tensor:
        """The head's weight with the product of the active adapter."""
        if self.active not in self.of_head:
            return weight_VD
        head, name = cast("LoraLayer", self.hf.get_output_embeddings()), self.active
        a_RD = head.lora_A[name].get_parameter("weight")
        b_VR = head.lora_B[name].get_parameter("weight")
        return weight_VD + (head.scaling[name] * (b_VR @ a_RD)).to(weight_VD.dtype)

    def set_scaling(self, adapter: str, scaling: float) -> None:
        """Sets the factor of an adapter's products."""
        for layer in self.layers:
            cast("LoraLayer", layer).scaling[adapter] = scaling

    @property
    def is_quantized(self) -> bool:
        return hasattr(self.hf.config, "quantization_config")

    @property
    def is_shareable(self) -> bool:
        """True with a served adapter. A merged one would be slow to apply at every token."""
        return self.is_served and not self.is_quantized and not self.is_sharded

    def trained(self, adapter: str = "") -> Iterator[tuple[str, nn.Parameter]]:
        """The weights of one adapter, named as if it were the only one."""
        return adapter_parameters(self, adapter)

    def unsharded_weights(self, adapter: str, dtypes: DTypes) -> Iterator[tuple[str, Tensor]]:
        return merged_weights(self.hf, adapter, dtypes)

    def engine_weights(
        self, adapter: str = "", in_place: bool = False
    ) -> Iterator[tuple[str, Tensor]] | None:
        """The adapter alone, with peft's names, if the engine applies it."""
        if self.is_served:
            return adapter_weights(self.hf, adapter)
        return super().engine_weights(adapter, in_place)

    def export_adapter(self, adapter: str, folder: Path, ranks: Ranks) -> None:
        """Writes a folder that peft loads on top of the base model."""
        weights = {}
        for name, value in adapter_weights(self.hf, adapter):
            weights[name] = value.cpu().contiguous()
        if ranks.rank == 0:
            with replaced(folder) as scratch:
                write_adapter(scratch, self.adapters[adapter], weights)


def peft_config(
    lora: LoraConfig, model: PreTrainedModel, path: str, parts: Parts = LANGUAGE
) -> peft.LoraConfig:
    """peft's configuration of an adapter for the model at `path`, which has no adapter yet."""
    import peft

    text = backbone(model)
    layers = linear_layers(model, parts)
    names, exclude = target_names(lora, layers), None
    if tuple(parts) != LANGUAGE:
        # Last names, such as proj, are also those of convolutions and of other parts.
        names = [name for name in layers if last_name(name) in names]
    elif text is not model.base_model:
        # Excludes the rest of a multimodal model.
        inside = next(name for name, module in model.named_modules() if module is text)
        exclude = rf"(?!{inside}\.).*"
    if HEAD in split(lora.targets):
        head = model.get_output_embeddings()
        names += [last_name(name) for name, module in model.named_modules() if module is head]
    return peft.LoraConfig(
        exclude_modules=exclude,
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  # peft takes floats.
        target_modules=names or None,
        target_parameters=experts_of(model, parts) if lora.adapts_experts else None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=path,
    )


def draw_adapter(model: nn.Module, seed: int, adapter: str) -> None:
    """Initializes an adapter: A is random, B is 0. Does not depend on the number of ranks or on
    other adapters."""
    for name, parameter in adapter_parameters(model, adapter):
        draw = torch.zeros(parameter.shape)
        if ".lora_A." in name:
            generator = torch.Generator().manual_seed(counter_seed(seed, "lora", name))
            nn.init.kaiming_uniform_(draw, a=5**0.5, generator=generator)
        local, slices = local_slices(parameter)
        local.copy_(draw[slices])


def adapter_parameters(
    model: nn.Module, adapter: str = "default"
) -> Iterator[tuple[str, nn.Parameter]]:
    """Weights of one adapter, named as if it were the only one."""
    for name, parameter in model.named_parameters():
        if f".lora_A.{adapter}." in name or f".lora_B.{adapter}." in name:
            yield name.replace(f".{adapter}.", ".default."), parameter


def adapter_weights(model: nn.Module, adapter: str) -> Iterator[tuple[str, Tensor]]:
    """(peft's name, unsharded tensor) of each matrix of an adapter. Every rank must exhaust it."""
    for name, value in gathered_weights(adapter_parameters(model, adapter)):
        yield peft_name(name), value.flatten(1)


def peft_name(name: str) -> str:
    """peft's name of a matrix that adapter_parameters() yields."""
    return f"base_model.model.{name.replace('.default.', '.')}"


def write_adapter(folder: Path, config: peft.LoraConfig, weights: dict[str, Tensor]) -> None:
    """Writes the files of an adapter that peft loads."""
    config.save_pretrained(str(folder))
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def merged_weights(
    model: nn.Module, adapter: str, dtypes: DTypes = None
) -> Iterator[tuple[str, Tensor]]:
    """(transformers' name, unsharded tensor) with an adapter merged, W + alpha/rank B A, and 4-bit
    weights dequantized; a tied weight comes once. Every rank must exhaust it."""
    factors: list[Tensor] = []
    for name, value in gathered_weights(with_factors(model, adapter)):
        if not name:
            factors.append(value)
            continue
        layer_name, _, kind = name.rpartition(".")
        quant_state = getattr(model.get_submodule(layer_name), "quant_state", None)
        if kind == "weight" and quant_state is not None:
            from bitsandbytes.functional import dequantize_4bit

            value = dequantize_4bit(value, quant_state)
        if factors:
            layer = adapted_layer(model, name, adapter)
            assert layer is not None
            value = value.float() + layer.scaling[adapter] * factor_product(*factors, value.shape)
            factors = []
        name = f"{plain(layer_name)}.{kind}"
        yield name, value.to(dtype_of(name, value, dtypes))
        del value  # Its memory is free before the next one is gathered.


def with_factors(model: nn.Module, adapter: str) -> Iterator[tuple[str, Tensor]]:
    """(name, weight) of the model without adapters. Before a weight that the adapter changes come
    the adapter's A and B of it, named ""."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        if layer := adapted_layer(model, name, adapter):
            yield "", layer.lora_A[adapter].get_parameter("weight")
            yield "", layer.lora_B[adapter].get_parameter("weight")
        yield name, parameter


def adapted_layer(model: nn.Module, name: str, adapter: str) -> LoraLayer | None:
    """The layer whose adapter changes the weight of this name; None if there is none."""
    from peft.tuners.lora import LoraLayer

    layer_name, _, kind = name.rpartition(".")
    owner = model.get_submodule(plain(layer_name))
    # Peft has a layer for each weight of experts.
    while getattr(owner, "parameter_name", kind) != kind:
        owner = owner.get_submodule("base_layer")
    is_adapted = kind in ("weight", getattr(owner, "parameter_name", ""))
    if is_adapted and isinstance(owner, LoraLayer) and adapter in owner.lora_A:
        return owner
    return None


def factor_product(a_RD: Tensor, b_DR: Tensor, shape: torch.Size) -> Tensor:
    """B A of a layer, in the shape of its weight."""
    if len(shape) == 3:  # Of experts: rows of A are ordered by expert, B is [out, rank, experts].
        a_RD = a_RD.view(shape[0], -1, a_RD.shape[1])
        b_DR = b_DR.permute(2, 0, 1)
    product = b_DR @ a_RD
    return product if product.shape == shape else product.mT


def second_model(hf: PreTrainedModel) -> PreTrainedModel:
    """A second model over the same weights, without adapters: an engine samples with it."""
    model = on_meta(hf.config, dtype=hf.dtype)
    tensors = [
        *hf.named_parameters(remove_duplicate=False),
        *hf.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in tensors:
        if ".lora_" not in name:
            owner, _, kind = plain(name).rpartition(".")
            setattr(model.get_submodule(owner), kind, tensor)
    model.generation_config = hf.generation_config
    return model
