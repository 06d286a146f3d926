"""One attempt: from a booking to its last token, as a stream of steps. Called by `dispatcher`; knows no other attempt.

Opens Generate and Prefill at once, so that decode follows the handoff from its first chunk. Two pumps carry both
streams, the deadline and the news of a worker's end into one mailbox; `Conversation` puts them in order. However it
ends but by decode's last token, both workers are told to abort.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass

import grpc

from baton.domain.errors import BatonError, Broken, DeadlineExceeded
from baton.domain.request import EngineRequest
from baton.domain.worker import WorkerRecord
from baton.rpc.codec import encode_request
from baton.rpc.gen import decode_pb2, prefill_pb2
from services.router.dispatch.aborts import Aborts
from services.router.dispatch.booking import Booking
from services.router.dispatch.conversation import Conversation, DecodeLanded, PrefillSealed, Step, finish_of
from services.router.dispatch.fleet import Fleet
from services.router.dispatch.loss import AttemptLost, Fault, Side, broken, silent
from services.router.mailbox import Mailbox

GRACE_S = 1.0
"""The streams' own deadlines are this much later than the attempt's, which so is the one that is reported."""


@dataclass(frozen=True, slots=True)
class _Ended:
    """A stream is over in good order; `reason` says what that means if it was needed."""

    side: Side
    reason: AttemptLost


@dataclass(frozen=True, slots=True)
class _Lost:
    """A stream broke, or its worker is gone."""

    side: Side
    reason: BatonError | AttemptLost


@dataclass(frozen=True, slots=True)
class _Deadline:
    """The request's time is over."""


_Message = prefill_pb2.PrefillEvent | decode_pb2.GenerateEvent | _Ended | _Lost | _Deadline
_PrefillCall = grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillEvent]
_GenerateCall = grpc.aio.UnaryStreamCall[decode_pb2.GenerateRequest, decode_pb2.GenerateEvent]


class Attempt:
    """Drives `request` on the booked pair until `deadline` (of the running loop's clock). `steps` may be taken once."""

    def __init__(self, request: EngineRequest, booking: Booking, deadline: float, fleet: Fleet, aborts: Aborts) -> None:
        self._request = request
        self._booking = booking
        self._deadline = deadline
        self._fleet = fleet
        self._aborts = aborts
        self._conversation = Conversation(request.num_emitted, sealed=booking.pair.local)
        # Unbounded: it never holds more than the request's own tokens.
        self._mailbox: Mailbox[_Message] = Mailbox()
        self._pumps: list[asyncio.Task[None]] = []
        self._undo: list[Callable[[], object]] = []

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Steps until one that finishes. Raises `AttemptLost`, `DeadlineExceeded`, or what a worker said is final."""
        abort_reason: str | None = "cancelled"
        pair = self._booking.pair
        self._open()
        try:
            while True:
                for step in self._hear(await self._mailbox.get()):
                    if isinstance(step, DecodeLanded):
                        self._fleet.landed(self._request.id, pair)
                    if finish_of(step) is None:
                        yield step
                        continue
                    # A sequence that its first token ended leaves a promise and pins behind.
                    abort_reason = "finished" if isinstance(step, PrefillSealed) else None
                    yield step
                    return
        except AttemptLost as loss:
            abort_reason = loss.error.code
            if loss.unready:
                self._fleet.suspect(pair.prefill if loss.fault is Fault.PREFILL else pair.decode, loss.error)
            if loss.blames_link:
                loss.counts = self._fleet.link_lost(self._request.id, pair, loss.error)
            raise
        except BatonError as error:
            abort_reason = error.code
            raise
        finally:
            await self._close(abort_reason)

    def _open(self) -> None:
        loop = asyncio.get_running_loop()
        timeout_s = max(0.0, self._deadline - loop.time())
        pair = self._booking.pair
        generate = self._fleet.decode_stub(pair.decode).Generate(
            self._generate_request(timeout_s), timeout=timeout_s + GRACE_S
        )
        self._follow(Side.DECODE, pair.decode, generate)
        if not pair.local:
            prefill = self._fleet.prefill_stub(pair.prefill).Prefill(
                self._prefill_request(timeout_s), timeout=timeout_s + GRACE_S
            )
            self._follow(Side.PREFILL, pair.prefill, prefill)
        self._undo.append(loop.call_at(self._deadline, self._mailbox.put_nowait, _Deadline()).cancel)

    def _follow(self, side: Side, worker: WorkerRecord, call: _PrefillCall | _GenerateCall) -> None:
        pump = asyncio.create_task(self._pump(side, call), name=f"{side.value}-{self._request.id}")
        self._pumps.append(pump)
        self._undo += [call.cancel, self._fleet.watch(worker.incarnation, lambda: self._lose(side))]

    async def _close(self, abort_reason: str | None) -> None:
        if abort_reason is not None:
            for worker in self._booking.pair.workers:
                self._aborts.send(self._request.id, worker, abort_reason)
        for undo in (*self._undo, *(pump.cancel for pump in self._pumps)):
            undo()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def _hear(self, message: _Message) -> Iterable[Step]:
        match message:
            case decode_pb2.GenerateEvent():
                return self._conversation.hear_decode(message)
            case prefill_pb2.PrefillEvent():
                return self._conversation.hear_prefill(message)
            case _Ended(side, reason):
                self._conversation.hear_end(side, reason)
            case _Lost(side, reason):
                self._conversation.hear_loss(side, reason)
            case _Deadline():
                raise DeadlineExceeded(f"request {self._request.id.request_id} ran out of time")
            case _:
                raise Broken(f"unexpected message {message!r}")
        return ()

    async def _pump(self, side: Side, call: _PrefillCall | _GenerateCall) -> None:
        """Carries one stream into the mailbox; always ends with an `_Ended` or a `_Lost`."""
        last: _Ended | _Lost = _Lost(side, silent(side, "was cut off"))
        try:
            async for event in call:
                self._mailbox.put_nowait(event)
            last = _Ended(side, silent(side, "ended its stream early"))
        except grpc.aio.AioRpcError as error:
            last = _Lost(side, broken(error, side))
            self._suspect(side, last.reason)
        finally:
            self._mailbox.put_nowait(last)

    def _suspect(self, side: Side, reason: BatonError | AttemptLost) -> None:
        if isinstance(reason, AttemptLost) and reason.error.code == "worker_lost":
            pair = self._booking.pair
            self._fleet.suspect(pair.prefill if side is Side.PREFILL else pair.decode, reason.error)

    def _lose(self, side: Side) -> None:
        self._mailbox.put_nowait(_Lost(side, silent(side, "restarted, fell silent or is stuck")))

    def _prefill_request(self, timeout_s: float) -> prefill_pb2.PrefillRequest:
        return prefill_pb2.PrefillRequest(
            request=encode_request(self._request),
            decode_prefix_len=self._booking.decode_prefix_len,
            deadline_s=timeout_s,
        )

    def _generate_request(self, timeout_s: float) -> decode_pb2.GenerateRequest:
        prefill = self._booking.pair.prefill
        return decode_pb2.GenerateRequest(
            request=encode_request(self._request),
            promise_id=self._booking.promise_id,
            prefill_id=prefill.id,
            prefill_incarnation=prefill.incarnation,
            deadline_s=timeout_s,
        )
