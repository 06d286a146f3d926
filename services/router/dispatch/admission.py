"""Holds the admitted requests, waiting and running. Owned by `dispatcher`.

`AdmissionQueue` decides which of them run. The controller wakes those that may start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from baton.domain.ids import RequestId
from baton.services.router.admission.admission_queue import AdmissionLimits, AdmissionQueue
from baton.services.router.admission.slot import Slot
from baton.services.router.admission.tenants import TenantTable
from baton.services.router.dispatch.tracked_request import TrackedRequest
from baton.services.router.generation import AdmittedRequest
from baton.telemetry.metrics import QUEUED_REQUESTS, QUEUED_TOKENS


class AdmissionController:
    """Owned by one event loop."""

    def __init__(self, limits: AdmissionLimits, tenants: TenantTable) -> None:
        self.queue = AdmissionQueue(limits, tenants)
        self._tracked: dict[RequestId, TrackedRequest] = {}
        self._by_slot: dict[Slot, TrackedRequest] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._tracked)

    def __contains__(self, id: RequestId) -> bool:
        return id in self._tracked

    def tracked(self) -> Iterable[TrackedRequest]:
        """All admitted requests, waiting and running, oldest first."""
        return self._tracked.values()

    def resize(self, num_rows: int | None) -> None:
        """Starts the requests that may run now. `num_rows`: rows of all decode workers; None: unknown."""
        self._wake(self.queue.resize(num_rows, asyncio.get_running_loop().time()))

    def add(self, tracked: TrackedRequest) -> None:
        """Adds an admitted request. It may start at once if its slot runs. Others may have to leave for it."""
        self._tracked[tracked.sequence.id] = self._by_slot[tracked.slot] = tracked
        if tracked.slot.started_at is not None:
            tracked.granted.set()
        self._empty.clear()
        self._wake(self.queue.shed(asyncio.get_running_loop().time()))

    def take(self, admitted: AdmittedRequest) -> TrackedRequest | None:
        """Returns the request of `admitted` once; None after that."""
        tracked = self._tracked.get(admitted.sequence.id)
        if tracked is None or tracked is not admitted or tracked.taken:
            return None
        tracked.taken = True
        return tracked

    def leave(self, tracked: TrackedRequest) -> None:
        """Frees the slot and starts the next request. The workers are done; the client may still read. Idempotent."""
        self._wake(self.queue.release(tracked.slot, asyncio.get_running_loop().time()))

    def release(self, tracked: TrackedRequest) -> None:
        """Frees the slot, unless it is free, and forgets the request."""
        del self._tracked[tracked.sequence.id], self._by_slot[tracked.slot]
        self.leave(tracked)
        if not self._tracked:
            self._empty.set()

    async def wait_empty(self) -> None:
        """Waits until no request is left."""
        await self._empty.wait()

    def _wake(self, slots: list[Slot]) -> None:
        """Wakes requests that started or had to leave."""
        for slot in slots:
            self._by_slot[slot].granted.set()
        QUEUED_REQUESTS.set(self.queue.num_waiting)
        QUEUED_TOKENS.set(self.queue.num_waiting_tokens)
