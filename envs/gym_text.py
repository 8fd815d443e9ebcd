"""Any gymnasium environment that can be read as text: FrozenLake by default.

    rl-core train --env_path envs/gym_text.py --model Qwen/Qwen3-0.6B --out runs/lake
    --max_prompt_tokens 512 --max_tokens 16
    GYM_ENV=my_package:MyEnv-v0 rl-core train --env_path envs/gym_text.py ...

The actor sees what `render()` gives with render_mode "ansi", else the observation: numbers with
the names that NUMBERS or a Dict space gives them, and MiniGrid's view as a map with its mission
(GYM_ENV=minigrid:MiniGrid-Empty-5x5-v0). Larger arrays are refused: they are images. What a
terminal highlights stands in brackets, with its colour: [blue B]. A reply is an action alone: the
name or number of a Discrete space's action, the numbers of a Box, MultiDiscrete or MultiBinary
space, or any text of a Text space. Another reply costs ILLEGAL and changes nothing. The reward is
the sum of the environment's own, each for its turn. Metrics: `illegal`, and `solved`: the
environment's reward_threshold was reached, or its last step earned the most, and more than 0.

Rows: a prompt, `gym_env` (what gymnasium.make takes), and optionally `kwargs`, `seed`, `actions`
(names). Without --data.train: FrozenLake on maps of 3x3 to 5x5, where the map says to which split
it belongs; for another $GYM_ENV seeds 100 to 1,099, and 0 to 99 to evaluate, with its entry of
KNOWN in the prompt. An error in the environment fails the episode, with its cause, as does a call
that takes longer than STEP_S. Needs a GPU, not run.
"""

import math
import os
import re
import zlib

from programs.gym_spaces import action_of, actions_of, shown_grid, words_of

from rl_core.sampling.deadlines import DeadlineError, call_in_thread

try:
    import gymnasium
except ImportError:
    raise ImportError("gymnasium is missing: pip install 'rl_core[envs]'") from None

GYM_ENV, ILLEGAL, STEP_S = os.environ.get("GYM_ENV", "FrozenLake-v1"), -0.05, 60.0
LAKE = "Walk from S over the ice F to the goal G, around the holes H. You are in []."
COLOURS = ["gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white"]
HIGHLIGHT = "41"  # A red background: gymnasium marks the player's place so.
TAXI = (
    "Blue marks the passenger, magenta the destination, yellow the empty taxi, green the taxi with "
    "the passenger. "
)
TAXI += "| is a wall. Pick up the passenger and drop them at the destination."
GRID = ["left", "right", "forward", "pickup", "drop", "toggle", "done"]
WALK = "Fulfil the mission. left and right turn you, forward walks, toggle opens doors and boxes."
# First part of an environment's name -> the names of its actions, what its text means.
KNOWN = {
    "MiniGrid": (GRID, WALK),
    "BabyAI": (GRID, WALK),
    "FrozenLake": (["left", "down", "right", "up"], LAKE),
    "Taxi": (["south", "north", "east", "west", "pickup", "dropoff"], TAXI),
    "CliffWalking": (["up", "right", "down", "left"], "You are x. Walk to T, around the cliff C."),
    "Blackjack": (
        ["stick", "hit"],
        "You see your sum, the dealer's card, and whether you have a usable ace.",
    ),
    "CartPole": (
        ["left", "right"],
        "You see the cart's position and velocity, and the pole's angle and its velocity.",
    ),
    "MountainCar": (["left", "none", "right"], "Swing the car up the hill on the right."),
    "Acrobot": (["torque -1", "torque 0", "torque 1"], "Swing the free end above the bar."),
}
# The names of an observation's numbers.
NUMBERS = {
    "Blackjack": ["your sum", "dealer's card", "usable ace"],
    "CartPole": ["cart position", "cart velocity", "pole angle", "pole angular velocity"],
    "MountainCar": ["position", "velocity"],
    "MountainCarContinuous": ["position", "velocity"],
    "Pendulum": ["cos(angle)", "sin(angle)", "angular velocity"],
    "Acrobot": [
        *("cos(angle 1)", "sin(angle 1)", "cos(angle 2)", "sin(angle 2)"),
        *("angular velocity 1", "angular velocity 2"),
    ],
}
max_turns = 16


