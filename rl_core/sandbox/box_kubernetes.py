"""Boxes by Kubernetes: a pod for each. Commands and files go over `exec` by WebSocket.
docs/remote_boxes.md"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import kubernetes_asyncio as kubernetes
from kubernetes_asyncio.client.exceptions import ApiException
from kubernetes_asyncio.config.config_exception import ConfigException
from kubernetes_asyncio.stream import WsApiClient

from rl_core.errors import keep_ends
from rl_core.sandbox.box_settings import COMPLETED, HealthCheck, Sidecar
from rl_core.sandbox.engines import RIGHTS
from rl_core.sandbox.remote_driver import (
    BoxRequest,
    Fault,
    RemoteError,
    RemoteSettings,
    exit_status,
)

IMAGE = "python:3.12-slim"  # Of rows and environments that name none.
RUN_LABEL = "rl-core/run"
CONTAINER = "box"
RELOAD_S = 300.0  # Tokens of a kubeconfig expire.
EXPIRY_S = 10.0  # A plugin's token is renewed this time before it expires.
PING_S = 30.0  # A connection that answers no ping for so long is cut.
REQUEST_S = 60.0
FIRST_POLL_S, LONGEST_POLL_S = 0.3, 4.0
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
STDIN, STDOUT, STDERR, STATUS = b"\0", b"\1", b"\2", b"\3"  # Channels of v4.channel.k8s.io.
CLOSE_S = 2.0  # The server closes a connection after the command's status.
CHUNK_BYTES = 1 << 16
# The first process: ends when it got no USR1 for $1 seconds, and cannot be killed from inside.
KEEP = (
    "trap : USR1; while :; do sleep $1 & wait $!; [ $? -gt 128 ] || exit 0; "
    "kill $! 2>/dev/null; done"
)
# States of a container that never starts.
NEVER_STARTS = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CrashLoopBackOff")
NEVER_STARTS += ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
RIGHTS_NEEDED = "the kubeconfig's user needs get, list, create and delete of pods, and get and "
RIGHTS_NEEDED += "create of pods/exec"


class Driver:
    """The cluster of the kubeconfig, or of the pod that this process runs in."""

    errors: tuple[type[Exception], ...] = (
        ApiException,
        ConfigException,
        aiohttp.ClientError,
        OSError,
    )
    has_stdin = True
    shares_processes = False

    def __init__(self, settings: RemoteSettings):
        self.namespace = settings.kubernetes_namespace
        self.configuration = kubernetes.client.Configuration()
        self.configuration.connection_pool_maxsize = 0  # Each running command holds a connection.
        self.loading = asyncio.Lock()
        self.loaded_until = 0.0  # By the monotonic clock; 0 before the first time.
        self.files_of_tls: tuple[str | None, ...] = ()
        self.owners: list[dict[str, Any]] | None = None  # None until they are known.
        # The client's annotations do not know WebSockets, nor dicts as manifests.
        self.pods: Any = None
        self.execs: Any = None
        self.clients: list[Any] = []  # To be closed.
        # The client reads the variable once, when it is imported.
        self.files = os.environ.get("KUBECONFIG") or os.path.expanduser("~/.kube/config")
        has_file = any(map(os.path.isfile, self.files.split(os.pathsep)))
        self.is_in_cluster = not has_file and "KUBERNETES_SERVICE_HOST" in os.environ
        if not has_file and not self.is_in_cluster:
            raise RuntimeError(
                "box driver kubernetes: there is no kubeconfig in $KUBECONFIG or ~/.kube/config, "
                "and this machine is not a pod; copy one there"
            )

    @property
    def secrets(self) -> tuple[str, ...]:
        tokens = [value.removeprefix("Bearer ") for value in self.configuration.api_key.values()]
        return (*tokens, self.configuration.password or "")

    async def connect(self) -> None:
        """Reads the kubeconfig, and again when its token may have expired."""
        async with self.loading:
            if time.monotonic() < self.loaded_until:
                return
            lasts_s = EXPIRY_S  # After an error, for then the token may have expired.
            try:
                lasts_s = await self.load()
            except self.errors:
                if not self.loaded_until:
                    raise
            self.loaded_until = time.monotonic() + lasts_s

    async def load(self) -> float:
        """Reads the kubeconfig. The time for which its token is certainly valid."""
        config = kubernetes.config
        lasts_s = RELOAD_S
        if self.is_in_cluster:
            config.load_incluster_config(client_configuration=self.configuration)
            namespace = (SERVICE_ACCOUNT / "namespace").read_text()
        else:
            loader: Any = await config.load_kube_config(
                config_file=self.files,
                client_configuration=self.configuration,
                persist_config=False,
            )
            namespace = loader.current_context["context"].get("namespace")
            if expiry := getattr(loader, "exec_plugin_expiry", None):
                left_s = (expiry - datetime.now(UTC)).total_seconds()
                lasts_s = min(lasts_s, max(0.0, left_s - EXPIRY_S))
        self.namespace = self.namespace or namespace or "default"
        made = self.configuration
        files = (made.ssl_ca_cert, made.cert_file, made.key_file)
        if self.pods is None or files != self.files_of_tls:
            # A plugin may give new certificates. Commands that run keep the first client.
            client = kubernetes.client
            self.files_of_tls = files
            self.pods = client.CoreV1Api(client.ApiClient(made))
            self.execs = client.CoreV1Api(WsApiClient(made, heartbeat=PING_S))
            self.clients += [self.pods.api_client, self.execs.api_client]
        if self.is_in_cluster and self.owners is None:
            self.owners = await self.find_owner(namespace)
        return lasts_s

    async def find_owner(self, namespace: str) -> list[dict[str, Any]]:
        """This process's pod, with which its boxes are removed."""
        if namespace != self.namespace:
            return []  # An owner is of the same namespace.
        try:
            pod = await self.pods.read_namespaced_pod(
                os.uname().nodename, namespace, _request_timeout=REQUEST_S
            )
        except ApiException as error:
            if error.status not in (403, 404):
                raise
            return []  # The pod has another host name, or must not read pods.
        owner = {"apiVersion": "v1", "kind": "Pod"}
        return [owner | {"name": pod.metadata.name, "uid": pod.metadata.uid}]

    def fault(self, error: Exception) -> Fault:
        if not isinstance(error, ApiException | aiohttp.WSServerHandshakeError):
            was_sent = not isinstance(error, aiohttp.ClientConnectorError | ConfigException)
            return Fault(message=f"{type(error).__name__}: {error}", was_sent=was_sent)
        message = message_of(getattr(error, "body", None))
        message = message or str(getattr(error, "reason", "") or error)
        if error.status == 403 and "exceeded quota" in message:
            message += "; raise the quota, or lower --sandbox.max_boxes"
        elif error.status in (401, 403):
            message += f"; {RIGHTS_NEEDED}"
        after = (error.headers or {}).get("Retry-After", "")
        return Fault(
            message=message,
            status=error.status or 0,
            retry_after_s=float(after) if after.isdecimal() else 0.0,
        )

    async def create(self, request: BoxRequest) -> Pod:
        await self.connect()
        try:
            await self.pods.create_namespaced_pod(
                self.namespace, manifest(request, self.owners or []), _request_timeout=REQUEST_S
            )
        except ApiException as error:
            # The answer to an earlier request may have been lost.
            if error.status != 409 or "exists" not in (message_of(error.body) or ""):
                raise
        return Pod(self, request.name)

    async def reap(self, run: str) -> None:
        await self.connect()
        listed = await self.pods.list_namespaced_pod(
            self.namespace, label_selector=f"{RUN_LABEL}={run}", _request_timeout=REQUEST_S
        )
        for pod in listed.items:
            await Pod(self, pod.metadata.name).kill()

    async def close(self) -> None:
        for client in self.clients:
            await client.close()


