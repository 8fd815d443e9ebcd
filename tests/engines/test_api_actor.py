"""API actors against a real HTTP server: requests, failures, and secrecy of the key."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import zstandard
from kit import run, steps, words
from pydantic import TypeAdapter

from rl_core import rewards
from rl_core.config import parse_config
from rl_core.engines.api import ApiActor, make_api_actor
from rl_core.train import main
from rl_core.types import SamplingParams, Trajectory

ROOT = Path(__file__).parents[2]
KEY = "sk-a-secret-0123456789"
HELLO = [{"role": "user", "content": "hello"}]
# A PNG of one pixel.
URL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
SEEN = {"type": "image", "image": URL}
GIVE_UP = "give up"  # a step of a script: close the connection without an answer


def reply(text="hi", finish_reason="stop", **message):
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    message_sent = {"role": "assistant", "content": text, **message}
    return {
        "choices": [{"index": 0, "message": message_sent, "finish_reason": finish_reason}],
        "usage": usage,
    }


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server(ThreadingHTTPServer):
    """Answers by its script, whose last step is repeated: (status, body[, headers]), or a function
    of the handler."""

    daemon_threads, request_queue_size = True, 200

    def __init__(self, *script):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.requests, self.lock, self.now, self.most = (
            list(script),
            [],
            threading.Lock(),
            0,
            0,
        )
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    # Clients that hang up are part of these tests.
    def handle_error(self, request, client_address): ...


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked = request
        with server.lock:
            server.requests.append((self.path, self.headers, request))
            server.now += 1
            server.most = max(server.most, server.now)
            step = server.script.pop(0) if len(server.script) > 1 else server.script[0]
        step = step(self) if callable(step) else step
        with server.lock:
            server.now -= 1
        if step == GIVE_UP:
            return
        status, body, *headers = step
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **dict(*headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

    def log_message(self, *args): ...


@contextmanager
def serving(*script):
    server = Server(*script)
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    ).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)


def judge(server, **options):
    url = server if isinstance(server, str) else server.url
    return ApiActor(
        name="judge",
        model="m",
        **{"url": url, "api_key_env": "JUDGE_KEY", "timeout_s": 30} | options,
    )


def ask(actor, num=1, params=None):
    """The outcomes of num replies that are asked for at once."""

    async def run():
        speakers = [
            actor.bind_episode(params or SamplingParams(max_tokens=9), seed) for seed in range(num)
        ]
        try:
            return await asyncio.gather(
                *(s.converse(HELLO).respond() for s in speakers), return_exceptions=True
            )
        finally:
            await actor.close()

    return asyncio.run(run())


def values(actor):
    return {name: metric.value for name, metric in actor.take_metrics().items()}


def test_a_conversation_of_several_turns_with_tools():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    params = SamplingParams(max_tokens=9, temperature=0.5, top_p=0.9, stop=("END",))

    async def talk(actor):
        conversation = actor.bind_episode(params, seed=3, session="s").converse(
            [{**HELLO[0], "train": False}], tools
        )
        texts, answer = (
            [(await conversation.respond()).text],
            [{"role": "tool", "tool_call_id": "c1", "content": [SEEN]}],
        )
        other = conversation.fork()
        texts.append((await conversation.respond(answer)).text)
        await other.respond(answer)
        await actor.close()
        return conversation, texts

    answers = [reply(None, "tool_calls", tool_calls=calls), reply("tw", "length"), reply("other")]
    with serving(*((200, answer) for answer in answers)) as server:
        actor = judge(server)
        conversation, texts = asyncio.run(talk(actor))
    assert (texts, conversation.turns, conversation.truncated) == (["", "tw"], [], True)
    path, headers, asked = server.requests[0]
    assert (path, headers["Authorization"]) == ("/v1/chat/completions", f"Bearer {KEY}")
    seeds = [request.pop("seed") for _, _, request in server.requests]
    assert len(set(seeds)) == 3 and all(0 <= seed < 2**31 for seed in seeds)
    limits = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["END"],
        "tools": tools,
        "model": "m",
    }
    assert asked == {"messages": HELLO} | limits  # keys that are not of a message are left out
    heard = [*HELLO, {"role": "assistant", "content": "", "tool_calls": calls}]
    shown = [{"type": "image_url", "image_url": {"url": URL}}]
    heard.append({"role": "tool", "tool_call_id": "c1", "content": shown})
    assert [request["messages"] for _, _, request in server.requests[1:]] == [heard, heard]
    counts = {"requests": 3, "retries": 0, "failed": 0, "prompt_tokens": 21, "completion_tokens": 9}
    assert values(actor) == counts and not any(values(actor).values())

    made = conversation.trajectory(1.0)
    assert (made.actor, made.turns, made.status, made.num_tokens) == ("judge", [], "truncated", 0)


def test_the_same_seed_asks_the_same():
    with serving((200, reply())) as server:
        for _ in range(2):
            ask(judge(server), num=2)
    seeds = [request["seed"] for _, _, request in server.requests]
    assert sorted(seeds[:2]) == sorted(seeds[2:]) and len(set(seeds)) == 2


def test_keys_of_the_request_are_added_changed_and_left_out():
    changes = {
        "max_tokens": None,
        "max_completion_tokens": 99,
        "seed": None,
        "temperature": 0.0,
        "model": "other",
    }
    with serving((200, reply() | {"usage": None})) as server:
        [done] = ask(judge(server, request=changes, api_key_env=""))
    kept = {"max_completion_tokens": 99, "temperature": 0.0, "model": "other"}
    assert done.text == "hi" and server.requests[0][2] == {"messages": HELLO} | kept
    assert KEY not in str(server.requests[0][1]), "an endpoint without a key gets none"


@pytest.mark.parametrize(
    "failure", [(429, {}, {"Retry-After": "0.01"}), (503, {"error": "busy"}), GIVE_UP], ids=str
)
def test_what_may_pass_is_asked_again(failure):
    with serving(failure, failure, (200, reply("late"))) as server:
        actor = judge(server)
        [done] = ask(actor)
    assert done.text == "late" and len(server.requests) == 3
    assert values(actor) | {"prompt_tokens": 0} == {
        "requests": 1, "retries": 2, "failed": 0, "prompt_tokens": 0, "completion_tokens": 3
    }  # fmt: skip


REFUSAL = {"error": {"message": "top_k is unknown"}}
BAD = [
    b'{"choices": [{"mess',
    b"\xff",
    {"choices": []},
    {"error": "none"},
    {"choices": ["hi"]},
    reply([1]),
]
FAILURES = [  # (response, class of the error, text of the error, number of requests)
    (
        (502, b"<html>bad gateway</html>", {"Content-Type": "text/html"}),
        ConnectionError,
        "bad gateway",
        3,
    ),
    *(((200, bad), ValueError, "cannot be read", 1) for bad in BAD),
    *(
        ((status, REFUSAL), ValueError, f"{status}: {json.dumps(REFUSAL)}", 1)
        for status in (400, 401, 404)
    ),
]


@pytest.mark.parametrize("answer, kind, says, num_requests", FAILURES, ids=str)
def test_a_failure_is_an_error_that_names_the_endpoint(answer, kind, says, num_requests):
    with serving(answer) as server:
        actor = judge(server, max_retries=2)
        [error] = ask(actor)
    assert type(error) is kind and says in str(error) and server.url in str(error), error
    assert len(server.requests) == num_requests and values(actor)["failed"] == 1


def test_an_endpoint_that_hangs_or_is_not_there_is_named():
    ends = threading.Event()
    with serving(lambda _: (ends.wait(20), (200, reply()))[1]) as server:
        [hangs] = ask(judge(server, timeout_s=0.2, max_retries=1))
        ends.set()
    [gone] = ask(judge(server, max_retries=1))
    for error in (hangs, gone):
        assert (
            isinstance(error, ConnectionError)
            and "is it up?" in str(error)
            and server.url in str(error)
        ), error
    assert "no answer" in str(hangs)


def test_a_dead_endpoint_is_told_before_a_model_loads(tmp_path, capfd):
    with serving((200, reply())) as server:  # it answers GET with 501
        judge(server).ping()
    assert run_judged(JUDGED, "no/such/model", tmp_path, server) == 1
    with pytest.raises(
        ValueError, match=r"no answer to GET /models .*refused.*--actors\.judge\.api"
    ):
        judge(server).ping()


def test_requests_in_flight_are_bounded_after_cancels_too():
    ends = threading.Event()

    async def run(actor):
        def speak(seed):
            return actor.bind_episode(SamplingParams(max_tokens=9), seed).converse(HELLO).respond()

        hanging = [asyncio.ensure_future(speak(seed)) for seed in range(3)]
        while len(server.requests) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for task in hanging:
            task.cancel()
        done = await asyncio.gather(*(speak(seed) for seed in range(20)))
        await actor.close()
        return done

    hang = lambda _: (ends.wait(60), (200, reply()))[1]  # noqa: E731
    with serving(hang, hang, (200, reply("next"))) as server:
        done = asyncio.run(run(judge(server, max_concurrent=2)))
        assert server.most <= 4  # Two abandoned requests and two concurrent ones.
        ends.set()
    assert [d.text for d in done] == ["next"] * 20


@pytest.mark.parametrize(
    "options, says",
    [
        ({"url": "127.0.0.1:8000"}, "must be like http://127.0.0.1:8000/v1"),
        ({"url": "http://name:hidden@host/v1"}, "without a password or a query"),
        ({"url": "http://host/v1?key=hidden"}, "without a password or a query"),
        ({"api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY holds none"),
        ({"api_key_env": "sk-hidden"}, "must name an environment variable"),
        ({"api_key_env": "BAD_KEY"}, "BAD_KEY holds none"),
    ],
)
def test_what_cannot_work_is_refused_at_start_up(options, says, monkeypatch):
    monkeypatch.setenv("BAD_KEY", "sk-hidden\nsecond line")
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        judge("http://host/v1", **options)
    assert "hidden" not in str(caught.value)


def test_an_api_is_not_asked_to_continue_a_message():
    begun = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "prefix": True},
    ]
    speaker = judge("http://host/v1").bind_episode(SamplingParams(max_tokens=9), 0)
    with pytest.raises(ValueError, match="judge: an API cannot continue the last message"):
        asyncio.run(speaker.converse(begun).respond())


FAILING = """
import asyncio, logging, sys, traceback
logging.basicConfig(level=logging.DEBUG)
from rl_core.engines.api import ApiActor, make_api_actor
from rl_core.types import SamplingParams, Trajectory

