"""Records in the state store which calls this router owns. Used by `respond` and `takeover`.

A call is opened before its choices are admitted, and ends as ENDED, or as ABANDONED when its client disconnects. A call
that is cut off by the end of this router stays OPEN for its successor. Writing never waits; only the headers of a
response wait up to `STORE_WAIT_S`, to be true about durability.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.domain.errors import Cancelled, Superseded
from baton.domain.ids import OwnerId, RequestId
from baton.domain.lifecycle import RequestState
from baton.services.router.openai.request_parser import RawRequest
from baton.services.router.openai.valid_request import ValidRequest
from baton.services.router.takeover.call_media import CallMedia
from baton.services.router.takeover.prompt_digest import prompt_digest
from baton.store.media.memory_media_file_store import MemoryMediaFileStore
from baton.store.store import CallRecord, CallStatus, Durability, SequenceRecord
from baton.store.timed_event import TimedEvent
from baton.store.write_behind.writer import StoreWriter

FIRST_EPOCH = 1

STORE_WAIT_S = 0.5
"""Longest wait of the headers for the store; a call that is stored later is not durable."""


class OwnershipHandle:
    """Ownership of one call, from `open` or `adopt` to `end`."""

    def __init__(
        self,
        writer: StoreWriter,
        record: CallRecord,
        stored: TimedEvent | None,
        durability: Callable[[], Durability],
        media: CallMedia,
        *,
        has_files: bool = False,
    ) -> None:
        """`stored` is set when the store has the call; None: it never will. `durability`: that of the store now.

        `has_files`: the call is durable only with its images, which `media` keeps.
        """
        self._writer = writer
        self._id = record.id
        self.seed = None if stored is None else record  # to enter the call again in a store that has lost it
        self._durability = durability
        self._media = media
        self._has_files = has_files
        self._ended = False
        self._stored = None if record.private else stored

    async def durability(self) -> Durability:
        """What the call survives. Waits up to `STORE_WAIT_S` for the store to acknowledge it; NONE without.

        The same for its images.
        """
        clock = asyncio.get_running_loop().time
        until = clock() + STORE_WAIT_S
        if self._stored is not None and not self._stored.is_set():
            self._writer.write_new_calls()
        if self._stored is None or self._writer.degraded or not await self._stored.wait(STORE_WAIT_S):
            return Durability.NONE
        if self._has_files and not await self._media.kept(self._id, until - clock()):
            return Durability.NONE
        return self._durability()

    def end(self, error: BaseException | None, trace: bytes = b"") -> None:
        """Records the end of the call and its trace. `error`: the cause, if any. Later calls have no effect."""
        if self._ended:
            return
        self._ended = True
        self._media.forget(self._id)
        match error:
            case asyncio.CancelledError():
                return  # the router ends, not the call: it stays open for a takeover
            case Cancelled() | Superseded():  # no effect if another router has claimed the call
                self._writer.end_call(self._id, CallStatus.ABANDONED, trace)
            case _:
                self._writer.end_call(self._id, CallStatus.ENDED, trace)


class CallOwnership:
    """Owned by one event loop."""

    def __init__(
        self,
        writer: StoreWriter,
        owner: OwnerId,
        durability: Callable[[], Durability] = lambda: Durability.NONE,
        text_digest: str = "",
        media: CallMedia | None = None,
    ) -> None:
        """`durability`: of what the store acknowledges now. `text_digest`: of this router's model.

        `media`: None for files that are kept in memory only.
        """
        self._writer = writer
        self._owner = owner
        self._durability = durability
        self._text_digest = text_digest
        self._media = media or CallMedia(MemoryMediaFileStore())

    @property
    def owner(self) -> OwnerId:
        """Id of this router in the store."""
        return self._owner

    def open(self, call: ValidRequest, raw: RawRequest) -> OwnershipHandle:
        """Opens a call, before its choices are admitted."""
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
            private=metadata.private,
            text_digest=self._text_digest,
            prompt_digest=prompt_digest(call),
        )
        stored = self._writer.open_call(record)
        has_files = bool(call.files)
        if has_files and stored is not None and not record.private:
            self._media.keep(call)
        return OwnershipHandle(self._writer, record, stored, self._durability, self._media, has_files=has_files)

    def adopt(self, record: CallRecord) -> OwnershipHandle:
        """Takes a call that this router has claimed in the store."""
        self._writer.adopt_call(record)
        stored = TimedEvent()
        stored.set()
        return OwnershipHandle(self._writer, record, stored, self._durability, self._media)

    def record_end(self, record: SequenceRecord, end: RequestState, num_emitted: int, failure_code: str = "") -> None:
        """Records the end of a sequence that the previous owner of its call did not record."""
        self._writer.record_end(record, end, num_emitted=num_emitted, failure_code=failure_code)

    def has_ended(self, record: CallRecord) -> bool:
        """True if the run of this claim of the call has ended here, and the store does not know yet."""
        return self._writer.has_ended(record)

    def holds(self, id: RequestId) -> bool:
        """True while this router runs the call, or its end is not stored yet."""
        return self._writer.tracks_call(id)
