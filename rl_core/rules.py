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
OUTSIDE = {
    "at_least": lambda v, b: v < b,
    "above": lambda v, b: v <= b,
    "at_most": lambda v, b: v > b,
}
Rules = Iterator[tuple[Any, str]]  # (is it broken?, message); rules before it hold


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
        parts = value.values() if isinstance(value, dict) else ()
        if dataclasses.is_dataclass(value):
            yield from flags_in(value, f"{name}.")
        elif any(map(dataclasses.is_dataclass, parts)):
            for key, part in value.items():
                yield from flags_in(part, f"{name}.{key}.")
        else:
            yield name, value, f


def check(c: Any) -> None:
    """Raises ValueError with what was given, the rule and the fix."""
    only = {f.name: f.metadata["only"] for f in dataclasses.fields(c)}
    for name, value, f in flags_in(c):
        refuse(of_value(value, f, c.algorithm, only[name.partition(".")[0]]), f"--{name}={value}")
    for name, env in c.envs.items():
        refuse(of_env(c, name, env), f"--envs.{name}")
    for name, actor in c.actors.items():
        refuse(of_actor(c, name, actor), f"--actors.{name}")
    refuse(of_run(c))


def check_algorithm(algorithm: Any, config: Any, has_advantage_fn: bool = False) -> None:
    """Raises ValueError for parts of an algorithm that contradict each other, or that would do
    nothing."""
    if config.is_rl:
        refuse(of_algorithm(config, algorithm, has_advantage_fn))


def check_engine(config: Any, name: str, engine: Any) -> None:
    """Raises ValueError for what an actor's class of engine cannot do."""
    refuse(of_engine(config, name, engine))


def refuse(rules: Rules, prefix: str = "") -> None:
    for is_broken, text in rules:
        if is_broken:
            raise ValueError(prefix + text)


def of_value(value: Any, f: dataclasses.Field, algorithm: str, of_section: tuple) -> Rules:
    default = f.default if f.default is not dataclasses.MISSING else f.default_factory()
    only, values = f.metadata["only"] or of_section, value if isinstance(value, tuple) else (value,)
    yield (
        only and value != default and algorithm not in only,
        f" has no meaning for --algorithm {algorithm}; leave it out",
    )
    for word, is_outside in OUTSIDE.items():
        bound = f.metadata[word]
        bounds = bound if isinstance(bound, tuple) else (bound,) * len(values)
        is_wrong = any(
            None not in pair and is_outside(*pair) for pair in zip(values, bounds, strict=True)
        )
        yield is_wrong, f" must be {word.replace('_', ' ')} {bound}"


