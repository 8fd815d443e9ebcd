"""API actors against a real HTTP server: what they ask, what they do when it fails, and that their key stays theirs."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import zstandard

from rl_core.config import RolloutConfig
from rl_core.distributed import Ranks
from rl_core.sampling.api_actor import ApiActor, retry_after_s
from rl_core.sampling.env import load_env
from rl_core.sampling.rollout import RolloutPlan, rollout, write_trajectories
from rl_core.sampling.scripted_engine import ScriptedActor, plain_chat
from rl_core.train import main
from rl_core.types import SamplingParams, Task

ROOT = Path(__file__).parent.parent
KEY = "sk-a-secret-0123456789"
HELLO = [{"role": "user", "content": "hello"}]
GIVE_UP = "give up"  # a step of a script: close the connection without an answer


def reply(text="hi", finish_reason="stop", **message):
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    said = {"role": "assistant", "content": text, **message}
    return {"choices": [{"index": 0, "message": said, "finish_reason": finish_reason}], "usage": usage}


class Server(ThreadingHTTPServer):
    """Answers by its script, whose last step is repeated: (status, body[, headers]), or a function of the request."""

    daemon_threads, request_queue_size = True, 200

    def __init__(self, *script):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.requests, self.lock = list(script), [], threading.Lock()
        self.arrived_s, self.now, self.most = [], 0, 0  # requests in flight

    def handle_error(self, request, client_address): ...  # clients that hang up are part of these tests

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        server = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.requests.append((self.path, self.headers, request))
            server.arrived_s.append(time.monotonic())
            server.now += 1
            server.most = max(server.most, server.now)
            step = server.script.pop(0) if len(server.script) > 1 else server.script[0]
        try:
            step = step(self) if callable(step) else step
        finally:
            with server.lock:
                server.now -= 1
        if step == GIVE_UP:
            self.close_connection = True
            return
        status, body, *headers = step
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": len(body), **dict(*headers)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args): ...


@contextmanager
def serving(*script):
    server = Server(*script)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    monkeypatch.setattr("rl_core.sampling.api_actor.FIRST_PAUSE_S", 0.02)


def judge(server, **options):
    url = server if isinstance(server, str) else server.url
    return ApiActor(
        name="judge", url=url, model="m", **{"api_key_env": "JUDGE_KEY", "timeout_s": 10, "deadline_s": 20} | options
    )


def ask(actor, num=1, params=None, messages=HELLO):
    """The outcomes of num replies that are asked for at once."""

    async def run():
        speakers = [actor.speaker(params or SamplingParams(max_tokens=9), seed) for seed in range(num)]
        try:
            asked = [speaker.converse(messages).respond() for speaker in speakers]
            return await asyncio.gather(*asked, return_exceptions=True)
        finally:
            await actor.close()

    return asyncio.run(run())


def values(actor):
    return {name: metric.value for name, metric in actor.take_metrics().items()}


# What is asked, and what comes back


def test_a_conversation_of_several_turns():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    params = SamplingParams(max_tokens=9, temperature=0.5, top_p=0.9, stop=("END",))

    async def talk(actor):
        [speaker] = [actor.speaker(params, seed=3, session="s")]
        conversation = speaker.converse([{**HELLO[0], "train": False}], tools)
        first = await conversation.respond()
        assert conversation.add([{"role": "user", "content": "more"}])
        second = await conversation.respond()
        await actor.close()
        return conversation, first, second

    with serving((200, reply("one")), (200, reply("tw", "length"))) as server:
        actor = judge(server)
        conversation, first, second = asyncio.run(talk(actor))
    assert [m["content"] for m in conversation.messages] == ["hello", "one", "more", "tw"]
    assert (first.text, first.finish_reason, first.token_ids, first.logprobs) == ("one", "stop", [], [])
    assert (second.text, second.finish_reason, conversation.truncated) == ("tw", "length", True)
    path, headers, asked = server.requests[0]
    assert (path, headers["Authorization"]) == ("/v1/chat/completions", f"Bearer {KEY}")
    seeds = [request.pop("seed") for _, _, request in server.requests]
    assert seeds[0] != seeds[1] and all(0 <= seed < 2**31 for seed in seeds)
    limits = {"max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "stop": ["END"], "tools": tools, "model": "m"}
    assert asked == {"messages": HELLO} | limits
    assert server.requests[1][2]["messages"] == [
        *HELLO, {"role": "assistant", "content": "one"}, {"role": "user", "content": "more"}
    ]  # fmt: skip
    assert values(actor) | {"waited_s": 0} == {
        "requests": 2, "retries": 0, "failed": 0, "prompt_tokens": 14, "completion_tokens": 6, "waited_s": 0
    }  # fmt: skip
    assert values(actor)["requests"] == 0  # taken

    task = Task(id="train/0", env="x", row={}, messages=HELLO)
    made = conversation.trajectory(task, reward=1.0, reward_parts={}, metrics={})
    assert (made.actor, made.turns, made.status, made.num_tokens) == ("judge", [], "truncated", 0)


def test_the_same_seed_asks_the_same():
    with serving((200, reply())) as server:
        for seeds in (2, 2):
            ask(judge(server), num=seeds)
    seeds = [request["seed"] for _, _, request in server.requests]
    assert sorted(seeds[:2]) == sorted(seeds[2:]) and len(set(seeds)) == 2


def test_calls_of_tools_stay_in_the_conversation():
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]

    async def talk(actor):
        conversation = actor.speaker(SamplingParams(max_tokens=9), 0).converse(HELLO)
        await conversation.respond()
        conversation.add([{"role": "tool", "tool_call_id": "c1", "content": "5"}])
        await conversation.respond()
        await actor.close()

    with serving((200, reply(None, "tool_calls", tool_calls=calls)), (200, reply())) as server:
        asyncio.run(talk(judge(server)))
    assert server.requests[1][2]["messages"][1:] == [
        {"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "tool_call_id": "c1", "content": "5"}
    ]  # fmt: skip


def test_keys_of_the_request_are_added_changed_and_left_out():
    changes = {"max_tokens": None, "max_completion_tokens": 99, "seed": None, "temperature": 0.0, "model": "other"}
    with serving((200, reply())) as server:
        ask(judge(server, request=changes))
    assert server.requests[0][2] == {
        "messages": HELLO, "max_completion_tokens": 99, "temperature": 0.0, "model": "other"
    }  # fmt: skip


def test_an_endpoint_without_a_key_gets_none():
    with serving((200, reply())) as server:
        [done] = ask(judge(server, api_key_env=""))
    assert done.text == "hi" and KEY not in str(server.requests[0][1])


# What fails


def test_429_then_success_waits_as_long_as_the_server_asks():
    with serving((429, {"error": "slow down"}, {"Retry-After": "1"}), (200, reply("late"))) as server:
        actor = judge(server)
        [done] = ask(actor)
    assert done.text == "late"
    assert server.arrived_s[1] - server.arrived_s[0] >= 0.99
    found = values(actor)
    assert (found["requests"], found["retries"], found["failed"]) == (2, 1, 0) and found["waited_s"] >= 0.99


def test_a_pause_that_the_server_asks_for_holds_every_conversation():
    with serving((429, {}, {"Retry-After": "0.5"}), (200, reply())) as server:
        done = ask(judge(server, max_concurrent=1), num=3)
    assert [d.text for d in done] == ["hi"] * 3
    assert server.arrived_s[1] - server.arrived_s[0] >= 0.49


def test_a_pause_beyond_the_deadline_is_not_waited_for():
    with serving((503, {"error": "maintenance"}, {"Retry-After": "3600"})) as server:
        [error] = ask(judge(server))
    assert isinstance(error, ConnectionError) and "next attempt in 3.6e+03 s" in str(error), error
    assert "503" in str(error) and "maintenance" in str(error)
    assert len(server.requests) == 1


def test_a_server_that_only_fails_is_given_up_at_the_deadline():
    with serving((500, {"error": "broken"})) as server:
        actor = judge(server, timeout_s=0.6, deadline_s=0.6, max_retries=99)
        [error] = ask(actor)
    assert isinstance(error, ConnectionError) and "deadline_s=0.6" in str(error) and "500" in str(error), error
    found = values(actor)
    # Pauses of at least 0.01, 0.02, 0.04 s and so on leave room for six or seven.
    assert 2 <= found["requests"] == len(server.requests) <= 7 and found["retries"] == found["requests"] - 1
    assert found["failed"] == 1


def test_a_server_that_only_fails_is_given_up_after_the_last_retry():
    with serving((502, b"<html>bad gateway</html>", {"Content-Type": "text/html"})) as server:
        [error] = ask(judge(server, max_retries=2))
    assert isinstance(error, ConnectionError) and "max_retries=2" in str(error) and "bad gateway" in str(error), error
    assert len(server.requests) == 3


def test_a_server_that_hangs_is_asked_again_and_given_up_at_the_deadline():
    ends = threading.Event()
    with serving(lambda _: (ends.wait(20), (200, reply()))[1]) as server:
        [error] = ask(judge(server, timeout_s=0.2, deadline_s=0.7))
        ends.set()
    assert isinstance(error, ConnectionError) and "timeout_s=0.2" in str(error) and "deadline_s=0.7" in str(error), (
        error
    )
    assert len(server.requests) > 1


def test_one_request_that_hangs_does_not_cost_the_reply():
    ends = threading.Event()
    with serving(lambda _: (ends.wait(20), (200, reply()))[1], (200, reply("second"))) as server:
        [done] = ask(judge(server, timeout_s=0.3))
        ends.set()
    assert done.text == "second"


@pytest.mark.parametrize(
    "bad",
    [
        (200, b'{"choices": [{"mess'),
        (200, b"<html>sign in</html>", {"Content-Type": "text/html"}),
        (200, b"\xff\xfe"),
        (200, b""),
        (200, {"choices": []}),
        (200, {"choices": None}),
        (200, {"error": "none"}),
        (200, {"choices": [{"message": None}]}),
        (200, {"choices": ["hi"]}),
        (200, reply(["no", "text"])),
        (200, [1, 2]),
        GIVE_UP,
    ],
    ids=str,
)
def test_what_cannot_be_read_is_asked_for_again(bad):
    with serving(bad, (200, reply())) as server:
        actor = judge(server)
        [done] = ask(actor)
    assert done.text == "hi" and values(actor)["retries"] == 1
    with serving(bad) as server:
        actor = judge(server, max_retries=1)
        [error] = ask(actor)
    assert isinstance(error, ConnectionError) and "max_retries=1" in str(error), error
    assert (len(server.requests), values(actor)["failed"]) == (2, 1)


def test_usage_may_be_missing():
    for usage in (None, {}, {"prompt_tokens": None}):
        with serving((200, reply() | {"usage": usage})) as server:
            actor = judge(server)
            [done] = ask(actor)
        assert done.text == "hi" and values(actor)["prompt_tokens"] == 0


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_what_is_refused_is_not_asked_again(status):
    with serving((status, {"error": {"message": "top_k is unknown"}}), (200, reply())) as server:
        [error] = ask(judge(server))
    assert isinstance(error, ValueError) and str(status) in str(error) and "top_k is unknown" in str(error), error
    assert len(server.requests) == 1


def test_a_connection_that_is_refused_says_so():
    with serving((200, reply())) as server:
        url = server.url
    [error] = ask(judge(url, max_retries=1))
    assert isinstance(error, ConnectionError) and "is the server up?" in str(error) and url in str(error), error


def test_a_server_that_comes_back_is_found():
    with serving((200, reply())) as server:
        url, port = server.url, server.server_port

    def serve_later():
        time.sleep(0.3)
        late = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        late.script, late.requests, late.lock = [(200, reply("back"))], [], threading.Lock()
        late.arrived_s, late.now, late.most = [], 0, 0
        started.append(late)
        late.serve_forever(poll_interval=0.02)

    started = []
    threading.Thread(target=serve_later, daemon=True).start()
    [done] = ask(judge(url))
    started[0].shutdown()
    started[0].server_close()
    assert done.text == "back"


# Limits


def test_no_more_requests_are_in_flight_than_allowed():
    with serving(lambda _: (time.sleep(0.02), (200, reply()))[1]) as server:
        actor = judge(server, max_concurrent=8)
        done = ask(actor, num=100)
    assert [d.text for d in done] == ["hi"] * 100
    assert server.most == 8
    found = values(actor)
    assert found["requests"] == 100 and found["waited_s"] > 1  # 92 of them waited


def test_requests_of_all_conversations_keep_to_the_rate():
    with serving((200, reply())) as server:
        ask(judge(server, requests_per_minute=600), num=6)
    # The first goes at once, the sixth half a second later; what the network adds or takes is small beside it.
    assert server.arrived_s[-1] - server.arrived_s[0] >= 0.45


def test_who_waits_too_long_for_a_place_is_told_so():
    ends = threading.Event()
    with serving(lambda _: (ends.wait(20), (200, reply()))[1]) as server:
        errors = ask(judge(server, max_concurrent=1, timeout_s=0.5, deadline_s=0.5), num=2)
        ends.set()
    assert all(isinstance(error, ConnectionError) for error in errors), errors
    assert any("a place among max_concurrent=1" in str(error) for error in errors), errors


def test_a_reply_that_is_cancelled_gives_its_place_back():
    ends = threading.Event()

    async def run(actor):
        first = asyncio.ensure_future(actor.speaker(SamplingParams(max_tokens=9), 0).converse(HELLO).respond())
        await asyncio.sleep(0.2)
        first.cancel()
        done = await actor.speaker(SamplingParams(max_tokens=9), 1).converse(HELLO).respond()
        await actor.close()
        return done

    with serving(lambda _: (ends.wait(20), (200, reply()))[1], (200, reply("next"))) as server:
        assert asyncio.run(run(judge(server, max_concurrent=1))).text == "next"
        ends.set()


# Flags


@pytest.mark.parametrize(
    "options, says",
    [
        ({"url": "127.0.0.1:8000"}, "must begin with http:// or https://"),
        ({"url": "ftp://host/v1"}, "must begin with http:// or https://"),
        ({"url": "http://name:hidden@host/v1"}, "must hold no password and no query"),
        ({"url": "http://host/v1?key=hidden"}, "must hold no password and no query"),
        ({"api_key_env": "NO_SUCH_KEY"}, "the environment variable NO_SUCH_KEY holds no key; set it"),
        ({"api_key_env": "sk-hidden"}, "must be the name of an environment variable, not the key itself"),
        ({"max_concurrent": 0}, "max_concurrent=0 must be at least 1"),
        ({"requests_per_minute": -1}, "requests_per_minute=-1 must be at least 0"),
        ({"timeout_s": 9, "deadline_s": 3}, "timeout_s=9 (of a request) and deadline_s=3 (of a reply)"),
    ],
)
def test_what_cannot_work_is_refused_at_start_up(options, says):
    with pytest.raises(ValueError) as caught:
        ApiActor(name="judge", **{"url": "http://host/v1", "model": "m", "api_key_env": "JUDGE_KEY", **options})
    assert says in str(caught.value) and "hidden" not in str(caught.value)


def test_a_key_that_no_header_can_carry_is_refused_without_showing_it(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-hidden\nsecond line")
    with pytest.raises(ValueError, match="must be one line of ASCII") as caught:
        judge("http://host/v1")
    assert "hidden" not in str(caught.value)


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ValueError, match=r"needs openai, which is not installed: pip install \.\[api\]"):
        judge("http://host/v1")


def test_retry_after_is_read_as_seconds_or_as_a_date():
    assert [retry_after_s(h) for h in (None, "", "2", " 1.5 ", "soon", "-3")] == [0, 0, 2, 1.5, 0, 0]
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert retry_after_s("Wed, 21 Oct 2099 07:28:00 GMT") > 1e9


# The key

FAILING = """
import asyncio, logging, sys, traceback
logging.basicConfig(level=logging.DEBUG)
from rl_core.sampling.api_actor import ApiActor
from rl_core.types import SamplingParams

