"""rl-core check envs/x.py: an environment tried out with replies that are written down. No model is
loaded.

It shows which columns hooks read, which tokens are trained, and what right, plain, empty and
cut-off replies earn.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import io
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, TypeVar

from rl_core.config import RolloutConfig
from rl_core.config.flag_parsing import typed
from rl_core.data.episodes import by_episode, episode_means, episode_rewards
from rl_core.errors import keep_ends, printable, split
from rl_core.tools.parser import Parser

if TYPE_CHECKING:
    from rl_core.data.chat import Chat
    from rl_core.sampling.env import Env
    from rl_core.sampling.hooks import Hook
    from rl_core.types import JSONObject, Task, TrainingSample, Trajectory

T = TypeVar("T")

# Columns that may hold a correct reply.
ANSWERS = ("answer", "response", "solution", "target", "label", "reference")
PLAIN = "I do not know."
NORMAL = ("right", "plain")  # Kinds of replies whose episodes must not fail.
NUM_TASKS = 8  # Default of --num_tasks.
MAX_LINES, MAX_CHARS = 40, 200  # Lines of an episode's text, and characters of one.
TELL_S = 5.0  # Seconds between lines while episodes are played.
UNLIMITED = 1 << 20  # Tokens of a turn that must not be cut off.


def main(argv: list[str]) -> int:
    """Prints a report on each environment. Returns 0 if every normal episode is scored, else 1.
    Raises ValueError for an environment that cannot be tried."""
    options = parse(argv)
    # Standard output gets only the JSON, not the prints of hooks.
    with redirect_stdout(io.StringIO()) if options.json else nullcontext():
        reports = [check(path, options) for path in options.env]
    if options.json:
        is_one = options.oracle and len(reports) == 1
        print(json.dumps(reports[0] if is_one else reports, indent=2))
    return 1 if any(report["failed"] for report in reports) else 0


def check(path: str, options: argparse.Namespace) -> JSONObject:
    """Prints the report on one environment and returns it as data."""
    from rl_core.data.chat_loading import load_chat
    from rl_core.data.tool_calls import ToolCalls
    from rl_core.engines.scripted import plain_chat
    from rl_core.environments.env_file import load_env
    from rl_core.environments.run_checks import check_actors, check_boxes, speakers
    from rl_core.sampling.watchdog import run_hooks
    from rl_core.sandbox import boxes
    from rl_core.sandbox.remote_driver import box_flags

    module = None
    if "://" in path:
        from rl_core.environments.service.served_module import load_served

        module = load_served(path)
    boxes.configure(**box_flags(options))
    env = load_env(path, hook_timeout_s=options.hook_timeout_s, module=module)
    check_boxes({env.name: env})
    say("environment", [path, *map(describe_hook, env.hooks.values())])
    named = [
        name for name in (*(speakers(env) or ()), *env.turn_loop.system_prompts) if name != "*"
    ]
    names = split(options.actors) or list(dict.fromkeys(named)) or ["policy"]
    check_actors(env, names)
    tasks = load_tasks(env, options)
    if options.oracle:
        return check_oracle(env, tasks, names, options)
    if options.model:
        chat = load_chat(options.model, tool_reader=ToolCalls)
    else:
        chat = plain_chat(ToolCalls)
    playing = play_all(env, chat, tasks, names, options.reply)
    limit = f"a call of a hook may last {options.hook_timeout_s:g} s (--hook_timeout_s)"
    playing = with_time(playing, lambda s: f"episodes have been played for {s:.0f} s; {limit}")
    played = run_hooks(playing, options.hook_timeout_s)
    shown = next(iter(played.values()))
    tokens = describe_tokens(
        chat, [t for t in shown if t.task_id == shown[0].task_id and t.index == 0]
    )
    say("tokens", tokens)
    taught = [as_read(t) for t in shown if t.teacher_ids][:1]
    teacher = describe_tokens(chat, taught)
    if teacher:
        say("teacher, which reads the same reply", teacher)
    outcomes = outcomes_of(played)
    say("episodes", describe_episodes(outcomes))
    say("truncated", describe_truncated(env, played["cut"][0]))
    normal = [episode for kind in NORMAL for episode in by_episode(played.get(kind, ()))]
    failed = sum(episode[0].status == "failed" for episode in normal)
    summary = [
        f"{failed} of {len(normal)} normal episodes failed"
        if failed
        else "every normal episode was scored"
    ]
    if "right" not in played:
        summary.append(
            "no right reply was tried, as no hook reads a column such as answer: give one by "
            "--reply TEXT"
        )
    say("result", summary)
    report = {"environment": path, "hooks": [describe_hook(hook) for hook in env.hooks.values()]}
    report |= {
        "columns": [*tasks[0].row],
        "num_tasks": len(tasks),
        "tokens": tokens,
        "teacher": teacher,
        "episodes": outcomes,
    }
    return report | {"normal": len(normal), "failed": failed}


def check_oracle(
    env: Env, tasks: list[Task], names: list[str], options: argparse.Namespace
) -> JSONObject:
    """Prints the rewards of each task's solution and of doing nothing, and a table of counts."""
    from rl_core.data.tool_calls import ToolCalls
    from rl_core.engines.scripted import plain_chat
    from rl_core.sampling.watchdog import run_hooks
    from rl_core.tools.reference_answers import Table, judge_all

    started_s = time.monotonic()
    chat = plain_chat(ToolCalls)

    async def play_nothing(task: Task) -> list[Trajectory]:
        return await play(env, chat, task, {name: [PLAIN] for name in names})

    def tell(text: str) -> None:
        lines = [f"  {line}" for line in text.split("\n")]
        print("\n".join(lines), file=sys.stderr if options.json else sys.stdout, flush=True)

    print("== oracle", flush=True)
    verdicts = run_hooks(judge_all(env, tasks, play_nothing, tell), options.hook_timeout_s)
    table = Table(verdicts=verdicts, refused=refused_tasks(options.rows))
    table.seconds = time.monotonic() - started_s
    print()
    say("result", table.lines())
    counts = table.as_data()
    num_failed = counts["not_good"]
    if not any(verdict.has_solution for verdict in verdicts):
        num_failed = len(verdicts)  # Nothing was checked.
    return {"environment": env.path, **counts, "failed": num_failed}


