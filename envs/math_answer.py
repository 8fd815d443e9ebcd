r"""Mathematics with one answer, as in GSM8K, MATH and AIME: 1 if the reply's final answer equals
the reference's, else 0.

    rl-core train --env_path envs/math_answer.py --data.train openai/gsm8k:main --model M --out
    runs/gsm8k

Final is what stands after the last `####` or in the last `\boxed{}`, else the last formula or
number; thoughts hold no answer. Rows need `answer` (a number, LaTeX, or a solution that ends in
`#### number`) and their problem as `messages`, `prompt`, `question` or `problem`. Without rows:
sums of three levels. Curve on a CPU: docs/evidence/curves.md.
"""

import random
import zlib

from rl_core.rewards import maths


def load_tasks(split):
    """Sums of two numbers (level 1), with a product (2), with brackets (3). A hash of the sum says
    which tenth is held out."""
    rng, rows = random.Random(0), {}
    for level, form in enumerate(("{}+{}", "{}+{}*{}", "({}+{})*{}-{}"), 1):
        for _ in range(1000):
            numbers = [rng.randint(1, 20) for _ in range(form.count("{}"))]
            asked = form.format(*numbers)
            is_held_out = zlib.crc32(asked.encode()) % 10 == 0
            if is_held_out == (split != "train"):
                prompt = f"What is {asked}?"
                rows[asked] = {"prompt": prompt, "answer": eval(asked), "level": level}
    return list(rows.values())


def reward_fn(messages, answer):
    return maths(messages[-1]["content"], answer)
