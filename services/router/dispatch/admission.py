"""Everybody inside: the door, and the journeys of all who passed it, waiting and running. Owned by `dispatcher`.

`admission.AdmissionQueue` decides; this wakes whom it calls, and knows when the house is empty.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from baton.domain.errors import Broken, DeadlineExceeded
from baton.domain.ids import RequestId
from baton.telemetry.metrics import QUEUED_REQUESTS, QUEUED_TOKENS
from services.router.dispatch.admission_queue import AdmissionLimits, AdmissionQueue, Slot
from services.router.dispatch.tracked_request import TrackedRequest
from services.router.generation import AdmittedRequest


class AdmissionController:
    """Owned by one event loop."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._queue = AdmissionQueue(limits)
        self._tracked: dict[RequestId, TrackedRequest] = {}
        self._by_slot: dict[Slot, TrackedRequest] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._tracked)

    def __contains__(self, id: RequestId) -> bool:
        return id in self._tracked

    def refuse_if_full(self, deadline_s: float) -> None:
        """See `AdmissionQueue.refuse_if_full`."""
        self._queue.refuse_if_full(self._now(), deadline_s)

    def resize(self, num_rows: int | None) -> None:
        """The workers have rows for so many; calls those who may run because of it."""
        for slot in self._queue.resize(num_rows, self._now()):
            self._by_slot[slot].granted.set()
        self._update_gauges()

    def on_first_token(self, tracked: TrackedRequest) -> None:
        """The tracked has its first token."""
        self._queue.on_first_token(tracked.slot, self._now())

    def admit(
        self,
        num_tokens: int,
        track: Callable[[Slot], TrackedRequest],
        *,
        deadline_s: float = math.inf,
        force: bool = False,
    ) -> TrackedRequest:
        """The tracked that `track` makes of a slot for `num_tokens`. Raises `Overloaded`, without calling it.

        `deadline_s`: the time it has, from now on. With `force` it is never refused.
        """
        slot = self._queue.admit(num_tokens, self._now(), deadline_s, force=force)
        tracked = self._by_slot[slot] = track(slot)
        self._tracked[tracked.sequence.id] = tracked
        if self._queue.is_running(slot):
            tracked.granted.set()
        self._empty.clear()
        self._update_gauges()
        return tracked

    def start(self, admitted: AdmittedRequest) -> TrackedRequest:
        """The tracked of a admitted that is to be run now. Raises `Broken` for one that was run or released before."""
        tracked = self._tracked.get(admitted.sequence.id)
        if tracked is None or tracked is not admitted or tracked.started:
            raise Broken(f"the admitted request {admitted.sequence.id} was run or released before")
        tracked.started = True
        return tracked

    def get_unstarted(self, admitted: AdmittedRequest) -> TrackedRequest | None:
        """The tracked of a admitted that was neither run nor given back."""
        tracked = self._tracked.get(admitted.sequence.id)
        return tracked if tracked is admitted and not tracked.started else None

    async def wait_for_slot(self, tracked: TrackedRequest) -> None:
        """Returns when the tracked may run. Raises `DeadlineExceeded`."""
        try:
            async with asyncio.timeout_at(tracked.deadline):
                await tracked.granted.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"request {tracked.sequence.id} ran out of time in the queue") from None

    def release(self, tracked: TrackedRequest) -> None:
        """Gives the slot back and calls the next."""
        del self._tracked[tracked.sequence.id], self._by_slot[tracked.slot]
        granted = self._queue.release(tracked.slot, self._now())
        if granted is not None:
            self._by_slot[granted].granted.set()
        if not self._tracked:
            self._empty.set()
        self._update_gauges()

    async def wait_empty(self) -> None:
        """Waits until nobody is inside."""
        await self._empty.wait()

    def _update_gauges(self) -> None:
        QUEUED_REQUESTS.set(self._queue.num_waiting)
        QUEUED_TOKENS.set(self._queue.num_waiting_tokens)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
