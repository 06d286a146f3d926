"""Hashes pages in a thread of its own, so that the engine thread starts steps meanwhile. For pages of a device.

A device's pages are copied to page-locked host memory on the copy stream of their memory, and hashed there. The engine
thread promises that nothing writes the pages until it has taken their digests.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

from baton.domain.errors import Broken
from baton.domain.ids import PageId
from baton.kv.page_digests import PageHasher

DIGEST_DEADLINE_S = 60.0
"""Longest wait for the digests of one step's pages, which take a second at the worst."""


class PendingDigests(Protocol):
    """Digests that are being computed."""

    def wait(self) -> Sequence[int]:
        """The digests, in the order of the pages. Raises what hashing raised, and `Broken` when it takes too long."""
        ...


class PageDigester(Protocol):
    """Computes digests beside the engine thread, which is its only caller."""

    def start(self, pages: Sequence[PageId]) -> PendingDigests:
        """Begins to hash `pages`, whose bytes are final and stay so until the digests have been waited for."""
        ...


class _ThreadDigests:
    """`PendingDigests` of a `DigestThread`."""

    def __init__(self, future: Future[Sequence[int]], deadline_s: float) -> None:
        self._future = future
        self._deadline_s = deadline_s

    def wait(self) -> Sequence[int]:
        """See `PendingDigests`."""
        try:
            return self._future.result(self._deadline_s)
        except TimeoutError:
            raise Broken(f"digests of pages did not come within {self._deadline_s} s") from None


class DigestThread:
    """A `PageDigester` with one thread, which keeps no process alive: a copy that never ends must not stop its end."""

    def __init__(self, hasher: PageHasher, deadline_s: float = DIGEST_DEADLINE_S) -> None:
        self._hasher = hasher
        self._deadline_s = deadline_s
        self._wanted: SimpleQueue[tuple[Future[Sequence[int]], Sequence[PageId]] | None] = SimpleQueue()
        Thread(target=self._hash, name="baton-digests", daemon=True).start()

    def start(self, pages: Sequence[PageId]) -> PendingDigests:
        """See `PageDigester`."""
        future: Future[Sequence[int]] = Future()
        self._wanted.put((future, tuple(pages)))
        return _ThreadDigests(future, self._deadline_s)

    def close(self) -> None:
        """Ends the thread after what it was given, without waiting for it. The engine thread has ended before."""
        self._wanted.put(None)

    def _hash(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            future, pages = wanted
            try:
                future.set_result(self._hasher.digests(pages))
            except Exception as error:  # the caller raises it
                future.set_exception(error)
