"""The shipped environments with tools and servers: scripted actors, real servers on loopback, and
runs of the real command."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import os
import re
import shlex
import socket
import string
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec

import chess
import gymnasium
import numpy as np
import pytest
import stage
from aiohttp import web
from kit import ROOT, wait_until

from envs.programs.gym_spaces import action_of
from rl_core.data.images import png_of
from rl_core.data.tool_calls import ToolCalls
from rl_core.engines.scripted import ScriptedActor, plain_chat
from rl_core.environments.env_file import load_env
from rl_core.sampling.engine import EngineDied
from rl_core.types import RunError

ENVS = ROOT / "envs"


def called(tool: str, /, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def env_of(name: str, **options):
    return load_env(str(ENVS / f"{name}.py"), **options)


def rows_of(name: str) -> tuple[list[dict], list[dict]]:
    return tuple(list(env_of(name).load_tasks(split)) for split in ("train", "eval"))


# Questions with a search engine


def test_nobody_is_asked_about_in_both_splits_and_hops_are_even():
    train, held_out = rows_of("search_qa")
    assert len(held_out) == 800 and len(train) > 4000
    assert not {row["person"] for row in train} & {row["person"] for row in held_out}
    assert all(row["person"] in row["question"] for row in train + held_out)
    assert Counter(row["hops"] for row in held_out) == {1: 200, 2: 200, 3: 200, 4: 200}


def test_each_hop_of_a_question_is_found_by_a_search_for_the_one_before():
    env, (_, rows) = env_of("search_qa"), rows_of("search_qa")
    for row in [row for row in rows if row["hops"] == 4][:5]:
        says, heard = [f"<search>{row['person']}</search>"], ""
        for before in ("born in ", "province of ", "capital is "):
            outcome = stage.play(env, *says, row=row, max_turns=len(says) + 1).messages[-2][
                "content"
            ]
            heard = outcome.split(before)[1].split(".")[0]
            says.append(f"<search>{heard}</search>")
        last = stage.play(
            env, *says, f"I know. <answer>The {row['golden_answers'][0].upper()}!</answer>", row=row
        )
        assert f"{heard} is the capital" in last.messages[-2]["content"]
        assert (last.reward, len(last.turns)) == (1.0, 5)


@pytest.mark.parametrize(
    "spoken, reward, turns",
    [
        (["<answer>x</answer>"], 0.0, 1),
        (["<answer>Gold</answer> no, <answer>x</answer>"], 0.0, 1),  # the last one counts
        (["<answer>Gold Silver Iron</answer>"], 0.0, 1),  # a list is no answer
        (["<answer>"], 0.0, 1),
        (["Gold"], 0.0, 6),
        (["", "<search></search>", "<search>\x00 qqqq the</search>", "<search>%s</search>" % ("a" * 9999), "gold"], 0.0, 6),
        (["<search>x</search>", "<answer>the gold</answer>"], 1.0, 2),
    ],
)  # fmt: skip
def test_only_the_answer_alone_is_right(spoken, reward, turns):
    row = {"question": "What glitters?", "golden_answers": ["Gold", "silver"]}
    outcome = stage.play(env_of("search_qa"), *spoken, row=row, max_tokens=20_000)
    assert (outcome.reward, len(outcome.turns)) == (reward, turns)


def test_passages_of_a_file_share_a_word_with_the_question(tmp_path, monkeypatch):
    passages = [{"contents": "Iron\nIron is grey."}, {"title": "Gold", "text": "Gold glitters."}]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(p) + "\n" for p in passages))
    monkeypatch.setenv("SEARCH_CORPUS", str(tmp_path / "corpus.jsonl"))
    row = {"question": "What glitters?", "golden_answers": ["Gold"]}
    outcome = stage.play(
        env_of("search_qa"),
        "<search>what glitters</search>",
        "<search>zinc</search>",
        row=row,
        max_turns=3,
    )
    spoken = [m["content"] for m in outcome.messages if m["role"] == "user"]
    assert spoken[1:] == ["Gold\nGold glitters.", "Nothing was found."]


def test_a_search_server_that_is_away_or_silent_fails_the_episode(monkeypatch):
    row = {"question": "?", "golden_answers": ["x"]}
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        monkeypatch.setenv("SEARCH_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/retrieve")
        error = stage.error_of(
            env_of("search_qa", hook_timeout_s=0.3), "<search>x</search>", row=row
        )
        assert "interact() ran longer than 0.3 s" in error
    error = stage.error_of(env_of("search_qa"), "<search>x</search>", row=row)
    assert "envs/search_qa.py:" in error and "Cannot connect to host 127.0.0.1" in error
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as refusing:
        threading.Thread(target=refusing.handle_request, daemon=True).start()
        monkeypatch.setenv("SEARCH_URL", f"http://127.0.0.1:{refusing.server_port}/retrieve")
        assert "501" in stage.error_of(env_of("search_qa"), "<search>x</search>", row=row)


# Gymnasium


class Letters(gymnasium.Env):
    """Says a letter; the actor earns how often its text has it. `breaks`: in which way, at its
    second step."""

    def __init__(self, breaks: str = ""):
        self.observation_space = self.action_space = gymnasium.spaces.Text(
            40, charset=string.printable
        )
        self.breaks, self.is_closed = breaks, False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.letter, self.num_steps = string.ascii_lowercase[self.np_random.integers(26)], 0
        return self.letter, {}

    def step(self, action):
        self.num_steps += 1
        if self.breaks and self.num_steps == 2:
            if self.breaks == "hang":
                time.sleep(3)
            raise OSError("the engine room is on fire")
        return self.letter, float(action.count(self.letter)), self.num_steps == 3, False, {}


gymnasium.register("Letters-v0", Letters)
LETTERS = {"prompt": "Say it.", "gym_env": "Letters-v0", "seed": 3}
LAKE = {"prompt": "Go.", "gym_env": "FrozenLake-v1", "actions": ["left", "down", "right", "up"]}
LAKE |= {"kwargs": {"desc": ["SFH", "HFF", "FFG"], "is_slippery": False}}


def test_a_map_of_ice_is_in_one_split():
    train, held_out = (
        [tuple(row["kwargs"]["desc"]) for row in rows] for rows in rows_of("gym_text")
    )
    assert len(set(train)) == len(train) > 400 and len(set(held_out)) == len(held_out) > 40
    assert not set(train) & set(held_out)
    assert {len(m) for m in held_out} == {3, 4, 5} and all(
        m[0][0] == "S" and m[-1][-1] == "G" for m in train
    )


def test_the_actor_walks_over_ice_by_the_names_of_actions():
    outcome = stage.play(
        env_of("gym_text"), "right", " Down\n", "jump", "4", "down", "right", row=LAKE
    )
    spoken = [m["content"] for m in outcome.messages if m["role"] == "user"]
    assert spoken[0] == "Go.\n\n[S]FH\nHFF\nFFG" and spoken[1] == "  (Right)\nS[F]H\nHFF\nFFG"
    assert spoken[3:5] == ["That is no action."] * 2
    assert outcome.turn_rewards == [0, 0, -0.05, -0.05, 0, 1] and outcome.reward == pytest.approx(
        0.9
    )
    assert outcome.metrics == {"illegal": 2, "solved": 1}
    numbers = stage.play(env_of("gym_text"), *"21121", row=LAKE)
    assert (numbers.reward, numbers.metrics["illegal"]) == (1, 0)
    drowned = stage.play(env_of("gym_text"), "right", "right", "right", row=LAKE)
    assert (drowned.reward, len(drowned.turns), drowned.metrics["solved"]) == (0, 2, 0)
    cut = stage.play(
        env_of("gym_text"), "right", "I would like to go down.", row=LAKE, max_tokens=8
    )
    assert (cut.status, cut.reward, cut.turn_rewards) == ("truncated", -0.05, [0, -0.05])
    lost = stage.play(env_of("gym_text"), "up", row=LAKE)
    assert (len(lost.turns), lost.reward) == (16, 0)


def test_a_text_environment_takes_the_reply_and_its_seed_repeats_it():
    first, again = (stage.play(env_of("gym_text"), "abc", "aabbcc", row=LETTERS) for _ in range(2))
    letter = str(np.random.default_rng(3).integers(26))
    letter = string.ascii_lowercase[int(letter)]
    assert first.messages == again.messages and first.messages[0]["content"].endswith(
        f"\n\n{letter}"
    )
    assert "Actions: Text(1, 40" in first.messages[0]["content"]
    counts = [text.count(letter) for text in ("abc", "aabbcc", "aabbcc")]
    assert first.turn_rewards == counts and len(first.turns) == 3
    too_long = stage.play(env_of("gym_text"), "x" * 41, "a", row=LETTERS, max_turns=2)
    assert too_long.metrics["illegal"] == 1


def test_a_number_is_an_action_of_a_discrete_space():
    row = {"prompt": "Blackjack.", "gym_env": "Blackjack-v1", "seed": 1}
    outcome = stage.play(env_of("gym_text"), "7", "stick", "-1", "\u0661", "0", row=row)
    assert (
        "your sum 20, dealer's card 7, usable ace 0" in outcome.messages[0]["content"]
        and outcome.metrics["illegal"] == 4
    )
    assert len(outcome.turns) == 5 and outcome.turn_rewards[4] in (-1, 0, 1)


SPACES = gymnasium.spaces
BOX = SPACES.Box(-1, 1, (2,), np.float32)


@pytest.mark.parametrize(
    "space, text, action",
    [
        (BOX, "[0.5, -1]", [0.5, -1]),
        (BOX, "0.5 -1", [0.5, -1]),
        (BOX, "0.5", None),
        (BOX, "0.5 nan", None),
        (BOX, "2 0", None),
        (SPACES.MultiDiscrete([3, 2]), "2, 1", [2, 1]),
        (SPACES.MultiDiscrete([3, 2]), "2, 0.5", None),
        (SPACES.MultiBinary(2), "[1 0]", [1, 0]),
        (SPACES.Discrete(3, start=1), "right", 2),
        (SPACES.Discrete(3, start=1), "0", None),
    ],
)
def test_numbers_are_an_action_of_their_space(space, text, action):
    value = action_of(text, space, ["left", "right", "up"])
    assert value is None if action is None else np.array_equal(value, action)


GRID = np.zeros((3, 3, 3), np.uint8)  # [column, row]: object, colour, state; all unseen
GRID[:, :2], GRID[0, 1], GRID[2, 0] = (1, 0, 0), (4, 4, 2), (2, 5, 0)
GRID[1, 2] = (5, 2, 0)  # At the agent's cell: it carries this.
GRID_TEXT = """Mission: open it
You face left.
You carry: blue key.
The map is turned so that you look up.
Map, you are @: # wall, . free, ~ lava, ? unseen, letters below.
..#
D..
?@?
D locked yellow door: 1 up, 1 left"""


@pytest.mark.parametrize(
    "observation, text",
    [
        ({"image": GRID, "direction": np.int64(2), "mission": "open it"}, GRID_TEXT),
        ({"speed": np.array([0.25, -1.0]), "gear": 2}, "speed: 0.25, -1\ngear: 2"),
        (np.arange(4).reshape(2, 2), "0, 1\n2, 3"),
        ((1.5, (2, True)), "1.5, 2, True"),
        (np.zeros((84, 84)), r"array of shape \(84, 84\); gym_text reads at most 128 numbers"),
    ],
)
def test_an_observation_is_text(observation, text):
    shown = env_of("gym_text").hooks["rollout"].function.__globals__["shown"]
    env = gymnasium.make("Letters-v0")
    if text.startswith("array"):
        with pytest.raises(ValueError, match=text):
            shown(env, observation)
    else:
        assert shown(env, observation) == text


STEPS = {"south": (1, 0), "north": (-1, 0), "east": (0, 1), "west": (0, -1)}


def shown_taxi(text):
    """(the cell of each colour, cells of the lanes east of which is no wall) of the text that an
    actor reads."""
    lines = re.findall(r"^\|.*\|$", text, re.MULTILINE)
    places, open_east = {}, set()
    for y, line in enumerate(lines):
        parts = re.findall(r"(\[[a-z ]+ .\]|.)([|:])", line[1:])
        for x, (cell, edge) in enumerate(parts):
            places |= dict.fromkeys(re.findall("[a-z]+", cell), (y, x))
            open_east |= {(y, x)} if edge == ":" else set()
    return places, open_east


def way(begin, end, open_east):
    """The names of the steps from one cell to another, by breadth first."""
    ways = {begin: []}
    for cell in (queue := [begin]):
        for name, (dy, dx) in STEPS.items():
            y, x = cell[0] + dy, cell[1] + dx
            is_open = dx == 0 or (cell[0], min(x, cell[1])) in open_east
            if 0 <= y < 5 and 0 <= x < 5 and is_open and (y, x) not in ways:
                ways[y, x] = [*ways[cell], name]
                queue.append((y, x))
    return ways[end]


def test_taxi_is_solved_by_its_text_alone(monkeypatch):
    monkeypatch.setenv("GYM_ENV", "Taxi-v4")
    env = env_of("gym_text")
    row = env.load_tasks("train")[0]
    assert (
        "one of south (0), north (1), east (2), west (3), pickup (4), dropoff (5)" in row["prompt"]
    )
    first = stage.play(env, "south", row=row, max_turns=1).messages[0]["content"]
    places, open_east = shown_taxi(first)
    there = way(places["yellow"], places["blue"], open_east)
    plan = [*there, "pickup", *way(places["blue"], places["magenta"], open_east), "dropoff"]
    outcome = stage.play(env, *plan, row=row, max_turns=40)
    assert len(plan) == len(outcome.turns) and outcome.turn_rewards[-1] == 20
    assert outcome.metrics == {"illegal": 0, "solved": 1}


def test_a_pole_that_falls_is_not_solved(monkeypatch):
    monkeypatch.setenv("GYM_ENV", "CartPole-v1")
    env = env_of("gym_text")
    fallen = stage.play(env, "left", row=env.load_tasks("eval")[0], max_turns=30)
    assert 5 < fallen.reward < 30 and fallen.metrics == {"illegal": 0, "solved": 0}
    assert "one of left (0), right (1)" in fallen.messages[0]["content"]


def test_a_broken_or_hanging_environment_fails_the_episode(monkeypatch):
    env = env_of("gym_text")
    error = stage.error_of(env, "a", row=LETTERS | {"kwargs": {"breaks": "fire"}})
    assert "OSError: the engine room is on fire" in error
    monkeypatch.setitem(env.hooks["rollout"].function.__globals__, "STEP_S", 0.2)
    error = stage.error_of(env, "a", row=LETTERS | {"kwargs": {"breaks": "hang"}})
    assert "TimeoutError: step() of the environment took longer than 0.2 s" in error
    assert "NameNotFound" in stage.error_of(env, "a", row=LETTERS | {"gym_env": "Letter-v9"})


# MCP


@pytest.fixture
def mcp(monkeypatch):
    """mcp(server, **environment variables) -> the environment with that server."""

    def make(server: str = "", call_s: float = 60.0, **variables):
        for name, value in {"MCP_SERVER": server, **variables}.items():
            monkeypatch.setenv(name, value)
        env = env_of("mcp_tools")
        monkeypatch.setitem(env.hooks["rollout"].function.__globals__, "CALL_S", call_s)
        return env

    return make


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def serve_shop(port: int) -> subprocess.Popen:
    command = [sys.executable, str(ENVS / "mcp_tools.py"), str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, "the server listens")
    return process


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """The URL of the environment's own server, over streamable HTTP."""
    port = free_port()
    process = serve_shop(port)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


