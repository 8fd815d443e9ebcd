"""Rules between flags of several subjects, and the checks of a configuration. Ranges stand next to
each flag, rules of one subject in its file. A check changes no flag."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rl_core.algorithms import Algorithm
from rl_core.config.actors import OF_ACTOR, OF_SHARER
from rl_core.config.algorithm import OF_ALGORITHM, OF_REFERENCE
from rl_core.config.config import Config
from rl_core.config.data import OF_ENVIRONMENTS
from rl_core.config.flag_parsing import flags_in
from rl_core.config.online import OF_ONLINE
from rl_core.errors import nearest, nearest_folder, refuse, require

# (True if the rule is broken, message with fields of the rule's arguments). All rules before a rule
# hold. c: the configuration.
OF_RUN = [
    (lambda c: not c.out, "--out is missing: name a folder for the run, such as --out runs/first"),
    (
        lambda c: not c.actors and c.resume,
        "--model is missing: --resume does not read the flags of the earlier run; give them "
        "again, or type rl-core train --config {c.out}/config.yaml --resume",
    ),
    (
        lambda c: not c.actors,
        "--model is missing: a folder or hub name, such as --model Qwen/Qwen3-0.6B",
    ),
    (
        lambda c: not c.trained,
        "none of the actors learns; leave out --actors.NAME.train=false for one",
    ),
    (
        lambda c: c.is_rl and not c.env_path and not c.online.on,
        "--env_path is missing: a Python file with a reward_fn, or --online for a run without one",
    ),
    (
        lambda c: not c.is_rl and len(c.actors) > 1,
        "--algorithm {c.algorithm} trains one actor; give one model",
    ),
    (
        lambda c: c.tasks_per_step % c.learner.updates_per_epoch,
        "--learner.updates_per_epoch={c.learner.updates_per_epoch} must divide "
        "--tasks_per_step={c.tasks_per_step}; change one of them",
    ),
    (
        lambda c: c.longest_sample > c.learner.microbatch_tokens,
        "--learner.microbatch_tokens={c.learner.microbatch_tokens} must hold a whole episode (or "
        "pair) of {c.longest_sample} tokens, --max_prompt_tokens={c.max_prompt_tokens} + "
        "--max_turns={c.turn_limit} * --max_tokens={c.max_tokens} over cp; raise it, or lower "
        "one of these",
    ),
    (
        lambda c: c.learner.kernels == "compile" and c.tp > 1,
        "--learner.kernels=compile cannot be combined with --tp; leave one out",
    ),
    (
        lambda c: c.ep not in (1, "auto") and c.tp > 1,
        "--ep={c.ep} cannot be combined with --tp={c.tp}; leave one out",
    ),
    (
        lambda c: c.ep not in (1, "auto") and c.learner.kernels != "default",
        "--ep={c.ep} cannot be combined with --learner.kernels={c.learner.kernels}; leave one out",
    ),
    (
        lambda c: c.keep_best and not c.eval_every,
        "--keep_best={c.keep_best} needs evaluations: give --eval_every",
    ),
    (
        lambda c: c.optim.warmup_steps and c.optim.warmup_frac,
        "--optim.warmup_steps={c.optim.warmup_steps} and --optim.warmup_frac={c.optim.warmup_frac} "
        "say the same; leave one out",
    ),
    (
        lambda c: c.preference.label_smoothing and "sigmoid" not in c.preference.loss,
        "--preference.label_smoothing={c.preference.label_smoothing} needs --preference.loss "
        "sigmoid; add it, or leave the smoothing out",
    ),
    (
        lambda c: c.algorithm == "kto" and c.tasks_per_step < 2,
        "--tasks_per_step={c.tasks_per_step}: --algorithm kto puts the reply of another row of "
        "the step behind each prompt; take at least 2",
    ),
    (
        lambda c: (
            c.rollout.stale_policy_frac and any(a.lora_base or a.servers for a in c.actors.values())
        ),
        "--rollout.stale_policy_frac needs a second engine: leave out lora_base and engine_urls",
    ),
]


def check(config: Config) -> None:
    """Raises ValueError with the flag, the rule and the fix."""
    if config.online.on and not config.is_rl:
        raise ValueError(
            f"--online cannot be combined with --algorithm {config.algorithm}; leave one out"
        )
    only = {f.name: f.metadata["only"] for f in dataclasses.fields(config)}
    for name, value, f in flags_in(config):
        algorithms = only[name.partition(".")[0]] + f.metadata["only"]
        if algorithms and config.algorithm not in algorithms and value not in (f.default, {}):
            raise ValueError(
                f"--{name}={value} has no meaning for --algorithm {config.algorithm}; leave it out"
            )
    if config.resume and config.out and not config.actors:
        check_run_exists(config.folder)
    refuse(OF_RUN, c=config)
    if config.online.on:
        refuse(OF_ONLINE, c=config)
    for name in config.trained:
        if config.actors[name].overrides:
            refuse(OF_RUN, f"actor {name}: ", c=config.of(name))


def check_run_exists(folder: Path) -> None:
    """Raises ValueError for a folder without a run, which --resume alone cannot start."""
    if not (folder / "config.yaml").exists():
        raise ValueError(
            f"--out {folder}: there is no run to resume{nearest_folder(folder)}; to start one, "
            "name a model by --model"
        )


def check_algorithm(config: Config, algorithm: Algorithm, has_advantage_fn: bool) -> None:
    """Raises ValueError with the value, the rule and the fix."""
    refuse(OF_REFERENCE, c=config, a=algorithm)
    if algorithm.is_rl:
        refuse(OF_ALGORITHM, c=config, a=algorithm, f=has_advantage_fn)


def check_actors(config: Config) -> None:
    """Raises ValueError with the value, the rule and the fix."""
    for name, actor in config.actors.items():
        prefix = f"--actors.{name}"
        others = {other: config.actors[other] for other in config.actors if other != name}
        if actor.lora_base:
            if actor.lora_base not in others:
                near = nearest(actor.lora_base, others)
                raise ValueError(
                    f"{prefix}.lora_base={actor.lora_base} is not another actor; {near}"
                )
            refuse(OF_SHARER, prefix, c=config, name=name, a=actor, o=others[actor.lora_base])
        if not actor.model:
            near = f"; of the actors, {nearest(name, others)}" if others else ""
            raise ValueError(
                f"{prefix}.model is missing: a folder or hub name, or the endpoint's model{near}"
            )
        refuse(OF_ACTOR, prefix, c=config, name=name, a=actor)
        if actor.lora.quantize == "nf4":
            require("bitsandbytes", "lora.quantize=nf4", "bnb")
    if any(actor.ranks for actor in config.actors.values()):
        from rl_core.config.rank_groups import check_ranks

        check_ranks(config)


def check_envs(config: Config) -> None:
    """Raises ValueError with the value, the rule and the fix."""
    for name, env in config.envs.items():
        if name not in config.env_paths:
            near = nearest(name, config.env_paths)
            raise ValueError(f"--envs.{name}: --env_path has no such file; {near}")
        if env.teacher and not any(config.of(actor).algo.teacher for actor in config.trained):
            raise ValueError(
                f"--envs.{name}.teacher={env.teacher} needs --algo.teacher, that of the other "
                "environments"
            )
        if (env.max_tokens or 0) > config.max_tokens:
            raise ValueError(
                f"--envs.{name}.max_tokens={env.max_tokens} must be at most "
                f"--max_tokens={config.max_tokens}"
            )
    refuse(OF_ENVIRONMENTS, c=config)
