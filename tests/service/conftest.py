"""Fixtures of the tests of resume and takeover, and of those that run over calls and over sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from baton.store.connect import connect
from baton.store.memory_store import MemoryStore
from baton.store.options import StoreOptions
from baton.store.store import StateStore
from tests.redis_server import running_redis
from tests.service.dispatch import dispatch_world


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[StateStore]:
    """The store that the routers share; the test that gets it closes it."""
    options = StoreOptions(worker_ttl_s=60.0, heartbeat_s=0.05)
    if request.param == "memory":
        yield MemoryStore(options)
        return
    with running_redis(durable=True) as server:
        yield await connect(server.url, options)


@pytest.fixture(params=[False, True], ids=["call", "session"])
def both_streams(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Runs a test twice: attempts, reservations, prompts and aborts go in calls, and in sessions (True)."""
    monkeypatch.setattr(dispatch_world, "uses_sessions", request.param)
    return bool(request.param)


@pytest.fixture(params=["socket", "grpc"])
def wire(request: pytest.FixtureRequest) -> str:
    """What carries the session of a worker behind proxies: its port of sessions, or the call `Session.Connect`."""
    return str(request.param)
