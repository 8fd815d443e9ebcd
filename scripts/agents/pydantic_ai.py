"""pydantic-ai, by /v1/chat/completions."""

import os
import sys

sys.path.pop(0)  # this folder holds a file of the package's name
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

agent = Agent(OpenAIChatModel(os.environ["OPENAI_MODEL"]), system_prompt="Add by the tool.")


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


print(agent.run_sync(sys.argv[1]).output)
