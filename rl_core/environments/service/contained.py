"""The main process of a container: hosts one environment file over stdin and stdout in frames (4
bytes of length, then a Request or a Reply). Output of hooks goes to stderr.

python -m rl_core.environments.service.contained env.py
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
from typing import BinaryIO

from rl_core.environments.service import environments_pb2 as pb
from rl_core.environments.service.hosted import LocalEnv
from rl_core.environments.service.worker import Worker
from rl_core.sampling.watchdog import Watchdog


def frame(message: pb.Request | pb.Reply) -> bytes:
    data = message.SerializeToString()
    return len(data).to_bytes(4, "big") + data


async def serve(worker: Worker, requests: BinaryIO, replies: BinaryIO) -> None:
    """Answers requests until stdin closes. The process then exits, even while a hook hangs."""
    loop = asyncio.get_running_loop()
    Watchdog(loop)

    async def answer(request: pb.Request) -> None:
        reply = await worker.answer(request)
        replies.write(frame(reply))
        replies.flush()

    def take(request: pb.Request) -> None:
        task = loop.create_task(answer(request))
        worker.answering.add(task)
        task.add_done_callback(worker.answering.discard)

    def read() -> None:
        while len(head := requests.read(4)) == 4:
            request = pb.Request.FromString(requests.read(int.from_bytes(head, "big")))
            loop.call_soon_threadsafe(take, request)
        os._exit(0)

    threading.Thread(target=read, name="requests", daemon=True).start()
    await loop.create_future()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rl_core.environments.service.contained", description=__doc__
    )
    parser.add_argument("env", metavar="ENV.py")
    parser.add_argument("--hook_timeout_s", type=float, default=60.0)
    args = parser.parse_args(argv)
    # Child processes do not inherit these copies. print() goes to stderr, and stdin is empty.
    requests = os.dup(0)
    replies = os.dup(1)
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        env = LocalEnv(args.env, hook_timeout_s=args.hook_timeout_s, idle_s=0.0)
    except (ValueError, OSError) as error:
        fix = f"; make the file and its folder readable for uid {os.getuid()}" * isinstance(
            error, PermissionError
        )
        print(f"error: {error}{fix}", file=sys.stderr, flush=True)
        return 1

    worker = Worker([env], capacity=1 << 30, idle_s=0.0)
    asyncio.run(serve(worker, os.fdopen(requests, "rb"), os.fdopen(replies, "wb")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
