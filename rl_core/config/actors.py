"""Flags of actors, their LoRA adapters included, and the rules between the flags: shared models,
endpoints, servers that run already."""

import re
from dataclasses import dataclass
from typing import Literal

from rl_core.config.algorithm import RL, AlgoConfig, CriticConfig
from rl_core.config.flag_parsing import Section
from rl_core.config.learner import LearnerConfig, OptimConfig
from rl_core.config.rollout import SamplingConfig
from rl_core.errors import split
from rl_core.flags import AtLeast1, Count, MemoryFraction, NotNegative, OneOf, Positive, flag

# Sections of flags that an actor can replace.
OWN_SECTIONS = ("algo", "critic", "learner", "optim", "sampling")
OWN = ("algorithm", "engine_tp", "engine_args", "engine_memory_frac", *OWN_SECTIONS)


def replaced(section: type[Section], only: tuple[str, ...] = ()) -> dict[str, object]:
    """A field of an actor: values by the names of a section's flags."""
    return flag(dict, f"replaces --{section.prefix}* for this actor", only)


@dataclass(kw_only=True)
class LoraConfig(Section, prefix="actors.NAME.lora."):
    rank: Count = flag(0, "LoRA: rank of the adapters of a frozen model; 0 trains all weights")
    alpha: Positive = flag(32.0, "LoRA: the adapters' product is scaled by alpha / rank")
    targets: str = flag(
        "all-linear", "LoRA: modules with an adapter, by last name: q_proj,v_proj; experts too"
    )
    quantize: Literal["none", "nf4"] = flag("none", "QLoRA: nf4 keeps the frozen model in 4 bits")

    @property
    def adapts_experts(self) -> bool:
        return self.rank > 0 and "experts" in split(self.targets)


@dataclass(kw_only=True)
class ActorConfig(Section, prefix="actors.NAME."):
    model: str | None = flag(
        None, "folder or hub name of its model; with api, the model's name there"
    )
    train: bool | None = flag(None, "whether it learns; default: yes, unless it has an api")
    api: str | None = flag(
        None,
        "URL of a chat API: .../v1, or .../v1/responses, or Anthropic's .../v1/messages",
    )
    api_key_env: str | None = flag(
        None,
        "environment variable with the API's key; '': none; default: OPENAI_ or ANTHROPIC_API_KEY",
    )
    engine_urls: str | None = flag(
        None, "servers of SGLang or vLLM that run already: http://a:30000,http://b:30000"
    )
    max_tokens: AtLeast1 | None = flag(
        None, "max new tokens of one of its turns; default: --max_tokens"
    )
    router_aux_loss_coef: NotNegative = flag(
        0.0, "mixture of experts: load balancing loss, 0.001 is usual"
    )
    router_replay: bool = flag(
        False, "mixture of experts: the learner routes as the engine did (R3)", only=RL
    )
    lora_base: str | None = flag(
        None, "actor with LoRA whose base model and engine this one uses too"
    )
    chat_template: str | None = flag(
        None, "file with a Jinja chat template, instead of the tokenizer's"
    )
    chat_template_kwargs: dict[str, object] = flag(
        dict, "as --chat_template_kwargs, for its own template"
    )
    lora: LoraConfig = flag(LoraConfig, "adapters")
    algorithm: OneOf[str, RL] | None = flag(None, "its own preset; default: --algorithm", only=RL)
    update_every: AtLeast1 = flag(1, "update this actor every N steps", only=RL)
    ranks: str | None = flag(
        None, "separate ranks, such as 4-7: actors on separate ranks learn concurrently", only=RL
    )
    engine_tp: AtLeast1 | None = flag(None, "its own --engine_tp")
    engine_args: str | None = flag(None, "its own --engine_args")
    engine_memory_frac: MemoryFraction | None = flag(None, "its own --engine_memory_frac")
    algo: dict[str, object] = replaced(AlgoConfig, RL)
    critic: dict[str, object] = replaced(CriticConfig, RL)
    learner: dict[str, object] = replaced(LearnerConfig)
    optim: dict[str, object] = replaced(OptimConfig)
    sampling: dict[str, object] = replaced(SamplingConfig)

    @property
    def servers(self) -> list[str]:
        """Addresses in engine_urls."""
        return split(self.engine_urls)

    @property
    def overrides(self) -> dict[str, object]:
        """The actor's values that replace the global flags; sections as dicts."""
        values: dict[str, object] = {}
        for name in OWN:
            value = getattr(self, name)
            if value not in (None, {}):
                values[name] = value
        return values

    @property
    def is_trained(self) -> bool:
        return self.api is None if self.train is None else self.train


