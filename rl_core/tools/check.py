"""rl-core check envs/x.py: an environment tried out with replies that are written down. No model is loaded.

It shows which columns hooks read, which tokens are trained, and what right, plain, empty and cut-off replies earn.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_core.config import RolloutConfig

if TYPE_CHECKING:
    from rl_core.data.chat import Chat
    from rl_core.sampling.env import Env
    from rl_core.types import Task, Trajectory

ANSWERS = ("answer", "response", "solution", "target", "label", "reference")  # columns that may hold a right reply
PLAIN = "I do not know."
NORMAL = ("right", "plain")  # kinds of replies whose episodes must not fail
ROOM = 1 << 20  # tokens of a turn that is not to be cut off


def check(argv: list[str]) -> int:
    """Prints the report on an environment. 0 if it loads and every normal episode is scored, else 1. Raises ValueError for
    what keeps it from being tried."""
    options = parse(argv)
    from rl_core.data.chat import load_chat
    from rl_core.engines.scripted import plain_chat
    from rl_core.sampling.env import load_env

    env = load_env(options.env)
    say("environment", [options.env, *describe_hooks(env), f"turns of an episode: at most {env.max_turns}"])
    names = actor_names(env, options.actors)
    env.check_actors(names)
    tasks = load_tasks(env, options)
    chat = load_chat(options.model) if options.model else plain_chat()
    found = asyncio.run(play_all(env, chat, tasks, names, by_actor(options.reply, names)))
    shown = next(iter(found.values()))
    say("tokens", describe_tokens(chat, [t for t in shown if t.task_id == shown[0].task_id and t.index == 0]))
    say("episodes", describe_episodes(found))
    normal = [t for kind in found if kind in NORMAL for t in found[kind]]
    failed = [t for t in normal if t.status == "failed"]
    what = f"{len(failed)} of {len(normal)} normal episodes failed" if failed else "every normal episode was scored"
    say("result", [what])
    return 1 if failed else 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rl-core check", description=__doc__.splitlines()[0], allow_abbrev=False)
    add, reply = (
        parser.add_argument,
        "right reply of the next turn, a Jinja template over columns and `prompt`; NAME=TEXT: one actor's",
    )
    add("env", help="the environment's Python file")
    add("--data.train", dest="rows", metavar="ROWS", help="rows, as in training; default: load_tasks('train')")
    add("--model", help="folder or hub name, whose tokenizer and chat template are used; default: a plain one")
    add("--actors", metavar="A,B", help="names of the actors, where `turns` does not name them; default: policy")
    add("--reply", action="append", default=[], metavar="TEXT", help=reply)
    add("--num_tasks", type=int, default=8, help="tasks that are tried, from the first on [8]")
    return parser.parse_args(argv)


def say(title: str, lines: Sequence[str]) -> None:
    if lines:
        print("\n".join([f"== {title}", *(f"  {line}".rstrip() for line in lines), ""]), flush=True)


def describe_hooks(env: Env) -> list[str]:
    lines = []
    for hook in env.hooks.values():
        optional = [f"{name} (optional)" for name in sorted(hook.named - hook.required - hook.ours)]
        columns = ["every column"] if hook.takes_all else sorted(hook.required - hook.ours) + optional
        reads = f"    reads {', '.join(columns)}" if columns else ""
        lines.append(f"{hook.name}{inspect.signature(hook.function)}{reads}")
    return lines + ["load_tasks(split)"] * bool(env.load_tasks) + ["advantage_fn(rewards)"] * bool(env.advantage_fn)


def actor_names(env: Env, given: str | None) -> list[str]:
    """Those of --actors, else those that the file names, else the one actor `policy`."""
    if given:
        return [name.strip() for name in given.split(",")]
    named = [name for name in (*(env.speakers() or ()), *env.system_prompts) if name != "*"]
    return list(dict.fromkeys(named)) or ["policy"]


def by_actor(replies: list[str], names: Sequence[str]) -> dict[str, list[str]]:
    """Actor -> its texts of --reply; "" -> those without an actor's name."""
    found: dict[str, list[str]] = {}
    for text in replies:
        name, equals, rest = text.partition("=")
        is_named = bool(equals) and name in names
        found.setdefault(name if is_named else "", []).append(rest if is_named else text)
    return found


def load_tasks(env: Env, options: argparse.Namespace) -> list[Task]:
    """The first tasks, once every row has the columns that hooks need."""
    from rl_core.data.rows import load_rows
    from rl_core.data.tasks import make_task

    if not options.rows and not env.load_tasks:
        raise ValueError(f"{options.env} has no load_tasks(split): name its rows with --data.train rows.jsonl")
    source = options.rows or "load_tasks('train')"
    rows = load_rows(options.rows) if options.rows else env.load_tasks("train")
    env.check_columns(rows, source)
    tasks = [make_task(rows[i], i, env.name, "train") for i in range(min(max(1, options.num_tasks), len(rows)))]
    say("data", [f"{source}: {len(rows)} rows with {', '.join(tasks[0].row)}; the first {len(tasks)} are tried"])
    return tasks


