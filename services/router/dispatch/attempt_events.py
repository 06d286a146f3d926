"""One attempt's two streams put in order: what prefill and decode say goes in, steps in the order of tokens come out.

Owned by `attempt`; no I/O. The streams race: decode may be heard before prefill's `Sealed`, so what it says waits for
that. Guards the promise made to clients: token indices without gap or duplicate. After `Sealed` prefill's fate is
decode's business, and nothing prefill says matters any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baton.domain.errors import IntegrityFailure
from baton.domain.request import FinishReason, OutputToken
from baton.rpc.codec import decode_failure, decode_finish, decode_token
from baton.rpc.gen import decode_pb2, prefill_pb2
from services.router.dispatch.worker_errors import AttemptFailure, FaultSource, Side, classify_reported


@dataclass(frozen=True, slots=True)
class PrefillAccepted:
    """Prefill has taken the prompt."""


@dataclass(frozen=True, slots=True)
class PrefillSealed:
    """The prompt is computed. `num_cached_tokens` of it were in prefill's prefix cache."""

    token: OutputToken
    num_cached_tokens: int
    finish: FinishReason | None


@dataclass(frozen=True, slots=True)
class DecodeImported:
    """Decode has committed the pages and continues."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """The next tokens; `finish` comes with the last."""

    tokens: tuple[OutputToken, ...]
    finish: FinishReason | None


AttemptEvent = PrefillAccepted | PrefillSealed | DecodeImported | Decoded


def finish_of(event: AttemptEvent) -> FinishReason | None:
    """Why the sequence ended with `event`; None if it goes on."""
    match event:
        case Decoded(finish=finish) | PrefillSealed(finish=finish):
            return finish
        case PrefillAccepted() | DecodeImported():
            return None


class AttemptEventOrder:
    """`num_emitted` output tokens were emitted by earlier attempts: the first index expected.

    `sealed`: nothing is to be heard of prefill, decode computes the prompt and says all tokens.
    """

    def __init__(self, num_emitted: int, sealed: bool = False) -> None:
        self._next_index = num_emitted
        self._sealed = sealed
        self._held: list[decode_pb2.GenerateEvent] = []
        self._held_end: Exception | None = None

    def on_prefill_event(self, event: prefill_pb2.PrefillEvent) -> Iterator[AttemptEvent]:
        """Steps that an event of the Prefill stream allows. Raises `AttemptFailure` or a `BatonError` that is final."""
        if self._sealed:
            return
        match event.WhichOneof("event"):
            case "accepted":
                yield PrefillAccepted()
            case "sealed":
                self._sealed = True
                yield self._seal(event.sealed)
                for held in self._held:
                    yield from self.on_decode_event(held)
                if self._held_end is not None:
                    raise self._held_end
            case "failed":
                raise classify_reported(decode_failure(event.failed), Side.PREFILL)

    def on_decode_event(self, event: decode_pb2.GenerateEvent) -> tuple[AttemptEvent, ...]:
        """Steps that an event of the Generate stream allows. Raises as `on_prefill_event`.

        What decode said before it failed is not lost: once it has landed the seal is on its way, and is waited for.
        """
        kind = event.WhichOneof("event")
        if kind == "failed":
            failure = classify_reported(decode_failure(event.failed), Side.DECODE)
            if self._sealed or not self._held:
                raise failure
            self._held_end = failure
        elif not self._sealed:
            self._held.append(event)
        elif kind == "tokens":
            return (self._decoded(event.tokens),)
        elif kind == "imported":
            return (DecodeImported(),)
        return ()

    def on_stream_ended(self, side: Side, reason: Exception) -> None:
        """A stream ended in good order; raises `reason` if that was too early.

        Decode's may end before the seal is heard: the first token was the last, or decode was quick.
        """
        if self._sealed:
            self.on_stream_failed(side, reason)
        elif side is Side.DECODE:
            self._held_end = self._held_end or reason
        else:
            raise reason

    def on_stream_failed(self, side: Side, reason: Exception) -> None:
        """A stream broke, or its worker is gone. Raises `reason` unless it no longer matters."""
        if side is Side.DECODE or not self._sealed:
            raise reason

    def _seal(self, sealed: prefill_pb2.Sealed) -> PrefillSealed:
        token = self._expect(decode_token(sealed.first_token), Side.PREFILL)
        return PrefillSealed(token, sealed.num_cached_tokens, decode_finish(sealed.finish_reason))

    def _decoded(self, message: decode_pb2.Tokens) -> Decoded:
        tokens = tuple([self._expect(decode_token(token), Side.DECODE) for token in message.tokens])
        return Decoded(tokens, decode_finish(message.finish_reason))

    def _expect(self, token: OutputToken, side: Side) -> OutputToken:
        if token.index != self._next_index:
            message = f"{side.value} sent output token {token.index} where {self._next_index} comes next"
            raise AttemptFailure(IntegrityFailure(message), FaultSource.LINK)
        self._next_index += 1
        return token
