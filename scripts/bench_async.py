"""Wall time of a run whose environment is slow: synchronous, with groups that continue over steps,
and with a rank that only samples.

    python scripts/bench_async.py [--steps 20] [--turn_s 0.1] [--out result.json]

Each run has the same model (0.1 M parameters), tasks, steps and two ranks with one torch thread
each. The reward function of an episode waits one to six times, turn_s seconds each. Seconds leave
out the first step, in which the ranks warm up; `speed` is relative to the synchronous run.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from make_tiny_model import make_tiny_model
from script_tools import Table, make_parser, read_metrics, run, write_json

ENVIRONMENT = """
import asyncio, random
def load_tasks(split):
    return [{{"messages": [{{"role": "user", "content": str(n)}}]}} for n in range(512)]

# An untrained model's turns are cut off and get no answer, so the reward function is slow instead.
async def reward_fn(messages, task):
    draw = random.Random(task.id + messages[-1]["content"])
    for _ in range(6):
        await asyncio.sleep({turn_s})
        if draw.random() > 0.6:
            break
    return float(sum(map(ord, messages[-1]["content"])) % 7)
"""
TRAIN = (
    "-m torch.distributed.run --standalone --nproc_per_node=2 -m rl_core.train --max_tokens 8 "
    "--max_prompt_tokens 16 --tasks_per_step 8 --group_size 4 --rollout.save false"
)
RUNS = {
    "synchronous": "",
    "max_staleness 1": "--max_staleness 1",
    "max_staleness 2": "--max_staleness 2",
    "rollout_ranks 1, max_staleness 1": "--rollout_ranks 1 --max_staleness 1",
    "rollout_ranks 1, max_staleness 2": "--rollout_ranks 1 --max_staleness 2",
}
METRICS = ("rollout/staleness", "time/learners_idle_frac", "time/engines_idle_frac")


def measure(flags: str, folder: Path) -> dict[str, float | None]:
    run(f"{TRAIN} --out {folder} {flags}", is_quiet=True)
    rows = read_metrics(folder)[1:]
    figures: dict[str, float | None] = {"seconds": sum(row["time/step_s"] for row in rows)}
    for name in METRICS:
        values = [row[name] for row in rows if name in row]
        figures[name.rpartition("/")[2]] = sum(values) / len(values) if values else None
    return figures


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--turn_s", type=float, default=0.1, help="seconds of each wait")
    parser.add_argument("--out", type=Path, help="write the lines as JSON")
    args = parser.parse_args()
    idle = {"learners_idle_frac": ">8.2f", "engines_idle_frac": ">8.2f"}
    table = Table(run="<33", seconds=">8.2f", speed=">6.2f", staleness=">9.2f", **idle)
    lines: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_model(folder / "model")
        (folder / "slow.py").write_text(ENVIRONMENT.format(turn_s=args.turn_s))
        paths = f"--model {folder}/model --env_path {folder}/slow.py --num_steps {args.steps}"
        for number, (label, flags) in enumerate(RUNS.items()):
            line = lines[label] = measure(f"{paths} {flags}", folder / f"run_{number}")
            line["speed"] = lines["synchronous"]["seconds"] / line["seconds"]
            table.add({"run": label} | line)
    write_json(args.out, {"steps": args.steps, "turn_s": args.turn_s, "runs": lines})


if __name__ == "__main__":
    main()
