"""LangGraph's prebuilt agent, by chat completions and by Anthropic's messages."""

import os
import sys

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Sum(BaseModel):
    sum: int


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


question, mode = sys.argv[1], sys.argv[2].split("-")
kind = ChatAnthropic if "anthropic" in mode else ChatOpenAI
form = ProviderStrategy(Sum) if "schema" in mode else None
if "tool" in mode:
    form = ToolStrategy(Sum)
model = kind(model=os.environ["OPENAI_MODEL"], streaming="stream" in mode)
agent = create_agent(model, tools=[add], response_format=form)
result = agent.invoke({"messages": [{"role": "user", "content": question}]})
print(result["structured_response"].sum if form else result["messages"][-1].text)
