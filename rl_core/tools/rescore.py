"""rl-core rescore runs/x --env_path new.py: rewards of stored episodes by a changed environment
file, without a model.

Prints what changes, and writes the rewards for rl-core replay --rewards, plot and view. Further
flags are those of the run, such as --data.train or --rollout.hook_timeout_s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import tempfile
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.errors import keep_ends, printable
from rl_core.scratch import scratch_prefix
from rl_core.tools.parser import Parser

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from rl_core.config import Config
    from rl_core.data.task_rows import TaskSource
    from rl_core.sampling.actor import Speaker
    from rl_core.sampling.env import Env
    from rl_core.sampling.groups import Group
    from rl_core.sampling.hooks import Hook
    from rl_core.tools.stored_episodes import Rescorer
    from rl_core.types import JSONObject, Trajectory

COUNTS = ("episodes", "changed_episodes", "groups", "changed_groups", "gain_signal", "lose_signal")
COUNTS += ("flipped_advantages", "failed", "failed_before")
COUNTED = (
    "{changed_episodes} of {episodes} episodes and {changed_groups} of {groups} groups change; "
    "{gain_signal} groups gain signal, {lose_signal} lose it; {flipped_advantages} advantages "
    "change their sign; {failed} trajectories failed, {failed_before} of them in the run"
)
MOST = 10  # Episodes that are listed.
ROUNDING = 1e-9  # An advantage up to this has no sign: its reward is the mean of the group.
# A trajectory before and after, without turns.
Pair = tuple["Trajectory", "Trajectory"]


@dataclass(kw_only=True)
class Changed:
    """A run with a changed environment file."""

    config: Config
    envs: dict[str, Env]
    name: str  # Of the changed environment.
    old_name: str  # Its name in the run.
    agent_rewards: list[Hook] | None  # Rewards of a file with an `agent`.

    @property
    def env(self) -> Env:
        return self.envs[self.name]


def main(argv: list[str]) -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser("rl-core rescore", description=__doc__, formatter_class=formatter)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--env_path", required=True, help="the changed environment file")
    parser.add_argument(
        "--step", default=":", metavar="A:B", help="steps, both ends included [all]"
    )
    parser.add_argument("--eval", action="store_true", help="episodes of evaluations")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a constant of the file"
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="score what can be scored, and keep and name the other stored parts",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="[RUN/rescored.jsonl.zst]")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the tables")
    options, flags = parser.parse_known_args(argv)
    out = options.out or options.run / "rescored.jsonl.zst"
    if not out.name.endswith(".jsonl.zst"):
        raise ValueError(f"--out {out}: the rewards are compressed; name a file *.jsonl.zst")
    from rl_core.run.saving.run_files import write_trajectories
    from rl_core.sampling.watchdog import run_hooks

    files = files_of_steps(options.run, options.step, options.eval)
    with tempfile.TemporaryDirectory(prefix=scratch_prefix("rescore")) as scratch:
        changed = load(options, flags, scratch)
        work = rescore(changed, files, options)
        pairs, lines, left_out = run_hooks(work, changed.config.rollout.hook_timeout_s)
    write_trajectories(out, lines)
    report = {"left_out": left_out, "actors": report_of(pairs), "out": str(out)}
    print(json.dumps(report) if options.json else table(report), flush=True)
    return 0


def files_of_steps(run: Path, steps: str, is_eval: bool) -> dict[int, list[Path]]:
    """Step -> its files of rollouts/. Raises ValueError if there are none."""
    from rl_core.tools.show import no_episodes
    from rl_core.tools.viewer.data import RunFolder, named, step_of

    match = re.fullmatch(r"(\d*)(:?)(\d*)", steps)
    if not match or not steps:
        raise ValueError(f"--step {steps}: give one step as 3, or steps as 3:7, 3: or :7")
    low = int(match[1] or 0)
    high = int(match[3] or (sys.maxsize if match[2] else low))
    files: dict[int, list[Path]] = {}
    for file in RunFolder(run).rollouts():
        if (named(file)[1] == "eval") == is_eval:
            files.setdefault(step_of(file), []).append(file)
    chosen = {step: files[step] for step in files if low <= step <= high}
    if not chosen:
        asked = "" if steps == ":" else f" --step {steps}"
        raise ValueError(no_episodes(run, asked, [*files], is_eval))
    return chosen


def load(options: argparse.Namespace, flags: list[str], scratch: str) -> Changed:
    """`scratch`: a folder for files of boxes."""
    from rl_core.config.rank_groups import without_ranks
    from rl_core.data.env_names import env_path
    from rl_core.environments.env_file import execute_file
    from rl_core.environments.env_hooks import make_hooks, marked_rewards
    from rl_core.errors import nearest
    from rl_core.run.display.terminal import quiet
    from rl_core.run.plan.environments import load_envs
    from rl_core.tools.model_player import config_to_play

    quiet()
    base = ["--config", str(options.run / "config.yaml")]
    config = without_ranks(config_to_play([*base, *flags], scratch))
    if config.data.streaming:
        raise ValueError("--data.streaming finds no row by its number; add --data.streaming false")
    path, paths = env_path(options.env_path), config.env_paths
    name = old_name = Path(path).stem
    if name not in paths:
        if len(paths) > 1:
            raise ValueError(f"--env_path {path}: the run has {', '.join(paths)}; name it as one")
        [old_name] = paths
    paths[old_name] = path
    module = execute_file(path)
    for key, equals, value in (text.partition("=") for text in options.set):
        if not equals or key not in vars(module):
            hint = nearest(key, filter(str.isupper, vars(module)))
            raise ValueError(f"--set {key}: {path} has no such constant; {hint}")
        setattr(module, key, constant(path, key, vars(module)[key], value))
    sections = {name if key == old_name else key: env for key, env in config.envs.items()}
    config = replace(config, env_path=",".join(paths.values()), envs=sections)
    config, envs = load_envs(config, {name: module})
    agent_rewards = None
    if "agent" in vars(module):
        marked = marked_rewards(module)
        hooks = make_hooks(vars(module), marked, path, config.rollout.hook_timeout_s)
        agent_rewards = [hooks[each] for each in marked if not hooks[each].batched]
    return Changed(
        config=config, envs=envs, name=name, old_name=old_name, agent_rewards=agent_rewards
    )


def constant(path: str, name: str, old: object, text: str) -> object:
    """The value of --set, which has the type of the file's constant."""
    import yaml

    value = yaml.safe_load(text)
    if isinstance(old, str):
        return value if isinstance(value, str) else text
    is_number = type(old) in (int, float) and type(value) in (int, float)
    if old is not None and type(old) is not type(value) and not is_number:
        raise ValueError(
            f"--set {name}={text}: {name} of {path} is {old!r}; give a value of type "
            f"{type(old).__name__}"
        )
    return value


