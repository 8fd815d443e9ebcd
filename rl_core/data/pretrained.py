"""What transformers reads from a model's folder or name. Code that lies beside a model never runs.

Without trust_remote_code=False transformers asks on the terminal, and runs the model's code if the
answer is yes.
"""

from __future__ import annotations

from typing import Any


def load_pretrained(family: type, path: str, **options: Any) -> Any:
    """family.from_pretrained(path). Raises what transformers raises: ValueError for a model that is
    only code of its own."""
    return family.from_pretrained(path, trust_remote_code=False, **options)


def from_config(family: type, config: Any, **options: Any) -> Any:
    """A model of this configuration with new weights."""
    return family.from_config(config, trust_remote_code=False, **options)
