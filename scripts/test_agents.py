"""Programs that exist already, against the endpoint: each plays an episode in a box without
network, with an engine that plays a sensible series of turns. scripts/test_agents.sh installs them
and calls this.

    python scripts/test_agents.py --folder FOLDER [NAME ...]

Prints a table: the reward of each branch (1 for the right answer), turns, branches, retries, fields
that the trainer decides, whether each prompt is made of the tokens that were sampled before it, and
whether a process stayed. A library plays each of its modes, such as streamed and with a schema. The
first mode plays once more: an answer gets lost on its way, and the retry must make no branch. Exits
with 1 if a program fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rl_core.data.chat import Chat
from rl_core.data.tool_calls import ToolCalls
from rl_core.engines.scripted import ScriptedEngine, plain_chat
from rl_core.environments.agents import forward
from rl_core.environments.agents.boxed import PROGRAMS as PROGRAMS_FOLDER
from rl_core.environments.agents.boxed import CommandBox
from rl_core.environments.agents.endpoint import (
    BOX_FOLDER,
    FORWARDER,
    SOCKET,
    Endpoint,
    EndpointServer,
)
from rl_core.environments.agents.program import CommandResult
from rl_core.sampling.actor import Actor, EpisodeActors
from rl_core.sandbox.boxes import Limits
from rl_core.types import Completion, SamplingParams

FOLDER = Path(__file__).resolve().parent / "agents"
QUESTION = "What is 19 + 23? Write the answer into answer.txt."
ANSWER = "42"
ASIDE = "Adding two numbers"
TIMEOUT_S = 300.0
# Node.js reserves much more memory than it uses.
LIMITS = Limits(memory_mib=1 << 17, processes=1024, disk_mib=4096)
# Paths in a box.
INSTALLED, AGENTS = "installed", "agents"
PLACE = f"{PROGRAMS_FOLDER}/{INSTALLED}"


@dataclass(kw_only=True)
class Program:
    """A program, and the model's replies by which it comes to the answer."""

    replies: Sequence[str] = ()
    # Replies by mode, which is the program's second argument. The default mode has `replies`.
    modes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    packages: str  # Arguments of pip or npm; the program is the first.
    installer: str = "pip"
    num_branches: int = 1
    branches_of: Mapping[str, int] = field(default_factory=dict)  # modes with another number

    def plays(self) -> list[tuple[str, Sequence[str], int]]:
        """(mode, replies, number of branches) of each episode."""
        modes = self.modes or {"": self.replies}
        return [
            (mode, replies, self.branches_of.get(mode, self.num_branches))
            for mode, replies in modes.items()
        ]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


THOUGHT = "<think>A sum.</think>I add them.\n\n"
ADD = THOUGHT + call("add", a=19, b=23)
ADD_IN_SHELL = "echo $((19 + 23)) > answer.txt"
SUM = json.dumps({"sum": int(ANSWER)})
# With a schema clients read all text, also text before a call, as JSON.
CALLED = "<think>A sum.</think>" + call("add", a=19, b=23)
TOLD, TYPED = [ADD, ANSWER], [CALLED, SUM]
# Each is played streamed, too.
ASKED = {"text": TOLD, "text-stream": TOLD, "schema": TYPED, "schema-stream": TYPED}


def ways(*names: str, **replies: Sequence[str]) -> dict[str, Sequence[str]]:
    """Modes with the prefixes in `names` and the plain modes `replies`, each also streamed."""
    modes = {f"{name}-{mode}": texts for name in names for mode, texts in ASKED.items()}
    for mode, texts in replies.items():
        modes |= {mode: texts, f"{mode}-stream": texts}
    return modes


def headed(**fields: Any) -> str:
    """Fields as dspy writes and reads them."""
    texts = (f"[[ ## {name} ## ]]\n{value}" for name, value in fields.items())
    return "\n\n".join([*texts, "[[ ## completed ## ]]"])


def step(tool: str, **arguments: Any) -> str:
    """A step of dspy's ReAct."""
    return headed(next_thought="A sum.", next_tool_name=tool, next_tool_args=json.dumps(arguments))


