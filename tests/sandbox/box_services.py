"""Small servers that speak the HTTP of sandbox services, as the SDKs' sources show it. Commands run
in machines of machine.py. No substitute for the services."""

import asyncio
import base64
import json
import re
import secrets
import signal
import threading
from contextlib import contextmanager
from urllib.parse import parse_qsl, unquote

import pytest
from aiohttp import web
from machine import Machine, missing

from rl_core.sandbox import boxes

KEY = "a-key-of-this-test"
ENVD_TOKEN = "a-token-of-envd"

DRAIN_S = 0.2
CUT_S = 0.3


class Service:
    """A server in a thread. `faults`: answers to the next requests of a kind (create, exec, kill,
    ...), each a status and headers, "cut" to act and to cut the connection, or a list: the
    answers to a command, which does not run."""

    def __init__(self, key):
        self.key = key
        self.machines = {}
        self.sandboxes = {}  # id -> the request that created it
        self.seen = []  # Kinds of requests.
        self.faults = {}
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.url = self.run(self.serve())

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def running(self):
        return [name for name, machine in self.machines.items() if machine.is_running]

    def fault(self, kind):
        self.seen.append(kind)
        return self.faults[kind].pop(0) if self.faults.get(kind) else None

    async def serve(self):
        app = web.Application(middlewares=[self.check], client_max_size=1 << 30)
        app.add_routes(self.routes())
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    @web.middleware
    async def check(self, request, handler):
        fault = request["fault"] = self.fault(getattr(request.match_info.handler, "__name__", ""))
        if isinstance(fault, tuple):
            status, headers = fault
            return self.failure(status, f"no, {self.key}", headers)
        if not self.is_allowed(request):
            return self.failure(401, "Invalid credentials")
        if fault == "cut":
            self.loop.call_later(CUT_S, request.transport.abort)
        try:
            response = await handler(request)
        except ConnectionError:  # The client has left.
            return web.Response()
        if fault == "cut":
            request.transport.abort()
        return response

    async def stop(self):
        await self.runner.cleanup()

    def close(self):
        for machine in self.machines.values():
            machine.kill()
        self.run(self.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)


