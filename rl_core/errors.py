"""Rules for flags: ranges, which stand next to each flag, and tables of contradictions. Checking
changes no flag."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Any

# Sections that hold one section for each name that the user gives.
NAMED = ("actors", "envs")


def split(text: str | None) -> list[str]:
    """Parts of a flag's value that stand between commas."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def printable(text: str, also: str = "") -> str:
    """The text with escapes for characters that a terminal cannot show."""
    return "".join(c if c.isprintable() or c in also else repr(c)[1:-1] for c in text)


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?`, or the list of the known names."""
    known = list(known)
    near = near_name(name, known)
    return f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"


def near_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that is nearly spelled like `name`. Equal endings of files do not count."""
    known = list(known)
    suffix = PurePath(name).suffix
    if not any(other.endswith(suffix) for other in known):
        suffix = ""
    stems = {other.removesuffix(suffix): other for other in known}
    close = difflib.get_close_matches(name.removesuffix(suffix), stems, n=1)
    return stems[close[0]] if close else None


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


# (True if the rule is broken, message with fields of the rule's arguments). All rules before a rule
# hold. c: the configuration. Rules of options that few runs use are in the options' rooms.
OF_RUN = [
    (lambda c: not c.out, "--out is missing: name a folder for the run, such as --out runs/first"),
    (
        lambda c: not c.actors and c.resume,
        "--model is missing: --resume takes no flags of the run that it goes on with; give them "
        "again, or --config {c.out}/config.yaml --resume",
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
        "--learner.kernels=compile has no --tp; leave one out",
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
        lambda c: c.rollout.lagged[0] and any(a.share or a.servers for a in c.actors.values()),
        "--rollout.lagged needs a second engine: leave out share and engine_urls",
    ),
]


def check(c: Any) -> None:
    """Raises ValueError with the flag, the rule and the fix."""
    only = {f.name: f.metadata["only"] for f in dataclasses.fields(c)}
    for name, value, f in flags_in(c):
        algorithms = f.metadata["only"] or only[name.partition(".")[0]]
        if algorithms and c.algorithm not in algorithms and value not in (f.default, {}):
            raise ValueError(
                f"--{name}={value} has no meaning for --algorithm {c.algorithm}; leave it out"
            )
    refuse(OF_RUN, c=c)
    for name in c.trained:
        if c.actors[name].own:
            refuse(OF_RUN, f"actor {name}: ", c=c.of(name))


def refuse(rules: list, prefix: str = "", **read: Any) -> None:
    for is_broken, message in rules:
        if is_broken(**read):
            raise ValueError(prefix + message.format(**read))


def require(library: str, flag: str, extra: str) -> None:
    if importlib.util.find_spec(library) is None:
        raise ValueError(
            f"{flag} needs {library}, which is not installed: pip install 'rl_core[{extra}]'"
        )