OF_LEARNER = {"algorithm", "algo", "critic", "learner", "optim"}
OF_MODEL = {"activations", "offload", "dtype"}  # flags of a learner
URL = r"https?://[^/\s]+/?"
# (condition that breaks the rule, message). c: the configuration; a: the actor.
OF_ACTOR = [
    (
        lambda c, name, a: not re.fullmatch(r"[A-Za-z][\w-]*", name),
        ": a name is a letter, then letters, digits, '_' and '-'",
    ),
    (
        lambda c, name, a: (a.max_tokens or 0) > c.max_tokens,
        ".max_tokens={a.max_tokens} must be at most --max_tokens={c.max_tokens}",
    ),
    (
        lambda c, name, a: a.api and a.train,
        ".api={a.api} and train=true: an endpoint cannot learn; drop one of them",
    ),
    (
        lambda c, name, a: (a.lora.rank or a.overrides.keys() & OF_LEARNER) and not a.is_trained,
        ": lora.rank, algorithm, algo, critic, learner and optim belong to an actor that "
        "learns; leave them out",
    ),
    (
        lambda c, name, a: not a.lora.rank and a.lora != type(a.lora)(),
        ".lora.rank is missing, but other flags of the adapter are set; give "
        "--actors.{name}.lora.rank 16",
    ),
    (
        lambda c, name, a: a.lora.rank and c.algorithm == "rm",
        ".lora.rank: --algorithm rm trains the whole model; leave it out",
    ),
    (
        lambda c, name, a: (
            a.lora.quantize != "none"
            and (c.learner.kernels == "compile" or c.of(name).learner.offload == "always")
        ),
        ".lora.quantize={a.lora.quantize} cannot be combined with --learner.kernels=compile or "
        "--learner.offload=always; leave one out",
    ),
    (
        lambda c, name, a: a.lora.adapts_experts and c.of(name).optim.name == "muon",
        ".lora.targets={a.lora.targets} cannot be combined with --optim.name=muon, which would mix "
        "experts; leave experts out, or take adamw",
    ),
    (
        lambda c, name, a: a.servers and not (c.is_rl and a.is_trained),
        ".engine_urls is for an actor that learns by RL; a frozen actor is an endpoint: "
        "--actors.{name}.api URL/v1",
    ),
    (
        lambda c, name, a: (
            len(set(a.servers)) < len(a.servers)
            or not all(re.fullmatch(URL, url) for url in a.servers)
        ),
        ".engine_urls={a.engine_urls} must be different addresses, such as http://127.0.0.1:30000",
    ),
    (
        lambda c, name, a: "kernels" in a.learner,
        ".learner.kernels: all actors have the same; give --learner.kernels",
    ),
    (
        lambda c, name, a: "dtype" in a.learner and c.rollout_ranks,
        ".learner.dtype: with --rollout_ranks all actors have the same; give --learner.dtype",
    ),
    (
        lambda c, name, a: a.update_every > 1 and c.rollout.stale_policy_frac,
        ".update_every={a.update_every} and --rollout.stale_policy_frac cannot be combined: "
        "stale weights are "
        "refreshed by updates; remove one",
    ),
    (
        lambda c, name, a: a.update_every > max(1, c.num_steps),
        ".update_every={a.update_every}: the actor would not learn in --num_steps={c.num_steps}; "
        "lower update_every",
    ),
]
# a: an actor that shares the model of o.
OF_SHARER = [
    (
        lambda c, name, a, o: (
            a.learner.keys() & OF_MODEL or a.engine_tp or a.engine_args or a.engine_memory_frac
        ),
        ".lora_base={a.lora_base}: learner.activations, learner.offload, learner.dtype and "
        "engine_* are "
        "the model's; give them to {a.lora_base}",
    ),
    (
        lambda c, name, a, o: o.lora_base or not o.is_trained or not o.lora.rank,
        ".lora_base={a.lora_base}: a shared model is frozen and has adapters; give "
        "--actors.{a.lora_base}.lora.rank 16",
    ),
    (
        lambda c, name, a, o: a.lora.adapts_experts or o.lora.adapts_experts,
        ".lora_base={a.lora_base}: engines apply no adapters on experts of several actors; leave "
        "experts "
        "out of lora.targets",
    ),
    (
        lambda c, name, a, o: (
            a.api
            or a.engine_urls
            or o.engine_urls
            or a.model != o.model
            or (a.is_trained and a.lora.quantize != o.lora.quantize)
        ),
        ".lora_base={a.lora_base} takes the model and engine of {a.lora_base}; leave out model, "
        "lora.quantize, "
        "api and engine_urls",
    ),
    (
        lambda c, name, a, o: o.lora.quantize != "none" and c.rollout_ranks,
        ".lora_base={a.lora_base}: only an engine of the learner's ranks reads a shared model in "
        "4 bits; "
        "leave out --rollout_ranks",
    ),
]
