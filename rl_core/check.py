"""rl-core check envs/x.py: an environment tried out with actors that say what is written. No model is loaded.

What a hook raises, returns or takes too long for is found here, and not in the middle of a run.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl_core.config import nearest

if TYPE_CHECKING:
    from rl_core.data.chat import Chat
    from rl_core.sampling.env import Env
    from rl_core.tryout import Kind, Timing
    from rl_core.types import Task, Trajectory

FLAGS = {
    "--data.train": {"metavar": "ROWS", "help": "rows, as in training; default: the environment's load_tasks('train')"},
    "--model": {
        "help": "folder or hub name, of which the tokenizer and its chat template are used; default: a plain one"
    },
    "--actors": {"metavar": "A,B", "help": "names of the actors, where `turns` does not name them; default: policy"},
    "--reply": {
        "action": "append",
        "metavar": "TEXT",
        "help": "a right reply, instead of the answer's column: a Jinja template over the row's columns and `prompt`, the first "
        "message's text; given again, it is of the next turn. NAME=TEXT is of one actor",
    },
    "--num_tasks": {"type": int, "default": 8, "help": "tasks that are tried, from the first on [8]"},
}


def check(argv: list[str]) -> int:
    """Prints the report on an environment. 0 if it loads and every normal episode is scored, else 1. Raises ValueError for
    what keeps it from being tried."""
    options = parse(argv)
    from rl_core.sampling.env import load_env
    from rl_core.tryout import make_kinds, play_all, turn_limit, watch_hooks

    env = load_env(options.env)
    say("environment", [options.env, *describe_hooks(env), f"turns of an episode: at most {turn_limit(env)}"])
    names = actor_names(env, options.actors)
    env.check_actors(names)
    tasks = load_tasks(env, options)
    chat = load_tokenizer(options.model)
    kinds, timings = make_kinds(env, chat, tasks[0], by_actor(options.reply or [], names)), []
    watch_hooks(env, timings)
    asyncio.run(play_all(env, chat, kinds, tasks, names, timings))
    say("tokens", describe_view(chat, kinds[0], options.model))
    say("replies", [f"{kind.name:<10} {kind.what}" for kind in kinds])
    say("episodes", describe_episodes(kinds))
    say("advantages", describe_advantages(env, kinds))
    say("weights", describe_weights(env, tasks[0]))
    say("hooks' time", describe_times(timings))
    normal = [t for kind in kinds if kind.is_normal for t in kind.found]
    failed = [t for t in normal if t.status == "failed"]
    say("notes", notes(env, chat, kinds, tasks[0], timings))
    counted = f"{len(failed)} of {len(normal)} normal episodes failed"
    say("result", [counted if failed else "every normal episode was scored"])
    return 1 if failed else 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rl-core check", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("env", help="the environment's Python file")
    for name, how in FLAGS.items():
        parser.add_argument(name, **how)
    for arg in argv:
        name = arg.split("=")[0]
        if name.startswith("--") and name not in (*FLAGS, "--help"):
            raise ValueError(f"unknown flag {name}; {nearest(name, FLAGS)}")
    options = parser.parse_args(argv)
    if options.num_tasks < 1:
        raise ValueError(f"--num_tasks={options.num_tasks} must be at least 1")
    return options


def say(title: str, lines: Sequence[str]) -> None:
    if lines:
        print("\n".join([f"== {title}", *(f"  {line}".rstrip() for line in lines), ""]), flush=True)


def describe_hooks(env: Env) -> list[str]:
    lines = []
    for hook in env.hooks.values():
        columns = sorted(hook.required - hook.ours)
        maybe = sorted(hook.optional - hook.ours)
        needs = [f"the column{'s' * (len(columns) > 1)} {', '.join(columns)}"] if columns else []
        needs += [f"{', '.join(maybe)} where there is such a column"] if maybe else []
        needs += ["every column"] if hook.takes_all else []
        lines.append(
            f"{hook.name}{inspect.signature(hook.function)}" + (f"    reads {'; '.join(needs)}" if needs else "")
        )
    lines += ["load_tasks(split)"] if env.load_tasks else []
    lines += ["advantage_fn(rewards)"] if env.advantage_fn else []
    lines += [f"turns = {env.turns!r}"] if isinstance(env.turns, str) else []
    prompts = [
        f"{name} (columns {', '.join(sorted(p.columns))})" if p.columns else name
        for name, p in env.system_prompts.items()
    ]
    lines += [f"system_prompts of {', '.join(prompts)}"] if prompts else []
    lines += [f"tools = {', '.join(tool_name(tool) for tool in env.tools)}"] if env.tools else []
    return lines


def actor_names(env: Env, given: str | None) -> list[str]:
    """Those of --actors, else those that `turns` and `system_prompts` name, else the one actor `policy`."""
    if given:
        return [name.strip() for name in given.split(",")]
    named = [name for name in (*(env.speakers() or ()), *env.system_prompts) if name != "*"]
    return list(dict.fromkeys(named)) or ["policy"]


def by_actor(replies: list[str], names: Sequence[str]) -> dict[str, list[str]]:
    """Actor -> its texts of --reply, those without an actor's name under ""."""
    found: dict[str, list[str]] = {}
    for text in replies:
        name, _, rest = text.partition("=")
        is_named = name in names and "=" in text
        found.setdefault(name if is_named else "", []).append(rest if is_named else text)
    return found