HANDOFF = [call("transfer_to_adder"), ADD, ANSWER]
DONE = "<think>It is there.</think>\n\nThe answer is in answer.txt."
PROGRAMS = {
    "openai": Program(modes=ways("chat", "responses"), packages="openai"),
    "anthropic": Program(modes=ways("messages", "runner", "thread"), packages="anthropic"),
    "openai_agents": Program(
        # An agent that takes over has its own system message and tools, which is a branch.
        modes=ways("chat", "responses", handoff=HANDOFF),
        packages="openai-agents",
        branches_of={"handoff": 2, "handoff-stream": 2},
    ),
    "pydantic_ai": Program(
        # Its streams end with the first text.
        modes=ways(
            text=[CALLED, ANSWER],
            tool=[CALLED, call("final_result", sum=42)],
            native=TYPED,
            prompted=TYPED,
            responses=[CALLED, ANSWER],
            messages=[CALLED, ANSWER],
        ),
        packages="pydantic-ai-slim[openai,anthropic]",
    ),
    "litellm": Program(modes=ways("openai", "anthropic"), packages="litellm"),
    "instructor": Program(
        # The tool of a stream has another name, and a stream is not asked for again.
        modes=ways(tools=[call("Sum", sum=42)], json=[SUM], json_schema=[SUM])
        | {"tools-stream": [call("PartialSum", sum=42)], "retried": ["no", SUM]},
        packages="instructor",
    ),
    "dspy": Program(
        modes=ways(
            chat=[headed(answer=42)],
            json=[json.dumps({"answer": 42})],
            react=[step("add", a=19, b=23), step("finish"), headed(reasoning="Added.", answer=42)],
        ),
        packages="dspy",
        # The program words its steps anew in each prompt, so each turn is a branch.
        branches_of={"react": 3, "react-stream": 3},
    ),
    "smolagents": Program(
        # The program words its calls anew in each prompt, so each turn is a branch.
        replies=[ADD, call("final_answer", answer=ANSWER)],
        packages="smolagents[openai]",
        num_branches=2,
    ),
    "langgraph": Program(
        modes=ways("openai", "anthropic", tool=[ADD, call("Sum", sum=42)]),
        packages="langgraph langchain langchain-openai langchain-anthropic",
    ),
    "mini_swe_agent": Program(
        replies=[
            call("bash", command="ls"),
            THOUGHT + call("bash", command=ADD_IN_SHELL),
            call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        ],
        packages="mini-swe-agent mcp",
    ),
    "aider": Program(
        # The program words its edits anew in each prompt, so each turn is a branch.
        replies=[f"{THOUGHT}answer.txt\n```\n41\n```\n", "answer.txt\n```\n42\n```\n"],
        packages="aider-chat",
        num_branches=2,
    ),
    "pi": Program(
        replies=[
            THOUGHT + call("bash", command=ADD_IN_SHELL),
            call("read", path="answer.txt") + call("bash", command="ls"),
            DONE,
        ],
        packages="@mariozechner/pi-coding-agent",
        installer="npm",
    ),
    "opencode": Program(
        replies=[
            THOUGHT + call("bash", command=ADD_IN_SHELL, description="adds"),
            call("read", filePath="answer.txt") + call("glob", pattern="*.txt"),
            DONE,
        ],
        packages="opencode-ai",
        installer="npm",
    ),
    "codex": Program(
        replies=[
            THOUGHT + call("exec_command", cmd=ADD_IN_SHELL),
            call("exec_command", cmd="cat answer.txt") + call("exec_command", cmd="ls"),
            DONE,
        ],
        packages="@openai/codex",
        installer="npm",
    ),
    "qwen_code": Program(
        replies=[
            THOUGHT + call("run_shell_command", command=ADD_IN_SHELL, is_background=False),
            call("glob", pattern="*.txt") + call("todo_write", todos=[]),
            DONE,
        ],
        packages="@qwen-code/qwen-code",
        installer="npm",
    ),
    "claude_code": Program(
        replies=[
            THOUGHT + call("Bash", command=ADD_IN_SHELL, description="adds"),
            call("Read", file_path="answer.txt") + call("Bash", command="ls", description="lists"),
            DONE,
        ],
        packages="@anthropic-ai/claude-code",
        installer="npm",
    ),
}