class E2B(Service):
    """https://e2b.dev: sandboxes of the control API, and envd's processes and files in them."""

    def routes(self):
        return [
            web.post("/v2/sandboxes", self.create),
            web.get("/v2/sandboxes", self.list),
            web.get("/sandboxes/{id}", self.info),
            web.delete("/sandboxes/{id}", self.kill),
            web.post("/sandboxes/{id}/timeout", self.renew),
            web.get("/templates/aliases/{alias}", self.alias),
            web.post("/v3/templates", self.request_build),
            web.post("/v2/templates/{id}/builds/{build}", self.build),
            web.get("/templates/{id}/builds/{build}/status", self.build_status),
            web.get("/health", self.health),
            web.get("/files", self.read),
            web.post("/files", self.write),
            web.post("/process.Process/Start", self.exec),
            web.post("/process.Process/{verb}", self.call),
        ]

    def __init__(self, key):
        self.by_idempotency = {}
        self.templates = {"base"}
        self.processes = {}
        super().__init__(key)

    @property
    def environ(self):
        return {"E2B_API_KEY": self.key, "E2B_API_URL": self.url, "E2B_SANDBOX_URL": self.url}

    def is_allowed(self, request):
        if "E2b-Sandbox-Id" in request.headers:
            return request.headers.get("X-Access-Token") == ENVD_TOKEN
        return request.headers.get("X-API-KEY") == self.key

    def failure(self, status, text, headers=None):
        body = {"message": text, "code": status}
        return web.json_response(body, status=status, headers=headers)

    def machine(self, request):
        """The machine of a request to envd."""
        machine = self.machines[request.headers["E2b-Sandbox-Id"]]
        if not machine.is_running:
            text = {"message": "The sandbox was not found", "code": 502}
            raise web.HTTPBadGateway(text=json.dumps(text), content_type="application/json")
        return machine

    def listed(self, name):
        created = self.sandboxes[name]
        return {
            "templateID": created["templateID"],
            "sandboxID": name,
            "clientID": "c",
            "startedAt": "2026-01-01T00:00:00Z",
            "endAt": "2026-01-01T00:00:00Z",
            "cpuCount": 2,
            "memoryMB": 512,
            "diskSizeMB": 512,
            "state": "running",
            "envdVersion": "0.6.7",
            "metadata": created.get("metadata", {}),
        }

    async def create(self, request):
        created = await request.json()
        if created["templateID"] not in self.templates:
            return self.failure(404, f"template '{created['templateID']}' not found")
        again = request.headers.get("Idempotency-Key")
        if again not in self.by_idempotency:
            name = secrets.token_hex(4)
            self.by_idempotency[again] = name
            self.sandboxes[name] = created
            self.machines[name] = Machine()
        name = self.by_idempotency[again]
        made = self.listed(name) | {"envdAccessToken": ENVD_TOKEN}
        return web.json_response(made, status=201)

    async def list(self, request):
        asked = dict(parse_qsl(request.query.get("metadata", "")))
        asked = {unquote(name): unquote(value) for name, value in asked.items()}
        made = [self.listed(name) for name in self.running()]
        return web.json_response([s for s in made if asked.items() <= s["metadata"].items()])

    async def info(self, request):
        name = request.match_info["id"]
        if not self.machines[name].is_running:
            return self.failure(404, "not found")
        return web.json_response(self.listed(name))

    async def kill(self, request):
        machine = self.machines[request.match_info["id"]]
        was_running = machine.is_running
        machine.kill()
        return web.Response(status=204) if was_running else self.failure(404, "not found")

    async def renew(self, request):
        self.sandboxes[request.match_info["id"]] |= await request.json()
        return web.Response(status=204)

    async def alias(self, request):
        name = request.match_info["alias"]
        if name not in self.templates:
            return self.failure(404, "not found")
        return web.json_response({"templateID": name, "public": False})

    async def request_build(self, request):
        asked = await request.json()
        names = {"templateID": asked["name"], "buildID": "b", "names": [], "aliases": []}
        return web.json_response({**names, "tags": [], "public": False}, status=202)

    async def build(self, request):
        asked = await request.json()
        self.templates.add(request.match_info["id"])
        self.built = asked["fromImage"]
        return web.Response(status=202)

    async def build_status(self, request):
        name = request.match_info["id"]
        status = {"templateID": name, "buildID": "b"}
        status["status"] = "building" if self.built == "never:built" else "ready"
        return web.json_response({**status, "logs": [], "logEntries": []})

    async def health(self, request):
        self.machine(request)
        return web.Response(status=204)

    async def read(self, request):
        data = await self.machine(request).read(request.query["path"])
        if data is None:
            return self.failure(404, "no such file")
        return web.Response(body=data)

    async def write(self, request):
        machine, path = self.machine(request), request.query["path"]
        field = await (await request.multipart()).next()
        await machine.write(path, await field.read())
        return web.json_response([{"path": path, "name": "f", "type": "file"}])

    async def exec(self, request):
        machine = self.machine(request)
        asked = json.loads((await request.read())[5:])  # behind a flag and a length
        config = asked["process"]
        argv = [config["cmd"], *config.get("args", [])]
        process = await machine.start(
            argv, environ=config.get("envs"), stdin=asked.get("stdin", False)
        )
        self.processes[process.pid] = process
        response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        await response.prepare(request)
        if isinstance(request["fault"], list):
            await response.write(b"".join(request["fault"]))
            return response
        await send_event(response, {"start": {"pid": process.pid}})
        # Like envd, the pipes are closed once the process has ended.
        pumps = [pump(process.stdout, response, "stdout"), pump(process.stderr, response, "stderr")]
        pumps = [asyncio.ensure_future(work) for work in pumps]
        code = await ended(process)
        await asyncio.wait(pumps, timeout=DRAIN_S)
        for task in pumps:
            task.cancel()
        process._transport.close()
        if not machine.is_running:
            request.transport.close()
            return response
        end = {"exitCode": max(code, -1), "exited": code >= 0, "status": f"exit status {code}"}
        if code < 0:
            end["status"] = f"signal: {signal.strsignal(-code).lower()}"
        end |= {"error": end["status"]} if code else {}
        await send_event(response, {"end": end})
        await response.write(b"\2\0\0\0\2{}")
        return response

    async def call(self, request):
        machine, asked = self.machine(request), await request.json()
        process = self.processes[asked["process"]["pid"]]
        verb = request.match_info["verb"]
        if not machine.is_running or process.returncode is not None:
            return web.json_response({"code": "not_found", "message": "no process"}, status=404)
        if verb == "SendInput":
            process.stdin.write(base64.b64decode(asked["input"]["stdin"]))
            await process.stdin.drain()
        elif verb == "CloseStdin":
            process.stdin.close()
        return web.json_response({})


