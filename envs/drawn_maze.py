"""A maze in a picture, drawn anew after each step: from a red room to the green one.

    rl-core train --env_path envs/drawn_maze.py --model Qwen/Qwen2.5-VL-3B-Instruct --group_size 8 \
        --max_tokens 4 --data.max_images 7

A reply is u, d, l or r; anything else, and a step into a wall, stays. 1 for arriving within
max_turns, else 0. state_key is the room, as in envs/maze.py. Pictures have 32 x 32 pixels;
DRAWN_MAZE_SIZE=7 makes them 224 x 224.
"""

import os
import random

from PIL import Image, ImageDraw

WIDTH = 4  # Rooms in a row.
CELL = 8 * int(os.environ.get("DRAWN_MAZE_SIZE", "1"))  # Pixels of a room.
STEPS = {"u": -WIDTH, "d": WIDTH, "l": -1, "r": 1}
NUM_TASKS = {"train": 1000, "eval": 100}
max_turns = 6


def load_tasks(split):
    draw = random.Random(f"maze {split}")
    return [task(draw) for _ in range(NUM_TASKS[split])]


def task(draw):
    """Most neighbouring rooms have a door; the goal is at most max_turns steps away."""
    pairs = [(a, a + 1) for a in range(WIDTH**2) if (a + 1) % WIDTH]
    pairs += [(a, a + WIDTH) for a in range(WIDTH**2 - WIDTH)]
    doors = [pair for pair in pairs if draw.random() < 0.8]
    goal = draw.randrange(WIDTH**2)
    reached = {goal: 0}
    for room in (queue := [goal]):
        for other in (room + step for step in STEPS.values()):
            if is_door(doors, room, other) and other not in reached:
                reached[other] = reached[room] + 1
                queue.append(other)
    starts = [room for room, steps in reached.items() if 0 < steps <= max_turns]
    if not starts:
        return task(draw)
    maze = {"room": draw.choice(starts), "goal": goal, "doors": doors}
    return {"messages": [seen(**maze)], **maze}


def is_door(doors, room, other):
    return (min(room, other), max(room, other)) in doors


def seen(room, goal, doors):
    """A message with the picture: the rooms, black walls, the goal and the present room."""
    picture = Image.new("RGB", (WIDTH * CELL, WIDTH * CELL), "white")
    pen = ImageDraw.Draw(picture)
    for number in range(WIDTH**2):
        left, top = number % WIDTH * CELL, number // WIDTH * CELL
        if number in (room, goal):
            box = (left + 2, top + 2, left + CELL - 3, top + CELL - 3)
            pen.rectangle(box, fill="red" if number == room else "green")
        right, bottom = left + CELL - 1, top + CELL - 1
        if not is_door(doors, number, number + 1):
            pen.line((right, top, right, bottom), fill="black")
        if not is_door(doors, number, number + WIDTH):
            pen.line((left, bottom, right, bottom), fill="black")
    return {"role": "user", "content": [{"type": "image", "image": picture}]}


def start(room, goal, doors):
    return {"room": room, "goal": goal, "doors": {tuple(pair) for pair in doors}}


def state_key(state):
    return state["room"]


def interact(completion, state):
    other = state["room"] + STEPS.get(completion.strip(), 0)
    if is_door(state["doors"], state["room"], other):
        state["room"] = other
    if state["room"] == state["goal"]:
        return {"reward": 1.0, "done": True}
    return {"messages": [seen(**state)], "reward": 0.0}
