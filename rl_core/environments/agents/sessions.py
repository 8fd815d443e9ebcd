"""Sessions of outside programs, which learn from the rewards that their clients send.

    start -> open: requests -> end -> waiting for a reward -> rated -> trained in a step
                                                          `-> left out, with a reason

Every event is in the session's file before its client hears of it, so that a run that was killed
continues with the same keys, turns and rewards: restore() plays the requests again with the
completions of the file.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from rl_core.environments.agents import session_files
from rl_core.environments.agents.endpoint import DIALECTS, EndpointServer
from rl_core.environments.agents.requests import Refusal, Reply, Request
from rl_core.environments.agents.session_files import RequestCoder, RestoredTurns
from rl_core.environments.agents.session_scores import RatedEndpoint, Scorer, known_parts
from rl_core.environments.agents.tree import Attempt, Tree, digest_of
from rl_core.sampling.actor import EpisodeActors
from rl_core.sampling.engine import EngineDied
from rl_core.types import JSON, JSONObject, Trajectory

if TYPE_CHECKING:
    from rl_core.config import OnlineConfig

DIALECT_AT = {dialect.PATH: dialect for dialect in DIALECTS}
PREFIXES = ("chatcmpl-", "resp_", "msg_")  # Of a reply's id in each dialect.
MAX_OVER = 10_000  # Keys of sessions that are over, which get 410 instead of 401.
MAX_TEXTS = 100  # Texts of feedback in one session.
TICK_S = 0.2
FATES = ("start", "step", "untaken", "left_out")  # The last of these events holds.


@dataclass(eq=False, kw_only=True)
class OnlineSession(RatedEndpoint):
    """The endpoint of one client. `api_key` is the key's hash."""

    sessions: Sessions
    turns: RestoredTurns
    file: Path
    used_s: float  # Time of the last request.
    ended_s: float = 0.0  # 0 while it is open.
    coder: RequestCoder = field(default_factory=RequestCoder)
    scoring: asyncio.Task | None = None
    trajectories: list[Trajectory] = field(default_factory=list)  # Once it is rated.

    @property
    def is_open(self) -> bool:
        return not self.ended_s

    @property
    def is_scored(self) -> bool:
        return self.scoring is None or self.scoring.done()

    @property
    def is_rated(self) -> bool:
        return bool(self.trajectories) and self.is_scored

    @property
    def is_asking(self) -> bool:
        """True while a turn is sampled."""
        return any(tree.is_asked for tree in self.trees.values())

    @property
    def oldest_version(self) -> int:
        turns = [turn for t in self.trajectories for turn in t.turns]
        return min(turn.completion.policy_version for turn in turns)

    @property
    def is_live(self) -> bool:
        """True until a step has the session, or it is left out. Its file may be deleted then."""
        return self.number in self.sessions.live

    def refuse_unless(self, is_so: bool) -> None:
        if not is_so:
            raise Refusal(f"{self.id} is over", status=410, code="session_over")

    def write(self, event: str, **facts: JSON) -> None:
        if self.is_live and not self.sessions.is_restoring:
            session_files.append(self.file, {"event": event, "time": time.time(), **facts})

    async def attempt(self, request: Request) -> Attempt:
        """See Endpoint. Waits while a step learns."""
        self.refuse_unless(self.is_open)
        await self.sessions.wait_for_engine()
        self.refuse_unless(self.is_open)
        self.used_s = time.time()
        for tree in self.trees.values():
            tree.failure = None  # replies() has started the engine again.
        return await super().attempt(request)

    async def replies(self, attempt: Attempt) -> list[Reply]:
        """See Endpoint. Starts an engine that died again."""
        try:
            return await attempt.replies()
        except EngineDied as error:
            await self.sessions.revive(self.players)
            text = "the engine died and was started again; send the request again"
            raise Refusal(text, status=502, code="engine_died") from error

    def store(self, dialect: ModuleType, request: Request, replies: list[Reply]) -> None:
        """See Endpoint. Writes the replies to the file before they are sent. Raises Refusal if the
        session ended after they were sampled."""
        self.refuse_unless(self.is_open)
        wanted, known = {*map(id, replies)}, {*self.nodes.values()}
        new = [node for node in self.tree_of(request).nodes if id(node.reply) in wanted]
        if new := [node for node in new if node not in known]:
            completions = [node.snapshot.turns[-1].completion for node in new]
            self.write(
                "reply",
                dialect=dialect.PATH,
                request=self.coder.encode(request),
                completions=[session_files.as_json(each) for each in completions],
            )
            for node in new:  # Their ids follow from the order in the file.
                node.reply.id = f"{self.id}.{len(self.nodes) + 1}"
                self.nodes[node.reply.id] = node
        self.used_s = time.time()
        super().store(dialect, request, replies)

    def note_sent(self, attempt: Attempt) -> None:
        """See Endpoint. Writes how much of the replies the connection took."""
        if attempt.is_done:
            for node in attempt.nodes.result():
                if node.is_read:
                    sent = node.reply.num_sent
                    self.write("sent", reply=node.reply.id, num=None if sent == math.inf else sent)

    def rate(self, reward: JSON, text: JSON, interaction: JSON) -> None:
        """Keeps the reward of a reply, or feedback on it as text; of the last reply if
        `interaction` is None. Raises Refusal."""
        self.refuse_unless(self.is_live)  # The body may have come slowly.
        reply_id = next(reversed(self.nodes), "") if interaction is None else str(interaction)
        for prefix in PREFIXES:
            reply_id = reply_id.removeprefix(prefix)
        if reply_id not in self.nodes:
            named = "no reply yet" if interaction is None else f"no reply {reply_id[:80]!r}"
            status = 400 if interaction is None else 404
            raise Refusal(f"{self.id} has {named}", status=status, code="not_found")
        event: JSONObject = {"reply": reply_id, "named": interaction is not None}
        if reward is None:
            if not isinstance(text, str) or not text or len(self.texts) >= MAX_TEXTS:
                raise Refusal(
                    "give `reward`, a number or a dict of them, or `text`, of which a session has "
                    f"at most {MAX_TEXTS}"
                )
            if not self.sessions.scorer.reads_text:
                raise Refusal("nothing scores a text; add feedback_fn or --online.judge")
            event["text"] = text
        else:
            reward = float(reward) if isinstance(reward, bool) else reward
            try:
                event["parts"] = known_parts(reward, "client", "the reward")
            except ValueError as error:
                raise Refusal(str(error)) from None
        self.write("reward", **event)
        self.keep(event)
        if not self.is_open:
            self.score_soon()

    def end(self, info: JSON = None) -> None:
        if self.is_open:
            self.write("end", info=info)
            self.ended_s, self.info = time.time(), info
            for tree in self.trees.values():
                tree.cancel()
            self.players.close()
            self.score_soon()

    def score_soon(self) -> None:
        if self.sessions.is_restoring:
            return
        if self.scoring is not None:
            self.scoring.cancel()
        self.scoring = asyncio.ensure_future(self.score())

    async def score(self) -> None:
        """Rates the session, if its client or a hook does. A hook that fails leaves it out."""
        if not any(tree.num_read for tree in self.trees.values()):
            self.sessions.leave_out(self, "no reply was read")
            return
        try:
            trajectories = await self.sessions.scorer.trajectories(self)
        except Exception as error:
            text = " ".join(str(error).split()) or type(error).__name__
            self.server.report(f"the scores of a session: {text}")
            self.sessions.leave_out(self, f"its scoring failed: {text}")
            return
        if trajectories:
            self.trajectories = trajectories
            self.write("rated", reward=trajectories[-1].reward)


