"""Keeps the files of images of this router's calls in the media store, and reads back those of calls that it claims.

Used by `call_ownership`, `takeover` and `resume`. A call is durable only if the store has acknowledged each of its
files. Nothing of a request waits for this but the headers, which say whether that is so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog

from baton.domain.ids import RequestId
from baton.domain.media.identity import media_identity
from baton.services.router.generation import MediaFile
from baton.services.router.openai.valid_request import ValidRequest
from baton.store.media.media_file_store import MediaFileStore, PutOutcome
from baton.store.store import StoreUnavailable

MAX_CONCURRENT = 2
"""Files that are written at once, and files that are read at once: others wait."""

RETRY_S = 1.0
"""Pause after a file that the store did not take because it did not answer."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _KeptCall:
    """One call while it runs here. `written`: ends with True once the store has all files, False if it has no room."""

    tenant: str
    files: tuple[MediaFile, ...]
    written: asyncio.Task[bool]


class CallMedia:
    """Owned by one event loop, which closes it before the store."""

    def __init__(self, store: MediaFileStore) -> None:
        self._store = store
        self._calls: dict[RequestId, _KeptCall] = {}
        self._writes = asyncio.Semaphore(MAX_CONCURRENT)
        self._reads = asyncio.Semaphore(MAX_CONCURRENT)
        self._away = False  # the store did not answer the last write

    def keep(self, call: ValidRequest) -> None:
        """Begins to write the files of a call, until `forget`."""
        files = tuple({file.identity: file for file in call.files if file.data is not None}.values())
        if files and call.id not in self._calls:
            self._calls[call.id] = _KeptCall(call.tenant, files, self._begin(call.id, call.tenant, files))

    async def kept(self, id: RequestId, timeout_s: float) -> bool:
        """True if the store has acknowledged all files of a call that is kept; waits for it for a while.

        Does not wait for a store that is away.
        """
        call = self._calls.get(id)
        if call is None:
            return False
        written = call.written
        if self._away:
            timeout_s = 0.0
        await asyncio.wait([written], timeout=timeout_s)
        return written.done() and not written.cancelled() and written.result()

    def forget(self, id: RequestId) -> None:
        """The call has ended here: what is not written is not needed. No effect on what is stored."""
        call = self._calls.pop(id, None)
        if call is not None:
            call.written.cancel()

    def put_again(self) -> None:
        """Writes all files again: the store may have lost them."""
        for id, call in self._calls.items():
            call.written.cancel()
            call.written = self._begin(id, call.tenant, call.files)

    async def holds(self, call: ValidRequest) -> bool:
        """True if the store says now that it has all files of the call."""
        try:
            return await self._store.holds(call.tenant, [file.identity for file in call.files])
        except StoreUnavailable:
            return False

    async def restored(self, call: ValidRequest) -> ValidRequest:
        """The call with its files as far as the store has them. Workers may hold the others."""
        missing = {file.identity: file for file in call.files if file.data is None}
        if not missing:
            return call
        found = await asyncio.gather(*(self._read(call.tenant, file) for file in missing.values()))
        read = dict(zip(missing, found, strict=True))
        log.info("images_restored", request_id=call.id, num=len(read), num_missing=found.count(None))

        def with_data(files: Sequence[MediaFile]) -> tuple[MediaFile, ...]:
            return tuple(replace(file, data=file.data or read.get(file.identity)) for file in files)

        sequences = [replace(sequence, files=with_data(sequence.files)) for sequence in call.sequences]
        return replace(call, sequences=tuple(sequences))

    async def close(self) -> None:
        """Stops writing; idempotent. Closes the store."""
        for id in list(self._calls):
            self.forget(id)
        await self._store.close()

    def _begin(self, id: RequestId, tenant: str, files: Sequence[MediaFile]) -> asyncio.Task[bool]:
        return asyncio.create_task(self._write(id, tenant, files), name=f"media-{id}")

    async def _write(self, id: RequestId, tenant: str, files: Sequence[MediaFile]) -> bool:
        """Root task of the files of one call."""
        try:
            for file in files:
                if await self._put(id, tenant, file) is not PutOutcome.KEPT:
                    log.warning("images_not_stored", request_id=id, reason="the bound of the store is reached")
                    return False
        except Exception:  # the root of this task: the call is not durable
            log.exception("images_not_stored", request_id=id)
            return False
        return True

    async def _put(self, id: RequestId, tenant: str, file: MediaFile) -> PutOutcome:
        """Puts one file, again and again while the store does not answer. `forget` cancels that."""
        assert file.data is not None
        while True:
            try:
                async with self._writes:
                    outcome = await self._store.put(tenant, file.identity, file.data)
                self._away = False
                return outcome
            except StoreUnavailable as error:
                self._away = True
                log.info("images_wait_for_store", request_id=id, reason=str(error))
            await asyncio.sleep(RETRY_S)

    async def _read(self, tenant: str, file: MediaFile) -> bytes | None:
        """The bytes of a file, if they are those of its identity: nothing else may be sent in its name."""
        try:
            async with self._reads:
                data = await self._store.get(tenant, file.identity)
                if data is None:
                    return None
                if await asyncio.to_thread(media_identity, data, file.processor, file.detail) == file.identity:
                    return data
                log.warning("stored_image_is_wrong", identity=file.identity.hex())
                await self._store.discard(tenant, file.identity)
        except StoreUnavailable as error:
            log.info("images_not_read", reason=str(error))
        return None
