"""Saving: checkpoints, and each model as a Hugging Face folder."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.errors import counted
from rl_core.metrics import Max, Metric
from rl_core.plugin import Plugin, RunState
from rl_core.run.run_folder import naming
from rl_core.run.saving.checkpoint import (
    export_policy,
    save_checkpoint,
    trained_learners,
)
from rl_core.types import JSONObject, RunError

if TYPE_CHECKING:
    from rl_core.engines.engine_ranks import RankGroupTrainer

# A run of fewer steps without an update is not an error.
MIN_STEPS = 10


class Checkpointer(Plugin):
    """Saves every --save_every steps, by the clock, and when the run ends. Ranks agree on the age
    of the last checkpoint, so that all of them save at the same step."""

    def __init__(self, trainer: RunState):
        super().__init__(trainer)
        self.saved_at, self.saved_step = time.monotonic(), -1
        self.updates_before: dict[str, int] = {}
        self.failures: Counter[str] = Counter()  # reason -> episodes

    async def on_failures(self, step: int, reasons: dict[str, int]) -> None:
        self.failures.update(reasons)

    def load(self, state: JSONObject) -> None:
        for name, learner in trained_learners(self.trainer.learners).items():
            self.updates_before[name] = learner.num_updates

    def reduced_flags(self) -> dict[str, Metric]:
        return {"age_s": Max(time.monotonic() - self.saved_at)}

    async def after_step(self, step: int, metrics: dict[str, float]) -> None:
        config = self.trainer.config
        is_last = step == config.num_steps
        if is_last:
            self.refuse_ruined()
        is_due = config.save_every > 0 and step % config.save_every == 0
        is_old = 0 < 60 * config.save_minutes <= self.trainer.reduced_flags["keep/age_s"]
        if is_last or is_due or is_old or self.trainer.ended_by:
            await self.save()

    async def give_up(self) -> None:
        """Saves the learned weights before the run ends within a step."""
        if self.trainer.step > self.trainer.first_step:
            await self.save()

    async def finish(self) -> None:
        """Exports the last checkpoint if no step was left: an earlier process may have been killed
        between checkpoint and export."""
        if self.trainer.first_step and self.saved_step < 0:
            await export(self.trainer, self.trainer.out / "hf")

    async def save(self) -> None:
        if self.trainer.step != self.saved_step:
            with self.trainer.timed("save"):
                await self.write()

    async def write(self) -> None:
        """Writes a checkpoint and exports the models."""
        trainer, step = self.trainer, self.trainer.step
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
        """Raises RunError before the last save if no update was finite since this process started:
        the weights have not changed, may be ruined, and must not replace the earlier export."""
        for name, learner in trained_learners(self.trainer.learners).items():
            if learner.nonfinite_in_a_row and learner.num_updates == self.updates_before[name]:
                raise RunError(
                    f"every update of {name} was skipped, because its loss or gradient was NaN or "
                    "infinite: its weights may be ruined, and nothing is saved; resume from an "
                    "earlier checkpoint or model"
                )

    def after_run(self) -> None:
        """Warns if no step made an update; raises RunError if the run had at least MIN_STEPS steps.
        Knows only this rank's learners."""
        num_steps = self.trainer.config.num_steps
        trained = trained_learners(self.trainer.learners).values()
        has_learned = any(learner.num_updates for learner in trained)
        has_learned |= len(self.trainer.learners) < len(self.trainer.config.trained)
        is_whole = self.saved_step == num_steps and not self.trainer.signal
        if trained and is_whole and not has_learned:
            self.refuse_no_update(num_steps)

    def refuse_no_update(self, num_steps: int) -> None:
        text = (
            f"none of {num_steps} steps made an update, because no samples carried a signal: "
            "the model is as it was; look at the rewards by rl-core show, or train longer by "
            "--resume with a higher --num_steps"
        )
        if self.failures:
            [(reason, num)] = self.failures.most_common(1)
            total = self.failures.total()
            text += (
                f"; {counted(total, 'episode')} failed and gave no samples, {num} of them by: "
                f"{reason}"
            )
        if num_steps >= MIN_STEPS:
            raise RunError(text)
        print(f"warning: {text}", file=sys.stderr, flush=True)


async def export(trainer: RunState, folder: Path) -> None:
    """Exports each model as a Hugging Face folder."""
    await export_local(trainer, folder)
    await trainer.call("export", folder)


async def export_local(trainer: RunState | RankGroupTrainer, folder: Path) -> None:
    """Exports the models of this rank's learners."""
    for name in trainer.learners:
        async with trainer.actors[name].learning() as learner:
            with naming(folder / name):
                chat = trainer.plan.chats[name]
                export_policy(
                    learner.policy,
                    chat.tokenizer,
                    folder / name,
                    trainer.ranks,
                    learner.adapter,
                    base=trainer.plan.config.actors[name].model or "",
                    # The template's end token comes first.
                    end_token_ids=(chat.end_token_id, *chat.stop_token_ids),
                )