def refused_tasks(rows: str | None) -> dict[str, list[str]]:
    """Reason -> names of the tasks that are left out of folders in Harbor's format."""
    from rl_core.data.row_files import is_tasks_folder
    from rl_core.environments.agents.harbor_tasks import read_tasks

    refused: dict[str, list[str]] = {}
    for source in split(rows or ""):
        if is_tasks_folder(Path(source).expanduser()):
            for reason, tasks in read_tasks(source)[1].items():
                refused.setdefault(reason, []).extend(name for name, _ in tasks)
    return refused


def parse(argv: list[str]) -> argparse.Namespace:
    from rl_core.sandbox.remote_driver import add_box_flags

    parser = Parser(prog="rl-core check", description=str(__doc__).splitlines()[0])
    reply = "right reply of the next turn: a Jinja template over columns, `prompt` and `actor`"
    parser.add_argument("env", nargs="+", help="Python files of environments")
    parser.add_argument(
        "--data.train", dest="rows", metavar="ROWS", help="rows; default: load_tasks('train')"
    )
    parser.add_argument(
        "--data.columns", dest="columns", help="other names of their columns: answer=solution"
    )
    parser.add_argument(
        "--model", help="folder or hub name: its tokenizer and chat template; default: a plain one"
    )
    parser.add_argument(
        "--actors", metavar="A,B", help="names of all actors; default: those in `turns`, or policy"
    )
    parser.add_argument("--reply", action="append", default=[], metavar="TEXT", help=reply)
    parser.add_argument(
        "--num_tasks", type=int, help="tasks that are tried, from the first on [8; --oracle: all]"
    )
    parser.add_argument(
        "--oracle",
        action="store_true",
        help="play each task's own solution, by oracle(task) of the file, and doing nothing",
    )
    add_box_flags(parser)
    timeout = "timeout of one call of a hook; all tasks are tried concurrently [60]"
    parser.add_argument("--hook_timeout_s", type=float, default=60.0, help=timeout)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON: a list of reports, or with --oracle one report for one environment",
    )
    return parser.parse_args(argv)


