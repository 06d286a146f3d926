"""GPU memory as a transfer sees it, without a GPU: a host tensor behind deferred copies.

Nothing is copied before `wait`, and buffers hold a poison value until then. Code that forgets to wait reads poison or
writes nothing.
"""

from __future__ import annotations

import threading

import torch

from baton.kv.geometry import PAGE_ALIGNMENT, KVGeometry, LayerGeometry
from baton.kv.memory import MemoryKind
from baton.model.device_memory import DeviceMemory
from baton.model.storage import PageStorage

POISON = 0xA5
_PAGE_TOKENS = 16


class DeferredCopyStream:
    """A `CopyStream` that copies in `wait`, for the waiting thread, and never before."""

    def __init__(self) -> None:
        self._started = threading.local()
        self.num_waits = 0

    def buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), POISON, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.shape == source.shape
        self._pending().append((target, source))

    def wait(self) -> None:
        self.num_waits += 1
        for target, source in self._pending():
            target.copy_(source)
        self._pending().clear()

    def _pending(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pending: list[tuple[torch.Tensor, torch.Tensor]] = self._started.__dict__.setdefault("pending", [])
        return pending


def staged_memory(num_pages: int, page_bytes: int, kind: MemoryKind = MemoryKind.DRAM) -> DeviceMemory:
    """Zeroed memory with a scratch page behind it. `kind`: DRAM, which NIXL can reach, or the kind to imitate.

    `page_bytes` is a multiple of 4 KiB.
    """
    head_dim, rest = divmod(page_bytes, _PAGE_TOKENS * 8)
    assert not rest, page_bytes
    assert page_bytes % PAGE_ALIGNMENT == 0
    geometry = KVGeometry.of_layers((LayerGeometry(1, head_dim, head_dim),), "float32", _PAGE_TOKENS)
    storage = PageStorage.allocate(geometry, num_pages, has_scratch=True)
    return DeviceMemory(storage, DeferredCopyStream(), kind)
