"""A worker's connection to its hub. Runs in separate threads, so that heartbeats continue while a
hook blocks the event loop."""

from __future__ import annotations

import asyncio
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from rl_core.environments.service import environments_pb2 as pb
from rl_core.environments.service.security import Access
from rl_core.environments.service.wire import BATCH, CHANNEL_OPTIONS, HUB, fitting

SOON_S = 0.05  # Delay of the heartbeat after a change of load.
FATAL = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT)


class Uplink:
    def __init__(
        self,
        worker: Any,  # A Worker of worker.py, which imports this file.
        address: str,
        access: Access,
        refused: Callable[[str], None],
        parent: int = 0,
    ):
        self.worker = worker
        self.address = address
        self.access = access
        self.refused = refused
        self.parent = parent
        self.loop = asyncio.get_running_loop()
        self.heartbeat_s = 2.0
        self.has_changed = False
        self.out: queue.SimpleQueue[pb.Reply | None] = queue.SimpleQueue()
        self.is_over = threading.Event()
        threading.Thread(target=self._run, name=f"hub {address}", daemon=True).start()

    def change(self) -> None:
        """Requests a heartbeat soon, because the worker's load changed."""
        if not self.has_changed:
            self.has_changed = True
            self.out.put(None)

    def _run(self) -> None:
        """Serves the hub and reconnects after broken connections."""
        wait_s = 0.1
        last_error = ""
        while not self.is_over.is_set():
            began_s = time.monotonic()
            self.out = queue.SimpleQueue()
            over = threading.Event()
            try:
                with self.access.channel(self.address, CHANNEL_OPTIONS) as channel:
                    self._serve(channel, self.out, over)
                error = "the hub ended the connection"
            except grpc.RpcError as e:
                error = e.details()
                if e.code() in FATAL:
                    text = f"{self.address} refused this worker: {error}"
                    return self._tell_loop(self.refused, text)
            over.set()
            self._check_parent()
            if error != last_error:
                text = f"worker {self.worker.name}: {self.address}: {error}; retrying soon"
                with suppress(OSError):  # stderr may be a closed pipe.
                    print(text, file=sys.stderr, flush=True)
                last_error = error
            wait_s = 0.1 if time.monotonic() - began_s > 5 else min(2 * wait_s, 2.0)
            self.is_over.wait(wait_s)

    def _serve(self, channel: grpc.Channel, out: queue.SimpleQueue, over: threading.Event) -> None:
        join = channel.stream_stream(
            f"/{HUB}/Join",
            request_serializer=pb.FromWorker.SerializeToString,
            response_deserializer=pb.ToWorker.FromString,
        )
        for message in join(self._messages(out, over), metadata=self.access.metadata()):
            self.heartbeat_s = message.heartbeat_s or self.heartbeat_s
            if message.requests:
                self._tell_loop(self._take, message.requests, out)

    def _tell_loop(self, function: Callable, *args) -> None:
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # The loop is closed because the worker exits.
            self.is_over.set()

    def _take(self, requests: list[pb.Request], out: queue.SimpleQueue) -> None:
        """Answers requests in the event loop. Replies go to the connection of the request; a hub
        that reconnects resends its requests."""
        for request in requests:
            task = self.loop.create_task(self._answer(request, out))
            self.worker.answering.add(task)
            task.add_done_callback(self.worker.answering.discard)

    async def _answer(self, request: pb.Request, out: queue.SimpleQueue) -> None:
        out.put(fitting(await self.worker.answer(request)))

    def _messages(self, out: queue.SimpleQueue, over: threading.Event) -> Iterator[pb.FromWorker]:
        """Messages to the hub. Runs in a gRPC thread."""
        hello = self.worker.hello()
        yield pb.FromWorker(hello=hello, heartbeat=self.worker.heartbeat())
        beat_s = time.monotonic()
        while not over.is_set():
            due_s = beat_s + (SOON_S if self.has_changed else self.heartbeat_s / 2)
            batch = take(out, due_s - time.monotonic())
            message = pb.FromWorker(replies=batch)
            now = time.monotonic()
            if now >= beat_s + (SOON_S if self.has_changed else self.heartbeat_s / 2):
                self.has_changed = False
                beat_s = now
                message.heartbeat.CopyFrom(self.worker.heartbeat())
                self._check_parent()
            if batch or message.HasField("heartbeat"):
                yield message

    def _check_parent(self) -> None:
        """Exits if the server that started this worker is gone, and removes the folder of the
        socket between them."""
        if self.parent and os.getppid() != self.parent:
            kind, _, socket = self.address.partition(":")
            if kind == "unix":
                shutil.rmtree(Path(socket).parent, ignore_errors=True)
            os._exit(1)


def take(out: queue.SimpleQueue, timeout_s: float) -> list[pb.Reply]:
    """Waits up to timeout_s for a first item. Returns all waiting replies, up to BATCH bytes."""
    batch = []
    size = 0
    try:
        item = out.get(timeout=max(timeout_s, 0.0))
        while True:
            if item is not None:
                batch.append(item)
                size += item.ByteSize()
            if size > BATCH:
                break
            item = out.get_nowait()
    except queue.Empty:
        pass
    return batch
