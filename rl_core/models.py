"""Learners and engines: a learner for each trained actor, an engine for each actor or shared model."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from torch import nn

from rl_core.config import Config
from rl_core.data.chat import Chat, load_chat
from rl_core.distributed import Ranks
from rl_core.learning.algorithms import Algorithm
from rl_core.learning.attention import find_kernel
from rl_core.learning.learner import Learner
from rl_core.learning.loading import load_hf_model, load_model_config
from rl_core.learning.model import (
    PolicyModel,
    compile_blocks,
    make_policy,
    make_reference,
    named_weights,
    reads_in_place,
)
from rl_core.rules import check
from rl_core.sampling.engine import Engine, EngineSpec
from rl_core.sampling.weights import load_weights
from rl_core.types import counter_seed, option

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENGINES = {
    "embedded": "rl_core.engines.embedded:EmbeddedEngine",
    "sglang": "rl_core.engines.sglang:SGLangEngine",
}
CHECK_TP = "rl_core.options.tensor_parallel:check_tensor_parallel"
PEFT_CONFIG = "rl_core.options.lora:peft_config"
API_ACTOR = "rl_core.engines.api:ApiActor"
HERE = (None, "127.0.0.1", "localhost", "::1")  # hosts of servers that see this machine's shared memory


def choose_engine(config: Config, num_ranks: int) -> Config:
    """--engine auto becomes what it stands for here. Raises ValueError if that cannot be done."""
    if config.engine == "auto":
        has_sglang = torch.cuda.is_available() and importlib.util.find_spec("sglang") is not None
        in_4_bits = any(config.actors[owner].lora.quantize != "none" for owner in config.sharers)
        config = replace(config, engine="sglang" if has_sglang and not in_4_bits else "embedded")
        check(config)
    if config.engine == "sglang":
        option("rl_core.engines.sglang_server:check_sglang")()
    if num_ranks % config.engine_tp:
        fits = max(d for d in range(1, config.engine_tp) if num_ranks % d == 0)
        raise ValueError(f"--engine_tp={config.engine_tp} must divide the number of ranks, {num_ranks}; try {fits}")
    for name, actor in config.actors.items():
        if (n := len(actor.servers)) and num_ranks % n:
            raise ValueError(
                f"--actors.{name}.engine_urls names {n} servers for {num_ranks} ranks that sample, which is not a whole number "
                f"for each; name {max(d for d in range(1, n) if num_ranks % d == 0)}"
            )
    return config


def check_model(config: Config, name: str) -> Chat:
    """The chat template of an actor whose model is here. Raises ValueError if it cannot do what is asked of it."""
    actor = config.actors[name]
    model_config = load_model_config(actor.model)
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if positions and config.max_context_tokens > positions:
        raise ValueError(
            f"--max_prompt_tokens={config.max_prompt_tokens} and {config.turn_limit} turns of "
            f"--max_tokens={config.max_tokens} are {config.max_context_tokens} tokens, and {actor.model} "
            f"has {positions} positions (max_position_embeddings); lower them"
        )
    if actor.is_trained:
        if actor.lora.rank:
            option("rl_core.options.lora:check_lora")(actor.lora, model_config)
        if config.tp > 1:
            option(CHECK_TP)(config.tp, model_config, actor.lora)
        if path := config.critic.model:
            critic_config = load_model_config(path)
            if config.tp > 1:
                option(CHECK_TP)(config.tp, critic_config)
            critic_vocab, vocab = (c.get_text_config().vocab_size for c in (critic_config, model_config))
            if critic_vocab != vocab:
                raise ValueError(
                    f"--critic.model={path} has a vocabulary of {critic_vocab} tokens, that of {name} has "
                    f"{vocab}: a critic reads the actor's tokens; take a model of the same family"
                )
    if config.learner.kernels == "liger":
        for path in filter(None, (actor.model, config.critic.model)):
            option("rl_core.options.liger:check_liger")(load_model_config(path))
    return load_chat(actor.model, actor.chat_template)


def compute_dtype(config: Config) -> torch.dtype:
    if config.learner.dtype == "auto":
        return torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return getattr(torch, config.learner.dtype)


def is_sharded(config: Config) -> bool:
    """Whether one rank alone holds its weights as shards."""
    return compute_dtype(config) != torch.float32 or config.learner.offload == "always"


def has_reference(config: Config, algorithm: Algorithm) -> bool:
    is_dpo = algorithm.objective == "dpo"
    return algorithm.kl_coef > 0 or (is_dpo and not config.preference.reference_free)


def shared_policies(config: Config, ranks: Ranks) -> dict[str, tuple[PolicyModel, str]]:
    """(model, name of the adapter) of each actor that trains an adapter of a model that others share."""
    found = {}
    for owner, others in config.sharers.items():
        names = {owner: "default"} | {name: f"of_{name}" for name in others if config.actors[name].is_trained}
        loras = {names[name]: (config.actors[name].lora, counter_seed(config.seed, name)) for name in names}
        lora, seed = loras.pop("default")
        model = make_trained(config, config.actors[owner].model, ranks, lora, seed, more_adapters=loras)
        model.is_shared = True
        found |= {name: (model, adapter) for name, adapter in names.items()}
    return found


def make_learners(config: Config, algorithm: Algorithm, ranks: Ranks) -> dict[str, Learner]:
    shared = shared_policies(config, ranks)
    return {name: make_learner(config, algorithm, name, ranks, *shared.get(name, ())) for name in config.trained}


def make_learner(
    config: Config,
    algorithm: Algorithm,
    name: str,
    ranks: Ranks,
    policy: PolicyModel | None = None,
    adapter: str | None = None,
) -> Learner:
    """The learner of an actor, with an optimizer that has not stepped yet, and with the reference and the critic that the
    algorithm asks for. Both start as the model at the start of the run. `policy`: what is
    shared, of which it trains `adapter`."""
    actor = config.actors[name]
    if actor.lr is not None:
        config = replace(config, optim=replace(config.optim, lr=actor.lr))
    if policy is None:
        is_scoring = algorithm.objective == "rm"
        policy = make_trained(config, actor.model, ranks, actor.lora, counter_seed(config.seed, name), is_scoring)
    reference = None
    if has_reference(config, algorithm):
        reference = policy if policy.adapters else make_reference(actor.model, compute_dtype(config), ranks)
        reference.attention = config.attention
    critic = make_critic(config, actor.model, ranks, name) if algorithm.has_critic else None
    return Learner(config, algorithm, policy, ranks, reference, critic, name=name, adapter=adapter)


def make_critic(config: Config, path: str, ranks: Ranks, name: str = "policy") -> Any:
    """An unsharded or sharded model as the policy is: --critic.model, or the one at `path` with a value of 0 everywhere."""
    model = make_trained(config, config.critic.model or path, ranks, is_scoring=True)
    return option("rl_core.options.critic:Critic")(config, model, ranks, name)


def make_trained(config: Config, path: str, ranks: Ranks, *how, **more) -> PolicyModel:
    """A model that is trained, with what --learner.* says of its memory."""
    learner = config.learner
    find_kernel(config.attention, ranks.device)  # before the weights are read
    on_host = learner.offload == "always"
    checkpointing = learner.activations == "recompute"
    model = make_policy(path, compute_dtype(config), ranks, checkpointing, *how, on_host=on_host, **more)
    model.attention = config.attention
    if learner.activations == "offload":
        model.keeps_activations = option("rl_core.options.offload:activations_on_host")
    if learner.kernels == "compile":
        compile_blocks(model)
    return model


def readers_of(config: Config, learners: Mapping[str, Learner], ranks: Ranks) -> set[str]:
    """Actors whose engine reads the learner's own tensors."""
    here = () if ranks.engine_ranks else learners.items()
    return {n for n, learner in here if config.engine_of(n) == "embedded" and reads_in_place(learner.policy)}


