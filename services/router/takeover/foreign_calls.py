"""The calls that this router must not continue: of other text files, or those whose prompt it makes anew.

Another router may continue them, so their clients are told to try again; but if none has for `FOREIGN_DEADLINE_S`, the
call is ended here, and its clients learn that the answer is lost. Used by `takeover` and `resume`.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable

import structlog

from baton.domain.errors import AnswerLost, BatonError
from baton.domain.ids import Ballot, RequestId
from baton.domain.lifecycle import RequestState
from baton.services.router.edge.disconnect import join_tasks
from baton.services.router.edge.http_errors import ForeignCall
from baton.services.router.takeover.call_ownership import CallOwnership
from baton.services.router.takeover.prompt_digest import PromptReplaced
from baton.store.store import CallRecord, CallStatus, StateStore, StoreUnavailable

FOREIGN_DEADLINE_S = 60.0
"""How long clients of a call that nobody continues are told to try again, from the first of them on.

It begins anew when a router has claimed the call meanwhile, and when no client came for `MAX_PAUSE_S`: one that comes
back late may not have asked the others."""

MAX_PAUSE_S = 20.0
"""Longest pause between clients of one call for which the time counts; they are told to wait a second."""

STORE_RETRY_S = 0.25
"""Pause before a store that is unavailable is read again."""

FAIL_WAIT_S = 10.0
"""How long a call that cannot be resumed waits for its sequences to be read."""

MAX_KNOWN = 4096
"""Calls that are remembered; of more the oldest are forgotten, and found again."""

log = structlog.get_logger(__name__)


class ForeignCalls:
    """Owned by one event loop."""

    def __init__(
        self,
        text_digest: str,
        store: StateStore,
        call_ownership: CallOwnership,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`text_digest`: of this router's model; "" for an unknown one. `clock`: seconds, monotonic."""
        self._text_digest = text_digest
        self._store = store
        self._call_ownership = call_ownership
        self._clock = clock
        self._changed: OrderedDict[RequestId, None] = OrderedDict()
        self._unattended: OrderedDict[RequestId, tuple[Ballot, float, float]] = OrderedDict()  # and times
        self._ends: dict[RequestId, asyncio.Task[bool]] = {}

    def add(self, id: RequestId) -> None:
        """Notes a call whose prompt this router makes anew."""
        self._changed[id] = None
        while len(self._changed) > MAX_KNOWN:
            self._changed.popitem(last=False)

    def error(self, record: CallRecord, retry_after_s: float) -> ForeignCall | None:
        """The error for a client whose call nobody continues; None for a call that this router may continue."""
        if record.id in self._changed:
            why = f"routers here make another prompt of request {record.id} than the one that began it"
            return PromptReplaced(f"{why}, and none continues it: try again", retry_after_s=retry_after_s)
        if record.text_digest and self._text_digest not in ("", record.text_digest):
            why = f"request {record.id} began on routers with another tokenizer or chat template"
            return ForeignCall(f"{why}, and none continues it: try again", retry_after_s=retry_after_s)
        return None

    async def error_by_deadline(self, record: CallRecord, error: ForeignCall) -> BatonError:
        """`error` as long as a router that can continue the call may come; then `AnswerLost`, and the call is ended.

        `record`: the call as the store has it. One that a router runs is not on the way to an end. Raises
        `StoreUnavailable`.
        """
        if record.status is CallStatus.OPEN:
            self._unattended.pop(record.id, None)
            return error
        if record.status is CallStatus.ENDED:
            is_lost = await self._is_lost(record)
        else:
            is_lost = self._unattended_s(record) >= FOREIGN_DEADLINE_S and await self._end(record, error)
        if not is_lost:
            return error
        why = f"no router is left that can continue request {record.id}, which began with other software or files"
        return AnswerLost(f"{why}: send the request again")

    def _unattended_s(self, record: CallRecord) -> float:
        """Seconds since clients came for the call again and again, and no router went on with it."""
        now = self._clock()
        ballot, since, last = self._unattended.get(record.id, (record.ballot, now, now))
        if ballot != record.ballot or now - last > MAX_PAUSE_S:
            since = now
        self._unattended[record.id] = record.ballot, since, now
        while len(self._unattended) > MAX_KNOWN:
            self._unattended.popitem(last=False)
        return now - since

    async def close(self) -> None:
        """Waits for calls that are being ended."""
        await join_tasks(self._ends.values())

    async def _is_lost(self, record: CallRecord) -> bool:
        """True if a router has ended the call because nobody could continue it."""
        sequences = [await self._store.get(id) for id in record.sequence_ids]
        return any(sequence is not None and sequence.failure_code == AnswerLost.code for sequence in sequences)

    async def _end(self, record: CallRecord, error: ForeignCall) -> bool:
        """Ends the call, also if its client disconnects; False if another router has claimed it, or that is not known.

        It is not known while the store does not answer: a client that tries again later finds out.
        """
        task = self._ends.get(record.id)
        if task is None:
            task = asyncio.create_task(self._claim_and_end(record, error), name=f"end-{record.id}")
            self._ends[record.id] = task
            task.add_done_callback(lambda _: self._ends.pop(record.id))
        done, _ = await asyncio.wait([task], timeout=FAIL_WAIT_S)
        return task.result() if done else False

    async def _claim(self, record: CallRecord) -> CallRecord | None:
        """The claimed call; None if another router has it.

        If the answer is lost, the store is read until it answers: it may have granted the claim, and as long as this
        router lives no other one would take the call then.
        """
        owner = self._call_ownership.owner
        try:
            return await self._store.claim_call(record.id, record.ballot, owner, floor=record.epoch, seed=None)
        except StoreUnavailable as error:
            log.warning("claim_unconfirmed", request_id=record.id, reason=str(error))
        while True:
            await asyncio.sleep(STORE_RETRY_S)  # the polling interval
            try:
                now = await self._store.get_call(record.id)
            except StoreUnavailable:
                continue
            if now is None or now.status is not CallStatus.OPEN or now.owner != owner or now.ballot <= record.ballot:
                return None
            return now

    async def _claim_and_end(self, record: CallRecord, error: ForeignCall) -> bool:
        granted = await self._claim(record)
        if granted is None:
            return False
        handle = self._call_ownership.adopt(granted)
        log.warning("foreign_call_ended", request_id=record.id, code=error.code, deadline_s=FOREIGN_DEADLINE_S)
        try:
            await fail_sequences(self._store, self._call_ownership, granted, AnswerLost.code)
        finally:
            handle.end(error)
        return True


async def fail_sequences(store: StateStore, call_ownership: CallOwnership, record: CallRecord, code: str) -> None:
    """Records the failure of a call at those of its sequences that the store has open. Reads for `FAIL_WAIT_S`."""
    clock = asyncio.get_running_loop().time
    deadline, unread = clock() + FAIL_WAIT_S, list(record.sequence_ids)
    while unread:
        try:
            sequence = await store.get(unread[0])
        except StoreUnavailable:
            if clock() >= deadline:
                log.warning("sequences_left_open", request_id=record.id, num=len(unread))
                return
            await asyncio.sleep(STORE_RETRY_S)
            continue
        del unread[0]
        if sequence is not None and sequence.attempt_id.ballot <= record.ballot:
            call_ownership.record_end(sequence, RequestState.FAILED, sequence.num_emitted, code)
