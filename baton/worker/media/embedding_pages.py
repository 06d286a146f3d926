"""Registered memory that embeddings pass through where NIXL moves them: a copy at the source, and one at the puller.

Embeddings themselves are held elsewhere, so that this memory is small and of one shape for all models. Its pages are
taken for one embedding at a time. Owned by one event loop.
"""

from __future__ import annotations

from baton.domain.arithmetic import ceil_div
from baton.domain.ids import PageId
from baton.kv.memory import PageMemory

PAGE_BYTES = 64 * 1024
NUM_PAGES = 512
"""32 MiB, touched as they are used."""


class EmbeddingPages:
    """Pages of registered memory, and which of them are free."""

    def __init__(self, num_pages: int = NUM_PAGES) -> None:
        self.memory = PageMemory(num_pages, PAGE_BYTES)
        self._free = [PageId(page) for page in reversed(range(num_pages))]

    @property
    def num_free(self) -> int:
        """Pages that are not taken."""
        return len(self._free)

    def take(self, num_bytes: int) -> list[PageId] | None:
        """Pages for so many bytes; None if there are too few."""
        num_pages = ceil_div(num_bytes, PAGE_BYTES)
        if not 0 < num_pages <= len(self._free):
            return None
        return [self._free.pop() for _ in range(num_pages)]

    def release(self, pages: list[PageId]) -> None:
        """Gives pages back, once: nothing may move into them any more."""
        self._free += reversed(pages)

    def fill(self, pages: list[PageId], data: bytes | bytearray) -> None:
        """Copies `data` into pages that were taken for it. What is behind it in the last one does not matter."""
        view = memoryview(data)
        for at, page in enumerate(pages):
            part = view[at * PAGE_BYTES : (at + 1) * PAGE_BYTES]
            self.memory.page(page)[: len(part)] = part

    def read(self, pages: list[PageId], num_bytes: int) -> bytearray:
        """A copy of the first `num_bytes` of `pages`."""
        data = bytearray(num_bytes)
        for at, page in enumerate(pages):
            start = at * PAGE_BYTES
            data[start : start + PAGE_BYTES] = self.memory.page(page)[: min(PAGE_BYTES, num_bytes - start)]
        return data


def page_identities(identity: bytes, fingerprint: str, num_pages: int) -> list[bytes]:
    """What the tags of an embedding's pages bind beside their bytes: image, embeddings of which kind, and place."""
    return [identity + fingerprint.encode() + number.to_bytes(4) for number in range(num_pages)]
