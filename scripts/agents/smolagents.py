"""smolagents: a ToolCallingAgent, which ends by a call of final_answer."""

import os
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


model = OpenAIModel(
    model_id=os.environ["OPENAI_MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
print(ToolCallingAgent(tools=[add], model=model, verbosity_level=0).run(sys.argv[1]))