async def play_all(
    env: Env, chat: Chat, tasks: list[Task], names: Sequence[str], given: dict[str, list[str]]
) -> dict[str, list[Trajectory]]:
    """Kind of reply -> its episodes: right and plain ones of every task, empty and cut-off ones of the first."""
    column = next((c for c in ANSWERS if c in tasks[0].row and reads(env, c)), None)

    def right(task: Task, actor: str) -> list[str]:
        templates = given.get(actor) or given.get("")
        return rendered(templates, task) if templates else [str(task.row[column]) if column else PLAIN]

    kinds = {"right": right} if given or column else {}
    kinds |= {"plain": lambda task, actor: [PLAIN], "empty": lambda task, actor: [""]}
    found = {}
    for kind, replies in kinds.items():
        own = tasks if kind in NORMAL else tasks[:1]
        found[kind] = [t for task in own for t in await play(env, chat, task, {n: replies(task, n) for n in names})]
    first = {n: right(tasks[0], n) for n in names}
    shortest = min(len(chat.encode(chat.marked(said[0]), continues=True)) for said in first.values())
    return found | {"cut": await play(env, chat, tasks[0], first, max(1, shortest // 2))}


def reads(env: Env, column: str) -> bool:
    return any(h.takes_all or column in h.named for h in env.hooks.values())


def rendered(templates: list[str], task: Task) -> list[str]:
    from jinja2 import Environment, StrictUndefined, TemplateError

    values = {"prompt": task.messages[0].get("content"), **task.row}
    try:
        return [Environment(undefined=StrictUndefined).from_string(t).render(values) for t in templates]
    except TemplateError as error:
        raise ValueError(f"--reply {templates}: {error}; columns: {', '.join(task.row)}") from None


async def play(
    env: Env, chat: Chat, task: Task, replies: dict[str, list[str]], max_tokens: int = ROOM
) -> list[Trajectory]:
    """The trajectories of one group: of one episode, or of two if a hook compares them."""
    from rl_core.engines.scripted import ScriptedActor
    from rl_core.sampling.rollout import Group, run_group
    from rl_core.types import SamplingParams

    actors = {n: ScriptedActor(name=n, chat=chat, replies=said) for n, said in replies.items()}
    size = 2 if env.group_rewards else 1
    params = SamplingParams(max_tokens=max_tokens)
    group = Group(task=task, batch="check", number=0, size=size, params=params, seed=0)
    return await run_group({env.name: env}, actors, RolloutConfig(), group)


def describe_tokens(chat: Chat, trajectories: list[Trajectory]) -> list[str]:
    """The first episode as tokens: what each actor saw, and which tokens are trained."""
    from rl_core.data.samples import samples_from_turns

    lines = []
    for trajectory in trajectories:
        for number, sample in enumerate(samples_from_turns(trajectory.turns, 1.0)):
            more = f", sample {number + 1}: the template rewrote history" if number else ""
            num_trained = sum(map(bool, sample.loss_mask))
            trained = f"{num_trained} of {len(sample.token_ids)} tokens are trained, marked with >"
            lines += ["", f"{trajectory.actor} in {trajectory.task_id}{more}: {trained}"]
            lines += marked_lines(chat, list(sample.token_ids), list(sample.loss_mask))
    return lines


def marked_lines(chat: Chat, token_ids: list[int], loss_mask: list[int], limit: int = 40) -> list[str]:
    """Lines of text, trained ones with `>` before them; a line ends where the mask changes, too."""
    lines, start = [], 0
    for end in range(1, len(token_ids) + 1):
        if end == len(token_ids) or loss_mask[end] != loss_mask[start]:
            text = chat.tokenizer.decode(token_ids[start:end], clean_up_tokenization_spaces=False)
            sign = ">" if loss_mask[start] else "|"
            lines += [f"{sign} {shown(part, 200)}" for part in text.rstrip("\n").split("\n")]
            start = end
    if len(lines) > limit:
        lines[limit // 2 : -limit // 2] = [f"... {len(lines) - limit} lines"]
    return lines


def describe_episodes(found: dict[str, list[Trajectory]]) -> list[str]:
    lines = [f"{'reply':<8} {'actor':<10} {'episodes':>8} {'turns':>5} {'reward':>9}  parts, or why it failed"]
    for kind, trajectories in found.items():
        outcomes: dict[tuple, list[Trajectory]] = {}
        for t in trajectories:
            outcomes.setdefault((t.actor, t.status, t.error), []).append(t)
        for (actor, status, error), own in outcomes.items():
            n, means, why = len(own), ["-", "-"], f"failed: {shown(error, 240)}"
            if status != "failed":
                means = [f"{sum(len(t.turns) for t in own) / n:.3g}", f"{sum(t.reward for t in own) / n:.4g}"]
                names = dict.fromkeys(name for t in own for name in t.reward_parts)
                parts = ", ".join(f"{name} {sum(t.reward_parts.get(name, 0) for t in own) / n:.4g}" for name in names)
                why = "truncated: " * (status == "truncated") + parts
            lines.append(f"{kind:<8} {actor:<10} {n:>8} {means[0]:>5} {means[1]:>9}  {why}")
    return lines


def shown(text: str, width: int) -> str:
    """What a terminal can show: a reply may hold anything, and an error repeats it."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= width else f"{text[:width]} ..."
