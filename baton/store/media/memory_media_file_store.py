"""Files of images in this process's memory, for one-process serving and tests. Keeps the contract of Redis."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from baton.store.media.media_file_store import FILE_OVERHEAD_BYTES, MAX_STORED_BYTES, PutOutcome
from baton.store.options import StoreOptions


class MemoryMediaFileStore:
    """A `MediaFileStore` without a server. `clock` in seconds."""

    def __init__(
        self,
        options: StoreOptions | None = None,
        max_bytes: int = MAX_STORED_BYTES,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._retention_s = (options or StoreOptions()).retention_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._files: dict[tuple[str, bytes], tuple[bytes, float]] = {}  # with the time of expiry

    async def put(self, tenant: str, identity: bytes, data: bytes) -> PutOutcome:
        self._expire()
        others = [len(file) for name, (file, _) in self._files.items() if name != (tenant, identity)]
        if sum(others) + len(data) + (len(others) + 1) * FILE_OVERHEAD_BYTES > self._max_bytes:
            return PutOutcome.FULL
        self._files[tenant, identity] = data, self._clock() + self._retention_s
        return PutOutcome.KEPT

    async def get(self, tenant: str, identity: bytes) -> bytes | None:
        self._expire()
        data, _ = self._files.get((tenant, identity), (None, 0.0))
        return data

    async def holds(self, tenant: str, identities: Sequence[bytes]) -> bool:
        self._expire()
        return all((tenant, identity) in self._files for identity in identities)

    async def discard(self, tenant: str, identity: bytes) -> None:
        self._files.pop((tenant, identity), None)

    async def close(self) -> None:
        return

    def _expire(self) -> None:
        now = self._clock()
        self._files = {name: entry for name, entry in self._files.items() if entry[1] > now}
