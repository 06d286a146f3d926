"""hiredis packs commands into the same bytes as redis-py."""

from __future__ import annotations

import pytest
from redis.asyncio import BlockingConnectionPool

from baton.store.redis.packing import use_native_packing

URLS = ["redis://127.0.0.1:1", "rediss://127.0.0.1:1", "unix:///nowhere"]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("EVALSHA", "ab12", 2, "key", b"\x00\xff", 1.5, -7, "", "é" * 10_000), id="many kinds"),
        pytest.param(("SCRIPT LOAD", "return 1"), id="a name of two words"),
        pytest.param((b"PING",), id="a name in bytes"),
    ],
)
def test_native_packing_sends_the_same_bytes(url, command):
    plain, packing = BlockingConnectionPool.from_url(url), BlockingConnectionPool.from_url(url)
    use_native_packing(packing)
    ours = packing.make_connection()  # type: ignore[no-untyped-call]
    theirs = plain.make_connection()  # type: ignore[no-untyped-call]
    assert isinstance(ours, type(theirs))
    assert type(ours) is not type(theirs)
    assert b"".join(ours.pack_command(*command)) == b"".join(theirs.pack_command(*command))
