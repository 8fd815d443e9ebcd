"""What flags must be: ranges, which stand beside each flag, and tables of contradictions. Checking
changes nothing."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import re
from collections.abc import Iterable, Iterator
from typing import Any

from rl_core.algorithms import ADVANTAGES

URL = r"https?://[^/\s]+/?"
# Sections that hold one section for each name that the user gives.
NAMED = ("actors", "envs")


def split(text: str | None) -> list[str]:
    """Parts of a flag's value that stand between commas."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def printable(text: str, also: str = "") -> str:
    """What a terminal can show: a reply may hold anything, and an error repeats it."""
    return "".join(c if c.isprintable() or c in also else repr(c)[1:-1] for c in text)


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` or the list of what is known."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def flags_in(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, dataclasses.Field]]:
    """(name, value, field) of every flag, those of named actors and environments too."""
    for f in dataclasses.fields(section):
        value, name = getattr(section, f.name), f"{prefix}{f.name}"
        if dataclasses.is_dataclass(value):
            yield from flags_in(value, f"{name}.")
        elif f.name in NAMED:
            for key, part in value.items():
                yield from flags_in(part, f"{name}.{key}.")
        else:
            yield name, value, f


# What is refused: (is it broken?, message, filled in from what the rule reads). Rules before one
# hold. c: the configuration.
OF_RUN = [
    (lambda c: not c.out, "--out is missing: name a folder for the run, such as --out runs/first"),
    (
        lambda c: not c.actors,
        "--model is missing: a folder or hub name, such as --model Qwen/Qwen3-0.6B",
    ),
    (
        lambda c: not c.trained,
        "none of the actors learns; leave out --actors.NAME.train=false for one",
    ),
    (
        lambda c: None not in (c.num_steps, c.num_epochs),
        "--num_steps={c.num_steps} and --num_epochs={c.num_epochs} say the same; leave one out",
    ),
    (
        lambda c: c.is_rl and not c.env_path,
        "--env_path is missing: a Python file with a reward_fn",
    ),
    (
        lambda c: not c.is_rl and len(c.actors) > 1,
        "--algorithm {c.algorithm} trains one actor; give one model",
    ),
    (
        lambda c: c.tasks_per_step % c.learner.minibatches,
        "--learner.minibatches={c.learner.minibatches} must divide "
        "--tasks_per_step={c.tasks_per_step}",
    ),
    (
        lambda c: c.longest_sample > c.learner.microbatch_tokens,
        "--learner.microbatch_tokens={c.learner.microbatch_tokens} must hold a whole episode (or "
        "pair) of {c.longest_sample} tokens, max_prompt_tokens + turns * max_tokens over cp; raise "
        "it, or lower these",
    ),
    (
        lambda c: c.learner.kernels == "compile" and c.tp > 1,
        "--learner.kernels=compile has no --tp; leave one out",
    ),
    (
        lambda c: c.learner.offload == "always" and c.optim.name == "adamw8bit",
        "--optim.name=adamw8bit saves device memory, where --learner.offload=always keeps nothing; "
        "take adamw",
    ),
    (
        lambda c: c.keep_best and not c.eval_every,
        "--keep_best={c.keep_best} needs evaluations: give --eval_every",
    ),
    (
        lambda c: c.preference.label_smoothing and "sigmoid" not in c.preference.loss,
        "--preference.label_smoothing={c.preference.label_smoothing} needs --preference.loss "
        "sigmoid",
    ),
    (
        lambda c: (
            c.rollout.lagged[0]
            and (c.max_staleness or c.engine_ranks or c.sharers or c.has_servers)
        ),
        "--rollout.lagged needs a second engine: leave out --max_staleness, --engine_ranks, share "
        "and engine_urls",
    ),
    (
        lambda c: len(c.env_paths) < len(split(c.env_path)),
        "--env_path={c.env_path}: two files have one name; rename one",
    ),
    (
        lambda c: c.env_path and not any(c.env(name).weight for name in c.env_paths),
        "every environment has --envs.NAME.weight 0, so that none is trained in; raise one",
    ),
    (
        lambda c: len(c.env_paths) > 1 and (c.data.train or c.data.eval),
        "--data.train and --data.eval are for one environment; give --envs.NAME.train and "
        "--envs.NAME.eval",
    ),
]
# (is it asked for?, by which flag, the library that it needs, the extra that brings it)
LIBRARIES = [
    (lambda c: c.optim.name == "adamw8bit", "--optim.name=adamw8bit", "bitsandbytes", "bnb"),
    (
        lambda c: any(actor.lora.quantize == "nf4" for actor in c.actors.values()),
        "lora.quantize=nf4",
        "bitsandbytes",
        "bnb",
    ),
    (
        lambda c: c.learner.kernels == "liger",
        "--learner.kernels=liger",
        "liger_kernel",
        "liger",
    ),
    (
        lambda c: any(actor.api for actor in c.actors.values()),
        "--actors.NAME.api",
        "openai",
        "api",
    ),
]
# a: the actor, or the environment.
TOO_MANY_TOKENS = (
    lambda c, name, a: (a.max_tokens or 0) > c.max_tokens,
    ".max_tokens={a.max_tokens} must be at most --max_tokens={c.max_tokens}",
)
OF_ACTOR = [
    TOO_MANY_TOKENS,
    (
        lambda c, name, a: not a.model,
        ".model is missing: a folder or hub name, or the endpoint's model",
    ),
    (
        lambda c, name, a: a.api and a.train,
        ".api={a.api} and train=true: an endpoint cannot learn; drop one of them",
    ),
    (
        lambda c, name, a: (a.lora.rank or a.lr) and not a.is_trained,
        ": lora.rank and lr are of an actor that learns; leave them out",
    ),
    (
        lambda c, name, a: not a.lora.rank and a.lora != type(a.lora)(),
        ".lora.rank is missing beside other flags of adapters; give --actors.{name}.lora.rank 16",
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
        ".lora.quantize={a.lora.quantize} has no --learner.kernels=compile and no "
        "--learner.offload=always; leave one out",
    ),
    (
        lambda c, name, a: a.servers and not (c.is_rl and a.is_trained),
        ".engine_urls is for an actor that learns by RL; a frozen one is an endpoint: "
        "--actors.{name}.api URL/v1",
    ),
    (
        lambda c, name, a: (
            len(set(a.servers)) < len(a.servers)
            or not all(re.fullmatch(URL, url) for url in a.servers)
        ),
        ".engine_urls={a.engine_urls} must be different addresses, such as http://127.0.0.1:30000",
    ),
]
# a: an actor that shares the model of o.
OF_SHARER = [
    (
        lambda c, name, a, o: o.share or not o.is_trained or not o.lora.rank,
        ".share={a.share}: what is shared is a frozen model beside adapters; give "
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
# a: an actor; e: the class of its engine.
OF_ENGINE = [
    (
        lambda c, name, a, e: c.engine_tp > 1 and not e.is_elsewhere,
        "--engine_tp={c.engine_tp} needs --engine sglang",
    ),
    (
        lambda c, name, a, e: c.engine_args and not e.is_elsewhere,
        "--engine_args={c.engine_args} needs --engine sglang",
    ),
    (
        lambda c, name, a, e: c.rollout.fixed_order and e.is_elsewhere,
        "--rollout.fixed_order=true needs --engine embedded: a server samples in an order of its "
        "own",
    ),
    (
        lambda c, name, a, e: (
            a.share and c.actors[a.share].lora.quantize != "none" and not e.shares_weights
        ),
        "--actors.{name}.share={a.share}: only an embedded engine reads a shared model in 4 bits; "
        "take --engine embedded",
    ),
    (
        lambda c, name, a, e: a.router_replay and not e.records_experts,
        "--actors.{name}.router_replay=true needs --engine embedded, which tells the experts of "
        "each token",
    ),
]
# a: the preset with the parts that were given; f: whether advantage_fn is defined.
OF_ALGORITHM = [
    (
        lambda c, a, f: f and a.has_critic and c.algo.advantage is None,
        "{c.env_path} defines advantage_fn, which --algorithm {c.algorithm} would not call: its "
        "advantages come from a critic; set --algo.advantage gae to keep the critic, or take "
        "--algorithm grpo",
    ),
    (
        lambda c, a, f: a.advantage == "custom" and not f,
        "--algo.advantage=custom needs def advantage_fn(rewards) in {c.env_path}; define it",
    ),
    (
        lambda c, a, f: (
            c.group_size < 2 and (ADVANTAGES[a.advantage].needs_group or a.refill_rounds)
        ),
        "--group_size={c.group_size}: a baseline and refill_rounds compare episodes of a group; "
        "take at least 2, or --algo.advantage none or gae",
    ),
    (
        lambda c, a, f: c.critic != type(c.critic)() and not a.has_critic,
        "--critic.* has no meaning for the advantage {a.advantage}; leave it out, or take "
        "--algorithm ppo",
    ),
    (
        lambda c, a, f: (
            a.has_critic
            and (
                a.objective == "gspo"
                or a.refill_rounds
                or a.normalize == "env"
                or a.turn_discount is not None
            )
        ),
        "--algo.advantage=gae: a critic learns from every token; leave out objective gspo, "
        "refill_rounds, normalize env and turn_discount",
    ),
    (
        lambda c, a, f: a.objective == "cispo" and a.dual_clip,
        "--algo.objective=cispo has no --algo.dual_clip; take objective clip",
    ),
    (
        lambda c, a, f: 0 < a.dual_clip <= 1,
        "--algo.dual_clip={a.dual_clip} must be above 1; 0 is off, 3 is usual",
    ),
    (
        lambda c, a, f: (c.algo.kl or c.algo.kl_in) and not a.kl_coef,
        "--algo.kl and kl_in need --algo.kl_coef above 0",
    ),
    (
        lambda c, a, f: a.correction_range[0] >= a.correction_range[1],
        "--algo.correction_range={a.correction_range} must be two bounds, the lower first; 0.5,2 "
        "is usual",
    ),
    (
        lambda c, a, f: c.algo.correction_range and a.correction == "none",
        "--algo.correction_range needs --algo.correction",
    ),
    (
        lambda c, a, f: a.overlong_buffer and a.overlong != "soft",
        "--algo.overlong_buffer needs --algo.overlong soft",
    ),
    (
        lambda c, a, f: a.target_kl and c.learner.minibatches * c.learner.epochs == 1,
        "--algo.target_kl={a.target_kl} skips later updates of a step: raise "
        "--learner.minibatches or --learner.epochs",
    ),
]


def check(c: Any) -> None:
    """Raises ValueError with what was given, the rule and the fix."""
    only = {f.name: f.metadata["only"] for f in dataclasses.fields(c)}
    for name, value, f in flags_in(c):
        algorithms = f.metadata["only"] or only[name.partition(".")[0]]
        if algorithms and c.algorithm not in algorithms and value != f.default:
            raise ValueError(
                f"--{name}={value} has no meaning for --algorithm {c.algorithm}; leave it out"
            )
    for name, env in c.envs.items():
        check_env(c, name, env)
    for name, actor in c.actors.items():
        check_actor(c, name, actor)
    refuse(OF_RUN, c=c)
    for is_needed, flag, library, extra in LIBRARIES:
        if is_needed(c) and importlib.util.find_spec(library) is None:
            raise ValueError(
                f"{flag} needs {library}, which is not installed: pip install 'rl_core[{extra}]'"
            )


def check_env(c: Any, name: str, env: Any) -> None:
    if name not in c.env_paths:
        near = nearest(name, c.env_paths)
        raise ValueError(f"--envs.{name}: --env_path has no such file; {near}")
    refuse([TOO_MANY_TOKENS], f"--envs.{name}", c=c, name=name, a=env)


def check_actor(c: Any, name: str, actor: Any) -> None:
    prefix = f"--actors.{name}"
    if not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise ValueError(f"{prefix}: a name is a letter, then letters, digits, '_' and '-'")
    if actor.share:
        others = {other: part for other, part in c.actors.items() if other != name}
        if actor.share not in others:
            near = nearest(actor.share, others)
            raise ValueError(f"{prefix}.share={actor.share} is no other actor; {near}")
        refuse(OF_SHARER, prefix, c=c, name=name, a=actor, o=others[actor.share])
    refuse(OF_ACTOR, prefix, c=c, name=name, a=actor)


def check_algorithm(algorithm: Any, config: Any, has_advantage_fn: bool = False) -> None:
    """Raises ValueError for parts of an algorithm that contradict each other, or that would do
    nothing."""
    if config.is_rl:
        refuse(OF_ALGORITHM, c=config, a=algorithm, f=has_advantage_fn)


def check_engine(config: Any, name: str, engine: Any) -> None:
    """Raises ValueError for what an actor's class of engine cannot do."""
    refuse(OF_ENGINE, c=config, name=name, a=config.actors[name], e=engine)


def check_choices(config: Any, choices: dict[str, Iterable[str]]) -> None:
    """Raises ValueError for a value that is no name of its flag's table."""
    for name, value, field in flags_in(config):
        if name in choices and value != field.default and value not in choices[name]:
            raise ValueError(f"--{name}={value} is unknown; {nearest(value, choices[name])}")


def refuse(rules: list, prefix: str = "", **read: Any) -> None:
    for is_broken, message in rules:
        if is_broken(**read):
            raise ValueError(prefix + message.format(**read))
