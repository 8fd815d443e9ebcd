"""Loads with transformers from a model's folder or name. Code in a model's folder never runs.

Without trust_remote_code=False transformers asks on the terminal, and runs the model's code if the
answer is yes.
"""

from __future__ import annotations

from typing import Any


def load_pretrained(family: type, path: str, **options: Any) -> Any:
    """family.from_pretrained(path). Raises ValueError for a model that
    consists of custom code."""
    return family.from_pretrained(path, trust_remote_code=False, **options)


def from_config(family: type, config: Any, **options: Any) -> Any:
    """A model of this configuration with new weights."""
    return family.from_config(config, trust_remote_code=False, **options)
