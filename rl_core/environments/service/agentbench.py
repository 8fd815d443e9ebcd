"""`--env_path http+agentbench://host:port/TASK`: a task server of AgentBench (arXiv:2308.03688) as
a module with hooks, like any other environment. docs/service.md

Three kinds of servers are supported. The first answer shows the kind: the controller of the
function-calling edition names a session in a header; a worker of that edition without a controller
expects a session number from the client; the controller of editions 0.1 and 0.2 answers `output`
with the full history.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import ModuleType
from urllib.parse import parse_qsl, quote, urlsplit

import aiohttp

from rl_core.data.messages import shorten, with_text_arguments
from rl_core.data.thoughts import without_thoughts
from rl_core.errors import nearest
from rl_core.sampling.actor import Actor, EpisodeActors
from rl_core.sampling.conversation import Conversation
from rl_core.sampling.reward_parts import finite
from rl_core.types import JSON, JSONObject, Message, Row, Task, Trajectory

START_UP_S, CANCEL_S = 30.0, 5.0
RETRIES_S = (0.2, 1.0, 3.0, 9.0)  # Pauses before each retry of a request.
ASK_AGAIN = (406, 422)  # start_sample: no worker has room, or a worker needs a session number.
ROOM_S = 600.0  # Longest time that an episode waits for a worker with room.
MAX_BYTES = 16 << 20  # Largest size of one answer.
MAX_TURNS = 20
# Final status that the model's turns can lead to -> the metric that counts it. Any other status is
# a failure of the episode.
ENDS = {
    "completed": "completed",
    "task limit reached": "task_limit",
    "agent validation failed": "invalid",
    "agent invalid action": "invalid",
    "agent context limit": "context_limit",
}
# Keys of the score in a result of editions 0.1 and 0.2, in order of preference; ?score= overrides.
SCORES = ("reward", "is_correct", "result", "progress")
SETTINGS = ("train", "eval", "score", "overall", "timeout_s")


@dataclass(kw_only=True)
class TaskServer:
    """A task server's address and the settings of its URL."""

    url: str  # The URL without settings, for errors.
    api: str
    name: str
    ranges: dict[str, range] = field(default_factory=dict)  # Split -> positions in get_indices.
    score: str = ""
    overall: list[str] = field(default_factory=list)
    timeout_s: float = 600.0
    is_worker: bool = False  # No controller: the client chooses session numbers.

    def rows(self, split: str) -> list[Row]:
        """A row for each sample of the split. Raises ValueError."""
        split = split if split == "train" else "eval"
        rows = []
        indices = self.indices()
        for position, index in enumerate(indices):
            if self.split_of(position, index) == split:
                rows.append({"prompt": f"{self.name} {index}", "index": index})
        if not rows and split in self.ranges:
            raise ValueError(
                f"{self.url}: ?{split}= selects none of the server's {len(indices)} samples"
            )
        return rows

    def split_of(self, position: int, index: int | str) -> str:
        for split, positions in self.ranges.items():
            if position in positions:
                return split
        if "train" in self.ranges:
            return "none"
        if "eval" in self.ranges:
            return "train"
        is_held_out = zlib.crc32(f"{self.name}/{index}".encode()) % 10 == 0
        return "eval" if is_held_out else "train"

    def indices(self) -> list[int | str]:
        """Indices of all samples. Excludes -1, which stands for a task that the client sends."""
        try:
            indices = self.get(f"/get_indices?name={quote(self.name)}")
        except urllib.error.HTTPError as error:
            known = []
            with suppress(OSError, ValueError):
                known = sorted(self.get("/list_workers"))
            hint = nearest(self.name, known) if known else "look at the server's log"
            raise ValueError(f"{self.url}: get_indices: no such task ({error}); {hint}") from None
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self.url}: get_indices: {error}; start the task server, and name its host and "
                "port"
            ) from None
        is_index = [type(i) in (int, str) for i in indices] if type(indices) is list else []
        if not is_index or not all(is_index):
            raise ValueError(
                f"{self.url}: get_indices must return a list of numbers or strings, returned "
                f"{shorten(indices)}"
            )
        return [index for index in indices if index != -1]

    def get(self, verb: str) -> JSON:
        with urllib.request.urlopen(self.api + verb, timeout=START_UP_S) as reply:
            return json.loads(reply.read(MAX_BYTES))

    async def rollout(self, task: Task, actors: EpisodeActors) -> list[Trajectory]:
        """Plays the episode of a sample. Returns one trajectory for each history that the server
        rewrote. Raises ValueError, ConnectionError or TimeoutError for faults of the server, which
        are recorded as failures."""
        if len(actors.learners) != 1:
            raise ValueError(
                f"{self.url} needs exactly one trained actor, got {', '.join(actors.learners)}"
            )
        limit = aiohttp.ClientTimeout(total=self.timeout_s)
        # The server may close a kept-alive connection just when a request is sent.
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(timeout=limit, connector=connector) as http:
            session = BenchSession(server=self, http=http, index=task.row["index"])
            try:
                return await play(session, actors[actors.learners[0]])
            finally:
                await session.cancel()


