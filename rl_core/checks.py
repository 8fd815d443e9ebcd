"""What can be refused from the flags alone, before anything is read: each with the value, the rule and the fix."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rl_core.config import (
    Config,
    EnvConfig,
    LoraConfig,
    PreferenceConfig,
    RolloutConfig,
    SftConfig,
    nearest,
)

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def check_config(config: Config) -> None:
    """Raises ValueError for what can be known from the flags alone."""

    def refuse(bad: Any, text: str) -> None:
        if bad:
            raise ValueError(text)

    for name in ("tasks_per_step", "group_size", "max_tokens", "max_prompt_tokens"):
        refuse(getattr(config, name) < 1, f"--{name}={getattr(config, name)} must be at least 1")
    refuse(config.num_steps < 0, f"--num_steps={config.num_steps} must be at least 0")
    refuse(
        not config.out and not config.dry_run, "--out is missing: name a folder for the run, such as --out runs/first"
    )
    refuse(not config.actors, "--model is missing: a folder or hub name, such as --model Qwen/Qwen3-0.6B")
    check_actors(config)
    check_envs(config)
    is_rl, is_pairs = config.is_rl, config.algorithm in ("dpo", "rm")
    p = config.preference
    refuse(
        config.algorithm != "dpo" and p != PreferenceConfig(),
        f"--preference.* has no meaning for --algorithm {config.algorithm}; leave it out",
    )
    s = config.sft
    refuse(
        config.algorithm != "sft" and s != SftConfig(),
        f"--sft.* has no meaning for --algorithm {config.algorithm}; leave it out, or run --algorithm sft first",
    )
    refuse(
        not (min(s.action_weight, s.observation_weight) >= 0 < s.action_weight + s.observation_weight),
        f"--sft.action_weight={s.action_weight} and --sft.observation_weight={s.observation_weight} must be at least 0, and "
        "one of them above 0",
    )
    for name in ("min_reward", "actor"):
        value = getattr(config.data, name)
        refuse(
            config.algorithm != "sft" and value is not None,
            f"--data.{name}={value} has no meaning for --algorithm {config.algorithm}; leave it out",
        )
    refuse(p.beta <= 0, f"--preference.beta={p.beta} must be above 0; 0.1 is usual")
    refuse(
        not 0 <= p.label_smoothing < 0.5 or (p.label_smoothing and p.loss != "sigmoid"),
        f"--preference.label_smoothing={p.label_smoothing} must lie in 0..0.5 and needs --preference.loss sigmoid",
    )
    refuse(
        is_rl and not config.env_path,
        "--env_path is missing: a Python file with a reward_fn, such as envs/sort_digits.py",
    )
    c = config.critic
    for name in ("gamma", "gae_lambda"):
        refuse(not 0 <= getattr(c, name) <= 1, f"--critic.{name}={getattr(c, name)} must lie in 0..1")
    for name in ("lr", "warmup_steps", "value_clip"):
        refuse(getattr(c, name) < 0, f"--critic.{name}={getattr(c, name)} must not be negative")
    n, m = config.tasks_per_step, config.learner.minibatches
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    refuse(
        m < 1 or n % m,
        f"--learner.minibatches={m} must divide --tasks_per_step={n}; try {min(divisors, key=lambda d: abs(d - m))}",
    )
    refuse(config.learner.epochs < 1, f"--learner.epochs={config.learner.epochs} must be at least 1")
    refuse(
        config.learner.activation_offload and config.learner.activation_checkpointing,
        "--learner.activation_offload keeps what --learner.activation_checkpointing does not keep at all; take one of them",
    )
    refuse(
        config.learner.compile and (config.tp > 1 or config.liger),
        f"--learner.compile compiles what --{'liger' if config.liger else 'tp'} computes otherwise; leave one of them out",
    )
    refuse(
        config.learner.offload == "phase" and not is_rl,
        f"--learner.offload=phase waits for engines, which --algorithm {config.algorithm} does not have; take always, or none",
    )
    refuse(
        config.sampling.temperature <= 0 and is_rl,
        f"--sampling.temperature={config.sampling.temperature} must be above 0: greedy samples of a group are all the same",
    )
    refuse(
        not 0 <= config.rollout.max_failed_fraction <= 1,
        f"--rollout.max_failed_fraction={config.rollout.max_failed_fraction} must lie in 0..1",
    )
    for name in ("max_staleness", "engine_ranks"):
        value = getattr(config, name)
        refuse(value < 0, f"--{name}={value} must be at least 0")
        refuse(
            value and not is_rl,
            f"--{name}={value} is for what episodes are sampled for, and has no meaning for --algorithm {config.algorithm}; "
            "leave it out",
        )
    check_lagged(config)
    refuse(
        config.canary_tolerance is not None and config.canary_tolerance < 0,
        f"--canary_tolerance={config.canary_tolerance} must be above 0, such as 0.001; 0 does not look",
    )
    for name in ("dp_replicate", "cp", "tp"):
        refuse(getattr(config, name) < 1, f"--{name}={getattr(config, name)} must be at least 1, which is off")
    refuse(config.engine_tp < 1, f"--engine_tp={config.engine_tp} must be at least 1, which is off")
    refuse(
        config.engine_tp > 1 and config.engine == "embedded",
        f"--engine_tp={config.engine_tp}: the embedded engine is on each rank by itself; leave it out, or take --engine sglang",
    )
    refuse(
        not 0 < config.engine_memory_frac < 1,
        f"--engine_memory_frac={config.engine_memory_frac} must lie between 0 and 1, such as 0.6",
    )
    refuse(
        config.cp > 1 and 2 * config.cp > config.max_context_tokens,
        f"--cp={config.cp} cuts each sequence into {2 * config.cp} chunks, more than the {config.max_context_tokens} tokens "
        f"it may have; try --cp {max(1, config.max_context_tokens // 2)} or less",
    )
    longest = -(-config.max_context_tokens * (2 if is_pairs else 1) // config.cp)
    refuse(
        config.learner.microbatch_tokens < longest,
        f"--learner.microbatch_tokens={config.learner.microbatch_tokens} must hold one whole "
        f"{'pair' if is_pairs else 'episode'} of up to {longest} tokens ({'2 * ' if is_pairs else ''}(max_prompt_tokens + "
        f"max_turns * max_tokens){' / cp' if config.cp > 1 else ''}); raise it or lower these",
    )
    refuse(config.optim.lr < 0, f"--optim.lr={config.optim.lr} must not be negative")
    refuse(
        not 0 < config.optim.decay_frac <= 1, f"--optim.decay_frac={config.optim.decay_frac} must lie above 0, up to 1"
    )
    check_extras(config)


def check_lagged(config: Config) -> None:
    """Raises ValueError for older weights beside the newest where that cannot be, from the flags alone."""
    frac, every = config.rollout.lagged_frac, config.rollout.lagged_every
    if not frac:
        if every != RolloutConfig.lagged_every:
            raise ValueError(
                f"--rollout.lagged_every={every} has no meaning without --rollout.lagged_frac; set it, or leave this out"
            )
        return
    given = f"--rollout.lagged_frac={frac}"
    if not 0 < frac <= 1:
        raise ValueError(f"{given} must lie in 0..1, such as 0.25")
    if every < 2:
        raise ValueError(
            f"--rollout.lagged_every={every} must be at least 2: weights that are new at every step are not older"
        )
    if not config.is_rl:
        raise ValueError(
            f"{given} is for turns that are sampled, and has no meaning for --algorithm {config.algorithm}; leave it out"
        )
    for name in config.trained:
        if config.actors[name].engine_urls:
            raise ValueError(
                f"{given} would need a second server for {name}, with the older weights; leave out "
                f"--actors.{name}.engine_urls, for engines of this run's own"
            )
    if config.max_staleness:
        raise ValueError(
            f"{given}: turns by weights that are up to {every - 1} versions old would break the bound of "
            f"--max_staleness={config.max_staleness}; leave out one of them"
        )
    if config.engine_ranks:
        raise ValueError(
            f"{given} needs engines beside the learners, which save the older weights, and --engine_ranks="
            f"{config.engine_ranks} has them on other ranks; leave out one of them"
        )
    for owner, others in config.sharers.items():
        raise ValueError(
            f"{given} needs a model of its own for each actor that learns, and {', '.join(others)} would share that of {owner}; "
            f"leave out --actors.{others[0]}.share, or this"
        )


def check_actors(config: Config) -> None:
    """Raises ValueError for actors that cannot speak or learn, from the flags alone."""
    share_models(config)
    for name, actor in config.actors.items():
        at = f"--actors.{name}"
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
            raise ValueError(f"actor {name!r}: a name is a letter, then letters, digits, '_' and '-'")
        if not actor.model:
            raise ValueError(
                f"{at}.model is missing: a folder or hub name" + (", or the endpoint's model" * bool(actor.api))
            )
        if actor.api and actor.train:
            raise ValueError(
                f"{at}.api={actor.api} and {at}.train=true: what answers elsewhere cannot learn; drop one of them"
            )
        if actor.api and (actor.lora.rank or actor.chat_template):
            raise ValueError(
                f"{at}.api={actor.api} speaks with its own model and chat template; leave lora and chat_template out"
            )
        if actor.engine_urls or actor.engine_folder:
            check_attached(config, name)
        if actor.max_tokens is not None and not 1 <= actor.max_tokens <= config.max_tokens:
            raise ValueError(f"{at}.max_tokens={actor.max_tokens} must lie in 1..--max_tokens={config.max_tokens}")
        if actor.lora.rank and not actor.is_trained:
            raise ValueError(
                f"{at}.lora.rank={actor.lora.rank}: adapters are trained, and {name} is not; leave them out"
            )
        if actor.lr is not None and not (actor.is_trained and actor.lr >= 0):
            raise ValueError(f"{at}.lr={actor.lr} must not be negative, and be of an actor that learns")
    if not config.trained:
        raise ValueError(
            f"none of the actors {', '.join(config.actors)} learns; leave out --actors.NAME.train=false for one"
        )
    if not config.is_rl and len(config.actors) > 1:
        raise ValueError(
            f"--algorithm {config.algorithm} trains one actor, there are {', '.join(config.actors)}; give one model"
        )


def check_attached(config: Config, name: str) -> None:
    """Raises ValueError unless SGLang servers that run already can sample for this actor."""
    at, actor = f"--actors.{name}", config.actors[name]
    if not actor.servers:
        raise ValueError(f"{at}.engine_folder={actor.engine_folder} is for servers, and {at}.engine_urls names none")
    for url in actor.servers:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise ValueError(f"{at}.engine_urls: {url!r} must be a server's address, such as http://127.0.0.1:30000")
        if parts.hostname not in LOOPBACK and not actor.engine_folder:
            raise ValueError(
                f"{at}.engine_urls: {url} may be another machine, which cannot read this one's memory; name a folder that both "
                f"see by the same path, such as {at}.engine_folder=/shared/weights"
            )
    if len(set(actor.servers)) < len(actor.servers):
        raise ValueError(f"{at}.engine_urls names a server twice; each has its own share of the episodes")
    if actor.engine_folder and not Path(actor.engine_folder).is_dir():
        raise ValueError(f"{at}.engine_folder={actor.engine_folder} is no folder; make it first")
    if not actor.is_trained:
        raise ValueError(
            f"{at}.engine_urls is for an actor that learns, whose weights the servers get; a frozen one is an endpoint: "
            f"{at}.api={actor.servers[0]}/v1"
        )
    if not config.is_rl:
        raise ValueError(f"{at}.engine_urls: --algorithm {config.algorithm} samples nothing; leave it out")
    if actor.share or name in config.sharers:
        raise ValueError(f"{at}.engine_urls: servers that run already get whole weights alone; leave out share")


def share_models(config: Config) -> None:
    """Gives each actor that shares a model what it takes from the one whose it is. Raises ValueError where it cannot."""
    for name, actor in config.actors.items():
        if actor.share is None:
            continue
        at, others = f"--actors.{name}", [other for other in config.actors if other != name]
        share = f"{at}.share={actor.share}"
        if actor.share not in others:
            raise ValueError(f"{share} is no other actor; {nearest(actor.share, others)}")
        owner = config.actors[actor.share]
        if owner.share:
            raise ValueError(f"{share} shares the model of {owner.share} itself; take {at}.share={owner.share}")
        if owner.api or not owner.is_trained or not owner.lora.rank:
            raise ValueError(
                f"{share}: a model can be shared where it is frozen beside adapters; give {actor.share} some, such as "
                f"--actors.{actor.share}.lora.rank=16"
            )
        if actor.api:
            raise ValueError(f"{share} and {at}.api={actor.api}: it speaks here or elsewhere; drop one of them")
        if actor.model not in (None, owner.model):
            raise ValueError(
                f"{share}, whose model is {owner.model}, and {at}.model={actor.model}: leave the model out"
            )
        if actor.lora.quantize not in ("none", owner.lora.quantize):
            raise ValueError(
                f"{share}, whose model has quantize={owner.lora.quantize}, and {at}.lora.quantize={actor.lora.quantize}: "
                "leave that out"
            )
        if config.engine_ranks and owner.lora.quantize != "none":
            raise ValueError(
                f"{share}: ranks that only sample (--engine_ranks={config.engine_ranks}) would sample by the weights before "
                f"quantize={owner.lora.quantize}; leave out one of them"
            )
        if config.engine == "sglang" and owner.lora.quantize != "none":
            raise ValueError(
                f"{share}: --engine=sglang would sample by the weights before quantize={owner.lora.quantize}; leave that out, or "
                "take --engine embedded"
            )
        actor.model = owner.model
        if actor.is_trained and not actor.lora.rank and replace(actor.lora, quantize="none") != LoraConfig():
            raise ValueError(
                f"{at}.lora.rank is missing beside other {at}.lora flags; give it, or leave out all of them"
            )
        if actor.is_trained:
            own = actor.lora if actor.lora.rank else owner.lora
            actor.lora = replace(own, quantize=owner.lora.quantize)


def check_envs(config: Config) -> None:
    """Raises ValueError for several environments that cannot be told apart, or flags of one that is not there."""
    paths, names = [p for p in (config.env_path or "").split(",") if p.strip()], config.env_paths
    if len(names) < len(paths):
        raise ValueError(
            f"--env_path={config.env_path}: two files have one name, by which they are told apart; rename one"
        )
    for name, env in config.envs.items():
        at = f"--envs.{name}"
        if name not in names:
            raise ValueError(f"{at}: --env_path has no such file; {nearest(name, names)}")
        if env.weight < 0:
            raise ValueError(f"{at}.weight={env.weight} must be at least 0, which is: only evaluated")
        if env.max_tokens is not None and not 1 <= env.max_tokens <= config.max_tokens:
            raise ValueError(f"{at}.max_tokens={env.max_tokens} must lie in 1..--max_tokens={config.max_tokens}")
        if env.max_turns is not None and env.max_turns < 1:
            raise ValueError(f"{at}.max_turns={env.max_turns} must be at least 1")
    if names and not any(config.envs.get(name, EnvConfig()).weight for name in names):
        raise ValueError(
            f"every environment of {', '.join(names)} has --envs.NAME.weight 0, so that none is trained in"
        )
    if len(names) > 1 and (config.data.train or config.data.eval):
        raise ValueError(
            "with several environments rows are of one of them: give --envs.NAME.train and eval, not --data.*"
        )


def check_extras(config: Config) -> None:
    """Raises ValueError if a flag needs an optional library that is not installed, or contradicts another."""
    needed = []
    if config.optim.name not in ("adamw", "sgd") and config.learner.offload == "always":
        raise ValueError(
            f"--optim.name={config.optim.name} saves memory of the device, where --learner.offload always keeps nothing of the "
            "optimizer; take --optim.name adamw"
        )
    if config.optim.name not in ("adamw", "sgd"):
        needed.append(("bnb", "bitsandbytes", f"--optim.name={config.optim.name}"))
    if config.engine == "sglang":
        needed.append(("sglang", "sglang", "--engine=sglang"))
    if config.liger:
        needed.append(("liger", "liger_kernel", "--liger"))
    for name, actor in config.actors.items():
        at, lora = f"--actors.{name}.lora", actor.lora
        if actor.api:
            needed.append(("api", "openai", f"--actors.{name}.api={actor.api}"))
        if lora.rank < 0 or lora.alpha <= 0:
            raise ValueError(f"{at}.rank={lora.rank} and {at}.alpha={lora.alpha} must not be negative, and alpha not 0")
        if lora.quantize != "none" and not lora.rank:
            raise ValueError(f"{at}.quantize={lora.quantize} freezes the model: give it adapters, such as {at}.rank=16")
        if lora.rank and config.algorithm == "rm":
            raise ValueError(f"{at}.rank={lora.rank}: --algorithm rm trains the whole model; leave adapters out")
        if lora.quantize != "none" and config.learner.compile:
            raise ValueError(f"--learner.compile cannot compile {at}.quantize={lora.quantize}; leave one of them out")
        if lora.quantize != "none" and config.learner.offload == "always":
            raise ValueError(
                f"{at}.quantize={lora.quantize} cannot be computed with from the host: leave out --learner.offload always, or "
                f"take {at}.quantize none"
            )
        if lora.rank:
            needed.append(("lora", "peft", f"{at}.rank={lora.rank}"))
        if lora.quantize != "none":
            needed.append(("bnb", "bitsandbytes", f"{at}.quantize={lora.quantize}"))
    for extra, library, flag_given in needed:
        if importlib.util.find_spec(library) is None:
            raise ValueError(f"{flag_given} needs {library}, which is not installed: pip install .[{extra}]")
