"""What a tested program costs in the sandbox, at each level that works here, and what many at once
do to memory.

    python scripts/bench_sandbox.py                       # 300 programs a level, then 1,000 at
    once; a minute or two
    python scripts/bench_sandbox.py --at_once 20000 --out out.json
    python scripts/bench_sandbox.py --boxes 100           # boxes alone, so many at once

CPU is that of every process: this one's part, the warm one, supervisors, programs and their tests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import psutil  # peft needs it too

from rl_core.sandbox import Sandbox, boxes
from rl_core.sandbox.isolation import LEVELS
from rl_core.sandbox.pool import Refused


def of_warm_process(sandbox: Sandbox) -> list[psutil.Process]:
    time.sleep(0.5)  # supervisors of the last programs end
    top = psutil.Process(sandbox._pool.process.pid)
    return [top, *top.children(recursive=True)]


def cpu_s(sandbox: Sandbox) -> float:
    """So far, of this process and the warm one; each program adds its own."""
    return sum(sum(p.cpu_times()[:2]) for p in (psutil.Process(), *of_warm_process(sandbox)))


def resident_mib(sandbox: Sandbox) -> float:
    return sum(p.memory_info().rss for p in (psutil.Process(), *of_warm_process(sandbox))) / 2**20


async def run_programs(sandbox: Sandbox, num: int) -> tuple[int, float]:
    """(how many of so many programs, submitted at once, gave the right results, their CPU
    seconds)."""
    right, wrong = "assert f(1) == {}", "assert f(1) == 0"
    runs = [
        sandbox.run(f"def f(x): return x + {n}", tests=[right.format(n + 1), wrong], timeout_s=60)
        for n in range(num)
    ]
    results = await asyncio.gather(*runs)
    return sum(r.passed == [True, False] for r in results), sum(
        r.cpu_s + r.supervisor_s for r in results
    )


def measure(level: str, num: int) -> dict[str, float | str]:
    sandbox = Sandbox(level=level, unsafe=True)
    try:
        sandbox.start()
    except Refused as error:
        return {"level": level, "error": str(error)}
    asyncio.run(run_programs(sandbox, 10))
    cpu, mib, began = cpu_s(sandbox), resident_mib(sandbox), time.monotonic()
    right, own = asyncio.run(run_programs(sandbox, num))
    wall = time.monotonic() - began
    cpu, grown = own + cpu_s(sandbox) - cpu, resident_mib(sandbox) - mib
    sandbox.close()
    row = {"level": level, "programs": num, "right": right, "cpu_ms_each": 1000 * cpu / num}
    return row | {"wall_s": wall, "grown_mib": grown}


async def time_boxes(num: int) -> dict[str, float]:
    """Milliseconds of each step of one box, medians of 20; and seconds of so many at once, each
    with a command."""
    steps: dict[str, list[float]] = {}

    async def timed(step: str, work: Awaitable) -> Any:
        began = time.monotonic()
        result = await work
        steps.setdefault(step, []).append(1000 * (time.monotonic() - began))
        return result

    async def use(number: int) -> bool:
        async with await boxes.open({}) as box:
            await box.put("/app/mine", str(number))
            return (await box.exec("cat mine")).stdout == str(number)

    for _ in range(20):
        box = await timed("open_ms", boxes.open({}, reuse=False))
        await timed("exec_true_ms", box.exec("true"))
        await timed("put_ms", box.put("/app/file", "x"))
        await timed("get_ms", box.get("/app/file"))
        await timed("reset_ms", box.box.reset())
        await timed("close_ms", box.close())
    row = {step: statistics.median(values) for step, values in steps.items()}
    for name in ("at_once_s", "again_s"):
        began = time.monotonic()
        right = await asyncio.gather(*map(use, range(num)))
        assert all(right)
        row[name] = time.monotonic() - began
    return {"boxes": num} | row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=300, help="programs at each level")
    parser.add_argument(
        "--at_once", type=int, default=1000, help="programs at once at the strongest level"
    )
    parser.add_argument("--boxes", type=int, default=0, help="boxes alone: so many at once")
    parser.add_argument("--out", type=Path, help="a file for the figures")
    args = parser.parse_args()
    if args.boxes:
        rows = [asyncio.run(time_boxes(args.boxes))]
    else:
        rows = [measure(level, args.num) for level in LEVELS]
        best = next(row["level"] for row in rows if "error" not in row)
        rows.append(measure(best, args.at_once))
    for row in rows:
        print(
            "  ".join(
                f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in row.items()
            )
        )
    if args.out:
        machine = {
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "kernel": platform.release(),
        }
        args.out.write_text(json.dumps({**machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
