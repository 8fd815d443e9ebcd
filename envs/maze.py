"""A square of numbered rooms: from any room to the one in the middle, a step a turn.

    rl-core train --env_path envs/maze.py --model M --out runs/maze --group_size 8 --max_tokens 4 \
        --max_prompt_tokens 48

A reply is u, d, l or r; anything else, and a step into the wall, stays. 1 for arriving within
max_turns, else 0. state_key is the room, so that steps from one room are compared with each other
(GiGPO): the end alone hardly shows which step helped.
"""

SIZE = 5
GOAL = (SIZE // 2, SIZE // 2)
STEPS = {"u": (-1, 0), "d": (1, 0), "l": (0, -1), "r": (0, 1)}
max_turns = 6


def load_tasks(split):
    rooms = [divmod(number, SIZE) for number in range(SIZE**2)]
    return [{"prompt": shown(room), "room": room} for room in rooms if room != GOAL]


def shown(room):
    return "".join(map(str, room))


def start(room):
    return {"room": tuple(room)}


def state_key(state):
    return shown(state["room"])


def interact(completion, state):
    down, right = STEPS.get(completion.strip(), (0, 0))
    row, column = state["room"]
    row, column = row + down, column + right
    if 0 <= row < SIZE and 0 <= column < SIZE:
        state["room"] = row, column
    if state["room"] == GOAL:
        return {"reward": 1.0, "done": True}
    return {"messages": [{"role": "user", "content": shown(state["room"])}], "reward": 0.0}
