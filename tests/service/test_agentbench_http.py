"""Task servers of AgentBench as environments. The server here is written after the protocol as
AgentBench's own client and workers speak it, and plays envs/agentbench_db.py's rows."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time

import aiohttp
import pytest
import stage
from aiohttp import web
from kit import ROOT, STOP, metrics, run, wait_until

from rl_core.data.task_rows import make_task
from rl_core.environments.env_file import load_env
from rl_core.environments.service import agentbench
from rl_core.environments.service.served_module import load_served

KINDS = ("controller", "worker", "old")
DB = load_env(str(ROOT / "envs/agentbench_db.py"))
PARTS = DB.hooks["start"].function.__globals__
ROWS = [row for row in DB.load_tasks("train") if row["type"] != ["counting"]][:40]


KEEP_ALIVE_S = 0.3  # As long as the longest turn: connections close while turns end.


class Host:
    """Tasks `db`, a row each, and `letters`, which earns the share of "a" in one reply."""

    max_rounds = 3

    def __init__(self, kind: str):
        self.kind, self.fault, self.busy, self.places = kind, "", 0, 10**6
        self.sessions: dict[int, dict] = {}
        self.seen: list[tuple[str, dict]] = []
        self.cancelled: list[int] = []

    async def get_indices(self, request):
        if self.kind != "worker" and request.query.get("name") not in ("db", "letters"):
            return web.json_response({"detail": "Task does not exist"}, status=400)
        return web.json_response([-1, *range(len(ROWS))])

    async def list_workers(self, request):
        return web.json_response({"db": {"workers": {}}, "letters": {"workers": {}}})

    async def start_sample(self, request):
        asked = await request.json()
        self.seen.append(("start_sample", asked))
        if self.kind == "worker" and type(asked.get("session_id")) is not int:
            return web.json_response({"detail": "session_id: field required"}, status=422)
        if self.busy or len(self.sessions) >= self.places:
            self.busy -= bool(self.busy)
            return web.json_response({"detail": "No workers available"}, status=406)
        number = asked["session_id"] if self.kind == "worker" else len(self.seen)
        row = ROWS[asked["index"]]
        messages = [
            {"role": "system", "content": "Answer by SQL."},
            {"role": "user", "content": [{"type": "text", "text": row["prompt"]}]},
        ]
        session = {"row": row, "state": PARTS["start"](make_task(row, 0, env="db", split="train"))}
        session |= {"history": messages, "rounds": 0, "task": asked.get("name", "db")}
        self.sessions[number] = session
        return await self.reply(request, number, messages, "running", 0, None)

    async def interact(self, request):
        asked = await request.json()
        self.seen.append(("interact", asked))
        number = request.headers.get("session_id") if self.kind == "controller" else None
        number = int(number if number is not None else asked["session_id"])
        session = self.sessions.get(number)
        if session is None:
            return web.json_response({"detail": "No such session"}, status=400)
        if self.kind == "old":
            if asked["agent_response"]["status"] == "agent context limit":
                return await self.reply(request, number, [], "agent context limit", 0, None)
            text = {"role": "assistant", "content": asked["agent_response"]["content"]}
            if text["content"].startswith("SQL:"):
                arguments = json.dumps({"query": text["content"][4:]})
                call = {"id": "1", "function": {"name": "execute_sql", "arguments": arguments}}
                text["tool_calls"] = [call]
        else:
            [text] = asked["messages"]
            for call in text.get("tool_calls", ()):
                json.loads(call["function"]["arguments"])
        session["history"].append(text)
        session["rounds"] += 1
        if session["task"] == "letters":
            share = text["content"].count("a") / max(1, len(text["content"]))
            return await self.reply(request, number, [], "completed", share, share)
        if text.get("tool_calls"):
            more = PARTS["answers"](text, {"execute_sql": session["state"].execute_sql})
            if self.kind == "old":
                more = [{"role": "user", "content": one["content"]} for one in more]
            session["history"] += more
            if session["rounds"] >= self.max_rounds:
                return await self.reply(request, number, more, "task limit reached", 0, None)
            return await self.reply(request, number, more, "running", 0, None)
        task = make_task(session["row"], 0, env="db", split="train")
        reward = PARTS["reward_fn"]([text], session["state"], task)
        return await self.reply(request, number, [], "completed", reward, reward == 1.0)

    async def cancel(self, request):
        asked = await request.json()
        number = int(request.headers.get("session_id", asked.get("session_id")))
        assert self.sessions.pop(number, None)
        self.cancelled.append(number)
        return web.json_response({"session_id": number})

    async def reply(self, request, number, messages, status, reward, is_right):
        verb = request.path.rpartition("/")[2]
        fault = self.fault if self.fault.partition(" ")[0] in (verb, "both") else ""
        fault = fault.partition(" ")[2]
        if fault == "hang":
            await asyncio.sleep(60)
        if fault == "close":
            request.transport.close()
        if fault == "text":
            return web.Response(text="<html>Bad gateway</html>")
        if fault == "500":
            return web.json_response({"detail": "Traceback: KeyError"}, status=500)
        if fault.startswith("status="):
            status = fault.removeprefix("status=")
        if fault == "nan":
            reward, is_right = float("nan"), float("nan")
        if fault == "roles":
            messages = [{"content": "x"}]
        if status != "running":
            del self.sessions[number]
        tools = DB.tools
        body = {"messages": messages, "tools": tools, "status": status, "reward": reward}
        body |= {"finish": status != "running", "metrics": {"score": reward, "text": "x"}}
        headers = {"Session_id": str(number)}
        if self.kind == "worker" and verb == "interact":
            return web.json_response({"session_id": number, "env_out": body})
        if self.kind != "old":
            return web.json_response(body, headers=headers)
        history = self.sessions[number]["history"] if number in self.sessions else []
        history = [one | {"content": text_of(one["content"])} for one in history]
        for one in history:
            one["role"] = "agent" if one["role"] == "assistant" else "user"
            one.pop("tool_calls", None)
        result = None if is_right is None else {"is_correct": is_right, "answer": "x"}
        output = {"index": 0, "status": status, "result": result, "history": history}
        return web.json_response({"session_id": number, "output": output})

    async def calculate_overall(self, request):
        results = (await request.json())["results"]
        right = sum(one["result"]["is_correct"] for one in results) / len(results)
        return web.json_response({"SELECT": 0.25 * right, "INSERT": 0.5 * right})


def text_of(content):
    return content if isinstance(content, str) else content[0]["text"]


@pytest.fixture(scope="module")
def hosts():
    """kind -> (Host, host and port)."""
    loop, observed = asyncio.new_event_loop(), {}

    async def begin(kind):
        host, app = Host(kind), web.Application()
        for verb in ("get_indices", "list_workers"):
            app.router.add_get(f"/api/{verb}", getattr(host, verb))
        for verb in ("start_sample", "interact", "cancel", "calculate_overall"):
            app.router.add_post(f"/api/{verb}", getattr(host, verb))
        runner = web.AppRunner(app, handler_cancellation=True, keepalive_timeout=KEEP_ALIVE_S)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=2048)  # The backlog of uvicorn.
        await site.start()
        observed[kind] = host, f"127.0.0.1:{runner.addresses[0][1]}"

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    for kind in KINDS:
        asyncio.run_coroutine_threadsafe(begin(kind), loop).result(10)
    yield observed
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


@pytest.fixture
def host_of(hosts):
    def host_of(kind: str, settings: str = "", task: str = "db"):
        host, address = hosts[kind]
        host.fault, host.busy, host.places = "", 0, 10**6
        host.sessions.clear()
        host.seen.clear()
        host.cancelled.clear()
        url = f"http+agentbench://{address}/{task}{settings}"
        return host, load_env(url, module=load_served(url))

    return host_of


def play(env, *replies, index: int = 0, max_tokens: int = 2000, **options):
    row = {"prompt": f"db {index}", "index": index}
    rule = list(replies)
    [observed] = stage.run(
        env, stage.cast(policy=rule), rows=[row], max_tokens=max_tokens, **options
    )
    return observed


def called(query: str, kind: str) -> str:
    if kind == "old":
        return f"SQL:{query}"
    call = {"name": "execute_sql", "arguments": {"query": query}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


@pytest.mark.parametrize("kind", KINDS)
def test_labels_earn_one_and_wrong_answers_nothing(host_of, kind):
    host, env = host_of(kind)
    for index in range(4):
        row = ROWS[index]
        is_change = row["type"][0] in ("INSERT", "UPDATE")
        right = [called(row["label"][0], kind), "done"] if is_change else [row["label"][0]]
        observed = play(env, *right, index=index)
        assert (observed.status, observed.reward) == ("ok", 1.0), observed.error
        assert len(observed.turns) == len(right) == len(observed.turn_rewards)
        assert observed.turn_rewards[-1] == 1.0
        assert observed.metrics["completed"] == 1.0
        assert observed.messages[1]["content"] == row["prompt"]
        assert play(env, "no idea", index=index).reward == 0.0
    assert not host.sessions and not host.cancelled


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_server_says_and_hears(host_of, kind):
    host, env = host_of(kind)
    observed = play(env, called("SELECT 7, 'x'", kind), "<think>so</think>\nnothing")
    assert [m["role"] for m in observed.messages] == {
        "old": ["user", "user", "assistant", "user", "assistant"]
    }.get(kind, ["system", "user", "assistant", "tool", "assistant"])
    assert json.loads(observed.messages[3]["content"]) == [[7, "x"]]
    heard = [body for verb, body in host.seen if verb == "interact"]
    if kind == "old":
        assert [h["agent_response"]["status"] for h in heard] == ["normal"] * 2
        assert heard[1]["agent_response"]["content"] == "nothing"
    else:
        assert heard[0]["messages"][0]["tool_calls"][0]["function"]["name"] == "execute_sql"
        assert heard[1]["messages"][0] == {"role": "assistant", "content": "nothing"}
        assert observed.metrics["score"] == 0.0 and "text" not in observed.metrics
    assert ("session_id" in heard[0]) == (kind != "controller")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "status, metric",
    [("agent validation failed", "invalid"), ("agent invalid action", "invalid")],
)
def test_an_end_by_what_the_model_did_is_scored(host_of, kind, status, metric):
    host, env = host_of(kind)
    host.fault = f"interact status={status}"
    observed = play(env, called("SELECT 1", kind))
    assert (observed.status, observed.reward, observed.metrics[metric]) == ("ok", 0.0, 1.0)
    host.fault = ""
    observed = play(env, called("SELECT 1", kind))
    assert (observed.reward, observed.metrics["task_limit"], len(observed.turns)) == (0.0, 1.0, 3)
    observed = play(env, called("SELECT 1", kind), max_turns=2)
    assert (
        observed.status,
        observed.reward,
        sum(observed.metrics[m] for m in ("completed", metric)),
    ) == (
        "ok",
        0.0,
        0.0,
    )
    assert len(host.cancelled) == 1 and not host.sessions


FAULTS = {
    "text": "must answer a JSON object, answered '<html>",
    "500": "failed with 500: .*KeyError",
    "hang": "was not answered within 0.5 s",
    "close": "(ServerDisconnected|ClientOS|ConnectionReset)",
    "roles": "messages must have the form of chat completions",
    "status=task error": "ended with status 'task error'",
    "status=cancelled": "ended with status 'cancelled'",
    "status=flying": "ended with status 'flying'",
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_server_does_wrong_is_a_recorded_failure(host_of, kind):
    host, env = host_of(kind, "?timeout_s=0.5")
    faults = FAULTS | {"nan": "must be a finite number"}
    if kind == "old":
        del faults["roles"]
    began = time.monotonic()
    for fault, says in faults.items():
        host.fault = f"interact {fault}"
        observed = play(env, ROWS[0]["label"][0])
        assert observed.status == "failed" and re.search(says, observed.error), (
            fault,
            observed.error,
        )
    for fault in ("text", "hang", "500"):
        host.fault = f"start_sample {fault}"
        observed = play(env, "x")
        assert observed.status == "failed" and re.search(FAULTS[fault], observed.error)
    assert time.monotonic() - began < 60
    assert host.cancelled  # Sessions that the failures left are given back.


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_that_is_cut_off_ends_the_episode(host_of, kind):
    host, env = host_of(kind)
    observed = play(env, "a reply that is far too long", max_tokens=5)
    assert (observed.status, observed.reward) == ("truncated", 0.0)
    assert observed.metrics["context_limit"] == float(kind == "old")
    assert len(host.cancelled) == (kind != "old") and not host.sessions


def test_an_episodes_deadline_gives_the_session_back(host_of):
    host, env = host_of("controller")
    host.fault = "interact hang"
    for timeout_s in (1, 4, 16):
        observed = play(env, "x", timeout_s=timeout_s)
        assert observed.status == "failed"
        if any(verb == "interact" for verb, _ in host.seen):
            break  # The session had begun by the deadline.
    wait_until(lambda: host.cancelled, "the session to be cancelled", 10)


def test_an_episode_waits_for_a_worker_with_room(host_of):
    host, env = host_of("worker")
    host.busy = 2
    assert play(env, ROWS[0]["label"][0]).status == "ok"
    assert len({body["session_id"] for verb, body in host.seen[1:4]}) == 3


def test_200_episodes_share_a_server_that_closes_connections(host_of):
    host, env = host_of("controller")
    host.places = 20
    row = {"prompt": "db 0", "index": 0}
    for _ in range(2):
        host.seen.clear()
        actors = stage.cast(policy=ROWS[0]["label"][0], wait_s=0.3)
        observed = stage.run(env, actors, rows=[row] * 2, group_size=50, timeout_s=100)
        assert [t.error for t in observed if t.status != "ok"] == []
        assert len(observed) == 100 and {t.reward for t in observed} == {1.0}
        num_starts = sum(verb == "start_sample" for verb, _ in host.seen)
        assert num_starts > 200 and not host.sessions


def test_episodes_that_begin_at_once_learn_that_a_worker_wants_a_number(host_of):
    _, env = host_of("worker")
    row = {"prompt": "db 0", "index": 0}
    observed = stage.run(env, stage.cast(policy=ROWS[0]["label"][0]), rows=[row], group_size=8)
    assert [(t.status, t.reward) for t in observed] == [("ok", 1.0)] * 8


def test_rows_are_ranges_of_samples(host_of):
    _, env = host_of("controller", "?train=0-9&eval=30-34")
    assert [row["index"] for row in env.load_tasks("train")] == list(range(10))
    assert [row["index"] for row in env.load_tasks("eval")] == list(range(30, 35))
    _, env = host_of("old", "?eval=30-34")
    assert [row["index"] for row in env.load_tasks("train")] == [*range(30), *range(35, 40)]
    _, env = host_of("worker")
    train, held_out = ([r["index"] for r in env.load_tasks(s)] for s in ("train", "eval"))
    assert sorted(train + held_out) == list(range(40)) and 0 < len(held_out) < 12


def test_old_results_are_scored_by_what_the_url_names(host_of):
    label = ROWS[0]["label"][0]
    for settings, reward in (("?overall=SELECT+INSERT", 0.75), ("?score=is_correct", 1.0)):
        _, env = host_of("old", settings)
        assert play(env, label).reward == reward
    _, env = host_of("old", "?score=answers")
    assert "has no answers; name the score's key by ?score=" in play(env, label).error


@pytest.mark.parametrize(
    "url, says",
    [
        ("{}/dbb", "no such task .*; did you mean 'db'"),
        ("{}/db?trian=1-2", "unknown setting 'trian'; did you mean 'train'"),
        ("{}/db?train=5", "train=5 must be the first and last sample, such as 0-199"),
        ("{}/db?timeout_s=0", "timeout_s=0 must be a number of seconds"),
        ("{}", "must be http.agentbench://HOST:PORT/TASK"),
        ("file+agentbench://{}/db", "must be http.agentbench://HOST:PORT/TASK"),
        ("127.0.0.1:1/db", "get_indices: .*refused.*; start the task server"),
    ],
)
def test_mistakes_are_refused_before_a_model_loads(hosts, url, says):
    url = url.format(hosts["controller"][1])
    if "://" not in url:
        url = f"http+agentbench://{url}"
    with pytest.raises(ValueError, match=says):
        load_served(url)


def test_three_steps_learn(host_of, hosts, tiny_model, tmp_path):
    host_of("controller")
    path = f"http+agentbench://{hosts['controller'][1]}/letters?eval=0-3"
    flags = "--max_tokens 8 --max_prompt_tokens 200 --tasks_per_step 2 --group_size 4 --num_steps 3"
    flags += f" --optim.lr 1e-3 {STOP}"
    out = run(tmp_path / "run", "--model", tiny_model, "--env_path", path, flags)
    observed = [line for line in metrics(out) if "rollout/policy/reward_mean" in line]
    assert len(observed) == 3 and any(
        line.get("learn/policy/grad_norm", 0) > 0 for line in observed
    )
    assert not any(line.get("rollout/policy/failed") for line in observed)


CUT = b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n{"
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
NO_ROOM = b"HTTP/1.1 406 Full\r\nContent-Length: 2\r\n\r\n{}"
REFUSED = NO_ROOM.replace(b"406", b"400")


@pytest.mark.parametrize(
    "answers, status",
    [
        ([b"", b"", WHOLE], 200),
        ([b"", NO_ROOM], 406),
        ([b"", REFUSED], None),
        ([CUT, WHOLE], None),
    ],
)
def test_a_request_is_sent_again_only_if_no_answer_began(answers, status):
    connections = []

    async def answer(reader, writer):
        await reader.readuntil(b"}")
        connections.append(answers[len(connections)])
        writer.write(connections[-1])
        await writer.drain()
        writer.close()

    async def post():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        task = agentbench.parse(f"http+agentbench://127.0.0.1:{port}/db")
        connector = aiohttp.TCPConnector(force_close=True)
        async with server, aiohttp.ClientSession(connector=connector) as http:
            session = agentbench.BenchSession(server=task, http=http, index=0)
            return (await session.post("start_sample", {"index": 0}))[0]

    if status is None:
        with pytest.raises(ConnectionError, match="start_sample"):
            asyncio.run(post())
    else:
        assert asyncio.run(post()) == status
    assert connections == (answers[:1] if answers[0] == CUT else answers)
