"""The calls that this router answers, as the reception book shall know them. `delivery` and `carry` tell it.

A call is opened before its tickets are taken and marked when it is over: ENDED, or ABANDONED when its client went
away. What was cut off by our own end stays open, for the router that takes it over. Everything is written through a pen
that never waits; only the headers of an answer wait a moment, so that what they say of it is true.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from baton.domain.errors import Cancelled, Superseded
from baton.domain.ids import OwnerId, RequestId
from baton.domain.lifecycle import RequestState
from baton.state.base import CallRecord, CallStatus, RequestRecord
from baton.state.bell import rang_within
from services.router.api.calls import ValidCall
from services.router.api.validation import Origin

FIRST_EPOCH = 1

ENTRY_PATIENCE_S = 0.5
"""How long headers wait for the book to have the call; a book that takes longer makes the call not durable."""


@dataclass(frozen=True, slots=True)
class Posting:
    """What a client posted, and all that makes the same call of it again. `endpoint` is the path."""

    endpoint: str
    body: bytes
    origin: Origin


class CallPen(Protocol):
    """The part of `BookWriter` that is used here."""

    @property
    def degraded(self) -> bool: ...

    def open_call(self, record: CallRecord) -> asyncio.Event | None: ...

    def adopt_call(self, record: CallRecord) -> None: ...

    def end_call(self, id: RequestId, status: CallStatus) -> None: ...

    def settle(self, record: RequestRecord, end: RequestState, *, num_emitted: int, failure_code: str = "") -> None: ...

    def writes_call(self, id: RequestId) -> bool: ...


class NoPen:
    """Without a book nothing is kept, and no call is durable."""

    degraded = True

    def open_call(self, record: CallRecord) -> asyncio.Event | None:
        """Nothing."""
        return None

    def adopt_call(self, record: CallRecord) -> None:
        """Nothing."""

    def end_call(self, id: RequestId, status: CallStatus) -> None:
        """Nothing."""

    def settle(self, record: RequestRecord, end: RequestState, *, num_emitted: int, failure_code: str = "") -> None:
        """Nothing."""

    def writes_call(self, id: RequestId) -> bool:
        """Never."""
        return False


class Charge:
    """One call that this router has to answer, until it is over or somebody else's."""

    def __init__(self, pen: CallPen, id: RequestId, entered: asyncio.Event | None) -> None:
        """`entered` is set when the book has the call; None: it never will."""
        self._pen = pen
        self._id = id
        self._over = False
        self._entered = entered

    async def durable(self) -> bool:
        """Whether another router could carry the call on from now on. Waits a moment for the book to have it."""
        if self._entered is None or self._pen.degraded:
            return False
        return await rang_within(self._entered, ENTRY_PATIENCE_S)

    def over(self, error: BaseException | None) -> None:
        """The call is over, by `error` if there was one. Only the first end counts."""
        if self._over:
            return
        self._over = True
        match error:
            case asyncio.CancelledError():
                return  # we end, not the call: it stays open for the router that takes it over
            case Cancelled() | Superseded():  # the latter has no effect if another router has claimed the call
                self._pen.end_call(self._id, CallStatus.ABANDONED)
            case _:
                self._pen.end_call(self._id, CallStatus.ENDED)


class Custody:
    """Owned by one event loop."""

    def __init__(self, pen: CallPen, owner: OwnerId) -> None:
        self._pen = pen
        self._owner = owner

    @property
    def owner(self) -> OwnerId:
        """Who this router is."""
        return self._owner

    def open(self, call: ValidCall, posting: Posting) -> Charge:
        """Enters a call, before its tickets are taken."""
        origin, jobs = posting.origin, tuple(job.id for job in call.jobs)
        record = CallRecord(
            id=call.id,
            owner=self._owner,
            epoch=FIRST_EPOCH,
            status=CallStatus.OPEN,
            endpoint=posting.endpoint,
            body=posting.body,
            tenant=origin.tenant,
            created_s=origin.created_s,
            seed=origin.seed,
            jobs=jobs,
        )
        return Charge(self._pen, call.id, self._pen.open_call(record))

    def adopt(self, record: CallRecord) -> Charge:
        """Takes a call that was claimed in the book."""
        self._pen.adopt_call(record)
        entered = asyncio.Event()
        entered.set()
        return Charge(self._pen, record.id, entered)

    def settle(self, record: RequestRecord, end: RequestState, num_emitted: int, failure_code: str = "") -> None:
        """A job of an adopted call has ended, and its last owner did not come to write that down."""
        self._pen.settle(record, end, num_emitted=num_emitted, failure_code=failure_code)

    def holds(self, id: RequestId) -> bool:
        """Whether the call is answered here, or was and the book does not know its end yet."""
        return self._pen.writes_call(id)
