"""openai-agents: its own loop, by either path; a handoff to another agent; an output type."""

import asyncio
import os
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled
from pydantic import BaseModel


class Sum(BaseModel):
    sum: int


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


question, mode = sys.argv[1], sys.argv[2].split("-")
model = os.environ["OPENAI_MODEL"]
set_tracing_disabled(True)
set_default_openai_api("chat_completions" if "chat" in mode else "responses")
output = Sum if "schema" in mode else None
agent = Agent(
    name="adder", instructions="Add by the tool.", tools=[add], model=model, output_type=output
)
if "handoff" in mode:
    agent = Agent(name="desk", instructions="Hand sums over.", handoffs=[agent], model=model)


async def streamed():
    result = Runner.run_streamed(agent, question)
    async for _ in result.stream_events():
        pass
    return result


result = asyncio.run(streamed()) if "stream" in mode else Runner.run_sync(agent, question)
print(result.final_output.sum if output else result.final_output)
