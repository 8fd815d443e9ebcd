"""rl-core eval MODEL... --env_path envs/x.py: scores of models side by side, with 95 % confidence
intervals.

greedy: mean reward and share that pass, one greedy episode a task. avg@n: mean reward of n samples
a task. pass@k: the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374) from n >= k samples.
Intervals have 95 %: ± is 1.96 standard errors of the mean over tasks, a normal approximation in
which a task is one observation, however many samples it has; [a, b] is Wilson's, where each task's
value is 0 or 1.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.config import Config
from rl_core.config.flag_parsing import typed
from rl_core.errors import counted
from rl_core.scratch import scratch_prefix
from rl_core.tools.model_player import FLAGS, player, read_flags, with_model
from rl_core.tools.parser import Parser

if TYPE_CHECKING:
    from rl_core.run.evaluation.eval_folder import EvalFolder
    from rl_core.types import JSONObject, Trajectory

Z95 = 1.96
Scores = dict[str, dict[str, "Score"]]  # environment -> metric -> score


@dataclass(kw_only=True, slots=True)
class Score:
    value: float
    # None for a single task, for equal values, or if it is not a mean over tasks.
    ci95: tuple[float, float] | None
    num_tasks: int


def main(argv: list[str]) -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser("rl-core eval", description=__doc__, epilog=FLAGS, formatter_class=formatter)
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
    parser.add_argument(
        "--folder",
        metavar="DIR",
        help="keep all episodes there; the same command continues where it was killed",
    )
    with tempfile.TemporaryDirectory(prefix=scratch_prefix("eval")) as scratch:
        options, config = read_flags(parser, argv, scratch)
        # Imported after parsing, so that --help answers at once.
        from rl_core.run.evaluation.eval_folder import EvalFolder
        from rl_core.sampling.watchdog import run_hooks
        from rl_core.types import RunError

        by_model: dict[str, Scores] = {}
        errors: dict[str, str] = {}
        folder = EvalFolder(options.folder, config) if options.folder else None
        for model in options.models:
            by_model[model] = {}
            work = evaluate(config, model, ks(config, options.k), by_model[model], folder)
            try:
                run_hooks(work, config.rollout.hook_timeout_s)
            except (ValueError, OSError, RunError) as error:
                if not folder:
                    raise
                errors[model] = str(error)
                print(f"{model}: {error}", file=sys.stderr)
    shown_json: JSONObject = dict(by_model)
    if errors:
        shown_json["errors"] = errors
    text = json.dumps(shown_json, indent=2, default=as_dict)
    if options.json or any(by_model.values()):
        print(text if options.json else table(by_model, config.eval.pass_reward))
    if options.out:
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(options.out).write_text(text + "\n")
    if folder:
        folder.write(text, markdown(by_model, errors))
    return 1 if errors else 0


def as_dict(score: Score) -> JSONObject:
    return {name: getattr(score, name) for name in score.__slots__}


def ks(config: Config, text: str | None) -> list[int]:
    """The k of pass@k. Raises ValueError for one above the number of samples."""
    n = config.eval.samples
    values = typed("k", f"[{text}]", list[int]) if text else [2**i for i in range(n.bit_length())]
    for k in values:
        if not 1 <= k <= n:
            raise ValueError(
                f"--k {k} must be from 1 to --eval.samples={n}, of which pass@k is estimated; "
                "raise that"
            )
    return values


async def evaluate(
    config: Config, model: str, ks: list[int], results: Scores, folder: EvalFolder | None
) -> None:
    """Fills `found` with scores of one model by environment, and by actor if it is several. With a
    folder an environment in which too many episodes fail does not end the others: RunError comes
    after them."""
    from rl_core.data.tasks.sources import eval_tasks
    from rl_core.environments.run_checks import check_boxes
    from rl_core.run.evaluation.played_by import facts_of_actors, facts_of_env, hash_of_rows
    from rl_core.run.plan.environments import load_envs
    from rl_core.types import RunError

    config, envs = load_envs(config)
    check_boxes(envs)
    sources = eval_tasks(config, envs)
    config, names = with_model(config, model)
    n, errors = config.eval.samples, []
    for env, source in sources.items():
        num_tasks = min(len(source), config.eval.num_tasks or len(source))
        played = f"{counted(num_tasks, 'task')}, 1 greedy and {n} sampled episodes of each"
        print(f"{model} in {env}: {played} ...", file=sys.stderr, flush=True)
    async with player(config, envs, list(sources.values())) as playing:
        of_actors = facts_of_actors(config, playing.chats) if folder else {}
        for env, source in sources.items():
            tasks = list(islice(source, config.eval.num_tasks or None))
            cell = None
            if folder:
                shared = facts_of_env(source.env, envs[source.env], config)
                shared["rows"] = hash_of_rows(tasks)
                of_model = {"actors", *(f"actor {name}" for name in names)}
                shared |= {key: of_actors[key] for key in of_actors.keys() - of_model}
                cell = folder.cell(model, env, of_actors | shared, shared)
            sampled = []
            try:
                greedy = await playing.play(
                    tasks, 1, {"temperature": 0.0}, f"eval/{env}", f"greedy/{env}", cell=cell
                )
                if n:
                    sampling = config.eval.sampling
                    sampled = await playing.play(
                        tasks, n, {**sampling}, f"eval/{env}", f"sampled/{env}", cell=cell
                    )
            except RunError as error:
                if not folder:
                    raise
                errors.append(f"{env}: {error}")
                continue
            for name in names:
                one, several = (
                    [t for t in played if t.actor == name] for played in (greedy, sampled)
                )
                results[f"{env}/{name}" if len(names) > 1 else env] = scores(
                    one, several, ks, n, config.eval.pass_reward
                )
    if errors:
        raise RunError("; ".join(errors))


def scores(
    greedy: list[Trajectory], sampled: list[Trajectory], ks: list[int], n: int, pass_reward: float
) -> dict[str, Score]:
    from rl_core.data.episodes import baseline_groups, by_episode, episode_rewards

    tasks = [episode_rewards(group) for group in baseline_groups(greedy)]
    values = {"greedy_score": mean([statistics.fmean(rewards) for rewards in tasks])}
    values["greedy_pass"] = mean([float(max(rewards) >= pass_reward) for rewards in tasks])
    if sampled:
        tasks = [episode_rewards(group) for group in baseline_groups(sampled)]
        values[f"avg@{n}"] = mean([statistics.fmean(rewards) for rewards in tasks])
        passed = [(len(rewards), sum(r >= pass_reward for r in rewards)) for rewards in tasks]
        for k in ks:  # With too many failed samples a task has no pass@k.
            values[f"pass@{k}"] = mean(
                [pass_at_k(total, right, k) for total, right in passed if total >= k]
            )
    episodes = [*by_episode(greedy), *by_episode(sampled)]
    done = [episode for episode in episodes if episode[0].status != "failed"]
    values["tokens"] = mean([statistics.fmean(t.num_tokens for t in episode) for episode in done])
    values["truncated"] = mean(
        [statistics.fmean(t.status == "truncated" for t in episode) for episode in done]
    )
    values["failed"] = mean([float(episode[0].status == "failed") for episode in episodes])
    for name in ("tokens", "truncated", "failed"):
        values[name].ci95 = None  # their observations are episodes, which depend on each other
    return values


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Probability that of k samples, drawn without replacement from those of a task, at least one
    is right."""
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def mean(values: list[float]) -> Score:
    n = len(values)
    value = statistics.fmean(values) if values else math.nan
    ci95 = None
    if n > 1 and {*values} <= {0.0, 1.0}:
        ci95 = wilson(value, n)
    elif n > 1 and (deviation := statistics.stdev(values)):
        half = Z95 * deviation / math.sqrt(n)
        ci95 = value - half, value + half
    return Score(value=value, ci95=ci95, num_tasks=n)


