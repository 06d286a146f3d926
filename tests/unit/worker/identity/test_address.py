"""The announced address is one that other processes can call."""

from __future__ import annotations

import asyncio
import socket

import pytest

from baton.services.decode.settings import DecodeSettings
from baton.worker.identity import address
from baton.worker.identity.address import advertised_address


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (DecodeSettings(), "127.0.0.1:4711"),
        (DecodeSettings(host="10.0.0.9"), "10.0.0.9:4711"),
        (DecodeSettings(host="::1"), "[::1]:4711"),
        (DecodeSettings(host="0.0.0.0", advertise_address="decode:50052"), "decode:50052"),
        (DecodeSettings(host="0.0.0.0", redis_url="redis://u:p@127.0.0.1:6379/0"), "127.0.0.1:4711"),
    ],
)
def test_the_default_address_can_be_called(settings: DecodeSettings, expected: str):
    assert asyncio.run(advertised_address(settings, 4711)) == expected


def test_a_name_that_does_not_resolve_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    """As in compose, where the name of a service exists once its container runs."""
    monkeypatch.setattr(address, "RETRY_S", 0.001)

    async def run() -> str:
        loop, num_calls = asyncio.get_running_loop(), 0
        resolve = loop.getaddrinfo

        async def late(host: str, *arguments: object, **options: object) -> object:
            nonlocal num_calls
            num_calls += 1
            if num_calls < 3:
                raise socket.gaierror("not yet")
            return await resolve("127.0.0.1", *arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(loop, "getaddrinfo", late)
        return await advertised_address(DecodeSettings(host="0.0.0.0", redis_url="redis://redis:6379/0"), 4711)

    assert asyncio.run(asyncio.wait_for(run(), 10.0)) == "127.0.0.1:4711"
