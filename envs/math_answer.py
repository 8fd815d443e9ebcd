"""Mathematics with one answer, as in GSM8K: 1 if the reply's final answer equals the reference's, else 0.

Final is what stands after the last `####`, else in `\\boxed{}`, else the last expression. Rows need `answer` (a number,
or a solution that ends in `#### number`) and their problem as `messages`, `prompt`, `question` or `problem`:
    --data.train openai/gsm8k:main --env_path envs/math_answer.py          (pip install math-verify)
"""

import re

from math_verify import parse, verify

MAX_CHARACTERS = 2000  # of a reply, from its end: the parser's time grows with the text


def final_answer(text):
    """The expressions, most trusted first, that may be meant; empty if there is none."""
    text = str(text)[-MAX_CHARACTERS:].split("####")[-1].strip()
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text.replace(r"\$", ""))
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    # The library's own deadlines are signals, which only the main thread can set; the hook's deadline guards this.
    return parse(text, parsing_timeout=None)


def reward_fn(messages, answer):
    reference = final_answer(answer)
    if not reference:
        raise ValueError(f"the column answer holds no mathematical answer: {answer!r}")
    return float(verify(reference, final_answer(messages[-1]["content"]), timeout_seconds=None))