@dataclass(kw_only=True)
class Sessions:
    """All sessions of a run."""

    rollouts: Path  # The run's rollouts/.
    config: OnlineConfig
    # (number of a session) -> its actors.
    make_players: Callable[[int], EpisodeActors]
    scorer: Scorer
    next_number: int = 0
    step: int = 0  # Number of completed steps, for files.
    by_key: dict[str, OnlineSession] = field(default_factory=dict)  # Hash of the key -> session.
    live: dict[int, OnlineSession] = field(default_factory=dict)  # Sessions that are not over.
    over: dict[str, str] = field(default_factory=dict)  # Hash of the key -> session that is over.
    over_since: dict[int, int] = field(default_factory=dict)  # Number of a session -> step.
    counts: Counter[str] = field(default_factory=Counter)  # Events since the last step.
    is_restoring: bool = False
    is_closing: bool = False  # The run ends: no request is taken.
    gate: asyncio.Event = field(default_factory=asyncio.Event)  # Set unless a step learns.
    reviving: asyncio.Lock = field(default_factory=asyncio.Lock)
    fatal: EngineDied | None = None  # An engine died and cannot start again.

    def __post_init__(self) -> None:
        (self.rollouts / session_files.FOLDER).mkdir(parents=True, exist_ok=True)
        self.gate.set()

    @property
    def num_open(self) -> int:
        return sum(session.is_open for session in self.live.values())

    @property
    def rated(self) -> list[OnlineSession]:
        """Rated sessions that no step has, in the order of their starts."""
        return [session for session in self.live.values() if session.is_rated]

    def start(self, server: EndpointServer, task_id: str, key: str) -> OnlineSession:
        """A new session. One that has the same key ends. Raises Refusal."""
        self.check_taking()
        earlier = self.by_key.get(key)
        is_refresh = earlier is not None and earlier.is_open
        if self.num_open - is_refresh >= self.config.max_sessions:
            text = f"{self.num_open} sessions are open, as --online.max_sessions allows"
            raise Refusal(text, status=429, code="rate_limit_exceeded", retry_after_s=30)
        if earlier is not None:
            earlier.end()
            earlier.write("rebound")
        self.over.pop(key, None)
        session = self.make(server, self.next_number, task_id, key)
        session.write("start", number=session.number, task_id=task_id, key=key)
        self.counts["started"] += 1
        return session

    def make(self, server: EndpointServer, number: int, task_id: str, key: str) -> OnlineSession:
        self.next_number = max(self.next_number, number + 1)
        players, turns = self.make_players(number), RestoredTurns()
        trained = {name: actor for name, actor in players.items() if actor.is_trainable}
        for actor in trained.values():
            actor.replay = turns
        session = OnlineSession(
            server=server,
            address=server.address,
            api_key=key,
            trees={name: Tree(actor, players.max_turns) for name, actor in trained.items()},
            program="a session",
            sessions=self,
            number=number,
            task_id=task_id,
            players=players,
            turns=turns,
            file=self.file(number),
            used_s=time.time(),
        )
        for name, tree in session.trees.items():
            tree.note_truncated = partial(session.write, "truncated", actor=name)
        self.live[number] = self.by_key[key] = session
        return session

    def check_taking(self) -> None:
        if self.is_closing:
            text = "the run ends; ask again after its --resume"
            raise Refusal(text, status=503, code="closing", retry_after_s=30)

    async def wait_for_engine(self) -> None:
        """Returns once no step learns. Raises Refusal after --online.wait_s."""
        self.check_taking()
        if self.gate.is_set():
            return
        with suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(self.gate.wait(), self.config.wait_s)
        self.check_taking()
        if not self.gate.is_set():
            text = f"a step has learned for longer than --online.wait_s={self.config.wait_s:g}"
            raise Refusal(text, status=429, code="rate_limit_exceeded", retry_after_s=10)

    async def revive(self, players: EpisodeActors) -> None:
        """Starts the engines of a session's actors again. Sets `fatal` if one cannot start."""
        async with self.reviving:
            try:
                for actor in players.values():
                    await actor.wake()
            except EngineDied as failure:
                self.fatal = failure

    def leave_out(self, session: OnlineSession, reason: str) -> None:
        """Ends a session that no step will have."""
        session.write("left_out", reason=reason, step=self.step)
        self.counts[reason.partition(":")[0]] += 1
        self.forget(session, self.step)

    def take(self, session: OnlineSession, step: int) -> None:
        """Notes that step number `step` trains a session."""
        session.write("step", step=step)
        self.forget(session, step)

    def forget(self, session: OnlineSession, step: int) -> None:
        self.over_since[session.number] = step
        self.live.pop(session.number, None)
        if self.by_key.get(session.api_key) is session:
            del self.by_key[session.api_key]
            self.over[session.api_key] = session.id
            while len(self.over) > MAX_OVER:
                del self.over[next(iter(self.over))]

    def tick(self) -> None:
        """Ends sessions that their clients forgot, and leaves out those without a reward."""
        now = time.time()
        for session in list(self.live.values()):
            is_late = now > session.ended_s + self.config.reward_s
            if session.is_open:
                if now > session.used_s + self.config.session_s and not session.is_asking:
                    session.end()
            elif is_late and not session.trajectories and session.is_scored:
                self.leave_out(session, "no reward came")

    def delete_until(self, step: int) -> None:
        """Deletes files of sessions that are over since this step or longer."""
        for number, over_since in list(self.over_since.items()):
            if over_since <= step:
                self.file(number).unlink(missing_ok=True)
                del self.over_since[number]

    def file(self, number: int) -> Path:
        return self.rollouts / session_files.FOLDER / f"{number:06d}.jsonl"

    async def restore(self, server: EndpointServer, step: int) -> None:
        """Restores the sessions of an earlier process that no step up to `step` has. Later steps
        are lost, and their sessions are trained again. Time limits begin anew. A damaged file is
        renamed to *.damaged, and its session is left out."""
        self.is_restoring, self.step = True, step
        refused: dict[int, str] = {}
        for number, file in session_files.session_files(self.rollouts):
            self.next_number = max(self.next_number, number + 1)
            try:
                if events := self.untrained_events(number, file):
                    await self.replay(server, number, events)
            except Refusal as refusal:
                # The run resumed with another chat template or a lower limit.
                refused[number] = refusal.message
            except (OSError, EngineDied):  # The file may be complete.
                raise
            except Exception:
                self.counts["its file is damaged"] += 1
                if number in self.live:
                    self.forget(self.live[number], step)
                file.rename(file.with_suffix(".damaged"))
        self.is_restoring = False
        for number, reason in refused.items():
            self.leave_out(self.live[number], f"cannot be restored: {reason}")
        for session in list(self.live.values()):
            session.used_s = time.time()
            if not session.is_open:
                session.ended_s = session.used_s
                session.score_soon()

    def untrained_events(self, number: int, file: Path) -> list[JSONObject]:
        """The events of a session's file, or [] if it is over."""
        session_files.drop_cut_line(file)
        events = session_files.read_events(file)
        if not events:  # A session whose start was cut has no client.
            file.unlink()
            return []
        fate = [each for each in events if each["event"] in FATES][-1]
        if fate["event"] == "left_out" or (fate["event"] == "step" and fate["step"] <= self.step):
            self.over_since[number] = fate["step"]
            self.over[events[0]["key"]] = f"session-{number:06d}"
            return []
        if fate["event"] == "step":
            # The step may come again with other sessions.
            session_files.append(file, {"event": "untaken", "time": time.time()})
        return events

    async def replay(self, server: EndpointServer, number: int, events: list[JSONObject]) -> None:
        session = self.make(server, number, events[0]["task_id"], events[0]["key"])
        for event in events[1:]:
            kind = event["event"]
            if kind == "reply":
                await self.replay_reply(session, event)
            elif kind == "sent":
                sent = math.inf if event["num"] is None else event["num"]
                session.nodes[event["reply"]].reply.num_sent = sent
            elif kind == "reward":
                session.keep(event)
            elif kind == "truncated":
                session.trees[event["actor"]].is_truncated = True
            elif kind == "rebound":  # Even if the file of the later session is gone.
                self.by_key.pop(session.api_key, None)
                self.over[session.api_key] = session.id
        for event in events:
            if event["event"] == "end":  # A reply that was sampled by then may follow.
                session.end(event["info"])

    async def replay_reply(self, session: OnlineSession, event: JSONObject) -> None:
        """Plays a request again, with its completions. The request was no retry of another
        request."""
        request = Request(**session.coder.decode(event["request"]))
        session.turns.completions = list(map(session_files.completion_of, event["completions"]))
        assert len(session.turns.completions) == request.num_replies, "none is sampled again"
        tree = session.tree_of(request)
        tree.count_overridden(request)
        replies = await tree.begin(request, digest_of(request)).replies()
        session.store(DIALECT_AT[event["dialect"]], request, replies)
