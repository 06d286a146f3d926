"""Converts journal entries to the bytes of a Redis stream, and back. Called by `RedisStore`; knows no connection.

MessagePack arrays: at most five bytes for most tokens, three for small vocabularies. A reader skips what a newer
version appends to an array, so routers of two versions can share a store.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from baton.domain.request import FinishReason, OutputToken, TokenLogprobs
from baton.store.store import JournalEntry, JournalPart, StoreUnavailable


class _Logprobs(msgspec.Struct, array_like=True, frozen=True):
    logprob: float
    top: tuple[tuple[int, float], ...]


class _Payload(msgspec.Struct, array_like=True, frozen=True):
    """`logprobs` is empty when no token has any."""

    first: int
    tokens: tuple[int, ...]
    num_cached_tokens: int
    finish: FinishReason | None = None
    failure_code: str = ""
    logprobs: tuple[_Logprobs | None, ...] = ()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Payload)


def payload_from_entry(entry: JournalEntry) -> bytes:
    """Encodes the entry without its id."""
    return _encoder.encode(
        (
            entry.first,
            entry.tokens,
            entry.num_cached_tokens,
            entry.finish,
            entry.failure_code,
            entry.logprobs and [known and (known.logprob, known.top) for known in entry.logprobs],
        )
    )


def part_from_payloads(payloads: Sequence[bytes], start: int) -> JournalPart:
    """Decodes consecutive entries into the tokens from index `start` on, in order.

    Where two entries have the same token, the earlier one counts. Raises `StoreUnavailable` for an unreadable entry.
    """
    tokens: list[OutputToken] = []
    num_cached_tokens, finish, failure_code = 0, None, ""
    for payload in payloads:
        entry = _decoded(payload)
        due = start + len(tokens)
        tokens += (_token(entry, position) for position in range(max(0, due - entry.first), len(entry.tokens)))
        num_cached_tokens, finish, failure_code = entry.num_cached_tokens, entry.finish, entry.failure_code
    return JournalPart(tuple(tokens), num_cached_tokens, finish, failure_code)


def _decoded(payload: bytes) -> _Payload:
    try:
        return _decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise StoreUnavailable(f"a journal cannot be read by this version: {error}") from error


def _token(entry: _Payload, position: int) -> OutputToken:
    known = entry.logprobs[position] if position < len(entry.logprobs) else None
    return OutputToken(
        entry.first + position, entry.tokens[position], TokenLogprobs(known.logprob, known.top) if known else None
    )
