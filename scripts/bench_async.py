"""How long a run takes when its environment is slow: synchronously, with groups that go on from
step to step, and with a rank that only samples.

    python scripts/bench_async.py [--steps 20] [--turn_s 0.1] [--out result.json]

The same 0.1 M parameter model, tasks, steps and two ranks in each run; what scores an episode
waits for turn_s seconds, one to six times. Seconds are those of the steps after
the first, during which the ranks also warm up; `speed` is against the synchronous run. One torch
thread a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from make_tiny_model import make_tiny_model

ROOT = Path(__file__).parent.parent
ENVIRONMENT = """
import asyncio, random
def load_tasks(split):
    return [{{"messages": [{{"role": "user", "content": str(n)}}]}} for n in range(512)]

# An untrained model's turns are cut off, and nothing answers them: scoring its replies is slow.
async def reward_fn(messages, task):
    draw = random.Random(task.id + messages[-1]["content"])
    for _ in range(6):
        await asyncio.sleep({turn_s})
        if draw.random() > 0.6:
            break
    return float(sum(map(ord, messages[-1]["content"])) % 7)
"""
COMMAND = (
    "-m torch.distributed.run --standalone --nproc_per_node=2 -m rl_core.train --max_tokens 8 "
    "--max_prompt_tokens 16 "
    "--tasks_per_step 8 --group_size 4 --rollout.save false"
)
RUNS = {
    "synchronous": [],
    "max_staleness 1": ["--max_staleness", "1"],
    "max_staleness 2": ["--max_staleness", "2"],
    "rollout_ranks 1, max_staleness 1": ["--rollout_ranks", "1", "--max_staleness", "1"],
    "rollout_ranks 1, max_staleness 2": ["--rollout_ranks", "1", "--max_staleness", "2"],
}


def measure(flags: list[str], model: Path, env: Path, folder: Path, steps: int) -> dict:
    paths = ["--model", model, "--env_path", env, "--out", folder, "--num_steps", steps]
    command = [sys.executable, *COMMAND.split(), *map(str, paths), *flags]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]
    found = {"seconds": sum(row["time/step_s"] for row in rows)}
    for name in ("rollout/staleness", "time/learners_idle_frac", "time/engines_idle_frac"):
        values = [row[name] for row in rows if name in row]
        found[name.rpartition("/")[2]] = sum(values) / len(values) if values else None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--turn_s", type=float, default=0.1, help="seconds that the environment takes for a turn"
    )
    parser.add_argument("--out", type=Path, help="write the lines as JSON")
    args = parser.parse_args()
    print(
        f"{'run':<32} {'seconds':>8} {'speed':>6} {'staleness':>10} {'learners idle':>14} "
        f"{'engines idle':>13}"
    )
    lines: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        model, env = Path(folder) / "model", Path(folder) / "slow.py"
        make_tiny_model(model)
        env.write_text(ENVIRONMENT.format(turn_s=args.turn_s))
        for number, (name, flags) in enumerate(RUNS.items()):
            r = lines[name] = measure(flags, model, env, Path(folder) / f"run_{number}", args.steps)
            r["speed"] = lines["synchronous"]["seconds"] / r["seconds"]
            shown = [r[k] for k in ("staleness", "learners_idle_frac", "engines_idle_frac")]
            stale, *idle = ["-" if v is None else f"{v:.2f}" for v in shown]
            times = f"{r['seconds']:>8.2f} {r['speed']:>6.2f}"
            print(f"{name:<32} {times} {stale:>10} {idle[0]:>14} {idle[1]:>13}", flush=True)
    if args.out:
        args.out.write_text(
            json.dumps({"steps": args.steps, "turn_s": args.turn_s, "runs": lines}, indent=2)
        )


if __name__ == "__main__":
    main()
