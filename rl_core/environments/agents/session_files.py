"""Files of a run's sessions: rollouts/sessions/000012.jsonl has a line for each event of session
12, written before its client hears of it. No file has a key, only its hash."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.types import Completion, JSONObject, Message

if TYPE_CHECKING:
    from rl_core.environments.agents.requests import Request
    from rl_core.sampling.conversation import TokenConversation
    from rl_core.types import SamplingParams

FOLDER = "sessions"  # In rollouts/.


def append(file: Path, event: JSONObject) -> None:
    with open(file, "a") as out:
        out.write(json.dumps(event, ensure_ascii=False) + "\n")


def read_events(file: Path) -> list[JSONObject]:
    """The events of a session, without a last line that a crash has cut."""
    lines = file.read_text(errors="replace").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def drop_cut_line(file: Path) -> None:
    """Removes a last line that a crash has cut, so that the next event begins a line."""
    data = file.read_bytes()
    if not data.endswith(b"\n"):
        os.truncate(file, data.rfind(b"\n") + 1)


def session_files(folder: Path) -> Iterator[tuple[int, Path]]:
    """(number, file) of each session of a run's rollouts/, in the order of their starts."""
    files = [file for file in (folder / FOLDER).glob("*.jsonl") if file.stem.isdecimal()]
    for file in sorted(files, key=lambda file: int(file.stem)):
        yield int(file.stem), file


def as_json(value: object) -> JSONObject:
    """The fields of a dataclass that JSON can hold and that differ from their defaults."""
    known = {}
    for f in fields(value):  # type: ignore[arg-type]
        default = f.default if f.default_factory is MISSING else f.default_factory()
        if f.repr and getattr(value, f.name) != default:
            known[f.name] = getattr(value, f.name)
    return known


@dataclass(slots=True)
class RequestCoder:
    """Requests of a session as JSON and back. Messages and tools that the request before had too
    are not repeated: a client sends its whole history with each request."""

    messages: list[Message] = field(default_factory=list)
    tools: list[JSONObject] | None = None

    def encode(self, request: Request) -> JSONObject:
        coded = as_json(request)
        coded["messages"] = request.messages[self.num_same(request.messages) :]
        coded["same"] = len(request.messages) - len(coded["messages"])
        if request.tools == self.tools and coded.pop("tools", None):
            coded["same_tools"] = True
        self.messages, self.tools = request.messages, request.tools
        return coded

    def decode(self, coded: JSONObject) -> JSONObject:
        """The fields of the request."""
        made = dict(coded)
        made["messages"] = [*self.messages[: made.pop("same")], *made["messages"]]
        if made.pop("same_tools", False):
            made["tools"] = self.tools
        made["stop"] = tuple(made.get("stop", ()))
        self.messages, self.tools = made["messages"], made.get("tools")
        return made

    def num_same(self, messages: list[Message]) -> int:
        num = 0
        for before, message in zip(self.messages, messages, strict=False):
            if before != message:
                break
            num += 1
        return num


def summary(events: list[JSONObject]) -> JSONObject:
    """A session for readers: its state, its rewards, and the versions that answered."""
    start = events[0]
    versions, rewards, texts, last_reply = set(), {}, [], ""
    facts = {"number": start["number"], "task": start["task_id"], "began_s": start["time"]}
    state, replies = "open", 0
    for event in events[1:]:
        kind = event["event"]
        if kind == "reply":
            replies += 1
            for completion in map(completion_of, event["completions"]):
                versions |= {*completion.policy_versions}
                last_reply = completion.text
        elif kind == "reward" and "text" in event:
            texts.append(event["text"])
        elif kind == "reward":
            rewards[event["reply"]] = event["parts"]
        elif kind in ("end", "untaken"):
            state = "waiting"
        elif kind == "rated":
            state, facts["reward"] = "rated", event["reward"]
        elif kind == "step":
            state = f"trained in step {event['step']}"
        elif kind == "left_out":
            state = f"left out: {event['reason']}"
    total = sum(sum(parts.values()) for parts in rewards.values()) if rewards else None
    facts = {"reward": total} | facts | {"state": state, "replies": replies, "feedback": texts}
    return facts | {"versions": sorted(versions), "last_reply": last_reply}


def completion_of(value: JSONObject) -> Completion:
    completion = Completion(**value)
    completion.newer_versions = [(i, version) for i, version in completion.newer_versions]
    return completion


class RestoredTurns:
    """Completions of a request that is played again; a Replay of sampling/conversation.py."""

    def __init__(self):
        self.completions: list[Completion] = []

    async def generate(
        self, talk: TokenConversation, params: SamplingParams, seed: int, /
    ) -> Completion:
        if self.completions:
            return self.completions.pop(0)
        return await talk.generate(params, seed)

    async def chat(self, talk: object, seed: int, /) -> tuple[Message, Completion]:
        raise NotImplementedError  # Sessions have trained actors alone.


def summaries(rollouts: Path) -> list[JSONObject]:
    """The sessions of a run whose files are kept: those that no two checkpoints have."""
    known = []
    for _, file in session_files(rollouts):
        with suppress(FileNotFoundError):  # The run has deleted it.
            time = file.stat()
            known += summary_of(file, time.st_mtime_ns, time.st_size)
    return known


@lru_cache(maxsize=10_000)
def summary_of(file: Path, changed: int, size: int) -> list[JSONObject]:
    """The summary, or none before the first event. The time and the size make it current."""
    events = read_events(file)
    return [summary(events)] if events else []
