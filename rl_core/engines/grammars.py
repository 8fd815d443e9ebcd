"""Sampling constrained by JSON schemas, with llguidance.

The mask of a step has every token with which some text of the schema continues; the end tokens are
in the mask where the text is complete. A token is drawn from the softmax over the mask, truncated
by the request's limits, and stored with the ids that it was drawn from (learning/truncation.py).

n requests, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rl_core.data.pretrained import Tokenizer
from rl_core.data.tokenizer_facts import TokenizerFacts
from rl_core.errors import keep_ends
from rl_core.types import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

# Space between two JSON tokens. Without a bound some models write spaces for ever.
SPACES: JsonCompileOptions = {"whitespace_pattern": r"[ \n\r\t]{1,32}"}
# A longer schema takes llguidance seconds to compile, during which the engine samples nothing.
MAX_SCHEMA_CHARS = 1 << 15


class Vocabulary:
    """A tokenizer in the form that llguidance reads. Added tokens are in no mask, unless they end
    the turn: special tokens are not text."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_id: int):
        self.tokenizer, self.eos_token_id = tokenizer, end_id
        facts, size = TokenizerFacts(tokenizer), min(len(tokenizer), vocab_size)
        self.special_token_ids = sorted(number for number in facts.added if number < size)
        # Rows of the embedding without a token have no bytes.
        self.tokens = [facts.token_bytes(number) for number in range(size)]
        self.tokens += [b""] * (vocab_size - size)

    def __call__(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


class Grammars:
    """Matchers of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.known: dict[tuple[int, ...], LLTokenizer] = {}  # Key: the end tokens.

    def matcher(self, params: SamplingParams, partial_ids: Sequence[int]) -> LLMatcher:
        """The state of a completion that has begun with these tokens. Raises ValueError for a
        schema that is too long or that llguidance cannot read."""
        from llguidance import LLMatcher

        num_chars = len(params.json_schema)
        if num_chars > MAX_SCHEMA_CHARS:
            raise ValueError(
                f"the JSON schema cannot be enforced: it has {num_chars:,} characters, more than "
                f"{MAX_SCHEMA_CHARS:,}; leave out descriptions"
            )
        ends = tuple(params.stop_token_ids)
        if not ends:
            raise ValueError("a reply in a JSON schema needs a chat template with an end token")
        if ends not in self.known:
            self.known[ends] = self.read_tokenizer(ends)
        grammar = LLMatcher.grammar_from_json_schema(params.json_schema, defaults=SPACES)
        matcher = LLMatcher(self.known[ends], grammar, log_level=0)
        matcher.consume_tokens(list(partial_ids))
        if error := failure(matcher):
            raise ValueError(error)
        return matcher

    def read_tokenizer(self, ends: tuple[int, ...]) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        vocabulary = TokenizerWrapper(Vocabulary(self.tokenizer, self.vocab_size, ends[0]))
        return LLTokenizer(vocabulary, n_vocab=self.vocab_size, eos_token=list(ends))


def failure(matcher: LLMatcher) -> str:
    """Returns the reason why a matcher has failed, or ""."""
    if not matcher.is_error():
        return ""
    reason = " ".join(re.sub(r"<state>.*", "", matcher.get_error(), flags=re.DOTALL).split())
    return f"the JSON schema cannot be enforced: {keep_ends(reason, 300)}"


def masked_logits(logits: Tensor, matchers: Iterable[LLMatcher | None]) -> Tensor:
    """[n, V] logits, -inf outside the masks of the requests that have a matcher."""
    logits = logits.clone()
    for row, matcher in enumerate(matchers):
        if matcher is not None:
            bits = np.unpackbits(
                np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"
            )
            is_out = torch.from_numpy(bits[: logits.shape[1]] == 0).to(logits.device)
            logits[row].masked_fill_(is_out, -torch.inf)
    return logits
