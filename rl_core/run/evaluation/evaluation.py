"""--eval_every N: scores held-out tasks before the first step, every N steps, and after the
last."""

from __future__ import annotations

import re
from itertools import islice

import torch

from rl_core.config import Config
from rl_core.data.episodes import succeeded
from rl_core.distributed import SIGNAL_RECEIVED
from rl_core.learning.learner import Learner, mean_of
from rl_core.learning.minibatches import Minibatch
from rl_core.metrics import Metric, add_metrics
from rl_core.plugin import Plugin, RunState
from rl_core.run.evaluation.episode_metrics import held_out_metrics, num_failed, part_metrics
from rl_core.sampling.groups import make_group
from rl_core.sampling.rollout import Interrupted, sorted_trajectories
from rl_core.types import JSONObject, Task, Trajectory

# Pattern of the metrics that are printed. metrics.jsonl has all.
IS_SHOWN = re.compile(r"eval/(?!.*/(greedy|sampled)_(?!(score|pass|failed)$))")


class Evaluation(Plugin):
    """Greedy score, avg@k and pass@k of episodes; the loss of rows."""

    def __init__(self, trainer: RunState):
        super().__init__(trainer)
        self.is_left = False  # True: a resumed run evaluates this step.

    def load(self, state: JSONObject) -> None:
        self.is_left = bool(state["to_evaluate"])

    def state(self) -> JSONObject:
        return {"to_evaluate": self.is_left}

    async def start(self) -> None:
        if self.is_left:
            await self.evaluate(self.trainer.step)

    async def after_step(self, step: int, metrics: dict[str, float]) -> None:
        config = self.trainer.config
        if step % config.eval_every and step != config.num_steps:
            return
        if self.trainer.signal:
            self.is_left = True
            self.trainer.log.say(f"eval at step {step} skipped after the signal; --resume runs it")
        else:
            await self.evaluate(step)

    async def evaluate(self, step: int) -> None:
        trainer = self.trainer
        self.is_left = True  # Stays if too many episodes fail, or after a signal.
        trainer.metrics.clear()
        try:
            await self.evaluate_sets(step)
        except Interrupted:
            trainer.metrics.clear()
            trainer.log_metrics()  # All ranks learn the signal.
            trainer.log.say(f"eval at step {step} interrupted; --resume repeats it")
            return
        metrics = trainer.log_metrics()
        self.show(step, metrics)
        self.is_left = False
        await trainer.call("after_evaluation", step, metrics)

    async def evaluate_sets(self, step: int) -> None:
        trainer, config = self.trainer, self.trainer.config.eval
        with trainer.timed("eval"):
            for name, source in trainer.plan.eval.items():
                tasks = list(islice(source, config.num_tasks or None))
                if trainer.plan.sft_dataset:
                    prefix = "eval/" if source.split == "eval" else f"eval/{name}/"
                    await self.evaluate_rows(tasks, prefix)
                    continue
                sampling = {"temperature": 0.0}
                await self.evaluate_tasks(step, name, tasks, "greedy", 1, sampling)
                if count := config.samples:
                    sampling = config.sampling
                    await self.evaluate_tasks(step, name, tasks, "sampled", count, {**sampling})

    def show(self, step: int, metrics: dict[str, float]) -> None:
        """Prints the scores. Fewer rewards may reach --eval.pass_reward while their mean rises."""
        shown, about = [f"eval at step {step}"], ""
        for name, value in metrics.items():
            if IS_SHOWN.match(name) and (value or not name.endswith("_failed")):
                shown.append(f"{name.removeprefix('eval/')} {value:.4g}")
            if name.endswith("/greedy_pass"):
                about = f"  (pass: reward >= {self.trainer.config.eval.pass_reward:g})"
        shown[-1] += about
        self.trainer.log.say("  ".join(shown))

    def has_signal(self) -> bool:
        """True once any rank received a signal."""
        return self.trainer.ranks.number(SIGNAL_RECEIVED) > 0

    async def evaluate_rows(self, tasks: list[Task], prefix: str) -> None:
        trainer, dataset = self.trainer, self.trainer.plan.sft_dataset
        assert dataset is not None
        samples = dataset.samples_at(tasks.__getitem__, range(len(tasks)), trainer.ranks)
        [name] = trainer.learners
        async with trainer.actors[name].learning() as learner:
            minibatches, _ = learner.shard(samples)
            learner.annotate(minibatches)
            trainer.add_metrics(prefix, loss_of_rows(learner, minibatches))

    async def evaluate_tasks(
        self,
        step: int,
        source: str,
        tasks: list[Task],
        label: str,
        count: int,
        sampling: dict[str, float],
    ) -> None:
        """Plays `count` episodes of each task and records their metrics. Raises Interrupted on all
        ranks if one of them received a signal."""
        trainer, config = self.trainer, self.trainer.config
        name = f"eval/{step:06d}/{label}"
        if len(trainer.plan.eval) > 1:
            name += f"/{source}"
        common = {"batch": f"eval/{source}", "label": name, "size": count}
        groups = []
        for number, task in enumerate(tasks):
            groups.append(
                make_group(config, task, sampling, number=number, position=number, **common)
            )
        trainer.worker.submit(groups)
        collecting = trainer.worker.collect(len(groups), label=name, is_interrupted=self.has_signal)
        played = sorted_trajectories(await collecting)
        await trainer.call("on_episodes", step, name, played)
        trainer.add_metrics("", task_metrics(config, source, label, count, played))


def task_metrics(
    config: Config, source: str, label: str, count: int, played: list[Trajectory]
) -> dict[str, Metric]:
    """Metrics of `count` episodes of each task of a held-out set, and the number of failures."""
    score, passed = f"avg@{count}", f"pass@{count}"
    if label == "greedy":
        score, passed = "greedy_score", "greedy_pass"
    metrics: dict[str, Metric] = {}
    for actor in config.trained:
        prefix = f"eval/{source}/{actor}/" if len(config.trained) > 1 else f"eval/{source}/"
        of_actor = [t for t in played if t.actor == actor]
        done = succeeded(of_actor)
        scores = held_out_metrics(done, score, passed, config.eval.pass_reward, count)
        for name, value in part_metrics(done).items():
            scores[f"{label}_{name}"] = value
        scores[f"{label}_failed"] = num_failed(of_actor)
        add_metrics(metrics, scores, prefix=prefix)
    return metrics


@torch.no_grad()
def loss_of_rows(learner: Learner, minibatches: list[Minibatch]) -> dict[str, Metric]:
    """The mean loss of samples that are not trained on; for pairs also their metrics."""
    metrics: dict[str, Metric] = {}
    for minibatch in minibatches:
        for batch in minibatch.batches:
            if learner.loss:
                losses, more = learner.losses(batch, learner.forward(batch))
            else:
                losses, more = -batch.advantages * learner.forward(batch)[0], {}
            add_metrics(metrics, more | {"loss": mean_of(losses)})
    return metrics
