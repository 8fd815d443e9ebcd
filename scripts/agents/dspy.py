"""dspy: its adapters for chats and JSON, and ReAct."""

import asyncio
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # No download of prices.
import dspy


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


question, mode = sys.argv[1], sys.argv[2].split("-")
adapter = dspy.JSONAdapter() if "json" in mode else dspy.ChatAdapter()
lm = dspy.LM(f"openai/{os.environ['OPENAI_MODEL']}", cache=False)
dspy.configure(lm=lm, adapter=adapter)
signature = "question -> answer: int"
program = dspy.ReAct(signature, tools=[add]) if "react" in mode else dspy.Predict(signature)


async def streamed():
    async for chunk in dspy.streamify(program)(question=question):
        if isinstance(chunk, dspy.Prediction):
            return chunk


result = asyncio.run(streamed()) if "stream" in mode else program(question=question)
print(result.answer)