def say(title: str, lines: list[str]) -> None:
    print("\n".join([f"== {title}", *(f"  {line}".rstrip() for line in lines), ""]), flush=True)


def describe_hook(hook: Hook) -> str:
    """A hook's arguments, and the columns among them."""
    columns = ["every column"] if hook.takes_all else sorted(hook.required - hook.ours)
    columns += [f"{name} (optional)" for name in sorted(hook.named - hook.required - hook.ours)]
    name = getattr(hook.function, "__name__", hook.name)
    # The rollout of an agent's file is composed of the agent and its rewards.
    signature = inspect.signature(hook.function) if name.isidentifier() else ""
    return f"{name}{signature}" + (f"    reads {', '.join(columns)}" if columns else "")


def load_tasks(env: Env, options: argparse.Namespace) -> list[Task]:
    """The first tasks. Checks before that every row has the columns that hooks need."""
    from rl_core.data.column_names import RenamedColumns, check_columns_exist
    from rl_core.data.row_files import load_rows
    from rl_core.data.task_rows import TaskSource
    from rl_core.data.tasks.prompt_hook import MadePrompts
    from rl_core.data.tasks.sources import load_other
    from rl_core.environments.row_columns import check_columns

    if not options.rows and not env.load_tasks:
        raise ValueError(
            f"{env.path} has no load_tasks(split): name its rows with --data.train rows.jsonl"
        )
    split = "train"
    if options.rows:
        rows, files = load_rows(options.rows, split, load_other)
    else:
        assert env.load_tasks is not None
        rows, files = env.load_tasks(split), ()
        if not len(rows):  # An environment may be only for evaluation.
            held_out = env.load_tasks("eval")
            rows, split = (held_out, "eval") if len(held_out) else (rows, split)
    if options.rows and options.columns:
        columns = typed("data.columns", options.columns, dict[str, str])
        check_columns_exist(rows, columns, options.rows)
        rows = RenamedColumns(rows, columns)
    if env.row_to_prompt:
        rows = MadePrompts(rows, env.row_to_prompt, env.path)
    check_columns(env, rows, files, split)
    source = TaskSource(rows, env=env.name, split=split, seed=0, shuffle=False, files=files)
    most = options.num_tasks
    if most is None:
        most = len(source) if options.oracle else NUM_TASKS
    tasks = list(islice(source, max(1, most)))
    named = options.rows or f"load_tasks({split!r})"
    say(
        "data",
        [
            f"{named}: {len(rows)} rows with {', '.join(tasks[0].row)}; the first {len(tasks)} are "
            "tried"
        ],
    )
    return tasks


async def play_all(
    env: Env, chat: Chat, tasks: list[Task], names: list[str], templates: list[str]
) -> dict[str, list[Trajectory]]:
    """Kind of reply -> its episodes: right and plain ones of every task, empty and cut-off ones of
    the first."""
    readers = [(hook.takes_all, hook.named) for hook in env.hooks.values()]
    columns = (
        c
        for c in ANSWERS
        if c in tasks[0].row and any(takes_all or c in read for takes_all, read in readers)
    )
    if column := next(columns, None):
        templates = templates or [f"{{{{ {column} }}}}"]
    kinds = {"right": templates, "plain": [PLAIN]}
    plays = [
        (k, task, rendered(kinds[k], task, names), UNLIMITED)
        for k in NORMAL
        if kinds[k]
        for task in tasks
    ]
    texts = rendered(templates or [PLAIN], tasks[0], names)
    half = len(chat.encode(chat.marked(texts[names[0]][0]), continues=True)) // 2
    plays.append(("empty", tasks[0], {name: [""] for name in names}, UNLIMITED))
    plays.append(("cut", tasks[0], texts, max(1, half)))
    played = await asyncio.gather(
        *(play(env, chat, task, texts, limit) for _, task, texts, limit in plays)
    )
    by_kind = {}
    for (kind, *_), trajectories in zip(plays, played, strict=True):
        by_kind.setdefault(kind, []).extend(trajectories)
    return by_kind


