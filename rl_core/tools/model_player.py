"""Shared by eval and collect: flags of a run -> models that play episodes, without a learner."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.config import RL, ActorConfig, Config, LoraConfig, checked, read_config
from rl_core.config.actors import URL
from rl_core.errors import counted
from rl_core.run.plan.model_errors import check_plays
from rl_core.run.plan.path_checks import ROWS, check_inputs
from rl_core.tools.parser import Parser
from rl_core.train import say_loading

if TYPE_CHECKING:
    from rl_core.data.task_rows import TaskSource
    from rl_core.run.evaluation.eval_folder import Cell
    from rl_core.sampling.actor import Speaker
    from rl_core.sampling.env import Env
    from rl_core.sampling.rollout import RolloutWorker
    from rl_core.types import Task, Trajectory

FLAGS = """All other flags are those of a run (rl-core train --help), such as --env_path, --data.eval, --data.train,
--max_tokens, --eval.samples, --eval.num_tasks. A model in a run's folder takes the run's config.yaml for them."""
NO_ENV = (
    "episodes need an environment{}; name its file by --env_path, such as --env_path math_answer"
)
PROGRESS_S = 30.0  # Seconds between lines while episodes are played.
# One process samples, whatever the run did that made the model.
ALONE = {
    "resume": "false",
    "rollout_ranks": 0,
    "max_staleness": 0,
    "rollout.stale_policy_frac": "0",
    "profile_step": 0,
}
ALONE |= {
    "cp": 1,
    "tp": 1,
    "ep": 1,
    "dp_replicate": 1,
    "learner.microbatch_tokens": 2**30,
    "learner.updates_per_epoch": 1,
}
ALONE |= {
    "learner.kernels": "default",
    "learner.offload": "none",
    "canary_tolerance": 0,
    "optim.name": "adamw",
}
# Models that only learning needs.
ALONE |= {"algo.teacher": "null", "algo.reference": "null", "critic.model": "null"}


def read_flags(parser: Parser, argv: list[str], out: str) -> tuple[argparse.Namespace, Config]:
    """A command's own flags, and those of a run. `parser` knows `models`, which stand before all
    flags."""
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        parser.error(
            "name a model first: a folder, a hub name, or NAME@URL of an OpenAI-compatible endpoint"
        )
    options, flags = parser.parse_known_args(argv)
    if len(options.models) == 1:  # Of several, one that fails leaves the others their scores.
        check_plays(options.models[0])
    is_of_run = any(config_files(model) for model in options.models)
    if not names_env(flags) and not is_of_run:
        raise ValueError(NO_ENV.format(""))
    if is_of_run:  # Reading a run's config.yaml imports torch.
        say_loading()
    before = next(filter(None, map(flags_of_run, options.models)), None)
    if before is None:
        check_env_is_named(options.models[0], flags)
        has_model = any(re.match(r"--(model|actors\.[^.]+\.(model|api))\b", flag) for flag in flags)
        before = [] if has_model else ["--model", options.models[0]]
    config = config_to_play([*before, *flags], out)
    if not config.is_rl or not config.env_path:
        raise ValueError(
            f"--algorithm {config.algorithm} has no episodes to play; name an environment by "
            "--env_path"
        )
    # Rows of a run's config.yaml may be gone and not be needed.
    named = [split for split in ROWS if any(re.match(rf"--data\.{split}\b", f) for f in flags)]
    check_inputs(config, named)
    if not is_of_run:
        say_loading()
    from rl_core.run.display.terminal import quiet

    quiet()  # Before rows are read.
    return options, config


def config_to_play(flags: list[str], out: str) -> Config:
    """The configuration of a run in one process, without all that only learning needs."""
    alone = (f"--{name}={value}" for name, value in ALONE.items())
    config = read_config([*flags, *alone, f"--out={out}"])
    envs = {name: replace(env, teacher=None) for name, env in config.envs.items()}
    actors = dict(map(without_learning, config.actors.items()))
    return checked(replace(config, actors=actors, envs=envs))


def names_env(flags: list[str]) -> bool:
    return any(re.match(r"--(env_path|config)\b", flag) for flag in flags)


def config_files(model: str) -> list[Path]:
    """config.yaml of the run that a model is, or that made it."""
    files = [folder / "config.yaml" for folder in (Path(model), Path(model).parent.parent)]
    return [file for file in files if file.is_file()]


def check_env_is_named(model: str, flags: list[str]) -> None:
    """Raises ValueError if no flag names the environment, which a run of RL has in its config."""
    if names_env(flags) or not config_files(model):
        return
    from rl_core.run.saving.resumed_config import read_config

    of_run = [read_config(file).get("algorithm") for file in config_files(model)]
    has_none = f": {model} is of a run of --algorithm {of_run[0]}, without one"
    raise ValueError(NO_ENV.format(has_none))


def without_learning(item: tuple[str, ActorConfig]) -> tuple[str, ActorConfig]:
    """An actor and its settings without those by which it alone learned. The engine computes in its
    dtype."""
    name, actor = item
    learner = {key: value for key, value in actor.learner.items() if key == "dtype"}
    return name, replace(actor, learner=learner, optim={}, algo={}, critic={}, ranks=None)


def flags_of_run(model: str) -> list[str] | None:
    """--config of the reinforcement learning that made a model; None if there is none."""
    for path in config_files(model):
        if (path.parent / "hf").is_dir():
            from rl_core.run.saving.resumed_config import read_config

            return ["--config", str(path)] if read_config(path).get("algorithm") in RL else None
    return None


def with_model(config: Config, model: str) -> tuple[Config, list[str]]:
    """(the configuration in which `model` plays, the names of the actors that it is). The folder of
    a run is all actors that the run trained, RUN/hf/NAME is NAME, any other model the first that is
    trained."""
    from rl_core.run.plan.engine import choose_engine

    config = choose_engine(config, 1)
    folder, names = Path(model), config.trained[:1]
    if (folder / "hf").is_dir():
        names = config.trained
    elif folder.parent.name in ("hf", "best") and folder.name in config.actors:
        names = [folder.name]
    api_model, _, url = model.rpartition("@")
    is_api = bool(api_model) and re.match(URL.removesuffix("/?"), url) is not None
    actors = dict(config.actors)
    for name in names:
        actor = replace(
            actors[name], model=model, lora_base=None, lora=LoraConfig(), engine_urls=None, api=None
        )
        if is_api:
            actor = replace(actor, model=api_model, api=url, train=False)
        elif (folder / "hf").is_dir():
            actor = replace(actor, model=str(folder / "hf" / name))
        actors[name] = actor
    return replace(config, actors=actors), names


@asynccontextmanager
async def player(
    config: Config, envs: dict[str, Env], sources: Sequence[TaskSource]
) -> AsyncIterator[Player]:
    """Engines of these actors. Raises ValueError for a model that cannot play, and for prompts that
    are too long."""
    from rl_core.actors import make_speaker
    from rl_core.data.tasks.row_lengths import check_lengths
    from rl_core.engines.factory import EngineFactory
    from rl_core.engines.lease import DeviceLease
    from rl_core.run.plan.model_checks import make_chats
    from rl_core.run.process.joining import init_ranks
    from rl_core.sampling.episode_runner import EpisodeRunner
    from rl_core.sampling.rollout import RolloutWorker

    chats, endpoints = make_chats(config)
    for source in sources if chats else ():
        check_lengths(config, envs, chats, None, source)
    for endpoint in endpoints.values():
        endpoint.ping()
    ranks = init_ranks(config.timeout_s, device_name=config.device)
    maker = EngineFactory(config)
    engines = maker.make_all(chats, {}, ranks)
    made = [engine for engine in dict.fromkeys(engines.values()) if engine is not None]
    lease = DeviceLease() if maker.weights.takes_turns else None
    speakers: dict[str, Speaker] = {**endpoints}
    for name, chat in chats.items():
        adapter = maker.weights.adapter_of(name)
        speakers[name] = make_speaker(config, name, chat, lease, engines[name], adapter)
    actors = {name: speakers[name] for name in config.actors}
    group_player = EpisodeRunner(envs, actors, config.rollout)
    worker = RolloutWorker(group_player, ranks, config.timeout_s)
    try:
        for engine in made:
            await engine.wake()
            if lease:
                await engine.sleep()
        yield Player(config, worker, chats)
    finally:
        for speaker in (worker, *endpoints.values(), *made):
            await speaker.close()


class Player:
    """Plays groups of episodes, as the evaluations of a run do."""

    def __init__(self, config: Config, worker: RolloutWorker, chats: dict):
        self.config, self.worker, self.chats = config, worker, chats

    async def play(
        self,
        tasks: list[Task],
        size: int,
        sampling: dict[str, float] | None,
        batch: str,
        label: str,
        first: int = 0,
        cell: Cell | None = None,
    ) -> list[Trajectory]:
        """`size` episodes of each task; `sampling`: as in make_group(). `cell`: has some of them
        already, and keeps the others. Raises RunError if too many fail."""
        from rl_core.run.failure_limit import refuse_failures
        from rl_core.sampling.groups import make_group

        config, position = self.config, {"batch": batch, "label": label, "size": size}
        groups, played = [], []
        for number, task in enumerate(tasks, first):
            group = make_group(config, task, sampling, number=number, **position)
            known = cell.find(group) if cell else None
            if known is None:
                groups.append(group)
            played += known or []
        self.worker.submit(groups)
        said_at = time.monotonic()
        for number in range(len(groups)):
            if time.monotonic() - said_at >= PROGRESS_S:
                said_at = time.monotonic()
                done = f"{label}: {number:,} of {counted(len(groups), 'task')}"
                print(done, file=sys.stderr, flush=True)
            [group] = await self.worker.collect(1, label=label)
            if cell:
                cell.add(group)
            played += group.trajectories
        played.sort(key=lambda t: (t.group_id, t.index, t.actor))
        most = config.rollout.max_failed_fraction
        refuse_failures(played, {}, most, label, self.worker.ranks, min_rows=1)
        return played