PRICE = {"prompt": "What do 2 pamos cost?", "answer": "16"}


def test_tools_over_stdio_are_listed_called_and_refused(mcp):
    says = [
        called("price", item="pamo") + called("prize"),
        called("price", article="pamo"),
        " 16\n",
    ]
    outcome = stage.play(mcp(), *says, row=PRICE, max_tokens=999)
    assert (outcome.reward, outcome.metrics["called"], outcome.metrics["refused"]) == (
        1.0,
        3.0,
        2.0,
    )
    eight, unknown, wrong = [m for m in outcome.messages if m["role"] == "tool"]
    assert eight["content"] == "8" and eight["tool_call_id"] != unknown["tool_call_id"]
    assert "prize" in unknown["content"] and "item" in wrong["content"]


GALLERY = """
from mcp.server import MCPServer
from mcp.types import BlobResourceContents, EmbeddedResource, ImageContent, ResourceLink, TextContent, TextResourceContents

server = MCPServer("gallery")

@server.tool()
def look() -> list:
    text, blob = TextResourceContents(uri="file:///a", text="a note"), BlobResourceContents(uri="file:///b", blob="eA==")
    return [
        TextContent(type="text", text="Here:"),
        ImageContent(type="image", data="PNG", mime_type="image/png"),
        EmbeddedResource(type="resource", resource=text),
        EmbeddedResource(type="resource", resource=blob),
        ResourceLink(type="resource_link", name="plan", uri="file:///c"),
    ]

server.run("stdio")
""".replace("PNG", base64.b64encode(png_of(np.zeros((2, 7), np.uint8))).decode())


