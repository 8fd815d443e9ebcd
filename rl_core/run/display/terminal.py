"""The terminal output of a run: the loaded models and data, a line for each step, and warnings."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from statistics import fmean
from typing import TYPE_CHECKING

import huggingface_hub
import torch
import transformers

from rl_core.config import ActorConfig, Config, flat
from rl_core.data.rows import quiet_datasets
from rl_core.data.tasks.row_lengths import left_out
from rl_core.distributed import MPS
from rl_core.errors import counted, printable
from rl_core.plugin import Plugin, RunState
from rl_core.run.display.warnings import RunWarnings

if TYPE_CHECKING:
    from rl_core.learning.learner import Learner
    from rl_core.types import JSONObject


PROGRESS_S = 30.0  # Seconds between lines while the episodes of a step are played.
LAST_STEPS = 20  # Steps whose mean duration gives the time left.
WIDTH = 100  # Columns of a step's line.
# Label -> metrics in a step's line, for each actor, of which the first that was measured is shown.
OF_EPISODES = {
    "reward": ("rollout/{}/reward_mean",),
    "tokens": ("rollout/{}/length_mean",),
    "entropy": ("learn/{}/entropy_nats",),
    "kl": ("learn/{}/teacher_kl_nats", "learn/{}/ref_kl_nats"),
    "failed": ("rollout/{}/failed",),
}
OF_ROWS = {
    "loss": ("learn/{}/loss",),
    "accuracy": ("learn/{}/accuracy",),
    "grad_norm": ("learn/{}/grad_norm",),
}
# Printed at the start of a run on a Mac.
MACOS = (
    "macOS: not tested there; sandboxes and boxes by bubblewrap need Linux, and --device mps uses "
    "the Apple GPU (docs/quickstart.md)"
)


def quiet() -> None:
    """Turns off libraries' progress bars and reports for loading and saving; downloads keep
    theirs."""
    if not os.environ.get("RL_CORE_DEBUG"):
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        huggingface_hub.utils.enable_progress_bars()
    quiet_datasets()


class Terminal(Plugin):
    def __init__(self, trainer: RunState):
        super().__init__(trainer)
        self.metrics: dict[str, float] = {}  # Of the last step.
        self.said_at = -math.inf
        self.telling: asyncio.Task | None = None
        self.step_s: deque[float] = deque(maxlen=LAST_STEPS)  # Durations of the last steps.
        self.left: timedelta | None = None  # As of the last step.
        self.num_before = 0  # Groups of earlier steps.

    def load(self, state: JSONObject) -> None:
        trainer = self.trainer
        trainer.log.say(loaded(trainer))
        self.warnings = RunWarnings(trainer.config, trainer.out)

    async def start(self) -> None:
        self.telling = asyncio.create_task(self.tell_progress())

    async def close(self) -> None:
        if self.telling is not None:
            self.telling.cancel()

    async def tell_progress(self) -> None:
        """Prints the progress of a long rollout, every PROGRESS_S. A run with --online may wait
        for hours, and prints changes alone."""
        trainer, last = self.trainer, ""
        while True:
            await asyncio.sleep(PROGRESS_S)
            is_long = time.monotonic() - trainer.phases.began >= PROGRESS_S
            if is_long and trainer.config.is_rl and trainer.phases.name in ("generate", "eval"):
                line = self.rollout_progress()
                if line != last or not trainer.config.online.on:
                    self.show(line)
                last = line

    async def before_step(self, step: int) -> None:
        self.num_before = self.trainer.worker.num_awaited[""]

    def rollout_progress(self) -> str:
        """step 3: 32 of 64 episodes; eval/000030/greedy: 12 of 64 tasks"""
        trainer, worker = self.trainer, self.trainer.worker
        if trainer.phases.name == "eval":
            played = []
            for label in sorted({label for label, _ in worker.pending if label}):
                num_done, num_groups = worker.progress(label)
                played.append(f"{label}: {num_done:,} of {counted(num_groups, 'task')}")
            return "  ".join(played) or f"eval at step {trainer.step}"
        if progress := self.own_progress():
            return f"step {trainer.step + 1}: {progress}"
        num_done, num_groups, more = self.groups_of_step()
        size = trainer.config.group_size
        played = f"{num_done * size:,} of {counted(num_groups * size, 'episode')}"
        return f"step {trainer.step + 1}: {played}{more}"

    def own_progress(self) -> str:
        """The progress that a plugin shows instead of the number of episodes, or ""."""
        return "".join(plugin.progress() for plugin in self.trainer.plugins)

    def groups_of_step(self) -> tuple[int, int, str]:
        """(complete, awaited) groups of this step, and a note on replaced groups."""
        num_done, num_groups = (end - self.num_before for end in self.trainer.worker.progress())
        num_tasks = self.trainer.config.tasks_per_step
        num_groups = num_groups or num_tasks  # 0 while plugins prepare the rollout.
        num_replaced = num_groups - num_tasks
        more = ""
        if num_replaced > 0:
            more = f"; {counted(num_replaced, 'group')} had equal rewards, sampling others"
        return num_done, num_groups, more

    async def after_step(self, step: int, metrics: dict[str, float]) -> None:
        """Prints a line, at most one a second, and the step's warnings."""
        config, now = self.trainer.config, time.monotonic()
        self.metrics = metrics
        self.step_s.append(metrics["time/step_s"])
        self.left = time_left(step, config, fmean(self.step_s), self.trainer.phases.durations_s)
        if now > self.said_at + 1 or step == config.num_steps:
            self.said_at = now
            actors, is_rl = config.trained, config.is_rl
            self.show(progress_line(step, config.num_steps, metrics, actors, self.left, is_rl))
        for text in self.warnings.step(step, metrics):
            warn(step, text)

    def show(self, line: str) -> None:
        """Prints a step's line."""
        self.trainer.log.say(line)

    async def on_failures(self, step: int, reasons: dict[str, int]) -> None:
        """Prints each reason once."""
        if reasons:
            for text in self.warnings.failures(step, reasons):
                warn(step, text)


