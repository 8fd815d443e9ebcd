"""Loads with transformers from a model's folder or name. Code in a model's folder never runs.

Without trust_remote_code=False transformers asks on the terminal, and runs the model's code if the
answer is yes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import tokenizers
    from transformers import PretrainedConfig


class Tokenizer(Protocol):
    """The members of transformers' tokenizers that rl_core uses, for one text at a time."""

    added_tokens_decoder: dict[int, tokenizers.AddedToken]
    backend_tokenizer: tokenizers.Tokenizer  # Only of fast tokenizers.
    chat_template: str | None
    eos_token_id: int | None
    is_fast: bool
    name_or_path: str
    pad_token: str | None
    pad_token_id: int | None
    special_tokens_map: dict[str, str]

    def apply_chat_template(self, conversation: list, **options: object) -> str: ...

    def convert_ids_to_tokens(self, ids: int) -> str: ...

    def decode(self, token_ids: list[int], **options: object) -> str: ...

    def encode(self, text: str, **options: object) -> list[int]: ...

    def get_vocab(self) -> dict[str, int]: ...

    def save_pretrained(self, save_directory: Path) -> object: ...

    def __len__(self) -> int: ...


def load_pretrained(family: type, path: str, **options: object) -> Any:
    """family.from_pretrained(path). Raises ValueError for a model that
    consists of custom code."""
    return family.from_pretrained(path, trust_remote_code=False, **options)


def from_config(family: type, config: object, **options: object) -> Any:
    """A model of this configuration with new weights."""
    return family.from_config(config, trust_remote_code=False, **options)


def size_of_layers(text: PretrainedConfig, name: str) -> int | None:
    """A size in the configuration of a language model; the largest where layers differ, as in
    Gemma 4. None if the configuration lacks it."""
    try:
        return getattr(text, name, None)
    except RuntimeError:  # transformers raises it where layers differ.
        return max(getattr(layer, name) for layer in text.per_layer_config)
