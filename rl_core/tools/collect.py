"""rl-core collect MODEL --env_path envs/x.py --out data/x: episodes that SFT reads (--data.train
data/x/rollouts).

--group_size episodes of each task, in files of --tasks_per_step tasks. The same command continues
where it was stopped.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.config import Config
from rl_core.tools.model_player import FLAGS, player, read_flags, with_model
from rl_core.tools.parser import Parser

if TYPE_CHECKING:
    from rl_core.types import Trajectory


def main(argv: list[str]) -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser("rl-core collect", description=__doc__, epilog=FLAGS, formatter_class=formatter)
    parser.add_argument(
        "models", nargs=1, metavar="MODEL", help="folder, run, hub name, or NAME@URL of an endpoint"
    )
    parser.add_argument("--out", required=True, help="folder of the episodes")
    parser.add_argument(
        "--min_reward", type=float, help="keep episodes with at least this reward; default: all"
    )
    parser.add_argument(
        "--num_tasks",
        type=int,
        default=0,
        help="tasks that are played, in whole files; 0: each once [0]",
    )
    options, config = read_flags(parser, argv, "collected")
    # Imported after parsing, so that --help answers at once.
    from rl_core.sampling.watchdog import run_hooks

    config = replace(config, out=options.out)
    collecting = collect(config, options.models[0], options.num_tasks, options.min_reward)
    run_hooks(collecting, config.rollout.hook_timeout_s)
    return 0


async def collect(config: Config, model: str, num_tasks: int, min_reward: float | None) -> None:
    """Plays the tasks that OUT/rollouts lacks. Raises ValueError if those there were played with
    other flags, weights, environments or rows."""
    from rl_core.data.episodes import by_episode, episode_rewards, succeeded
    from rl_core.data.tasks.sources import train_tasks
    from rl_core.environments.run_checks import check_boxes
    from rl_core.run.evaluation.played_by import (
        PlayedBy,
        facts_of_actors,
        facts_of_env,
        hash_of_rows,
    )
    from rl_core.run.plan.environments import load_envs
    from rl_core.run.run_folder import locked
    from rl_core.run.saving.run_files import keep_config, write_tokenizers, write_trajectories

    out = config.folder
    config, envs = load_envs(config)
    check_boxes(envs)
    # Each row once, of several environments too.
    one_epoch = replace(config, num_epochs=None if config.data.streaming else 1.0)
    source = train_tasks(one_epoch, envs)
    config, names = with_model(config, model)
    size = config.tasks_per_step
    num_files = -(-(num_tasks or len(source)) // size)
    end = num_files * size if num_tasks else len(source)
    with locked(out):
        kept = replace(config, data=replace(config.data, min_reward=min_reward))
        if differs := keep_config(out, kept):
            raise ValueError(
                f"--out {out} was collected with other flags ({'; '.join(differs)}); name another "
                "folder"
            )
        (out / "rollouts").mkdir(exist_ok=True)
        async with player(config, envs, source.sources) as playing:
            chats = playing.chats
            has_tokens = names[0] in chats
            has_episodes = any((out / "rollouts").glob("step_*"))
            played_by = PlayedBy(out / "played_by.yaml", f"--out {out}", has_episodes)
            played_by.check(facts_of_actors(config, chats))
            for name, env in envs.items():
                played_by.check(facts_of_env(name, env, config))
            if has_tokens:
                write_tokenizers(out / "rollouts", chats)
            for number in range(num_files):
                file = out / "rollouts" / f"step_{number + 1:06d}.jsonl{'.zst' * has_tokens}"
                first = number * size
                tasks = [source.task(position) for position in range(first, min(first + size, end))]
                played_by.check({f"rows of file {number + 1}": hash_of_rows(tasks)})
                if file.exists():
                    continue
                position = {"batch": "collect", "label": f"collect/{number:06d}", "first": first}
                played = await playing.play(tasks, config.group_size, None, **position)
                trained = [t for t in played if t.actor in names]
                done = succeeded(trained)
                good = [t for t in done if min_reward is None or (t.reward or 0.0) >= min_reward]
                (write_trajectories if has_tokens else write_messages)(file, good)
                rewards = episode_rewards(done)
                mean = f"reward {sum(rewards) / max(1, len(rewards)):.4g}"
                kept = f"kept {len(by_episode(good))} of {len(by_episode(trained))}"
                print(f"{number + 1}/{num_files}  {kept}  {mean}  {file}", flush=True)


def write_messages(file: Path, trajectories: list[Trajectory]) -> None:
    """Rows of plain SFT: an endpoint's tokens are unknown."""
    from rl_core.data.image_parts import with_stored_images
    from rl_core.data.rows import write_whole

    rows = ({"messages": t.messages, "reward": t.reward} for t in trajectories)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    write_whole(file, with_stored_images(text, file.parent))