async def with_time(work: Coroutine[object, object, T], line: Callable[[float], str]) -> T:
    """The result of `work`. Prints line(seconds since the start) each TELL_S seconds until then."""
    task, started_s = asyncio.create_task(work), time.monotonic()
    while not (await asyncio.wait({task}, timeout=TELL_S))[0]:
        print(f"{line(time.monotonic() - started_s)} ...", file=sys.stderr, flush=True)
    return task.result()


def rendered(templates: list[str], task: Task, names: list[str]) -> dict[str, list[str]]:
    """Actor -> the text of each of its turns."""
    from jinja2 import Environment, StrictUndefined, TemplateError

    values = {"prompt": task.messages[0].get("content"), **task.row}
    try:
        made = [Environment(undefined=StrictUndefined).from_string(t) for t in templates]
        return {name: [t.render({"actor": name} | values) for t in made] for name in names}
    except TemplateError as error:
        raise ValueError(f"--reply {templates}: {error}; columns: {', '.join(task.row)}") from None


async def play(
    env: Env,
    chat: Chat,
    task: Task,
    replies: dict[str, list[str]],
    max_tokens: int = UNLIMITED,
) -> list[Trajectory]:
    """The trajectories of one group: of one episode, or of two if a hook compares them. `replies`:
    the texts of each actor."""
    from rl_core.engines.scripted import ScriptedActor
    from rl_core.environments.options import endpoint_opener
    from rl_core.sampling.episode_runner import EpisodeRunner
    from rl_core.sampling.groups import Group
    from rl_core.sampling.teacher_prompts import TeacherPrompts
    from rl_core.types import SamplingParams

    scripted = {"chat": chat, "open_endpoint": endpoint_opener(None)}
    actors = {
        name: ScriptedActor(name=name, replies=texts, **scripted) for name, texts in replies.items()
    }
    size, params = 2 if env.group_rewards else 1, SamplingParams(max_tokens=max_tokens)
    group = Group(task=task, batch="check", number=0, size=size, params=params, seed=0)
    prompts = TeacherPrompts({(name, env.name): (UNLIMITED, "") for name in actors})
    return await EpisodeRunner({env.name: env}, actors, RolloutConfig(), prompts).play(group)


def as_read(t: Trajectory) -> Trajectory:
    """The episode as the policy reads it as its own teacher."""
    from rl_core.sampling.teacher_prompts import turns_as_read

    return replace(t, turns=turns_as_read(t))


def describe_tokens(chat: Chat, trajectories: list[Trajectory]) -> list[str]:
    """The first episode as tokens: what each actor saw, and which tokens are trained."""
    from rl_core.data.samples import samples_from_turns

    lines = []
    for trajectory in trajectories:
        for number, sample in enumerate(samples_from_turns(trajectory.turns, 1.0)):
            more = f", sample {number + 1}: the template rewrote history" if number else ""
            trained = (
                f"{sum(sample.loss_mask)} of {len(sample.token_ids)} tokens are trained, marked "
                "with >"
            )
            lines += ["", f"{trajectory.actor} in {trajectory.task_id}{more}: {trained}"]
            lines += marked_lines(chat, sample)
    return lines