def load_tasks(split):
    names, meaning = KNOWN.get(family(GYM_ENV), (None, f"Play {GYM_ENV}."))
    reply = "the next action alone"
    if names:
        reply = "one of " + ", ".join(f"{name} ({n})" for n, name in enumerate(names))
    same = {"prompt": f"{meaning} Reply with {reply}.", "gym_env": GYM_ENV, "actions": names}
    if GYM_ENV != "FrozenLake-v1":
        return [
            same | {"seed": seed} for seed in (range(100, 1100) if split == "train" else range(100))
        ]
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    maps = {
        tuple(generate_random_map(n, p=0.75, seed=seed)): None
        for n in (3, 4, 5)
        for seed in range(300)
    }
    chosen = [m for m in maps if (zlib.crc32("".join(m).encode()) % 10 == 0) == (split == "eval")]
    return [same | {"kwargs": {"desc": list(m), "is_slippery": False}} for m in chosen]


def family(name):
    """Taxi of my_package:Taxi-v4, MiniGrid of minigrid:MiniGrid-Empty-5x5-v0."""
    return name.rpartition(":")[2].partition("-")[0]


def make(row):
    env = gymnasium.make(row["gym_env"], **row.get("kwargs") or {})
    if "ansi" in (env.metadata.get("render_modes") or ()):
        env.close()
        env = gymnasium.make(row["gym_env"], render_mode="ansi", **row.get("kwargs") or {})
    return env


def shown(env, observation):
    if env.render_mode == "ansi":
        seen = re.sub(r"((?:\x1b\[[1-9][\d;]*m)+)(.*?)(?:\x1b\[0m)+", in_brackets, env.render())
        return seen.strip("\n")
    if isinstance(observation, dict) and {"image", "direction", "mission"} <= {*observation}:
        return shown_grid(**{k: observation[k] for k in ("image", "direction", "mission")})
    return words_of(observation, NUMBERS.get(family(env.spec.id)))


def in_brackets(match):
    colours = [
        COLOURS[int(code) % 10] for code in re.findall(r"[34]\d", match[1]) if code != HIGHLIGHT
    ]
    return f"[{' '.join([*colours, match[2]])}]"


def is_solved(env, earned):
    *before, last = earned
    return last > max([0.0, *before]) or sum(earned) >= (env.spec.reward_threshold or math.inf)


async def in_time(function, *args, **kwargs):
    """Its result. It runs in a thread, so that it holds up no other episode."""
    try:
        result, error = await call_in_thread(lambda: function(*args, **kwargs), STEP_S)
    except DeadlineError:
        raise TimeoutError(
            f"{function.__name__}() of the environment took longer than {STEP_S:g} s"
        ) from None
    if error is not None:
        raise error
    return result


async def rollout(task, actors):
    [actor] = actors.values()
    row = task.row
    names = row.get("actions")
    env = await in_time(make, row)
    try:
        observation, _ = await in_time(env.reset, seed=row.get("seed", 0))
        actions = [] if names else [actions_of(env.action_space)]
        opening = [task.messages[-1]["content"], *actions, await in_time(shown, env, observation)]
        message = [*task.messages[:-1], {"role": "user", "content": "\n\n".join(opening)}]
        reply, rewards, earned, illegal, is_done = None, [], [], 0, False
        while len(rewards) < actor.max_turns and not is_done:
            reply = await (reply or actor).respond(message)
            if reply.truncated:
                # Without text the context was full before it spoke.
                rewards += [ILLEGAL] if reply.text else []
                break
            action = action_of(reply.answer, env.action_space, names)
            if action is None:
                message = "That is no action."
                illegal += 1
                rewards.append(ILLEGAL)
                continue
            observation, reward, terminated, truncated, _ = await in_time(env.step, action)
            is_done = terminated or truncated
            earned.append(float(reward))
            rewards.append(float(reward))
            message = await in_time(shown, env, observation)
    finally:
        await in_time(env.close)
    metrics = {"illegal": float(illegal), "solved": float(is_done and is_solved(env, earned))}
    trajectory = reply.trajectory(sum(rewards), metrics=metrics)
    # None for an actor without tokens.
    trajectory.turn_rewards = [*rewards, 0.0][: len(trajectory.turns)]
    return [trajectory]
