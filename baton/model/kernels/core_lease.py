"""Joins the lease of cores that the workers of a host keep in a shared file: idle ones lend theirs.

Called once the model is loaded. The kernels mark their calls in the file and see those of the other workers
(`src/core_lease.cpp`), so nothing is called in a step. A worker that computes with torch does not join, and its cores
stay its own.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from pathlib import Path

from baton.model.kernels.library import Kernels
from baton.settings.core_plan import SLOTS_BYTES, CorePlan


@dataclass(frozen=True, slots=True)
class CoreLease:
    """A joined lease. `borrowable`: cores of other workers that this process may run on."""

    borrowable: tuple[int, ...]
    _kernels: Kernels

    def borrowed_s(self) -> float:
        """Time that this worker has computed on borrowed cores so far, in seconds."""
        return self._kernels.borrowed_ns() / 1e9

    def wait_s(self) -> float:
        """Time for which threads that had a part of a call on a borrowed core lacked that core so far, in seconds."""
        return self._kernels.borrow_wait_ns() / 1e9

    def leave(self) -> None:
        """Neither lends nor borrows any more. No call of the kernels may run. The memory stays mapped."""
        self._kernels.leave_lease()


def join_core_lease(path: Path, worker: str, kernels: Kernels) -> CoreLease:
    """Lends this worker's cores, and starts a thread on each core of others that this process may use.

    Raises `BadCorePlan` for a file that is no plan or does not name the worker, and `OSError`.
    """
    with path.open("r+b") as file:
        plan = CorePlan.from_bytes(file.read())
        slot, borrowable = plan.slot(worker), plan.borrowable(worker)
        memory = mmap.mmap(file.fileno(), SLOTS_BYTES)
    _forever.append(memory)
    kernels.join_lease(ctypes.addressof(ctypes.c_char.from_buffer(memory)), slot)
    usable = tuple(core for core, owners in borrowable.items() if kernels.borrow_core(core, owners))
    return CoreLease(usable, kernels)


_forever: list[mmap.mmap] = []
"""The kernels keep the address."""