def wilson(value: float, n: int) -> tuple[float, float]:
    """Wilson's score interval of a share of `n` observations, 95 %."""
    z2 = Z95**2
    middle = (value + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * math.sqrt(value * (1 - value) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def rows_of(by_model: dict[str, Scores]) -> list[list[str]]:
    """A line for each environment and metric, a column for each model."""
    lines: list[list[str]] = [["environment", "metric", *by_model]]
    keys = {}
    for scores in by_model.values():
        for env, metrics in scores.items():
            keys |= {(env, name): None for name in metrics}
    for env, name in keys:
        if name == "greedy_score":
            scored = [scores.get(env, {}).get(name) for scores in by_model.values()]
            lines.append([env, "tasks", *(str(s.num_tasks) if s else "-" for s in scored)])
        cells = [shown(scores.get(env, {}).get(name)) for scores in by_model.values()]
        lines.append([env, name, *cells])
    return lines


def markdown(by_model: dict[str, Scores], errors: dict[str, str]) -> str:
    """The table, and below it why models have no scores."""
    head, *lines = rows_of(by_model)
    text = [" | ".join(row) for row in (head, ["---"] * len(head), *lines)]
    text = [f"| {row} |" for row in text]
    text += [f"\n`{model}` failed: {' '.join(error.split())}" for model, error in errors.items()]
    return "\n".join(text)


def table(by_model: dict[str, Scores], pass_reward: float) -> str:
    lines = rows_of(by_model)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)).rstrip() for line in lines
    ]
    return "\n".join([*text, f"pass: a reward of at least {pass_reward:g} (--eval.pass_reward)"])


def shown(score: Score | None) -> str:
    if score is None:
        return "-"
    if score.ci95 is None:
        return f"{score.value:.4g}"
    low, high = score.ci95
    if math.isclose(high - score.value, score.value - low, abs_tol=1e-9):
        return f"{score.value:.4g} ± {high - score.value:.2g}"
    return f"{score.value:.4g} [{low:.2g}, {high:.2g}]"
