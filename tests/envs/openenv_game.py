"""Environments of test_envs_tools.py behind servers of the package `openenv`, without rl_core.

Prints the servers' ports as JSON, and serves until its standard input ends.
"""

import asyncio
import json
import os
import socket
import string
import sys
import threading

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    message: str
    loud: bool = False


class Said(Observation):
    letter: str


class Letters(Environment):
    """A letter is said. An action earns how often its message has the letter."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    letter, steps = "a", 0

    def reset(self, seed=None, episode_id=None, split=None, index=0, **kwargs):
        self.letter, self.steps = string.ascii_lowercase[(seed or index) % 26], 0
        return Said(letter=self.letter)

    def step(self, action, timeout_s=None, **kwargs):
        text = action.message
        if text == "raise":
            raise RuntimeError("no fuel")
        self.steps += 1
        if text == "broken":
            return Said()  # its observation lacks a field
        reward = None if text == "unpaid" else float(text.count(self.letter))
        return Said(letter=self.letter, reward=reward, done=text == "unpaid" or self.steps == 3)

    @property
    def state(self):
        return State(episode_id="x", step_count=self.steps)


class Tasks(Letters):
    """The letters as tasks by split and index."""

    def list_splits(self):
        return ["train", "test"]

    def num_tasks(self, split):
        return {"train": 5, "test": 2}[split]


class Shop(MCPEnvironment):
    """A tool with a price. Its right answer ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server, self.steps = FastMCP("shop"), 0

        @server.tool
        def price(item: str) -> int:
            """Price of an item."""
            if item == "fog":
                raise ValueError("fog has no price")
            return len(item)

        @server.tool
        def answer(price: int) -> str:
            """Give the price."""
            return "thanks"

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.steps = 0
        return Observation(metadata={"message": "What does a brush cost?"})

    async def step_async(self, action, timeout_s=None, **kwargs):
        self.steps += 1
        observation = await super().step_async(action, timeout_s, **kwargs)
        if isinstance(observation, CallToolObservation) and action.tool_name == "answer":
            right = action.arguments.get("price") == len("brush")
            observation.reward, observation.done = float(right), True
        return observation

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise NotImplementedError

    @property
    def state(self):
        return State(episode_id="x", step_count=self.steps)


KINDS = {
    "letters": (Letters, Say, Said),
    "tasks": (Tasks, Say, Said),
    "tools": (Shop, CallToolAction, CallToolObservation),
}


async def main() -> None:
    servers, ports = [], {}
    for name, kind in KINDS.items():
        app = create_fastapi_app(*kind, max_concurrent_envs=2)
        listener = socket.create_server(("127.0.0.1", 0))
        ports[name] = listener.getsockname()[1]
        # Pings come sooner than by default, every 20 s.
        config = uvicorn.Config(app, log_level="error", ws_ping_interval=1.0, ws_ping_timeout=1.0)
        servers.append(uvicorn.Server(config).serve(sockets=[listener]))
    print(json.dumps(ports), flush=True)
    await asyncio.gather(*servers)


threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
asyncio.run(main())
