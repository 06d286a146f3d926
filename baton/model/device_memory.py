"""A page pool in GPU memory as transfers use it: NIXL reads it in place, other transports through the host.

Called by the transfer's threads and, for digests, by the engine thread. Bytes move through page-locked buffers on a
CUDA stream of their own, so that a copy does not wait for the running step. A buffer is returned only after its copy is
done. The runner guarantees that the pages themselves are complete: `run` returns after the device has finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from baton.kv.memory import MemoryKind, page_parts
from baton.model.storage import PageStorage


class CopyStream(Protocol):
    """Asynchronous copies between a device and the host. Used from any thread."""

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Host memory that the device reads and writes: uint8 [num_bytes], uninitialised."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Starts a copy between equal shapes. Neither side may be touched before `wait`."""
        ...

    def wait(self) -> None:
        """Returns when every copy started before is done."""
        ...


class CudaCopyStream:
    """A `CopyStream` on a CUDA stream of `device`."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)  # torch reuses freed page-locked buffers

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        self._stream.synchronize()


class DeviceMemory:
    """The `PoolMemory` (see `baton.kv.memory`) of a storage. Keeps the storage alive: peers may hold its address."""

    def __init__(self, storage: PageStorage, copy_stream: CopyStream, kind: MemoryKind = MemoryKind.VRAM) -> None:
        self.num_pages = storage.num_pages
        self.address = storage.address
        self.kind = kind
        self.device_id = storage.device.index or 0
        self._pages = storage.page_bytes()
        self.page_bytes = self._pages.shape[1]
        self.part_ends = storage.geometry.part_ends
        self._copy_stream = copy_stream

    def read(self, pages: Sequence[int], num_bytes: int | None = None) -> list[memoryview]:
        """Copies of `pages` in one page-locked buffer. Raises `IndexError` outside the pool."""
        self._check(pages)
        buffer = self._copy_stream.buffer(len(pages) * self.page_bytes)
        slots = buffer.view(len(pages), self.page_bytes)
        for slot, page in zip(slots, pages, strict=True):
            self._copy_stream.copy(slot, self._pages[page])
        self._copy_stream.wait()
        return [page[:num_bytes] for page in self._cut(buffer)]

    def write(self, pages: Sequence[int], contents: Sequence[memoryview]) -> None:
        """Writes `contents` to `pages` and returns when they are in place. Raises `IndexError` outside the pool."""
        self._check(pages)
        buffer = self._copy_stream.buffer(len(pages) * self.page_bytes)
        for place, content in zip(self._cut(buffer), contents, strict=True):
            place[:] = content
        for slot, page in zip(buffer.view(len(pages), self.page_bytes), pages, strict=True):
            self._copy_stream.copy(self._pages[page], slot)
        self._copy_stream.wait()

    def host_views(self, pages: Sequence[int], num_bytes: int) -> None:
        """See `PoolMemory`: None."""

    def parts(self, pages: Sequence[int]) -> list[list[memoryview]]:
        """See `PoolMemory`: copies."""
        return [page_parts(page, self.part_ends) for page in self.read(pages)]

    def _cut(self, buffer: torch.Tensor) -> list[memoryview]:
        view = memoryview(buffer.numpy())  # type: ignore[arg-type]
        return [view[start : start + self.page_bytes] for start in range(0, len(view), self.page_bytes)]

    def _check(self, pages: Sequence[int]) -> None:
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise IndexError(f"page {page} is outside a pool of {self.num_pages}")
