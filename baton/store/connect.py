"""Opens the state store at a URL. Called by the services at start."""

from __future__ import annotations

from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.store.memory_store import MemoryStore
from baton.store.options import StoreOptions
from baton.store.redis.client import without_password
from baton.store.redis.redis_store import RedisStore
from baton.store.store import StateStore, StoreUnavailable

_SCHEMES = ("redis", "rediss", "unix")


async def connect(
    url: str, options: StoreOptions | None = None, trust: ClusterTrust = OPEN_CLUSTER, *, check: bool = True
) -> StateStore:
    """Opens the store at `url` and checks that it answers. The secrets of `trust` seal what Redis keeps of calls.

    Without `check` it may answer later: services start while Redis does.

    `memory://` is a fresh store in this process. `redis://[user:password@]host:port[/db]`, `rediss://...` and
    `unix:///path/to/socket` are a Redis server. Raises `StoreUnavailable`, with a fix hint, when the server does not
    answer within `options.timeout_s`, and `ValueError` for another scheme.
    """
    scheme = url.partition("://")[0]
    if scheme == "memory":
        return MemoryStore(options)
    if scheme not in _SCHEMES:
        raise ValueError(f"{without_password(url)!r} is no state url: use memory://, redis://, rediss:// or unix://")
    store = RedisStore(url, options, trust)
    if not check:
        return store
    try:
        await store.ping()
    except StoreUnavailable as error:
        await store.close()
        raise StoreUnavailable(
            f"{error}; correct the state url, start a redis-server, or use memory:// when one process serves alone"
        ) from error
    return store