def tool_name(tool: dict[str, Any]) -> str:
    return str(tool.get("function", tool).get("name", "without a name"))


def load_tasks(env: Env, options: argparse.Namespace) -> list[Task]:
    """The first tasks, once every row has the columns that hooks need."""
    from rl_core.data.rows import load_rows
    from rl_core.data.tasks import TaskSource

    path = getattr(options, "data.train")
    if not path and not env.load_tasks:
        raise ValueError(f"{options.env} has no load_tasks(split): name its rows with --data.train rows.jsonl")
    source = path or "load_tasks('train')"
    rows = load_rows(path, "train") if path else env.load_tasks("train")
    env.check_columns(rows, source)
    found = TaskSource(rows, env=env.name, split="train", seed=0, shuffle=False)
    tasks = found.tasks(0, min(options.num_tasks, len(found)))
    say("data", [f"{source}: {len(rows)} rows with {', '.join(tasks[0].row)}; the first {len(tasks)} are tried"])
    return tasks


def load_tokenizer(model: str | None) -> Chat:
    from rl_core.data.chat import load_chat
    from rl_core.engines.scripted import plain_chat

    return load_chat(model) if model else plain_chat()


def describe_view(chat: Chat, kind: Kind, model: str | None) -> list[str]:
    """The first episode as tokens: what each actor saw, and which tokens are trained."""
    from rl_core.data.samples import samples_from_turns

    template = f"of {model}" if model else "plain, a token for each byte; --model shows a real one"
    lines = [f"chat template and tokenizer: {template}"]
    for trajectory in [t for t in kind.found if t.task_id == kind.found[0].task_id and t.index == 0]:
        for number, sample in enumerate(samples_from_turns(trajectory.turns, 1.0)):
            more = f", sample {number + 1}: the template rewrote history" if number else ""
            trained = f"{sum(sample.loss_mask)} of {len(sample.token_ids)} tokens are trained, marked with >"
            lines += ["", f"{trajectory.actor} in {trajectory.task_id}, {kind.name} reply{more}: {trained}"]
            lines += shown_tokens(chat, sample.token_ids.tolist(), sample.loss_mask.tolist())
    return lines if len(lines) > 1 else []


