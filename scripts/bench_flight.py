"""What an episode costs beside the model, with 1 to 1,000 episodes under way at once.

    python scripts/bench_flight.py [--turns 4] [--episodes 2000] [--out result.json]

An engine that answers at once with a written reply, and an environment whose every turn waits for
50 ms in an `async def` hook, or in a `def` hook, which has a thread. CPU milliseconds of the
process for each episode, one thread, the least of three rounds. Python looks for garbage as seldom
as in a run. By default it takes about 7 minutes beside other work, most of which it waits.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import tempfile
import time
from pathlib import Path

from rl_core.config import RolloutConfig
from rl_core.data.tasks import make_task
from rl_core.distributed import init_ranks
from rl_core.engines.scripted import ScriptedActor, plain_chat
from rl_core.plugins.env_file import load_env
from rl_core.sampling.rollout import Group, GroupPlayer, RolloutWorker
from rl_core.train import NEW_OBJECTS
from rl_core.types import SamplingParams

IN_FLIGHT = (1, 10, 100, 1_000)
WAIT_S = 0.05
ENVIRONMENT = """
import asyncio, time

{define} interact(messages):
    {wait}
    return [{{"role": "user", "content": "and now?"}}]

def reward_fn(messages):
    return 1.0
"""
HOOKS = {"async def": ("async def", "await asyncio.sleep"), "def": ("def", "time.sleep")}


async def play(env, actors, num_episodes: int, num_at_once: int) -> float:
    """CPU seconds of so many episodes."""
    config, ranks = RolloutConfig(max_concurrent=num_at_once), init_ranks(60)
    worker = RolloutWorker(GroupPlayer({env.name: env}, actors, config), ranks, 600)
    groups = []
    for number in range(num_episodes):
        task = make_task({"prompt": f"task {number}"}, number, env.name, "train")
        params = SamplingParams(max_tokens=16)
        groups.append(
            Group(task=task, batch="train/0", number=number, size=1, params=params, seed=0)
        )
    before = time.process_time()
    worker.submit(groups)
    try:
        played = await worker.collect(num_episodes)
        seconds = time.process_time() - before
    finally:
        await worker.close()
    assert all(one.status == "ok" for group in played for one in group.trajectories)
    return seconds


def measure(kind: str, turns: int, num_at_once: int, most: int, rounds: int) -> dict:
    # Few at once would wait for minutes.
    num_episodes = min(most, 50 * num_at_once)
    define, wait = HOOKS[kind]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "waits.py"
        path.write_text(ENVIRONMENT.format(define=define, wait=f"{wait}({WAIT_S})"))
        env = load_env(str(path), max_turns=turns)
        chat = plain_chat()
        actor = ScriptedActor(name="policy", chat=chat, replies=["a reply"], capacity=num_at_once)
        seconds = []
        for _ in range(rounds):
            gc.collect()
            seconds.append(asyncio.run(play(env, {"policy": actor}, num_episodes, num_at_once)))
    least = min(seconds) / num_episodes
    return {"hook": kind, "under way": num_at_once, "episodes": num_episodes, "ms": least * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=4, help="of an episode")
    parser.add_argument("--episodes", type=int, default=2_000, help="of a round, at most")
    parser.add_argument("--rounds", type=int, default=3, help="the least of them counts")
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    args = parser.parse_args()
    lines = []
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)
    print(f"{'hook':<10} {'under way':>10} {'episodes':>9} {'CPU ms each':>12}")
    for kind in HOOKS:
        for num_at_once in IN_FLIGHT:
            lines.append(measure(kind, args.turns, num_at_once, args.episodes, args.rounds))
            hook, at_once, episodes, ms = lines[-1].values()
            print(f"{hook:<10} {at_once:>10,} {episodes:>9,} {ms:>12.3f}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(lines, indent=2))


if __name__ == "__main__":
    main()
