"""Bounds the number of tokens of a text from below, in milliseconds where tokenising takes seconds. Pure.

`TextModel` calls `read_token_lower_bound` once and `min_tokens` for every prompt. A prompt whose bound exceeds the
context is refused before it is tokenised. Knows only tokenizer.json, no tokenizer library.

Every byte of a text is part of a token. The letters of the text, divided by the most letters in any token of the
vocabulary, are a bound; so are digits, spaces and other bytes. The largest bound counts. Kinds give better bounds than
the plain length, because the longest tokens of a vocabulary are runs of spaces and dashes.
"""

from __future__ import annotations

import string
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from baton.domain.arithmetic import ceil_div
from baton.services.router.text.byte_alphabet import BYTE_OF

Json = Mapping[str, object]

_LETTERS, _DIGITS = string.ascii_letters.encode(), string.digits.encode()
_SPACES = b" \t\n\r\v\f"
_OTHER_ASCII = bytes(byte for byte in range(0x80) if byte not in _LETTERS + _DIGITS + _SPACES)
_BEYOND_ASCII = bytes(range(0x80, 0x100))
_KINDS = (_LETTERS, _DIGITS, _SPACES, _OTHER_ASCII, _BEYOND_ASCII)


@dataclass(frozen=True, slots=True)
class TokenLowerBound:
    """`max_bytes`: kind of bytes -> the most of them in one token, at least 1.

    `normalizes`: the tokenizer first converts text to normal form C, which can shorten it. Then the bound holds for
    text in that form only and counts ASCII only: newer versions of Unicode may compose more.
    """

    max_bytes: tuple[tuple[bytes, int], ...]
    normalizes: bool

    def min_tokens(self, text: str) -> int:
        """Returns a lower bound of the tokens of `text`, without special tokens around it. 0 where no bound is
        known."""
        if self.normalizes and not unicodedata.is_normalized("NFC", text):
            return 0
        data = text.encode("utf-8", "ignore")
        return max(ceil_div(_count(data, kind), most) for kind, most in self.max_bytes)


def read_token_lower_bound(tokenizer: Json) -> TokenLowerBound | None:
    """Reads the bound of a parsed tokenizer.json; None for a tokenizer that may drop text or is not byte-level."""
    model, normalizer = _part(tokenizer, "model"), _part(tokenizer, "normalizer")
    names = model.get("vocab")
    if not isinstance(names, dict) or not _keeps_every_byte(tokenizer, names):
        return None
    normalizes = bool(normalizer)
    kinds = _KINDS[:-1] if normalizes else _KINDS
    tokens = [*_bytes_of(names), *(content.encode() for content in _added(tokenizer))]
    return TokenLowerBound(tuple((kind, max(_count(token, kind) for token in tokens)) for kind in kinds), normalizes)


def _keeps_every_byte(tokenizer: Json, names: Json) -> bool:
    """True when tokens keep every byte of a text, except for composition (normal form C)."""
    model, normalizer = _part(tokenizer, "model"), _part(tokenizer, "normalizer")
    plain = not any(model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"))
    steps = list(_steps(_part(tokenizer, "pre_tokenizer")))
    return (
        model.get("type", "BPE") == "BPE"
        and plain
        and all(char in names for char in BYTE_OF)
        and normalizer.get("type", "NFC") == "NFC"
        and steps[-1:] == ["ByteLevel"]
        and all(step in ("ByteLevel", "Digits", "Split") for step in steps)
        and not any(token.get("lstrip") or token.get("rstrip") for token in _added_entries(tokenizer))
    )


def _steps(pre_tokenizer: Json) -> Iterator[str]:
    """Yields the types of its steps in order; "Removes" for a step that removes text."""
    nested = pre_tokenizer.get("pretokenizers")
    for step in nested if isinstance(nested, list) else [pre_tokenizer]:
        yield "Removes" if step.get("behavior") == "Removed" else str(step.get("type"))


def _bytes_of(names: Iterable[str]) -> Iterator[bytes]:
    """Yields the bytes of byte-level tokens. A name with other characters belongs to an added token."""
    for name in names:
        if all(char in BYTE_OF for char in name):
            yield bytes(BYTE_OF[char] for char in name)


def _added(tokenizer: Json) -> Iterator[str]:
    return (str(token.get("content", "")) for token in _added_entries(tokenizer))


def _added_entries(tokenizer: Json) -> list[Json]:
    entries = tokenizer.get("added_tokens")
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _part(tokenizer: Json, name: str) -> Json:
    value = tokenizer.get(name)
    return value if isinstance(value, dict) else {}


def _count(data: bytes, kind: bytes) -> int:
    return len(data) - len(data.translate(None, delete=kind))
