"""One call's way into the book: opened before its jobs' tokens are written, ended after them.

`BookWriter` runs it as it runs the errands of jobs; knows nothing of queues, outages or time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from baton.domain.errors import Broken, Superseded
from baton.domain.ids import RequestId
from baton.state.base import CallRecord, CallStatus, CallStore
from baton.state.journal import Journal
from baton.state.trust import Trust


@dataclass(slots=True, eq=False)
class CallErrand:
    """`held` is the status that the book has under our epoch, as far as we know; None: it has no such call.

    `entered` is set for good when the book has had the call once.
    """

    goal: CallRecord
    held: CallStatus | None = None
    journals: dict[RequestId, Journal] = field(default_factory=dict)
    trust: Trust = field(default_factory=Trust)
    entered: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        """Nothing more will be asked of it."""
        return self.goal.status is not CallStatus.OPEN

    @property
    def opened(self) -> bool:
        """The book has it."""
        return self.held is not None and not self.trust.doubtful

    @property
    def done(self) -> bool:
        """Nothing is left to write, until the next change or until a journal is written."""
        return self.trust.forsaken or self._refused or (self.held is self._target and not self.trust.doubtful)

    @property
    def at_rest(self) -> bool:
        """Nothing is left to write, journals included."""
        return self.done and (self.trust.forsaken or self._target is self.goal.status)

    async def run(self, store: CallStore) -> None:
        """Tries to bring the book to the goal; look at `done` afterwards. Raises `StateUnavailable`."""
        await self.trust.keep(self.goal.id, self._bring(store))

    @property
    def _refused(self) -> bool:
        """It ended before any of its jobs began, and the book has never heard of it."""
        untouched = self.held is None and not self.trust.doubtful and not self.journals
        return self.ended and untouched and bool(self.goal.jobs)

    @property
    def _target(self) -> CallStatus:
        """A call does not end before its tokens are written."""
        waits = any(journal.due for journal in self.journals.values())
        return CallStatus.OPEN if waits else self.goal.status

    async def _bring(self, store: CallStore) -> None:
        goal = self.goal
        if self.trust.doubtful or self.held is None:
            self.held = await self._opened(store)
            self.trust.doubtful = False
        self.entered.set()
        target = self._target
        if target is not CallStatus.OPEN and self.held is not target:
            if not await store.end_call(goal.id, goal.epoch, target):
                raise Broken(f"call {goal.id} has vanished, or somebody has claimed it")
            self.held = target

    async def _opened(self, store: CallStore) -> CallStatus:
        """The call's status in the book, which is entered there if need be."""
        goal = self.goal
        if self.held is None and await store.open_call(replace(goal, status=CallStatus.OPEN)):
            return CallStatus.OPEN
        found = await store.get_call(goal.id)
        if found is None:
            self.held = None
            raise Broken(f"call {goal.id} has vanished")
        if (found.owner, found.epoch) != (goal.owner, goal.epoch):
            raise Superseded(f"call {goal.id} belongs to {found.owner}, epoch {found.epoch}")
        return found.status