def test_the_actor_is_told_what_it_cannot_see(mcp, tmp_path):
    (tmp_path / "gallery.py").write_text(GALLERY)
    env = mcp(f"{sys.executable} {tmp_path}/gallery.py", MCP_IMAGES="1")
    seeing = ScriptedActor(
        name="policy", chat=plain_chat(ToolCalls), replies=[called("look"), "16"]
    )
    outcome = stage.one(stage.run(env, {"policy": seeing}, rows=[PRICE], max_tokens=999))
    [heard] = [m["content"] for m in outcome.messages if m["role"] == "tool"]
    assert "".join(item.get("text", "#") for item in heard).startswith("Here:\n#a note\n[resource")
    assert [(image.width, image.height) for image in outcome.turns[1].images] == [(7, 2)]
    env = mcp(f"{sys.executable} {tmp_path}/gallery.py", MCP_IMAGES="0")
    outcome = stage.play(env, called("look"), "16", row=PRICE, max_tokens=999)
    [heard] = [m["content"] for m in outcome.messages if m["role"] == "tool"]
    assert heard.splitlines() == [
        "Here:",
        "[image of type image/png, not shown]",
        "a note",
        "[resource file:///b of type None, not shown]",
        "[resource plan: file:///c]",
    ]


# name -> (result of a tool in the JSON of the protocol, text for the actor).
TEXT = {"type": "text", "text": "2 found"}
RESULTS = {
    "structured_alone": ({"content": [], "structuredContent": {"found": [3]}}, '{"found": [3]}'),
    "structured_apart": (
        {"content": [TEXT], "structuredContent": {"found": ["ü"]}},
        '2 found\n{"found": ["ü"]}',
    ),
    "structured_list": (
        {"content": [TEXT], "structuredContent": {"result": ["a", "b"]}},
        '2 found\n{"result": ["a", "b"]}',
    ),
    "repeated": (
        {"content": [{"type": "text", "text": '{"a":  1}'}], "structuredContent": {"a": 1}},
        '{"a":  1}',
    ),
    "wrapped": (
        {"content": [{"type": "text", "text": "1"}], "structuredContent": {"result": "1"}},
        "1",
    ),
    "wrapped_items": (
        {"content": [TEXT, TEXT], "structuredContent": {"result": ["2 found", "2 found"]}},
        "2 found\n2 found",
    ),
    "wrapped_none": ({"content": [], "structuredContent": {"result": []}}, '{"result": []}'),
    "empty": ({"content": []}, "[no content]"),
    "failed": ({"content": [], "isError": True}, "[no content]"),
    "long": (
        {"content": [{"type": "text", "text": "x" * 4321}]},
        "x" * 4000 + "\n[321 characters left out]",
    ),
    "sound": (
        {"content": [{"type": "audio", "data": "eA==", "mimeType": "audio/wav"}]},
        "[audio of type audio/wav, not shown]",
    ),
    "blank_resource": (
        {"content": [{"type": "resource", "resource": {"uri": "file:///a", "text": ""}}]},
        "[no content]",
    ),
    "link": (
        {"content": [{"type": "resource_link", "name": "a", "uri": "b:c", "description": "d"}]},
        "[resource a: b:c: d]",
    ),
}
PAGES = """
import asyncio, json, sys
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.types import CallToolResult, ListToolsResult, Tool

results = json.loads(sys.argv[1])

async def list_tools(context, params):
    first = int(params.cursor or 0) if params else 0
    tools = [Tool(name=name, input_schema={"type": "object"}) for name in list(results)[first : first + 5]]
    later = str(first + 5) if first + 5 < len(results) else None
    return ListToolsResult(tools=tools, next_cursor=later)

async def call_tool(context, params):
    return CallToolResult.model_validate(results[params.name])

async def main():
    server = Server("pages", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())

asyncio.run(main())
"""


