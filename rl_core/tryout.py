"""Episodes by actors that say what is written: replies that are right, plain or bad, and how long hooks take with them."""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.config import RolloutConfig
from rl_core.data.chat import Chat
from rl_core.distributed import Ranks
from rl_core.engines.scripted import ScriptedActor
from rl_core.sampling.env import Env
from rl_core.sampling.rollout import make_groups, rollout
from rl_core.types import SamplingParams, Task, Trajectory

ANSWERS = ("answer", "response", "solution", "target", "label", "reference")  # columns whose text may be a right reply
PLAIN = "I do not know."
LONG = 100_000  # characters
GARBAGE = "\x00\x07}{<<]] \\frac{9^9^9\u202e \U0001f600 \u00e9 ,,; None NaN 1e999 -0 </"


@dataclass(kw_only=True, slots=True)
class Kind:
    """One way to reply, and what came of it."""

    name: str
    what: str
    is_normal: bool  # a failed episode is a failed check
    replies: Callable[[Task, str], list[str]]  # of a task and an actor
    is_cut: bool = False  # max_tokens ends the first reply in its middle
    found: list[Trajectory] = dataclasses.field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class Timing:
    kind: str
    hook: str
    seconds: float


def turn_limit(env: Env) -> int:
    return env.max_turns or (8 if env.is_multi_turn else 1)


def make_kinds(env: Env, chat: Chat, task: Task, given: dict[str, list[str]]) -> list[Kind]:
    """The normal ones first, and of these first the one that should earn most; `task` is like the others. `given`: templates
    of right replies by actor, those under "" for every other."""
    column = answer_column(env, task.row)

    def right_reply(task: Task, actor: str) -> list[str]:
        if templates := given.get(actor) or given.get(""):
            return rendered(templates, task)
        return [str(task.row.get(column, "")) if column else PLAIN]

    right = None
    if given:
        said = {name: f"{', then '.join(map(repr, templates))}" for name, templates in given.items()}
        what = "; ".join(f"--reply {name}{'=' * bool(name)}{text}" for name, text in said.items())
        what += "" if "" in given else f"; any other actor: {f'the column {column}' if column else repr(PLAIN)}"
        right = Kind(name="right", what=what, is_normal=True, replies=right_reply)
    elif column:
        what = f"the text of the column {column}; give a better one with --reply if that is no right reply"
        right = Kind(name="right", what=what, is_normal=True, replies=right_reply)
    plain = Kind(name="plain", what=repr(PLAIN), is_normal=True, replies=lambda task, actor: [PLAIN])
    kinds = [right, plain] if right else [plain]
    base = kinds[0].replies
    markers = " ".join([*chat.tokenizer.all_special_tokens[:8], "<think>", "</think>", "<|im_end|>", "</s>"])

    def add(name: str, what: str, replies: Callable[[Task, str], list[str]], is_cut: bool = False) -> None:
        kinds.append(Kind(name=name, what=what, is_normal=False, replies=replies, is_cut=is_cut))

    add("empty", "nothing but the token that ends a turn", lambda task, actor: [""])
    add("truncated", f"the {kinds[0].name} reply, cut off by max_tokens in its middle", base, is_cut=True)
    add("garbage", "control characters, unbalanced brackets, numbers that are none", lambda task, actor: [GARBAGE])
    how = f"the {kinds[0].name} reply, over and over for {LONG:,} characters"
    add("long", how, lambda task, actor: [repeated(base(task, actor)[0])])
    special = "strings of special tokens, as text"
    add("special", special, lambda task, actor: [f"{markers} {base(task, actor)[0]} {markers}"])
    return kinds


def repeated(text: str) -> str:
    return (f"{text} " * (LONG // (len(text) + 1) + 1))[:LONG]


def answer_column(env: Env, row: dict[str, Any]) -> str | None:
    """The column that hooks read whose text is most like a reply."""
    hooks = env.hooks.values()
    named = {n for h in hooks for n in (row.keys() if h.takes_all else (h.required | h.optional) - h.ours)}
    return next((name for name in ANSWERS if name in named and name in row), None)


def rendered(templates: list[str], task: Task) -> list[str]:
    """The replies of --reply for one task."""
    from jinja2 import Environment, StrictUndefined, TemplateError

    values = {"prompt": task.messages[0].get("content"), **task.row}
    try:
        made = [Environment(undefined=StrictUndefined).from_string(t) for t in templates]
        return [template.render(values) for template in made]
    except TemplateError as error:
        raise ValueError(f"--reply {templates}: {error}; columns: {', '.join(task.row)}") from None


def watch_hooks(env: Env, timings: list[Timing]) -> None:
    """Every call of a hook leaves its time."""
    for hook in env.hooks.values():
        hook.function = timed(hook.function, hook.name, timings)


def timed(function: Callable, name: str, timings: list[Timing]) -> Callable:
    def call(**arguments: Any) -> Any:
        began_s = time.perf_counter()
        try:
            result = function(**arguments)
        finally:
            timing = Timing(kind="", hook=name, seconds=time.perf_counter() - began_s)
            timings.append(timing)
        return until_done(result, timing) if inspect.isawaitable(result) else result

    return call


async def until_done(awaitable: Any, timing: Timing) -> Any:
    began_s = time.perf_counter()
    try:
        return await awaitable
    finally:
        timing.seconds += time.perf_counter() - began_s


async def play_all(
    env: Env, chat: Chat, kinds: list[Kind], tasks: list[Task], names: Sequence[str], timings: list[Timing]
) -> None:
    """One episode after the other, so that each hook has the machine to itself: normal replies to every task, others to
    the first."""
    for kind in kinds:
        for task in tasks if kind.is_normal else tasks[:1]:
            kind.found += await play(env, chat, kind, task, names)
            for timing in timings:
                timing.kind = timing.kind or kind.name


async def play(env: Env, chat: Chat, kind: Kind, task: Task, names: Sequence[str]) -> list[Trajectory]:
    """The trajectories of one group: of one episode, or of two if a hook compares them."""
    replies = {name: kind.replies(task, name) for name in names}
    room = 10 * LONG
    if kind.is_cut:
        shortest = min(len(chat.encode(chat.marked(said[0]), continues=True)) for said in replies.values())
        room = max(1, shortest // 2)
    actors = {
        n: ScriptedActor(name=n, chat=chat, replies=said, max_turns=turn_limit(env)) for n, said in replies.items()
    }
    size, params = 2 if env.group_rewards else 1, SamplingParams(max_tokens=room)
    groups = make_groups([task], f"check/{kind.name}/{task.id}", size, params, seed=0)
    ranks = Ranks(rank=0, size=1, device=None, store=None)
    return await rollout({env.name: env}, actors, groups, RolloutConfig(max_failed_fraction=1.0), ranks)