def marked_lines(chat: Chat, sample: TrainingSample) -> list[str]:
    """Lines of text; trained ones begin with `>`. A line also ends where the mask changes."""
    from rl_core.tools.shown_text import shown_text

    token_ids, loss_mask = list(sample.token_ids), list(sample.loss_mask)
    lines, start = [], 0
    for end in range(1, len(token_ids) + 1):
        if end == len(token_ids) or loss_mask[end] != loss_mask[start]:
            text = shown_text(chat, token_ids[start:end], sample.images)
            sign = ">" if loss_mask[start] else "|"
            lines += [f"{sign} {short(line)}" for line in text.rstrip("\n").split("\n")]
            start = end
    if (left_out := len(lines) - MAX_LINES) > 0:
        lines[MAX_LINES // 2 : -MAX_LINES // 2] = [f"... {left_out} lines"]
    return lines


def outcomes_of(played: dict[str, list[Trajectory]]) -> list[JSONObject]:
    """Means over the episodes of each (kind of reply, actor, status, error), with the first
    error."""
    groups: dict[tuple, list[Trajectory]] = defaultdict(list)
    for kind, trajectories in played.items():
        for t in trajectories:
            groups[kind, t.actor, t.status, t.error.replace(t.task_id, "")].append(t)
    outcomes = []
    for (kind, actor, status, _), group in groups.items():
        num_episodes = len(by_episode(group))
        outcome = {
            "reply": kind,
            "actor": actor,
            "status": status,
            "error": in_own_flags(group[0].error),
        }
        outcome["episodes"] = num_episodes
        if status != "failed":
            outcome["turns"] = fmean(episode_means(group, lambda t: len(t.turns)))
            outcome["reward"] = fmean(episode_rewards(group))
            names = dict.fromkeys(name for t in group for name in t.reward_parts)
            outcome["parts"] = {name: fmean(part_means(group, name)) for name in names}
        outcomes.append(outcome)
    return outcomes


def in_own_flags(error: str) -> str:
    """An error with the flags of a run replaced by those of `rl-core check`."""
    error = error.replace("--rollout.hook_timeout_s", "--hook_timeout_s")
    return re.sub(r"--actors\..*?\.model PATH adds", "--actors adds", error)


def part_means(trajectories: list[Trajectory], name: str) -> list[float]:
    """[episodes] mean of the reward's part `name`, 0 where a conversation lacks it."""
    return episode_means(trajectories, lambda t: t.reward_parts.get(name, 0.0))


def describe_episodes(outcomes: list[JSONObject]) -> list[str]:
    outcomes = with_failures_merged(outcomes)
    width = max(8, *(len(o["reply"]) for o in outcomes))
    lines = [
        f"{'reply':<{width}} {'actor':<10} {'episodes':>8} {'turns':>5} {'reward':>9}  "
        "parts, or why it failed"
    ]
    for o in outcomes:
        turns, reward, why = "-", "-", f"failed: {keep_ends(printable(o['error']), 600)}"
        if o["status"] != "failed":
            turns, reward = f"{o['turns']:.3g}", f"{o['reward']:.4g}"
            parts = ", ".join(f"{name} {value:.4g}" for name, value in o["parts"].items())
            why = "truncated: " * (o["status"] == "truncated") + parts
        name = f"{o['reply']:<{width}} {o['actor']:<10}"
        lines.append(f"{name} {o['episodes']:>8} {turns:>5} {reward:>9}  {why}")
    return lines


def with_failures_merged(outcomes: list[JSONObject]) -> list[JSONObject]:
    """The outcomes. Failures of an actor by the same error become one outcome, whose "reply" lists
    the kinds of replies."""
    merged: dict[tuple, JSONObject] = {}
    for o in outcomes:
        reply = None if o["status"] == "failed" else o["reply"]
        key = (o["actor"], o["status"], o["error"], reply)
        if first := merged.get(key):
            replies = {**dict.fromkeys(first["reply"].split(",")), o["reply"]: None}
            o = o | {"reply": ",".join(replies), "episodes": first["episodes"] + o["episodes"]}
        merged[key] = o
    return list(merged.values())


def describe_truncated(env: Env, cut: Trajectory) -> list[str]:
    """Lines on what hooks receive after a turn that was cut off."""
    if "rollout" in env.hooks:
        lines = [
            "a reply that is cut off, as by --max_tokens, has truncated = True; rollout(), or the "
            "agent, continues"
        ]
    else:
        lines = [
            "a turn that is cut off, as by --max_tokens, ends the episode, with status truncated"
        ]
    if "interact" in env.hooks:
        lines.append("interact() is not called after it: no tool answers, and no message comes")
    if env.turn_loop.truncated_reward is not None:
        lines.append(
            f"truncated_reward = {env.turn_loop.truncated_reward:g} is the reward, other rewards are not "
            "called"
        )
    elif env.rewards:
        replies = [
            message.get("content") for message in cut.messages if message["role"] == "assistant"
        ]
        shown = short(repr(replies[-1])) if replies else "nothing"
        lines.append(f"rewards score the text up to the cut: {shown}")
    return lines


def short(text: str) -> str:
    text = printable(text)
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]} ..."
