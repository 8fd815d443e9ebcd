"""What a terminal shows: what was loaded, a line for each step, a live panel, episodes of an
evaluation, and warnings."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import time
from collections import deque
from contextlib import suppress
from datetime import timedelta
from statistics import median
from typing import Any

import huggingface_hub
import torch
import transformers
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rl_core.plugins.lora import experts_of, has_experts
from rl_core.plugins.run_warnings import RunWarnings
from rl_core.rules import printable

REFRESH_PER_S = 4
LAST_STEPS = 20  # whose median says how long a step takes


def quiet() -> None:
    """No bars and reports of libraries while models load and are written; downloads keep theirs."""
    if not os.environ.get("RL_CORE_DEBUG"):
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        huggingface_hub.utils.enable_progress_bars()
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
        # Hooks have deadlines of their own.
        logging.getLogger("math_verify").setLevel(logging.ERROR)


def counted(num: int, thing: str) -> str:
    """`1 row`, `1,000 rows`."""
    return f"{num:,} {thing}" + ("" if num == 1 else "s")


def loaded(run: Any) -> str:
    """Three lines: the models, the data and the plan, the devices and where it begins."""
    config, plan, ranks = run.config, run.plan, run.ranks
    models = []
    for name, actor in config.actors.items():
        learner, text = run.learners.get(name), f"{name}: {actor.model}"
        if learner is not None:
            total = sum(p.numel() for p in learner.policy.hf.parameters())
            trained = sum(p.numel() for _, p in learner.trained_parameters())
            text += f" ({short(total)} parameters" + (
                f", {short(trained)} trained" if trained != total else ""
            )
            leaves_out = learner.policy.adapters and not has_experts(actor.lora)
            experts = experts_of(learner.policy.hf) if leaves_out else ""
            text += f"; no adapters on {experts})" if experts else ")"
        models.append(
            text + ("" if learner is not None else f" ({actor.api})" if actor.api else " (frozen)")
        )
    rows = sum(len(source) for source in plan.train.sources)
    held_out = sum(len(source) for source in plan.eval.values())
    work = f"{config.algorithm}: {counted(rows, 'row')}" + (
        f", {held_out:,} held out" if held_out else ""
    )
    each = f" x {counted(config.group_size, 'episode')}" if config.is_rl else ""
    of_step = counted(config.tasks_per_step, "task" if config.is_rl else "row")
    work += f"; {counted(config.num_steps, 'step')} of {of_step}{each}"
    is_gpu, size = ranks.device.type == "cuda", ranks.size + ranks.engine_ranks
    device = torch.cuda.get_device_name(ranks.device) if is_gpu else "CPU"
    mesh = {name: getattr(ranks.mesh, name) for name in ("dp_replicate", "dp_shard", "cp", "tp")}
    mesh |= {"engine_ranks": ranks.engine_ranks}
    split = " ".join(f"{name} {n}" for name, n in mesh.items() if n > 1)
    devices = (
        f"{size} x {device}"
        + (f" ({split})" if split else "")
        + (f", {config.engine} engine" if each else "")
    )
    short_of = [engine.shortage for engine in run.engines if engine.shortage]
    return "\n".join([", ".join(models), work, f"{devices}; {run.beginning}", *short_of])


def short(n: float) -> str:
    """1.23B"""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:.3g}{unit}"
    return f"{n:.3g}"


class Terminal:
    """On the rank that writes. Where stdout is a terminal, a panel stands below the lines."""

    def __init__(self, run: Any):
        self.run, self.live, self.phase, self.values = run, None, "start", {}
        self.started = self.began = time.monotonic()  # the run, the phase
        self.step_done: int = run.first_step
        self.time_left = TimeLeft(run.config.num_steps, run.config.eval_every)
        self.said_at = -math.inf
        run.log.say(loaded(run))
        self.warnings = None
        if run.ranks.is_writer:
            self.warnings = RunWarnings(run.config, run.out, run.plan.envs.values())
        if run.ranks.is_writer and sys.stdout.isatty():
            self.live = Live(
                get_renderable=self.panel, refresh_per_second=REFRESH_PER_S, transient=True
            )
            self.live.start()
            self.live.console.show_cursor(True)  # a run that is killed leaves it

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()

    def panel(self) -> Group:
        """phase, groups of the step that are done, and rewards, tokens per second and time left as
        of the step before."""
        run, config, table = self.run, self.run.config, Table.grid(padding=(0, 2))
        step = self.values.get("step", run.first_step)
        cells = [
            f"step {step}/{config.num_steps}",
            self.phase,
            f"{time.monotonic() - self.began:.0f} s",
        ]
        if self.phase == "generate" and config.is_rl:
            every = config.tasks_per_step
            # The store ended with another rank, which the run finds out itself.
            with suppress(RuntimeError):
                done = min(run.worker.num_ready(), every)
                cells[2:] = [
                    ProgressBar(total=every, completed=done, width=24),
                    f"{done}/{every} groups",
                    cells[2],
                ]
        table.add_row(*cells)
        rest = [f"{actor} {value:.4g}" for actor, value in rewards(self.values).items()]
        rest = ["reward " + ", ".join(rest)] if rest else []
        for name in ("generate", "learn"):
            if speed := self.values.get(f"time/{name}_tokens_per_s"):
                rest.append(f"{name} {short(speed)} tokens/s")
        if step > run.first_step:
            rest.append(f"ETA {self.time_left.after(step)}")
        told = [text for _, text in list(self.warnings.now.values())]
        lines = (
            Text(f"! {text}", style="yellow", no_wrap=True, overflow="ellipsis") for text in told
        )
        return Group(table, Text("  ".join(rest)), *lines)

    def show(self, phase: str) -> None:
        now = time.monotonic()
        if self.phase == "eval":
            self.time_left.note_evaluation(self.step_done, now - self.began)
        self.phase, self.began = phase, now

    def step(self, step: int, values: dict[str, float]) -> None:
        """A line, at most one a second, and what is off in this step."""
        self.values, num_steps = values | {"step": step}, self.run.config.num_steps
        self.step_done = step
        self.time_left.note_step(values["time/step_s"])
        if time.monotonic() > self.said_at + 1 or step == num_steps:
            self.said_at = time.monotonic()
            self.run.log.say(
                f"{progress_line(step, num_steps, values)}  ETA {self.time_left.after(step)}"
            )
        if self.warnings:
            self.warn(step, self.warnings.step(step, values))

    def failures(self, step: int, reasons: dict[str, int]) -> None:
        """Tells each reason once. `reasons`: reason -> episodes of the step, or of its evaluation,
        that failed for it."""
        if self.warnings:
            self.warn(step, self.warnings.failures(step, reasons))

    def warn(self, step: int, texts: list[str]) -> None:
        for text in texts:
            print(f"warning: step {step}: {printable(text)}", file=sys.stderr, flush=True)


class TimeLeft:
    """Of the steps and evaluations that come, by the median of those that were. Start-up and saving
    do not count."""

    def __init__(self, num_steps: int, eval_every: int):
        self.num_steps, self.eval_every = num_steps, eval_every
        self.step_times: deque[float] = deque(maxlen=LAST_STEPS)
        self.eval_times: list[float] = []
        self.evaluated_step = -1

    def note_step(self, seconds: float) -> None:
        self.step_times.append(seconds)

    def note_evaluation(self, step: int, seconds: float) -> None:
        self.evaluated_step = step
        self.eval_times.append(seconds)

    def after(self, step: int) -> timedelta:
        """When this step is done, and maybe its evaluation."""
        seconds = median(self.step_times) * (self.num_steps - step)
        if self.eval_times:
            first = step + 1 if self.evaluated_step == step else step
            seconds += median(self.eval_times) * self.num_evaluations(first)
        return timedelta(seconds=int(seconds))

    def num_evaluations(self, first: int) -> int:
        """Steps from `first` on that an evaluation follows: every so many, and the last."""
        if not self.eval_every:
            return 0
        due = {*range(self.eval_every, self.num_steps + 1, self.eval_every), self.num_steps}
        return sum(step >= first for step in due)


def progress_line(step: int, num_steps: int, values: dict[str, float]) -> str:
    """step 12/200  reward 0.412  tokens 24.1  loss 0.0123  1.4 s (generate 0.9, learn 0.5)"""
    shown = [f"step {step:>{len(str(num_steps))}}/{num_steps}"]
    matches = (
        re.fullmatch(r"(?:rollout|learn)/([^/]+)/(?:reward_mean|loss)", name) for name in values
    )
    actors = list(dict.fromkeys(match[1] for match in matches if match))
    for actor in actors:
        names = {"reward": f"rollout/{actor}/reward_mean", "tokens": f"rollout/{actor}/length_mean"}
        names |= {"loss": f"learn/{actor}/loss"}
        shown += [f"{actor}:"] if len(actors) > 1 else []
        known = {
            label: values[name]
            for label, name in names.items()
            if not math.isnan(values.get(name, math.nan))
        }
        shown += [f"{label} {value:.4g}" for label, value in known.items()] or ["no turns"]
    if failed := sum(values.get(f"rollout/{actor}/failed", 0) for actor in actors):
        shown.append(f"failed {failed:.4g}")
    first = "generate" if any(name.startswith("rollout/") for name in values) else "read rows"
    seconds = {first: "generate", "learn": "learn", "sync": "sync"}
    times = ((label, values.get(f"time/{phase}_s", 0.0)) for label, phase in seconds.items())
    phases = ", ".join(f"{label} {s:.2f}" for label, s in times if s >= 0.005)
    return "  ".join([*shown, f"{values['time/step_s']:.2f} s ({phases})"])


def rewards(values: dict[str, float]) -> dict[str, float]:
    """Actor -> mean reward."""
    found = {
        re.fullmatch(r"rollout/([^/]+)/reward_mean", name): value for name, value in values.items()
    }
    return {match[1]: value for match, value in found.items() if match}
