"""Count the circles, or the squares, in a picture of both. The reward is 1 for the right digit.

    rl-core train --env_path envs/count_shapes.py --model Qwen/Qwen2.5-VL-3B-Instruct

Pictures have 32 x 32 pixels; COUNT_SHAPES_SIZE=7 makes them 224 x 224, for models with larger
patches. COUNT_SHAPES_BLANK=1 leaves them white: the control, in which no reply is better than the
most frequent count. Curve on a CPU: docs/evidence/curves.md.
"""

import os
import random

from PIL import Image, ImageDraw

NUM_CELLS, CELL = 4, 8  # Cells in a row, pixels of a cell.
MOST = 5  # Shapes of a kind.
SIZE = int(os.environ.get("COUNT_SHAPES_SIZE", "1"))
IS_BLANK = os.environ.get("COUNT_SHAPES_BLANK") == "1"
NUM_TASKS = {"train": 2000, "eval": 200}


def load_tasks(split):
    draw = random.Random(f"shapes {split}")
    return [task(draw) for _ in range(NUM_TASKS[split])]


def task(draw):
    counts = {"circles": draw.randint(1, MOST), "squares": draw.randint(1, MOST)}
    asked = draw.choice(list(counts))
    picture = drawn({} if IS_BLANK else counts, draw)
    content = [{"type": "image", "image": picture}, {"type": "text", "text": f"{asked}?"}]
    return {"messages": [{"role": "user", "content": content}], "answer": counts[asked]}


def drawn(counts, draw):
    """A picture with a shape in each of some cells."""
    cell = CELL * SIZE
    picture = Image.new("RGB", (NUM_CELLS * cell, NUM_CELLS * cell), "white")
    pen = ImageDraw.Draw(picture)
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    for kind, number in zip(kinds, draw.sample(range(NUM_CELLS**2), len(kinds)), strict=True):
        left, top = number % NUM_CELLS * cell, number // NUM_CELLS * cell
        box = (left + SIZE, top + SIZE, left + cell - 2 * SIZE, top + cell - 2 * SIZE)
        if kind == "circles":
            pen.ellipse(box, fill="red")
        else:
            pen.rectangle(box, fill="blue")
    return picture


def reward_fn(completion, answer):
    return float(completion.strip() == str(answer))
