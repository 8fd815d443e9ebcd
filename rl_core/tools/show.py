"""rl-core show runs/x: conversations of a run with reward, status and reason."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.errors import printable
from rl_core.tools.parser import Parser

if TYPE_CHECKING:
    from rl_core.types import JSONObject


MOST_STEPS = 10  # Most steps that an error lists one by one.
COLOURS = {"reward": 1, "system": 35, "user": 36, "tool": 33, "assistant": 32, "failed": 31}  # ANSI


def main(argv: list[str]) -> int:
    parser = Parser(prog="rl-core show", description=__doc__)
    parser.add_argument("run", help="folder of a run, or one file of its rollouts/")
    parser.add_argument("--step", type=int, help="default: the newest")
    parser.add_argument(
        "--eval", action="store_true", help="episodes of the evaluation at that step"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--worst", action="store_true", help="lowest rewards first")
    which.add_argument("--best", action="store_true", help="highest rewards first")
    which.add_argument("--failed", action="store_true", help="only what failed, with the reason")
    which.add_argument(
        "--reasons",
        action="store_true",
        help="a table of why episodes failed, in all steps or --step",
    )
    which.add_argument(
        "--open", action="store_true", help="sessions of a run with --online, with their states"
    )
    parser.add_argument("--actor", help="only this actor's")
    parser.add_argument("--num", type=int, default=3, help="how many [3]")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object a line, tokens included"
    )
    options = parser.parse_args(argv)
    if options.open:
        print(sessions(options.run, options.json), flush=True)
        return 0
    if options.reasons:
        print(reasons(options), flush=True)
        return 0
    rows = chosen(read(options), options)
    if not rows:
        print(f"{options.run}: no episode failed", flush=True)
    for row in rows:
        print(json.dumps(row) if options.json else described(row), flush=True)
    return 0


def sessions(run: str, is_json: bool) -> str:
    """A line for each session whose file a run keeps, the newest last."""
    from rl_core.tools.viewer.data import RunFolder

    known = RunFolder(run).sessions
    if is_json:
        return "\n".join(map(json.dumps, known))
    lines = [f"{'session':>8}  {'reward':>8}  {'replies':>7}  {'versions':<9} state, task, reply"]
    for each in known:
        reward = "-" if each["reward"] is None else f"{each['reward']:.4g}"
        versions = "-".join(
            str(v) for v in dict.fromkeys(each["versions"][:1] + each["versions"][-1:])
        )
        reply = " ".join(each["last_reply"].split())[:60]
        lines.append(
            f"{each['number']:>8}  {reward:>8}  {each['replies']:>7}  {versions:<9} "
            + printable(f"{each['state']}; {each['task']}; {reply!r}")
        )
    return "\n".join(lines)


def files_of(run: Path, step: int | None, is_eval: bool) -> list[Path]:
    """The files with one step's episodes. `step`: None for the newest. Raises ValueError if there
    are none, and lists the steps with episodes."""
    from rl_core.tools.viewer.data import check_run

    check_run(run)
    if run.is_file():
        return [run]
    kind = "eval" if is_eval else "step"
    rollout_files, steps = [], []
    for file in sorted((run / "rollouts").glob(f"{kind}_*.jsonl*")):
        match = re.match(rf"{kind}_(\d+)", file.name)
        if match and file.is_file():  # Reading a pipe would block.
            rollout_files.append(file)
            steps.append(int(match[1]))
    if step is None and steps:
        step = max(steps)
    files = [file for file, number in zip(rollout_files, steps, strict=True) if number == step]
    if not files:
        asked = "" if step is None else f" --step {step}"
        raise ValueError(no_episodes(run, asked, steps, is_eval))
    return files


def no_episodes(run: Path, asked: str, steps: list[int], is_eval: bool) -> str:
    """An error that lists the steps with episodes. `asked`: the flag of the step."""
    return (
        f"{run}{asked}: no episodes in {run / 'rollouts'}; steps with "
        f"{'eval' if is_eval else 'step'} episodes: {describe_steps(run, steps, is_eval)}"
    )


def describe_steps(run: Path, steps: list[int], is_eval: bool) -> str:
    """The steps with episodes, or the reason why there are none."""
    from rl_core.config import RL
    from rl_core.run.saving.resumed_config import read_config

    if len(set(steps)) > MOST_STEPS:
        return f"{len(set(steps))} from {min(steps)} to {max(steps)}"
    if steps:
        return ", ".join(map(str, sorted(set(steps))))
    file = run / "config.yaml"
    config = read_config(file) if file.is_file() else {}
    algorithm = config.get("algorithm")
    if algorithm and algorithm not in RL:
        return f"none; --algorithm {algorithm} learns from rows and plays no episodes"
    if is_eval and config.get("eval_every") == 0:
        return "none; the run has --eval_every 0"
    return "none; was it run with --rollout.save false?"


def reasons(options: argparse.Namespace) -> str:
    """A table of reasons with the number of episodes that failed, and their steps. Exceptions that
    differ by a value are one reason, which shows the first value and counts the others."""
    from rl_core.data.episodes import failure_reason
    from rl_core.tools.viewer.data import RunFolder

    run = RunFolder(options.run)
    run.refresh()
    episodes: set[tuple] = set()
    failed: dict[str, dict[tuple, int]] = {}  # first reason -> episode -> step
    firsts: dict[str, str] = {}  # reason without its values -> first reason
    others: dict[str, set[str]] = {}  # first reason -> reasons that differ by a value
    for e in run.entries:
        is_asked = (
            (e.kind != "train") == options.eval
            and options.step in (None, e.step)
            and options.actor in (None, e.actor)
        )
        if is_asked:
            episode = (e.kind, e.step, e.env, e.group, e.index)
            episodes.add(episode)
            if e.status == "failed":
                reason = failure_reason(e.error, e.task)
                first = firsts.setdefault(without_values(reason), reason)
                failed.setdefault(first, {})[episode] = e.step
                others.setdefault(first, set()).update({reason} - {first})
    num_failed = len({episode for steps_of in failed.values() for episode in steps_of})
    lines = [f"{num_failed} of {len(episodes)} episodes failed"]
    if failed:
        lines.append(f"{'failed':>8}  {'steps':<12} reason")
    for reason, steps_of in sorted(failed.items(), key=lambda pair: -len(pair[1])):
        first, last = min(steps_of.values()), max(steps_of.values())
        steps = str(first) if first == last else f"{first} to {last}"
        note = f"  (and {len(others[reason])} other values)" if others[reason] else ""
        lines.append(f"{len(steps_of):>8}  {steps:<12} {printable(reason)}{note}")
    return "\n".join(lines)


def without_values(reason: str) -> str:
    """The reason with quoted texts and numbers of the exception's message replaced by `...`."""
    head, name, message = re.split(r"(\w+(?:Error|Exception): |\Z)", reason, maxsplit=1)
    return head + name + re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "...", message)


