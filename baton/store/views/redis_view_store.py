"""Store of views in Redis, sealed as calls are: `exchange_views.lua`. Made by `connect_views`.

<prefix>routers:<model>       hash  router -> time of its last call and end of its watching, in ms on the server's clock
<prefix>router-views:<model>  hash  router -> its view, sealed for its name

<model> is a digest of the model's name. Both expire with the last router.
"""

from __future__ import annotations

import hashlib
from typing import cast

from baton.domain.ids import OwnerId
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.store.options import StoreOptions
from baton.store.redis.client import RedisClient, milliseconds
from baton.store.redis.unsealed_log import UnsealedLog
from baton.store.seal import SealedKind, SealError, StoreSeal
from baton.store.views.memory_view_store import MemoryViewStore
from baton.store.views.view_store import (
    LISTED_S,
    MAX_LISTED,
    MAX_VIEW_BYTES,
    WATCH_TTL_S,
    StoredView,
    ViewExchange,
    ViewStore,
    check_size,
)

_MAX_CONNECTIONS = 2
_MODEL_CHARS = 16


class RedisViewStore:
    """A `ViewStore` on a Redis server. Connects when first needed, and again after every outage."""

    def __init__(
        self, url: str, options: StoreOptions | None = None, trust: ClusterTrust = OPEN_CLUSTER, model: str = ""
    ) -> None:
        """`trust`: its secrets seal the views. `model`: only routers of the same one meet."""
        options = options or StoreOptions()
        self._seal, self._unsealed = StoreSeal(options.prefix, trust), UnsealedLog()
        name = hashlib.sha256(model.encode()).hexdigest()[:_MODEL_CHARS]
        self._keys = [f"{options.prefix}routers:{name}", f"{options.prefix}router-views:{name}"]
        self._client = RedisClient(url, max_connections=_MAX_CONNECTIONS, timeout_s=options.timeout_s, binary=True)
        self._exchange = self._client.script("exchange_views")

    async def exchange(self, owner: OwnerId, payload: bytes, *, watching: bool) -> ViewExchange:
        check_size(payload)
        blob = self._seal.seal(SealedKind.VIEW, owner, payload) if payload else b""
        most = MAX_VIEW_BYTES + self._seal.overhead
        times = [milliseconds(LISTED_S), milliseconds(WATCH_TTL_S)]
        args: list[str | int | bytes] = [owner, blob, int(watching), *times, most, MAX_LISTED]
        async with self._client.operation("exchange views"):
            watched, *flat = cast("list[bytes]", await self._exchange(keys=self._keys, args=args))
        found = zip(flat[::3], flat[1::3], flat[2::3], strict=True)
        return ViewExchange(bool(int(watched)), [self._open(*each) for each in found])

    async def withdraw(self, owner: OwnerId) -> None:
        async with self._client.operation("withdraw a view"), self._client.redis.pipeline() as pipeline:
            for key in self._keys:
                pipeline.hdel(key, owner)
            await pipeline.execute()

    async def close(self) -> None:
        await self._client.close()

    def _open(self, name: bytes, age_ms: bytes, blob: bytes) -> StoredView:
        owner, age_s = OwnerId(name.decode(errors="replace")), int(age_ms) / 1000
        if not blob:
            return StoredView(owner, age_s)
        try:
            return StoredView(owner, age_s, self._seal.open(SealedKind.VIEW, owner, blob))
        except SealError as error:
            self._unsealed.record(SealedKind.VIEW, owner, error.fault)
            return StoredView(owner, age_s, fault=error.fault.value)


def connect_views(
    url: str, options: StoreOptions | None = None, trust: ClusterTrust = OPEN_CLUSTER, model: str = ""
) -> ViewStore:
    """The store of views at the URL of a state store. Connects when first needed."""
    return MemoryViewStore() if url.startswith("memory:") else RedisViewStore(url, options, trust, model)
