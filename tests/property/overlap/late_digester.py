"""Pages that are hashed at drawn moments, and memory that tells who reads it and raises if that is too early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.domain.errors import Broken
from baton.domain.ids import PageId
from baton.engine.overlap.fake_async_runner import FakeAsyncRunner
from baton.transfer.digest import PoolHasher
from simulation.runtime.page_memory import SimMemory
from tests.tiny_workers import NUM_PAGES, PAGE_BYTES


class GuardedMemory(SimMemory):
    """Raises `Broken` as soon as a page is read, to be hashed or sent, that a step of `device` in flight writes."""

    def __init__(self) -> None:
        super().__init__(NUM_PAGES, PAGE_BYTES)
        self.device: FakeAsyncRunner | None = None
        self.digester: LateDigester | None = None
        self.read_by_engine: list[int] = []  # pages

    def read(self, pages: Sequence[int], num_bytes: int | None = None) -> list[memoryview]:
        early = self.device.written_pages.intersection(pages) if self.device is not None else ()
        if early:
            raise Broken(f"pages {sorted(early)} are read before the step that writes them has ended")
        if self.digester is None or not self.digester.is_hashing:
            self.read_by_engine += pages
        return super().read(pages, num_bytes)


@dataclass(eq=False)
class LateDigests:
    """Digests of `pages` that are computed at some moment before `wait` returns."""

    digester: LateDigester
    pages: tuple[PageId, ...]
    digests: Sequence[int] | None = None

    def wait(self) -> Sequence[int]:
        self.digester.compute(self)
        assert self.digests is not None
        self.digester.pending.remove(self)
        return self.digests


class LateDigester:
    """A `PageDigester` whose thread runs at drawn moments."""

    def __init__(self, memory: GuardedMemory) -> None:
        self._hasher = PoolHasher(memory)
        self.pending: list[LateDigests] = []
        self.is_hashing = False
        self.num_pages = 0
        self.runs_early = True  # before its digests are waited for
        self.on_compute: Callable[[], None] = lambda: None

    @property
    def pages(self) -> frozenset[PageId]:
        """Pages that nobody may write or free."""
        return frozenset(page for one in self.pending for page in one.pages)

    def start(self, pages: Sequence[PageId]) -> LateDigests:
        one = LateDigests(self, tuple(pages))
        self.pending.append(one)
        return one

    def advance(self) -> None:
        """Computes the oldest that waits."""
        for one in [one for one in self.pending if one.digests is None and self.runs_early][:1]:
            self.compute(one)

    def compute(self, one: LateDigests) -> None:
        """Hashes the pages as they are now, once."""
        if one.digests is None:
            self.on_compute()
            self.is_hashing = True
            one.digests = self._hasher.digests(one.pages)
            self.is_hashing = False
            self.num_pages += len(one.pages)
