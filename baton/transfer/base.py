"""Values of transfers, and the contract of sources and pullers. Pull only; see `docs/adr`.

Every transport keeps this contract, which `tests/contract/test_transfer.py` checks:

* `submit` never blocks on the network and is thread-safe.
* Every submitted pull gets exactly one *terminal* event: `DONE`, `FAILED` or `CORRUPT`. After it no byte of the pull
  can arrive, and its local pages may be reused.
* A pull past its deadline first gets one `LATE`. Its data must not be used, and its pages not reused before the
  terminal event; a late `DONE` is reported as `FAILED`. NIXL cannot cancel a read, so only waiting proves its end.
* `DONE` means that all bytes arrived and that every page matched its digest and its tag, where they were given.
* Events come from the transfer thread, through the callback given at construction.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.domain.ids import Incarnation, PageId, WorkerId
from baton.kv.memory import MemoryKind, PoolMemory
from baton.kv.page_tags import PageTag
from baton.kv.windows.memory import WindowedMemory


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """A source's pool, as a puller needs it; the reply to `Hello`. `address` is the source's gRPC address.

    `window_bytes`: of a slot, where window parts are no part of these pages (`baton.kv.windows`); 0: they are.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    transport: str
    metadata: bytes
    base_address: int
    num_pages: int
    page_bytes: int
    window_base_address: int = 0
    num_window_slots: int = 0
    window_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Pull:
    """A read of `remote_pages` of a connected source into `local_pages`, pairwise.

    `digests` are those announced (`baton.kv.page_digests`), or None. `tags` None: the bytes are not authenticated.
    `num_parts`: read only so many leading parts of each page; None: whole pages. Digests and tags are of all parts.
    `remote_windows`: slots of the remote pages' window parts; empty: those are in their pages.
    """

    id: int
    source: WorkerId
    remote_pages: Sequence[PageId]
    local_pages: Sequence[PageId]
    digests: Sequence[int] | None
    deadline_s: float
    tags: Sequence[PageTag] | None = None
    num_parts: int | None = None
    remote_windows: Sequence[int] = ()

    def again(self, id: int, positions: Sequence[int]) -> Pull:
        """The read of the pages at `positions` alone."""
        remote, local = ([pages[at] for at in positions] for pages in (self.remote_pages, self.local_pages))
        digests = None if self.digests is None else tuple([self.digests[at] for at in positions])
        tags = None if self.tags is None else [self.tags[at] for at in positions]
        windows = tuple([self.remote_windows[at] for at in positions]) if self.remote_windows else ()
        return replace(
            self, id=id, remote_pages=tuple(remote), local_pages=tuple(local), digests=digests, tags=tags,
            remote_windows=windows,
        )  # fmt: skip

    def page_bytes(self, memory: PoolMemory) -> int:
        """Bytes that are read of each page, from its start."""
        return memory.page_bytes if self.num_parts is None else memory.part_ends[self.num_parts - 1]


class PullOutcome(enum.Enum):
    """Outcome of a pull. Only `LATE` is not terminal."""

    DONE = "done"
    FAILED = "failed"
    CORRUPT = "corrupt"
    LATE = "late"


@dataclass(frozen=True, slots=True)
class PullEvent:
    """Event of a pull, `seconds` after `submit`. `corrupt`: positions in `local_pages` that did not match.

    `found`: digests of all local pages as they are now, their unread parts included, after a pull of leading parts
    whose announced digests were compared; else empty.
    """

    pull: Pull
    outcome: PullOutcome
    num_bytes: int
    seconds: float
    reason: str = ""
    corrupt: tuple[int, ...] = ()
    found: tuple[int, ...] = ()


OnPullEvent = Callable[[PullEvent], None]


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """`num_pages` x `page_bytes` from `address` on; `device_id` is the GPU's index, 0 for host memory.

    `item_bytes`: of each page, if not all of it is meant.
    """

    address: int
    num_pages: int
    page_bytes: int
    device_id: int = 0
    kind: MemoryKind = MemoryKind.DRAM
    item_bytes: int | None = None

    @property
    def num_item_bytes(self) -> int:
        """Bytes of each page that are meant."""
        return self.page_bytes if self.item_bytes is None else self.item_bytes

    def halves(self, edge: int, windows: MemoryRegion | None) -> tuple[MemoryRegion, MemoryRegion]:
        """Pages up to `edge` bytes, and their window parts: those in `windows`, or what is behind the edge."""
        if windows is None:
            windows = replace(self, address=self.address + edge, item_bytes=self.page_bytes - edge)
        return replace(self, item_bytes=edge), windows

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes


def region_of(memory: PoolMemory) -> MemoryRegion:
    """The region a pool occupies, without window slots."""
    if isinstance(memory, WindowedMemory):
        memory = memory.leading
    return MemoryRegion(memory.address, memory.num_pages, memory.page_bytes, memory.device_id, memory.kind)


def window_region_of(memory: PoolMemory) -> MemoryRegion | None:
    """The region of a pool's window slots; None if it has none."""
    return region_of(memory.windows) if isinstance(memory, WindowedMemory) else None