class Daytona(Service):
    """https://www.daytona.io: sandboxes of the API, and sessions and files of their toolboxes."""

    def routes(self):
        return [
            web.post("/api/sandbox", self.create),
            web.get("/api/sandbox", self.list),
            web.get("/api/sandbox/{id}", self.info),
            web.delete("/api/sandbox/{id}", self.kill),
            web.post("/api/sandbox/{id}/last-activity", self.renew),
            web.post("/box/{id}/process/session", self.open_session),
            web.post("/box/{id}/process/session/{session}/exec", self.exec),
            web.get("/box/{id}/process/session/{session}/command/{command}/logs", self.follow),
            web.get("/box/{id}/process/session/{session}/command/{command}", self.command),
            web.post("/box/{id}/process/session/{session}/command/{command}/input", self.input),
            web.post("/box/{id}/files/bulk-upload", self.write),
            web.post("/box/{id}/files/bulk-download", self.read),
        ]

    def __init__(self, key):
        self.commands = {}
        self.texts = {}
        super().__init__(key)

    @property
    def environ(self):
        return {"DAYTONA_API_KEY": self.key, "DAYTONA_API_URL": f"{self.url}/api"}

    def is_allowed(self, request):
        return request.headers.get("Authorization") == f"Bearer {self.key}"

    def failure(self, status, text, headers=None):
        body = {"statusCode": status, "source": "DAYTONA_API", "code": "X", "message": text}
        return web.json_response(body, status=status, headers=headers)

    def shown(self, name):
        created = self.sandboxes[name]
        return {
            "id": name,
            "organizationId": "o",
            "name": created["name"],
            "user": "daytona",
            "env": {},
            "labels": created["labels"],
            "public": False,
            "networkBlockAll": created["networkBlockAll"],
            "kvm": False,
            "target": "eu",
            "cpu": 1,
            "gpu": 0,
            "memory": 1,
            "disk": 3,
            "state": "started",
            "toolboxProxyUrl": f"{self.url}/box",
        }

    async def create(self, request):
        created = await request.json()
        if created["name"] in [s["name"] for s in self.sandboxes.values()]:
            return self.failure(409, f"{created['name']} already exists")
        name = secrets.token_hex(4)
        self.machines[name] = Machine()
        self.sandboxes[name] = created
        return web.json_response(self.shown(name))

    async def list(self, request):
        asked = json.loads(request.query.get("labels", "{}"))
        made = [self.shown(name) for name in self.running()]
        items = [s for s in made if asked.items() <= s["labels"].items()]
        return web.json_response({"items": items, "nextCursor": None})

    def named(self, request):
        """The running machine whose id or name is in the path, or an error."""
        asked = request.match_info["id"]
        for name, machine in self.machines.items():
            if asked in (name, self.sandboxes[name]["name"]) and machine.is_running:
                return name, machine
        text = {"statusCode": 404, "source": "DAYTONA_API", "code": "NOT_FOUND", "message": "gone"}
        raise web.HTTPNotFound(text=json.dumps(text), content_type="application/json")

    async def info(self, request):
        return web.json_response(self.shown(self.named(request)[0]))

    async def kill(self, request):
        name, machine = self.named(request)
        machine.kill()
        return web.json_response(self.shown(name))

    async def renew(self, request):
        self.named(request)
        return web.Response(status=201)

    async def open_session(self, request):
        self.named(request)
        return web.Response(status=201)

    async def exec(self, request):
        asked = await request.json()
        assert asked["runAsync"] and asked["suppressInputEcho"]
        name = secrets.token_hex(4)
        machine = self.named(request)[1]
        self.texts[name] = asked["command"]
        self.commands[name] = await machine.start(["bash", "-c", asked["command"]], stdin=True)
        return web.json_response({"cmdId": name}, status=202)

    async def command(self, request):
        """The exit code is missing while the command runs, and if its session was killed."""
        name = request.match_info["command"]
        code = self.commands[name].returncode
        shown = {"id": name, "command": self.texts[name]}
        if isinstance(request["fault"], list):
            [code] = request["fault"]
        if code is not None and code != -9:
            shown["exitCode"] = code
        return web.json_response(shown)

    async def follow(self, request):
        """A WebSocket with the output: each line behind the mark of its stream."""
        machine = self.named(request)[1]
        process = self.commands[request.match_info["command"]]
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if isinstance(request["fault"], list):
            text = self.texts[request.match_info["command"]].encode()
            mark = b"".join(re.findall(b"printf ([0-9a-f]+);", text))
            for message in request["fault"]:
                await socket.send_bytes(message.replace(b"MARK", mark))
            await socket.close()
            return socket
        reading = asyncio.ensure_future(socket.receive())  # Answers pings.
        lock = asyncio.Lock()
        await asyncio.gather(
            pump_lines(process.stdout, socket, lock, b"\1\1\1"),
            pump_lines(process.stderr, socket, lock, b"\2\2\2"),
        )
        await ended(process)
        reading.cancel()
        if not machine.is_running:
            request.transport.close()
            return socket
        await socket.close()
        return socket

    async def input(self, request):
        process = self.commands[request.match_info["command"]]
        data = (await request.json())["data"]
        process.stdin.write((data if data.endswith("\n") else f"{data}\n").encode())
        await process.stdin.drain()
        return web.Response(status=204)

    async def write(self, request):
        machine = self.named(request)[1]
        async for field in await request.multipart():
            if field.name.endswith(".path"):
                path = await field.text()
            else:
                await machine.write(path, await field.read())
        return web.Response()

    async def read(self, request):
        [path] = (await request.json())["paths"]
        data = await self.named(request)[1].read(path)
        kind, data = ("error", b"file not found") if data is None else ("file", data)
        head = f'--x\r\nContent-Disposition: form-data; name="{kind}"; filename="{path}"\r\n'
        body = head.encode() + b"Content-Type: application/octet-stream\r\n\r\n" + data
        kind = "multipart/form-data; boundary=x"
        return web.Response(body=body + b"\r\n--x--\r\n", headers={"Content-Type": kind})