@dataclass(kw_only=True)
class Step:
    """The server's messages and reward between two turns of the model."""

    status: str
    messages: list[Message]  # New messages; the full history if is_anew.
    tools: list[dict] | None
    reward: float
    metrics: dict[str, float]
    is_anew: bool


@dataclass(kw_only=True)
class BenchSession:
    """One sample in progress on the server."""

    server: TaskServer
    http: aiohttp.ClientSession
    index: int | str
    id: str = ""
    has_ended: bool = False
    history: list[Message] = field(default_factory=list)  # Used by editions 0.1 and 0.2 only.

    async def start(self) -> Step:
        """Waits while all workers are busy. Raises ConnectionError, TimeoutError or ValueError."""
        give_up = time.monotonic() + ROOM_S
        for pause_s in itertools.chain((0.1, 0.2, 0.5, 1.0, 2.0), itertools.repeat(5.0)):
            body = {"name": self.server.name, "index": self.index}
            if self.server.is_worker:
                self.id = str(secrets.randbits(31))
                body["session_id"] = int(self.id)
            status, headers, text = await self.post("start_sample", body)
            # Several episodes may get this answer at the same time.
            if status == 422 and "session_id" not in body:
                self.server.is_worker = True
                continue
            if status != 406:
                break
            self.id = ""
            if time.monotonic() + pause_s > give_up:
                raise TimeoutError(f"{self.server.url}: no worker had room for {ROOM_S:g} s")
            await asyncio.sleep(pause_s)
        answer = self.read("start_sample", status, text)
        session_id = headers.get("session_id", answer.get("session_id"))
        if session_id is not None:
            self.id = str(session_id)
        if not self.id:
            raise ValueError(f"{self.server.url}: the answer to start_sample lacks a session_id")
        return await self.step(answer)

    async def say(self, reply: Conversation) -> Step:
        """Sends the model's turn and returns the server's next step."""
        message = reply.messages[-1]
        if self.history:
            content = without_thoughts(message["content"])
            return await self.act({"status": "normal", "content": content})
        sent = {"role": "assistant", "content": without_thoughts(message.get("content") or "")}
        if message.get("tool_calls"):
            sent["tool_calls"] = list(map(sent_call, message["tool_calls"]))
        return await self.interact({"messages": [sent]})

    async def overflow(self) -> Step | None:
        """Reports a truncated turn and returns the server's next step. Returns None for the
        function-calling edition, which has no such status."""
        return await self.act({"status": "agent context limit"}) if self.history else None

    async def act(self, response: dict[str, str]) -> Step:
        return await self.interact({"agent_response": response})

    async def interact(self, body: JSONObject) -> Step:
        if self.history or self.server.is_worker:
            body["session_id"] = int(self.id)
        status, _, text = await self.post("interact", body)
        return await self.step(self.read("interact", status, text))

    async def cancel(self) -> None:
        """Frees the server's session if the sample has not ended. Ignores an unreachable server."""
        if not self.id or self.has_ended:
            return
        with suppress(asyncio.TimeoutError, ConnectionError, TimeoutError, ValueError):
            await asyncio.wait_for(self.post("cancel", {"session_id": int(self.id)}), CANCEL_S)

    async def post(self, verb: str, body: JSONObject) -> tuple[int, Mapping[str, str], str]:
        """(status, headers, text) of the answer. Resends a request only if its connection closed
        before an answer began: under load servers close connections before they read."""
        url, unanswered = self.server.url, ""
        for pause_s in (*RETRIES_S, None):
            try:
                answer = await self.post_once(verb, body)
                if unanswered and answer[0] >= 400 and answer[0] not in ASK_AGAIN:
                    raise ConnectionError(unanswered)  # The server had read the first request.
                return answer
            except TimeoutError:
                seconds = f"{self.server.timeout_s:g} s"
                raise TimeoutError(f"{url}: {verb} was not answered within {seconds}") from None
            except aiohttp.ClientError as error:
                unanswered = f"{url}: {verb}: {type(error).__name__}: {error}"
                if pause_s is None or not isinstance(error, aiohttp.ClientConnectionError):
                    raise ConnectionError(unanswered) from None
            await asyncio.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")

    async def post_once(self, verb: str, body: JSONObject) -> tuple[int, Mapping[str, str], str]:
        headers = {"session_id": self.id} if self.id else {}
        address = f"{self.server.api}/{verb}"
        async with self.http.post(address, json=body, headers=headers) as reply:
            read = b""
            try:
                async for chunk in reply.content.iter_chunked(1 << 16):
                    read += chunk
                    if len(read) > MAX_BYTES:
                        raise ValueError(
                            f"{self.server.url}: the answer to {verb} exceeds {MAX_BYTES} bytes"
                        )
            except aiohttp.ClientConnectionError as error:  # The server has read the request.
                raise aiohttp.ClientPayloadError(str(error)) from error
            return reply.status, reply.headers, read.decode(errors="replace")

    def read(self, verb: str, status: int, text: str) -> JSONObject:
        """Parses an answer as a JSON object."""
        url = self.server.url
        if status != 200:
            raise ConnectionError(f"{url}: {verb} failed with {status}: {shorten(text, 400)}")
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = text
        if not isinstance(answer, dict):
            raise ValueError(f"{url}: {verb} must answer a JSON object, answered {shorten(text)}")
        return answer

    async def step(self, answer: JSONObject) -> Step:
        if isinstance(answer.get("output"), dict):
            return await self.old_step(answer["output"])
        # Without a controller, a worker wraps the same answer in `env_out`.
        answer = answer.get("env_out", answer)
        messages = self.messages_of(answer.get("messages") or [])
        status = answer.get("status", "running")
        if answer.get("finish") and status == "running":
            status = "completed"
        self.check_status(status, answer)
        metrics = {}
        for name, value in (answer.get("metric") or answer.get("metrics") or {}).items():
            if type(value) in (int, float, bool):
                metrics[name] = float(value)
        return Step(
            status=status,
            messages=messages,
            tools=answer.get("tools") or None,
            reward=reward_of(answer.get("reward") or 0.0),
            metrics=metrics,
            is_anew=any(message["role"] == "assistant" for message in messages),
        )

    async def old_step(self, output: JSONObject) -> Step:
        """Reads a step of editions 0.1 and 0.2: no tools, and a reward at the end only."""
        history = self.messages_of(output.get("history") or [])
        status = output.get("status")
        self.check_status(status, output.get("result"))
        known = len(self.history)
        is_continued = history[:known] == self.history
        is_continued &= [m["role"] for m in history[known : known + 1]] == ["assistant"]
        self.history = history
        reward = 0.0
        if self.has_ended:
            reward = await self.score(output)
        return Step(
            status=status,
            messages=history[known + 1 :] if is_continued else history,
            tools=None,
            reward=reward,
            metrics={},
            is_anew=not is_continued,
        )

    async def score(self, output: JSONObject) -> float:
        """Reward of a result: the sum of the ?overall= values of calculate_overall() for this
        result alone, or the ?score= value, or the first key of SCORES; 0 without a result."""
        server, result = self.server, output.get("result")
        if server.overall:
            body = {"name": server.name, "results": [output | {"index": self.index}]}
            status, _, text = await self.post("calculate_overall", body)
            values = self.read("calculate_overall", status, text)
            return sum(reward_of(values.get(name)) for name in server.overall)
        if result is None and output["status"] != "completed":
            return 0.0
        if not isinstance(result, dict):
            return reward_of(result)
        names = [server.score] if server.score else SCORES
        for name in names:
            if name in result:
                return reward_of(result[name])
        raise ValueError(
            f"{server.url}: a result with {', '.join(result)} has no {' or '.join(names)}; name "
            "the score's key by ?score=, or values of calculate_overall by ?overall="
        )

    def messages_of(self, items: JSON) -> list[Message]:
        """Messages in the form that chat templates read."""
        try:
            return list(map(as_message, items))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self.server.url}: messages must have the form of chat completions, got "
                f"{shorten(items)} ({type(error).__name__}: {error})"
            ) from None

    def check_status(self, status: JSON, result: JSON) -> None:
        """Raises ValueError if the sample ended for another reason than the model's turns."""
        self.has_ended = status != "running"
        if self.has_ended and status not in ENDS:
            raise ValueError(
                f"{self.server.url}: the sample ended with status {shorten(status)}: "
                f"{shorten(result, 400)}"
            )


