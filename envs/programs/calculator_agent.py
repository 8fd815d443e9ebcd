"""A program with a calculator, as people write them for OpenAI's client. It knows nothing of
training: `OPENAI_API_KEY=... python calculator_agent.py "37*8?"`."""

import asyncio
import json
import re
import sys

from openai import AsyncOpenAI

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Works out a product, such as 37*8.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def calculate(expression):
    product = re.fullmatch(r"\s*([0-9]{1,9})\s*\*\s*([0-9]{1,9})\s*", str(expression))
    if not product:
        return "error: write a product, such as 37*8"
    return str(int(product[1]) * int(product[2]))


async def solve(question, client, model="gpt-5-mini", max_turns=4):
    """The last reply's text, after as many calls of the calculator as the model likes."""
    messages = [{"role": "user", "content": question}]
    for _ in range(max_turns):
        completion = await client.chat.completions.create(
            model=model, messages=messages, tools=[CALCULATOR]
        )
        reply = completion.choices[0].message
        if not reply.tool_calls:
            return reply.content or ""
        messages.append(reply.model_dump(exclude_none=True))
        for call in reply.tool_calls:
            arguments = json.loads(call.function.arguments)
            result = calculate(arguments.get("expression"))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


if __name__ == "__main__":
    print(asyncio.run(solve(sys.argv[1], AsyncOpenAI())))
