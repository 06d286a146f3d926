"""Scores of prompt tokens: their log probabilities under the model, and the best tokens at each position. Values.

Prefill computes them chunk by chunk; the router joins the chunks. Numbers are packed: a call may have a million.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NUMBER_BYTES = 4
"""Of a float32 and of an unsigned 32-bit integer, both little-endian."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """One prompt token. `rank`: number of tokens at least as probable. `top`: the best (token, logprob), best first."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of the prompt tokens at positions [first, first + len). The token at position 0 has none.

    `logprobs` (float32) and `ranks` (uint32) have a number a token; `top_ids` (uint32) and `top_logprobs` (float32)
    have `k`. Raises `ValueError` if they do not fit.
    """

    first: int
    k: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes

    def __post_init__(self) -> None:
        num_bytes = len(self.logprobs)
        fits = len(self.ranks) == num_bytes and len(self.top_ids) == len(self.top_logprobs) == self.k * num_bytes
        if num_bytes % NUMBER_BYTES or not fits or self.first < 1 or self.k < 0:
            raise ValueError(f"scores of {num_bytes} bytes with {self.k} best tokens do not fit together")

    def __len__(self) -> int:
        return len(self.logprobs) // NUMBER_BYTES

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.first + len(self)

    def split(self, max_numbers: int) -> list[PromptScores]:
        """Parts in order, with at most `max_numbers` numbers each, and at least a token."""
        step = max(1, max_numbers // (2 * (self.k + 1)))
        if len(self) <= step:
            return [self]
        parts = []
        for at in range(0, len(self), step):
            one = slice(at * NUMBER_BYTES, (at + step) * NUMBER_BYTES)
            best = slice(self.k * one.start, self.k * one.stop)
            numbers = (self.logprobs[one], self.ranks[one], self.top_ids[best], self.top_logprobs[best])
            parts.append(PromptScores(self.first + at, self.k, *numbers))
        return parts

    def tokens(self, k: int) -> list[ScoredToken]:
        """The scores of each token, with at most `k` best ones."""
        logprobs, ranks = _unpack("f", self.logprobs), _unpack("I", self.ranks)
        ids, values, width = _unpack("I", self.top_ids), _unpack("f", self.top_logprobs), min(k, self.k)
        tokens = []
        for index, (logprob, rank) in enumerate(zip(logprobs, ranks, strict=True)):
            best = slice(index * self.k, index * self.k + width)
            tokens.append(ScoredToken(logprob, rank, tuple(zip(ids[best], values[best], strict=True))))
        return tokens


def join_scores(parts: Sequence[PromptScores]) -> PromptScores:
    """The scores of consecutive parts, at least one, with the same `k`."""
    first = parts[0]
    if len(parts) == 1:
        return first
    names = ("logprobs", "ranks", "top_ids", "top_logprobs")
    return PromptScores(first.first, first.k, *(b"".join(getattr(part, name) for part in parts) for name in names))


def pack_scores(first: int, tokens: Sequence[ScoredToken]) -> PromptScores:
    """The scores of `tokens`, which have equally many best ones, from position `first` on."""
    best = [pair for token in tokens for pair in token.top]
    return PromptScores(
        first,
        len(tokens[0].top) if tokens else 0,
        _pack("f", [token.logprob for token in tokens]),
        _pack("I", [token.rank for token in tokens]),
        _pack("I", [id for id, _ in best]),
        _pack("f", [logprob for _, logprob in best]),
    )


def _pack(kind: str, numbers: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(numbers)}{kind}", *numbers)


def _unpack(kind: str, data: bytes) -> tuple[Any, ...]:
    return struct.unpack(f"<{len(data) // NUMBER_BYTES}{kind}", data)
