"""Pages are lent to the socket, not copied; where the system cannot do that, the same bytes are copied."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from baton.domain.ids import Incarnation, WorkerId
from baton.kv.memory import PageMemory
from baton.transfer.base import Pull, PullOutcome, SourceInfo
from baton.transfer.digest import digest_pages
from baton.transfer.stream import TRANSPORT, page_wire, page_writer
from baton.transfer.stream.mover import StreamPuller
from baton.transfer.stream.page_connection import PageConnection
from baton.transfer.stream.page_writer import MIN_ITEM_BYTES, PIPE_BYTES, PageWriter
from baton.transfer.stream.source import StreamSource
from tests.unit.transfer.rigs import EventLog, page_ids
from tests.unit.transfer.source_process import filled_memory

WAIT_S = 20.0
PAGE_BYTES = 64 * 1024


def received(peer: socket.socket, num_bytes: int) -> bytes:
    return page_wire.receive(peer, num_bytes, time.monotonic() + WAIT_S)


def sent(ends: tuple[socket.socket, socket.socket], views: list[memoryview]) -> bytes:
    """What the peer gets of `views`."""
    ours, peer = ends
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(received(peer, sum(map(len, views)))))
    reader.start()
    with contextlib.closing(PageWriter(ours, WAIT_S)) as sender:
        sender.send_pages(views)
    reader.join(WAIT_S)
    return got[0]


def joined(views: list[memoryview]) -> bytes:
    return b"".join(views)


def shapes(memory: PageMemory) -> dict[str, list[memoryview]]:
    """Views of a pool of 64 KiB pages."""
    rng, whole = random.Random(5), memory.buffer
    starts = [rng.randrange(len(whole) - PAGE_BYTES) for _ in range(40)]
    return {
        "pages in any order": [memory.page(page) for page in (5, 0, 63, 63, 7)],
        "more than a pipe holds": [whole[: 3 * PIPE_BYTES]],
        "many more pages than that": [memory.page(page) for page in range(64)],
        "across the system's pages": [whole[at : at + MIN_ITEM_BYTES + at % 4099] for at in starts],
        "one byte short": [whole[1:PAGE_BYTES], memory.page(3)],
        "small ones": [whole[at : at + 100] for at in starts],
        "an empty one": [memory.page(1), whole[:0], memory.page(2)],
        "nothing": [],
    }


@pytest.mark.parametrize("shape", shapes(PageMemory(64, PAGE_BYTES)))
def test_bytes_arrive_whole_and_in_order(ends: tuple[socket.socket, socket.socket], shape: str) -> None:
    views = shapes(filled_memory(64, PAGE_BYTES, seed=9))[shape]
    assert sent(ends, views) == joined(views)


def test_what_is_on_its_way_is_the_memory_of_the_pool(ends: tuple[socket.socket, socket.socket]) -> None:
    """A write before the peer has read shows there, as with NIXL. Pins and digests exclude it. A copy stays."""
    ours, peer = ends
    memory = filled_memory(2, PAGE_BYTES, seed=9)
    with contextlib.closing(PageWriter(ours, WAIT_S)) as sender:
        sender.send_pages([memory.page(0)])
        sender.send_copies([memory.page(1)])
        expected = bytearray(memory.buffer)
        memory.page(0)[77] ^= 1
        memory.page(1)[77] ^= 1
        expected[77] ^= 1
        assert received(peer, 2 * PAGE_BYTES) == expected


def open_descriptors() -> set[str]:
    """What this process has open. Threads and collections may close some of other tests meanwhile."""
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return {os.readlink(link) for link in links if os.path.islink(link)}


def fail(number: int, times: int, real: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Fails with an errno after `times` calls of `real`."""
    left = [times]

    def call(*arguments: Any, **keywords: Any) -> Any:
        if left[0] > 0 and real is not None:
            left[0] -= 1
            return real(*arguments, **keywords)
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("case", ["no call", "no pipe", "small pipe", "no splice", "no splice later", "no lending"])
def test_what_cannot_be_lent_is_copied(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    class NoVmsplice:
        def vmsplice(self, *arguments: Any) -> int:
            ctypes.set_errno(errno.EPERM)
            return -1

    if case == "no call":
        monkeypatch.setattr(page_writer, "_libc", object())
    elif case == "no pipe":
        monkeypatch.setattr(os, "pipe", fail(errno.EMFILE, 0))
    elif case == "small pipe":
        monkeypatch.setattr(fcntl, "fcntl", lambda end, command, *size: 65536)
    elif case == "no lending":
        monkeypatch.setattr(page_writer, "_libc", NoVmsplice())
    else:
        monkeypatch.setattr(os, "splice", fail(errno.EINVAL, 2 * (case == "no splice later"), os.splice))
    before = open_descriptors()
    views = shapes(filled_memory(64, PAGE_BYTES, seed=9))["many more pages than that"]
    assert sent(ends, views) == joined(views)
    assert open_descriptors() <= before


def send_much(sender: PageWriter, memory: PageMemory) -> None:
    for _ in range(100):
        sender.send_pages([memory.page(page) for page in range(memory.num_pages)])


def test_a_peer_that_takes_nothing_is_given_up(ends: tuple[socket.socket, socket.socket]) -> None:
    memory = PageMemory(512, PAGE_BYTES)
    with contextlib.closing(PageWriter(ends[0], 0.05)) as sender, pytest.raises(TimeoutError):
        send_much(sender, memory)


def test_a_socket_with_room_that_takes_nothing_is_given_up(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the system has no memory for sockets: each send is refused, though there is room."""
    left = [100]

    def refuse(*arguments: Any, **keywords: Any) -> int:
        left[0] -= 1
        assert left[0], "it tries again without an end"
        raise BlockingIOError

    monkeypatch.setattr(os, "splice", refuse)
    with contextlib.closing(PageWriter(ends[0], 0.01)) as sender, pytest.raises(TimeoutError):
        sender.send_pages([PageMemory(1, PAGE_BYTES).page(0)])


def test_a_peer_that_is_gone_is_an_error(ends: tuple[socket.socket, socket.socket]) -> None:
    memory = filled_memory(64, PAGE_BYTES, seed=9)
    ends[1].close()
    with contextlib.closing(PageWriter(ends[0], WAIT_S)) as sender, pytest.raises(OSError, match=r"pipe|reset"):
        send_much(sender, memory)


def test_a_closed_sender_keeps_no_descriptor_and_can_be_closed_again(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    before = open_descriptors()
    sender = PageWriter(ends[0], WAIT_S)
    sender.send_pages([filled_memory(1, PAGE_BYTES, seed=9).page(0)])
    [pipe] = open_descriptors() - before  # both ends have its name
    assert pipe.startswith("pipe:")
    sender.close()
    sender.close()
    assert open_descriptors() <= before


def test_a_page_that_is_written_on_its_way_is_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source has sent everything, and writes a page again before the reader has it."""
    theirs, ours = filled_memory(4, PAGE_BYTES, seed=9), PageMemory(4, PAGE_BYTES)
    digests, all_sent, log = digest_pages(theirs, page_ids(range(4))), threading.Event(), EventLog()
    read_into, send_pages = PageConnection.read_into, PageWriter.send_pages

    def send(self: PageWriter, views: list[memoryview]) -> None:
        send_pages(self, views)
        theirs.page(2)[11] ^= 1
        all_sent.set()

    def read(self: PageConnection, targets: list[memoryview], deadline: float) -> None:
        assert all_sent.wait(WAIT_S)
        read_into(self, targets, deadline)

    monkeypatch.setattr(PageWriter, "send_pages", send)
    monkeypatch.setattr(PageConnection, "read_into", read)
    source = StreamSource(Incarnation(7), theirs)
    info = SourceInfo(
        WorkerId("p"), Incarnation(7), "127.0.0.1:9", TRANSPORT, source.metadata(), theirs.address, 4, PAGE_BYTES
    )
    with contextlib.closing(source), contextlib.closing(StreamPuller(ours, log)) as puller:
        puller.connect(info)
        pull = Pull(1, WorkerId("p"), page_ids(range(4)), page_ids(range(4)), digests, WAIT_S)
        puller.submit(pull)
        event = log.terminal(pull)
    assert (event.outcome, event.corrupt) == (PullOutcome.CORRUPT, (2,))