async def ask(url):
    actor = ApiActor(name="judge", url=url, model="m", api_key_env="JUDGE_KEY", max_retries=1)
    print(actor, actor.client, repr(actor.speaker(SamplingParams(max_tokens=9), 0)))
    try:
        await actor.speaker(SamplingParams(max_tokens=9), 0).converse([{"role": "user", "content": "hello"}]).respond()
    except Exception as error:
        traceback.print_exc()
        while error is not None:
            print(repr(error), vars(error), file=sys.stderr)
            error = error.__cause__ or error.__context__
    print(actor.take_metrics())

for url in sys.argv[1:]:
    asyncio.run(ask(url))
"""


def test_the_key_is_in_nothing_that_a_failing_call_writes(tmp_path):
    def echo(handler):
        return 401, {"error": {"message": f"Incorrect API key provided: {handler.headers['Authorization']}"}}

    def echo_when_broken(handler):
        return 500, f"broken: {handler.headers}".encode()

    def echo_unreadable(handler):
        return 200, {"error": handler.headers["Authorization"]}

    env = os.environ | {"JUDGE_KEY": KEY, "OPENAI_LOG": "debug", "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"}
    with serving(echo) as a, serving(echo_when_broken) as b, serving(echo_unreadable) as c, serving(GIVE_UP) as d:
        command = [sys.executable, "-c", FAILING, a.url, b.url, c.url, d.url, "http://127.0.0.1:9/v1"]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Incorrect API key provided: Bearer ***" in done.stderr
    assert all(KEY in s.requests[0][1]["Authorization"] for s in (a, b, c, d))  # it was sent
    assert done.stderr.count("no answer from") >= 4 and "DEBUG" in done.stderr
    for text in (done.stdout, done.stderr):
        assert KEY not in text and KEY[3:12] not in text
    assert not list(tmp_path.rglob("*"))


# Episodes

JUDGED = """
async def rollout(task, actors):
    reply = await actors["policy"].respond(task.messages)
    verdicts = await actors["judge"].respond("Is this right? " + reply.text, n=2, temperature=0.0)
    return [reply.trajectory(reward=sum(float(v.text) for v in verdicts))]