def test_tools_of_all_pages_are_offered_and_no_content_is_dropped_silently(mcp, tmp_path):
    (tmp_path / "pages.py").write_text(PAGES)
    results = json.dumps({name: result for name, (result, _) in RESULTS.items()})
    env = mcp(shlex.join([sys.executable, str(tmp_path / "pages.py"), results]))
    says = ["".join(map(called, RESULTS)), "16"]
    chat = plain_chat(ToolCalls)
    actors = {"policy": ScriptedActor(name="policy", chat=chat, replies=says)}
    outcome = stage.one(stage.run(env, actors, rows=[PRICE], max_tokens=9999))
    offered = re.findall(r'"name": "(\w+)"', chat.decode(outcome.turns[0].new_ids))
    assert offered == list(RESULTS)
    heard = [m["content"] for m in outcome.messages if m["role"] == "tool"]
    assert dict(zip(RESULTS, heard, strict=True)) == {n: text for n, (_, text) in RESULTS.items()}
    assert (outcome.reward, outcome.metrics["refused"]) == (1.0, 1.0)


@pytest.mark.parametrize(
    "says, reward, num_called",
    [
        ([called("price", item="pamo"), "16"], 1.0, 1),
        (["16"], 1.0, 0),
        ([called("price", item="pamo"), "It is 16 or 8"], 0.0, 1),
        ([called("price", item="pamo")], 0.0, 5),  # Repeated until the last turn.
        (["<tool_call>{'price'}</tool_call>"], 0.0, 0),
        (["", "16"], 0.0, 0),
    ],
)
def test_tools_over_http_and_what_the_last_reply_earns(says, reward, num_called, shop, mcp):
    outcome = stage.play(mcp(shop), *says, row=PRICE, max_tokens=999)
    assert (outcome.reward, outcome.metrics["called"]) == (reward, num_called)


def test_a_server_that_fails_is_the_cause_and_secrets_stay_out_of_it(mcp):
    says = (
        f'{sys.executable} -c \'import os, sys; sys.exit("no shop for " + os.environ["SHOP_KEY"])\''
    )
    error = stage.error_of(mcp(says, MCP_PASS="SHOP_KEY", SHOP_KEY="sesame"), "16", row=PRICE)
    assert "the MCP server failed: MCPError: Connection closed; no shop for ***" in error
    # The command sees no other variables of the run.
    error = stage.error_of(mcp(says, MCP_PASS=""), "16", row=PRICE)
    assert "KeyError: 'SHOP_KEY'" in error
    assert "FileNotFoundError" in stage.error_of(mcp("/no/such/server"), "16", row=PRICE)
    away = f"http://127.0.0.1:{free_port()}/mcp?key=sesame"
    error = stage.error_of(mcp(away, MCP_TOKEN="sesame"), "16", row=PRICE)
    assert "ConnectError" in error and "sesame" not in error
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/mcp"
        assert "ReadTimeout" in stage.error_of(mcp(url, call_s=0.3), "16", row=PRICE)


def test_a_dead_server_fails_the_episode_and_no_engine(mcp, shop):
    port = free_port()
    process = serve_shop(port)

    def second_call(prompt, seed):
        if prompt.count("<|assistant|>") > 1:
            process.kill()
            process.wait()
        return called("price", item="pamo")

    env = mcp(f"http://127.0.0.1:{port}/mcp", call_s=2.0)
    [outcome] = stage.run(env, stage.cast(policy=second_call), rows=[PRICE], max_tokens=999)
    assert outcome.status == "failed" and "the MCP server failed: " in outcome.error
    # Messages before the failure are kept.
    assert [m["content"] for m in outcome.messages if m["role"] == "tool"] == ["8"]

    def engine_dies(prompt, seed):
        raise EngineDied("no more memory")

    actors = stage.cast(policy=engine_dies)
    actors["policy"].engine.wake = lambda: engine_dies(None, None)
    with pytest.raises(RunError, match="cannot be started again: no more memory"):
        stage.run(mcp(shop), actors, rows=[PRICE])


