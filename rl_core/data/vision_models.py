"""Finds the image family of a model that sees."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from rl_core.data.pretrained import load_pretrained

if TYPE_CHECKING:
    from rl_core.data.image_families import ImageFamily


@lru_cache(8)
def load_family(path: str, max_pixels: int | None = None) -> ImageFamily | str:
    """The family of the model at `path`, shared by all that read its images; for a model that does
    not see, the reason. `max_pixels`: larger images are resized."""
    from transformers import AutoConfig

    try:
        config = load_pretrained(AutoConfig, path)
    except (OSError, ValueError) as error:  # A folder of a tokenizer has none.
        reason = str(error).splitlines()[0]
        return f"config.json of model {path} is missing, or needs custom code ({reason})"
    if not hasattr(config, "vision_config"):
        return (
            f"model {path} ({config.model_type}) reads text alone; take a model that sees, or "
            "remove the images"
        )
    from rl_core.data.image_families import make_family

    return make_family(config, path, max_pixels)
