"""What flags must be: ranges, which stand beside each flag, and one table of contradictions. Checking changes nothing."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import re
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

URL = r"https?://[^/\s]+/?"
SAMPLING = {"temperature", "top_p", "top_k", "min_p"}
BASELINES = ("group_mean", "group_norm", "group_norm_unbiased", "rloo")


def split(text: str | None) -> list[str]:
    """Parts of a flag's value that stand between commas."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


# (is it broken?, message). The message's fields are what the condition reads: c is the configuration.
RULES = [
    (lambda c: not c.out and not c.dry_run, "--out is missing: name a folder for the run, such as --out runs/first"),
    (lambda c: not c.actors, "--model is missing: a folder or hub name, such as --model Qwen/Qwen3-0.6B"),
    (lambda c: not c.trained, "none of the actors learns; leave out --actors.NAME.train=false for one"),
    (lambda c: c.is_rl and not c.env_path, "--env_path is missing: a Python file with a reward_fn"),
    (lambda c: not c.is_rl and len(c.actors) > 1, "--algorithm {c.algorithm} trains one actor; give one model"),
    (
        lambda c: c.tasks_per_step % c.learner.minibatches,
        "--learner.minibatches={c.learner.minibatches} must divide --tasks_per_step={c.tasks_per_step}",
    ),
    (
        lambda c: c.longest_tokens > c.learner.microbatch_tokens,
        "--learner.microbatch_tokens={c.learner.microbatch_tokens} must hold a whole episode (or pair) of {c.longest_tokens} "
        "tokens, max_prompt_tokens + turns * max_tokens over cp; raise it, or lower these",
    ),
    (lambda c: c.learner.kernels == "compile" and c.tp > 1, "--learner.kernels=compile has no --tp; leave one out"),
    (
        lambda c: c.learner.offload == "always" and c.optim.name == "adamw8bit",
        "--optim.name=adamw8bit saves device memory, where --learner.offload=always keeps nothing; take adamw",
    ),
    (lambda c: c.engine_tp > 1 and c.engine == "embedded", "--engine_tp={c.engine_tp} needs --engine sglang"),
    (lambda c: set(c.eval.sampling) - SAMPLING, "--eval.sampling knows temperature, top_p, top_k and min_p"),
    (
        lambda c: c.preference.label_smoothing and c.preference.loss != "sigmoid",
        "--preference.label_smoothing={c.preference.label_smoothing} needs --preference.loss sigmoid",
    ),
    (lambda c: not any(c.sft.weights), "--sft.weights are both 0: raise one above 0"),
    (
        lambda c: c.rollout.lagged[0] > 1 or c.rollout.lagged[1] < 2,
        "--rollout.lagged={c.rollout.lagged} must be a fraction and at least 2 steps, such as 0.25,4",
    ),
    (
        lambda c: c.rollout.lagged[0] and (c.max_staleness or c.engine_ranks or c.sharers or c.has_servers),
        "--rollout.lagged needs a second engine: leave out --max_staleness, --engine_ranks, share and engine_urls",
    ),
    (
        lambda c: len(c.env_paths) < len(split(c.env_path)),
        "--env_path={c.env_path}: two files have one name; rename one",
    ),
    (
        lambda c: c.env_paths and not any(c.env(n).weight for n in c.env_paths),
        "every environment has --envs.NAME.weight 0, so that none is trained in; raise one",
    ),
    (
        lambda c: len(c.env_paths) > 1 and (c.data.train or c.data.eval),
        "--data.train and --data.eval are for one environment; give --envs.NAME.train and --envs.NAME.eval",
    ),
]
MAX_TOKENS = (
    lambda x: (x.a.max_tokens or 0) > x.c.max_tokens,
    ".max_tokens={a.max_tokens} must be at most --max_tokens={c.max_tokens}",
)
ACTOR_RULES = [  # x.a: --actors.NAME; x.o: the actor that it shares a model with, or None
    MAX_TOKENS,
    (lambda x: not re.fullmatch(r"[A-Za-z][\w-]*", x.name), ": a name is a letter, then letters, digits, '_' and '-'"),
    (lambda x: x.a.share and (not x.o or x.o is x.a), ".share={a.share} is no other actor; {nearest}"),
    (
        lambda x: x.o and (x.o.share or not x.o.is_trained or not x.o.lora.rank),
        ".share={a.share}: what is shared is a frozen model beside adapters; give --actors.{a.share}.lora.rank 16",
    ),
    (
        lambda x: x.o and (x.a.api or x.a.engine_urls or x.o.engine_urls or x.a.model != x.o.model),
        ".share={a.share} takes model and engine of {a.share}; leave out model, api and engine_urls",
    ),
    (
        lambda x: x.o and x.a.is_trained and x.a.lora.quantize != x.o.lora.quantize,
        ".lora.quantize={a.lora.quantize}: the shared model has {o.lora.quantize}; leave it out",
    ),
    (
        lambda x: x.o and x.o.lora.quantize != "none" and (x.c.engine == "sglang" or x.c.engine_ranks),
        ".share={a.share}: only an embedded engine reads a shared model in 4 bits; take --engine embedded, no --engine_ranks",
    ),
    (lambda x: x.o and x.a.is_trained and not x.a.lora.rank, ".lora.rank is missing beside other lora flags; give it"),
    (lambda x: not x.a.model, ".model is missing: a folder or hub name, or the endpoint's model"),
    (lambda x: x.a.api and x.a.train, ".api={a.api} and train=true: an endpoint cannot learn; drop one of them"),
    (
        lambda x: (x.a.lora.rank or x.a.lr) and not x.a.is_trained,
        ": lora.rank and lr are of an actor that learns; leave them out",
    ),
    (
        lambda x: x.a.lora.quantize != "none" and not x.a.lora.rank,
        ".lora.quantize={a.lora.quantize} freezes the model; train adapters beside it: --actors.{name}.lora.rank 16",
    ),
    (
        lambda x: x.a.lora.rank and x.c.algorithm == "rm",
        ".lora.rank: --algorithm rm trains the whole model; leave it out",
    ),
    (
        lambda x: x.a.lora.quantize != "none" and (x.c.learner.kernels == "compile" or x.c.learner.offload == "always"),
        ".lora.quantize={a.lora.quantize} has no --learner.kernels=compile and no --learner.offload=always; leave one out",
    ),
    (
        lambda x: x.a.engine_urls and not (x.c.is_rl and x.a.is_trained),
        ".engine_urls is for an actor that learns by RL; a frozen one is an endpoint: --actors.{name}.api URL/v1",
    ),
    (
        lambda x: not all(re.fullmatch(URL, url) for url in x.a.servers) or len(set(x.a.servers)) < len(x.a.servers),
        ".engine_urls={a.engine_urls} must be different addresses, such as http://127.0.0.1:30000",
    ),
]
ENV_RULES = [
    (lambda x: x.name not in x.c.env_paths, ": --env_path has no such file; {nearest}"),
    MAX_TOKENS,
]  # x.a: --envs.NAME
ALGORITHM_RULES = [  # x.a: the preset with the parts that were given; x.given: their names; x.has_fn: advantage_fn is there
    (
        lambda x: x.has_fn and x.a.has_critic and "advantage" not in x.given,
        "{c.env_path} defines advantage_fn, which --algorithm {c.algorithm} would not call: its advantages come from a "
        "critic; set --algo.advantage gae to keep the critic, or take --algorithm grpo",
    ),
    (
        lambda x: x.a.advantage == "custom" and not x.has_fn,
        "--algo.advantage=custom needs def advantage_fn(rewards) in {c.env_path}; define it",
    ),
    (
        lambda x: x.a.advantage in BASELINES and x.c.group_size < 2,
        "--group_size={c.group_size}: the baseline is the group's mean; take at least 2, or --algo.advantage none or gae",
    ),
    (
        lambda x: x.c.critic != type(x.c.critic)() and not x.a.has_critic,
        "--critic.* has no meaning for the advantage {a.advantage}; leave it out, or take --algorithm ppo",
    ),
    (
        lambda x: x.a.has_critic and (x.a.ratio == "sequence" or x.a.refill_rounds or x.a.normalize == "env"),
        "--algo.advantage=gae: a critic learns from every token; leave out ratio sequence, refill_rounds and normalize env",
    ),
    (lambda x: x.a.has_critic and x.a.turn_discount is not None, "--algo.turn_discount has no meaning with a critic"),
    (
        lambda x: x.a.has_critic and x.c.critic.warmup_steps >= x.c.num_steps > 0,
        "--critic.warmup_steps={c.critic.warmup_steps} must be less than --num_steps={c.num_steps}",
    ),
    (
        lambda x: x.a.objective == "cispo" and (x.a.ratio == "sequence" or x.a.dual_clip),
        "--algo.objective=cispo has no --algo.ratio sequence and no --algo.dual_clip; take objective clip",
    ),
    (lambda x: 0 < x.a.dual_clip <= 1, "--algo.dual_clip={a.dual_clip} must be above 1; 0 is off, 3 is usual"),
    (lambda x: x.given & {"kl", "kl_in"} and not x.a.kl_coef, "--algo.kl and kl_in need --algo.kl_coef above 0"),
    (
        lambda x: "correction_range" in x.given and x.a.correction == "none",
        "--algo.correction_range needs --algo.correction",
    ),
    (
        lambda x: x.a.correction_range[0] >= x.a.correction_range[1],
        "--algo.correction_range={a.correction_range} must be two bounds, the lower first; 0.5,2 is usual",
    ),
    (lambda x: x.a.refill_rounds and x.c.group_size < 2, "--algo.refill_rounds needs --group_size of at least 2"),
    (lambda x: x.a.overlong_buffer and x.a.overlong != "soft", "--algo.overlong_buffer needs --algo.overlong soft"),
    (
        lambda x: x.a.target_kl and x.c.learner.minibatches * x.c.learner.epochs == 1,
        "--algo.target_kl={a.target_kl} skips later updates of a step: raise --learner.minibatches or --learner.epochs",
    ),
]
EXTRAS = [  # (is it needed?, flag, library, extra of setup.py)
    (lambda c: c.optim.name == "adamw8bit", "--optim.name=adamw8bit", "bitsandbytes", "bnb"),
    (lambda c: any(a.lora.quantize == "nf4" for a in c.actors.values()), "lora.quantize=nf4", "bitsandbytes", "bnb"),
    (lambda c: c.engine == "sglang", "--engine=sglang", "sglang", "sglang"),
    (lambda c: c.learner.kernels == "liger", "--learner.kernels=liger", "liger_kernel", "liger"),
    (lambda c: any(a.api for a in c.actors.values()), "--actors.NAME.api", "openai", "api"),
]
BOUNDS = {"at_least": lambda v, b: v < b, "above": lambda v, b: v <= b, "at_most": lambda v, b: v > b}


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` or the list of what is known."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def flags_in(section: Any, prefix: str = "--") -> Iterator[tuple[str, Any, dataclasses.Field]]:
    """(name, value, field) of every flag, those of named sections too."""
    for f in dataclasses.fields(section):
        value, name = getattr(section, f.name), f"{prefix}{f.name}"
        if dataclasses.is_dataclass(value):
            yield from flags_in(value, f"{name}.")
        elif isinstance(value, dict) and any(map(dataclasses.is_dataclass, value.values())):
            for key, part in value.items():
                yield from flags_in(part, f"{name}.{key}.")
        else:
            yield name, value, f


def check_range(name: str, value: Any, f: dataclasses.Field, algorithm: str) -> None:
    default = f.default if f.default is not dataclasses.MISSING else f.default_factory()
    if f.metadata["only"] and value != default and algorithm not in f.metadata["only"]:
        raise ValueError(f"{name}={value} has no meaning for --algorithm {algorithm}; leave it out")
    for word, is_outside in BOUNDS.items():
        bound, values = f.metadata[word], value if isinstance(value, tuple) else (value,)
        if bound is not None and any(v is not None and is_outside(v, bound) for v in values):
            raise ValueError(f"{name}={value} must be {word.replace('_', ' ')} {bound}")


def check(config: Any) -> None:
    """Raises ValueError with what was given, the rule and the fix."""
    for name, value, f in flags_in(config):
        check_range(name, value, f, config.algorithm)
    for name, env in config.envs.items():
        refuse(ENV_RULES, f"--envs.{name}", c=config, name=name, a=env, nearest=nearest(name, config.env_paths))
    for name, actor in config.actors.items():
        others = [other for other in config.actors if other != name]
        facts = {"o": config.actors.get(actor.share), "nearest": nearest(actor.share or "", others)}
        refuse(ACTOR_RULES, f"--actors.{name}", c=config, name=name, a=actor, **facts)
    refuse([(lambda x, broken=broken: broken(x.c), text) for broken, text in RULES], c=config)
    for is_needed, given, library, extra in EXTRAS:
        if is_needed(config) and importlib.util.find_spec(library) is None:
            raise ValueError(f"{given} needs {library}, which is not installed: pip install .[{extra}]")


def check_algorithm(algorithm: Any, config: Any, has_advantage_fn: bool = False) -> None:
    """Raises ValueError for parts of an algorithm that contradict each other, or that would do nothing."""
    given = {name for name, value in vars(config.algo).items() if value is not None}
    refuse(ALGORITHM_RULES if config.is_rl else [], c=config, a=algorithm, given=given, has_fn=has_advantage_fn)


def refuse(rules: list, prefix: str = "", **facts: Any) -> None:
    for is_broken, text in rules:
        if is_broken(SimpleNamespace(**facts)):
            raise ValueError(prefix + text.format(**facts))