async def ask(url):
    actor = ApiActor(name="judge", url=url, model="m", api_key_env="JUDGE_KEY", max_retries=1)
    speaker = actor.bind_episode(SamplingParams(max_tokens=9), 0)
    print(actor, actor.client, repr(speaker))
    try:
        await speaker.converse([{"role": "user", "content": "hello"}]).respond()
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
    scripts = [
        lambda handler: (
            401,
            {"error": {"message": f"Incorrect API key: {handler.headers['Authorization']}"}},
        ),
        lambda handler: (500, f"broken: {handler.headers}".encode()),
        lambda handler: (200, {"error": handler.headers["Authorization"]}),
        GIVE_UP,
    ]
    env = os.environ | {"JUDGE_KEY": KEY, "OPENAI_LOG": "debug", "PYTHONPATH": str(ROOT)}
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(script)) for script in scripts]
        command = [
            sys.executable,
            "-c",
            FAILING,
            *(s.url for s in servers),
            "http://127.0.0.1:9/v1",
        ]
        done = subprocess.run(
            command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr
    assert "Incorrect API key: Bearer ***" in done.stderr and "DEBUG" in done.stderr
    assert all(KEY in server.requests[0][1]["Authorization"] for server in servers)  # it was sent
    for text in (done.stdout, done.stderr):
        assert KEY not in text and KEY[3:12] not in text


JUDGED = """
async def rollout(task, actors):
    reply = await actors["policy"].respond(task.messages)
    verdicts = await actors["judge"].respond("Is this right? " + reply.text, n=2, temperature=0.0)
    return [reply.trajectory(reward=sum(float(v.text) for v in verdicts))]
"""
IN_TURN = """
turns = "judge -> policy"
def reward_fn(messages): return float(messages[-2]["content"] == "0.5")
"""


def run_judged(env, model, folder, server) -> int:
    (folder / "x.py").write_text(env)
    (folder / "rows.jsonl").write_text('{"prompt": "12"}\n' * 4)
    flags = [
        "--actors.policy.model",
        model,
        "--actors.judge.model",
        "m",
        "--actors.judge.api_key_env",
        "JUDGE_KEY",
    ]
    flags += [
        "--env_path",
        folder / "x.py",
        "--data.train",
        folder / "rows.jsonl",
        "--out",
        folder / "run",
    ]
    flags += words(
        "--max_tokens 8 --max_prompt_tokens 64 --tasks_per_step 2 --group_size 2 --num_steps 3"
    )
    return main([str(flag) for flag in [*flags, "--actors.judge.api", server.url]])


def test_an_endpoint_takes_turns_with_a_policy(tiny_model, tmp_path, capsys):
    with serving((200, reply("0.5"))) as server:
        assert run_judged(IN_TURN, tiny_model, tmp_path, server) == 0
    assert "none of 3 steps made an update" in capsys.readouterr().err, "its rewards are all 1"
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["rollout/policy/reward_mean"] for row in rows] == [1.0] * 3
    assert [row["rollout/judge/requests"] for row in rows] == [4] * 3
    assert server.requests[0][2]["messages"] == [{"role": "user", "content": "12"}]