async def pump_lines(stream, socket, lock, mark):
    """A line is sent when it has ended."""
    line = bytearray()
    while True:
        data = await stream.read(1 << 15)
        ended, newline, rest = data.rpartition(b"\n")
        if newline or (line and not data):
            line += ended
            text = b"".join(mark + piece + b"\n" for piece in line.split(b"\n"))
            async with lock:
                for start in range(0, len(text), 1 << 15):
                    await socket.send_bytes(text[start : start + (1 << 15)])
            line.clear()
        line += rest
        if not data:
            return


async def ended(process):
    """The exit status. Process.wait() would wait for the pipes too."""
    while process.returncode is None:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    return process.returncode


async def send_event(response, event):
    data = json.dumps({"event": event}).encode()
    await response.write(b"\0" + len(data).to_bytes(4, "big") + data)


async def pump(stream, response, name):
    while data := await stream.read(1 << 15):
        await send_event(response, {"data": {name: base64.b64encode(data).decode()}})


@contextmanager
def service(name, monkeypatch):
    """A running server, to which the SDK of the service is led."""
    pytest.importorskip(name, reason=f"{name} is not installed")
    if reason := missing():
        pytest.skip(reason)
    if name == "modal":
        from modal_server import Modal as Server
    else:
        Server = E2B if name == "e2b" else Daytona
    server = Server(KEY)
    try:
        for variable, value in server.environ.items():
            monkeypatch.setenv(variable, value)
        yield server
    finally:
        boxes.SERVICES.close()
        server.close()
