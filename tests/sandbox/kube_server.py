"""A server that speaks the API of Kubernetes as far as boxes need it: pods, and exec by WebSocket
(v4.channel.k8s.io). A pod is a first process in namespaces by bubblewrap, where commands run by
nsenter. Written from the documented API; no substitute for a cluster."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import WSMsgType, web
from machine import Machine

FAULT = "fault"
TOKEN = "a-secret-token"
NAMESPACE = "runs"
# Images of pods that do not start, with the state of the container.
WAITING = {
    "no/such:image": ("ImagePullBackOff", 'Back-off pulling image "no/such:image"'),
    "slow:image": ("ContainerCreating", ""),
    "huge:image": None,  # Fits on no node.
}


@dataclass
class KubePod:
    manifest: dict
    status: dict
    machine: Machine | None = None

    def json(self) -> dict:
        return self.manifest | {"status": self.status}

    def kill(self) -> None:
        if self.machine is not None:
            self.machine.kill()


@dataclass
class KubeServer:
    """`faults`: answers to the next requests of a kind (create, read, list, delete, exec), each a
    status with headers, or for an exec "cut", "hang" or a list of the messages that it sends;
    None among them waits for the client."""

    folder: Path
    pods: dict[str, KubePod] = field(default_factory=dict)
    faults: dict[str, list] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    max_pods: int = 1000
    token: str = TOKEN
    tasks: list = field(default_factory=list)
    streams: list = field(default_factory=list)  # Connections of commands with a stdin.
    most: int = 0  # Most pods at the same time.
    port: int = 0
    context: ssl.SSLContext | None = None  # For TLS; client certificates that it knows may come in.

    def __enter__(self) -> KubeServer:
        self.loop = asyncio.new_event_loop()
        # Each pod holds a thread, and the default is four more than there are cores.
        self.loop.set_default_executor(ThreadPoolExecutor(200))
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self.start(), self.loop).result()
        self.write_kubeconfig({"token": TOKEN})
        return self

    def write_kubeconfig(self, user: dict, **cluster: str) -> None:
        cluster["server"] = f"{'https' if self.context else 'http'}://127.0.0.1:{self.port}"
        context = {"cluster": "c", "user": "u", "namespace": NAMESPACE}
        config = {"apiVersion": "v1", "kind": "Config", "current-context": "x"}
        config["clusters"] = [{"name": "c", "cluster": cluster}]
        config["users"] = [{"name": "u", "user": user}]
        config["contexts"] = [{"name": "x", "context": context}]
        self.kubeconfig = self.folder / "kubeconfig"
        self.kubeconfig.write_text(json.dumps(config))

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self.stop(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)

    async def start(self) -> None:
        app = web.Application(middlewares=[self.check])
        pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
        app.router.add_post(pods, self.create)
        app.router.add_get(pods, self.list)
        app.router.add_get(pods + "/{name}", self.read)
        app.router.add_delete(pods + "/{name}", self.delete)
        app.router.add_get(pods + "/{name}/exec", self.exec)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(
            self.runner, "127.0.0.1", 0, shutdown_timeout=0.1, ssl_context=self.context
        )
        await site.start()
        self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        for pod in self.pods.values():
            pod.kill()
        await self.runner.cleanup()

    @web.middleware
    async def check(self, request: web.Request, handler: object) -> web.StreamResponse:
        has_certificate = self.context and request.transport.get_extra_info("peercert")
        if request.headers.get("Authorization") != f"Bearer {self.token}" and not has_certificate:
            return failure(401, "Unauthorized")
        kind = "exec" if request.path.endswith("/exec") else request.match_info.handler.__name__
        self.seen.append(kind)
        fault = self.faults[kind].pop(0) if self.faults.get(kind) else None
        if isinstance(fault, tuple):
            status, headers, message = fault
            return failure(status, message, headers)
        request[FAULT] = fault
        if fault == "hang" and kind != "exec":
            await asyncio.sleep(60)
        return await handler(request)

    async def create(self, request: web.Request) -> web.Response:
        manifest = await request.json()
        name = manifest["metadata"]["name"]
        if name in self.pods:
            return failure(409, f'pods "{name}" already exists')
        if len(self.pods) >= self.max_pods:
            text = f'pods "{name}" is forbidden: exceeded quota: pods, requested: pods=1'
            return failure(403, text)
        pod = self.pods[name] = KubePod(manifest, {"phase": "Pending"})
        self.most = max(self.most, len(self.pods))
        manifest["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
        container = manifest["spec"]["containers"][0]
        if container["image"] in WAITING:
            state = WAITING[container["image"]]
            if state is None:
                text = "0/3 nodes are available: 3 Insufficient memory."
                condition = {"type": "PodScheduled", "status": "False"}
                condition |= {"reason": "Unschedulable", "message": text}
                pod.status["conditions"] = [condition]
            else:
                waiting = {"waiting": {"reason": state[0], "message": state[1]}}
                pod.status["containerStatuses"] = [self.container_status(waiting)]
        else:
            await self.run(name, pod, container["command"])
        return web.json_response(pod.json(), status=201)

    def container_status(self, state: dict) -> dict:
        container = {"name": "box", "image": "i", "imageID": "", "ready": False}
        return container | {"restartCount": 0, "state": state}

    async def run(self, name: str, pod: KubePod, command: list[str]) -> None:
        pod.machine = await asyncio.to_thread(Machine, command)
        pod.status = {"phase": "Running"}
        self.tasks.append(asyncio.ensure_future(self.watch(pod)))
        deadline = pod.manifest["spec"]["activeDeadlineSeconds"]
        self.loop.call_later(deadline, self.end, pod, "DeadlineExceeded", "was active too long")

    async def watch(self, pod: KubePod) -> None:
        await asyncio.to_thread(pod.machine.process.wait)
        pod.machine.is_running = False
        if pod.status["phase"] == "Running":
            pod.status = {"phase": "Succeeded"}

    def end(self, pod: KubePod, reason: str, message: str) -> None:
        if pod.status["phase"] == "Running":
            pod.status = {"phase": "Failed", "reason": reason, "message": message}
            pod.kill()

    def cut_streams(self) -> None:
        for transport in self.streams:
            self.loop.call_soon_threadsafe(transport.abort)

    def evict(self, name: str) -> None:
        text = "The node was low on resource: memory."
        self.loop.call_soon_threadsafe(self.end, self.pods[name], "Evicted", text)

    async def list(self, request: web.Request) -> web.Response:
        label, _, value = request.query["labelSelector"].partition("=")
        pods = [pod.json() for pod in self.pods.values()]
        pods = [pod for pod in pods if pod["metadata"]["labels"].get(label) == value]
        return web.json_response({"apiVersion": "v1", "kind": "PodList", "items": pods})

    async def read(self, request: web.Request) -> web.Response:
        pod = self.pods.get(request.match_info["name"])
        return web.json_response(pod.json()) if pod else not_found(request)

    async def delete(self, request: web.Request) -> web.Response:
        pod = self.pods.pop(request.match_info["name"], None)
        if pod is None:
            return not_found(request)
        pod.kill()
        return web.json_response(pod.json())

    async def exec(self, request: web.Request) -> web.StreamResponse:
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return not_found(request)
        if pod.machine is None or not pod.machine.is_running:
            return failure(400, "cannot exec into a container in a completed pod")
        socket = web.WebSocketResponse(protocols=["v4.channel.k8s.io"], compress=False)
        await socket.prepare(request)
        assert socket.ws_protocol == "v4.channel.k8s.io"
        if request[FAULT] == "hang":
            await socket.receive()
            return socket
        if isinstance(request[FAULT], list):
            sending = {bytes: socket.send_bytes, str: socket.send_str}
            for message in request[FAULT]:
                await (sending[type(message)](message) if message is not None else socket.receive())
            await socket.close()
            return socket
        has_stdin = request.query["stdin"] == "True"
        assert request.query["container"] == "box" and request.query["tty"] == "False"
        argv = request.query.getall("command")
        process = await pod.machine.start(argv, cwd="/", stdin=has_stdin)
        if request[FAULT] == "cut":
            await asyncio.sleep(0.3)
            request.transport.abort()
            return socket
        if has_stdin:
            self.streams.append(request.transport)
        pumps = [pump(socket, 1, process.stdout), pump(socket, 2, process.stderr)]
        feeding = asyncio.ensure_future(feed(socket, process))
        pumping = asyncio.gather(*pumps, return_exceptions=True)
        code = await process.wait()
        # A background process may hold the pipes.
        await asyncio.wait({pumping}, timeout=0.5)
        pumping.cancel()
        feeding.cancel()
        if not socket.closed and not request.transport.is_closing():
            await socket.send_bytes(b"\3" + json.dumps(exit_status(code)).encode())
            await socket.close()
        return socket


def exit_status(code: int) -> dict:
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    code = 128 - code if code < 0 else code
    text = f"command terminated with non-zero exit code: exit status {code}"
    causes = [{"reason": "ExitCode", "message": str(code)}]
    status = {"status": "Failure", "message": text, "reason": "NonZeroExitCode"}
    return status | {"details": {"causes": causes}}


async def pump(socket: web.WebSocketResponse, channel: int, stream: asyncio.StreamReader) -> None:
    await socket.send_bytes(bytes([channel]))
    while data := await stream.read(1 << 15):
        await socket.send_bytes(bytes([channel]) + data)


async def feed(socket: web.WebSocketResponse, process: asyncio.subprocess.Process) -> None:
    """Sends the client's bytes to the process, whose stdin ends with the connection. The process
    is not killed."""
    async for message in socket:
        if message.type == WSMsgType.BINARY and process.stdin and message.data[0] == 0:
            try:
                process.stdin.write(message.data[1:])
                await process.stdin.drain()
            except ConnectionError:
                pass
    if process.stdin:
        process.stdin.close()


def failure(status: int, message: str, headers: dict | None = None) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message}
    return web.json_response(body | {"code": status}, status=status, headers=headers)


def not_found(request: web.Request) -> web.Response:
    return failure(404, f'pods "{request.match_info["name"]}" not found')
