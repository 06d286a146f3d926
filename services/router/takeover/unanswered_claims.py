"""Claims whose answers were lost: the store may have granted them, and nobody would end the call.

While a call has readers, each of them claims it again. After the last one has left, the store is asked until it
answers. Owned by one event loop; used by `takeover`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from baton.domain.ids import RequestId
from baton.services.router.edge.disconnect import join_tasks
from baton.services.router.takeover.call_ownership import CallOwnership
from baton.store.store import CallRecord, CallStatus, StateStore, StoreUnavailable

RETRY_S = 0.25
MAX_WAIT_S = 900.0
"""The store is not asked for longer: an owner that is away as long has lost its lease, and others claim its calls."""

log = structlog.get_logger(__name__)


class UnansweredClaims:
    """`is_attended`: True while something here reads, claims or runs a call. `on_granted`: gets one that is ours."""

    def __init__(
        self,
        store: StateStore,
        ownership: CallOwnership,
        is_attended: Callable[[RequestId], bool],
        on_granted: Callable[[CallRecord], None],
    ) -> None:
        self._store = store
        self._ownership = ownership
        self._is_attended = is_attended
        self._on_granted = on_granted
        self._tasks: dict[RequestId, asyncio.Task[None]] = {}

    def add(self, id: RequestId) -> None:
        """The claim of a call had no answer. Returns at once. Idempotent."""
        if id not in self._tasks:
            self._tasks[id] = asyncio.create_task(self._settle(id), name=f"unanswered-{id}")
            self._tasks[id].add_done_callback(lambda _: self._tasks.pop(id, None))

    async def close(self) -> None:
        """Asks no more; such calls stay open in the store for the next router."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await join_tasks(tasks)

    async def _settle(self, id: RequestId) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + MAX_WAIT_S
        while loop.time() < until:
            await asyncio.sleep(RETRY_S)  # the polling interval
            if self._is_attended(id) or self._ownership.holds(id):
                continue
            try:
                record = await self._store.get_call(id)
            except StoreUnavailable:
                continue
            if self._is_attended(id) or self._ownership.holds(id):
                continue
            if record is not None and record.owner == self._ownership.owner and record.status is CallStatus.OPEN:
                self._on_granted(record)
            return
        log.warning("claim_unanswered", request_id=id)