def of_run(c: Any) -> Rules:
    yield not c.out, "--out is missing: name a folder for the run, such as --out runs/first"
    yield not c.actors, "--model is missing: a folder or hub name, such as --model Qwen/Qwen3-0.6B"
    yield not c.trained, "none of the actors learns; leave out --actors.NAME.train=false for one"
    steps, epochs = c.num_steps, c.num_epochs
    yield (
        None not in (steps, epochs),
        f"--num_steps={steps} and --num_epochs={epochs} say the same; leave one out",
    )
    yield c.is_rl and not c.env_path, "--env_path is missing: a Python file with a reward_fn"
    yield (
        not c.is_rl and len(c.actors) > 1,
        f"--algorithm {c.algorithm} trains one actor; give one model",
    )
    size, learner = c.tasks_per_step, c.learner
    yield (
        size % learner.minibatches,
        f"--learner.minibatches={learner.minibatches} must divide --tasks_per_step={size}",
    )
    longest = -(-c.max_context_tokens * (2 if c.algorithm in ("dpo", "rm") else 1) // c.cp)
    yield (
        longest > learner.microbatch_tokens,
        f"--learner.microbatch_tokens={learner.microbatch_tokens} must hold a whole episode (or "
        f"pair) of {longest} tokens, "
        "max_prompt_tokens + turns * max_tokens over cp; raise it, or lower these",
    )
    yield (
        learner.kernels == "compile" and c.tp > 1,
        "--learner.kernels=compile has no --tp; leave one out",
    )
    yield (
        learner.offload == "always" and c.optim.name == "adamw8bit",
        "--optim.name=adamw8bit saves device memory, where --learner.offload=always keeps nothing; "
        "take adamw",
    )
    yield (
        c.keep_best and not c.eval_every,
        f"--keep_best={c.keep_best} needs evaluations: give --eval_every",
    )
    smoothing, loss = c.preference.label_smoothing, c.preference.loss
    yield (
        smoothing and "sigmoid" not in loss,
        f"--preference.label_smoothing={smoothing} needs --preference.loss sigmoid",
    )
    yield (
        c.rollout.lagged[0]
        and (
            c.max_staleness
            or c.engine_ranks
            or c.sharers
            or any(a.engine_urls for a in c.actors.values())
        ),
        "--rollout.lagged needs a second engine: leave out --max_staleness, --engine_ranks, share "
        "and engine_urls",
    )
    for is_needed, given, library, extra in (
        (c.optim.name == "adamw8bit", "--optim.name=adamw8bit", "bitsandbytes", "bnb"),
        (
            any(a.lora.quantize == "nf4" for a in c.actors.values()),
            "lora.quantize=nf4",
            "bitsandbytes",
            "bnb",
        ),
        (learner.kernels == "liger", "--learner.kernels=liger", "liger_kernel", "liger"),
        (any(a.api for a in c.actors.values()), "--actors.NAME.api", "openai", "api"),
    ):
        is_missing = is_needed and importlib.util.find_spec(library) is None
        yield (
            is_missing,
            f"{given} needs {library}, which is not installed: pip install 'rl_core[{extra}]'",
        )
    paths = c.env_paths
    yield (
        len(paths) < len(split(c.env_path)),
        f"--env_path={c.env_path}: two files have one name; rename one",
    )
    yield (
        paths and not any(c.env(name).weight for name in paths),
        "every environment has --envs.NAME.weight 0, so that none is trained in; raise one",
    )
    yield (
        len(paths) > 1 and (c.data.train or c.data.eval),
        "--data.train and --data.eval are for one environment; give --envs.NAME.train and "
        "--envs.NAME.eval",
    )


def too_many_tokens(c: Any, part: Any) -> tuple[Any, str]:
    text = f".max_tokens={part.max_tokens} must be at most --max_tokens={c.max_tokens}"
    return (part.max_tokens or 0) > c.max_tokens, text


def of_env(c: Any, name: str, env: Any) -> Rules:
    yield name not in c.env_paths, f": --env_path has no such file; {nearest(name, c.env_paths)}"
    yield too_many_tokens(c, env)


def of_actor(c: Any, name: str, a: Any) -> Rules:
    lora, servers = a.lora, a.servers
    yield too_many_tokens(c, a)
    yield (
        not re.fullmatch(r"[A-Za-z][\w-]*", name),
        ": a name is a letter, then letters, digits, '_' and '-'",
    )
    if a.share:
        others = {other: part for other, part in c.actors.items() if other != name}
        yield (
            a.share not in others,
            f".share={a.share} is no other actor; {nearest(a.share, others)}",
        )
        yield from of_sharer(c, a, others[a.share])
    yield not a.model, ".model is missing: a folder or hub name, or the endpoint's model"
    yield (
        a.api and a.train,
        f".api={a.api} and train=true: an endpoint cannot learn; drop one of them",
    )
    yield (
        (lora.rank or a.lr) and not a.is_trained,
        ": lora.rank and lr are of an actor that learns; leave them out",
    )
    yield (
        not lora.rank and lora != type(lora)(),
        f".lora.rank is missing beside other flags of adapters; give --actors.{name}.lora.rank 16",
    )
    yield (
        lora.rank and c.algorithm == "rm",
        ".lora.rank: --algorithm rm trains the whole model; leave it out",
    )
    yield (
        lora.quantize != "none"
        and (c.learner.kernels == "compile" or c.learner.offload == "always"),
        f".lora.quantize={lora.quantize} has no --learner.kernels=compile and no "
        "--learner.offload=always; leave one out",
    )
    yield (
        servers and not (c.is_rl and a.is_trained),
        ".engine_urls is for an actor that learns by RL; a frozen one is an endpoint: "
        f"--actors.{name}.api URL/v1",
    )
    yield (
        len(set(servers)) < len(servers) or not all(re.fullmatch(URL, url) for url in servers),
        f".engine_urls={a.engine_urls} must be different addresses, such as http://127.0.0.1:30000",
    )


def of_sharer(c: Any, a: Any, owner: Any) -> Rules:
    what, quantize = f".share={a.share}", owner.lora.quantize
    yield (
        owner.share or not owner.is_trained or not owner.lora.rank,
        f"{what}: what is shared is a frozen model beside adapters; give "
        f"--actors.{a.share}.lora.rank 16",
    )
    has_experts = any("experts" in split(actor.lora.targets) for actor in (a, owner))
    yield (
        has_experts,
        f"{what}: engines apply no adapters on experts of several actors; leave experts out of "
        "lora.targets",
    )
    has_own = a.api or a.engine_urls or owner.engine_urls or a.model != owner.model
    yield (
        has_own or (a.is_trained and a.lora.quantize != quantize),
        f"{what} takes the model and engine of {a.share}; leave out model, lora.quantize, api and "
        "engine_urls",
    )
    yield (
        quantize != "none" and c.engine_ranks,
        f"{what}: only an engine of the learner's ranks reads a shared model in 4 bits; leave out "
        "--engine_ranks",
    )


def of_engine(c: Any, name: str, engine: Any) -> Rules:
    """engine: the class of what samples for this actor."""
    for flag in ("engine_tp", "engine_args"):
        value = getattr(c, flag)
        is_set = value not in (1, "") and not engine.is_elsewhere
        yield is_set, f"--{flag}={value} needs --engine sglang"
    yield (
        c.rollout.fixed_order and engine.is_elsewhere,
        "--rollout.fixed_order=true needs --engine embedded: a server samples in an order of its "
        "own",
    )
    share = c.actors[name].share
    in_4_bits = share and c.actors[share].lora.quantize != "none"
    yield (
        in_4_bits and not engine.shares_weights,
        f"--actors.{name}.share={share}: only an embedded engine reads a shared model in 4 bits; "
        "take --engine embedded",
    )
    yield (
        c.actors[name].router_replay and not engine.records_experts,
        f"--actors.{name}.router_replay=true needs --engine embedded, which tells the experts of "
        "each token",
    )


def of_algorithm(c: Any, a: Any, has_advantage_fn: bool) -> Rules:
    """a: the preset with the parts that were given."""
    given = {name for name, value in vars(c.algo).items() if value is not None}
    yield (
        has_advantage_fn and a.has_critic and "advantage" not in given,
        f"{c.env_path} defines advantage_fn, which --algorithm {c.algorithm} would not call: its "
        "advantages come from a "
        "critic; set --algo.advantage gae to keep the critic, or take --algorithm grpo",
    )
    yield (
        a.advantage == "custom" and not has_advantage_fn,
        f"--algo.advantage=custom needs def advantage_fn(rewards) in {c.env_path}; define it",
    )
    yield (
        c.group_size < 2 and (ADVANTAGES[a.advantage].needs_group or a.refill_rounds),
        f"--group_size={c.group_size}: a baseline and refill_rounds compare episodes of a group; "
        "take at least 2, or "
        "--algo.advantage none or gae",
    )
    yield (
        c.critic != type(c.critic)() and not a.has_critic,
        f"--critic.* has no meaning for the advantage {a.advantage}; leave it out, or take "
        "--algorithm ppo",
    )
    of_samples = (
        a.objective == "gspo"
        or a.refill_rounds
        or a.normalize == "env"
        or a.turn_discount is not None
    )
    yield (
        a.has_critic and of_samples,
        "--algo.advantage=gae: a critic learns from every token; leave out objective gspo, "
        "refill_rounds, normalize env "
        "and turn_discount",
    )
    yield (
        a.objective == "cispo" and a.dual_clip,
        "--algo.objective=cispo has no --algo.dual_clip; take objective clip",
    )
    yield (
        0 < a.dual_clip <= 1,
        f"--algo.dual_clip={a.dual_clip} must be above 1; 0 is off, 3 is usual",
    )
    yield (
        given & {"kl", "kl_in"} and not a.kl_coef,
        "--algo.kl and kl_in need --algo.kl_coef above 0",
    )
    low, high = bounds = a.correction_range
    yield (
        low >= high,
        f"--algo.correction_range={bounds} must be two bounds, the lower first; 0.5,2 is usual",
    )
    is_unused = "correction_range" in given and a.correction == "none"
    yield is_unused, "--algo.correction_range needs --algo.correction"
    yield (
        a.overlong_buffer and a.overlong != "soft",
        "--algo.overlong_buffer needs --algo.overlong soft",
    )
    yield (
        a.target_kl and c.learner.minibatches * c.learner.epochs == 1,
        f"--algo.target_kl={a.target_kl} skips later updates of a step: raise "
        "--learner.minibatches or --learner.epochs",
    )
