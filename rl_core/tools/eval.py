"""rl-core eval MODEL... --env_path envs/x.py: scores of models side by side, with 95 % confidence
intervals.

greedy: mean reward and share that pass, one greedy episode a task. avg@n: mean reward of n samples
a task. pass@k: the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374) from n >= k samples. ±
is 1.96 standard errors of the mean over tasks, a normal approximation in which a task is one
observation, however many samples it has.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.config import Config
from rl_core.flags import typed
from rl_core.tools.playing import FLAGS, player, read_flags, with_model

if TYPE_CHECKING:
    from rl_core.types import Trajectory

Scores = dict[str, dict[str, "Score"]]  # environment -> metric -> score


@dataclass(kw_only=True, slots=True)
class Score:
    value: float
    ci95: tuple[float, float] | None  # None where it is not a mean over tasks, or there is one task
    num_tasks: int


def main(argv: list[str]) -> int:
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "rl-core eval", description=__doc__, epilog=FLAGS, formatter_class=how
    )
    parser.allow_abbrev = False
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="folder, run, hub name, or NAME@URL of an endpoint",
    )
    parser.add_argument(
        "--k", metavar="1,4", help="k of pass@k; default: powers of two up to --eval.samples"
    )
    parser.add_argument("--out", metavar="FILE", help="write the scores as JSON")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    with tempfile.TemporaryDirectory() as folder:
        options, config = read_flags(parser, argv, folder)
        # After the flags: it imports what --help need not wait for.
        from rl_core.plugins.watchdog import run_hooks

        found, timeout_s = {}, config.rollout.hook_timeout_s
        for model in options.models:
            found[model] = run_hooks(evaluate(config, model, ks(config, options.k)), timeout_s)
    text = json.dumps(
        found, indent=2, default=lambda score: {f: getattr(score, f) for f in score.__slots__}
    )
    print(text if options.json else table(found))
    if options.out:
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(options.out).write_text(text + "\n")
    return 0


def ks(config: Config, given: str | None) -> list[int]:
    """The k of pass@k. Raises ValueError for one above the number of samples."""
    n = config.eval.samples
    found = typed("k", f"[{given}]", list[int]) if given else [2**i for i in range(n.bit_length())]
    for k in found:
        if not 1 <= k <= n:
            raise ValueError(
                f"--k {k} must be from 1 to --eval.samples={n}, of which pass@k is estimated; "
                "raise that"
            )
    return found


async def evaluate(config: Config, model: str, ks: list[int]) -> Scores:
    """Scores of one model by environment, and by actor if it is several."""
    from rl_core.plan import eval_tasks, load_envs

    config, envs = load_envs(config)
    sources = eval_tasks(config, envs)
    config, names = with_model(config, model)
    n, found = config.eval.samples, {}
    async with player(config, envs, list(sources.values())) as playing:
        for env, source in sources.items():
            tasks = list(islice(source, config.eval.num_tasks or None))
            greedy = await playing.play(
                tasks, 1, {"temperature": 0.0}, f"eval/{env}", f"greedy/{env}"
            )
            drawn = (tasks, n, config.eval.sampling, f"eval/{env}", f"sampled/{env}")
            sampled = await playing.play(*drawn) if n else []
            for name in names:
                both = ([t for t in part if t.actor == name] for part in (greedy, sampled))
                found[f"{env}/{name}" if len(names) > 1 else env] = scores(
                    *both, ks, n, config.eval.pass_reward
                )
    return found


def scores(
    greedy: list[Trajectory], sampled: list[Trajectory], ks: list[int], n: int, pass_reward: float
) -> dict[str, Score]:
    from rl_core.data.episodes import baseline_groups, by_episode, episode_rewards

    tasks = [episode_rewards(group) for group in baseline_groups(greedy)]
    found = {"greedy_score": mean([statistics.fmean(rewards) for rewards in tasks])}
    found["greedy_pass"] = mean([float(max(rewards) >= pass_reward) for rewards in tasks])
    if sampled:
        tasks = [episode_rewards(group) for group in baseline_groups(sampled)]
        found[f"avg@{n}"] = mean([statistics.fmean(rewards) for rewards in tasks])
        passed = [(len(rewards), sum(r >= pass_reward for r in rewards)) for rewards in tasks]
        for k in ks:  # a task of which too many samples failed has no pass@k
            found[f"pass@{k}"] = mean(
                [pass_at_k(total, right, k) for total, right in passed if total >= k]
            )
    episodes = [*by_episode(greedy), *by_episode(sampled)]
    done = [episode for episode in episodes if episode[0].status != "failed"]
    found["tokens"] = mean([statistics.fmean(t.num_tokens for t in episode) for episode in done])
    found["truncated"] = mean(
        [statistics.fmean(t.status == "truncated" for t in episode) for episode in done]
    )
    found["failed"] = mean([float(episode[0].status == "failed") for episode in episodes])
    for name in ("tokens", "truncated", "failed"):
        found[name].ci95 = None  # their observations are episodes, which depend on each other
    return found


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Probability that of k samples, drawn without replacement from those of a task, at least one
    is right."""
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def mean(values: list[float]) -> Score:
    n = len(values)
    value = statistics.fmean(values) if values else math.nan
    half = 1.96 * statistics.stdev(values) / math.sqrt(n) if n > 1 else None
    return Score(
        value=value, ci95=None if half is None else (value - half, value + half), num_tasks=n
    )


def table(found: dict[str, Scores]) -> str:
    """A line for each environment and metric, a column for each model."""
    lines: list[list[str]] = [["environment", "metric", *found]]
    for env, metrics in next(iter(found.values())).items():
        lines += [
            [env, name, *(shown(scores[env].get(name)) for scores in found.values())]
            for name in metrics
        ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def shown(score: Any) -> str:
    if score is None:
        return "-"
    return f"{score.value:.4g}" + (f" ± {score.ci95[1] - score.value:.2g}" if score.ci95 else "")
