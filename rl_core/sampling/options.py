"""Options of rollouts: staleness, a fixed order, prompts of teachers."""

from __future__ import annotations

from collections.abc import Mapping

from rl_core.config import Config
from rl_core.distributed import Ranks
from rl_core.sampling.actor import Speaker
from rl_core.sampling.env import Env
from rl_core.sampling.episode_runner import EpisodeRunner
from rl_core.sampling.rollout import RolloutWorker


def make_worker(
    config: Config, envs: Mapping[str, Env], speakers: Mapping[str, Speaker], ranks: Ranks
) -> RolloutWorker:
    """The rollout worker of a rank. `speakers`: what hooks address, by the name of the actor."""
    window = replays = None
    if config.deterministic:
        from rl_core.sampling.deterministic_rollouts import Window

        window = Window()
    if config.deterministic or config.max_staleness:
        from rl_core.sampling.resumable_rollouts import Replays

        replays = Replays(window)
    after_group = None
    if any(config.of(name).algo.teacher for name in config.trained):
        from rl_core.sampling.teacher_prompts import TeacherPrompts, teacher_limits

        limits = teacher_limits(config)
        after_group = TeacherPrompts(limits) if limits else None
    runner = EpisodeRunner(envs, speakers, config.rollout, after_group, replays)
    return RolloutWorker(runner, ranks, config.timeout_s)
