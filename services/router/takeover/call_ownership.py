"""The calls that this router answers, as the state store shall know them. `respond` and `takeover` tell it.

A call is opened before its admitted are taken and marked when it is over: ENDED, or ABANDONED when its client went
away. What was cut off by our own end stays open, for the router that takes it over. Everything is written through a
sink that never waits; only the headers of an answer wait a moment, so that what they say of it is true.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from baton.domain.errors import Cancelled, Superseded
from baton.domain.ids import OwnerId, RequestId
from baton.domain.lifecycle import RequestState
from baton.store.notifier import wait_for_event
from baton.store.store import CallRecord, CallStatus, SequenceRecord
from services.router.openai.request_parser import RawRequest
from services.router.openai.valid_request import ValidRequest
from services.router.openai.validation import RequestMetadata

FIRST_EPOCH = 1

STORE_WAIT_S = 0.5
"""How long headers wait for the store to have the call; a store that takes longer makes the call not durable."""


class CallSink(Protocol):
    """The part of `StoreWriter` that is used here."""

    @property
    def degraded(self) -> bool: ...

    def open_call(self, record: CallRecord) -> asyncio.Event | None: ...

    def adopt_call(self, record: CallRecord) -> None: ...

    def end_call(self, id: RequestId, status: CallStatus) -> None: ...

    def record_end(
        self, record: SequenceRecord, end: RequestState, *, num_emitted: int, failure_code: str = ""
    ) -> None: ...

    def tracks_call(self, id: RequestId) -> bool: ...


class NullCallSink:
    """Without a store nothing is kept, and no call is durable."""

    degraded = True

    def open_call(self, record: CallRecord) -> asyncio.Event | None:
        """Nothing."""
        return None

    def adopt_call(self, record: CallRecord) -> None:
        """Nothing."""

    def end_call(self, id: RequestId, status: CallStatus) -> None:
        """Nothing."""

    def record_end(
        self, record: SequenceRecord, end: RequestState, *, num_emitted: int, failure_code: str = ""
    ) -> None:
        """Nothing."""

    def tracks_call(self, id: RequestId) -> bool:
        """Never."""
        return False


class OwnershipHandle:
    """One call that this router has to answer, until it is over or somebody else's."""

    def __init__(self, sink: CallSink, id: RequestId, stored: asyncio.Event | None) -> None:
        """`stored` is set when the store has the call; None: it never will."""
        self._sink = sink
        self._id = id
        self._ended = False
        self._stored = stored

    async def durable(self) -> bool:
        """Whether another router could carry the call on from now on. Waits a moment for the store to have it."""
        if self._stored is None or self._sink.degraded:
            return False
        return await wait_for_event(self._stored, STORE_WAIT_S)

    def end(self, error: BaseException | None) -> None:
        """The call is over, by `error` if there was one. Only the first end counts."""
        if self._ended:
            return
        self._ended = True
        match error:
            case asyncio.CancelledError():
                return  # we end, not the call: it stays open for the router that takes it over
            case Cancelled() | Superseded():  # the latter has no effect if another router has claimed the call
                self._sink.end_call(self._id, CallStatus.ABANDONED)
            case _:
                self._sink.end_call(self._id, CallStatus.ENDED)


class CallOwnership:
    """Owned by one event loop."""

    def __init__(self, sink: CallSink, owner: OwnerId) -> None:
        self._sink = sink
        self._owner = owner

    @property
    def owner(self) -> OwnerId:
        """Who this router is."""
        return self._owner

    def open(self, call: ValidRequest, raw: RawRequest) -> OwnershipHandle:
        """Enters a call, before its admitted are taken."""
        metadata, sequence_ids = raw.metadata, tuple(sequence.id for sequence in call.sequences)
        record = CallRecord(
            id=call.id,
            owner=self._owner,
            epoch=FIRST_EPOCH,
            status=CallStatus.OPEN,
            endpoint=raw.endpoint,
            body=raw.body,
            tenant=metadata.tenant,
            created_s=metadata.created_s,
            seed=metadata.seed,
            sequence_ids=sequence_ids,
        )
        return OwnershipHandle(self._sink, call.id, self._sink.open_call(record))

    def adopt(self, record: CallRecord) -> OwnershipHandle:
        """Takes a call that was claimed in the store."""
        self._sink.adopt_call(record)
        stored = asyncio.Event()
        stored.set()
        return OwnershipHandle(self._sink, record.id, stored)

    def record_end(self, record: SequenceRecord, end: RequestState, num_emitted: int, failure_code: str = "") -> None:
        """A sequence of an adopted call has ended, and its last owner did not come to write that down."""
        self._sink.record_end(record, end, num_emitted=num_emitted, failure_code=failure_code)

    def holds(self, id: RequestId) -> bool:
        """Whether the call is answered here, or was and the store does not know its end yet."""
        return self._sink.tracks_call(id)


def raw_request_of(record: CallRecord) -> RawRequest:
    """What was posted, out of the store."""
    return RawRequest(
        record.endpoint, record.body, RequestMetadata(record.id, record.created_s, record.seed, record.tenant)
    )
