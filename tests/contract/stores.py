"""What the contract tests of the store agree on. The fixtures that open stores are in `conftest`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from baton.store.options import StoreOptions
from baton.store.store import StateStore

OpenStore = Callable[[StoreOptions], Awaitable[StateStore]]
DEADLINE_S = 10.0
RARE = StoreOptions(heartbeat_s=60.0, worker_ttl_s=60.0, owner_ttl_s=60.0, timeout_s=5.0)  # only news wakes a listener
