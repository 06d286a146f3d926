"""Memory region of a pool, in this process or a peer, on the host or a device."""

from __future__ import annotations

from dataclasses import dataclass

from baton.kv.memory import MemoryKind, PoolMemory


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """`num_pages` x `page_bytes` from `address` on; `device_id` is the GPU's index, 0 for host memory."""

    address: int
    num_pages: int
    page_bytes: int
    device_id: int = 0
    kind: MemoryKind = MemoryKind.DRAM

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes


def region_of(memory: PoolMemory) -> MemoryRegion:
    """The region a pool occupies."""
    return MemoryRegion(memory.address, memory.num_pages, memory.page_bytes, memory.device_id, memory.kind)
