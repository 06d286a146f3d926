"""Files of images in Redis, sealed as calls are: `put_media.lua`. Made by `connect_media`.

<prefix>media:<name>   string  one file, sealed for its name; expires one retention after it was last put
<prefix>media-expiry   zset    name -> when it expires, in ms on the server's clock
<prefix>media-bytes    hash    name -> bytes as stored, and `FILE_OVERHEAD_BYTES`; the field "" is their sum

A name is a keyed digest of tenant and identity: it does not show which image a file is, nor whose. Files have a client
of their own, with few connections: megabytes do not delay calls and tokens in this process.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Sequence
from typing import cast

from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.store.media.media_file_store import (
    FILE_OVERHEAD_BYTES,
    MAX_STORED_BYTES,
    MediaFileStore,
    PutOutcome,
)
from baton.store.media.memory_media_file_store import MemoryMediaFileStore
from baton.store.options import StoreOptions
from baton.store.redis.client import RedisClient, milliseconds
from baton.store.redis.unsealed_log import UnsealedLog
from baton.store.seal import SealedKind, SealError, StoreSeal

TIMEOUT_S = 5.0
"""Of one operation: a file has megabytes."""

INLINE_BYTES = 64 * 1024
"""Larger files are sealed and opened in a thread."""

_MAX_CONNECTIONS = 4
_NAME_CHARS = 32
_MISSING = b"missing"


class RedisMediaFileStore:
    """A `MediaFileStore` on a Redis server. Connects when first needed, and again after every outage."""

    def __init__(
        self,
        url: str,
        options: StoreOptions | None = None,
        trust: ClusterTrust = OPEN_CLUSTER,
        max_bytes: int = MAX_STORED_BYTES,
    ) -> None:
        """`trust`: its secrets seal the files. `max_bytes`: of all files, as they are stored."""
        options = options or StoreOptions()
        self._prefix = options.prefix
        self._retention_ms = milliseconds(options.retention_s)
        self._max_bytes = max_bytes
        self._name_keys = trust.keys("media-name") or (b"",)
        self._seal, self._unsealed = StoreSeal(options.prefix, trust), UnsealedLog()
        self._client = RedisClient(url, max_connections=_MAX_CONNECTIONS, timeout_s=TIMEOUT_S, binary=True)
        self._put = self._client.script("put_media")

    async def put(self, tenant: str, identity: bytes, data: bytes) -> PutOutcome:
        """See `MediaFileStore`. Sends the bytes only if the store lacks them."""
        name = self._names(tenant, identity)[0]
        num_bytes = len(data) + self._seal.overhead
        outcome = await self._run_put(name, num_bytes, b"")
        if outcome == _MISSING:
            outcome = await self._run_put(name, num_bytes, await _maybe_in_thread(self._seal.seal, name, data))
        return PutOutcome(outcome.decode())

    async def get(self, tenant: str, identity: bytes) -> bytes | None:
        for name in self._names(tenant, identity):
            async with self._client.operation("get an image"):
                blob = cast("bytes | None", await self._client.redis.get(self._key(name)))
            if blob is None:
                continue
            try:
                return await _maybe_in_thread(self._seal.open, name, blob)
            except SealError as error:
                self._unsealed.record(SealedKind.MEDIA, name, error.fault)
                await self._remove(name)  # the next call puts it again
        return None

    async def holds(self, tenant: str, identities: Sequence[bytes]) -> bool:
        if not identities:
            return True
        async with (
            self._client.operation("look for images"),
            self._client.redis.pipeline(transaction=False) as pipeline,
        ):
            for identity in dict.fromkeys(identities):
                pipeline.exists(*map(self._key, self._names(tenant, identity)))
            return all(await pipeline.execute())

    async def discard(self, tenant: str, identity: bytes) -> None:
        for name in self._names(tenant, identity):
            await self._remove(name)

    async def close(self) -> None:
        await self._client.close()

    async def _run_put(self, name: str, num_bytes: int, blob: bytes) -> bytes:
        keys = [self._key(name), f"{self._prefix}media-expiry", f"{self._prefix}media-bytes"]
        counted = num_bytes + FILE_OVERHEAD_BYTES
        args: list[str | int | bytes] = [name, self._retention_ms, num_bytes, self._max_bytes, blob, counted]
        async with self._client.operation("put an image"):
            return cast("bytes", await self._put(keys=keys, args=args))

    async def _remove(self, name: str) -> None:
        """Its bytes still count until they would have expired, or the file is put again."""
        async with self._client.operation("remove an image"):
            await self._client.redis.delete(self._key(name))

    def _names(self, tenant: str, identity: bytes) -> list[str]:
        """The name under each valid secret, the one to write first."""
        place = len(tenant.encode()).to_bytes(4, "little") + tenant.encode() + identity
        return [_digest(key, place)[:_NAME_CHARS] for key in self._name_keys]

    def _key(self, name: str) -> str:
        return f"{self._prefix}media:{name}"


async def _maybe_in_thread(seal: Callable[[SealedKind, str, bytes], bytes], name: str, data: bytes) -> bytes:
    """Seals or opens a file: in a thread if it is large, since that takes milliseconds."""
    if len(data) <= INLINE_BYTES:
        return seal(SealedKind.MEDIA, name, data)
    return await asyncio.to_thread(seal, SealedKind.MEDIA, name, data)


def _digest(key: bytes, place: bytes) -> str:
    return hmac.new(key, place, "sha256").hexdigest()


def connect_media(
    url: str, options: StoreOptions | None = None, trust: ClusterTrust = OPEN_CLUSTER, max_bytes: int = MAX_STORED_BYTES
) -> MediaFileStore:
    """The store of images at the URL of a state store. Connects when first needed."""
    if url.startswith("memory:"):
        return MemoryMediaFileStore(options, max_bytes)
    return RedisMediaFileStore(url, options, trust, max_bytes)