def reward_of(value: JSON) -> float:
    return finite(value, "the server's reward")


def as_message(item: JSONObject) -> Message:
    """A message with plain text and calls with arguments as objects. Raises ValueError for
    images."""
    role = item["role"]
    if role == "agent":
        role = "assistant"
    message = {"role": role, "content": text_of(item.get("content"))}
    for name in ("tool_call_id", "name"):
        if item.get(name):
            message[name] = item[name]
    if item.get("tool_calls"):
        message["tool_calls"] = list(map(received_call, item["tool_calls"]))
    return message


def text_of(content: JSON) -> str:
    if not isinstance(content, list):
        return content or ""
    text = ""
    for item in content:
        if item["type"] != "text":
            raise ValueError("only text content is supported")
        text += item["text"]
    return text


def received_call(call: JSONObject) -> JSONObject:
    """A call with arguments as an object, the form that chat templates read."""
    function = dict(call["function"])
    if isinstance(function["arguments"], str):
        function["arguments"] = json.loads(function["arguments"] or "{}")
    return call | {"function": function}


def sent_call(call: JSONObject) -> JSONObject:
    """A call in the form of OpenAI's API, with arguments as JSON text."""
    function = with_text_arguments(call)["function"]
    return {
        "id": call.get("id") or "",
        "type": "function",
        "function": {key: function[key] for key in ("name", "arguments")},
    }