# Tools of the environment's own


def tool_row(kind: str, level: int) -> dict:
    return next(
        row for row in rows_of("tool_use")[0] if (row["kind"], row["level"]) == (kind, level)
    )


def tool_texts(outcome) -> list[str]:
    return [m["content"] for m in outcome.messages if m["role"] == "tool"]


def test_questions_are_of_each_kind_and_level_and_of_one_split():
    train, held_out = rows_of("tool_use")
    assert (
        not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
        and len(held_out) > 150
    )
    places = Counter((row["kind"], row["level"]) for row in held_out)
    assert len(places) == 12 and min(places.values()) > 5
    assert all(
        sum(map(int, "".join(row["files"].values()).split())) == row["answer"]
        for row in train
        if row["files"]
    )
    code = next(row for row in train if row["kind"] == "code")
    upto, by, digit = map(int, re.findall("[0-9]+", code["prompt"])[1:])
    assert code["answer"] == len(
        [n for n in range(1, upto + 1) if not n % by or str(digit) in f"{n}"]
    )


def test_the_calculator_the_search_and_files_lead_to_answers():
    env, row, long = env_of("tool_use"), tool_row("price", 2), {"max_tokens": 999}
    one, other = re.findall(r"one (\w+)", row["prompt"])
    searches = called("search", query=one) + called("search", query=f"the {other}")
    heard = tool_texts(stage.play(env, searches, row=row, max_turns=2, **long))
    prices = [
        re.search(f"One {name} costs ([0-9]+) crowns", text)[1]
        for name, text in zip((one, other), heard, strict=True)
    ]
    says = [
        called("calculator", expression="+".join(prices)),
        f"They cost {sum(map(int, prices))} crowns.",
    ]
    outcome = stage.play(env, *says, row=row, **long)
    assert tool_texts(outcome) == [str(row["answer"])] and outcome.reward == 1.0
    assert {"called": 1.0, "refused": 0.0}.items() <= outcome.metrics.items()
    row = tool_row("file", 3)
    [(name, text)] = row["files"].items()
    says = [
        called("read_file", name=name),
        called("calculator", expression=text.replace("\n", " + ")),
    ]
    outcome = stage.play(env, *says, row=row, max_turns=3, **long)
    # A call is no answer.
    assert tool_texts(outcome)[:2] == [text, str(row["answer"])] and outcome.reward == 0.0


def test_python_runs_in_the_sandbox_and_sees_the_folder_alone(monkeypatch):
    monkeypatch.setenv("SESAME", "open")
    env, row = env_of("tool_use"), tool_row("code", 2)
    upto, by, digit = map(int, re.findall("[0-9]+", row["prompt"])[1:])
    count = f"print(sum(n % {by} == 0 or '{digit}' in str(n) for n in range(1, {upto} + 1)))"
    spy = (
        "import os\nprint(os.environ.get('SESAME'), os.listdir('.'), "
        "open('a.txt').read())\nopen('a.txt', 'w').write('x')"
    )
    net = "import socket\nsocket.create_connection(('127.0.0.1', 9), 1)"
    calls = [
        called("write_file", name="a.txt", text="hi"),
        called("python", code=spy),
        called("python", code=net),
    ]
    calls += [called("read_file", name="a.txt"), called("python", code=count)]
    outcome = stage.play(env, "".join(calls), f"Counted: {row['answer']}", row=row, max_tokens=999)
    written, saw, refused, text, counted = tool_texts(outcome)
    assert (written, text, counted.strip()) == ("written", "hi", str(row["answer"]))
    assert (
        saw.startswith("None ['a.txt'") and saw.endswith("hi\n") and refused.startswith("error\n")
    )
    assert outcome.reward == 1.0


def test_wrong_calls_are_refused_with_a_reason_and_leave_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "secret").write_text("sesame")
    wrong = [
        called("calculator", expression="__import__('os')"),
        called("calculator", expression="9**9**9"),
        called("calculator", expression="1/0"),
        called("calculator", expression="(1)(2)"),
        called("calculator", expression="1e9"),
        called("calculator", wrong="1"),
        called("calculate", expression="1"),
        called("read_file", name="../secret"),
        called("read_file", name=str(tmp_path / "secret")),
        called("write_file", name="../x", text=""),
        called("write_file", name="..", text=""),
        called("__init__"),
    ]
    outcome = stage.play(
        env_of("tool_use"), "".join(wrong), "9", row=tool_row("calc", 1), max_tokens=2000
    )
    assert outcome.metrics["refused"] == outcome.metrics["called"] == len(wrong)
    assert all(text.startswith("error: ") and "sesame" not in text for text in tool_texts(outcome))
    use = env_of("tool_use").hooks["interact"].function.__globals__["use"]
    for argument_text in ("[1]", "1", '{"expression": "1"', None):  # As an endpoint sends it.
        assert asyncio.run(use(None, "calculator", argument_text))[1]
    gc.collect()
    assert [file.name for file in tmp_path.iterdir()] == ["secret"]


@pytest.mark.parametrize(
    "spoken, reward",
    [
        ("480", 1),
        ("4 8 0", 0),
        ("480 or 481", 0),
        ("60*8 = 480.", 1),
        ("", 0),
        ("many", 0),
        ("-480", 0),
        ("480.0", 1),
    ],
)
def test_the_last_number_counts(spoken, reward):
    assert (
        stage.play(env_of("tool_use"), spoken, row={"prompt": "60*8?", "answer": 480}).reward
        == reward
    )
    both = stage.play(
        env_of("tool_use"),
        "480" + called("python"),
        row={"prompt": "60*8?", "answer": 480},
        max_turns=1,
        max_tokens=99,
    )
    assert both.reward == 0.0  # a call is no answer
    cut = stage.play(
        env_of("tool_use"), "4801", row={"prompt": "60*8?", "answer": 480}, max_tokens=3
    )
    assert (cut.status, cut.reward) == ("truncated", 0.0)


# OpenEnv


ACTIONS = {
    "letters": {
        "properties": {
            "message": {"type": "string"},
            "loud": {"type": "boolean"},
            "metadata": {"type": "object"},
        },
        "required": ["message"],
    },
    "tools": {
        "properties": {
            "type": {"const": "call_tool"},
            "tool_name": {"type": "string"},
            "arguments": {"type": "object"},
        },
        "required": ["tool_name"],
    },
}
TOOLS = {"price": {"item": {"type": "string"}}, "answer": {"price": {"type": "integer"}}}