def shown_tokens(chat: Chat, token_ids: list[int], loss_mask: list[int], limit: int = 40) -> list[str]:
    """Lines of text, trained ones with `>` before them; a line ends where the mask changes, too."""
    lines, start = [], 0
    for end in range(1, len(token_ids) + 1):
        if end < len(token_ids) and loss_mask[end] == loss_mask[start]:
            continue
        text = chat.tokenizer.decode(token_ids[start:end], clean_up_tokenization_spaces=False)
        mark, parts = ">" if loss_mask[start] else "|", text.split("\n")
        lines += [
            f"{mark} {part[:200]}{' ...' if len(part) > 200 else ''}" for part in parts[: -1 if not parts[-1] else None]
        ]
        start = end
    return (
        lines
        if len(lines) <= limit
        else [*lines[: limit // 2], f"... {len(lines) - limit} lines", *lines[-limit // 2 :]]
    )


def describe_episodes(kinds: list[Kind]) -> list[str]:
    lines = [f"{'reply':<10} {'actor':<10} {'episodes':>8} {'turns':>5} {'reward':>9}  parts, or why it failed"]
    for kind in kinds:
        outcomes: dict[tuple, list[Trajectory]] = {}
        for t in kind.found:
            outcomes.setdefault((t.actor, t.status, t.error if t.status == "failed" else ""), []).append(t)
        for (actor, status, error), found in outcomes.items():
            reward = "-" if status == "failed" else f"{mean([t.reward for t in found]):.4g}"
            turns = "-" if status == "failed" else f"{mean([len(t.turns) for t in found]):.3g}"
            why = one_line(error) if status == "failed" else parts_of(found)
            status = "" if status == "ok" else f"{status}: "
            who = f"{kind.name:<10} {actor:<10} {len(found):>8}"
            lines.append(f"{who} {turns:>5} {reward:>9}  {status}{why}")
    return lines


def describe_advantages(env: Env, kinds: list[Kind]) -> list[str]:
    """What advantage_fn gives for a group with the reward of one episode of each kind. Raises RunError if it is unfit."""
    rewards = [t.reward for k in kinds for t in k.found[:1] if t.status != "failed"]
    if not env.advantage_fn or not rewards:
        return []
    given, made = (", ".join(f"{x:.4g}" for x in some) for some in (rewards, env.advantage_fn(rewards)))
    return [f"advantage_fn([{given}]) gave [{made}]"]


def describe_weights(env: Env, task: Task) -> list[str]:
    """What task_weight() gives for a task that is new, or was solved so often. Raises ValueError if it is unfit."""
    if "task_weight" not in env.hooks:
        return []
    shown = []
    for what, tries, rate in (("new", 0, 0.5), ("never solved", 4, 0.0), ("solved half", 4, 0.5), ("always", 4, 1.0)):
        known = {"tries": tries, "success_rate": rate, "mean_reward": rate if tries else 0.0}
        shown.append(f"{what} {env.task_weight(task.id, task.row, known):.4g}")
    return [f"{task.id}: {', '.join(shown)}"]


def one_line(text: str, width: int = 240) -> str:
    """What a terminal can show: a bad reply may hold anything, and an error repeats it."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= width else f"{text[:width]} ..."


def parts_of(found: list[Trajectory]) -> str:
    names = dict.fromkeys(name for t in found for name in t.reward_parts)
    values = {name: [t.reward_parts[name] for t in found if name in t.reward_parts] for name in names}
    return ", ".join(f"{name} {spread(v)}" for name, v in values.items())


def spread(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.4g}" if low == high else f"{mean(values):.4g} ({low:.4g} to {high:.4g})"


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) + 0.0  # no -0


def describe_times(timings: list[Timing]) -> list[str]:
    by_hook: dict[str, list[Timing]] = {}
    for timing in timings:
        by_hook.setdefault(timing.hook, []).append(timing)
    lines = []
    for hook, calls in by_hook.items():
        usual = mean([c.seconds for c in calls])
        slowest = max(calls, key=lambda c: c.seconds)
        times = f"mean {usual * 1e3:.3g} ms, slowest {slowest.seconds * 1e3:.3g} ms ({slowest.kind} reply)"
        with_replies = ", what actors say included" if hook == "rollout" else ""
        lines.append(f"{hook:<16} {len(calls)} calls, {times}{with_replies}")
    return lines


def notes(env: Env, chat: Chat, kinds: list[Kind], task: Task, timings: list[Timing]) -> list[str]:
    """What a person should look at."""
    rewards: Mapping[str, float] = {
        k.name: mean([t.reward for t in k.found if t.status != "failed"])
        for k in kinds if any(t.status != "failed" for t in k.found)
    }  # fmt: skip
    lines = []
    if len(set(rewards.values())) == 1 and len(rewards) == len(kinds):
        lines.append(
            f"every kind of reply earns {next(iter(rewards.values())):.4g}: groups with equal rewards teach nothing"
        )
    elif "right" in rewards:
        for name in [n for n in ("plain", "empty", "garbage") if rewards.get(n, -math.inf) >= rewards["right"]]:
            lines.append(
                f"the {name} reply earns {rewards[name]:.4g}, the right one {rewards['right']:.4g}: is that meant?"
            )
    errors = [t.error for k in kinds for t in k.found if t.status == "failed"]
    if "rollout" in env.hooks and any("is no actor" in error for error in errors):
        lines.append("rollout() asks actors whose names only it knows: give them with --actors A,B")
    if failed := [k.name for k in kinds if not k.is_normal and any(t.status == "failed" for t in k.found)]:
        lines.append(
            f"{', '.join(failed)}: such a reply fails the episode, which is recorded and not trained on; a run stops if more "
            "than --rollout.max_failed_fraction fail. If the reply is to blame, return a low reward"
        )
    if "interact" in env.hooks and env.max_turns != 1 and max(len(t.turns) for k in kinds for t in k.found) == 1:
        lines.append("no reply led to a second turn: give one for each turn, --reply FIRST --reply SECOND")
    slow = sorted({(t.hook, t.kind) for t in timings if t.seconds > 1 and t.hook != "rollout"})
    lines += [f"{hook}() takes more than 1 s with the {kind} reply" for hook, kind in slow]
    if env.tools and chat.prompt_ids(task.messages) == chat.prompt_ids(task.messages, env.tools):
        lines.append("the chat template does not show tools: the model will not know of them")
    return lines
