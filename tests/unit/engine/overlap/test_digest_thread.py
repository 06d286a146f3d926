"""Digests of a device's pages in a thread of their own."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import pytest

from baton.domain.errors import Broken
from baton.domain.ids import PageId
from baton.engine.overlap.digest_thread import DigestThread
from baton.kv.page_digests import PageHasher
from baton.transfer.digest import PoolHasher, page_digest
from tests.staged_memory import staged_memory

PAGE_BYTES = 4096


class GatedHasher:
    """Hashes once `gate` is open, and notes its thread."""

    def __init__(self, hasher: PageHasher) -> None:
        self._hasher = hasher
        self.gate = threading.Event()
        self.thread = ""
        self.is_daemon = False

    def digests(self, pages: Sequence[PageId]) -> Sequence[int]:
        self.thread, self.is_daemon = threading.current_thread().name, threading.current_thread().daemon
        assert self.gate.wait(30.0)
        return self._hasher.digests(pages)


def test_pages_are_hashed_beside_the_caller():
    memory = staged_memory(4, PAGE_BYTES)
    contents = [os.urandom(PAGE_BYTES) for _ in range(3)]
    memory.write([2, 0, 3], [memoryview(content) for content in contents])
    hasher = GatedHasher(PoolHasher(memory))
    digester = DigestThread(hasher)
    first, second = digester.start([PageId(2), PageId(0)]), digester.start([PageId(3)])
    hasher.gate.set()  # both were started before anything was hashed
    expected = [page_digest(memoryview(content)) for content in contents]
    assert [*first.wait(), *second.wait()] == expected
    assert hasher.thread.startswith("baton-digests")
    assert hasher.is_daemon, "a copy that hangs would keep a process that has crashed"
    digester.close()


def test_an_error_of_the_hasher_comes_out_of_the_wait():
    digester = DigestThread(PoolHasher(staged_memory(2, PAGE_BYTES)))
    digests = digester.start([PageId(7)])
    with pytest.raises(IndexError):
        digests.wait()
    digester.close()


def test_digests_that_do_not_come_end_the_engine():
    hasher = GatedHasher(PoolHasher(staged_memory(2, PAGE_BYTES)))
    digester = DigestThread(hasher, deadline_s=0.01)
    digests = digester.start([PageId(0)])
    with pytest.raises(Broken, match="did not come"):
        digests.wait()
    hasher.gate.set()
    digester.close()
