"""Small tasks in a shell, of one or two commands, in a box without network (docs/sandbox.md).

    rl-core train --env_path envs/terminal.py --model Qwen/Qwen3-0.6B --out runs/terminal
    --max_prompt_tokens 1024 --max_tokens 256

The model calls `bash` and sees the command's output. Reward: 1 if the folder holds just the files
that it should, with their texts. Kinds (column `kind`): write, copy, move, remove, join, fold. Rows
of your own: a prompt, `files` (name -> text) before, and `wanted` after. A hash of the prompt says
which tenth is held out. Curve on a CPU: docs/evidence/curves.md.
"""

import json
import random
import zlib

from programs.terminal_agent import BASH, solve

from rl_core.sandbox import boxes

NAMES = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in "bdgklmnprt"]
# `join` adds a file to another one, and `fold` removes it then.
KINDS = ("write", "copy", "move", "remove", "join", "fold")
TIMEOUT_S = 120.0
FOLDER = "/app"
# Nothing of the folder but files of text counts, each no longer than this.
READ = """
import json, os
found = {name: open(name, errors="replace").read(1000) if os.path.isfile(name) else None
         for name in os.listdir(".")}
print(json.dumps(found))
"""
max_turns = 4
tools = [BASH]


def make_row(kind, rng):
    """A task of this kind with new names."""
    first, second, word = rng.sample(NAMES, 3)
    before = {first: f"{word}\n"}
    if kind == "write":
        asked, before, after = f"write {word} to {first}", {}, before
    elif kind == "copy":
        asked, after = f"copy {first} to {second}", before | {second: f"{word}\n"}
    elif kind == "move":
        asked, after = f"move {first} to {second}", {second: f"{word}\n"}
    elif kind == "remove":
        asked, after = f"remove {first}", {}
    else:
        asked, before = f"{kind} {first} to {second}", before | {second: f"{first}\n"}
        after = {second: f"{first}\n{word}\n"}
        if kind == "join":
            after[first] = f"{word}\n"
    return {"prompt": asked, "kind": kind, "files": before, "wanted": after}


def load_tasks(split):
    rng, rows = random.Random(0), {}
    for number in range(2000):
        row = make_row(KINDS[number % len(KINDS)], rng)
        rows[row["prompt"]] = row
    return [row for row in rows.values() if is_held_out(row) == (split != "train")]


def is_held_out(row):
    return zlib.crc32(row["prompt"].encode()) % 10 == 0


async def rollout(task, actors):
    actor = next(iter(actors.values()))
    async with await boxes.open(task.row) as box:
        for name, text in task.row["files"].items():
            await box.put(f"{FOLDER}/{name}", text)
        limits = {"max_turns": actors.max_turns, "timeout_s": TIMEOUT_S}
        reply = await solve(actor, task.messages, box, system="", **limits)
        await box.end_processes()
        read = await box.exec(["python3", "-I", "-c", READ], cwd=FOLDER)
    files = json.loads(read.stdout) if read.code == 0 else None
    return [reply.trajectory(float(files == task.row["wanted"]))]
