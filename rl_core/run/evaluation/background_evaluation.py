"""--eval.background DEVICE: evaluations in a separate process while training continues.

    evaluations/step_000010/config.yaml, hf/ACTOR/   the weights of that step
                            played/                  the folder of rl-core eval, see eval_folder.py
                            log                      stderr of the process

The process is `rl-core eval` of that folder. One evaluation runs at a time: the run waits for it
before the next one, and before the run ends. The evaluation's row in metrics.jsonl has the step
whose weights were evaluated, and is written when the evaluation is done. A resumed run starts an
unfinished evaluation again.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from rl_core.config import Config, to_yaml
from rl_core.data.env_names import env_files
from rl_core.data.rows import read_json, rename_into_place
from rl_core.distributed import all_gather_json
from rl_core.errors import refuse, split
from rl_core.metrics import Max, Mean, Metric, Sum, add_metrics
from rl_core.plugin import RunState
from rl_core.run.evaluation.eval_folder import cell_of
from rl_core.run.evaluation.evaluation import Evaluation, task_metrics
from rl_core.run.saving.checkpointer import export
from rl_core.run.saving.run_files import write_trajectories
from rl_core.types import Trajectory

POLL_S = 0.2
REASON_CHARS = 600
# Variables that torchrun sets for ranks. The evaluation process is not a rank.
OF_RANKS = re.compile(r"TORCHELASTIC_.*|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)")
# (condition that breaks the rule, message). c: the configuration. used: number of this machine's
# GPUs that ranks use. num: number of GPUs that this process sees.
RULES = [
    (
        lambda c, used, num: not re.fullmatch(r"cpu|cuda:\d+", c.eval.background),
        "--eval.background={c.eval.background} must be cpu, or a GPU such as cuda:7",
    ),
    (
        lambda c, used, num: c.eval.background != "cpu" and int(c.eval.background[5:]) < used,
        "--eval.background={c.eval.background} is a GPU that a rank of the run uses; start fewer "
        "ranks (--nproc_per_node) and name a free GPU, or leave the flag out",
    ),
    (
        lambda c, used, num: c.eval.background != "cpu" and int(c.eval.background[5:]) >= num,
        "--eval.background={c.eval.background} is not a GPU of this machine, which shows {num}; "
        "name one of them, or cpu",
    ),
    (
        lambda c, used, num: not c.is_rl,
        "--eval.background plays episodes; leave it out for --algorithm {c.algorithm}",
    ),
    (
        lambda c, used, num: c.keep_best,
        "--eval.background ends after the weights have changed; leave out --keep_best",
    ),
    (
        lambda c, used, num: "wandb" in split(c.trackers),
        "--eval.background is logged at earlier steps, which W&B does not accept; leave it out, or "
        "take another tracker",
    ),
    (
        lambda c, used, num: any(
            not ("://" in p or p in env_files() or Path(p).exists()) for p in c.env_paths.values()
        ),
        "--eval.background reads the environments' files again; give files, not Python values",
    ),
]


class BackgroundEvaluation(Evaluation):
    """The writer rank owns the files and the process. All ranks know which evaluation is
    running."""

    def __init__(self, trainer: RunState):
        super().__init__(trainer)
        config, used = trainer.config, 0
        if trainer.ranks.device.type == "cuda":
            used = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        refuse(RULES, c=config, used=used, num=torch.cuda.device_count())
        self.folder = trainer.out / "evaluations"
        self.under_way: int | None = None  # the step of the running evaluation
        self.process: subprocess.Popen | None = None
        self.failure = ""
        self.began_at = 0.0

    async def start(self) -> None:
        """Starts evaluations again that an earlier process of the run left unfinished."""
        left = self.steps_left() if self.trainer.ranks.is_writer else []
        for step in all_gather_json(left, self.trainer.ranks)[0]:
            self.launch(step)
            await self.wait()
        await super().start()

    def steps_left(self) -> list[int]:
        """Steps whose evaluation is still to be done. Removes folders of evaluations that are
        logged already, that come after the checkpoint, or that are incomplete."""
        logged = set()
        if self.trainer.log.path.exists():
            for row in read_json(self.trainer.log.path):
                if "time/eval_s" in row:
                    logged.add(row["step"])
        left = []
        for folder in sorted(self.folder.glob("step_*")):
            end_orphan(folder)
            number = folder.name.removeprefix("step_")
            is_new = self.trainer.checkpoint is None or not number.isdigit()
            if is_new or int(number) in logged or int(number) > self.trainer.first_step:
                shutil.rmtree(folder)
            elif not (self.is_left and int(number) == self.trainer.first_step):
                left.append(int(number))
        return left

    def reduced_flags(self) -> dict[str, Metric]:
        """The writer rank reports whether the process has ended."""
        return {"evaluated": Max(float(self.trainer.ranks.is_writer and self.has_ended()))}

    async def after_step(self, step: int, metrics: dict[str, float]) -> None:
        if self.under_way is not None and self.trainer.reduced_flags["keep/evaluated"]:
            await self.record()
        await super().after_step(step, metrics)

    async def evaluate(self, step: int) -> None:
        await self.wait()
        trainer, folder = self.trainer, self.folder_of(step)
        scratch = folder.with_name(folder.name + ".tmp")
        try:
            await export(trainer, scratch / "hf")
            if trainer.ranks.is_writer:
                (scratch / "config.yaml").write_text(to_yaml(self.config_of_process()))
                rename_into_place(scratch, folder)
        except OSError as error:  # A full disk, on the writer rank.
            self.failure = str(error)
            shutil.rmtree(scratch, ignore_errors=True)
        await trainer.resume()
        self.launch(step)
        self.is_left = False

    async def finish(self) -> None:
        await self.wait()

    async def close(self) -> None:
        """Kills a running evaluation; a resumed run starts the evaluation again."""
        if self.process is not None:
            end_process(self.process.pid)
            self.process.wait()

    def folder_of(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

    def config_of_process(self) -> Config:
        config = self.trainer.config
        if config.eval.background == "cpu":
            config = replace(config, engine="embedded")
        return replace(config, engine_tp=1, eval=replace(config.eval, background=None))

    def launch(self, step: int) -> None:
        """Starts the process on the writer rank. Every rank must call this method."""
        self.under_way = step
        if not self.trainer.ranks.is_writer or self.failure:
            return
        folder = self.folder_of(step)
        command = [sys.executable, "-m", "rl_core.tools.cli", "eval", str(folder)]
        command += ["--folder", str(folder / "played"), "--json"]
        self.began_at = time.monotonic()
        try:
            with open(folder / "log", "ab") as log:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    env=environment_of(self.trainer.config.eval.background),
                    start_new_session=True,
                )
            (folder / "pid").write_text(str(self.process.pid))
        except OSError as error:
            self.failure = str(error)

    def has_ended(self) -> bool:
        """True after the process ended. Kills a process that finished no episode within the time
        limit of one episode."""
        if self.under_way is None or self.process is None:
            return self.under_way is not None
        if self.process.poll() is not None:
            return True
        config, folder = self.trainer.config, self.folder_of(self.under_way)
        limit = config.rollout.episode_timeout_s + config.timeout_s
        written = [path.stat().st_mtime for path in folder.glob("played/episodes/*")]
        # A resumed evaluation may have old files.
        idle_s = min(time.time() - max(written, default=0.0), time.monotonic() - self.began_at)
        if idle_s > limit:
            self.failure = f"no episode ended within {limit:g} s (episode_timeout_s + timeout_s)"
            end_process(self.process.pid)
            self.process.wait()
            return True
        return False

    async def wait(self) -> None:
        """Waits until the running evaluation is recorded. Every rank must call this method."""
        if self.under_way is None:
            return
        self.trainer.begin_phase("wait for the evaluation")
        name = f"background/{self.under_way}"
        while True:
            if self.trainer.ranks.is_writer and self.has_ended():
                self.trainer.ranks.set_flag(name)
            if self.trainer.ranks.has_flag(name):
                break
            await asyncio.sleep(POLL_S)
        await self.record()

    async def record(self) -> None:
        """Logs metrics at the step whose weights were evaluated. Every rank must call this
        method."""
        trainer, step = self.trainer, self.under_way
        metrics: dict[str, Metric] = {}
        if trainer.ranks.is_writer:
            duration = Mean(time.monotonic() - self.began_at, 1.0)
            metrics = {"time/eval_s": duration, "eval/background_failed": Sum(0.0)}
            reason = self.reason_of_failure()
            if reason:
                metrics["eval/background_failed"] = Sum(1.0)
                trainer.log.say(f"the evaluation of step {step} failed: {reason}")
            else:
                add_metrics(metrics, self.collect(step))
            shutil.rmtree(self.folder_of(step), ignore_errors=True)
        self.under_way, self.process, self.failure = None, None, ""
        values = trainer.log.write(step, metrics)
        self.show(step, values)
        await trainer.call("after_evaluation", step, values)

    def reason_of_failure(self) -> str:
        """The end of the process's log; "" if the process succeeded."""
        if self.failure or self.process is None or self.process.returncode == 0:
            return self.failure
        text = (self.folder_of(self.under_way) / "log").read_text(errors="replace")
        text = " ".join(text.split())[-REASON_CHARS:]
        return f"status {self.process.returncode}: {text}"

    def collect(self, step: int) -> dict[str, Metric]:
        """Metrics of all episodes. Writes the episodes to rollouts/, as other evaluations do."""
        trainer, config, folder = self.trainer, self.trainer.config, self.folder_of(step)
        metrics: dict[str, Metric] = {}
        for source in trainer.plan.eval:
            by_label: dict[str, list[Trajectory]] = {}
            groups = cell_of(folder / "played", str(folder), source).groups
            for (label, _, _), trajectories in groups.items():
                by_label.setdefault(label.partition("/")[0], []).extend(trajectories)
            for label, trajectories in by_label.items():
                count = 1 if label == "greedy" else config.eval.samples
                add_metrics(metrics, task_metrics(config, source, label, count, trajectories))
                name = f"eval_{step:06d}_{label}"
                if len(trainer.plan.eval) > 1:
                    name += "_" + source.replace("/", "_")
                if config.rollout.save:
                    file = trainer.out / "rollouts" / f"{name}.jsonl.zst"
                    write_trajectories(file, trajectories)
        return metrics


def environment_of(device: str) -> dict[str, str]:
    """Environment variables of a process that sees only this device and is not a rank."""
    variables = {name: v for name, v in os.environ.items() if not OF_RANKS.fullmatch(name)}
    gpu = device.removeprefix("cpu").removeprefix("cuda:")
    visible = split(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if gpu and visible:
        gpu = visible[int(gpu)]
    variables["CUDA_VISIBLE_DEVICES"] = gpu
    return variables


def end_process(pid: int) -> None:
    """Kills the process group: the process and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def end_orphan(folder: Path) -> None:
    """Kills an evaluation whose run was killed. Checks the command line, because another process
    may have the number by now."""
    with suppress(OSError, ValueError):
        pid = int((folder / "pid").read_text())
        if str(folder) in Path(f"/proc/{pid}/cmdline").read_text():
            end_process(pid)
