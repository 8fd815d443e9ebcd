"""Rules between the flags of actors: adapters, shared models, endpoints, servers that run
already."""

from __future__ import annotations

import re

from rl_core.config import Config
from rl_core.errors import nearest, refuse, require, split

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
        lambda c, name, a: (a.lora.rank or a.own.keys() & OF_LEARNER) and not a.is_trained,
        ": lora.rank, lr, algorithm, algo, critic, learner and optim belong to an actor that "
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
            and (c.learner.kernels == "compile" or c.learner.offload == "always")
        ),
        ".lora.quantize={a.lora.quantize} cannot be combined with --learner.kernels=compile or "
        "--learner.offload=always; leave one out",
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
        lambda c, name, a: "dtype" in a.learner and c.engine_ranks,
        ".learner.dtype: with --engine_ranks all actors have the same; give --learner.dtype",
    ),
    (
        lambda c, name, a: a.learn_every > 1 and c.rollout.lagged[0],
        ".learn_every={a.learn_every} and --rollout.lagged cannot be combined: stale weights are "
        "refreshed by updates; remove one",
    ),
    (
        lambda c, name, a: a.learn_every > max(1, c.num_steps),
        ".learn_every={a.learn_every}: the actor would not learn in --num_steps={c.num_steps}; "
        "lower learn_every",
    ),
]
# a: an actor that shares the model of o.
OF_SHARER = [
    (
        lambda c, name, a, o: (
            a.learner.keys() & OF_MODEL or a.engine_tp or a.engine_args or a.engine_memory_frac
        ),
        ".share={a.share}: learner.activations, learner.offload, learner.dtype and engine_* are "
        "the model's; give them to {a.share}",
    ),
    (
        lambda c, name, a, o: o.share or not o.is_trained or not o.lora.rank,
        ".share={a.share}: a shared model is frozen and has adapters; give "
        "--actors.{a.share}.lora.rank 16",
    ),
    (
        lambda c, name, a, o: "experts" in split(f"{a.lora.targets},{o.lora.targets}"),
        ".share={a.share}: engines apply no adapters on experts of several actors; leave experts "
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
        ".share={a.share} takes the model and engine of {a.share}; leave out model, lora.quantize, "
        "api and engine_urls",
    ),
    (
        lambda c, name, a, o: o.lora.quantize != "none" and c.engine_ranks,
        ".share={a.share}: only an engine of the learner's ranks reads a shared model in 4 bits; "
        "leave out --engine_ranks",
    ),
]


def check_actors(config: Config) -> None:
    """Raises ValueError with the value, the rule and the fix."""
    for name, actor in config.actors.items():
        prefix = f"--actors.{name}"
        others = {other: config.actors[other] for other in config.actors if other != name}
        if actor.share:
            if actor.share not in others:
                near = nearest(actor.share, others)
                raise ValueError(f"{prefix}.share={actor.share} is not another actor; {near}")
            refuse(OF_SHARER, prefix, c=config, name=name, a=actor, o=others[actor.share])
        if not actor.model:
            near = f"; of the actors, {nearest(name, others)}" if others else ""
            raise ValueError(
                f"{prefix}.model is missing: a folder or hub name, or the endpoint's model{near}"
            )
        refuse(OF_ACTOR, prefix, c=config, name=name, a=actor)
        if actor.lora.quantize == "nf4":
            require("bitsandbytes", "lora.quantize=nf4", "bnb")
        if actor.api:
            from rl_core.engines.api_dialects import dialect_of

            require(dialect_of(actor.api)[0].package, "--actors.NAME.api", "api")
    if any(actor.ranks for actor in config.actors.values()):
        from rl_core.parallel.rank_groups import check_ranks

        check_ranks(config)
