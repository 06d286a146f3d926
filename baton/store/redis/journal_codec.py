"""Converts journal entries to the bytes of a Redis stream, and back. Called by `RedisStore`; knows no connection.

MessagePack arrays, sealed for their sequence: at most five bytes for most tokens, three for small vocabularies. A
reader skips what a newer version appends to an array, so routers of two versions can share a store.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from baton.domain.ids import AttemptId, RequestId
from baton.domain.request import FinishReason, OutputToken, TokenLogprobs
from baton.store.redis.unsealed_log import UnsealedLog
from baton.store.seal import SealedKind, SealError, SealFault, StoreSeal
from baton.store.store import JournalEntry, JournalPart


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
    attempt: int = 0
    owner_tag: int = 0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Payload)


class JournalFormat:
    """The entries of a journal's stream. An entry contains its own position, so a seal binds it to that, too."""

    def __init__(self, seal: StoreSeal, unsealed: UnsealedLog) -> None:
        self._seal = seal
        self._unsealed = unsealed

    def payload(self, entry: JournalEntry) -> bytes:
        """Encodes an entry."""
        payload = _encoder.encode(
            (
                entry.first,
                entry.tokens,
                entry.num_cached_tokens,
                entry.finish,
                entry.failure_code,
                entry.logprobs and [known and (known.logprob, known.top) for known in entry.logprobs],
                entry.id.attempt,
                entry.id.owner_tag,
            )
        )
        return self._seal.seal(SealedKind.JOURNAL, entry.id.request_id, payload)

    def part(self, id: RequestId, payloads: Sequence[bytes], start: int) -> JournalPart:
        """Decodes consecutive entries into the tokens from index `start` on, in order.

        Where two entries have the same token, the earlier one counts. Ends before an entry that does not open, and
        before a gap: an end that follows missing tokens is not the end.
        """
        tokens: list[OutputToken] = []
        writers: list[AttemptId] = []
        num_cached_tokens, finish, failure_code = 0, None, ""
        for payload in payloads:
            due = start + len(tokens)
            try:
                entry = self._opened(id, payload)
                if entry.first > due:
                    raise SealError(SealFault.GAP)
            except SealError as error:
                self._unsealed.record(SealedKind.JOURNAL, id, error.fault)
                break
            tokens += (_token(entry, position) for position in range(max(0, due - entry.first), len(entry.tokens)))
            num_cached_tokens, finish, failure_code = entry.num_cached_tokens, entry.finish, entry.failure_code
            writers.append(AttemptId(id, entry.attempt, entry.owner_tag))
        return JournalPart(tuple(tokens), num_cached_tokens, finish, failure_code, tuple(writers))

    def _opened(self, id: RequestId, payload: bytes) -> _Payload:
        try:
            return _decoder.decode(self._seal.open(SealedKind.JOURNAL, id, payload))
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise SealError(SealFault.UNREADABLE) from None


def _token(entry: _Payload, position: int) -> OutputToken:
    known = entry.logprobs[position] if position < len(entry.logprobs) else None
    return OutputToken(
        entry.first + position, entry.tokens[position], TokenLogprobs(known.logprob, known.top) if known else None
    )