def read(options: argparse.Namespace) -> Iterator[JSONObject]:
    from rl_core.data.tables import read_episodes

    for file in files_of(Path(options.run), options.step, options.eval):
        for row in read_episodes(file):
            yield {"file": file.name, **row}


def chosen(rows: Iterator[JSONObject], options: argparse.Namespace) -> list[JSONObject]:
    """Episodes that the flags select, in the flags' order."""
    selected = [row for row in rows if options.actor in (None, row["actor"])]
    if options.failed and selected:
        return [row for row in selected if row["status"] == "failed"][: options.num]
    if options.worst or options.best:
        scored = (row for row in selected if row["reward"] is not None)
        selected = sorted(scored, key=lambda row: row["reward"], reverse=options.best)
    if not selected:
        actor = f"{options.actor}'s " if options.actor else ""
        step = (
            "the newest step; --step N shows another"
            if options.step is None
            else f"step {options.step}"
        )
        raise ValueError(f"{options.run}: none among {actor}episodes of {step}")
    return selected[: options.num]


def described(row: JSONObject) -> str:
    """An episode as text: a headline, then each message under its role."""
    reward = "-" if row["reward"] is None else f"{row['reward']:.4g}"
    parts = ", ".join(f"{name} {value:.4g}" for name, value in row["reward_parts"].items())
    head = (
        f"== {row['actor']}  {printable(row['task_id'])}  episode {row['index']}  "
        f"{row['file'].partition('.')[0]}"
    )
    state = (
        f"reward {reward}"
        + (f" ({parts})" if len(row["reward_parts"]) > 1 else "")
        + f"  {row['status']}"
    )
    lines = [coloured(f"{head}  {state}", "failed" if row["status"] == "failed" else "reward")]
    if row["error"]:
        lines += wrapped(printable(f"reason: {row['error']}"))
    columns = row["columns"]
    if columns:
        lines += [coloured("[row]", "row")]
        lines += [line for name, text in columns.items() for line in wrapped(f"{name}: {text}")]
    for message in row["messages"]:
        lines += [
            coloured(f"[{printable(message['role'])}]", message["role"]),
            *wrapped(content_of(message)),
        ]
    if row.get("log"):
        lines += [coloured("[log]", "log"), *wrapped(row["log"])]
    return "\n".join([*lines, ""])


def content_of(message: JSONObject) -> str:
    """A message's text, then its other fields as JSON."""
    content, rest = (
        message.get("content") or "",
        {k: v for k, v in message.items() if k not in ("role", "content")},
    )
    text = content if isinstance(content, str) else json.dumps(content)
    if isinstance(content, list) and any(item.get("type") == "image" for item in content):
        texts = (item.get("text", f"[image {item.get('image')}]") for item in content)
        text = "".join(texts)
    return "\n".join(filter(None, [text, json.dumps(rest) if rest else ""]))


def wrapped(text: str) -> list[str]:
    width = min(shutil.get_terminal_size().columns, 120) - 2
    safe = printable(text, also="\n").split("\n")
    lines = (textwrap.wrap(line, width, drop_whitespace=False) or [""] for line in safe)
    return [f"  {row}".rstrip() for line in lines for row in line]


def coloured(text: str, kind: str) -> str:
    return f"\033[{COLOURS.get(kind, 0)}m{text}\033[0m" if sys.stdout.isatty() else text
