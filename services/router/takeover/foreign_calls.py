"""The calls that this router must not continue: of other text files, or those whose prompt it makes anew.

Another router may continue them, so their clients are told to try again; but if none has for `FOREIGN_DEADLINE_S`, the
call is ended here, and its clients learn that the answer is lost. Used by `takeover` and `resume`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import structlog

from baton.domain.errors import BatonError
from baton.domain.ids import RequestId
from baton.domain.lifecycle import RequestState
from baton.services.router.edge.disconnect import join_tasks
from baton.services.router.edge.http_errors import AnswerLost, ForeignCall
from baton.services.router.takeover.call_ownership import CallOwnership
from baton.services.router.takeover.prompt_digest import PromptReplaced
from baton.store.store import CallRecord, CallStatus, StateStore, StoreUnavailable

FOREIGN_DEADLINE_S = 60.0
"""How long clients of a call that nobody continues are told to try again, from the first of them on."""

STORE_RETRY_S = 0.25
"""Pause before a store that is unavailable is read again."""

FAIL_WAIT_S = 10.0
"""How long a call that cannot be resumed waits for its sequences to be read."""

MAX_KNOWN = 4096
"""Calls that are remembered; of more the oldest are forgotten, and found again."""

log = structlog.get_logger(__name__)


class ForeignCalls:
    """Owned by one event loop."""

    def __init__(self, text_digest: str, store: StateStore, call_ownership: CallOwnership) -> None:
        """`text_digest`: of this router's model; "" for an unknown one."""
        self._text_digest = text_digest
        self._store = store
        self._call_ownership = call_ownership
        self._changed: OrderedDict[RequestId, None] = OrderedDict()
        self._unattended_since: OrderedDict[RequestId, float] = OrderedDict()
        self._ends: set[asyncio.Task[bool]] = set()

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
            self._unattended_since.pop(record.id, None)
            return error
        now = asyncio.get_running_loop().time()
        if record.status is not CallStatus.ENDED or not await self._is_lost(record):
            since = self._unattended_since.setdefault(record.id, now)
            while len(self._unattended_since) > MAX_KNOWN:
                self._unattended_since.popitem(last=False)
            if now - since < FOREIGN_DEADLINE_S:
                return error
            if record.status is CallStatus.ABANDONED and not await self._end(record, error):
                return error
        why = f"no router is left that can continue request {record.id}, which began with other software or files"
        return AnswerLost(f"{why}: send the request again")

    async def close(self) -> None:
        """Waits for calls that are being ended."""
        await join_tasks(self._ends)

    async def _is_lost(self, record: CallRecord) -> bool:
        """True if a router has ended the call because nobody could continue it."""
        sequences = [await self._store.get(id) for id in record.sequence_ids]
        return any(sequence is not None and sequence.failure_code == AnswerLost.code for sequence in sequences)

    async def _end(self, record: CallRecord, error: ForeignCall) -> bool:
        """Ends the call, also if its client disconnects; False if another router has claimed it."""
        task = asyncio.create_task(self._claim_and_end(record, error), name=f"end-{record.id}")
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)
        return await asyncio.shield(task)

    async def _claim_and_end(self, record: CallRecord, error: ForeignCall) -> bool:
        owner = self._call_ownership.owner
        granted = await self._store.claim_call(record.id, record.ballot, owner, floor=record.epoch, seed=None)
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
