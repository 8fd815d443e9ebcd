"""Runs a recipe's small twin on a CPU: the recipe's file with a tiny model, shorter texts, other
learning rates, and generated rows of the same columns.

    python scripts/recipe_twin.py limo_qwen2.5_7b --out runs/twins/limo

TWINS holds a twin's changes. Algorithm, losses, schedule, data.columns, stop words and turns are
the recipe's. The twin of a recipe that starts from a trained model has a warm-up: SFT on rows that
show the form of a reply and are mostly wrong.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from recipe_rows import KINDS, MARK, write_rows
from script_tools import ROOT, make_parser

from rl_core.tools.tiny_model import make_tiny_model

Row = dict[str, Any]
MAX_STEPS = 40
TRAINS = "ABCDEFGH"


@dataclass(kw_only=True, slots=True)
class Twin:
    """The changes of a twin."""

    rows: Callable[[random.Random], Any]  # Makes a row of the recipe's source.
    flags: str  # Changed flags.
    prepare: str | None = None  # Kind of scripts/recipe_rows.py that writes the recipe's files.
    demonstration: Callable[[random.Random], Row] | None = None  # Makes a row of the warm-up.
    warm_up: str = ""  # Flags of the warm-up.
    num_train: int = 1280
    num_eval: int = 64


def says(role: str, content: str) -> Row:
    return {"role": role, "content": content}


def limo_row(rng: random.Random) -> Row:
    """Columns of GAIR/LIMO. The solution adds numbers one by one."""
    numbers = [rng.randrange(1, 10) for _ in range(rng.randrange(3, 7))]
    total, lines = numbers[0], []
    for number in numbers[1:]:
        lines.append(f"{total} + {number} = {total + number}.")
        total += number
    question = f"What is {' + '.join(map(str, numbers))}?"
    solution = "\n".join([*lines, f"\\boxed{{{total}}}"])
    return {"question": question, "solution": solution, "answer": str(total)}


def orz_dialog(rng: random.Random) -> list[Row]:
    """A row of Open-Reasoner-Zero's file: which of two numbers is larger."""
    low, high = sorted(rng.sample(range(10), 2))
    first, second = rng.sample((low, high), 2)
    question = {"from": "human", "value": f"Larger of {first} and {second}?"}
    return [question, {"from": "assistant", "ground_truth": {"value": str(high)}}]


def orz_demonstration(rng: random.Random) -> Row:
    """One of the two numbers at random, in a box."""
    question = orz_dialog(rng)[0]["value"]
    guess = rng.choice([letter for letter in question if letter.isdigit()])
    return {"prompt": f"{question}\n\n{MARK}", "response": f"\\boxed{{{guess}}}"}


def gate_of(train: str) -> str:
    return str((7 * ord(train) + 3) % 10)


def search_row(rng: random.Random) -> Row:
    """Columns of PeterJinGo/nq_hotpotqa_train. The recipe does not read `prompt`."""
    train = rng.choice(TRAINS)
    question = f"Which gate has train {train}?"
    return {
        "id": f"train_{rng.randrange(10**6)}",
        "prompt": [says("user", f"Answer the given question. Question: {question}")],
        "question": question,
        "golden_answers": [gate_of(train)],
        "data_source": "nq",
    }


def search_demonstration(rng: random.Random) -> Row:
    """A guess in half of the rows, else a search."""
    question = search_row(rng)["question"]
    dialog = [says("system", search_instructions()), says("user", question)]
    if rng.random() < 0.5:
        guess = f"<answer>{rng.randrange(10)}</answer>"
        return {"messages": [*dialog, says("assistant", guess)]}
    train = question[-2]
    dialog += [says("assistant", f"<search>train {train}</search>"), says("user", passage(train))]
    return {"messages": [*dialog, says("assistant", f"<answer>{gate_of(train)}</answer>")]}


def search_instructions() -> str:
    return runpy.run_path(str(ROOT / "envs/search_qa.py"))["HOW"]


def passage(train: str) -> str:
    return f"train {train}\ntrain {train} leaves from gate {gate_of(train)}."


KIND = ("Gladly:", "Of course:", "With pleasure:", "Sure:")
RUDE = ("No.", "Find out yourself.", "Why should I?", "Not now.")


def pair_row(rng: random.Random) -> Row:
    """Columns of HuggingFaceH4/ultrafeedback_binarized. The chosen reply does what is asked."""
    word = "".join(rng.sample("abcdefghij", 4))
    prompt = f"Say {word}."
    replies = (f"{rng.choice(KIND)} {word}", rng.choice(RUDE))
    chosen, rejected = ([says("user", prompt), says("assistant", reply)] for reply in replies)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "score_chosen": 8.0}


def skywork_row(rng: random.Random) -> Row:
    """Columns of Skywork/Skywork-Reward-Preference-80K-v0.2. One pair in twenty has equal replies,
    which no loss can use."""
    row = pair_row(rng)
    rejected = row["chosen"] if rng.random() < 0.05 else row["rejected"]
    return {"chosen": row["chosen"], "rejected": rejected, "source": "twin"}


