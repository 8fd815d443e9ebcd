"""litellm: a loop over tools by the providers openai and anthropic."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # No download of prices.
import litellm
from pydantic import BaseModel


class Sum(BaseModel):
    sum: int


number = {"type": "integer"}
parameters = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]}
question, mode = sys.argv[1], sys.argv[2].split("-")
messages = [{"role": "user", "content": question}]
asked = {
    "model": f"{mode[0]}/{os.environ['OPENAI_MODEL']}",
    "tools": [{"type": "function", "function": {"name": "add", "parameters": parameters}}],
    "stream": "stream" in mode,
}
if "schema" in mode:
    asked["response_format"] = Sum
while True:
    reply = litellm.completion(messages=messages, **asked)
    if "stream" in mode:
        reply = litellm.stream_chunk_builder(list(reply), messages=messages)
    message = reply.choices[0].message
    if not message.tool_calls:
        break
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls:
        arguments = json.loads(call.function.arguments)
        content = str(arguments["a"] + arguments["b"])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
print(Sum.model_validate_json(message.content).sum if "schema" in mode else message.content)
