"""Environments played by actors that follow a rule: everything but the model is real."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from rl_core.config import RolloutConfig
from rl_core.data.chat import Chat
from rl_core.data.task_rows import make_task
from rl_core.data.tool_calls import ToolCalls
from rl_core.engines.requests import check_request
from rl_core.run.failure_limit import refuse_failures
from rl_core.run.process.joining import init_ranks
from rl_core.sampling.actor import Actor
from rl_core.sampling.episode_runner import EpisodeRunner
from rl_core.sampling.groups import Group
from rl_core.sampling.rollout import RolloutWorker, sorted_trajectories
from rl_core.tools.tiny_model import character_tokenizer
from rl_core.types import Completion, SamplingParams

ROW = {"messages": [{"role": "user", "content": "2+2"}], "answer": "4", "tests": [1, 2]}


class RuleEngine:
    """An engine that says rule(prompt's text, seed) after a wait. It notes every prompt, seed and
    params."""

    version, capacity = 3, 1024

    def __init__(self, chat: Chat, rule, wait_s: float = 0.0):
        self.chat, self.rule, self.wait_s = chat, rule, wait_s
        self.asked: list[tuple[str, int, SamplingParams]] = []
        self.sessions: set[str] = set()

    async def generate(self, prompt_ids, params, *, seed, session="", adapter="", unfinished=None):
        check_request(prompt_ids, params, 1 << 30)
        self.sessions.add(session)
        prompt = self.chat.tokenizer.decode(prompt_ids)
        self.asked.append((prompt, seed, params))
        await asyncio.sleep(random.Random(seed).random() * self.wait_s)
        ids = self.chat.encode(self.rule(prompt, seed), continues=True)
        is_cut = len(ids) >= params.max_tokens
        ids = ids[: params.max_tokens] if is_cut else [*ids, params.stop_token_ids[0]]
        return Completion(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            text=self.chat.decode(ids),
            finish_reason="length" if is_cut else "stop",
            policy_version=self.version,
        )

    def end_session(self, session):
        self.sessions.discard(session)


@cache
def chat_of(template: str | None = None) -> Chat:
    return Chat(character_tokenizer(), template, tool_reader=ToolCalls)


def actor(name: str, engine: RuleEngine, **limits) -> Actor:
    more = {"max_context_tokens": 100_000, "stop_token_ids": engine.chat.stop_token_ids} | limits
    return Actor(name=name, engine=engine, chat=engine.chat, **more)


def cast(
    wait_s: float = 0.0, template: str | None = None, limits: dict | None = None, **rules
) -> dict[str, Actor]:
    """cast(bob="hi", alice=["first", "second"], judge=(rule, False)) -> actors by name: what each
    says, always, turn by turn, or by a rule, and whether it learns."""
    actors = {}
    for name, rule in rules.items():
        rule, is_trainable = rule if isinstance(rule, tuple) else (rule, True)
        engine = RuleEngine(chat_of(template), rule if callable(rule) else saying(rule), wait_s)
        actors[name] = actor(name, engine, is_trainable=is_trainable, **limits or {})
    return actors


def saying(text: str | list[str]):
    """A rule: the same text always, or one after the other in a conversation."""
    texts = [text] if isinstance(text, str) else text
    return lambda prompt, seed: texts[min(prompt.count("<|assistant|>") - 1, len(texts) - 1)]


def make_groups(
    tasks, size: int = 1, batch: str = "train/0", seed: int = 0, **params
) -> list[Group]:
    same = {
        "batch": batch,
        "size": size,
        "seed": seed,
        "params": SamplingParams(**{"max_tokens": 50} | params),
    }
    return [Group(task=task, number=number, **same) for number, task in enumerate(tasks)]


async def rollout(envs, actors, groups, config, ranks):
    """The trajectories of these groups, in their order."""
    worker = RolloutWorker(EpisodeRunner(envs, actors, config), ranks, 60)
    worker.submit(groups)
    try:
        return sorted_trajectories(await worker.collect(len(groups)))
    finally:
        await worker.close()


def run(
    env,
    actors,
    *,
    group_size=1,
    rows=(ROW,),
    max_failed=None,
    timeout_s=30.0,
    max_turns=None,
    **more,
):
    """The trajectories of one group for each row. `more`: as of make_groups."""
    env, ranks = replace(env, max_turns=max_turns or env.max_turns), init_ranks(60)
    groups = make_groups(
        [make_task(dict(row), i, env.name, "train") for i, row in enumerate(rows)],
        group_size,
        **more,
    )
    config = RolloutConfig(episode_timeout_s=timeout_s)
    trajectories = asyncio.run(rollout({env.name: env}, actors, groups, config, ranks))
    if max_failed is not None:
        refuse_failures(trajectories, {}, max_failed, groups[0].batch, ranks, min_rows=1)
    return trajectories


def one(trajectories, actor=None):
    """The only trajectory, or the only one of this actor, which did not fail."""
    [result] = [t for t in trajectories if actor in (None, t.actor)]
    assert result.status != "failed", result.error
    return result


def play(env, *replies, row=ROW, limits=None, **options):
    """The trajectory of one episode in which an actor says these replies."""
    return one(run(env, cast(limits=limits, policy=list(replies)), rows=[row], **options))


def error_of(env, *replies, row=ROW, **options) -> str:
    """Why such an episode failed."""
    [failed] = run(env, cast(policy=list(replies)), rows=[row], **options)
    assert (failed.status, failed.reward) == ("failed", None)
    return failed.error


def talk(messages):
    return [f"{m['role'][0]}:{m['content']}" for m in messages]


@contextmanager
def endpoint(rule):
    """URL of an OpenAI-compatible endpoint that says rule(text of all messages)."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply = rule("\n".join(m["content"] for m in asked["messages"]))
            choice = {
                "index": 0,
                "message": {"role": "assistant", "content": reply},
                "finish_reason": "stop",
            }
            body = json.dumps({"choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args): ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    ).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