TWINS = {
    "limo_qwen2.5_7b": Twin(
        rows=limo_row,
        flags="--cp 1 --max_prompt_tokens 64 --max_tokens 192 --optim.lr 4e-3",
        num_train=80,
        num_eval=0,
    ),
    "open_reasoner_zero_qwen2.5_7b": Twin(
        rows=orz_dialog,
        prepare="orz",
        demonstration=orz_demonstration,
        warm_up="--num_steps 150 --max_prompt_tokens 128 --max_tokens 16",
        flags="--cp 1 --tasks_per_step 16 --group_size 8 --max_prompt_tokens 128 --max_tokens 16 "
        "--optim.lr 5e-4 --critic.lr 1e-3 --eval_every 20",
    ),
    "search_r1_qwen2.5_3b": Twin(
        rows=search_row,
        demonstration=search_demonstration,
        warm_up="--num_steps 300 --max_prompt_tokens 256 --max_tokens 128",
        flags="--tasks_per_step 16 --max_prompt_tokens 256 --max_tokens 32 --optim.lr 5e-4 "
        "--eval_every 20 --eval.num_tasks 64",
    ),
    "ultrafeedback_dpo_llama3.1_8b": Twin(
        rows=pair_row,
        prepare="pairs",
        flags="--tasks_per_step 32 --max_prompt_tokens 64 --max_tokens 64 --optim.lr 1e-3 "
        "--eval_every 20",
    ),
    "reward_model_qwen3_0.6b": Twin(
        rows=pair_row,
        flags="--tasks_per_step 32 --max_prompt_tokens 64 --max_tokens 64 --optim.lr 1e-3 "
        "--eval_every 20",
    ),
    "skywork_reward_llama3.1_8b": Twin(
        rows=skywork_row,
        prepare="pairs",
        flags="--tasks_per_step 32 --max_prompt_tokens 64 --max_tokens 64 --optim.lr 1e-3 "
        "--eval_every 20",
    ),
}
TINY = f"--learner.dtype float32 --rollout.max_concurrent 64 --num_steps {MAX_STEPS}"
WARM_UP = "--algorithm sft --tasks_per_step 32 --optim.lr 3e-3 --optim.schedule cosine"


class Retriever(BaseHTTPRequestHandler):
    """Answers as Search-R1's retrieval server: the passage of the train that a query names last."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        results = []
        for query in asked["queries"]:
            trains = [letter for letter in query if letter in TRAINS]
            results.append([{"document": {"contents": passage(train)}} for train in trains[-1:]])
        body = json.dumps({"result": results}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@contextmanager
def retriever() -> Iterator[str]:
    """The URL of a Retriever that answers until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Retriever)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/retrieve"
    finally:
        server.shutdown()
        server.server_close()


def write_data(name: str, folder: Path, num_sft: int = 4800) -> dict[str, Path]:
    """The files of a twin's rows: train, eval if it has any, and sft for a warm-up."""
    twin = TWINS[name]
    rng = random.Random(0)
    sizes = {"train": twin.num_train, "eval": twin.num_eval}
    files = {}
    folder.mkdir(parents=True, exist_ok=True)
    for split, size in sizes.items():
        rows = [twin.rows(rng) for _ in range(size)]
        if not rows:
            continue
        files[split] = folder / f"{split}.jsonl"
        source = folder / f"source_{split}.json"
        if twin.prepare:
            source.write_text(json.dumps(rows), encoding="utf-8")
            write_rows(files[split], KINDS[twin.prepare](str(source)))
        else:
            write_rows(files[split], rows)
    if twin.demonstration:
        files["sft"] = folder / "sft.jsonl"
        write_rows(files["sft"], (twin.demonstration(rng) for _ in range(num_sft)))
    return files


def commands(name: str, out: Path, model: Path, files: dict[str, Path]) -> list[list[str]]:
    """Flags of rl_core.train: the warm-up if there is one, then the twin."""
    twin = TWINS[name]
    runs = []
    if twin.demonstration:
        paths = ["--model", str(model), "--data.train", str(files["sft"])]
        out_flags = ["--out", str(out / "sft")]
        runs.append([*WARM_UP.split(), *twin.warm_up.split(), *paths, *out_flags])
        model = out / "sft/hf/policy"
    recipe = ROOT / f"scripts/recipes/{name}.yaml"
    flags = ["--config", str(recipe), "--model", str(model), "--out", str(out / "twin")]
    for split in ("train", "eval"):
        if split in files:
            flags += [f"--data.{split}", str(files[split])]
    runs.append([*flags, *TINY.split(), *twin.flags.split()])
    return runs


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("name", choices=TWINS)
    parser.add_argument("--out", type=Path, required=True, help="folder for model, data and runs")
    args, more = parser.parse_known_args()
    out = args.out.resolve()  # A recipe's paths are from the repository's root.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with retriever() as url:
        os.environ["SEARCH_URL"] = url
        make_tiny_model(out / "model")
        files = write_data(args.name, out / "data")
        *warm_up, twin = commands(args.name, out, out / "model", files)
        for flags in (*warm_up, [*twin, *more]):
            command = [sys.executable, "-m", "rl_core.tools.cli", "train", *flags]
            print("\n$ rl-core train", *flags, flush=True)
            if code := subprocess.run(command, cwd=ROOT).returncode:
                sys.exit(code)


if __name__ == "__main__":
    main()
