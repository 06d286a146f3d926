"""Options of page connections: no pacing within a host, and a reader that sleeps until there is much to read."""

from __future__ import annotations

import errno
import os
import random
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.rpc.sockets import options as sockets
from baton.transfer.stream import page_wire

WAIT_S = 20.0
CHOICE = socket.IPPROTO_TCP, socket.TCP_CONGESTION
AVAILABLE = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


class Recorded(socket.socket):
    """Records what a reader waits for before each read."""

    wakes: list[int]

    def recvmsg_into(self, buffers: Sequence[memoryview], *rest: int) -> tuple[int, list, int, object]:  # type: ignore[override]
        self.wakes.append(self.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT))
        return super().recvmsg_into(buffers, *rest)


class Remote(socket.socket):
    """Its peer looks as if it were on another host."""

    def getpeername(self) -> tuple[str, int]:
        return "192.0.2.1", 7


class Fixed(socket.socket):
    """Its congestion control cannot be changed any more once it is `fixed`."""

    fixed = False

    def setsockopt(self, *option: Any) -> None:
        if self.fixed and option[:2] == CHOICE:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        super().setsockopt(*option)


def again(one: socket.socket, kind: type[socket.socket]) -> socket.socket:
    return kind(fileno=one.detach())


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A choice that counts as pacing here."""
    others = [name for name in AVAILABLE.read_text().split() if name != "reno"]
    if not others:
        pytest.skip("this kernel knows one congestion control")
    monkeypatch.setattr(sockets, "_PACED", others[0].encode())
    return others[0].encode()


def choice(one: socket.socket) -> bytes:
    return one.getsockopt(*CHOICE, 16).rstrip(b"\0")


def test_nothing_is_paced_between_two_ends_on_one_host(ends: tuple[socket.socket, socket.socket], paced: bytes) -> None:
    for one in ends:
        one.setsockopt(*CHOICE, paced)
        page_wire.prepare(one)
        assert choice(one) == b"reno"


def test_the_choice_of_the_system_stays_towards_other_hosts(
    ends: tuple[socket.socket, socket.socket], paced: bytes
) -> None:
    with again(ends[0], Remote) as one:
        one.setsockopt(*CHOICE, paced)
        page_wire.prepare(one)
        assert choice(one) == paced


def test_a_choice_that_may_not_be_changed_stays(ends: tuple[socket.socket, socket.socket], paced: bytes) -> None:
    """The operator allows no other one."""
    with again(ends[0], Fixed) as one:
        one.setsockopt(*CHOICE, paced)
        assert isinstance(one, Fixed)
        one.fixed = True
        page_wire.prepare(one)
        assert choice(one) == paced


def test_a_choice_that_does_not_pace_stays(ends: tuple[socket.socket, socket.socket], paced: bytes) -> None:
    before, sockets._PACED = sockets._PACED, b"nothing"  # the fixture restores it
    assert before == paced
    ends[0].setsockopt(*CHOICE, paced)
    page_wire.prepare(ends[0])
    assert choice(ends[0]) == paced


@pytest.mark.parametrize("num_bytes", [1, 9, page_wire.WAKE_BYTES, page_wire.WAKE_BYTES + 1, 3 * page_wire.WAKE_BYTES])
def test_a_reader_waits_for_much_or_for_all_that_is_missing(
    ends: tuple[socket.socket, socket.socket], num_bytes: int
) -> None:
    """All of it comes, whatever pieces it is sent in. Later readers of a few bytes are woken by them."""
    content, sender = random.Random(num_bytes).randbytes(num_bytes), ends[1]
    pieces = sorted(random.Random(3).randrange(num_bytes + 1) for _ in range(20))

    def send() -> None:
        for start, end in zip([0, *pieces], [*pieces, num_bytes], strict=True):
            sender.sendall(content[start:end])

    thread = threading.Thread(target=send)
    with again(ends[0], Recorded) as one:
        assert isinstance(one, Recorded)
        one.wakes = []
        thread.start()
        assert page_wire.receive(one, num_bytes, time.monotonic() + WAIT_S) == content
        thread.join(WAIT_S)
        much = num_bytes > page_wire.MIN_WAKE_BYTES
        assert one.wakes[0] == (min(num_bytes, page_wire.WAKE_BYTES) if much else 1)
        assert max(one.wakes) <= page_wire.WAKE_BYTES
        sender.sendall(b"x")  # a reader of one byte wakes again
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
        assert one.recv(1, socket.MSG_PEEK) == b"x"


def test_a_part_that_stays_short_is_given_up_or_ends(ends: tuple[socket.socket, socket.socket]) -> None:
    """Less than what wakes the reader: it is past its deadline, or the peer hangs up."""
    one, other = ends
    other.sendall(bytes(1000))
    with pytest.raises(TimeoutError):
        page_wire.receive(one, 2 * page_wire.WAKE_BYTES, time.monotonic() + 0.05)
    other.close()
    with pytest.raises(page_wire.ConnectionEnded) as ended:
        page_wire.receive(one, 2 * page_wire.WAKE_BYTES, time.monotonic() + WAIT_S)
    assert ended.value.num_bytes == 1000
