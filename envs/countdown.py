"""Countdown, as in TinyZero (github.com/Jiayi-Pan/TinyZero): make a number of others by + - * / and
brackets, each used once.

    rl-core train --env_path envs/countdown.py --model M --out runs/countdown --max_tokens 1024

Rows: {"nums": [3, 5, 7], "target": 26}, as in Countdown-Tasks-3to4, and a "prompt" for other words;
without --data.train, 2, 3 or 4 numbers (levels 1 to 3). Reward: 0.1 for a sum in
<answer>...</answer> that uses each number once, 1 if it gives the target. Curve on a CPU:
docs/evidence/curves.md.
"""

import ast
import operator
import random
import re
import zlib
from fractions import Fraction

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
HOW = (
    "Make {} of {}, each once, with + - * / and brackets. Think, then write <answer>...</answer>, "
    "the sum alone."
)


def row_to_prompt(nums, target):
    return HOW.format(target, ", ".join(map(str, nums)))


def load_tasks(split):
    """Every target, from 1 to 99, is the value of a random sum. A hash of numbers and target says
    which tenth is held out."""
    rng, tasks = random.Random(0), {}
    for level in (1, 2, 3):
        for _ in range(3000):
            nums = [rng.randint(1, 20) for _ in range(level + 1)]
            target = Fraction(nums[0])
            for number in nums[1:]:
                target = rng.choice(list(OPERATORS.values()))(target, number)
            nums = sorted(nums)
            if target.denominator == 1 and 0 < target < 100:
                tasks[f"{nums}{target}"] = {
                    "prompt": row_to_prompt(nums, target),
                    "nums": nums,
                    "target": int(target),
                    "level": level,
                }
    return [
        row
        for key, row in tasks.items()
        if (zlib.crc32(key.encode()) % 10 == 0) == (split != "train")
    ]


def value(text, nums):
    """Exact value of the sum; None unless it uses each of these numbers once."""
    if not re.fullmatch(r"[0-9+*/() -]{1,200}", text) or sorted(
        map(int, re.findall("[0-9]+", text))
    ) != sorted(nums):
        return None
    try:
        return reckoned(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, KeyError, AttributeError, ZeroDivisionError, MemoryError):
        return None


def reckoned(node):
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    return OPERATORS[type(node.op)](reckoned(node.left), reckoned(node.right))


def reward_fn(messages, nums, target):
    answers = re.findall(r"(?s)<answer>(.*?)</answer>", messages[-1]["content"])
    total = value(answers[-1], nums) if answers else None
    return {"right": 0.9 * (total == target), "form": 0.1 * (total is not None)}
