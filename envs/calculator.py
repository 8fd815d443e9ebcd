"""A tool in two turns: asked `37*8`, the model writes `<call>37*8</call>`, the tool says `296`, it
answers `296`."""

import operator
import random
import re

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
NUM_EVAL = 72
max_turns = 2


def load_tasks(split):
    pairs = [(a, b) for a in range(10, 100) for b in range(2, 10)]
    random.Random(0).shuffle(pairs)
    chosen = pairs[NUM_EVAL:] if split == "train" else pairs[:NUM_EVAL]
    return [
        {"messages": [{"role": "user", "content": f"{a}*{b}"}], "answer": a * b} for a, b in chosen
    ]


def calculate(text):
    parts = re.fullmatch(r"\s*([0-9]{1,9})\s*([-+*])\s*([0-9]{1,9})\s*", text)
    return str(OPERATORS[parts[2]](int(parts[1]), int(parts[3]))) if parts else "error"


def interact(messages):
    call = re.search(r"<call>(.*?)</call>", messages[-1]["content"], re.DOTALL)
    return [{"role": "tool", "content": calculate(call[1])}] if call else None


def reward_fn(messages, answer):
    number = re.fullmatch(r"\s*(-?[0-9]{1,20})\s*", messages[-1]["content"])
    return float(number is not None and int(number[1]) == int(answer))
