"""What it takes to begin: CPU seconds and wall time of whole commands that do one step of a tiny
model, and of the imports in them.

    python scripts/bench_start.py --repeats 5 [--against ANOTHER_CHECKOUT]

The sides take turns. CPU seconds are those of all processes of a command.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rl_core.tools.tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parent.parent
FLAGS = (
    "--env_path envs/sort_digits.py --num_steps 1 --tasks_per_step 16 --group_size 8 "
    "--max_tokens 8 --max_prompt_tokens 16"
)
RUNS = {
    "python -m rl_core.train": "-m rl_core.train",
    "rl-core train --nproc_per_node 2": "-m rl_core.cli train --nproc_per_node 2",
    "torchrun --nproc_per_node 1": (
        "-m torch.distributed.run --standalone --nproc_per_node 1 -m rl_core.train"
    ),
    "torchrun --nproc_per_node 2": (
        "-m torch.distributed.run --standalone --nproc_per_node 2 -m rl_core.train"
    ),
}
# What all of them import.
IMPORTS = {
    "import torch": "import torch",
    "import transformers' Qwen3": "import transformers.models.qwen3.modeling_qwen3",
}


def measure(args: list[str], checkout: Path) -> tuple[float, float]:
    """(CPU seconds, wall time) of Python with these arguments."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        [sys.executable, *args],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    wall = time.monotonic() - began
    if done.returncode and "none of 1 steps made an update" not in done.stderr:
        sys.exit(done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return cpu, wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--against", type=Path, help="a checkout that takes turns with this one")
    args = parser.parse_args()
    checkouts = [args.against.resolve(), ROOT] if args.against else [ROOT]
    taken: dict[tuple[str, Path], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(f"{folder}/model")
        for _ in range(args.repeats):
            for name, command in RUNS.items():
                for checkout in checkouts:
                    out = tempfile.mkdtemp(dir=folder)
                    flags = f"{FLAGS} --model {folder}/model --out {out}/run"
                    cost = measure([*command.split(), *flags.split()], checkout)
                    taken.setdefault((name, checkout), []).append(cost)
            for name, code in IMPORTS.items():
                alone = f"import gc, os; gc.disable(); {code}; os._exit(0)"
                cost = measure(["-c", alone], ROOT)
                taken.setdefault((name, ROOT), []).append(cost)
    print("| command | checkout | CPU s, least to most | wall s |\n|---|---|---|---|")
    for (name, checkout), costs in taken.items():
        cpu, wall = ([cost[i] for cost in costs] for i in (0, 1))
        spread = f"{statistics.median(cpu):.2f} ({min(cpu):.2f} to {max(cpu):.2f})"
        print(f"| `{name}` | {checkout.name} | {spread} | {statistics.median(wall):.2f} |")


if __name__ == "__main__":
    main()
