"""What the contract tests of the book agree on. The fixtures that open books are in `conftest`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from baton.state.base import StateBook
from baton.state.options import BookOptions

OpenBook = Callable[[BookOptions], Awaitable[StateBook]]
DEADLINE_S = 10.0
RARE = BookOptions(heartbeat_s=60.0, worker_ttl_s=60.0, owner_ttl_s=60.0, timeout_s=5.0)  # only news wakes a listener