def refused(*errors):
    """The answer to no action. errors: (field, its fault)."""
    errors = [{"loc": [field], "msg": why} for field, why in errors]
    return {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}


class OpenEnvServer:
    """The environments of openenv_game.py behind a server in a thread, by the protocol of openenv
    0.10 and without its code."""

    def __init__(self, kind: str = "letters", room: int = 99, heartbeat_s: float | None = None):
        self.kind, self.room, self.heartbeat_s = kind, room, heartbeat_s
        self.sessions, self.asked = 0, []
        app = web.Application()
        app.router.add_get("/schema", self.schema)
        app.router.add_get("/ws", self.session)
        if kind == "tasks":
            self.kind = "letters"
            app.router.add_get("/list_environments", json_of(["Tasks"]))
            splits = [{"name": name, "type": name} for name in ("train", "test")]
            app.router.add_get("/Tasks/splits", json_of(splits))
            app.router.add_post("/Tasks/num_tasks", self.num_tasks)
        self.loop, ready = asyncio.new_event_loop(), threading.Event()
        self.thread = threading.Thread(target=self.serve, args=(app, ready), daemon=True)
        self.thread.start()
        assert ready.wait(30)

    def serve(self, app, ready):
        async def start():
            self.runner = web.AppRunner(app, access_log=None)
            await self.runner.setup()
            site = web.TCPSite(self.runner, "127.0.0.1", 0, shutdown_timeout=0.1)
            await site.start()
            self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
            ready.set()

        self.loop.run_until_complete(start())
        self.loop.run_forever()

    def close(self):
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(30)
        self.loop.call_soon_threadsafe(self.loop.stop)

    async def schema(self, request):
        self.asked.append(request.headers.get("Authorization"))
        return web.json_response({"action": ACTIONS[self.kind]})

    async def num_tasks(self, request):
        split = (await request.json())["split"]
        return web.json_response({"num_tasks": {"train": 5, "test": 2}[split]})

    async def session(self, request):
        socket = web.WebSocketResponse(heartbeat=self.heartbeat_s)
        await socket.prepare(request)
        self.sessions += 1
        if self.sessions > self.room:
            await socket.send_json(
                {"type": "error", "data": {"message": "no room", "code": "CAPACITY_REACHED"}}
            )
            await socket.close()
            return socket
        game = {"letter": "a", "steps": 0}
        async for message in socket:
            asked = message.json()
            self.asked.append(asked)
            act = self.call if self.kind == "tools" else self.answer
            answer = await act(game, asked["type"], asked.get("data"))
            if answer is None:
                break
            kind = asked["type"] if asked["type"] in ("state", "mcp") else "observation"
            await socket.send_json({"type": "error" if "code" in answer else kind, "data": answer})
        await socket.close()
        return socket

    async def answer(self, game, kind, data):
        if kind == "reset":
            number = data.get("seed") or data.get("index") or 0
            game |= {"letter": string.ascii_lowercase[number % 26], "steps": 0}
            return observed({"letter": game["letter"]})
        if kind == "state":
            return {"episode_id": "x", "step_count": game["steps"]}
        text = data.get("message") if kind == "step" else None
        if kind == "close" or text == "die":
            return None
        if text == "hang":
            await asyncio.sleep(2)
        if not isinstance(text, str):
            return refused(("message", "Field required"))
        if text == "raise":
            return {"message": "no fuel", "code": "EXECUTION_ERROR"}
        if text == "broken":
            return refused(("letter", "Field required"))
        game["steps"] += 1
        reward = None if text == "unpaid" else float(text.count(game["letter"]))
        return observed({"letter": game["letter"]}, reward, text == "unpaid" or game["steps"] == 3)

    async def call(self, game, kind, data):
        if kind == "reset":
            return observed({}) | {"observation": {"metadata": {"message": BRUSH}}}
        if kind == "close":
            return None
        if kind == "state":
            return {"step_count": game["steps"]}
        if kind == "mcp":
            tools = [
                {"name": n, "inputSchema": {"type": "object", "properties": p, "required": [*p]}}
                for n, p in TOOLS.items()
            ]
            return {"result": {"tools": tools}}
        name, arguments, error = data["tool_name"], data["arguments"], None
        game["steps"] += 1
        if name not in TOOLS:
            error = {"error_type": "tool_not_found", "message": f"Unknown tool: {name!r}"}
        elif arguments.keys() != TOOLS[name].keys():
            error = {"error_type": "invalid_args", "message": "Missing required argument"}
        elif arguments == {"item": "fog"}:
            error = {"error_type": "execution_error", "message": "fog has no price"}
        called = {"tool_name": name, "error": error, "result": None}
        if error:
            return observed(called)
        right = arguments.get("price") == 5
        text = "thanks" if name == "answer" else str(len(arguments["item"]))
        called["result"] = {"content": [{"type": "text", "text": text}]}
        return observed(called, *((float(right), True) if name == "answer" else ()))


BRUSH = "What does a brush cost?"


def observed(observation, reward=None, done=False):
    return {"observation": {"metadata": {}, **observation}, "reward": reward, "done": done}


def json_of(value):
    async def handler(request):
        return web.json_response(value)

    return handler


