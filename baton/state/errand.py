"""One request's way into the book: where it has got to, what the book is known to hold, and the steps in between.

`BookWriter` runs errands, one at a time; an errand knows nothing of queues, outages or time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import structlog

from baton.domain.errors import Broken, Superseded
from baton.domain.ids import AttemptId
from baton.domain.lifecycle import RequestState
from baton.state import ledger
from baton.state.base import RequestRecord, RequestStore, StateUnavailable

_log = structlog.get_logger(__name__)
_MAX_SURPRISES = 3


@dataclass(slots=True)
class Errand:
    """`known` is what the book holds, as far as we know; `doubtful`: ask the book before the next step.

    `num_surprises` counts how often in a row the book contradicted `known`: once is a record that was lost with its
    server, more is a fault, and the errand is `forsaken`: the record is left to its retention.
    """

    goal: RequestRecord
    known: RequestRecord | None = None
    doubtful: bool = False
    forsaken: bool = False
    num_surprises: int = 0

    @property
    def done(self) -> bool:
        """Nothing is left to write, for now or for good."""
        return self.forsaken or (self.known is not None and ledger.same_place(self.known, self.goal))

    async def run(self, store: RequestStore) -> None:
        """Tries to bring the book to the goal; look at `done` afterwards.

        Raises `StateUnavailable` when the book does not answer; the errand can be run again then.
        """
        try:
            await self._bring(store)
            self.num_surprises = 0
        except StateUnavailable:
            self.doubtful = True
            raise
        except Superseded as error:
            self.forsake(error)
        except Broken as error:
            self.doubtful = True
            self.num_surprises += 1
            if self.num_surprises >= _MAX_SURPRISES:
                self.forsake(error)

    def forsake(self, reason: Exception) -> None:
        """Gives the record up."""
        self.forsaken = True
        _log.warning("request_record_forsaken", request_id=self.goal.id, reason=str(reason))

    async def _bring(self, store: RequestStore) -> None:
        """One look, if need be, then event after event. The goal may move on meanwhile: this run keeps to the one
        of after the look, which is no older than what the look may enter."""
        held = await self._held(store)
        goal = self.goal
        events = ledger.route(held, goal)
        if events is None:
            raise Superseded(f"no way from {held.state.value}/{held.attempt} to {goal.state.value}/{goal.attempt}")
        for num_left, event in zip(reversed(range(len(events))), events, strict=True):
            id = AttemptId(goal.id, held.attempt + ledger.num_opened(event))
            code = "" if num_left else goal.failure_code
            await store.advance(id, event, num_emitted=goal.num_emitted, failure_code=code)
            held = ledger.moved(held, id.attempt, event, num_emitted=goal.num_emitted, failure_code=code)
            self.known = held

    async def _held(self, store: RequestStore) -> RequestRecord:
        """What the book holds now; a request that it does not know is entered, under the goal's attempt."""
        if self.doubtful:
            self.known = await store.get(self.goal.id)
        if self.known is None:
            first = replace(self.goal, state=RequestState.RECEIVED, num_emitted=0, failure_code="")
            self.known = first if await store.create(first) else await store.get(first.id)
        if self.known is None:
            raise Broken(f"request {self.goal.id} vanished between two calls")
        if self.known.router_id != self.goal.router_id:
            raise Superseded(f"the id belongs to router {self.known.router_id}")
        self.doubtful = False
        return self.known