def test_a_run_whose_judge_refuses_the_key_stops_and_shows_it_nowhere(tiny_model, tmp_path, capfd):
    refuses = (401, {"error": f"Incorrect API key provided: {KEY}"})
    with serving(*[(200, reply("0.5"))] * 8, refuses) as server:
        assert run_judged(JUDGED, tiny_model, tmp_path, server) == 1
    asked = [request for _, _, request in server.requests]
    assert len(asked) > 8 and len({request["seed"] for request in asked[:8]}) == 8
    assert all(request["temperature"] == 0.0 for request in asked)
    printed = capfd.readouterr()
    assert "Incorrect API key provided: ***" in printed.err and KEY not in printed.out + printed.err
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert {"config.yaml", "metrics.jsonl", "step_000001.jsonl.zst"} <= {
        file.name for file in files
    }
    for file in files:
        data = file.read_bytes()
        data = (
            zstandard.ZstdDecompressor().decompressobj().decompress(data)
            if file.suffix == ".zst"
            else data
        )
        assert KEY.encode() not in data, file


def test_an_endpoints_limits_are_flags():
    pytest.importorskip("openai")
    base = words("--actors.bob.model m --env_path x.py --out x --actors.judge.model m")
    base += ["--actors.judge.api", "http://127.0.0.1:9/v1", "--actors.judge.api_key_env", ""]
    usual = make_api_actor(parse_config(base), "judge")
    judge = make_api_actor(parse_config([*base, "--actors.judge.max_tokens", "7"]), "judge")
    assert judge.bind_episode(SamplingParams(max_tokens=256), seed=0).params.max_tokens == 7
    assert usual.bind_episode(SamplingParams(max_tokens=256), seed=0).params.max_tokens == 256


