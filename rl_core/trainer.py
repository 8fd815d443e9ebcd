"""The loop, as a class that holds the state of a run. Each step runs

    draw_groups() -> submit() -> RolloutWorker: pending -> running -> done -> collect()
         ^                                        |  ^                           |
         |                      Actor.generate()  |  | completions              v
    TaskSource                                    v  |           advantages -> TrainingSamples
                                                 Engine <- sync() <- Learner <-- learn()

    waits                    for                               until
    collect()                the groups of a step, all ranks   a group ends on any rank
    an episode               its engine                        the completion, or resume()
    actor.learning()         engines to leave the device       Device.sleep() returns
    actor.sync()             every rank (a collective)         the last rank enters it
    log_metrics()            every rank (a collective)         the last rank enters it

With max_staleness 0 the worker is idle while learners learn. Otherwise episodes of later steps
pause for learn() and sync(), or continue if other ranks hold the engines (--rollout_ranks).
Plugins extend the loop: comments at the calls below name the plugins that act there, in order.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import replace

from rl_core.actors import make_actors
from rl_core.data.tasks.cursor import TaskCursor
from rl_core.distributed import Ranks, barrier
from rl_core.learners import make_learners
from rl_core.learning.options import step_samples
from rl_core.metrics import Metric, add_metrics
from rl_core.plugin import NoEpisodes
from rl_core.run.options import make_plugins
from rl_core.run.phase_timer import PhaseTimer
from rl_core.run.plan.plan import Plan
from rl_core.run.run_folder import RunLog
from rl_core.sampling.actor import Speaker
from rl_core.sampling.groups import Group, training_group
from rl_core.sampling.options import make_worker
from rl_core.sampling.rollout import sorted_trajectories
from rl_core.types import JSONObject, TrainingSample


class Trainer:
    """A run with its models, on a rank that learns."""

    def __init__(self, plan: Plan, ranks: Ranks):
        """Loads the models and makes the objects that live as long as the run."""
        config = plan.config
        self.plan, self.config, self.ranks = plan, config, ranks
        self.out = config.folder
        self.phases = PhaseTimer(ranks)
        for endpoint in plan.endpoints.values():
            endpoint.ping()
        self.plugins = make_plugins(self)

        self.checkpoint = None
        if config.resume:
            from rl_core.run.saving.resume import load_checkpoint, newest_intact

            self.checkpoint = newest_intact(self.out / "checkpoints", ranks)
        algorithms = plan.local_algorithms
        self.learners = make_learners(config, algorithms, ranks, plan.served, plan.custom)
        state: JSONObject = {"step": 0, "position": 0, "to_evaluate": config.eval_every > 0}
        if self.checkpoint:
            state = load_checkpoint(self.checkpoint, self.learners, True)
        self.log = RunLog(self.out, ranks)
        barrier(ranks)  # All folders exist.

        self.step: int = state["step"]  # Number of completed steps.
        self.first_step = self.step  # Steps completed before this process started.
        self.cursor = TaskCursor(state, plan.num_tasks)
        self.metrics: dict[str, Metric] = {}  # Metrics of the current step.
        self.reduced_flags: dict[str, float] = {}  # Last logged values, equal on all ranks.
        self.ended_by = ""  # Reason to end the run after this step.

        self.actors = make_actors(plan, self.learners, ranks)
        self.device = next(iter(self.actors.values())).device
        self.worker = make_worker(config, plan.envs, self.speakers, ranks)
        for plugin in self.plugins:
            plugin.load(state)
        self.end_of_step()

    @property
    def speakers(self) -> dict[str, Speaker]:
        """Objects that hooks call, by the name of the actor."""
        return {name: a.speaker for name, a in self.actors.items() if a.speaker is not None}

    @property
    def signal(self) -> int:
        """The number of a signal that any rank got, 0 if none."""
        return int(self.reduced_flags.get("keep/signal", 0))

    async def fit(self) -> None:
        """Runs all remaining steps."""
        await self.start()
        while self.step < self.config.num_steps and not self.ended_by:
            try:
                metrics = await self.train_step()
            except NoEpisodes:  # A signal ends a run with --online that has no rated sessions.
                self.metrics = {}
                self.log_metrics()  # Ranks agree on the signal.
                await self.call("give_up")
                break
            # The terminal and trackers write the line of the step, then Evaluation evaluates,
            # Signals may end the run, and the Checkpointer saves.
            await self.call("after_step", self.step, metrics)
        if not self.ended_by:
            # WeightRecovery and Canary check the last weights, RunFiles waits for the last file,
            # and the Checkpointer exports models if no step was left.
            await self.call("finish")

    async def start(self) -> None:
        for learner in self.learners.values():
            learner.leave_device()
        await self.device.begin()
        for name in self.learners:
            async with self.actors[name].learning():
                await self.sync(name, self.step)
        await self.resume()
        # SignalHandler installs its handlers.
        await self.call("before_start")
        # Evaluation evaluates the initial weights, and a signal meanwhile ends the run.
        await self.call("start")

    async def train_step(self) -> dict[str, float]:
        """Runs one step and returns its metrics, which are equal on all ranks."""
        step = self.step
        self.metrics = {}
        await self.call("before_step", step)
        with self.timed("step"):
            with self.timed("generate" if self.config.is_rl else "rows"):
                samples = await self.sample()
            await self.call("on_samples", step, samples)
            for name in self.learners:
                # An actor that does not learn in this step drops its samples.
                if (step + 1) % self.config.actors[name].update_every:
                    continue
                async with self.actors[name].learning():
                    with self.timed("learn"):
                        # Canary compares the learner's logprobs with the engine's.
                        await self.call("before_learn", name, step)
                        await self.learn(name, samples[name])
                    with self.timed("sync"):
                        await self.sync(name, step + 1)
            await self.call("after_learn", step)
            self.step += 1
            await self.resume()
        self.end_of_step()
        await self.call("before_log", self.step)
        return self.log_metrics()

    async def sample(self) -> dict[str, list[TrainingSample]]:
        """This rank's training samples of the step, by trained actor."""
        plan, step = self.plan, self.step
        if plan.sft_dataset:
            positions = self.cursor.draw(self.config.tasks_per_step)
            samples = plan.sft_dataset.samples_at(plan.train.task, positions, self.ranks)
            return {self.config.trained[0]: samples}
        # WeightRecovery resends weights to engines that lost them; Canary samples fixed prompts.
        await self.call("before_rollout", step)
        groups = await self.rollout()
        await self.device.sleep()
        trajectories = sorted_trajectories(groups)
        # RunFiles writes the episodes, and FailureLimit may end the run.
        await self.call("on_episodes", step + 1, f"step {step + 1}", trajectories)
        await self.call("after_rollout", step, groups)
        advantage_fns = {name: env.advantage_fn for name, env in plan.envs.items()}
        return step_samples(self.config, plan.algorithms, trajectories, advantage_fns, self.ranks)

    async def rollout(self) -> list[Group]:
        """This rank's groups of a step."""
        # Groups of a step and of max_staleness further steps may have begun.
        ahead, every = self.config.max_staleness, self.config.tasks_per_step
        first = self.step if self.step == self.first_step else self.step + ahead
        last = min(self.step + ahead + 1, self.config.num_steps)
        if self.config.online.on:  # Sessions come by refill().
            every = 0
        self.worker.submit(self.draw_groups(every * max(0, last - first)))
        groups = await self.collect(every)
        for plugin in self.plugins:
            groups += await plugin.refill(groups)
        return groups

    async def collect(self, num_groups: int) -> list[Group]:
        """This rank's share of the `num_groups` oldest groups, or of all where fewer are left."""
        num_groups = min(num_groups, len(self.worker.pending))
        return await self.worker.collect(num_groups, self.step - self.config.max_staleness)

    def draw_groups(self, num_groups: int) -> list[Group]:
        """Groups of the next tasks in the data."""
        positions = self.cursor.draw(num_groups)
        return [training_group(self.config, n, self.plan.train.task(n)) for n in positions]

    async def learn(self, name: str, samples: list[TrainingSample]) -> None:
        """Runs one step of a learner. With engines on other ranks, or clients that must be
        answered, the step runs in a thread."""
        learn = self.actors[name].learn
        if self.ranks.rollout_ranks or self.config.online.on:
            metrics = await asyncio.to_thread(learn, samples, self.step)
        else:
            metrics = learn(samples, self.step)
        self.add_metrics("", metrics)

    async def sync(self, name: str, version: int) -> None:
        await self.actors[name].sync(version)
        await self.call("after_sync", name, version)

    async def resume(self) -> None:
        """Lets groups continue, and new groups begin, with the new weights."""
        self.worker.version = self.step
        await self.device.resume()

    async def call(self, hook: str, *args: object) -> None:
        for plugin in self.plugins:
            await getattr(plugin, hook)(*args)

    def end(self, reason: str) -> None:
        """Ends the run after this step. Every rank must call it."""
        self.ended_by = reason

    def timed(self, phase: str) -> AbstractContextManager[None]:
        return self.phases.timed(phase, self.metrics)

    def add_metrics(self, prefix: str, metrics: dict[str, Metric]) -> None:
        add_metrics(self.metrics, metrics, prefix=prefix)

    def log_metrics(self) -> dict[str, float]:
        """Reduces metrics over ranks, which use the values to save and stop together."""
        for plugin in self.plugins:
            self.add_metrics("keep/", plugin.reduced_flags())
        self.reduced_flags = self.log.write(self.step, self.metrics)
        return {n: value for n, value in self.reduced_flags.items() if not n.startswith("keep/")}

    def read_data_state(self) -> JSONObject:
        """The position in the data, and positions that were drawn but not trained on."""
        unfinished = [group.position for group in self.worker.pending.values()]
        return self.cursor.state(unfinished)

    def end_of_step(self) -> None:
        """Notes the position in the data, for a checkpoint, and the step in which --num_epochs end:
        dynamic sampling draws more tasks than a step has."""
        self.data_state = self.read_data_state()
        if self.plan.num_tasks is not None:
            left = self.plan.num_tasks - self.cursor.position + len(self.data_state["pending"])
            more = math.ceil(max(0, left) / self.config.tasks_per_step)
            self.config = replace(self.config, num_steps=self.step + more)

    async def close(self) -> None:
        """Closes everything that the run started."""
        async with AsyncExitStack() as stack:  # Closes the others if one raises.
            # Plugins are pushed last and closed first, so that signals are as before the run.
            for speaker in (*self.plan.endpoints.values(), *self.device.engines, self.worker):
                stack.push_async_callback(speaker.close)
            for plugin in self.plugins:
                stack.push_async_callback(plugin.close)

    def after_run(self) -> None:
        """Runs on the rank that writes, when no other rank waits any more: RunFiles writes the
        report and prints the summary."""
        for plugin in self.plugins:
            plugin.after_run()