@asynccontextmanager
async def speakers(changed: Changed) -> AsyncIterator[Mapping[str, Speaker]]:
    """The actors that hooks get. Those that are not trained have engines if a reward names
    `actors`."""
    from rl_core.run.plan.engine import choose_engine
    from rl_core.tools.model_player import player
    from rl_core.tools.stored_episodes import AbsentActor

    actors = changed.config.actors
    absent: dict[str, Speaker] = {}
    for name, actor in actors.items():
        absent[name] = AbsentActor(name=name, is_trainable=actor.is_trained)
    frozen = {n: a for n, a in actors.items() if not a.is_trained}
    hooks = [*(changed.agent_rewards or ()), *changed.env.rewards]
    if not frozen or not any("actors" in hook.named for hook in hooks):
        yield absent
        return
    judges = replace(choose_engine(changed.config, 1), actors=frozen)
    async with player(judges, changed.envs, []) as playing:
        yield {**absent, **playing.worker.player.actors}


async def rescore(
    changed: Changed, files: dict[int, list[Path]], options: argparse.Namespace
) -> tuple[list[Pair], list[JSONObject], dict[str, str]]:
    """(all trajectories of the environment, the lines of the file, name of a hook that is left
    out -> reason)."""
    from rl_core.data.episodes import grouped
    from rl_core.data.tables import read_episodes
    from rl_core.data.tasks.sources import eval_tasks, train_tasks
    from rl_core.tools.replay import RESCORED, trajectory_of
    from rl_core.tools.stored_episodes import Rescorer

    config, envs = changed.config, changed.envs
    if options.eval:
        tasks = eval_tasks(config, envs)
    else:
        tasks = {source.env: source for source in train_tasks(config, envs).sources}
    sources = {s.split: (name, s) for name, s in tasks.items() if s.env == changed.name}
    pairs: list[Pair] = []
    lines: list[JSONObject] = []
    async with speakers(changed) as actors:
        rescorer = Rescorer(changed.env, actors, config, changed.agent_rewards, options.force)
        for step in sorted(files):
            stored = [
                (f, trajectory_of(r, f.parent)) for f in files[step] for r in read_episodes(f)
            ]
            before = [without_turns(t) for _, t in stored]
            groups = []
            for ts in grouped([t for _, t in stored if t.env == changed.old_name], "group_id"):
                groups.append((group_of(config, ts, sources), ts))
            kept = await rescore_groups(rescorer, groups, config, f"step {step} of {max(files)}")
            for (file, t), old in zip(stored, before, strict=True):
                after = without_turns(t)
                names = ("task_id", "env", "group_id", "index", "actor", "player", *RESCORED)
                line: JSONObject = {name: getattr(after, name) for name in names}
                line |= {"file": file.name, "kept": kept.get(id(t), []), "before": old.reward}
                lines.append(line | {"parts_before": old.reward_parts})
                if id(t) in kept:
                    pairs.append((old, after))
    return pairs, lines, rescorer.left_out


