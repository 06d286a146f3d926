"""Store of tenants in Redis: `take_tokens.lua` and `share_service.lua`. Made by `connect_tenants`.

<prefix>rate:<tenant>:<kind>   string  when the bucket will be full again, in us on the server's clock
<prefix>service                hash    router -> time of its last entry, and its totals by tenant (JSON)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from baton.domain.ids import OwnerId
from baton.store.options import StoreOptions
from baton.store.redis.client import RedisClient, milliseconds
from baton.store.tenants.memory_tenant_store import SERVICE_TTL_S, MemoryTenantStore
from baton.store.tenants.tenant_store import PERIOD_S, RateTake, TenantStore

_US = 1_000_000
_MAX_CONNECTIONS = 4


class RedisTenantStore:
    """A `TenantStore` on a Redis server. Connects when first needed, and again after every outage."""

    def __init__(self, url: str, options: StoreOptions | None = None) -> None:
        options = options or StoreOptions()
        self._prefix = options.prefix
        self._client = RedisClient(url, max_connections=_MAX_CONNECTIONS, timeout_s=options.timeout_s, binary=True)
        self._take = self._client.script("take_tokens")
        self._share = self._client.script("share_service")

    async def take(self, takes: Sequence[RateTake], *, overdraw: bool = False) -> float:
        if not takes:
            return 0.0
        keys = [f"{self._prefix}rate:{take.bucket}" for take in takes]
        args: list[int] = [round(PERIOD_S * _US), int(overdraw), *(round(take.cost_s * _US) for take in takes)]
        async with self._client.operation("take tokens"):
            wait_us = cast("int", await self._take(keys=keys, args=args))
        return wait_us / _US

    async def share_service(self, owner: OwnerId, totals: Mapping[str, float]) -> Mapping[str, Mapping[str, float]]:
        args: list[str | int] = [owner, msgspec.json.encode(totals).decode(), milliseconds(SERVICE_TTL_S)]
        async with self._client.operation("share service"):
            flat = cast("list[bytes]", await self._share(keys=[f"{self._prefix}service"], args=args))
        pairs = zip(flat[::2], flat[1::2], strict=True)
        read = ((OwnerId(id.decode(errors="replace")), _totals(text)) for id, text in pairs)
        return {id: totals for id, totals in read if id != owner and totals is not None}

    async def close(self) -> None:
        await self._client.close()


def connect_tenants(url: str, options: StoreOptions | None = None) -> TenantStore:
    """The store of tenants at the URL of a state store. Connects when first needed."""
    return MemoryTenantStore() if url.startswith("memory:") else RedisTenantStore(url, options)


def _totals(text: bytes) -> dict[str, float] | None:
    """None for an entry that is not readable: a router of another version."""
    try:
        return msgspec.json.decode(text, type=dict[str, float])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
