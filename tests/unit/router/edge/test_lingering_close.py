"""What a response writes in one pass of the loop is one write, and nothing of it is lost at a close."""

from __future__ import annotations

import asyncio
from typing import Any

from baton.services.router.edge.lingering_close import LingeringTransport


class FakeTransport:
    """Records writes and the close."""

    def __init__(self) -> None:
        self.calls: list[bytes | str] = []
        self._is_closing = False

    def write(self, data: bytes) -> None:
        self.calls.append(data)

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True
        self.calls.append("close")


def transport_of(fake: Any) -> LingeringTransport:
    return LingeringTransport(fake, lambda: True)


async def test_held_writes_go_out_together_in_the_next_pass() -> None:
    transport = transport_of(fake := FakeTransport())
    transport.hold()
    for data in (b"head", b" first", b" second"):
        transport.write(data)
    assert fake.calls == []
    await asyncio.sleep(0)
    assert fake.calls == [b"head first second"]
    transport.write(b"third")
    assert fake.calls == [b"head first second", b"third"]


async def test_a_close_sends_what_is_held() -> None:
    transport = transport_of(fake := FakeTransport())
    transport.hold()
    transport.write(b"head")
    transport.close()
    assert fake.calls == [b"head", "close"]
    await asyncio.sleep(0)
    assert fake.calls == [b"head", "close"]


async def test_a_hold_without_a_write_sends_nothing() -> None:
    transport = transport_of(fake := FakeTransport())
    transport.hold()
    transport.hold()
    await asyncio.sleep(0)
    transport.write(b"head")
    assert fake.calls == [b"head"]