"""
IN_TURN = """
turns = "policy -> judge -> policy"
def reward_fn(messages): return float(messages[-2]["content"] == "0.5")
"""


def episodes(code, folder, server, **options):
    """Trajectories of two episodes in which a scripted policy and an endpoint speak, and all that was written of them."""
    (folder / "x.py").write_text(code)
    chat, ranks = plain_chat(), Ranks(rank=0, size=1, device=None, store=None)
    actors = {"policy": ScriptedActor(name="policy", chat=chat, replies=["12", "13"], max_turns=3)}
    actors["judge"] = judge(server, max_turns=3, **options)
    task = Task(id="train/0", env="x", row={}, messages=HELLO)
    plan = RolloutPlan(name="p", tasks=[task], group_size=2, params=SamplingParams(max_tokens=9), seed=0)

    async def run():
        env = load_env(str(folder / "x.py"))
        found = await rollout(env, actors, plan, RolloutConfig(max_failed_fraction=1.0), ranks)
        await actors["judge"].close()
        return found

    found = asyncio.run(run())
    write_trajectories(folder, "step_000001", found, ranks)
    packed = (folder / "step_000001.jsonl.zst").read_bytes()
    return found, zstandard.ZstdDecompressor().decompressobj().decompress(packed).decode()


def test_an_endpoint_judges_what_a_policy_said(tmp_path):
    with serving((200, reply("0.5"))) as server:
        found, _ = episodes(JUDGED, tmp_path, server)
    assert [(t.actor, t.status, t.reward, len(t.turns)) for t in found] == [("policy", "ok", 1.0, 1)] * 2
    asked = [request for _, _, request in server.requests]
    assert len(asked) == 4 and len({request["seed"] for request in asked}) == 4
    assert all(request["temperature"] == 0.0 for request in asked)
    assert asked[0]["messages"] == [{"role": "user", "content": "Is this right? 12"}]


def test_an_endpoint_takes_turns_with_a_policy(tmp_path):
    with serving((200, reply("0.5"))) as server:
        found, _ = episodes(IN_TURN, tmp_path, server)
    assert [(t.actor, t.reward, len(t.turns)) for t in found] == [("policy", 1.0, 2)] * 2  # it alone is trained
    assert [m["content"] for m in found[0].messages] == ["hello", "12", "0.5", "13"]
    assert server.requests[0][2]["messages"] == [{"role": "user", "content": "hello\n\n12"}]


def test_an_episode_whose_endpoint_fails_is_a_record_without_the_key(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    with serving(lambda handler: (401, {"error": handler.headers["Authorization"]})) as server:
        found, written = episodes(JUDGED, tmp_path, server)
    assert [(t.actor, t.status, t.reward) for t in found] == [("policy", "failed", None)] * 2
    assert "401" in written and "Bearer ***" in written
    assert KEY not in written and KEY not in caplog.text and "DEBUG" in caplog.text


def test_the_key_is_in_nothing_that_a_run_writes(tiny_model, tmp_path, capfd):
    """A run whose judge answers at first and then refuses the key: it stops, and nowhere in its folder is the key."""
    env, rows, out = tmp_path / "x.py", tmp_path / "rows.jsonl", tmp_path / "run"
    env.write_text(JUDGED)
    rows.write_text('{"prompt": "12"}\n' * 4)
    flags = [
        "--actors.policy.model",
        tiny_model,
        "--actors.judge.model",
        "m",
        "--actors.judge.api_key_env",
        "JUDGE_KEY",
    ]
    flags += ["--env_path", env, "--data.train", rows, "--out", out, "--max_tokens", 8, "--max_prompt_tokens", 64]
    flags += ["--tasks_per_step", 2, "--group_size", 2, "--num_steps", 3]
    refuses = (401, {"error": f"Incorrect API key provided: {KEY}"})
    with serving(*[(200, reply("0.5"))] * 8, refuses) as server:
        status = main([str(flag) for flag in [*flags, "--actors.judge.api", server.url]])
    printed = capfd.readouterr()
    assert status == 1 and "Incorrect API key provided: ***" in printed.err
    assert len(server.requests) > 8 and KEY not in printed.out + printed.err
    files = [file for file in out.rglob("*") if file.is_file()]
    assert {"config.yaml", "metrics.jsonl", "step_000001.jsonl.zst"} <= {file.name for file in files}
    for file in files:
        data = file.read_bytes()
        data = zstandard.ZstdDecompressor().decompressobj().decompress(data) if file.suffix == ".zst" else data
        assert KEY.encode() not in data, file