class Pod:
    """A RemoteSandbox."""

    def __init__(self, driver: Driver, name: str):
        self.driver = driver
        self.id = name

    async def read(self) -> Any:
        await self.driver.connect()
        return await self.driver.pods.read_namespaced_pod(
            self.id, self.driver.namespace, _request_timeout=REQUEST_S
        )

    async def wait(self) -> None:
        pause_s = FIRST_POLL_S
        while True:
            pod = await self.read()
            if is_running(pod):
                return
            reason = state_of(pod)
            words = reason.split()
            if pod.status.phase not in ("Pending", "Running") or any(
                f"{name}:" in words for name in NEVER_STARTS
            ):
                raise RemoteError(f"kubernetes: pod {self.id} does not start: {reason}")
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LONGEST_POLL_S)

    async def exec(
        self,
        argv: list[str],
        on_output: Callable[[int, bytes], None],
        *,
        timeout_s: float,
        stdin: AsyncIterator[bytes] | None = None,
    ) -> int:
        await self.driver.connect()
        connecting = await self.driver.execs.connect_get_namespaced_pod_exec(
            self.id,
            self.driver.namespace,
            command=argv,
            container=CONTAINER,
            stdin=stdin is not None,
            stdout=True,
            stderr=True,
            tty=False,
            _preload_content=False,
        )
        records = []
        async with connecting as socket:
            feeding = asyncio.ensure_future(feed(socket, stdin)) if stdin else None
            try:
                async with asyncio.timeout(None) as closing:
                    async for message in socket:
                        if message.type is not aiohttp.WSMsgType.BINARY:
                            break  # No ping was answered.
                        channel, data = message.data[:1], message.data[1:]
                        if channel in (STDOUT, STDERR) and data:
                            on_output(channel[0], data)
                        elif channel == STATUS and data:
                            records.append(exit_code(data))
                            closing.reschedule(asyncio.get_running_loop().time() + CLOSE_S)
            except TimeoutError:
                if not closing.expired():
                    raise
            finally:
                if feeding is not None:
                    feeding.cancel()
        return exit_status(*records)

    async def upload(self, path: str, data: bytes) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            for start in range(0, len(data), CHUNK_BYTES):
                yield data[start : start + CHUNK_BYTES]

        # The end of stdin cannot be sent in this protocol, so that the length is.
        await self.run(f"head -c {len(data)} > {path}", chunks())

    async def download(self, path: str) -> bytes:
        return await self.run(f"cat {path}")

    async def run(self, script: str, stdin: AsyncIterator[bytes] | None = None) -> bytes:
        outputs: dict[int, list[bytes]] = {1: [], 2: []}
        code = await self.exec(
            ["/bin/sh", "-c", script],
            lambda stream, data: outputs[stream].append(data),
            timeout_s=REQUEST_S,
            stdin=stdin,
        )
        if code:
            complaint = b"".join(outputs[2]).decode(errors="replace")
            raise RemoteError(f"kubernetes: pod {self.id}: {keep_ends(complaint.strip(), 500)}")
        return b"".join(outputs[1])

    async def renew(self) -> None:
        await self.run("kill -USR1 1")

    async def end_reason(self) -> str:
        try:
            pod = await self.read()
        except ApiException as error:
            if error.status != 404:
                raise
            return "the pod was deleted"
        if pod.metadata.deletion_timestamp is not None:
            return f"the pod is being deleted: {state_of(pod)}"
        return "" if is_running(pod) else state_of(pod)

    async def kill(self) -> None:
        await self.driver.connect()
        try:
            await self.driver.pods.delete_namespaced_pod(
                self.id, self.driver.namespace, _request_timeout=REQUEST_S
            )
        except ApiException as error:
            if error.status != 404:
                raise


