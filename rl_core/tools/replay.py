"""rl-core replay runs/x --step 40: learns a recorded step again, without engines, and compares loss
and gradient norm.

It begins at the newest checkpoint before the step, or at the model with which the run began, and
learns the steps between again from their rollouts. With --algorithm, --algo.*, --optim.*,
--learner.updates_per_epoch, --learner.epochs or --critic.* a step after a checkpoint is learned with
another objective. Nothing in the run's folder changes but tokens/, which --tokens writes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.config import Config, given_flags, parse_config
from rl_core.config.flag_parsing import flags_in
from rl_core.tools.parser import Parser
from rl_core.tools.show import files_of

if TYPE_CHECKING:
    from rl_core.distributed import Ranks
    from rl_core.learning.learner import Learner
    from rl_core.metrics import Metric
    from rl_core.run.plan.plan import Plan
    from rl_core.types import JSONObject, PackedBatch, TrainingSample, Trajectory

# Flags of the computation of steps, and of the objective of the requested one.
HOW = {
    "dp_replicate",
    "cp",
    "tp",
    "ep",
    "attention",
    "timeout_s",
    "learner.microbatch_tokens",
    "learner.activations",
    "learner.kernels",
    "learner.offload",
    "learner.dtype",
}
OBJECTIVE = (
    "algorithm",
    "algo.",
    "optim.",
    "critic.",
    "learner.updates_per_epoch",
    "learner.epochs",
)
# Fields of a trajectory that rl-core rescore writes anew.
RESCORED = ("reward", "reward_parts", "turn_rewards", "status", "error")
CLOSE = 1e-4  # relative difference that rounding explains
Values = dict[str, list[float]]  # Name of a quantity -> its value for each token.


@dataclass(kw_only=True, slots=True)
class Replayed:
    step: int
    begins: str  # The source of the weights.
    recorded: dict[str, float | None]  # learn/... of metrics.jsonl
    replayed: dict[str, float]
    # Largest relative difference of loss and gradient norm in the steps that were learned again
    # before.
    between: float
    is_other: bool  # another objective


def main(argv: list[str]) -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser("rl-core replay", description=__doc__, formatter_class=formatter)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument(
        "--step",
        type=int,
        help="as rollouts/step_000040.jsonl.zst counts them; default: the newest",
    )
    parser.add_argument(
        "--tokens",
        action="store_true",
        help="write the learner's values of each token to tokens/",
    )
    parser.add_argument(
        "--rewards", type=Path, metavar="FILE", help="learn the step with those of rl-core rescore"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options, flags = parser.parse_known_args(argv)
    step = newest_step(options.run) if options.step is None else options.step
    result = replay(options.run, step, flags, options.tokens, options.rewards)
    if result is not None:
        text = json.dumps(asdict(result)) if options.json else table(result)
        print(text, flush=True)
    return 0


def replay(
    run: Path,
    step: int,
    flags: list[str],
    has_tokens: bool = False,
    rewards: Path | None = None,
) -> Replayed | None:
    """Result of learning a step again, optionally with rewards by rl-core rescore; None on ranks
    that do not write. Raises ValueError if something that the step needs was not recorded."""
    from rl_core.data.rows import check_exists
    from rl_core.distributed import close_ranks
    from rl_core.learners import is_sharded
    from rl_core.run.display.terminal import quiet
    from rl_core.run.plan.environments import load_envs
    from rl_core.run.plan.plan import plan_learning
    from rl_core.run.process.joining import init_ranks

    config, other = read_flags(run, flags)
    quiet()
    recorded = recorded_metrics(run)
    plan = plan_learning(*load_envs(other))
    first, checkpoint = checkpoint_before(run, step)
    if other != config and step != first + 1:
        raise ValueError(
            f"--step {step}: another objective needs the checkpoint of the step before, and the "
            f"newest one is of step {first}; give --step {first + 1}"
        )
    files = {number: files_of(run, number, False) for number in (step, *range(first + 1, step))}
    if rewards is not None:
        check_exists(rewards)
    ranks = init_ranks(config.timeout_s, plan.mesh, is_sharded(config), device_name=config.device)
    learners = load_learners(plan, ranks, checkpoint)
    differences = [0.0]
    for number in range(first + 1, step):
        _, trajectories = read_step(files[number], ranks)
        metrics = learn(plan, learners, trajectories, number, ranks)
        differences += [difference(metrics[n], recorded[number].get(n)) for n in compared(metrics)]
    parts, trajectories = read_step(files[step], ranks)
    if rewards is not None:
        set_rewards(parts, rewards)
    values: dict[int, Values] | None = {} if has_tokens else None
    metrics = learn(plan, learners, trajectories, step, ranks, values)
    if values is not None:
        write_tokens(run / "tokens", parts, values)
    close_ranks(ranks)
    if not ranks.is_writer:
        return None
    begins = str(checkpoint or "the model with which the run began")
    if step == first + 2:
        begins += f", and step {step - 1} learned again"
    elif step > first + 2:
        begins += f", and steps {first + 1} to {step - 1} learned again"
    return Replayed(
        step=step,
        begins=begins,
        replayed=metrics,
        recorded={name: value for name, value in recorded[step].items() if name in metrics},
        between=max(differences),
        is_other=other != config or rewards is not None,
    )


def newest_step(run: Path) -> int:
    """The newest step with recorded rollouts. Raises ValueError if there is none."""
    [file, *_] = files_of(run, None, False)
    return int(file.name.removeprefix("step_").partition(".")[0].partition("_")[0])


def checkpoint_before(run: Path, step: int) -> tuple[int, Path | None]:
    """The newest one of fewer steps; (0, None) if there is none."""
    from rl_core.run.saving.checkpoint import checkpoints_in

    before: list[tuple[int, Path | None]] = [(0, None)]
    for folder in checkpoints_in(run / "checkpoints"):
        number = int(folder.name.removeprefix("step_"))
        if number < step:
            before.append((number, folder))
    return max(before, key=lambda pair: pair[0])


def load_learners(plan: Plan, ranks: Ranks, checkpoint: Path | None) -> dict[str, Learner]:
    from rl_core.learners import make_learners
    from rl_core.run.saving.resume import load_checkpoint

    learners = make_learners(plan.config, plan.algorithms, ranks)
    if plan.config.learner.kernels == "liger":
        from rl_core.models.kernels.liger import apply_liger

        for learner in learners.values():
            apply_liger([model.hf for model in learner.models()])
    if checkpoint is not None:
        load_checkpoint(checkpoint, learners)
    return learners


def write_tokens(
    folder: Path, parts: dict[Path, list[Trajectory]], values: dict[int, Values]
) -> None:
    """Writes a file for each of rollouts/, with a line for each of its trajectories."""
    from rl_core.run.saving.run_files import write_trajectories

    folder.mkdir(exist_ok=True)
    for file, trajectories in parts.items():
        write_trajectories(folder / file.name, [line_of(t, values) for t in trajectories])


def read_flags(run: Path, flags: list[str]) -> tuple[Config, Config]:
    """(the run's configuration, that of the step which is asked for). Raises ValueError for flags
    that change neither."""
    options = []
    for name, value in given_flags(flags):
        if name in HOW:
            options.append(f"--{name}={value}")
        elif not name.startswith(OBJECTIVE):
            accepted = ", ".join(f"--{flag}" for flag in (*OBJECTIVE, *sorted(HOW)))
            raise ValueError(
                f"--{name} is for sampling, or for more than one step, and this step was sampled "
                f"already; replay takes {accepted.replace('.,', '.*,')}"
            )
    from rl_core.tools.viewer.data import check_run

    check_run(run)
    base = ["--config", str(run / "config.yaml"), f"--out={run}"]
    base += ["--rollout_ranks=0", "--resume=false"]
    parts = []
    # Another one does not know the parts that were set for the run's.
    if "algorithm" in dict(given_flags(flags)):
        unset = (pair for pair in flags_in(Config()) if pair[0].startswith(("algo.", "critic.")))
        parts = [f"--{name}={'null' if value is None else value}" for name, value, _ in unset]
    from rl_core.config.rank_groups import without_ranks

    config = without_ranks(parse_config([*base, *options]))
    other = without_ranks(parse_config([*base, *parts, *flags]))
    if not (config.is_rl and other.is_rl):
        raise ValueError(
            f"--algorithm {other.algorithm}: replay is for reinforcement learning, whose steps "
            "have rollouts"
        )
    return config, other


def recorded_metrics(run: Path) -> dict[int, dict[str, float | None]]:
    """Step -> metrics of its learners."""
    # A run that was killed has no metrics of its last step.
    by_step: dict[int, dict[str, float | None]] = defaultdict(dict)
    with suppress(FileNotFoundError), open(run / "metrics.jsonl") as file:
        for row in map(json.loads, file):
            by_step[row["step"]] |= {n: v for n, v in row.items() if n.startswith("learn/")}
    return by_step


def read_step(
    files: list[Path], ranks: Ranks
) -> tuple[dict[Path, list[Trajectory]], list[Trajectory]]:
    """This rank's trajectories of a step, by file and in all. Each turn's policy_version is a
    unique number that identifies the turn of a packed token: the learner does not read versions."""
    from rl_core.data.tables import read_episodes

    parts: dict[Path, list[Trajectory]] = {}
    numbers = itertools.count(ranks.rank << 32)
    for file in files[ranks.rank :: ranks.size]:
        parts[file] = [trajectory_of(row, file.parent) for row in read_episodes(file)]
        for turn in (turn for t in parts[file] for turn in t.turns):
            turn.completion.policy_version, turn.completion.newer_versions = next(numbers), []
    return parts, [t for trajectories in parts.values() for t in trajectories]


def set_rewards(parts: dict[Path, list[Trajectory]], rewards: Path) -> None:
    """Gives trajectories the rewards of a file of rl-core rescore. Raises ValueError unless the
    file has those of each."""
    from rl_core.data.tables import read_rewards

    by_file = read_rewards(rewards)
    names = ("group_id", "index", "actor", "player")
    for file, trajectories in parts.items():
        lines = by_file.get(file.name, [])
        keys = [[line[name] for name in names] for line in lines]
        if keys != [[getattr(t, name) for name in names] for t in trajectories]:
            raise ValueError(
                f"--rewards {rewards}: not the trajectories of {file}; make it by rl-core rescore "
                "of this run and step"
            )
        for t, line in zip(trajectories, lines, strict=True):
            for name in RESCORED:
                setattr(t, name, line[name])


def trajectory_of(row: JSONObject, folder: Path) -> Trajectory:
    """The trajectory of a line of rollouts/, which is in `folder`."""
    from rl_core.data.image_parts import load_images, set_images
    from rl_core.types import Completion, Trajectory, Turn

    turns = []
    for turn in row["turns"]:
        turns.append(Turn(**(turn | {"completion": Completion(**turn["completion"])})))
    load_images(row, folder)
    fields: JSONObject = row | {"turns": turns}
    trajectory = Trajectory(**fields)
    set_images(trajectory)
    return trajectory


def learn(
    plan: Plan,
    learners: dict[str, Learner],
    trajectories: list[Trajectory],
    number: int,
    ranks: Ranks,
    values: dict[int, Values] | None = None,
) -> dict[str, float]:
    """The metrics of a step, as those of the run. Fills `values`: turn -> values of its tokens."""
    from rl_core.learning.options import step_samples
    from rl_core.metrics import add_metrics, reduce_metrics

    metrics: dict[str, Metric] = {}
    advantage_fns = {name: env.advantage_fn for name, env in plan.envs.items()}
    samples = step_samples(plan.config, plan.algorithms, trajectories, advantage_fns, ranks)
    for name, learner in learners.items():
        if number % plan.config.actors[name].update_every:
            continue
        with learner.on_device():
            minibatches, _ = learner.shard(samples[name])
            add_metrics(metrics, learner.annotate(minibatches), prefix=f"learn/{name}/")
            batches = None if values is None else packed_turns(learner, samples[name])
            before = [forward(learner, batch) for batch in batches or ()]
            add_metrics(metrics, learner.step(minibatches, number - 1), prefix=f"learn/{name}/")
            if batches is not None and values is not None:
                values |= token_values(learner, batches, before)
    return reduce_metrics(metrics, ranks)


def packed_turns(learner: Learner, samples: list[TrainingSample]) -> list[PackedBatch]:
    """Annotated batches of all samples, including those without signal."""
    from rl_core.algorithms import Algorithm
    from rl_core.learning.minibatches import shard_samples

    of_all = Algorithm(entropy_coef=1.0)  # Entropy gives every sample a gradient.
    minibatches, _ = shard_samples(
        samples, of_all, learner.config, learner.budget, learner.ranks, learner.extensions
    )
    learner.annotate(minibatches)
    return [batch for minibatch in minibatches for batch in minibatch.batches]


def forward(learner: Learner, batch: PackedBatch) -> tuple[list[float], list[float]]:
    """Logprobs and entropy of the batch's tokens."""
    import torch

    with torch.no_grad():
        logprobs, entropy, *_ = learner.forward(batch)
    return logprobs.tolist(), entropy.tolist()


def token_values(
    learner: Learner, batches: list[PackedBatch], before: list[tuple]
) -> dict[int, Values]:
    """Turn -> values of its tokens, of all ranks' batches. The weights are those after the step."""
    from rl_core.distributed import all_gather_json

    columns: dict[str, list[float]] = {}
    for batch, (logprobs, entropy) in zip(batches, before, strict=True):
        after = forward(learner, batch)[0]
        ratios = [math.exp(min(new - old, 80.0)) for new, old in zip(after, logprobs, strict=True)]
        columns_of_batch = {"turn": batch.policy_versions.tolist(), "logprobs": logprobs}
        columns_of_batch |= {"ratios": ratios, "entropy_nats": entropy}
        for name in ("advantages", "ref_logprobs", "values"):
            if (column := getattr(batch, name)) is not None:
                columns_of_batch[name] = column.tolist()
        for name, column in columns_of_batch.items():
            columns.setdefault(name, []).extend(column)
    mesh, by_turn = learner.ranks.mesh, {}
    # Ranks of one cp x tp group have equal values.
    for gathered in all_gather_json(columns, learner.ranks)[:: mesh.cp * mesh.tp]:
        for turn, *row in zip(*gathered.values(), strict=True):
            of_turn = by_turn.setdefault(turn, {})
            for name, value in zip(list(gathered)[1:], row, strict=True):
                known = round(value, 6) if math.isfinite(value) else None
                of_turn.setdefault(name, []).append(known)
    return by_turn


def line_of(t: Trajectory, values: dict[int, Values]) -> JSONObject:
    """A line of tokens/, as the trajectory's line of rollouts/."""
    turns = [values.get(turn.completion.policy_version, {}) for turn in t.turns]
    names = ("task_id", "group_id", "index", "actor", "player")
    return {name: getattr(t, name) for name in names} | {"turns": turns}


def compared(metrics: dict[str, float]) -> list[str]:
    return [name for name in metrics if name.endswith(("/loss", "/grad_norm"))]


def difference(value: float | None, recorded: float | None) -> float:
    """Relative to the recorded value; infinite where only one of them is a number."""
    if value is None or not math.isfinite(value):
        return 0.0 if recorded is None else math.inf
    if recorded is None:
        return math.inf
    return abs(value - recorded) / max(abs(recorded), 1e-12)


def table(result: Replayed) -> str:
    """A line for each metric, and the meaning of the comparison."""
    lines = [f"step {result.step}, from {result.begins}"]
    width = max(map(len, result.replayed))
    lines.append(f"{'metric':<{width}}  {'recorded':<14}  {'replayed':<14}  relative difference")
    worst = result.between
    for name, value in sorted(result.replayed.items()):
        recorded = result.recorded.get(name)
        change = difference(value, recorded)
        verdict = "equal" if value == recorded else f"{change:.1e}"
        lines.append(f"{name:<{width}}  {shown(recorded):<14}  {shown(value):<14}  {verdict}")
        if name in compared(result.replayed):
            worst = max(worst, change)
    if not result.is_other and worst > CLOSE:
        lines.append(
            "warning: loss or gradient norm is not the recorded one: was the run resumed with "
            "other "
            "flags than those of config.yaml, did its model, environment or this program change, "
            "or were experts replayed?"
        )
    return "\n".join(lines)


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.8g}"
