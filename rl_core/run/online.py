"""--online: a run that stays open. The writer's rank serves sessions of outside programs; a step
begins once enough of them are rated.

    waits          for                          until
    refill()       rated sessions               --tasks_per_step, the clock, or a signal
    a request      the step that learns         before_log(), or 429 after --online.wait_s
    other ranks    the writer's rank            the number of the step in the store
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from rl_core.data.tasks.online import SessionSource
from rl_core.distributed import SIGNAL_RECEIVED
from rl_core.environments.agents.online import OnlineServer
from rl_core.environments.agents.session_scores import Judge, Scorer
from rl_core.environments.agents.sessions import TICK_S, OnlineSession, Sessions
from rl_core.errors import counted
from rl_core.metrics import Sum
from rl_core.plugin import NoEpisodes, Plugin, RunState
from rl_core.sampling.actor import EpisodeActors
from rl_core.sampling.env import Env
from rl_core.sampling.groups import Group, make_group
from rl_core.types import JSONObject, Message, RunError, Task, counter_seed

ADMIN_KEY = "RL_CORE_ADMIN_KEY"  # Environment variable of the admin key.
KEY_FILE = "admin_key"  # In the run's folder, for its user alone, if the variable is not set.
POLL_S = 0.05
STEP, NO_STEP = 1, 2  # What the writer's rank sets in the store for each step.
DRAIN_S = 30.0  # After a signal, turns that are sampled have this time.


class Online(Plugin):
    def __init__(self, trainer: RunState):
        super().__init__(trainer)
        self.server: OnlineServer | None = None  # None on other ranks.
        self.clock: asyncio.Task | None = None
        self.next_number = 0

    @property
    def env(self) -> Env:
        return next(iter(self.trainer.plan.envs.values()))

    def load(self, state: JSONObject) -> None:
        self.next_number = state.get("next_session", 0)

    def state(self) -> JSONObject:
        return {"next_session": self.server.sessions.next_number if self.server else 0}

    async def start(self) -> None:
        """Restores the sessions of an earlier process, and serves."""
        trainer, config = self.trainer, self.trainer.config
        if not trainer.ranks.is_writer:
            return
        judge = config.online.judge
        sessions = Sessions(
            rollouts=trainer.out / "rollouts",
            config=config.online,
            make_players=self.players,
            scorer=Scorer(env=self.env, judge=judge_of(judge) if judge else None),
            next_number=self.next_number,
        )
        self.source = SessionSource(config, sessions)
        agents = replace(config.agents, host=config.online.host)
        self.server = OnlineServer(agents, config.online.port, sessions, admin_key(trainer.out))
        await sessions.restore(self.server, trainer.step)
        self.server.version = trainer.step
        try:
            await self.server.start()
        except OSError as error:
            raise RunError(
                f"--online.port={config.online.port} at {config.online.host}: {error.strerror}; "
                "name another port, or 0 for a free one"
            ) from error
        key = f"${ADMIN_KEY}" if os.environ.get(ADMIN_KEY) else trainer.out / KEY_FILE
        restored = (
            f"; {len(sessions.live)} open or waiting sessions restored" if sessions.live else ""
        )
        trainer.log.say(f"open at {self.server.address}, admin key in {key}{restored}")
        self.clock = asyncio.create_task(self.tick())

    async def tick(self) -> None:
        """Ends sessions by the clock, until close() cancels it."""
        assert self.server is not None
        while True:
            await asyncio.sleep(TICK_S)
            self.server.sessions.tick()

    def players(self, number: int) -> EpisodeActors:
        """The actors of a session, with the sampling parameters of training."""
        trainer, env = self.trainer, self.env
        task = Task(id="session", env=env.name, row={}, messages=[])
        group = make_group(
            trainer.config, task, batch="online", number=number, size=1, position=number
        )
        seed = counter_seed(trainer.config.seed, "online", number)
        players = EpisodeActors(
            trainer.speakers, group.params, seed, f"online/{number:06d}", env.max_turns
        )
        for name, player in players.items():
            assert player.params is not None
            player.params = replace(player.params, **group.own_params.get(name, {}))
        return players

    async def refill(self, groups: list[Group]) -> list[Group]:
        """This rank's groups of the step: all on the writer's rank, none on others."""
        step, ranks = self.trainer.step, self.trainer.ranks
        decided = f"online/{step}"
        if self.server is None:
            while not (decision := ranks.number(decided)):  # noqa: ASYNC110  (set by another process)
                await asyncio.sleep(POLL_S)
            if decision == NO_STEP:
                raise NoEpisodes
            return []
        sessions = self.server.sessions
        while (chosen := self.source.take(step, is_last=False)) is None:
            if sessions.fatal:
                raise RunError(f"an engine died and cannot be started again: {sessions.fatal}")
            if ranks.number(SIGNAL_RECEIVED):
                await self.drain()
                if (chosen := self.source.take(step, is_last=True)) is None:
                    ranks.set_number(decided, NO_STEP)
                    raise NoEpisodes
                break
            await asyncio.sleep(POLL_S)
        if not ranks.rollout_ranks:
            sessions.gate.clear()
        ranks.set_number(decided, STEP)
        return [self.group(number, each) for number, each in enumerate(chosen)]

    def progress(self) -> str:
        """See Plugin. For example: 3 of 8 sessions rated, 2 open, 1 left out (no reward came)."""
        if self.server is None:
            return ""
        config, sessions = self.trainer.config, self.server.sessions
        num_open, num_rated = sessions.num_open, len(sessions.rated)
        wanted = counted(config.tasks_per_step * config.group_size, "session")
        facts = [f"{num_rated} of {wanted} rated", f"{num_open} open"]
        if num_waiting := len(sessions.live) - num_open - num_rated:
            facts.append(f"{num_waiting} ended without a reward yet")
        for reason, num in sessions.counts.items():
            if reason != "started":
                facts.append(f"{num} left out ({reason})")
        return ", ".join(facts)

    async def drain(self) -> None:
        """Takes no further request, and waits for turns that are sampled and sessions that are
        scored, at most DRAIN_S."""
        assert self.server is not None
        sessions = self.server.sessions
        sessions.is_closing = True
        until = time.monotonic() + DRAIN_S
        while any(each.is_asking or not each.is_scored for each in sessions.live.values()):
            if time.monotonic() > until:
                return
            await asyncio.sleep(POLL_S)

    def group(self, number: int, sessions: list[OnlineSession]) -> Group:
        first = sessions[0].trajectories[0]
        task = Task(id=first.task_id, env=first.env, row={}, messages=[])
        group = make_group(
            self.trainer.config,
            task,
            batch=f"train/{self.trainer.step:06d}",
            number=number,
            position=number,
            size=len(sessions),
        )
        group.version = min(session.oldest_version for session in sessions)
        for index, session in enumerate(sessions):
            for t in session.trajectories:
                t.group_id, t.index = group.id, index
            group.trajectories += session.trajectories
        return group

    async def before_log(self, step: int) -> None:
        """Lets requests continue with the new weights."""
        if self.server is None:
            return
        sessions = self.server.sessions
        self.server.version = sessions.step = step
        self.source.began_s = time.monotonic()
        counts, sessions.counts = sessions.counts, Counter()
        started = counts.pop("started", 0)
        numbers = {"started": started, "open": sessions.num_open, "left_out": counts.total()}
        self.trainer.add_metrics("online/", {name: Sum(num) for name, num in numbers.items()})
        for reason, num in counts.items():
            self.trainer.log.say(f"step {step}: {num} sessions left out: {reason}")
        sessions.gate.set()

    async def files(self, scratch: Path) -> list[Path]:
        """Deletes files of sessions that the last checkpoint has; see Sessions.delete_until()."""
        saved = sorted((self.trainer.out / "checkpoints").glob("step_??????"))
        if self.server is not None and len(saved) > 1:
            self.server.sessions.delete_until(int(saved[-2].name.removeprefix("step_")))
        return []

    async def close(self) -> None:
        if self.clock is not None:
            self.clock.cancel()
        if self.server is not None:
            for session in self.server.sessions.live.values():
                if session.scoring is not None:
                    session.scoring.cancel()
                for tree in session.trees.values():
                    tree.cancel()
            await self.server.close()


def judge_of(name: str) -> Judge:
    """A judge that scores replies by the user's feedback on them; `name`: its actor."""

    async def judged(actors: EpisodeActors, messages: list[Message], text: str) -> float:
        from rl_core.rewards.judges import judge, transcript

        rubric = f"The user, who has read the reply, says of it: {text}"
        question = transcript(messages[:-1])
        return await judge(actors[name], question, str(messages[-1].get("content")), rubric)

    return judged


def admin_key(out: Path) -> str:
    """The key of the environment variable, or that of the run's folder, which is made once."""
    if key := os.environ.get(ADMIN_KEY):
        return key
    file = out / KEY_FILE
    if not file.exists():
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as made:
            made.write(f"sk-admin-{secrets.token_urlsafe(24)}\n")
    return file.read_text().strip()
