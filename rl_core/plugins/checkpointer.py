"""What a run saves: checkpoints, each model as a Hugging Face folder, and the best by an
evaluation."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl_core.data.rows import write_whole
from rl_core.metrics import Max, Metric
from rl_core.plugin import Plugin
from rl_core.plugins.checkpoint import (
    export_policy,
    read_object,
    save_checkpoint,
    trained_learners,
)
from rl_core.run_folder import naming
from rl_core.types import RunError


class Checkpointer(Plugin):
    """Saves every --save_every steps, by the clock, and when the run ends. Each rank notes the age
    of its last checkpoint beside a step's metrics: all ranks decide alike."""

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self.saved_at, self.saved_step = time.monotonic(), -1
        self.updates_before: dict[str, int] = {}

    def load(self, state: dict[str, Any]) -> None:
        for name, learner in trained_learners(self.trainer.learners).items():
            self.updates_before[name] = learner.num_updates

    def agree(self) -> dict[str, Metric]:
        return {"age_s": Max(time.monotonic() - self.saved_at)}

    async def after_step(self, step: int, metrics: dict[str, float]) -> None:
        config = self.trainer.config
        is_last = step == config.num_steps
        if is_last:
            self.refuse_ruined()
        is_due = config.save_every > 0 and step % config.save_every == 0
        is_old = 0 < 60 * config.save_minutes <= self.trainer.agreed["keep/age_s"]
        if is_last or is_due or is_old or self.trainer.ended_by:
            await self.save()

    async def give_up(self) -> None:
        """Saves what was learned before too many failures end the run."""
        if self.trainer.step > self.trainer.first_step:
            await self.save()

    async def finish(self) -> None:
        """Exports what a run before this one saved, if no step was left: it may have been killed
        between the two."""
        if self.trainer.first_step and self.saved_step < 0:
            await export(self.trainer, self.trainer.out / "hf")

    async def save(self) -> None:
        trainer, step = self.trainer, self.trainer.step
        if step == self.saved_step:
            return
        trainer.begin_phase("save")
        folder = trainer.out / "checkpoints" / f"step_{step:06d}"
        scratch = trainer.out / "under_way"
        scratch.mkdir(exist_ok=True)
        files = []
        await trainer.device.sleep()
        for plugin in trainer.plugins:
            files += await plugin.files(scratch)
        state = {"step": step, "seed": trainer.config.seed, "to_evaluate": False}
        state |= trainer.data_state
        for plugin in trainer.plugins:
            state |= plugin.state()
        keep = trainer.config.keep_checkpoints
        with naming(folder):
            save_checkpoint(folder, trainer.learners, state, trainer.ranks, keep, files)
        shutil.rmtree(scratch, ignore_errors=True)
        await export(trainer, trainer.out / "hf")
        await trainer.resume()
        self.saved_at, self.saved_step = time.monotonic(), step
        exported = ", ".join(str(trainer.out / "hf" / name) for name in trainer.config.trained)
        trainer.log.say(f"saved step {step} to {folder.parent} and {exported}")

    def refuse_ruined(self) -> None:
        """Raises RunError before the last save if no update was finite since this process began:
        the weights, which are no other ones, may be ruined, and must not take the place of what was
        exported before."""
        for name, learner in trained_learners(self.trainer.learners).items():
            if learner.nonfinite_in_a_row and learner.num_updates == self.updates_before[name]:
                raise RunError(
                    f"every update of {name} was skipped, because its loss or gradient was NaN or "
                    "infinite: its weights may be ruined, and nothing is saved; go on from an "
                    "earlier checkpoint or model"
                )

    def after_run(self) -> None:
        """Raises RunError if nothing was learned from the first step to the last. What learned on
        ranks of its own is not known here."""
        num_steps = self.trainer.config.num_steps
        trained = trained_learners(self.trainer.learners).values()
        has_learned = any(learner.num_updates for learner in trained)
        has_learned |= len(self.trainer.learners) < len(self.trainer.config.trained)
        is_whole = self.saved_step == num_steps and not self.trainer.signal
        if trained and is_whole and not has_learned:
            raise RunError(
                f"none of {num_steps} steps made an update, because no samples carried a signal: "
                "the model is as it was; look at the rewards by rl-core show, or train longer by "
                "--resume with a higher --num_steps"
            )


class BestKeeper(Plugin):
    """--keep_best: exports the models when an evaluation's metric, such as greedy_score, is better
    than all before."""

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self.metric = trainer.config.keep_best
        self.folder = trainer.out / "best"
        # A loss is best where it is lowest.
        self.sign = -1 if self.metric.endswith("loss") else 1
        self.best = None
        with suppress(FileNotFoundError):
            self.best = read_object(self.folder / "best.json").get(self.metric)

    async def after_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        if self.is_best(metrics):
            await export(self.trainer, self.folder)
            await self.trainer.resume()
            self.write(step)

    def write(self, step: int) -> None:
        if self.trainer.ranks.is_writer:
            self.folder.mkdir(exist_ok=True)
            text = json.dumps({"step": step, self.metric: self.best})
            write_whole(self.folder / "best.json", text)

    def is_best(self, metrics: dict[str, float]) -> bool:
        """By the mean over environments. Raises RunError if the evaluation lacks the metric."""
        known = [name for name in metrics if name.startswith("eval/")]
        values = [metrics[name] for name in known if name.endswith(f"/{self.metric}")]
        if not values:
            names = sorted({name.rpartition("/")[2] for name in known})
            raise RunError(
                f"--keep_best {self.metric} is no metric of this evaluation; it has "
                f"{', '.join(names)}"
            )
        value = sum(values) / len(values)
        is_better = self.best is None or self.sign * value > self.sign * self.best
        if is_better:  # NaN is not
            self.best = value
        return is_better


async def export(trainer: Any, folder: Path) -> None:
    """Each model as a Hugging Face folder."""
    await export_local(trainer, folder)
    await trainer.call("export", folder)


async def export_local(trainer: Any, folder: Path) -> None:
    """Those of this rank's learners."""
    for name in trainer.learners:
        async with trainer.actors[name].learning() as learner:
            with naming(folder / name):
                tokenizer = trainer.plan.chats[name].tokenizer
                policy, adapter = learner.policy, learner.adapter
                export_policy(policy, tokenizer, folder / name, trainer.ranks, adapter)