def time_left(
    step: int, config: Config, step_s: float, phase_s: Mapping[str, float]
) -> timedelta | None:
    """Time until the end of a run, as of the end of `step`, whose evaluation and save follow.
    `phase_s`: durations of the last evaluation and save, if there was one. None: a run that stays
    open."""
    if config.online.on:
        return None
    seconds = step_s * (config.num_steps - step)
    for phase, every in (("eval", config.eval_every), ("save", config.save_every)):
        seconds += phase_s.get(phase, 0.0) * num_due(step, config.num_steps, every)
    return timedelta(seconds=int(seconds))


def num_due(step: int, num_steps: int, every: int) -> int:
    """Number of steps from `step` on that are the last or a multiple of `every`."""
    due = range(step + -step % every, num_steps, every) if every else ()
    return len(due) + 1


def warn(step: int, text: str) -> None:
    print(f"warning: step {step}: {printable(text)}", file=sys.stderr, flush=True)


def loaded(trainer: RunState) -> str:
    """Three lines: the models, the data and the plan, the devices and the first step."""
    config, plan = trainer.config, trainer.plan
    models = []
    where = {name: group.where for group in plan.rank_groups[1:] for name in group.actors}
    for name, actor in config.actors.items():
        learner = trainer.learners.get(name)
        about = size_of(learner) if learner is not None else actor.api or "frozen"
        if name in where:
            about = f"{'learns' if actor.is_trained else 'frozen'} on {where[name]}"
        models.append(f"{name}: {actor.model} ({about})")
    noun = "pair" if plan.algorithm.reads_pairs else "row"
    work = f"{config.algorithm}: " + ("sessions" if config.online.on else f"streamed {noun}s")
    if not config.data.streaming and not config.online.on:
        num_rows = counted(sum(map(len, plan.train.sources)), noun)
        work = f"{config.algorithm}: {num_rows}{left_out(config, plan.train.sources)}"
    if plan.eval:
        held_out = plan.eval.values()
        work += f", {sum(map(len, held_out)):,} held out{left_out(config, held_out)}"
    work += "; at most " if trainer.plan.may_end_early else "; "
    of_step = counted(config.tasks_per_step, noun)
    if config.is_rl:
        episodes = counted(config.group_size, "episode")
        of_step = f"{counted(config.tasks_per_step, 'task')} x {episodes}"
    work += f"{counted(config.num_steps, 'step')} of {of_step}"
    start = f"begins at step 0, in {trainer.out}"
    if config.resume:
        start = f"--resume: {resumed(trainer)}"
    lines = [", ".join(models), work, f"{devices(trainer)}; {start}"]
    if sys.platform == "darwin":
        lines.append(MACOS)
    for name, actor in config.actors.items():
        if actor.overrides or actor.update_every > 1:
            lines.append(f"{name} {own_settings(actor)}")
    lines += [engine.shortage for engine in trainer.device.engines if engine.shortage]
    return "\n".join(lines)


def resumed(trainer: RunState) -> str:
    if trainer.checkpoint is None:
        return f"no checkpoint yet; begins at step 0, in {trainer.out}"
    num_steps = trainer.config.num_steps
    more = "; a higher --num_steps trains on" if trainer.step == num_steps else ""
    return f"continues from step {trainer.step} of {num_steps}{more}"


