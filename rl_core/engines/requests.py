"""Checks of requests and completions that all engines of tokens share."""

from __future__ import annotations

import math
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rl_core.data.pretrained import Tokenizer
from rl_core.types import Completion, SamplingParams

NO_LOGPROB = "the model's logits are NaN; its weights have diverged or were never loaded"


def check_request(prompt_ids: list[int], params: SamplingParams, max_context_tokens: int) -> None:
    """Raises ValueError for a request that no engine can answer."""
    if not 0 < len(prompt_ids) < max_context_tokens:
        raise ValueError(
            f"a prompt of {len(prompt_ids)} tokens must have at least 1 and fewer than "
            f"{max_context_tokens=}; shorten it or raise the limit"
        )
    is_possible = params.max_tokens >= 1 and params.temperature >= 0
    if not is_possible or not 0 < params.top_p <= 1 or not 0 <= params.min_p <= 1:
        raise ValueError(
            f"{params} must have max_tokens >= 1, temperature >= 0, 0 < top_p <= 1, 0 <= min_p <= 1"
        )


def decoded(tokenizer: Tokenizer, ids: list[int], keeps_special: bool = False) -> str:
    """The sampled text, with or without special tokens."""
    kind = type(tokenizer)
    is_plain = kind.decode is PreTrainedTokenizerBase.decode
    if is_plain and getattr(kind, "_decode", None) is PreTrainedTokenizerFast._decode:
        # transformers calls this too, after checks of each id that take longer.
        return tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=not keeps_special)
    return tokenizer.decode(
        ids, skip_special_tokens=not keeps_special, clean_up_tokenization_spaces=False
    )


def check_logprobs(logprobs: Sequence[float | None]) -> None:
    """Raises ValueError if a sampled token has no logprob, or NaN."""
    if any(value is None or math.isnan(value) for value in logprobs):
        raise ValueError(NO_LOGPROB)


def note_version(completion: Completion, version: int) -> None:
    """Records that weights of this version sample all further tokens."""
    if not completion.token_ids:
        completion.policy_version = version
    elif version != completion.policy_versions[-1]:
        completion.newer_versions.append((len(completion.token_ids), version))
