"""Checks of the images in trajectories."""

from __future__ import annotations

from rl_core.data.chat import Chat
from rl_core.data.image_parts import set_images
from rl_core.sampling.env import Env
from rl_core.types import Trajectory


def check_images(env: Env, t: Trajectory, chat: Chat | None) -> None:
    """Sets the images of turns from the messages, as a resumed run does. Raises ValueError unless
    the messages have each image, and the turns have the tokens that the model reads for it."""
    family = chat.vision if chat else "the actor's tokens are unknown"
    try:
        set_images(t)
        for turn in t.turns:
            if min(turn.completion.token_ids, default=0) < 0:
                raise ValueError("a reply has tokens of an image; models write text alone")
            if not turn.images:
                continue
            if isinstance(family, str):
                raise ValueError(f"a turn has tokens of an image, and {family}")
            family.check_tokens(turn.new_ids, turn.images)
    except ValueError as error:
        raise ValueError(f"{env.path}: a trajectory of {t.actor!r}: {error}") from None