def adapters_of(config: Config, owner: str) -> list[str]:
    """Actors that train adapters beside the model of `owner`, which others share."""
    users = [owner, *config.sharers[owner]] if owner in config.sharers else []
    return [name for name in users if config.actors[name].is_trained]


def engine_owners(config: Config) -> set[str]:
    """Actors that have an engine of their own on this device."""
    return {a.share or name for name, a in config.actors.items() if not (a.api or a.engine_urls)}


def takes_turns(config: Config) -> bool:
    """Whether one engine of a device is awake at a time. Otherwise they divide --engine_memory_frac."""
    awake = config.rollout.engines_awake
    return len(engine_owners(config)) > 1 and (awake == "one" or (awake == "auto" and config.engine == "sglang"))


def memory_frac(config: Config, name: str) -> float:
    """What an actor's SGLang engine may take of a GPU."""
    num_awake = 1 if takes_turns(config) else max(1, len(engine_owners(config)))
    num_engines = 1 + (config.rollout.lagged[0] > 0 and config.actors[name].is_trained)
    return round(config.engine_memory_frac / num_awake / num_engines, 3)


@dataclass(kw_only=True)
class LocalEngines:
    """Makes the engines of this process, one after the other."""

    config: Config
    tokenizers: Mapping[str, PreTrainedTokenizerBase]
    learners: Mapping[str, Learner]
    ranks: Ranks
    modules: list[nn.Module] = field(default_factory=list)  # that embedded engines sample with

    def make(self, names: list[str], role: str = "") -> dict[str, Engine | None]:
        """Each actor's engine. Actors that share a model have one. None: another rank's engine has this one's device."""
        owners = {name: self.config.actors[name].share or name for name in names}
        made = {owner: self._engine(owner, role) for owner in dict.fromkeys(owners.values())}
        return {name: made[owner] for name, owner in owners.items()}

    def _engine(self, name: str, role: str) -> Engine | None:
        """role: which of several engines of the actor."""
        config, actor, ranks = self.config, self.config.actors[name], self.ranks
        # The first of each --engine_tp neighbours, or of those that share a server that runs already, has the engine.
        stride = ranks.size // len(actor.servers) if actor.servers else config.engine_tp
        module, owns_weights = self._module(name, None if role else self.learners.get(name))
        if ranks.rank % stride:
            return None
        # A rank has at most its share at once, of all that may be under way.
        url = actor.servers[ranks.rank // stride] if actor.servers else ""
        groups = -(-config.tasks_per_step * (1 + config.max_staleness) * stride // ranks.size)
        adapters = {n: config.actors[n] for n in adapters_of(config, name)}
        spec = EngineSpec(
            name=name + role,
            model=actor.model,
            module=module,
            tokenizer=self.tokenizers[name],
            num_slots=min(config.rollout.max_concurrent, groups * config.group_size),
            max_context_tokens=config.max_context_tokens,
            dtype=compute_dtype(config),
            device=ranks.device,
            seed=counter_seed(config.seed, name + role, ranks.rank) % 2**31,
            adapters={
                n: option("rl_core.options.lora:peft_config")(a.lora, module, a.model).to_dict()
                for n, a in adapters.items()
            },
            owns_weights=owns_weights and takes_turns(config),
            log=Path(config.out) / f"engine_{name}{role}_{ranks.rank:05d}.log",
            start_timeout_s=config.timeout_s,
            tp=config.engine_tp,
            memory_frac=memory_frac(config, name),
            url=url,
            folder=str(Path(config.out).resolve()) if urlsplit(url).hostname not in HERE else None,
        )
        return option(ENGINES[config.engine_of(name)])(spec)

    def _module(self, name: str, learner: Learner | None) -> tuple[nn.Module, bool]:
        """What an engine samples with, and whether its weights are its own: the learner's own model where it is unsharded, or its
        weights where several actors share them, else a copy in the dtype of compute. Of SGLang's the shapes alone."""
        path, policy = self.config.actors[name].model, learner and learner.policy
        if self.config.engine_of(name) == "sglang":
            return option("rl_core.engines.sglang:make_skeleton")(path), False
        if is_read := policy is not None and reads_in_place(policy):
            module = option("rl_core.options.lora:second_model")(policy.hf) if policy.is_shared else policy.hf
        else:
            module = load_hf_model(path, compute_dtype(self.config), self.ranks.device)
            if policy is not None and policy.is_shared and hasattr(policy.hf.config, "quantization_config"):
                load_weights(module, named_weights(policy))  # what its adapters learn beside
        self.modules.append(module)
        return module, not is_read


def make_api_actor(config: Config, name: str) -> Any:
    actor = config.actors[name]
    return option(API_ACTOR)(
        name=name,
        url=actor.api,
        model=actor.model,
        api_key_env=actor.api_key_env,
        max_turns=config.turn_limit,  # of several environments each sets its own
        max_tokens=actor.max_tokens,
        max_concurrent=config.rollout.max_concurrent,
    )