def own_settings(actor: ActorConfig) -> str:
    """by separate settings: algorithm ppo, optim.lr 1e-05"""
    values = [f"{flag} {value}" for flag, value in flat(actor.overrides).items()]
    if actor.update_every > 1:
        values.append(f"update_every {actor.update_every}")
    return f"by separate settings: {', '.join(values)}"


def size_of(learner: Learner) -> str:
    total = sum(weight.numel() for weight in learner.policy.hf.parameters())
    trained = sum(weight.numel() for _, weight in learner.trained_parameters())
    text = f"{short(total)} parameters"
    if trained != total:
        text += f", {short(trained)} trained"
    if "rule" in learner.optimizer.param_groups[0]:
        text += parameters_by_rule(learner)
    adapters = learner.policy.adapters.values()
    if adapters and not any(adapter.target_parameters for adapter in adapters):
        from rl_core.learning.lora import experts_of

        if experts := experts_of(learner.policy.hf):
            text += f"; no adapters on {', '.join(experts)}"
    return text


def parameters_by_rule(learner: Learner) -> str:
    """Numbers of parameters by the optimizer's rule, as of Muon."""
    rules: Counter[str] = Counter()
    for group in learner.optimizer.param_groups:
        rules[group["rule"]] += sum(weight.numel() for weight in group["params"])
    return "".join(f", {rule} {short(num)}" for rule, num in rules.items())


def devices(trainer: RunState) -> str:
    """8 x NVIDIA H100 80GB HBM3 (dp_shard 8), sglang engine, new weights by files"""
    ranks = trainer.ranks
    device = {"cpu": "CPU", MPS: "Apple GPU (MPS)"}.get(ranks.device.type)
    device = device or torch.cuda.get_device_name(ranks.device)
    num_elsewhere = sum(len(group.ranks) for group in trainer.plan.rank_groups[1:])
    text = f"{ranks.size + ranks.rollout_ranks + num_elsewhere} x {device}"
    sizes = asdict(ranks.mesh) | {"rollout_ranks": ranks.rollout_ranks}
    if split := " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1):
        text += f" ({split})"
    if trainer.config.is_rl:
        # A script's custom engine leaves the flag at auto.
        text += f", {trainer.config.engine.replace('auto', 'own')} engine"
    ways = sorted({e.weight_transfer for e in trainer.device.engines if e.weight_transfer})
    if ways:
        text += f", new weights by {' and '.join(ways)}"
    return text


def short(n: float) -> str:
    """1.23B"""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:.3g}{unit}"
    return f"{n:.3g}"


def progress_line(
    step: int,
    num_steps: int,
    metrics: Mapping[str, float],
    actors: Sequence[str],
    left: timedelta | None,
    is_rl: bool,
) -> str:
    """step 12/200  reward 0.412  entropy 0.213  1.40 s (generate 0.90, learn 0.50)  ETA 0:04:23

    Several actors follow, one a line. The phases are left out if they do not fit in WIDTH.
    """
    phases = []
    for phase in ("generate", "rows", "learn", "sync", "rank_groups"):
        seconds = metrics.get(f"time/{phase}_s", 0.0)
        if seconds >= 0.005:
            phases.append(f"{phase} {seconds:.2f}")
    facts, below = results(metrics, actors, is_rl), []
    if len(actors) > 1:
        facts, below = [], facts
    position, end = f"step {step:>{len(str(num_steps))}}/{num_steps}", f"  ETA {left}"
    if left is None:
        position, end = f"step {step}", ""
    start = "  ".join([position, *filter(None, facts), f"{metrics['time/step_s']:.2f} s"])
    line = f"{start} ({', '.join(phases)}){end}"
    if not phases or len(line) > WIDTH:
        line = f"{start}{end}"
    return "\n  ".join([line, *below])


def values_of(metrics: Mapping[str, float], actor: str, is_rl: bool) -> dict[str, float]:
    """Label -> value of an actor in a step's line. The loss of episodes is not among them: it is
    near 0 where the policy that learns also sampled, whatever is learned."""
    values = {}
    for label, names in (OF_EPISODES if is_rl else OF_ROWS).items():
        for name in names:
            value = metrics.get(name.format(actor), math.nan)
            if label not in values and math.isfinite(value) and (value or label != "failed"):
                values[label] = value
    return values


def results(metrics: Mapping[str, float], actors: Sequence[str], is_rl: bool) -> list[str]:
    """The values of each actor, after its name if there are several."""
    lines = []
    longest = max(map(len, actors), default=0)
    for actor in actors:
        shown = values_of(metrics, actor, is_rl)
        values = [f"{label} {value:.4g}" for label, value in shown.items()]
        if len(actors) > 1:
            values = [f"{actor:<{longest}}", *(values or ["no turns"])]
        lines.append("  ".join(values))
    return lines
