"""One attempt: from a reservation to its last token, as a stream of events. Called by `dispatcher`.

Opens Generate and Prefill at once, so that decode follows the handoff from its first chunk. Two pumps carry both
streams, the deadline and the news of a worker's end into one mailbox; `AttemptEventOrder` puts them in order. Unless
decode's last token ends it, both workers get an abort.
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
from services.router.dispatch.attempt_events import (
    AttemptEvent,
    AttemptEventOrder,
    DecodeImported,
    PrefillSealed,
    finish_of,
)
from services.router.dispatch.reserve import PairReservation
from services.router.dispatch.worker_errors import AttemptFailure, FaultSource, Side, classify_rpc_error, lost_worker
from services.router.dispatch.workers import WorkerSet
from services.router.mailbox import AsyncMailbox

GRACE_S = 1.0
"""The streams' own deadlines are this much later than the attempt's, which so is the one that is reported."""


@dataclass(frozen=True, slots=True)
class _StreamEnded:
    """A stream is over in good order; `reason` says what that means if it was needed."""

    side: Side
    reason: AttemptFailure


@dataclass(frozen=True, slots=True)
class _StreamFailed:
    """A stream broke, or its worker is gone."""

    side: Side
    reason: BatonError | AttemptFailure


@dataclass(frozen=True, slots=True)
class _DeadlinePassed:
    """The request's time is over."""


_Message = prefill_pb2.PrefillEvent | decode_pb2.GenerateEvent | _StreamEnded | _StreamFailed | _DeadlinePassed
_PrefillCall = grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillEvent]
_GenerateCall = grpc.aio.UnaryStreamCall[decode_pb2.GenerateRequest, decode_pb2.GenerateEvent]


class Attempt:
    """Drives `request` on the reserved pair until `deadline` (of the running loop's clock). `events` runs once."""

    def __init__(
        self, request: EngineRequest, reservation: PairReservation, deadline: float, workers: WorkerSet, aborts: Aborts
    ) -> None:
        self._request = request
        self._reservation = reservation
        self._deadline = deadline
        self._workers = workers
        self._aborts = aborts
        self._event_order = AttemptEventOrder(request.num_emitted, sealed=reservation.pair.local)
        # Unbounded: it never holds more than the request's own tokens.
        self._mailbox: AsyncMailbox[_Message] = AsyncMailbox()
        self._pumps: list[asyncio.Task[None]] = []
        self._undo: list[Callable[[], object]] = []

    async def events(self) -> AsyncGenerator[AttemptEvent, None]:
        """Events until one that finishes. Raises `AttemptFailure`, `DeadlineExceeded`, or a worker's final error."""
        abort_reason: str | None = "cancelled"
        pair = self._reservation.pair
        self._open()
        try:
            while True:
                for event in self._on_message(await self._mailbox.get()):
                    if isinstance(event, DecodeImported):
                        self._workers.on_imported(self._request.id, pair)
                    if finish_of(event) is None:
                        yield event
                        continue
                    # A sequence that its first token ended leaves a promise and pins behind.
                    abort_reason = "finished" if isinstance(event, PrefillSealed) else None
                    yield event
                    return
        except AttemptFailure as failure:
            abort_reason = failure.error.code
            if failure.unready:
                self._workers.suspect(
                    pair.prefill if failure.fault_source is FaultSource.PREFILL else pair.decode, failure.error
                )
            if failure.blames_link:
                failure.counted = self._workers.on_link_failure(self._request.id, pair, failure.error)
            raise
        except BatonError as error:
            abort_reason = error.code
            raise
        finally:
            await self._close(abort_reason)

    def _open(self) -> None:
        loop = asyncio.get_running_loop()
        timeout_s = max(0.0, self._deadline - loop.time())
        pair = self._reservation.pair
        generate = self._workers.decode_stub(pair.decode).Generate(
            self._generate_request(timeout_s), timeout=timeout_s + GRACE_S
        )
        self._start_pump(Side.DECODE, pair.decode, generate)
        if not pair.local:
            prefill = self._workers.prefill_stub(pair.prefill).Prefill(
                self._prefill_request(timeout_s), timeout=timeout_s + GRACE_S
            )
            self._start_pump(Side.PREFILL, pair.prefill, prefill)
        self._undo.append(loop.call_at(self._deadline, self._mailbox.put_nowait, _DeadlinePassed()).cancel)

    def _start_pump(self, side: Side, worker: WorkerRecord, call: _PrefillCall | _GenerateCall) -> None:
        pump = asyncio.create_task(self._pump(side, call), name=f"{side.value}-{self._request.id}")
        self._pumps.append(pump)
        self._undo += [call.cancel, self._workers.watch(worker.incarnation, lambda: self._on_worker_lost(side))]

    async def _close(self, abort_reason: str | None) -> None:
        if abort_reason is not None:
            for worker in self._reservation.pair.workers:
                self._aborts.send(self._request.id, worker, abort_reason)
        for undo in (*self._undo, *(pump.cancel for pump in self._pumps)):
            undo()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def _on_message(self, message: _Message) -> Iterable[AttemptEvent]:
        match message:
            case decode_pb2.GenerateEvent():
                return self._event_order.on_decode_event(message)
            case prefill_pb2.PrefillEvent():
                return self._event_order.on_prefill_event(message)
            case _StreamEnded(side, reason):
                self._event_order.on_stream_ended(side, reason)
            case _StreamFailed(side, reason):
                self._event_order.on_stream_failed(side, reason)
            case _DeadlinePassed():
                raise DeadlineExceeded(f"request {self._request.id.request_id} ran out of time")
            case _:
                raise Broken(f"unexpected message {message!r}")
        return ()

    async def _pump(self, side: Side, call: _PrefillCall | _GenerateCall) -> None:
        """Carries one stream into the mailbox; always ends with an `_StreamEnded` or a `_StreamFailed`."""
        last: _StreamEnded | _StreamFailed = _StreamFailed(side, lost_worker(side, "was cut off"))
        try:
            async for event in call:
                self._mailbox.put_nowait(event)
            last = _StreamEnded(side, lost_worker(side, "ended its stream early"))
        except grpc.aio.AioRpcError as error:
            last = _StreamFailed(side, classify_rpc_error(error, side))
            self._suspect(side, last.reason)
        finally:
            self._mailbox.put_nowait(last)

    def _suspect(self, side: Side, reason: BatonError | AttemptFailure) -> None:
        if isinstance(reason, AttemptFailure) and reason.error.code == "worker_lost":
            pair = self._reservation.pair
            self._workers.suspect(pair.prefill if side is Side.PREFILL else pair.decode, reason.error)

    def _on_worker_lost(self, side: Side) -> None:
        self._mailbox.put_nowait(_StreamFailed(side, lost_worker(side, "restarted, fell silent or is stuck")))

    def _prefill_request(self, timeout_s: float) -> prefill_pb2.PrefillRequest:
        return prefill_pb2.PrefillRequest(
            request=encode_request(self._request),
            decode_prefix_len=self._reservation.decode_prefix_len,
            deadline_s=timeout_s,
        )

    def _generate_request(self, timeout_s: float) -> decode_pb2.GenerateRequest:
        prefill = self._reservation.pair.prefill
        return decode_pb2.GenerateRequest(
            request=encode_request(self._request),
            reservation_id=self._reservation.reservation_id,
            prefill_id=prefill.id,
            prefill_incarnation=prefill.incarnation,
            deadline_s=timeout_s,
        )
