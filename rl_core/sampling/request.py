"""What every engine refuses, and how one fails."""

from __future__ import annotations

from typing import Any

from rl_core.types import RunError, SamplingParams


class EngineDied(RunError):
    """The process of an engine ended, or does not answer; the message quotes the end of its log."""


def check_request(prompt_ids: list[int], params: SamplingParams, max_context_tokens: int, tokenizer: Any) -> None:
    """Raises ValueError for a request that no engine can answer."""
    if not 0 < len(prompt_ids) < max_context_tokens:
        raise ValueError(
            f"a prompt of {len(prompt_ids)} tokens must have at least 1 and fewer than {max_context_tokens=}; shorten it or "
            "raise the limit"
        )
    if params.max_tokens < 1 or params.temperature < 0 or not 0 < params.top_p <= 1 or not 0 <= params.min_p <= 1:
        raise ValueError(f"{params} must have max_tokens >= 1, temperature >= 0, 0 < top_p <= 1, 0 <= min_p <= 1")
    if params.stop and tokenizer is None:
        raise ValueError(f"stop={params.stop} needs a tokenizer; give the engine one or use stop_token_ids")
