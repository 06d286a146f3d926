"""Which cores each worker of a host owns, and the layout of the file in which they lend them. Pure.

The file has a slot of 64 bytes a worker, which the kernels write (`core_lease.cpp`), and behind the slots this plan as
JSON. Written by `baton up`, read by its workers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass

MAX_WORKERS = 64
SLOT_BYTES = 64
SLOTS_BYTES = MAX_WORKERS * SLOT_BYTES
_COMPUTING = 2**63 - 1
"""A slot's first word until its worker has joined: nobody borrows the cores of a worker that starts."""


class BadCorePlan(ValueError):
    """A file that is no plan, or a plan without this worker. The message is for the log."""


@dataclass(frozen=True, slots=True)
class CorePlan:
    """`cores`: those of each worker, in the order of their slots; at most `MAX_WORKERS`."""

    cores: Mapping[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        if len(self.cores) > MAX_WORKERS:
            raise BadCorePlan(f"{len(self.cores)} workers share cores; at most {MAX_WORKERS} can")

    def slot(self, worker: str) -> int:
        """The worker's slot. Raises `BadCorePlan`."""
        if worker not in self.cores:
            raise BadCorePlan(
                f"the plan of cores does not know {worker or 'a worker without an id'}; it has {', '.join(self.cores)}"
            )
        return list(self.cores).index(worker)

    def borrowable(self, worker: str) -> dict[int, int]:
        """Cores that others own and this worker does not: core -> slots of its owners, a bit each."""
        slots = enumerate(self.cores.values())
        owners: dict[int, int] = {}
        for slot, cores in slots:
            for core in cores:
                owners[core] = owners.get(core, 0) | 1 << slot
        return {core: mask for core, mask in sorted(owners.items()) if core not in self.cores[worker]}

    def as_bytes(self) -> bytes:
        """The file's content before any worker has joined."""
        slot = struct.pack("q", _COMPUTING).ljust(SLOT_BYTES, b"\0")
        return slot * MAX_WORKERS + json.dumps({"cores": self.cores}).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> CorePlan:
        """Reads a file's content. Raises `BadCorePlan`."""
        try:
            cores = json.loads(content[SLOTS_BYTES:])["cores"]
            return cls({str(worker): tuple(int(core) for core in owned) for worker, owned in cores.items()})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadCorePlan(f"not a plan of cores ({type(error).__name__})") from error
