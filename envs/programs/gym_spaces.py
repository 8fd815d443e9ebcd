"""Spaces of gymnasium as text: observations that a model reads, and replies that are actions."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, cast

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gymnasium import Space

MAX_NUMBERS = 128  # The largest array that is printed.
# MiniGrid's numbers: objects in their order and their letters on a map, colours, states of doors.
CELLS = {"unseen": "?", "empty": ".", "wall": "#", "floor": ".", "door": "D", "key": "K"}
CELLS |= {"ball": "A", "box": "B", "goal": "G", "lava": "~", "agent": "@"}
GRID_COLOURS = ("red", "green", "blue", "purple", "yellow", "grey")
DOORS = ("open", "closed", "locked")
LEGEND = "Map, you are @: # wall, . free, ~ lava, ? unseen, letters below"


def words_of(value: object, names: list[str] | None = None) -> str:
    """An observation as text. Raises ValueError for an array that is too large to be read."""
    if isinstance(value, dict):
        return "\n".join(f"{name}: {words_of(item)}" for name, item in value.items())
    if isinstance(value, np.ndarray) and value.size > MAX_NUMBERS:
        raise ValueError(
            f"an observation is an array of shape {value.shape}; gym_text reads at most "
            f"{MAX_NUMBERS} numbers. Wrap the environment so that observations are text"
        )
    if isinstance(value, np.ndarray) and value.ndim > 1:
        return "\n".join(words_of(row) for row in value)
    if isinstance(value, (tuple, list)) or getattr(value, "ndim", 0):  # JAX's arrays have ndim.
        parts = [words_of(item) for item in cast("Iterable[object]", value)]
        if names and len(names) == len(parts):
            parts = [f"{name} {text}" for name, text in zip(names, parts, strict=True)]
        return ", ".join(parts)
    is_real = isinstance(value, (float, np.floating))
    return f"{value:.4g}" if is_real else str(value)


def shown_grid(image: np.ndarray, direction: int, mission: str) -> str:
    """MiniGrid's observation: mission, direction, a map, and its objects with their places. The
    agent of a partial view stands in the middle of the last row and looks up."""
    objects = [*CELLS]
    lines = [f"Mission: {mission}", f"You face {('right', 'down', 'left', 'up')[direction]}."]
    width, height = image.shape[:2]
    names = [[objects[cell[0]] for cell in column] for column in image]
    here = [(x, y) for x in range(width) for y in range(height) if names[x][y] == "agent"]
    is_partial = not here
    [(mine, row)] = here or [(width // 2, height - 1)]
    things = []
    for y in range(height):
        for x in range(width):
            name, colour, state = names[x][y], image[x][y][1], image[x][y][2]
            if name in ("unseen", "empty", "wall", "floor", "lava", "agent"):
                continue
            opened = f"{DOORS[state]} " if name == "door" else ""
            thing = f"{opened}{GRID_COLOURS[colour]} {name}"
            if (x, y) == (mine, row):
                lines.append(f"You carry: {thing}.")
            else:
                across = f"{abs(x - mine)} {'right' if x > mine else 'left'}"
                along = f"{abs(row - y)} {'up' if y < row else 'down'}"
                steps = [along] * (y != row) + [across] * (x != mine)
                things.append(f"{CELLS[name]} {thing}: {', '.join(steps)}")
    if is_partial:
        lines.append("The map is turned so that you look up.")
    lines.append(f"{LEGEND}.")
    for y in range(height):
        row_text = [CELLS[names[x][y]] for x in range(width)]
        if y == row:
            row_text[mine] = "@"
        lines.append("".join(row_text))
    return "\n".join([*lines, *things])


def action_of(text: str, space: Space, names: list[str] | None) -> object:
    """The action of the space that a reply means, or None."""
    from gymnasium import spaces

    text = text.strip()
    action: str | int | np.ndarray | None = None
    if isinstance(space, spaces.Text):
        action = text
    elif isinstance(space, spaces.Discrete):
        if names and text.lower() in names:
            action = int(space.start) + names.index(text.lower())
        elif re.fullmatch(r"-?[0-9]{1,9}", text):
            action = int(text)
    else:
        numbers = re.split(r"[\s,]+", text.strip("[]() \n"))
        try:
            action = np.array([float(number) for number in numbers]).reshape(space.shape)
        except ValueError:
            return None
        is_integer = np.issubdtype(space.dtype, np.integer)
        if not np.isfinite(action).all() or (is_integer and (action % 1).any()):
            return None
        action = action.astype(space.dtype)
    return action if action is not None and space.contains(action) else None


def actions_of(space: Space) -> str:
    """Text of a prompt about actions without names. Raises ValueError for a space that no reply
    can name."""
    from gymnasium import spaces

    if isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        return f"Actions: the numbers of {space}"
    if not isinstance(space, (spaces.Discrete, spaces.Text)):
        raise ValueError(
            f"the action space {space} has no text; gym_text plays Discrete, Text, Box, "
            "MultiDiscrete and MultiBinary spaces"
        )
    return f"Actions: {space}"
