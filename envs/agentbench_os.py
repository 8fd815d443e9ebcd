"""AgentBench's operating system (arXiv:2308.03688): questions and tasks in a shell, each in a box.

    DATA=AgentBench/data/os_interaction            # github.com/THUDM/AgentBench
    AGENTBENCH_SCRIPTS=$DATA/scripts/7 rl-core train --env_path envs/agentbench_os.py
    --data.train $DATA/train_0317/training.json --data.columns prompt=description --model M
    --max_prompt_tokens 1024 --max_tokens 512 --out runs/os

The model calls `bash`. Its last message, without a call, is the answer. Reward: 1 if the row's
checkers accept it, else 0. A checker is `null` (the row's example command, whose output the next
ones get), `code`, or a `file` of $AGENTBENCH_SCRIPTS. Boxes are of bubblewrap, in which /usr and
/etc are read-only, or containers of the image $AGENTBENCH_IMAGE. Without --data.train: counts and
sums over files, 3 levels; a hash of the prompt says which tenth is held out. Which rows of
AgentBench their own examples solve: docs/environments.md. Needs a GPU, not run.
"""

import asyncio
import os
import random
import zlib
from contextlib import asynccontextmanager
from pathlib import Path

from programs.terminal_agent import BASH, solve

from rl_core.sandbox import boxes

SCRIPTS, IMAGE = os.environ.get("AGENTBENCH_SCRIPTS", ""), os.environ.get("AGENTBENCH_IMAGE", "")
SYSTEM = (
    "You work in a Linux shell. Call bash to run commands; each begins in the same folder. When "
    "the task is done, or you know the answer, reply without a call: the answer alone, such as a "
    "number."
)
TIMEOUT_S, COMMAND_S = 240.0, 30.0
RUNNERS = {"bash": ["bash", "-c"], "python": ["python3", "-c"]}
IS_SAME = "import sys; sys.exit(int(sys.argv[1]) != int(sys.argv[2]))"
max_turns = 8
tools = [BASH]
# Kind -> question about the files of a folder, and the command that answers.
KINDS = {
    "files": ("How many files below {} end in .log?", "find {} -name '*.log' | wc -l"),
    "words": ("In how many files below {} stands the word on?", "grep -rlw on {} | wc -l"),
    "sum": ("What is the sum of all numbers in files below {}?", "cat $(find {} -type f) | {}"),
}
SUM = "awk '$1 ~ /^[0-9]+$/ {s += $1} END {print s}'"


def make_row(kind, level, rng):
    """A question about files in as many folders as `level`."""
    root = f"/app/{rng.choice('bdfgklmnprst')}{rng.choice('aeiou')}{rng.randrange(100)}"
    lines = []
    for number in range(level):
        folder = f"{root}/d{number}"
        lines.append(f"mkdir -p {folder}")
        for name in rng.sample("abcdefgh", 1 + level):
            end = rng.choice(("log", "txt"))
            text = f"{rng.choice(('on', 'off', 'one'))}\\n{rng.randrange(2, 50)}\\n"
            lines.append(f"printf '{text}' > {folder}/{name}.{end}")
    asked, command = KINDS[kind]
    check = [None, {"language": "python", "code": IS_SAME}]
    return {
        "prompt": asked.format(root),
        "kind": kind,
        "level": level,
        "create": {"init": "\n".join(lines)},
        "evaluation": {"check": check, "example": command.format(root, SUM)},
    }


def load_tasks(split):
    rng, rows = random.Random(0), {}
    for number in range(900):
        row = make_row([*KINDS][number % 3], number // 3 % 3 + 1, rng)
        rows[row["prompt"]] = row
    return [row for row in rows.values() if is_held_out(row) == (split != "train")]


def is_held_out(row):
    return zlib.crc32(row["prompt"].encode()) % 10 == 0


def command_of(script):
    """(how a script is run, its text). Raises ValueError."""
    script = {"code": script} if isinstance(script, str) else script
    language = script.get("language") or "bash"
    if language not in RUNNERS:
        raise ValueError(f"a script's language {language!r} is not one of {', '.join(RUNNERS)}")
    if script.get("code") is not None:
        return [*RUNNERS[language], script["code"]]
    if not SCRIPTS:
        raise ValueError(f"the row names {script['file']}: set AGENTBENCH_SCRIPTS to its folder")
    return [*RUNNERS[language], Path(SCRIPTS, script["file"]).read_text(encoding="utf-8")]


def preparing(row):
    """The scripts that prepare a box."""
    create = row.get("create")
    start_script = create.get("init") if isinstance(create, dict) else None
    scripts = start_script if isinstance(start_script, list) else [start_script]
    return [command_of(script) for script in scripts if script]


@asynccontextmanager
async def open_task(row):
    """A box as the row wants it. Raises RuntimeError if a script that prepares it fails."""
    async with await boxes.open({}, image=IMAGE) as box:
        await box.exec(["mkdir", "-p", "/home", "/var/log"])
        for command in preparing(row):
            done = await box.exec(command, timeout_s=COMMAND_S)
            if done.code != 0:
                raise RuntimeError(f"preparing failed ({done.code}): {done.stderr[-300:]}")
        # Programs that a row starts run until the box ends.
        start = row.get("start")
        running = box.exec(f"{start}\nwait", timeout_s=TIMEOUT_S) if start else asyncio.sleep(0)
        task = asyncio.ensure_future(running)
        try:
            yield box
        finally:
            task.cancel()


async def is_right(row, box, answer):
    """True if every checker accepts the answer."""
    wanted = row["evaluation"]
    if "match" in wanted:
        return answer == wanted["match"]
    checks = wanted["check"]
    arguments = [answer]
    for script in checks if isinstance(checks, list) else [checks]:
        command = command_of(wanted["example"] if script is None else script)
        # A script's own name comes first in bash.
        name = ["--"] if command[0] == "bash" else []
        done = await box.exec([*command, *name, *arguments], timeout_s=COMMAND_S)
        if done.code != 0:
            return False
        arguments.append(done.stdout)
    return True


async def rollout(task, actors):
    [actor] = actors.values()
    async with open_task(task.row) as box:
        limits = {"max_turns": actor.max_turns, "timeout_s": TIMEOUT_S}
        reply = await solve(actor, task.messages, box, system=SYSTEM, **limits)
        is_done = not reply.truncated and not reply.messages[-1].get("tool_calls")
        reward = is_done and await is_right(task.row, box, reply.answer.strip())
    return [reply.trajectory(float(reward))]


async def oracle(task):
    """The row's example command, and its output as the answer."""
    wanted = task.row["evaluation"]
    async with open_task(task.row) as box:
        if "match" in wanted:
            return float(await is_right(task.row, box, wanted["match"]))
        example = wanted.get("example") or "true"
        done = await box.exec(command_of(example), timeout_s=COMMAND_S)
        return float(await is_right(task.row, box, done.stdout.strip()))