ADD = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "1 + 2, 3 + 4?"}, SEEN]},
    {
        "role": "assistant",
        "content": "I add.",
        "tool_calls": [
            {"id": "c0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}},
        ],
    },
    {"role": "tool", "content": "3", "tool_call_id": "c0"},
    {"role": "tool", "content": [SEEN, {"type": "text", "text": "7"}], "tool_call_id": "c1"},
    {"role": "user", "content": "thanks"},
]
INPUT = {"type": "input_image", "image_url": URL, "detail": "auto"}
SOURCE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]},
}
# TALK and ADD in the format of each API's reference; the official client's type of a request; and a
# truncated response with a text and a call, and its type.
APIS = {
    "/responses": (
        "openai.types.responses.response_create_params.ResponseCreateParamsNonStreaming",
        {
            "input": [
                {"role": "system", "content": "Be brief."},
                {
                    "role": "user",
                    "content": [{"type": "input_text", "text": "1 + 2, 3 + 4?"}, INPUT],
                },
                {"role": "assistant", "content": "I add."},
                {"type": "function_call", "call_id": "c0", "name": "add", "arguments": '{"a": 1}'},
                {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 3}'},
                {"type": "function_call_output", "call_id": "c0", "output": "3"},
                {
                    "type": "function_call_output",
                    "call_id": "c1",
                    "output": [INPUT, {"type": "input_text", "text": "7"}],
                },
                {"role": "user", "content": "thanks"},
            ],
            "tools": [{"type": "function", "strict": False} | ADD],
            "max_output_tokens": 9,
            "temperature": 1.0,
            "store": False,
        },
        "openai.types.responses.Response",
        {
            "id": "resp_1",
            "object": "response",
            "created_at": 1,
            "model": "m",
            "status": "incomplete",
            "incomplete_details": {"reason": "max_output_tokens"},
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "output": [
                {"type": "reasoning", "id": "rs_1", "summary": []},
                {
                    "type": "message",
                    "id": "msg_1",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "More.", "annotations": []}],
                },
                {
                    "type": "function_call",
                    "id": "fc_1",
                    "call_id": "c2",
                    "name": "add",
                    "arguments": '{"a": 5}',
                },
            ],
            "usage": {
                "input_tokens": 7,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": 3,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": 10,
            },
        },
    ),
    "/messages": (
        "anthropic.types.message_create_params.MessageCreateParamsNonStreaming",
        {
            "system": "Be brief.",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "1 + 2, 3 + 4?"}, SOURCE]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "text", "text": "I add."},
                        {"type": "tool_use", "id": "c0", "name": "add", "input": {"a": 1}},
                        {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 3}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c0", "content": "3"},
                        {
                            "type": "tool_result",
                            "tool_use_id": "c1",
                            "content": [SOURCE, {"type": "text", "text": "7"}],
                        },
                        {"type": "text", "text": "thanks"},
                    ],
                },
            ],
            "tools": [{"name": "add", "description": "Adds.", "input_schema": ADD["parameters"]}],
            "max_tokens": 9,
            "temperature": 1.0,
        },
        "anthropic.types.Message",
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": "m",
            "stop_reason": "max_tokens",
            "stop_sequence": None,
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "More."},
                {"type": "tool_use", "id": "c2", "name": "add", "input": {"a": 5}},
            ],
            "usage": {"input_tokens": 7, "output_tokens": 3},
        },
    ),
}


