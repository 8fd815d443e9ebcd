"""openai-agents: its own loop, by /v1/responses."""

import os
import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


set_tracing_disabled(True)
agent = Agent(
    name="adder", instructions="Add by the tool.", tools=[add], model=os.environ["OPENAI_MODEL"]
)
print(Runner.run_sync(agent, sys.argv[1]).final_output)
