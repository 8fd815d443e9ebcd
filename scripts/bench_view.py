"""How long the viewer takes for a run of 10,000 trajectories: `python scripts/bench_view.py
[--episodes 10000] [--tokens 500]`.

Writes such a run (random tokens, 100 steps) into a temporary folder, starts `rl-core view` and
opens its page in Debian's Chromium, headless. Times are from a request, a click or a key to what a
reader sees.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

from rl_core.plugins.run_files import write_trajectories
from rl_core.types import Completion, Trajectory, Turn

QUIET = (
    "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update "
    "--disable-sync --no-first-run"
)
WORDS = (
    "the",
    "of",
    "and",
    "to",
    "a",
    "in",
    "that",
    "is",
    "was",
    "he",
    "for",
    "it",
    "with",
    "as",
    "his",
)


def write_run(out: Path, num_episodes: int, num_tokens: int, num_steps: int = 100) -> None:
    rng = random.Random(0)
    (out / "rollouts").mkdir(parents=True)
    (out / "config.yaml").write_text("seed: 0\n")
    lines = (
        f'{{"step": {s}, "rollout/policy/reward_mean": {s / 100}, "learn/policy/grad_norm": 1}}\n'
        for s in range(num_steps)
    )
    (out / "metrics.jsonl").write_text("".join(lines))
    for step in range(1, num_steps + 1):
        file = out / f"rollouts/step_{step:06d}.jsonl.zst"
        write_trajectories(
            file, [episode(rng, step, n, num_tokens) for n in range(num_episodes // num_steps)]
        )


def episode(rng: random.Random, step: int, n: int, num_tokens: int) -> Trajectory:
    text = " ".join(rng.choices(WORDS, k=num_tokens)) + f" needle{step}x{n}"
    done = Completion(
        token_ids=[rng.randrange(150_000) for _ in range(num_tokens)],
        logprobs=[-rng.expovariate(2) for _ in range(num_tokens)],
        text=text, finish_reason="stop", policy_version=step - 1,
    )  # fmt: skip
    turn = Turn(
        new_ids=[rng.randrange(150_000) for _ in range(100)], is_fresh=True, completion=done
    )
    said = [
        {"role": "user", "content": f"question {n // 8}"},
        {"role": "assistant", "content": text},
    ]
    place = {
        "task_id": f"train/{n // 8}",
        "env": "bench",
        "group_id": f"{step}/{n // 8}",
        "index": n % 8,
    }
    return Trajectory(**place, messages=said, turns=[turn], reward=float(rng.random() < 0.5))


def measure(page: Page, address: str, num_episodes: int) -> dict[str, float]:
    times, began = {}, time.monotonic()
    start = began

    def note(name: str) -> None:
        nonlocal began
        times[name] = time.monotonic() - began
        began = time.monotonic()

    def shows(text: str) -> None:
        expect(page.locator("#count")).to_have_text(re.compile(text), timeout=60_000)

    page.goto(f"{address}#talks")
    page.locator("#list button").first.wait_for()
    note("first conversations are listed")
    shows(f"^{num_episodes:,} of {num_episodes:,} ")
    note("all are")
    times["together"] = began - start
    page.get_by_label("Reward from").fill("1")
    shows(r"mean reward 1\b")
    note("filtered by reward")
    page.locator("#list button").first.click()
    page.locator("#reader .says").first.wait_for()
    note("one opened")
    page.get_by_label("Colour tokens by").select_option("logprob")
    page.locator(".tokens span").first.wait_for()
    note("its tokens coloured")
    page.get_by_label("Reward from").fill("")
    page.get_by_label("Search in texts").fill("needle1x1")
    shows("^[0-9]+ of [0-9,]+ trajectories, mean reward [0-9.]+$")
    note("all texts searched")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=500)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        write_run(Path(folder) / "run", args.episodes, args.tokens)
        command = [sys.executable, "-m", "rl_core.cli", "view", f"{folder}/run", "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            address = server.stdout.readline().split()[0]
            page = playwright.chromium.launch(
                executable_path="/usr/bin/chromium", args=QUIET.split()
            ).new_page()
            times = measure(page, address, args.episodes)
            cpu = sum(
                map(int, Path(f"/proc/{server.pid}/stat").read_text().split()[13:15])
            ) / os.sysconf("SC_CLK_TCK")
            [peak] = re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{server.pid}/status").read_text())
        finally:
            server.terminate()
        size = sum(file.stat().st_size for file in Path(folder).rglob("*.zst"))
    print(f"{args.episodes:,} trajectories of {args.tokens} tokens, {size / 2**20:.0f} MiB")
    for name, seconds in times.items():
        print(f"  {seconds:6.2f} s  {name}")
    print(f"  {cpu:6.2f} s  CPU of the server, from its start to its end")
    print(f"  {int(peak) / 1024:6.0f} MiB resident at most, server")


if __name__ == "__main__":
    main()