async def feed(socket: aiohttp.ClientWebSocketResponse, stdin: AsyncIterator[bytes]) -> None:
    with suppress(ConnectionError):  # The reader says that the command ended.
        async for data in stdin:
            for start in range(0, len(data), CHUNK_BYTES):
                await socket.send_bytes(STDIN + data[start : start + CHUNK_BYTES])


def exit_code(status: bytes) -> object:
    """The record of a command's end in a message of its status. Raises RemoteError if it did not
    start."""
    try:
        value = json.loads(status)
        if value["status"] == "Success":
            return 0
        for cause in (value.get("details") or {}).get("causes") or ():
            if cause["reason"] == "ExitCode":
                return int(cause["message"]) or cause  # A failure has another status than 0.
        text = value["message"]
    except (ValueError, LookupError, TypeError, AttributeError):
        return status[:500]
    raise RemoteError(f"kubernetes: {text}")


def message_of(body: bytes | str | None) -> str:
    """The text of an error of the API server."""
    try:
        return json.loads(body or "")["message"]
    except (ValueError, TypeError, KeyError):
        return str(body or "")[:500]


def is_running(pod: Any) -> bool:
    """True if the box runs; a service may run without it."""
    statuses = [
        status for status in pod.status.container_statuses or () if status.name == CONTAINER
    ]
    is_ended = any(status.state.running is None for status in statuses)
    return pod.status.phase == "Running" and not is_ended


