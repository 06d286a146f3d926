"""Bytes of a page pool: the interface that transfers use, and its implementation in host memory.

Host memory is mapped once on huge pages and stays mapped while the process runs; `baton.model` provides GPU memory.
There is no `close`: NIXL peers hold the pool's address, and a read of unmapped memory would end their process with a
segmentation fault (NIXL's source and measurements agree).
"""

from __future__ import annotations

import ctypes
import enum
import errno
import mmap
import os
from collections.abc import Sequence
from typing import Protocol

from baton.domain.arithmetic import ceil_div

HUGE_PAGE_BYTES = 2 * 1024 * 1024
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)


class MemoryKind(enum.Enum):
    """NIXL's names for kinds of memory."""

    DRAM = "DRAM"
    VRAM = "VRAM"


class PoolMemory(Protocol):
    """`num_pages` x `page_bytes`, page `i` at `address + i * page_bytes` of a device's memory or of the host's.

    `read` and `write` are thread-safe for pages that no other thread writes meanwhile.
    """

    @property
    def num_pages(self) -> int: ...

    @property
    def page_bytes(self) -> int: ...

    @property
    def part_ends(self) -> tuple[int, ...]:
        """Ends of a page's parts in bytes, the last `page_bytes`. Each part has a digest and a tag of its own."""
        ...

    @property
    def address(self) -> int: ...

    @property
    def kind(self) -> MemoryKind: ...

    @property
    def device_id(self) -> int:
        """The GPU's index; 0 for host memory."""
        ...

    def read(self, pages: Sequence[int], num_bytes: int | None = None) -> list[memoryview]:
        """Bytes of each of `pages`, or its first `num_bytes`: views of host memory, or copies on the host.

        The caller bounds the number of pages. Raises `IndexError` outside the pool.
        """
        ...

    def write(self, pages: Sequence[int], contents: Sequence[memoryview]) -> None:
        """Writes `contents`, `page_bytes` each, into `pages`. Raises `IndexError` outside the pool."""
        ...

    def host_views(self, pages: Sequence[int], num_bytes: int) -> list[memoryview] | None:
        """The first `num_bytes` of each of `pages`, writable; None where they are not one range of host memory.

        Raises `IndexError` outside the pool.
        """
        ...

    def parts(self, pages: Sequence[int]) -> list[list[memoryview]]:
        """The parts of each of `pages`, as `read` gives them. A window part that is not there is empty.

        Raises `IndexError` outside the pool.
        """
        ...


def page_parts(content: memoryview, part_ends: Sequence[int]) -> list[memoryview]:
    """The parts of a page's bytes, in order; nothing is copied."""
    return [content[start:end] for start, end in zip((0, *part_ends), part_ends, strict=False)]


def write_leading(memory: PoolMemory, pages: Sequence[int], contents: Sequence[memoryview]) -> None:
    """Writes `contents`, all of one size, to the beginnings of `pages`; what is behind them stays."""
    whole = not contents or len(contents[0]) == memory.page_bytes
    views = None if whole else memory.host_views(pages, len(contents[0]))
    if whole:
        memory.write(pages, contents)
    elif views is None:  # a device takes whole pages
        kept = memory.read(pages)
        joined = [bytes(new) + bytes(old[len(new) :]) for new, old in zip(contents, kept, strict=True)]
        memory.write(pages, [memoryview(page) for page in joined])
    else:
        for view, content in zip(views, contents, strict=True):
            view[:] = content


def pool_extent(memory: PoolMemory) -> str:
    """Place of a pool for the log, `address:num_pages:page_bytes`; debuggers and fault injection read it."""
    return f"{memory.address:#x}:{memory.num_pages}:{memory.page_bytes}"


class PageMemory:
    """Zeroed `PoolMemory` on the host.

    `prefault`: touch every page now. A first touch during a transfer costs most of its speed.
    """

    kind = MemoryKind.DRAM
    device_id = 0

    def __init__(
        self, num_pages: int, page_bytes: int, part_ends: tuple[int, ...] = (), *, prefault: bool = False
    ) -> None:
        """`part_ends`: those of the page's geometry; none: a page is one part."""
        if num_pages < 1 or page_bytes < 1:
            raise ValueError(f"a pool needs pages of bytes, not {num_pages} x {page_bytes}")
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.part_ends = part_ends or (page_bytes,)
        if list(self.part_ends) != sorted({*self.part_ends}) or self.part_ends[-1] != page_bytes:
            raise ValueError(f"parts that end at {part_ends} do not make up a page of {page_bytes} bytes")
        num_bytes = ceil_div(num_pages * page_bytes, HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        if prefault:
            self._prefault(num_bytes)
        self.buffer = memoryview(self._map)[: num_pages * page_bytes]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the mapping, of which pages are the beginning."""
        return len(self._map)

    def populate(self, start: int, num_bytes: int) -> bool:
        """Has the kernel provide memory for a part of the mapping, whose bytes stay; others may use them meanwhile.

        `start`: offset in bytes, of a page of the kernel. False where the kernel cannot (before Linux 5.14). Raises
        `OSError` if there is no memory.
        """
        address, size = ctypes.c_void_p(self.address + start), ctypes.c_size_t(num_bytes)
        if _libc.madvise(address, size, _MADV_POPULATE_WRITE) == 0:
            return True
        if (code := ctypes.get_errno()) == errno.EINVAL:
            return False
        raise OSError(code, f"no memory for a pool of {self.mapped_bytes} bytes: {os.strerror(code)}")

    def touch(self) -> None:
        """Writes zeros, for the kernel to provide memory. Before any use."""
        self._prefault(self.mapped_bytes)

    def _prefault(self, num_bytes: int) -> None:
        for at in range(0, num_bytes, mmap.PAGESIZE):
            self._map[at] = 0

    def page(self, page_id: int) -> memoryview:
        """Writable bytes of one page. Raises `IndexError` outside the pool."""
        if not 0 <= page_id < self.num_pages:
            raise IndexError(f"page {page_id} is outside a pool of {self.num_pages}")
        start = page_id * self.page_bytes
        return self.buffer[start : start + self.page_bytes]

    def read(self, pages: Sequence[int], num_bytes: int | None = None) -> list[memoryview]:
        """See `PoolMemory`; nothing is copied."""
        if pages and not 0 <= min(pages) <= max(pages) < self.num_pages:
            raise IndexError(f"pages from {min(pages)} to {max(pages)} are outside a pool of {self.num_pages}")
        buffer, size = self.buffer, self.page_bytes
        length = size if num_bytes is None else min(size, num_bytes)
        return [buffer[page * size : page * size + length] for page in pages]

    def write(self, pages: Sequence[int], contents: Sequence[memoryview]) -> None:
        """See `PoolMemory`."""
        for page, content in zip(pages, contents, strict=True):
            self.page(page)[:] = content

    def host_views(self, pages: Sequence[int], num_bytes: int) -> list[memoryview]:
        """See `PoolMemory`."""
        return self.read(pages, num_bytes)

    def parts(self, pages: Sequence[int]) -> list[list[memoryview]]:
        """See `PoolMemory`; nothing is copied."""
        return [page_parts(page, self.part_ends) for page in self.read(pages)]
