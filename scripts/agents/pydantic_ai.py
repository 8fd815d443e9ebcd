"""pydantic-ai: its modes of output, and its models of three paths."""

import asyncio
import os
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel


class Sum(BaseModel):
    sum: int


question, mode = sys.argv[1], sys.argv[2].split("-")
outputs = {"tool": ToolOutput, "native": NativeOutput, "prompted": PromptedOutput}
models = {"responses": OpenAIResponsesModel, "messages": AnthropicModel}
output = outputs[mode[0]](Sum) if mode[0] in outputs else str
model = models.get(mode[0], OpenAIChatModel)(os.environ["OPENAI_MODEL"])
agent = Agent(model, system_prompt="Add by the tool.", output_type=output)


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def streamed():
    async with agent.run_stream(question) as result:
        return await result.get_output()


result = asyncio.run(streamed()) if "stream" in mode else agent.run_sync(question).output
print(result if output is str else result.sum)
