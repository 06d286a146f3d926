"""What the tests of resume and takeover share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from baton.state.base import StateBook
from baton.state.connect import connect
from baton.state.memory import MemoryBook
from baton.state.options import BookOptions
from tests.redis_server import running_redis


@pytest.fixture(params=["memory", "redis"])
async def book(request: pytest.FixtureRequest) -> AsyncIterator[StateBook]:
    """The book that routers share; the world that is given it closes it."""
    options = BookOptions(worker_ttl_s=60.0, heartbeat_s=0.05)
    if request.param == "memory":
        yield MemoryBook(options)
        return
    with running_redis() as server:
        yield await connect(server.url, options)
