"""OpenAI's client: a loop over tools by either path, streamed or not, with a schema or not."""

import json
import os
import sys

from openai import OpenAI, pydantic_function_tool
from openai.lib._pydantic import to_strict_json_schema
from pydantic import BaseModel


class Sum(BaseModel):
    sum: int


class add(BaseModel):
    """Adds two numbers."""

    a: int
    b: int

    def __call__(self) -> str:
        return str(self.a + self.b)


question, mode = sys.argv[1], sys.argv[2].split("-")
is_streamed, has_schema = "stream" in mode, "schema" in mode
client, model = OpenAI(), os.environ["OPENAI_MODEL"]


def by_chat() -> str:
    messages = [{"role": "user", "content": question}]
    while True:
        asked = {"model": model, "messages": messages, "tools": [pydantic_function_tool(add)]}
        if has_schema:
            asked["response_format"] = Sum
        if is_streamed:
            with client.chat.completions.stream(**asked) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.parse(**asked).choices[0].message
        if not message.tool_calls:
            return str(message.parsed.sum) if has_schema else message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            content = add.model_validate_json(call.function.arguments)()
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


def by_responses() -> str:
    items, previous = [{"role": "user", "content": question}], None
    parameters = to_strict_json_schema(add)
    tool = {"type": "function", "name": "add", "parameters": parameters, "strict": True}
    while True:
        asked = {"model": model, "input": items, "tools": [tool]}
        asked |= {"previous_response_id": previous} if previous else {}
        if has_schema:
            asked["text_format"] = Sum
        if is_streamed:
            with client.responses.stream(**asked) as stream:
                response = stream.get_final_response()
        else:
            response = client.responses.parse(**asked)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return str(response.output_parsed.sum) if has_schema else response.output_text
        items, previous = [], response.id
        for call in calls:
            output = add(**json.loads(call.arguments))()
            item = {"type": "function_call_output", "call_id": call.call_id}
            items.append(item | {"output": output})


print(by_chat() if "chat" in mode else by_responses())