class PlayingEngine(ScriptedEngine):
    """Gives its replies in order to requests that offer the tools which they call. Any other
    request, such as one for a title, is not part of the conversation."""

    async def generate(self, prompt_ids: list[int], params: SamplingParams, **about) -> Completion:
        begun = self.num_requests
        reply = self.replies[min(begun, len(self.replies) - 1)]
        prompt = self.chat.tokenizer.decode(prompt_ids)
        called = re.findall(r'<tool_call>{"name": "(\w+)"', reply)
        if all(f'"name": "{name}"' in prompt for name in called):
            return await super().generate(prompt_ids, params, **about)
        aside = ScriptedEngine(self.chat, [ASIDE])
        return await aside.generate(prompt_ids, params, **about)


@dataclass(kw_only=True)
class PlayingActor:
    """An actor with such an engine."""

    chat: Chat
    replies: Sequence[str]

    def bind_episode(
        self, params: SamplingParams, seed: int, session: str, max_turns: int = 0
    ) -> Actor:
        actor = Actor(
            name="policy",
            engine=PlayingEngine(self.chat, self.replies),
            chat=self.chat,
            max_context_tokens=1 << 24,
            stop_token_ids=self.chat.stop_token_ids,
        )
        return actor.bind_episode(params, seed, session, max_turns)


@dataclass
class Relay:
    """Between a Unix socket and the endpoint. It may lose one answer on its way."""

    port: int
    loses_answer: bool

    async def connect(self, client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        server, there = await asyncio.open_connection("127.0.0.1", self.port)
        posts: list[bytes] = []
        await asyncio.gather(self.pump(client, there, posts), self.pump(server, back, posts))
        there.close()

    async def pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, posts: list[bytes]
    ) -> None:
        """`posts`: beginnings of the connection's requests to the model; other answers arrive."""
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                posts += [data] if data.startswith(b"POST") else []
                if self.loses_answer and posts and data.startswith(b"HTTP/1.1 200"):
                    self.loses_answer = False
                    break
                writer.write(data)
                await writer.drain()
        writer.close()


@dataclass(kw_only=True)
class RelayedEndpoint:
    """An endpoint that boxes reach by a relay."""

    address: str
    environ: dict[str, str]
    folder: str

    async def binds(self) -> dict[str, str]:
        return {BOX_FOLDER: self.folder}


@asynccontextmanager
async def relayed(llm: Endpoint, loses_answer: bool) -> AsyncIterator[RelayedEndpoint]:
    """The endpoint behind a relay at a Unix socket."""
    relay = Relay(urlsplit(llm.address).port, loses_answer)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder, SOCKET)
        server = await asyncio.start_unix_server(relay.connect, path)
        for shown, mode in ((path, 0o666), (Path(folder), 0o755)):
            shown.chmod(mode)  # Programs in boxes are other users.
        shutil.copy(forward.__file__, Path(folder, FORWARDER))
        try:
            yield RelayedEndpoint(address=llm.address, environ=llm.environ, folder=folder)
        finally:
            server.close()


def command_of(name: str, mode: str) -> list[str]:
    """The program's command inside of its box."""
    folder = f"{PROGRAMS_FOLDER}/{AGENTS}"
    is_script = (FOLDER / f"{name}.sh").exists()
    starts = ["sh", f"{folder}/{name}.sh"] if is_script else ["python", "-I", f"{folder}/{name}.py"]
    return [
        "sh",
        "-c",
        f'PATH={PLACE}/bin:{PLACE}/node_modules/.bin:$PATH exec "$@"',
        "sh",
        *starts,
        QUESTION,
        mode,
    ]


