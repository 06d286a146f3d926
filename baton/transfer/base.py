"""The transfer interface: a source that can be read, a puller that reads. Pull only; see `docs/adr`.

The contract that both implementations keep, and `tests/contract/test_transfer.py` checks:

* `submit` never blocks on the network and may be called from any thread.
* Every submitted pull gets exactly one *terminal* event: `DONE`, `FAILED` or `CORRUPT`. After it, no byte of that
  pull can land any more: its local pages may be reused.
* A pull that is past its deadline gets one `LATE` first: its data must not be used, its pages not reused until the
  terminal event (a late `DONE` is reported as `FAILED`). NIXL cannot cancel a read, so waiting is the only proof.
* `DONE` means that all bytes landed and, where digests were given, that every page matched.
* Events come from the transfer's own thread, through the callback given at construction.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.domain.ids import Incarnation, PageId, WorkerId


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """What a puller must know of a source's pool; travels in `SourceInfo`. `address` is the source's gRPC address."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    transport: str
    metadata: bytes
    base_address: int
    num_pages: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class Pull:
    """Read `remote_pages` of a connected source into `local_pages`, pairwise. `digests` are xxh3-64, or None."""

    id: int
    source: WorkerId
    remote_pages: Sequence[PageId]
    local_pages: Sequence[PageId]
    digests: Sequence[int] | None
    deadline_s: float


class PullOutcome(enum.Enum):
    """`LATE` is the only one that is not terminal."""

    DONE = "done"
    FAILED = "failed"
    CORRUPT = "corrupt"
    LATE = "late"


@dataclass(frozen=True, slots=True)
class PullEvent:
    """What became of a pull. `seconds` since `submit`; `corrupt`: positions in `local_pages` that did not match."""

    pull: Pull
    outcome: PullOutcome
    num_bytes: int
    seconds: float
    reason: str = ""
    corrupt: tuple[int, ...] = ()


OnPullEvent = Callable[[PullEvent], None]
