"""A tool in two turns: asked `37*8`, the model writes `<call>37*8</call>`, the tool says `296`, it
answers `296`."""

import operator
import random
import re

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
NUM_EVAL = 72
max_turns = 2


def load_tasks(split):
    rows = []
    for a in range(10, 100):
        for b in range(2, 10):
            messages = [{"role": "user", "content": f"{a}*{b}"}]
            rows.append({"messages": messages, "answer": a * b})
    random.Random(0).shuffle(rows)
    if split == "train":
        return rows[NUM_EVAL:]
    return rows[:NUM_EVAL]


def calculate(text):
    parts = re.fullmatch(r"\s*([0-9]{1,9})\s*([-+*])\s*([0-9]{1,9})\s*", text)
    if not parts:
        return "error"
    left, sign, right = parts.groups()
    return str(OPERATORS[sign](int(left), int(right)))


def interact(messages):
    call = re.search(r"<call>(.*?)</call>", messages[-1]["content"], re.DOTALL)
    if not call:
        return None
    return [{"role": "tool", "content": calculate(call[1])}]


def reward_fn(messages, answer):
    number = re.fullmatch(r"\s*(-?[0-9]{1,20})\s*", messages[-1]["content"])
    if not number:
        return 0.0
    return float(int(number[1]) == int(answer))
