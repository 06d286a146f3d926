"""Holds the admitted requests, waiting, running and suspended. Owned by `dispatcher`.

`AdmissionQueue` decides which of them run. The controller wakes those that may start. It suspends a request that must
go on with a model which no worker has while others serve another one: its slot is for those that can run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from baton.domain.errors import BatonError, DeadlineExceeded, ModelReplaced
from baton.domain.ids import RequestId
from baton.services.router.admission.admission_queue import AdmissionLimits, AdmissionQueue
from baton.services.router.admission.slot import Slot
from baton.services.router.admission.tenants import TenantTable
from baton.services.router.dispatch.prefill.coming import ComingPrompts
from baton.services.router.dispatch.tracked_request import TrackedRequest
from baton.services.router.dispatch.workers import WorkerSet
from baton.services.router.generation import AdmittedRequest
from baton.telemetry.logs import get_logger
from baton.telemetry.metrics import QUEUED_REQUESTS, QUEUED_TOKENS

log = get_logger(__name__)

MAX_PASSES = 4
"""Passes of the event loop for which a request waits at most for those that came with it."""


class AdmissionController:
    """Owned by one event loop."""

    def __init__(self, limits: AdmissionLimits, tenants: TenantTable, workers: WorkerSet) -> None:
        self._workers = workers
        self.queue = AdmissionQueue(limits, tenants)
        self.coming = ComingPrompts()
        self._gathers = False  # while the requests of a burst wait for each other
        self._tracked: dict[RequestId, TrackedRequest] = {}
        self._by_slot: dict[Slot, TrackedRequest] = {}
        self._shown: tuple[int, int] | None = None  # waiting requests and their tokens, as the metrics have them
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._tracked)

    def __contains__(self, id: RequestId) -> bool:
        return id in self._tracked

    def tracked(self) -> Iterable[TrackedRequest]:
        """All admitted requests, oldest first."""
        return self._tracked.values()

    def on_workers(self) -> None:
        """Follows the workers of the last reading.

        Suspends waiting requests that none of them may continue, and lets suspended ones wait whose workers are back.
        Then starts the requests that may run now.
        """
        now, served = asyncio.get_running_loop().time(), dict[tuple[str, str], bool]()
        num_rows = self._workers.max_rows(self.queue.mean_prompt_tokens)  # of all decode workers; None: without a pair
        for tracked in self._tracked.values():
            if not (fingerprint := tracked.required_fingerprint) or self.queue.is_running(tracked.slot):
                continue
            model = fingerprint, tracked.sequence.processor
            if model not in served:
                served[model] = self._workers.has_model(*model)
            if served[model]:
                self.queue.resume(tracked.slot)
            elif num_rows is not None:
                self._suspend(tracked)
        self._wake(self.queue.resize(num_rows, now))

    async def wait_for_burst(self) -> None:
        """Lets requests that the event loop has read be granted their slots first, so that `coming` counts them.

        The first request of a burst waits, and those that come meanwhile, until a pass of the event loop brings none.
        With other requests here before, none waits. A lone request waits for one pass, which has nothing to do.
        """
        if len(self._tracked) == 1:
            self._gathers = True
        try:
            for _ in range(MAX_PASSES):
                if not self._gathers:
                    return
                num_before = len(self._tracked)
                await asyncio.sleep(0)
                if len(self._tracked) == num_before:
                    break
        finally:
            self._gathers = False

    async def wait_for_model(self, tracked: TrackedRequest) -> None:
        """Returns when a running request has workers that may continue it. Until then it is suspended.

        It keeps its slot while there are no workers at all: nobody else could use it. Raises `DeadlineExceeded`, and
        `ModelReplaced` if only others are there at its deadline.
        """
        fingerprint, processor = tracked.required_fingerprint, tracked.sequence.processor
        if self._workers.has_model(fingerprint, processor):
            return
        try:
            async with asyncio.timeout_at(tracked.deadline):
                while not self._workers.has_model(fingerprint, processor):
                    if self._workers.readiness()[0]:
                        self._suspend(tracked)
                        await tracked.granted.wait()
                    else:
                        await self._workers.wait_for_change()
        except TimeoutError:
            raise self.timeout_error(tracked, "found no room in time") from None

    def timeout_error(self, tracked: TrackedRequest, why: str) -> BatonError:
        """The error of a request at its deadline, before it had workers."""
        id = tracked.id.request_id
        if self._workers.has_model(tracked.required_fingerprint) or not self._workers.readiness()[0]:
            return DeadlineExceeded(f"request {id} {why}")
        return ModelReplaced(
            f"request {id} began on workers with another model, other weights or another page geometry than those "
            "present, and none like them came back in time: send it again"
        )

    def add(self, tracked: TrackedRequest) -> None:
        """Adds an admitted request. It may start at once if its slot runs. Others may have to leave for it."""
        self._tracked[tracked.sequence.id] = self._by_slot[tracked.slot] = tracked
        self._empty.clear()
        if tracked.slot.started_at is not None:
            self._grant(tracked)  # the queue is as it was
        else:
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
        if not tracked.has_left:
            tracked.has_left = True
            self._wake(self.queue.release(tracked.slot, asyncio.get_running_loop().time()))

    def release(self, tracked: TrackedRequest) -> None:
        """Frees the slot, in any state, and forgets the request."""
        del self._tracked[tracked.sequence.id], self._by_slot[tracked.slot]
        self.coming.discard(tracked.sequence.id)
        self.leave(tracked)
        if not self._tracked:
            self._empty.set()

    async def wait_empty(self) -> None:
        """Waits until no request is left."""
        await self._empty.wait()

    def _suspend(self, tracked: TrackedRequest) -> None:
        slot = tracked.slot
        if not self.queue.is_running(slot) and not self.queue.is_waiting(slot):
            return  # it is suspended, or has left
        tracked.granted.clear()
        self.coming.discard(tracked.sequence.id)
        log.info("request_suspended", request_id=tracked.id.request_id, fingerprint=tracked.required_fingerprint)
        self._wake(self.queue.suspend(slot, asyncio.get_running_loop().time()))

    def _wake(self, slots: list[Slot]) -> None:
        """Wakes requests that started or had to leave."""
        for slot in slots:
            self._grant(self._by_slot[slot])
        waiting = self.queue.num_waiting, self.queue.num_waiting_tokens
        if waiting != self._shown:
            self._shown = waiting
            QUEUED_REQUESTS.set(waiting[0])
            QUEUED_TOKENS.set(waiting[1])

    def _grant(self, tracked: TrackedRequest) -> None:
        tracked.granted.set()
        if tracked.slot.refusal is None:
            now = asyncio.get_running_loop().time()
            self.coming.add(tracked.sequence.id, tracked.sequence.prompt_tokens, now)
