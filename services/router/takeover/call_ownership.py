"""The calls that this router answers, as the state store shall know them. `respond` and `takeover` tell it.

A call is opened before its admitted are taken and marked when it is over: ENDED, or ABANDONED when its client went
away. What was cut off by our own end stays open, for the router that takes it over. Everything is written through a
writer that never waits; only the headers of an answer wait a moment, so that what they say of it is true.
"""

from __future__ import annotations

import asyncio

from baton.domain.errors import Cancelled, Superseded
from baton.domain.ids import OwnerId, RequestId
from baton.domain.lifecycle import RequestState
from baton.store.notifier import wait_for_event
from baton.store.store import CallRecord, CallStatus, SequenceRecord
from baton.store.write_behind.writer import StoreWriter
from services.router.openai.request_parser import RawRequest
from services.router.openai.valid_request import ValidRequest
from services.router.openai.validation import RequestMetadata

FIRST_EPOCH = 1

STORE_WAIT_S = 0.5
"""How long headers wait for the store to have the call; a store that takes longer makes the call not durable."""


class OwnershipHandle:
    """One call that this router has to answer, until it is over or somebody else's."""

    def __init__(self, writer: StoreWriter, id: RequestId, stored: asyncio.Event | None) -> None:
        """`stored` is set when the store has the call; None: it never will."""
        self._writer = writer
        self._id = id
        self._ended = False
        self._stored = stored

    async def durable(self) -> bool:
        """Whether another router could carry the call on from now on. Waits a moment for the store to have it."""
        if self._stored is None or self._writer.degraded:
            return False
        return await wait_for_event(self._stored, STORE_WAIT_S)

    def end(self, error: BaseException | None, trace: bytes = b"") -> None:
        """Records the end of the call, by `error` if there was one, with its encoded trace. The first end counts."""
        if self._ended:
            return
        self._ended = True
        match error:
            case asyncio.CancelledError():
                return  # we end, not the call: it stays open for the router that takes it over
            case Cancelled() | Superseded():  # the latter has no effect if another router has claimed the call
                self._writer.end_call(self._id, CallStatus.ABANDONED, trace)
            case _:
                self._writer.end_call(self._id, CallStatus.ENDED, trace)


class CallOwnership:
    """Owned by one event loop."""

    def __init__(self, writer: StoreWriter, owner: OwnerId) -> None:
        self._writer = writer
        self._owner = owner

    @property
    def owner(self) -> OwnerId:
        """Who this router is."""
        return self._owner

    def open(self, call: ValidRequest, raw: RawRequest) -> OwnershipHandle:
        """Enters a call, before its admitted are taken."""
        metadata, sequence_ids = raw.metadata, tuple([sequence.id for sequence in call.sequences])
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
        return OwnershipHandle(self._writer, call.id, self._writer.open_call(record))

    def adopt(self, record: CallRecord) -> OwnershipHandle:
        """Takes a call that was claimed in the store."""
        self._writer.adopt_call(record)
        stored = asyncio.Event()
        stored.set()
        return OwnershipHandle(self._writer, record.id, stored)

    def record_end(self, record: SequenceRecord, end: RequestState, num_emitted: int, failure_code: str = "") -> None:
        """A sequence of an adopted call has ended, and its last owner did not come to write that down."""
        self._writer.record_end(record, end, num_emitted=num_emitted, failure_code=failure_code)

    def holds(self, id: RequestId) -> bool:
        """Whether the call is answered here, or was and the store does not know its end yet."""
        return self._writer.tracks_call(id)


def raw_request_of(record: CallRecord) -> RawRequest:
    """What was posted, out of the store."""
    return RawRequest(
        record.endpoint, record.body, RequestMetadata(record.id, record.created_s, record.seed, record.tenant)
    )