def state_of(pod: Any) -> str:
    """The reason why a pod does not run."""
    status, reasons = pod.status, []
    if status.reason or status.message:
        reasons.append(f"{status.reason or status.phase}: {status.message or ''}")
    for condition in status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            reasons.append(f"{condition.reason}: {condition.message or ''}")
    for container in (*(status.init_container_statuses or ()), *(status.container_statuses or ())):
        state = container.state.waiting or container.state.terminated
        if state is not None:
            exit_text = f"exit code {state.exit_code}" if hasattr(state, "exit_code") else ""
            reasons.append(f"{state.reason or ''}: {state.message or exit_text}")
    return "; ".join(reasons) or f"it is {status.phase}"


def manifest(request: BoxRequest, owners: list[dict[str, Any]]) -> dict[str, Any]:
    """A pod without privileges, which ends by itself when its run is gone."""
    limits = request.limits
    resources = {"memory": f"{limits.memory_mib}Mi", "ephemeral-storage": f"{limits.disk_mib}Mi"}
    cpu = {"cpu": f"{limits.cpus:g}"} if limits.cpus else {}
    labels = {"app.kubernetes.io/managed-by": "rl-core"}
    labels["rl-core/network"] = "open" if request.network else "none"
    if request.run:
        labels[RUN_LABEL] = request.run
    container = {
        "name": CONTAINER,
        "image": request.image or IMAGE,
        "command": ["/bin/sh", "-c", KEEP, "sh", f"{max(1, round(request.idle_s))}"],
        "resources": {"limits": resources | cpu, "requests": {"cpu": "100m"} | cpu},
        "securityContext": confined(RIGHTS),
    }
    services, volumes = services_of(request.sidecars, container["resources"])
    names = [name for sidecar in request.sidecars for name in sidecar.host_names]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": request.name, "labels": labels, "ownerReferences": owners},
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": max(1, round(request.lifetime_s)),
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "containers": [container],
        }
        | ({"initContainers": services, "volumes": volumes} if services else {})
        | ({"hostAliases": [{"ip": "127.0.0.1", "hostnames": names}]} if names else {}),
    }


def confined(rights: list[str]) -> dict[str, Any]:
    return {
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"], "add": rights},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def services_of(
    sidecars: Sequence[Sidecar], resources: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(init containers, volumes). Each starts when the one before is ready; the box is the last. A
    service that others wait to end is an init container, the others are sidecar containers, which
    Kubernetes has from 1.29 on."""
    ending = [
        name
        for sidecar in sidecars
        for name, condition in sidecar.waits_for.items()
        if condition == COMPLETED
    ]
    services, volumes = [], []
    for number, sidecar in enumerate(sidecars):
        name = f"service-{number}"
        service: dict[str, Any] = {"name": name, "image": sidecar.image, "resources": resources}
        service["securityContext"] = confined([*RIGHTS, "NET_BIND_SERVICE"])
        service["env"] = [{"name": key, "value": text} for key, text in sidecar.environ.items()]
        service |= {"command": sidecar.entrypoint} if sidecar.entrypoint is not None else {}
        service |= {"args": sidecar.command} if sidecar.command else {}
        service |= {"workingDir": sidecar.workdir} if sidecar.workdir else {}
        if sidecar.user:
            service["securityContext"] |= {"runAsUser": int(sidecar.user)}
        mounts = []
        for path in (*sidecar.volumes, *sidecar.tmpfs):
            mounts.append({"name": f"{name}-{len(mounts)}", "mountPath": path})
        volumes += [{"name": mount["name"], "emptyDir": {"sizeLimit": "1Gi"}} for mount in mounts]
        service |= {"volumeMounts": mounts} if mounts else {}
        if sidecar.name not in ending:
            service["restartPolicy"] = "Always"
            service |= {"startupProbe": probe_of(sidecar.check)} if sidecar.check else {}
        services.append(service)
    return services, volumes


def probe_of(check: HealthCheck) -> dict[str, Any]:
    command = check.command
    period_s = max(1, round(check.interval_sec))
    return {
        "exec": {"command": ["/bin/sh", "-c", command] if isinstance(command, str) else command},
        "periodSeconds": period_s,
        "timeoutSeconds": max(1, round(check.timeout_sec)),
        "failureThreshold": check.retries + round(check.start_period_sec / period_s),
    }
