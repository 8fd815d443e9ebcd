"""LangGraph's prebuilt agent, by /v1/chat/completions."""

import os
import sys

sys.path.pop(0)  # this folder holds a file of the package's name
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


agent = create_agent(ChatOpenAI(model=os.environ["OPENAI_MODEL"]), tools=[add])
found = agent.invoke({"messages": [{"role": "user", "content": sys.argv[1]}]})
print(found["messages"][-1].content)