async def play(session: BenchSession, actor: Actor) -> list[Trajectory]:
    """Plays a sample. The reward is the sum of the server's rewards, each assigned to its turn. A
    truncated turn without a reward of the server counts 0."""
    step = await session.start()
    if session.has_ended:
        raise ValueError(f"{session.server.url}: the sample ended at its start: {step.status}")
    replies: list[Conversation] = []
    rewards: list[float] = []
    while not session.has_ended and len(rewards) < actor.max_turns:
        if not step.messages:
            raise ValueError(
                f"{session.server.url}: the server waits for a turn but sent no message"
            )
        if step.is_anew or not replies:
            replies.append(await actor.respond(step.messages, tools=step.tools))
        else:
            await replies[-1].respond(step.messages)
        if replies[-1].truncated:
            step = await session.overflow() or step
            rewards.append(step.reward if session.has_ended else 0.0)
            break
        step = await session.say(replies[-1])
        rewards.append(step.reward)
    metrics = dict.fromkeys(ENDS.values(), 0.0) | step.metrics
    if session.has_ended:
        metrics[ENDS[step.status]] = 1.0
    trajectories = [reply.trajectory(sum(rewards), metrics=metrics) for reply in replies]
    if len(trajectories) == 1:
        # API actors record no turns, and neither does a reply to a full context.
        trajectories[0].turn_rewards = rewards[: len(trajectories[0].turns)]
    return trajectories


def parse(url: str) -> TaskServer:
    """Reads the URL of a task server. Raises ValueError."""
    parts = urlsplit(url)
    plain_url = url.partition("?")[0]
    name = parts.path.strip("/")
    is_http = parts.scheme in ("http+agentbench", "https+agentbench")
    if not is_http or not parts.hostname or not name or "/" in name:
        raise ValueError(f"{plain_url} must be http+agentbench://HOST:PORT/TASK")
    if "@" in parts.netloc:
        raise ValueError("--env_path holds a password, which files would keep; remove it")
    settings = dict(parse_qsl(parts.query, keep_blank_values=True))
    for key in settings.keys() - set(SETTINGS):
        raise ValueError(f"{plain_url}: unknown setting {key!r}; {nearest(key, SETTINGS)}")
    server = TaskServer(
        url=plain_url,
        api=f"{parts.scheme.partition('+')[0]}://{parts.netloc}/api",
        name=name,
        score=settings.get("score", ""),
        overall=settings.get("overall", "").split(),
    )
    for split in ("train", "eval"):
        if split in settings:
            server.ranges[split] = index_range(settings[split], f"{plain_url}: {split}")
    if "timeout_s" in settings:
        server.timeout_s = positive(settings["timeout_s"], f"{plain_url}: timeout_s")
    return server


def index_range(text: str, label: str) -> range:
    first, _, last = text.partition("-")
    if not first.isdecimal() or not last.isdecimal() or int(last) < int(first):
        raise ValueError(f"{label}={text} must be the first and last sample, such as 0-199")
    return range(int(first), int(last) + 1)


def positive(text: str, label: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise ValueError(f"{label}={text} must be a number of seconds, such as 600")


def load_module(url: str) -> ModuleType:
    """The task as an environment module. Raises ValueError if the server or the task is missing."""
    server = parse(url)
    server.indices()
    module = ModuleType(f"rl_core_env_{server.name}")

    async def rollout(task: Task, actors: EpisodeActors) -> list[Trajectory]:
        return await server.rollout(task, actors)

    module.rollout = rollout
    module.load_tasks = server.rows
    module.max_turns = MAX_TURNS
    module.heard_code = str  # Task servers do not report a hash of their code.
    return module