async def rescore_groups(
    rescorer: Rescorer, groups: list[tuple[Group, list[Trajectory]]], config: Config, step: str
) -> dict[int, list[str]]:
    """id() of each trajectory -> names of the stored parts that stay. Prints the progress."""
    from rl_core.tools.check import with_time

    for group, trajectories in groups:
        rescorer.check(group, trajectories)
    kept: dict[int, list[str]] = {}
    done: list[Group] = []
    free = asyncio.Semaphore(max(1, config.rollout.max_concurrent // config.group_size))

    async def work(group: Group, trajectories: list[Trajectory]) -> None:
        async with free:
            names = await rescorer.rescore(group, trajectories)
        kept.update(zip(map(id, trajectories), names, strict=True))
        done.append(group)

    async def work_all() -> None:
        await asyncio.gather(*(work(*each) for each in groups))

    await with_time(work_all(), lambda s: f"{step}: {len(done)} of {len(groups)} groups, {s:.0f} s")
    return kept


def group_of(
    config: Config, stored: list[Trajectory], sources: dict[str, tuple[str, TaskSource]]
) -> Group:
    """The group that played these trajectories, so that judges get the same seeds. `sources`: by
    split. Raises ValueError if the rows have no such task."""
    from rl_core.sampling.groups import make_group

    task_id, group_id = stored[0].task_id, stored[0].group_id
    split, _, index = task_id.rpartition("/")
    name, source = sources.get(split, ("", None))
    if source is None or int(index) >= len(source.rows):
        raise ValueError(
            f"{task_id} of {group_id}: the rows have no such task; give those of the run by "
            "--data.train or --data.eval"
        )
    label, _, number = group_id.rpartition("/")
    task, size = source.task_of_row(int(index)), max(t.index for t in stored) + 1
    fields: JSONObject = {"number": int(number), "size": size}
    if not label.startswith("eval/"):
        return make_group(config, task, batch=label, **fields)
    is_greedy = label.split("/")[2] == "greedy"
    sampling = {"temperature": 0.0} if is_greedy else {**config.eval.sampling}
    return make_group(config, task, sampling, batch=f"eval/{name}", label=label, **fields)


def without_turns(t: Trajectory) -> Trajectory:
    return replace(t, messages=[], turns=[], columns={}, reward_parts={**t.reward_parts})


def report_of(pairs: list[Pair]) -> list[JSONObject]:
    """A report for each environment and actor."""
    by_actor: dict[tuple[str, str], list[Pair]] = {}
    for before, after in pairs:
        by_actor.setdefault((before.env, before.actor), []).append((before, after))
    return [{"env": env, "actor": actor} | facts(ps) for (env, actor), ps in by_actor.items()]


def facts(pairs: list[Pair]) -> JSONObject:
    """Means, changes and failures of the episodes of an actor."""
    from rl_core.data.episodes import (
        baseline_groups,
        by_episode,
        episode_rewards,
        failure_reason,
    )
    from rl_core.learning.advantages import group_advantages
    from rl_core.tools.check import part_means

    counts = dict.fromkeys(COUNTS, 0)
    reasons = Counter(failure_reason(a.error, a.task_id) for _, a in pairs if a.status == "failed")
    counts["failed_before"] = sum(b.status == "failed" for b, _ in pairs)
    counts["failed"] = sum(a.status == "failed" for _, a in pairs)
    of_before = {id(after): before for before, after in pairs}
    live = [after for before, after in pairs if "failed" not in (before.status, after.status)]
    changes = []
    for group in baseline_groups(live):
        episodes = by_episode(group)
        new = episode_rewards(group)
        old = episode_rewards([of_before[id(t)] for t in group])
        signs = [group_advantages(rewards, "group_mean") for rewards in (old, new)]
        counts["groups"] += 1
        counts["changed_groups"] += old != new
        counts["gain_signal"] += any(signs[1]) and not any(signs[0])
        counts["lose_signal"] += any(signs[0]) and not any(signs[1])
        for x, y in zip(*signs, strict=True):
            counts["flipped_advantages"] += x * y < 0 and min(abs(x), abs(y)) > ROUNDING
        counts["episodes"] += len(episodes)
        counts["changed_episodes"] += sum(x != y for x, y in zip(old, new, strict=True))
        for episode, x, y in zip(episodes, old, new, strict=True):
            t = episode[0]
            at = {"task_id": t.task_id, "group_id": t.group_id, "index": t.index}
            changes.append(at | {"before": x, "after": y})
    changes.sort(key=lambda change: -abs(change["after"] - change["before"]))
    old = [of_before[id(t)] for t in live]
    names = dict.fromkeys(name for t in [*old, *live] for name in t.reward_parts)
    values = {"reward": (episode_rewards(old), episode_rewards(live))}
    values |= {name: (part_means(old, name), part_means(live, name)) for name in names}
    parts = {name: described(*both) for name, both in values.items() if live}
    most = [change for change in changes[:MOST] if change["before"] != change["after"]]
    return {**counts, "parts": parts, "most_changed": most, "failures": dict(reasons)}


def described(old: list[float], new: list[float]) -> JSONObject:
    both = {"before": statistics.fmean(old), "after": statistics.fmean(new)}
    return both | {"spread_before": statistics.pstdev(old), "spread": statistics.pstdev(new)}


def table(report: JSONObject) -> str:
    lines = [f"not computed: {name}() {why}" for name, why in report["left_out"].items()]
    for r in report["actors"]:
        lines.append(f"{r['env']}, {r['actor']}: " + COUNTED.format(**r))
        width = max(map(len, [*r["parts"], "part"]))
        lines.append(
            f"  {'part':<{width}}  {'before':>10} {'after':>10} {'spread, before':>15} after"
        )
        for name, value in r["parts"].items():
            means = f"{value['before']:>10.4g} {value['after']:>10.4g}"
            spreads = f"{value['spread_before']:>15.4g} {value['spread']:.4g}"
            lines.append(f"  {name:<{width}}  {means} {spreads}")
        for reason, number in sorted(r["failures"].items(), key=lambda pair: -pair[1]):
            lines.append(f"  {number:>6} failed: {printable(keep_ends(reason, 300))}")
        for e in r["most_changed"]:
            where = f"{printable(e['task_id'])}  {e['group_id']}  episode {e['index']}"
            lines.append(f"  {e['before']:.4g} -> {e['after']:.4g}  {where}")
    return "\n".join([*lines, f"wrote {report['out']}"])