def named(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("path", APIS)
def test_an_actor_speaks_the_api_that_its_url_names(path, monkeypatch):
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "another")
    of_request, body, of_answer, answer = APIS[path]
    named(of_answer).model_validate(answer)
    TypeAdapter(named(of_request)).validate_python(body | {"model": "m"})
    with serving((200, answer)) as server:
        actor = judge(f"{server.url}{path}", timeout_s=30)

        async def run():
            try:
                speaker = actor.bind_episode(SamplingParams(max_tokens=9), 0)
                return await speaker.respond(TALK, tools=[{"type": "function", "function": ADD}])
            finally:
                await actor.close()

        replies = asyncio.run(run())
        [(asked_path, headers, asked)] = server.requests
    assert asked_path == f"/v1{path}"
    assert asked == {"model": "m"} | body
    sent = {headers["Authorization"], headers["X-Api-Key"]} - {None}
    assert sent <= {f"Bearer {KEY}", KEY} and sent
    assert replies.text == "More." and replies.truncated
    calls = replies.messages[-1]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["add"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"a": 5}
    counts = values(actor)
    assert (counts["prompt_tokens"], counts["completion_tokens"]) == (7, 3)


@pytest.mark.parametrize("path", APIS)
def test_the_key_of_an_api_is_the_official_clients(path, monkeypatch):
    variable = "ANTHROPIC_API_KEY" if path == "/messages" else "OPENAI_API_KEY"
    for name in ("ANTHROPIC_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "x" * (name == variable))
    actor = judge(f"http://127.0.0.1:9/v1{path}", api_key_env=None)
    assert actor.key == "x"
    asyncio.run(actor.close())


@pytest.mark.parametrize("path", APIS)
def test_what_an_api_lacks_is_refused(path):
    with serving((200, {})) as server:
        [error] = ask(judge(f"{server.url}{path}"), params=SamplingParams(max_tokens=9, min_p=0.1))
        assert isinstance(error, ValueError) and "min_p=0.1" in str(error)
        [error] = ask(judge(f"{server.url}{path}"))
        assert "an answer that cannot be read" in str(error) and KEY not in str(error)


RANKING = """
from rl_core import reward, rewards

turns = "policy"

def load_tasks(split):
    return [{"prompt": f"{n} and {n * 7 % 10}"} for n in range(8)]

async def group_reward_fn(trajectories, actors):
    return await rewards.ranked(trajectories, actors["judge"], "Many digits.", max_tokens=999)

@reward(weight=0.0)
async def digits(completion):
    return sum(map(str.isdigit, completion)) / 8
"""


def last_text(handler) -> str:
    content = handler.asked["messages"][-1]["content"]
    return content if isinstance(content, str) else content[0]["text"]


def rank_digits(handler) -> str:
    """The verdict of a judge who ranks the replies by their digits."""
    form = r"(?s)<reply (\w+)>\n\[\1 assistant\]\n(.*?)\n</reply>"
    shown = re.findall(form, last_text(handler))
    counts = {key: sum(map(str.isdigit, text)) for key, text in shown}
    order = sorted(counts.values())
    return "\n".join(f"{key}: {order.index(counts[key]) / len(order)}" for key in counts)


def test_a_run_learns_from_the_rankings_of_an_endpoint(tiny_model, tmp_path):
    (tmp_path / "env.py").write_text(RANKING)
    flags = (
        "--max_tokens 8 --max_prompt_tokens 24 --tasks_per_step 8 --group_size 8 --num_steps 10 "
    )
    flags += "--optim.lr 3e-3 --actors.judge.model m "
    flags += "--actors.judge.api_key_env JUDGE_KEY --actors.judge.api"
    with serving(lambda handler: (200, reply(rank_digits(handler)))) as server:
        models = ["--actors.policy.model", tiny_model, "--env_path", tmp_path / "env.py"]
        out = run(tmp_path / "run", *models, flags, server.url)
    # One call for each group.
    assert len(server.requests) == 80 and server.requests[0][2]["max_tokens"] == 999
    digits = [row["rollout/policy/digits"] for row in steps(out)]
    # A tenth of the ids are digits.
    assert digits[0] < 0.15 and digits[-1] > 0.3, digits


@pytest.mark.parametrize("path", ["", "/messages"])
def test_endpoints_rank_groups_and_check_criteria(path):
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    group = [
        Trajectory(messages=messages),
        Trajectory(messages=[messages[0], messages[1] | {"content": "x"}]),
    ]

    def says(handler):
        text = rank_digits(handler)
        if keys := re.findall(r"<rubric (\w+)>", last_text(handler)):
            text = "\n".join(f"{key}: yes" for key in keys)
        if not path:
            return 200, reply(text)
        return 200, APIS[path][3] | {"content": [{"type": "text", "text": text}]}

    async def scores(actor):
        speaker = actor.bind_episode(SamplingParams(max_tokens=99), 0)
        try:
            ranked = await rewards.ranked(group, speaker, "Right.")
            return ranked, await rewards.rubric([{"criterion": "Right."}], speaker, messages)
        finally:
            await actor.close()

    with serving(says) as server:
        result = asyncio.run(scores(judge(f"{server.url}{path}", timeout_s=30)))
    assert result == ([0.5, 0.0], {"rubric": 1.0}) and len(server.requests) == 2
