"""Questions about pictures: read a digit, the height of a bar in a chart, the area of a triangle
whose sides are written in the picture. 1 if the reply's final answer is right, else 0.

    rl-core train --env_path envs/picture_questions.py --model Qwen/Qwen2.5-VL-3B-Instruct

Row `kind` names the question. Pictures have 224 x 224 pixels.
"""

import random

from PIL import Image, ImageDraw

from rl_core.rewards import maths

EDGE, FONT = 224, 28  # Pixels.
NUM_TASKS = {"train": 2000, "eval": 200}
# Segments of a digit's display: top, the upper left and right, middle, the lower two, bottom.
LINES = ("0010", "0001", "1011", "0111", "0102", "1112", "0212")
DIGITS = ["1110111", "0010010", "1011101", "1011011", "0111010"]
DIGITS += ["1101011", "1101111", "1010010", "1111111", "1111011"]


def digit(draw, pen):
    answer, (left, top), size = draw.randrange(10), draw.choices(range(20, 90), k=2), 50
    for (x0, y0, x1, y1), is_on in zip(LINES, DIGITS[answer], strict=True):
        if is_on == "1":
            ends = [left + size * int(x0), top + size * int(y0)]
            ends += [left + size * int(x1), top + size * int(y1)]
            pen.line(ends, fill="black", width=8)
    return "Which digit is shown?", answer


def chart(draw, pen):
    heights, asked, unit = [draw.randint(1, 9) for _ in "ABCD"], draw.randrange(4), 19
    floor = EDGE - 40
    for height in range(10):
        pen.line((30, floor - unit * height, EDGE, floor - unit * height), fill="lightgrey")
        pen.text((5, floor - unit * height - 10), str(height), fill="black", font_size=16)
    for number, (name, height) in enumerate(zip("ABCD", heights, strict=True)):
        left = 42 + 45 * number
        pen.rectangle((left, floor - unit * height, left + 30, floor), fill="blue")
        pen.text((left + 6, floor + 4), name, fill="black", font_size=FONT)
    return f"How high is bar {'ABCD'[asked]}?", heights[asked]


def geometry(draw, pen):
    width, height = 2 * draw.randint(1, 6), draw.randint(2, 12)
    left, top, right, bottom = 50, 20, 50 + 13 * width, 20 + 13 * height
    pen.polygon((left, top, left, bottom, right, bottom), outline="black", width=2)
    pen.rectangle((left, bottom - 8, left + 8, bottom), outline="black")
    pen.text((left - 40, (top + bottom) // 2 - 14), str(height), fill="black", font_size=FONT)
    pen.text(((left + right) // 2 - 14, bottom + 2), str(width), fill="black", font_size=FONT)
    return "What is the area of the triangle?", width * height // 2


def load_tasks(split):
    draw = random.Random(f"questions {split}")
    return [task(draw, draw.choice((digit, chart, geometry))) for _ in range(NUM_TASKS[split])]


def task(draw, ask):
    picture = Image.new("RGB", (EDGE, EDGE), "white")
    question, answer = ask(draw, ImageDraw.Draw(picture))
    content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "answer": answer, "kind": ask.__name__}


def reward_fn(completion, answer):
    return maths(completion, answer)
