"""Programs that exist already, against the endpoint: each plays one episode, with an engine that
plays a sensible series of turns. scripts/test_agents.sh installs them and calls this.

    python scripts/test_agents.py --venvs FOLDER [NAME ...]

Prints a table: whether the program printed the answer, turns, branches, retries, what it sent that
the trainer decides, and whether each prompt is made of the tokens that were sampled before it.
Exits with 1 if a program fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core import registry
from rl_core.agents.endpoint import EndpointServer
from rl_core.agents.program import remove, run_command
from rl_core.engines.scripted import ScriptedActor, plain_chat
from rl_core.sampling.actor import EpisodeActors
from rl_core.types import SamplingParams

FOLDER = Path(__file__).resolve().parent / "agents"
QUESTION = "What is 19 + 23?"
ANSWER = "42"
TIMEOUT_S = 120.0


@dataclass(kw_only=True)
class Program:
    """What it asks for, turn by turn, so that it comes to the answer."""

    replies: Sequence[str]
    packages: str  # as pip installs them
    num_branches: int = 1


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


ADD = call("add", a=19, b=23)
PROGRAMS = {
    "openai_agents": Program(replies=[ADD, ANSWER], packages="openai-agents"),
    "pydantic_ai": Program(replies=[ADD, ANSWER], packages="pydantic-ai-slim[openai]"),
    "smolagents": Program(
        # It tells the model of its calls in words of its own, so each turn is a branch.
        replies=[ADD, call("final_answer", answer=ANSWER)],
        packages="smolagents[openai]",
        num_branches=2,
    ),
    "langgraph": Program(replies=[ADD, ANSWER], packages="langgraph langchain langchain-openai"),
    "mini_swe_agent": Program(
        replies=[
            call("bash", command="ls"),
            call("bash", command="echo $((19 + 23)) > answer.txt"),
            call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        ],
        packages="mini-swe-agent mcp",
    ),
}


async def play(name: str, program: Program, python: Path) -> dict[str, Any]:
    """What became of one episode."""
    chat = plain_chat(registry.tool_calls)
    actor = ScriptedActor(name="policy", chat=chat, replies=program.replies)
    actors = EpisodeActors({"policy": actor}, SamplingParams(max_tokens=4096), 0, "episode")
    server = EndpointServer()
    llm = await server.open(actors)
    tree = llm.trees["policy"]
    try:
        command = [str(python), str(FOLDER / f"{name}.py"), QUESTION]
        row = {"question": QUESTION}
        work = run_command(command, row, llm.environ)
        try:
            result = await asyncio.wait_for(work, TIMEOUT_S)
        except asyncio.TimeoutError:
            return {"program": name, "passed": False, "answered": f"not in {TIMEOUT_S:g} s"}
        remove(result.workspace)
        branches = llm.trajectories(1.0)
    finally:
        server.shut(llm)
        await server.close()
    is_exact = all(not turn.is_fresh for t in branches for turn in t.turns[1:])
    found = {
        "program": name,
        "answered": result.text.splitlines()[-1:] == [ANSWER],
        "turns": tree.num_turns,
        "branches": len(branches),
        "retries": tree.num_retries,
        "overridden": " ".join(sorted(tree.overridden)) or "-",
        "exact": is_exact,
    }
    is_good = found["answered"] and is_exact and len(branches) == program.num_branches
    found["passed"] = is_good and tree.num_turns == len(program.replies)
    if not found["passed"]:
        print(f"{name}: exit code {result.exit_code}\n{result.stdout}\n{result.stderr[-3000:]}")
        for number, branch in enumerate(branches):
            print(f"branch {number}:", json.dumps(branch.messages, indent=1))
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=list(PROGRAMS))
    parser.add_argument("--venvs", type=Path, required=True, help="folder with NAME/bin/python")
    parser.add_argument("--packages", action="store_true", help="prints what pip installs")
    options = parser.parse_args(argv)
    if options.packages:
        print(PROGRAMS[options.names[0]].packages)
        return 0
    rows = []
    for name in options.names:
        python = options.venvs / name / "bin" / "python"
        rows.append(asyncio.run(play(name, PROGRAMS[name], python)))
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