async def run_program(
    command: list[str], installed: Path, llm: Endpoint, loses_answer: bool
) -> CommandResult | None:
    """The end of the program, or None if it took too long."""
    box = CommandBox(shown={INSTALLED: installed, AGENTS: FOLDER}, limits=LIMITS)
    row = {"question": QUESTION}
    async with relayed(llm, loses_answer) as relay, await box.open(row, relay) as workspace:
        work = box.run(workspace, command, row, relay)
        try:
            return await asyncio.wait_for(work, TIMEOUT_S)
        except TimeoutError:
            return None


async def play(
    command: list[str],
    installed: Path,
    replies: Sequence[str],
    num_branches: int,
    loses_answer: bool,
) -> dict[str, Any]:
    """The columns of one episode's row."""
    actor = PlayingActor(chat=plain_chat(ToolCalls), replies=replies)
    actors = EpisodeActors({"policy": actor}, SamplingParams(max_tokens=4096), 0, "episode")
    server = EndpointServer()
    llm = await server.open(actors)
    tree = llm.trees["policy"]
    try:
        result = await run_program(command, installed, llm, loses_answer)
        has_answered = result is not None and result.text.splitlines()[-1:] == [ANSWER]
        branches = llm.trajectories(float(has_answered))
    finally:
        server.shut(llm)
        await server.close()
    if result is None:
        return {"passed": False, "ended": f"not in {TIMEOUT_S:g} s"}
    sampled = [turn for t in branches for turn in t.turns[1:]]
    result_row = {
        "passed": False,
        "reward": " ".join(f"{branch.reward:g}" for branch in branches),
        "turns": tree.num_turns,
        "branches": len(branches),
        "retries": tree.num_retries,
        "overridden": " ".join(sorted(tree.overridden)) or "-",
        "exact": not any(turn.is_fresh for turn in sampled),
        "stayed": len(processes_with(llm.api_key)),
    }
    is_good = has_answered and result_row["exact"] and not result_row["stayed"]
    is_whole = (result_row["turns"], len(branches)) == (len(replies), num_branches)
    result_row["passed"] = is_good and is_whole and result_row["retries"] == loses_answer
    if not result_row["passed"]:
        wrote = f"{result.stdout}\n{result.stderr[-3000:]}"
        print(f"{command[-4:]}: exit code {result.exit_code}\n{wrote}")
        for number, branch in enumerate(branches):
            print(f"branch {number}:", json.dumps(branch.messages, indent=1))
    return result_row


def processes_with(key: str) -> list[int]:
    """Processes that have the episode's key among their variables."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if key.encode() in (folder / "environ").read_bytes():
                processes.append(int(folder.name))
    return processes


def version_of(program: Program, installed: Path) -> str:
    """The version of the program's own package."""
    package = program.packages.split()[0].partition("[")[0]
    if program.installer == "npm":
        about = (installed / "node_modules" / package / "package.json").read_text()
        return json.loads(about)["version"]
    code = f"from importlib.metadata import version; print(version({package!r}))"
    python = installed / "bin" / "python"
    return subprocess.check_output([str(python), "-c", code], text=True).strip()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=list(PROGRAMS))
    parser.add_argument("--folder", type=Path, required=True, help="FOLDER/NAME has the program")
    parser.add_argument("--packages", action="store_true", help="prints the packages to install")
    options = parser.parse_args(argv)
    if options.packages:
        for name in options.names:
            print(name, PROGRAMS[name].installer, PROGRAMS[name].packages)
        return 0
    if shutil.which("bwrap") is None:
        print("bubblewrap is missing; install the package of that name", file=sys.stderr)
        return 1
    has_passed = True
    for name in options.names:
        program, installed = PROGRAMS[name], (options.folder / name).resolve()
        version = version_of(program, installed)
        for number, (mode, replies, num_branches) in enumerate(program.plays()):
            command = command_of(name, mode)
            for loses_answer in (False, True) if number == 0 else (False,):
                row = {"program": f"{name} {mode}".strip(), "version": version}
                row |= asyncio.run(play(command, installed, replies, num_branches, loses_answer))
                print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
                has_passed = has_passed and row["passed"]
    return 0 if has_passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
