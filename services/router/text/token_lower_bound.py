"""How few tokens a text can possibly become: a bound that costs milliseconds where tokenising costs seconds.

`TextModel` calls `read_token_lower_bound` once and `min_tokens` for every prompt; a prompt whose lower bound is over
the context is refused before it is tokenised. Pure; knows no tokenizer library, only what a tokenizer.json says.

Every byte of a text ends up in a token, and a token holds so many letters, digits, spaces or other bytes at most: the
text's letters over the most letters in any token of the vocabulary is a bound, and so for each kind; the best counts.
Kinds beat the plain length, because the longest tokens of a vocabulary are runs of spaces and dashes.
"""

from __future__ import annotations

import string
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from services.router.text.byte_alphabet import BYTE_OF

Json = Mapping[str, object]

_LETTERS, _DIGITS = string.ascii_letters.encode(), string.digits.encode()
_SPACES = b" \t\n\r\v\f"
_OTHER_ASCII = bytes(byte for byte in range(0x80) if byte not in _LETTERS + _DIGITS + _SPACES)
_BEYOND_ASCII = bytes(range(0x80, 0x100))
_KINDS = (_LETTERS, _DIGITS, _SPACES, _OTHER_ASCII, _BEYOND_ASCII)


@dataclass(frozen=True, slots=True)
class TokenLowerBound:
    """`max_bytes`: kind of bytes -> the most of them in one token, at least 1.

    `normalizes`: the tokenizer brings text into normal form C first, which can make it shorter. Then the bound holds
    for text in that form only, and counts ASCII only: newer versions of Unicode may compose what ours does not know.
    """

    max_bytes: tuple[tuple[bytes, int], ...]
    normalizes: bool

    def min_tokens(self, text: str) -> int:
        """No tokenisation of `text` has fewer tokens, special ones around it not counted. 0 where nothing is known."""
        if self.normalizes and not unicodedata.is_normalized("NFC", text):
            return 0
        data = text.encode("utf-8", "ignore")
        return max(-(-_count(data, kind) // most) for kind, most in self.max_bytes)


def read_token_lower_bound(tokenizer: Json) -> TokenLowerBound | None:
    """The floor of a parsed tokenizer.json; None for a tokenizer that may drop text or is not made of bytes."""
    model, normalizer = _part(tokenizer, "model"), _part(tokenizer, "normalizer")
    names = model.get("vocab")
    if not isinstance(names, dict) or not _keeps_every_byte(tokenizer, names):
        return None
    normalizes = bool(normalizer)
    kinds = _KINDS[:-1] if normalizes else _KINDS
    tokens = [*_bytes_of(names), *(content.encode() for content in _added(tokenizer))]
    return TokenLowerBound(tuple((kind, max(_count(token, kind) for token in tokens)) for kind in kinds), normalizes)


def _keeps_every_byte(tokenizer: Json, names: Json) -> bool:
    """Whether text can neither vanish nor shrink on its way into tokens, but by composition (normal form C)."""
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
    """The types of its steps in order; of one that removes text something else."""
    nested = pre_tokenizer.get("pretokenizers")
    for step in nested if isinstance(nested, list) else [pre_tokenizer]:
        yield "Removes" if step.get("behavior") == "Removed" else str(step.get("type"))


def _bytes_of(names: Iterable[str]) -> Iterator[bytes]:
    """What byte-level tokens stand for. A name with other characters is that of an added token."""
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
