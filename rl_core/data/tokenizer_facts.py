"""Facts of a tokenizer: its decoder, the bytes of its longest token, byte-level characters."""

from __future__ import annotations

import math
import re
from functools import cache, cached_property

from rl_core.data.pretrained import Tokenizer

# Normalizers that leave at least a third of a text's characters: NFC joins up to three.
KNOWN_NORMALIZERS = {"Sequence", "NFC", "NFD", "Prepend", "Replace", "String"}
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # A byte in SentencePiece's vocabulary.
REPLACEMENT = re.compile(r'String\("(.*?)"\), content="(.*?)"')


class TokenizerFacts:
    """Facts of one tokenizer, computed when they are first needed."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer

    @cached_property
    def decoder(self) -> str:
        return repr(self.tokenizer.backend_tokenizer.decoder) if self.tokenizer.is_fast else ""

    @cached_property
    def added(self) -> frozenset[int]:
        """Ids of added tokens."""
        return frozenset(self.tokenizer.added_tokens_decoder)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token in the middle of a text. The bytes of several tokens join to the bytes
        of their text, even if a token has only some bytes of a character."""
        token = self.tokenizer.convert_ids_to_tokens(token_id)
        if BYTE_TOKEN.fullmatch(token) and "ByteFallback" in self.decoder:
            return bytes([int(token[3:5], 16)])
        if token_id in self.added:
            return token.encode()
        if "ByteLevel" in self.decoder:
            return bytes(byte_of_char()[char] for char in token)
        # A tokenizer may drop the space before the first token of a text.
        once, twice = (
            self.tokenizer.decode([token_id] * num, clean_up_tokenization_spaces=False)
            for num in (1, 2)
        )
        return twice[len(once) :].encode()

    @cached_property
    def longest_token(self) -> float:
        """Bytes of the longest token that is not special; infinity where a token may stand for any
        text."""
        if not self.tokenizer.is_fast:
            return math.inf
        backend = self.tokenizer.backend_tokenizer
        normalizer = repr(backend.normalizer) if backend.normalizer else ""
        is_known = set(re.findall(r"(\w+)\(", normalizer)) <= KNOWN_NORMALIZERS
        has_bytes = "ByteLevel" in self.decoder or getattr(backend.model, "byte_fallback", False)
        shrinks = any(len(old) > len(new) for old, new in REPLACEMENT.findall(normalizer))
        if not is_known or not has_bytes or shrinks:
            return math.inf
        added = {token.content: token for token in self.tokenizer.added_tokens_decoder.values()}
        sizes = [1]
        for token in self.tokenizer.get_vocab():
            if token not in added:  # A character of a byte-level token is a byte.
                sizes.append(len(token) if "ByteLevel" in self.decoder else len(token.encode()))
            elif not added[token].special:
                sizes.append(len(token.encode()))
        return max(sizes)


@cache
def byte_of_char() -> dict[str, int]:
    """Bytes by the characters as which byte-level tokenizers write them."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    moved = {chr(256 + number): byte for number, byte in enumerate(hidden)}
    return {chr(byte): byte for byte in shown} | moved
