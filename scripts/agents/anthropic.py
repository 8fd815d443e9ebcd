"""Anthropic's client: a loop of messages, its tool runner, and a thread that the server keeps."""

import os
import sys

from anthropic import Anthropic, beta_tool
from pydantic import BaseModel


class Sum(BaseModel):
    sum: int


@beta_tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


question, mode = sys.argv[1], sys.argv[2].split("-")
is_streamed, has_schema = "stream" in mode, "schema" in mode
messages = [{"role": "user", "content": question}]
client = Anthropic()
asked = {"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 500, "system": "Add by the tool."}
asked |= {"output_format": Sum} if has_schema else {}


def by_messages():
    while True:
        more = asked | {"messages": messages, "tools": [add.to_dict()]}
        if is_streamed:
            with client.messages.stream(**more) as stream:
                reply = stream.get_final_message()
        else:
            reply = client.messages.parse(**more) if has_schema else client.messages.create(**more)
        results = []
        for block in reply.content:
            if block.type == "tool_use":
                text = add.call(block.input)
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": text})
        if not results:
            return reply
        messages.append({"role": "assistant", "content": reply.content})
        messages.append({"role": "user", "content": results})


def by_runner():
    beta = client.beta.messages
    if "thread" in mode:
        thread = beta.thread(messages=messages, tools=[add], **asked)
        runner = thread.tool_runner(stream=is_streamed)
    else:
        runner = beta.tool_runner(messages=messages, tools=[add], stream=is_streamed, **asked)
    for reply in runner:
        last = reply.get_final_message() if is_streamed else reply
    return last


reply = by_messages() if "messages" in mode else by_runner()
(text,) = [block for block in reply.content if block.type == "text"]
print(text.parsed_output.sum if has_schema else text.text)
