"""One job's way into the book: where it has got to, what the book is known to hold, and the steps in between.

`BookWriter` runs errands, one at a time; an errand knows nothing of queues, outages or time. A job's end is written
only after its journal, so that whoever finds it ended finds all of its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from baton.domain.errors import Broken, Superseded
from baton.domain.ids import AttemptId
from baton.domain.lifecycle import RequestState
from baton.state import ledger
from baton.state.base import JournalEntry, RequestRecord, RequestStore
from baton.state.call_errand import CallErrand
from baton.state.journal import Journal
from baton.state.trust import Trust


@dataclass(slots=True, eq=False)
class Errand:
    """`known` is what the book holds, as far as we know; `waypoint` is where the job was when it ended.

    `told`: the router has heard that somebody else carries the job on.
    """

    goal: RequestRecord
    known: RequestRecord | None = None
    waypoint: RequestRecord | None = None
    call: CallErrand | None = None
    journal: Journal = field(default_factory=Journal)
    trust: Trust = field(default_factory=Trust)
    told: bool = False

    @property
    def ended(self) -> bool:
        """Nothing more will be asked of it."""
        return self.goal.state.terminal

    @property
    def done(self) -> bool:
        """Nothing is left to write, until the next change or until its journal is written."""
        at_target = self.known is not None and ledger.same_place(self.known, self._target)
        return self.trust.forsaken or (at_target and not self.trust.doubtful)

    @property
    def at_rest(self) -> bool:
        """Nothing is left to write, the journal included."""
        return self.done and not self.journal.due

    @property
    def forsaken(self) -> bool:
        return self.trust.forsaken

    def aim(self, goal: RequestRecord) -> None:
        """The job has moved on."""
        if goal.state.terminal:
            self.waypoint = self.goal
        self.goal = goal

    async def run(self, store: RequestStore) -> None:
        """Tries to bring the book to the goal; look at `done` afterwards.

        Raises `StateUnavailable` when the book does not answer; the errand can be run again then.
        """
        await self.trust.keep(self.goal.id, self._bring(store))

    def entry(self, max_tokens: int) -> JournalEntry | None:
        """What to journal next, under the attempt that the book is known to hold; None while it may not be written:
        the book lacks the record, the call, or the fingerprint of those who made the tokens."""
        opened = self.call is None or self.call.opened
        if self.known is None or self.trust.doubtful or not opened or not self.journal.due:
            return None
        if self.goal.fingerprint not in ("", self.known.fingerprint) and not ledger.same_place(self.known, self.goal):
            return None
        return self.journal.entry(AttemptId(self.goal.id, self.known.attempt), max_tokens)

    @property
    def _target(self) -> RequestRecord:
        return self.waypoint if self.waypoint is not None and self.journal.due else self.goal

    async def _bring(self, store: RequestStore) -> None:
        """One look, if need be, then all events in one step. The goal may move on meanwhile: this run keeps to the one
        of after the look, which is no older than what the look may enter."""
        held = await self._held(store)
        goal = self._target
        events = ledger.route(held, goal)
        if events is None:
            raise Superseded(f"no way from {held.state.value}/{held.attempt} to {goal.state.value}/{goal.attempt}")
        if events:
            first = AttemptId(goal.id, held.attempt + ledger.num_opened(events[0]))
            fingerprint = goal.fingerprint if goal.fingerprint != held.fingerprint else ""
            await store.advance(
                first,
                *events,
                num_emitted=goal.num_emitted,
                failure_code=goal.failure_code,
                fingerprint=fingerprint,
            )
            self.known = replace(
                held,
                attempt=goal.attempt,
                state=goal.state,
                num_emitted=max(held.num_emitted, goal.num_emitted),
                failure_code=goal.failure_code,
                fingerprint=goal.fingerprint or held.fingerprint,
            )

    async def _held(self, store: RequestStore) -> RequestRecord:
        """What the book holds now; a request that it does not know is entered, under the goal's attempt."""
        if self.trust.doubtful:
            self.known = await store.get(self.goal.id)
        if self.known is None:
            first = replace(self.goal, state=RequestState.RECEIVED, num_emitted=0, failure_code="")
            self.known = first if await store.create(first) else await store.get(first.id)
        if self.known is None:
            raise Broken(f"request {self.goal.id} vanished between two calls")
        if self.known.router_id != self.goal.router_id:
            raise Superseded(f"the id belongs to router {self.known.router_id}")
        self.trust.doubtful = False
        return self.known
