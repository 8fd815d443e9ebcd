"""Questions that tools answer: a calculator, a search, files in a private folder, and Python in the
sandbox.

    rl-core train --env_path envs/tool_use.py --model Qwen/Qwen3-0.6B --out runs/tools
    --max_prompt_tokens 1024 --max_tokens 512

Calls are read as the model's chat template writes them. Reward: 1 if the last number of the last
reply is the answer; 0 for a reply that is cut off. Metrics: `called`, and `refused`, calls that
were wrong and got an error to read.

Without --data.train the questions are made up, of four kinds (column `kind`) at three levels
(`level`): calc, arithmetic; price, of one to three things that no model knows; file, adding up
numbers in a file; code, counting that takes a program. The question says to which split it belongs.
Rows of your own: a prompt, `answer`, and optionally `files` (name -> text) for the folder, which
one episode has for itself. Python sees a copy of it (docs/sandbox.md). Curve on a CPU:
docs/evidence/curves.md.
"""

import inspect
import json
import random
import re
import shutil
import tempfile
import weakref
import zlib
from pathlib import Path

from rl_core import reward
from rl_core.sandbox import Sandbox

try:
    import bm25s
except ImportError:
    raise ImportError("bm25s is missing: pip install 'rl_core[envs]'") from None

NAMES = [f"{a}{b}{c}o" for a in "bdfgklmnprstvz" for b in "aeiou" for c in "klmnrst"]
PRICES = {
    name: random.Random(name).randrange(2, 100) for name in random.Random(0).sample(NAMES, 300)
}
CORPUS = [f"One {name} costs {price} crowns." for name, price in PRICES.items()]
INDEX, SANDBOX = bm25s.BM25(corpus=CORPUS), Sandbox()
INDEX.index(bm25s.tokenize(CORPUS, show_progress=False), show_progress=False)
max_turns, truncated_reward = 6, 0.0


def calculator(desk, expression):
    """Works out an expression of numbers, + - * / // % and parentheses."""
    if not re.fullmatch(r"[-0-9+*/%(). ]{1,200}", expression) or re.search(
        r"\*\*|[0-9)] *\(", expression
    ):
        raise ValueError("an expression has numbers, + - * / // % and parentheses alone")
    # The pattern above allows digits and these signs alone: no names and nothing slow.
    number = eval(expression)
    return int(number) if number == int(number) else number


def search(desk, query):
    """Finds what is known about things."""
    words = bm25s.tokenize(query[:200], show_progress=False)
    [matches], [scores] = INDEX.retrieve(words, k=3, show_progress=False)
    return (
        "\n".join(text for text, score in zip(matches, scores, strict=True) if score > 0)
        or "Nothing was found."
    )


def read_file(desk, name):
    """Reads a file of the folder."""
    if name not in desk.files():
        raise ValueError(f"file {name!r} does not exist; there are {sorted(desk.files())}")
    return desk.files()[name]


def write_file(desk, name, text):
    """Writes a file into the folder."""
    if not re.fullmatch(r"\w[\w.-]{0,40}", name):
        raise ValueError("the name of a file has letters, digits, dots and dashes alone")
    (desk.folder / name).write_text(text[:100_000])
    return "written"


async def python(desk, code):
    """Runs a Python program and gives what it prints."""
    copies = f"for _ in {desk.files()!r}.items(): open(_[0], 'w').write(_[1])\n"
    done = await SANDBOX.run(copies + code, timeout_s=5)
    return (
        done.stdout if done.status == "ok" else f"{done.status}\n{done.stdout}{done.stderr[-500:]}"
    )


class Desk:
    """State that the tools of one episode share."""

    def __init__(self, files):
        self.folder, self.refused = Path(tempfile.mkdtemp(prefix="rl_core_desk_")), []
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        for name, text in files.items():
            write_file(self, name, text)

    def files(self):
        return {file.name: file.read_text() for file in self.folder.iterdir()}


def schema(tool):
    names = [*inspect.signature(tool).parameters][1:]
    parameters = {
        "type": "object",
        "properties": {name: {"type": "string"} for name in names},
        "required": names,
    }
    return {
        "type": "function",
        "function": {"name": tool.__name__, "description": tool.__doc__, "parameters": parameters},
    }


TOOLS = {tool.__name__: tool for tool in (calculator, search, read_file, write_file, python)}
tools = [schema(tool) for tool in TOOLS.values()]


def question(kind, level, rng):
    a, b, c, d = (
        rng.randrange(11, 100),
        rng.randrange(2, 10),
        rng.randrange(2, 100),
        rng.randrange(2, 10),
    )
    if kind == "calc":
        asked = (
            (f"{a}*{b}", a * b),
            (f"{a}*{b}+{c}", a * b + c),
            (f"({a}*{b}+{c})*{d}", (a * b + c) * d),
        )[level - 1]
        return {"prompt": f"{asked[0]}?", "answer": asked[1]}
    if kind == "price":
        names = rng.sample([*PRICES], level)
        return {
            "prompt": f"Price of one {' and one '.join(names)}?",
            "answer": sum(PRICES[name] for name in names),
        }
    if kind == "file":
        name, numbers = f"{rng.choice(NAMES)}.txt", [rng.randrange(2, 100) for _ in range(2**level)]
        return {
            "prompt": f"Sum of {name}?",
            "answer": sum(numbers),
            "files": {name: "\n".join(map(str, numbers))},
        }
    matches = [n for n in range(1, a * 4**level + 1) if n % b == 0 or str(d) in str(n)]
    return {
        "prompt": f"How many numbers from 1 to {a * 4**level} divide by {b} or hold a {d}?",
        "answer": len(matches),
    }


def load_tasks(split):
    rng, rows = random.Random(0), {}
    for number in range(2400):
        position = {
            "kind": ("calc", "price", "file", "code")[number % 4],
            "level": number // 4 % 3 + 1,
        }
        row = {"files": {}} | question(*position.values(), rng) | position
        rows[row["prompt"]] = row
    return [
        row
        for asked, row in rows.items()
        if (zlib.crc32(asked.encode()) % 10 == 0) == (split == "eval")
    ]


def start(task):
    return Desk(task.row.get("files") or {})


async def use(desk, name, arguments):
    """(text of the tool, True if it refused)."""
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        result = TOOLS[name](desk, **{argument: str(text) for argument, text in arguments.items()})
        return str(await result if inspect.isawaitable(result) else result)[:2000], False
    except (ValueError, TypeError, KeyError, AttributeError, SyntaxError, ArithmeticError) as error:
        return f"error: {type(error).__name__}: {error}", True


async def interact(messages, state):
    calls = messages[-1].get("tool_calls") or []
    replies = [
        (call["id"], *await use(state, call["function"]["name"], call["function"]["arguments"]))
        for call in calls
    ]
    state.refused += [is_refused for *_, is_refused in replies]
    return [{"role": "tool", "content": text, "tool_call_id": id} for id, text, _ in replies]


def reward_fn(messages, answer):
    numbers = re.findall(r"-?[0-9]+(?:\.[0-9]+)?", messages[-1]["content"].replace(",", ""))
    return float(
        not messages[-1].get("tool_calls")
        and numbers[-1:] != []
        and float(numbers[-1]) == float(answer)
    )


@reward(weight=0)
def counts(state):
    return {"called": float(len(state.refused)), "refused": float(sum(state.refused))}