@pytest.fixture(scope="module")
def openenv_urls():
    """URL by kind of servers of the package `openenv`, or of openenv-core."""
    python = os.environ.get("RL_CORE_OPENENV") or (find_spec("openenv") and sys.executable)
    if not python:
        pytest.skip("openenv is not installed: bash scripts/test_versions.sh openenv")
    command = [python, str(ROOT / "tests/envs/openenv_game.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        ports = json.loads(process.stdout.readline())
        for port in ports.values():
            wait_until(lambda p=port: answers(f"http://127.0.0.1:{p}/health"), "it serves")
        yield {kind: f"http://127.0.0.1:{port}" for kind, port in ports.items()}
        process.stdin.close()


def answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(url, timeout=30).status == 200
    except OSError:
        return False


@pytest.fixture
def openenv(monkeypatch, request):
    """openenv(the server's kind, how it is made) -> the environment and the server."""
    servers, is_real = [], getattr(request, "param", "ours") == "openenv"

    def make(kind: str = "letters", step_s: float = 60.0, token: str = "", **settings):
        if is_real:
            url = request.getfixturevalue("openenv_urls")[kind]
        else:
            servers.append(OpenEnvServer(kind, **settings))
            url = servers[-1].url
        monkeypatch.setenv("OPENENV_URL", url + "/")
        monkeypatch.setenv("OPENENV_TOKEN", token)
        env = env_of("openenv_client")
        monkeypatch.setitem(env.hooks["rollout"].function.__globals__, "STEP_S", step_s)
        return env, None if is_real else servers[-1]

    yield make
    for server in servers:
        server.close()


on_both = pytest.mark.parametrize("openenv", ["ours", "openenv"], indirect=True)


@on_both
def test_an_episode_is_a_session_of_reset_steps_and_state(openenv):
    env, server = openenv(token="sesame")
    outcome = stage.play(
        env, "bbc", '{"message": "b"}', "x", row={"prompt": "Say it.", "reset": {"seed": 1}}
    )
    assert [m["content"] for m in outcome.messages[:3]] == ["Say it.\n\nb", "bbc", "b"]
    assert (outcome.reward, outcome.turn_rewards, outcome.metrics) == (
        3.0,
        [2, 1, 0],
        {"steps": 3, "illegal": 0},
    )
    if server:
        steps = [{"type": "step", "data": {"message": text}} for text in ("bbc", "b", "x")]
        reset = {"type": "reset", "data": {"seed": 1}}
        asked = ["Bearer sesame", reset, *steps, {"type": "state"}, {"type": "close"}]
        wait_until(lambda: server.asked == asked, "the session is closed")


@on_both
def test_an_action_of_several_fields_is_json_and_what_is_none_costs(openenv):
    env, _ = openenv()
    # Only `message` is required, so that text will do; the actor reads a refusal of the server.
    outcome = stage.play(
        env, "a", '{"loud": true}', "{a", '{"message": "aa"}', row={"prompt": "Go."}
    )
    assert outcome.turn_rewards == [1, -0.05, -0.05, 2, 2] and outcome.metrics == {
        "steps": 3,
        "illegal": 2,
    }
    spoken = [m["content"] for m in outcome.messages if m["role"] == "user"]
    assert spoken[2] == "That is no action: message: Field required"
    assert spoken[3].startswith("That is no action: Expecting property name")
    cut = stage.play(env, "aaaa", row={"prompt": "Go."}, max_tokens=2)
    assert (cut.status, cut.reward) == ("truncated", -0.05)


@pytest.mark.parametrize(
    "field, reply, action",
    [
        ({"type": "integer"}, "3", 3),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "3", "3"),
        ({"$ref": "#/$defs/Way"}, "left", "left"),
        ({"anyOf": [{"$ref": "#/$defs/Way"}, {"type": "null"}]}, "left", "left"),
    ],
)
def test_a_reply_is_the_value_of_the_only_field(field, reply, action):
    env_of("openenv_client")  # makes envs/programs importable
    session = sys.modules["programs.openenv_session"]
    schema = {"properties": {"move": field}, "$defs": {"Way": {"enum": ["left"], "type": "string"}}}
    assert session.action_of(reply, session.fields_of(schema)) == {"move": action}


@on_both
def test_tools_of_an_openenv_server_are_called(openenv):
    env, _ = openenv("tools")
    calls = [
        called("price", item="brush"),
        called("price", item="fog"),
        called("price", thing="brush"),
        called("cost", item="brush"),
        called("price", item="a") + called("answer", price=5) + called("price", item="b"),
    ]
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + stage.chat_of().chat_template
    actors = stage.cast(template=template, policy=calls)
    [outcome] = stage.run(env, actors, rows=[{"prompt": "Go."}], max_tokens=400)
    assert outcome.turn_rewards == [0, 0, -0.05, -0.05, 1]
    assert (outcome.metrics["steps"], outcome.metrics["illegal"]) == (6, 2)
    first_prompt = actors["policy"].engine.asked[0][0]
    assert '"answer"' in first_prompt and BRUSH in first_prompt
    texts = [m["content"] for m in outcome.messages if m["role"] == "tool"]
    assert texts[0] == "5" and "fog has no price" in texts[1] and "invalid_args" in texts[2]
    assert texts[3:] == ["tool_not_found: Unknown tool: 'cost'"]
    ended = stage.play(
        env, called("price", item="brush"), "It costs 5.", row={"prompt": "Go."}, max_tokens=400
    )
    assert (ended.turn_rewards, ended.metrics["steps"]) == ([0, 0], 1)


@on_both
def test_tasks_of_an_openenv_server_are_rows(openenv):
    env, _ = openenv("tasks")
    resets = [[row["reset"] for row in env.load_tasks(split)] for split in ("train", "eval")]
    assert resets[0] == [{"split": "train", "index": n} for n in range(5)]
    assert resets[1] == [{"split": "test", "index": n} for n in range(2)]
    row = env.load_tasks("train")[2]
    assert stage.play(env, "c", "x", "cc", row=row).turn_rewards == [1, 0, 2]
    env, _ = openenv()
    assert [len(env.load_tasks(split)) for split in ("train", "eval")] == [1000, 100]


@on_both
def test_an_openenv_server_waits_for_actors_that_think(openenv):
    """The real server has room for two of four episodes. Both close sessions without pongs."""
    env, _ = openenv(heartbeat_s=0.5)
    actors = stage.cast(wait_s=2.0, policy=["aa", "a", "x"])
    outcome = stage.run(env, actors, rows=[{"prompt": "Go."}], group_size=4)
    assert [(t.error, t.reward) for t in outcome] == [("", 3)] * 4


@on_both
def test_an_openenv_server_that_raises_is_the_cause(openenv):
    row = {"prompt": "Go."}
    env, _ = openenv()
    for text, cause in (
        ("raise", "failed at 'step': no fuel (EXECUTION_ERROR)"),
        ("broken", "failed at 'step': letter: Field required"),
        ("unpaid", "ended the episode and gave no reward"),
    ):
        assert cause in stage.error_of(env, text, row=row)


def test_an_openenv_server_that_fails_is_the_cause(openenv):
    row = {"prompt": "Go."}
    env, _ = openenv(room=0)
    env.hooks["rollout"].function.__globals__["ROOM_S"] = 0.2
    error = stage.error_of(env, "a", row=row)
    assert (
        "failed at 'reset': no room (CAPACITY_REACHED)" in error
        and "stayed full for 0.2 s" in error
    )
    env, _ = openenv(step_s=0.3)
    assert "closed the connection after 'step'" in stage.error_of(env, "die", row=row)
    assert "did not answer to 'step' within 0.3 s" in stage.error_of(env, "hang", row=row)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        env.hooks["rollout"].function.__globals__["URL"] = (
            f"http://127.0.0.1:{silent.getsockname()[1]}"
        )
        assert "Timeout" in stage.error_of(env, "a", row=row)
    assert "Cannot connect to host" in stage.error_of(env, "a", row=row)


def test_an_episode_waits_until_a_full_server_has_room(openenv):
    env, server = openenv(room=0)
    threading.Timer(0.5, lambda: setattr(server, "room", 99)).start()
    outcome = stage.play(env, "aa", "a", "a", row={"prompt": "Go."})
    assert outcome.reward == 4 and server.sessions > 2


# Chess

MATE = {"prompt": "Chess.", "fen": "k7/5R2/8/7Q/8/8/8/4K3 w - - 0 1"}
START = {"prompt": "Chess.", "fen": chess.STARTING_FEN}


def games(row: dict, max_tokens: int = 50, **says) -> dict:
    """Trajectory by (actor, player) of one game in which each actor says these."""
    outcome = stage.run(env_of("chess_game"), stage.cast(**says), rows=[row], max_tokens=max_tokens)
    assert all(t.status != "failed" for t in outcome), [t.error for t in outcome]
    return {(t.actor, t.player): t for t in outcome}


def test_positions_are_of_three_levels_and_of_one_split():
    train, held_out = rows_of("chess_game")
    assert not {row["fen"] for row in train} & {row["fen"] for row in held_out}
    assert {row["opponent"] for row in train} == {"actor"} and {
        row["opponent"] for row in held_out
    } == {"random"}
    assert Counter(row["level"] for row in train + held_out) == {1: 150, 2: 150, 3: 150}
    for row in held_out:
        board = chess.Board(row["fen"])
        assert board.is_valid() and not board.is_game_over()
        mates = [
            move for move in board.legal_moves if board.gives_check(move) and is_mate(board, move)
        ]
        assert mates or row["level"] > 1


def is_mate(board, move) -> bool:
    board.push(move)
    result = board.is_checkmate()
    board.pop()
    return result


def test_fools_mate_is_played_in_both_notations_and_black_earns_it():
    outcome = games(START, ann=["f3", "g4"], ben=["e7e5", "Qh4"])
    white, black = outcome["ann", "white"], outcome["ben", "black"]
    assert (
        white.reward_parts == {"result": 0.0, "legal": pytest.approx(0.2)}
        and white.metrics["illegal"] == 0
    )
    assert (
        black.reward_parts == {"result": 1.0, "legal": pytest.approx(0.2)}
        and black.metrics["moves"] == 2
    )
    seen = white.messages[0]["content"]
    assert (
        seen.startswith(f"Chess. You are white.\n\n{chess.STARTING_FEN}\nLegal: ")
        and seen.count(",") == 19
    )
    # The same actor says the same in each player: g4 is no move of black's.
    alone = games(START, policy=["f3", "g4"])
    assert (
        alone["policy", "black"].metrics["illegal"] == 1
        and alone["policy", "white"].reward_parts["result"] == 1
    )


@pytest.mark.parametrize(
    "bad", ["e5", "Kd2", "", "I play e4.", "--", "0000", "e2e4 e7e5", "\x00", "O-O", "@@@@"]
)
def test_an_illegal_or_garbage_chess_move_loses(bad):
    outcome = games(START, ann=[bad], ben=["e5"])
    assert outcome["ann", "white"].reward_parts == {"result": 0.0, "legal": 0.0}
    outcome = games(START, ann=["e4", bad], ben=["e5"])
    assert outcome["ann", "white"].reward_parts == {"result": 0.0, "legal": pytest.approx(0.1)}
    assert outcome["ben", "black"].reward == pytest.approx(1.2)
    cut = games(START, ann=["Nf3 Nf3"], ben=["e5"], max_tokens=3)
    assert cut["ann", "white"].reward == 0.0


def test_repeated_games_are_draws_and_long_ones_are_scored(
    monkeypatch,
):
    queen = {"prompt": "Chess.", "fen": "7k/8/8/8/8/8/8/1Q5K w - - 0 1"}
    outcome = games(queen, ann=["Kg1", "Kh1"] * 9, ben=["Kg8", "Kh8"] * 9)
    assert {t.reward_parts["result"] for t in outcome.values()} == {0.5} and len(
        outcome["ann", "white"].turns
    ) < 9
    env = env_of("chess_game")
    monkeypatch.setitem(env.hooks["rollout"].function.__globals__, "MAX_PLIES", 3)
    actors = stage.cast(ann=["Kg1", "Kf1"], ben=["Kg8", "Kf8"])
    assert {t.player: t.reward_parts["result"] for t in stage.run(env, actors, rows=[queen])} == {
        "white": 0.725,
        "black": 0.275,
    }


def test_the_random_player_of_chess_moves_legally_and_the_same_again():
    first, again = (
        games(MATE | {"opponent": "random"}, ann=["Kd1", "Kc1", "Kb1"], ben=["Qh8"])
        for _ in range(2)
    )
    assert {key: t.messages for key, t in first.items()} == {
        key: t.messages for key, t in again.items()
    }
    assert first["ben", "white"].reward_parts["result"] == 1.0  # Each has a separate game.
    assert "moves_random" in first["ann", "white"].metrics and len(first["ann", "white"].turns) >= 2


# The table of all environments


def test_the_table_of_environments_names_every_file():
    text = (ROOT / "docs/environments.md").read_text()
    rows = re.findall(r"^\| \[`(\w+\.py)`\]\(\.\./envs/\1\) \|(.*)\|$", text, re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(file.name for file in ENVS.glob("*.py"))
    for name, cells in rows:
        assert cells.count("|") == 2, name
        needs = {"bm25s", "chess", "mcp", "gymnasium"} & set(
            re.findall(r"(?:import|from) (\w+)", (ENVS / name).read_text())
        )
        assert ("`envs`" in cells) == bool(needs), name
