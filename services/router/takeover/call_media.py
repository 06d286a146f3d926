"""Keeps the files of images of this router's calls in the media store, and reads back those of calls that it claims.

Used by `call_ownership`, `takeover` and `resume`. A call is durable only if the store has acknowledged each of its
files. Nothing of a request waits for this but the headers, which say whether that is so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import structlog

from baton.domain.ids import RequestId
from baton.domain.media.identity import media_identity
from baton.services.router.edge.disconnect import join_tasks
from baton.services.router.generation import MediaFile
from baton.services.router.openai.valid_request import ValidRequest
from baton.store.media.media_file_store import MediaFileStore, PutOutcome
from baton.store.store import StoreUnavailable

MAX_CONCURRENT = 2
"""Files that are written at once, and files that are read at once: others wait."""

RETRY_S = 1.0
"""Pause after a file that the store did not take because it did not answer."""

RESTORE_WAIT_S = 5.0
"""Longest wait of a claimed call for all its files. It goes on without the others: workers may hold them."""

MAX_RESTORED_BYTES = 256 * 1024 * 1024
"""Default bound on all files that are read back, from the start of the read to the end of the last call with it."""

log = structlog.get_logger(__name__)

Result = TypeVar("Result")
_Name = tuple[str, bytes]
"""Tenant and identity of a file."""


@dataclass(slots=True)
class _KeptCall:
    """One call while it runs here. `written`: ends with True once the store has all files, False if it has no room."""

    tenant: str
    files: tuple[MediaFile, ...]
    written: asyncio.Task[bool]


@dataclass(slots=True)
class _SharedFile:
    """One file of calls that run here: one copy, whatever their number. `holders`: the calls.

    `data`: None while it is read. `num_read_bytes`: what it counts of the bound; 0 for a file that a client sent here.
    """

    data: bytes | None
    num_read_bytes: int = 0
    reading: asyncio.Task[None] | None = None
    holders: set[RequestId] = field(default_factory=set)


class CallMedia:
    """Owned by one event loop. Owns the store, and closes it."""

    def __init__(self, store: MediaFileStore, max_restored_bytes: int = MAX_RESTORED_BYTES) -> None:
        """`max_restored_bytes`: of all files that are read back; a claimed call goes on without those beyond it."""
        self._store = store
        self._max_restored_bytes = max_restored_bytes
        self._num_restored_bytes = 0
        self._calls: dict[RequestId, _KeptCall] = {}
        self._files: dict[_Name, _SharedFile] = {}
        self._names: dict[RequestId, set[_Name]] = {}  # the files that each call holds
        self._tasks: set[asyncio.Task[Any]] = set()
        self._writes = asyncio.Semaphore(MAX_CONCURRENT)
        self._reads = asyncio.Semaphore(MAX_CONCURRENT)
        self._away = False  # the store did not answer, and nothing has succeeded since

    def keep(self, call: ValidRequest) -> None:
        """Begins to write the files of a call, until `forget`."""
        files = tuple({file.identity: file for file in call.files if file.data is not None}.values())
        if files and call.id not in self._calls:
            for file in files:
                self._hold(call.id, (call.tenant, file.identity), _SharedFile(file.data))
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
            self._away = self._away and bool(self._calls)  # nobody tries any more
        for name in list(self._names.get(id, ())):
            self._release(id, name)

    def put_again(self) -> None:
        """Writes all files again: the store may have lost them."""
        for id, call in self._calls.items():
            call.written.cancel()
            call.written = self._begin(id, call.tenant, call.files)

    async def holds(self, call: ValidRequest, timeout_s: float) -> bool:
        """True if the store says within `timeout_s` that it has all files of the call."""
        try:
            async with asyncio.timeout(timeout_s):
                held = await self._store.holds(call.tenant, [file.identity for file in call.files])
        except (StoreUnavailable, TimeoutError):
            return False
        self._away = False
        return held

    async def restored(self, call: ValidRequest, timeout_s: float = RESTORE_WAIT_S) -> ValidRequest:
        """The call with its files as far as they are here, or the store gives them in time and there is room.

        Workers may hold the others. Calls share the bytes of a file; they count for this call until `forget`.
        """
        missing = {file.identity: file for file in call.files if file.data is None}
        if not missing:
            return call
        for file in missing.values():
            self._begin_read(call.id, call.tenant, file)
        shared = {identity: self._files.get((call.tenant, identity)) for identity in missing}
        reading = [one.reading for one in shared.values() if one is not None and one.reading is not None]
        if reading:
            await asyncio.wait(reading, timeout=timeout_s)
        read = {identity: one.data for identity, one in shared.items() if one is not None and one.data is not None}
        for identity in missing.keys() - read.keys():
            self._release(call.id, (call.tenant, identity))
        log.info("images_restored", request_id=call.id, num=len(missing), num_missing=len(missing) - len(read))

        def with_data(files: Sequence[MediaFile]) -> tuple[MediaFile, ...]:
            return tuple(replace(file, data=file.data or read.get(file.identity)) for file in files)

        sequences = [replace(sequence, files=with_data(sequence.files)) for sequence in call.sequences]
        return replace(call, sequences=tuple(sequences))

    async def close(self) -> None:
        """Stops writing and reading, and closes the store; idempotent."""
        for id in self._calls.keys() | self._names.keys():
            self.forget(id)
        await join_tasks(list(self._tasks))
        await self._store.close()

    def _begin(self, id: RequestId, tenant: str, files: Sequence[MediaFile]) -> asyncio.Task[bool]:
        return self._spawn(self._write(id, tenant, files), f"media-{id}")

    def _spawn(self, work: Coroutine[Any, Any, Result], name: str) -> asyncio.Task[Result]:
        """A task that `close` waits for."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _hold(self, id: RequestId, name: _Name, new: _SharedFile) -> None:
        """Counts a call as a holder of a file. `new`: if it is not here yet."""
        self._files.setdefault(name, new).holders.add(id)
        self._names.setdefault(id, set()).add(name)

    def _release(self, id: RequestId, name: _Name) -> None:
        """A call holds a file no longer; the last one ends a read of it. Idempotent."""
        names = self._names.get(id, set())
        names.discard(name)
        if not names:
            self._names.pop(id, None)
        shared = self._files.get(name)
        if shared is None:
            return
        shared.holders.discard(id)
        if not shared.holders:
            del self._files[name]
            self._num_restored_bytes -= shared.num_read_bytes
            if shared.reading is not None:
                shared.reading.cancel()

    def _begin_read(self, id: RequestId, tenant: str, file: MediaFile) -> None:
        """Holds a file for a call and reads it, unless it is here, or another call reads it. No effect without room."""
        name = tenant, file.identity
        new = _SharedFile(None, file.num_bytes)
        if name not in self._files:
            if self._num_restored_bytes + file.num_bytes > self._max_restored_bytes:
                log.warning("images_not_read", request_id=id, reason="too many images are read back for other calls")
                return
            self._num_restored_bytes += file.num_bytes
            new.reading = self._spawn(self._read_into(new, tenant, file), f"media-read-{id}")
        self._hold(id, name, new)

    async def _read_into(self, shared: _SharedFile, tenant: str, file: MediaFile) -> None:
        """Root task of one read. Nobody holds a file that cannot be read: the next call tries again."""
        try:
            shared.data = await self._read(tenant, file)
        except Exception:  # the root of this task: the file counts as missing
            log.exception("images_not_read")
        shared.reading = None
        if shared.data is None:
            for holder in list(shared.holders):
                self._release(holder, (tenant, file.identity))

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
                self._away = False
                if data is None:
                    return None
                identity = await asyncio.to_thread(media_identity, data, file.processor, file.detail)
                if identity == file.identity and len(data) == file.num_bytes:
                    return data
                log.warning("stored_image_is_wrong", identity=file.identity.hex())
                await self._store.discard(tenant, file.identity)
        except StoreUnavailable as error:
            log.info("images_not_read", reason=str(error))
        return None
