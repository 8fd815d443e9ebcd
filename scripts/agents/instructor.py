"""instructor: a model of pydantic by three modes; `retried` asks again after an invalid reply."""

import os
import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Sum(BaseModel):
    sum: int


question, mode = sys.argv[1], sys.argv[2].split("-")
modes = {"tools": instructor.Mode.TOOLS, "json_schema": instructor.Mode.JSON_SCHEMA}
client = instructor.from_openai(OpenAI(), mode=modes.get(mode[0], instructor.Mode.JSON))
asked = {
    "model": os.environ["OPENAI_MODEL"],
    "response_model": Sum,
    "messages": [{"role": "user", "content": question}],
    "max_retries": 2,
}
if "stream" in mode:
    *_, result = client.chat.completions.create_partial(**asked)
else:
    result = client.chat.completions.create(**asked)
print(result.sum)
