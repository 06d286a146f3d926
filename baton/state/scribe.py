"""The task that brings the book to where the backlog says: errands one at a time, all journals in one round trip.

Owned by `BookWriter`, which fills the backlog. One event loop; knows no Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from baton.domain.ids import AttemptId
from baton.state.backlog import Backlog, Batch
from baton.state.base import JournalEntry, StateBook, StateUnavailable, Written
from baton.state.bell import rang_within
from baton.state.call_errand import CallErrand
from baton.state.errand import Errand
from baton.state.pace import Pace

_log = structlog.get_logger(__name__)
_MIN_WAIT_S = 0.001


class Scribe:
    """Writes while there is something to write; pauses while the book is away."""

    def __init__(
        self,
        book: StateBook,
        backlog: Backlog,
        pace: Pace,
        *,
        on_degraded: Callable[[bool], None],
        on_superseded: Callable[[AttemptId], None],
        retry_s: float,
        idle_ping_s: float,
    ) -> None:
        """What these mean is said at `BookWriter`."""
        self._book = book
        self._backlog = backlog
        self._pace = pace
        self._on_degraded = on_degraded
        self._on_superseded = on_superseded
        self._retry_s = retry_s
        self._idle_ping_s = idle_ping_s
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._hurry = asyncio.Event()
        self._settled.set()
        self._task: asyncio.Task[None] | None = None
        self._full = False
        self._num_flushing = 0
        self.degraded = False
        self.num_lost = 0

    def noted(self) -> None:
        """The backlog has changed."""
        while self._backlog.overfull:
            id = self._backlog.lose_oldest()
            self.num_lost += 1
            self._set_degraded(True, f"too many ended requests wait to be written: {id} is lost")
        if not self._backlog.empty:
            self._settled.clear()
        if self._backlog.next_errand() is not None or self._backlog.num_due == 1:
            self._wake.set()  # with more journals due than one, it already waits for their time

    def full(self) -> None:
        """Some job has much to write: do not wait for the interval."""
        if not self._full:
            self._full = True
            self._wake.set()

    def start(self) -> None:
        """Starts the task, inside a running loop; idempotent."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="state-writer")

    async def flush(self, timeout_s: float) -> None:
        """Returns when everything is written, or `timeout_s` is over."""
        self._num_flushing += 1
        self._hurry.set()
        self._wake.set()
        try:
            await rang_within(self._settled, timeout_s)
        finally:
            self._num_flushing -= 1

    async def close(self, timeout_s: float) -> None:
        """Flushes and stops the task; idempotent."""
        if self._task is not None:
            await self.flush(timeout_s)
            self._task.cancel()
            await asyncio.wait([self._task], timeout=timeout_s)

    async def _run(self) -> None:
        """The task's root."""
        while True:
            try:
                await self._work()
            except StateUnavailable as error:
                self._set_degraded(True, str(error))
                await self._pause()

    async def _work(self) -> None:
        """One piece of work: journals when it is their time, else an errand, else a wait."""
        wait_s = self._pace.wait_s(_now(), hurry=self._full or self._num_flushing > 0)
        errand = self._backlog.next_errand()
        if self._backlog.num_due and wait_s == 0.0 and (batch := self._backlog.batch()).entries:
            await self._write(batch)
        elif errand is not None:
            await self._run_errand(errand)
        else:
            await self._idle(wait_s)

    async def _run_errand(self, errand: Errand | CallErrand) -> None:
        """Takes an errand as far as it goes. One that fails in a way nobody foresaw must not silence the others."""
        try:
            await errand.run(self._book)
        except StateUnavailable:
            raise
        except Exception as error:  # the root of this errand: it ends here, forsaken
            errand.trust.forsake(errand.goal.id, error)
        if errand.trust.forsaken:
            self._forsaken(errand)
        self._backlog.settle(errand)
        self._settle(complete=self._backlog.num_due == 0)

    async def _write(self, batch: Batch) -> None:
        began = _now()
        self._full = False
        try:
            outcomes = await self._book.write_journal(batch.entries)
        except StateUnavailable:
            raise
        except Exception as error:  # the root of these entries: they are not tried again
            for errand in batch.errands:
                self._give_up(errand, error)
        else:
            for errand, entry, outcome in zip(batch.errands, batch.entries, outcomes, strict=True):
                self._learn(errand, entry, outcome)
        finally:
            self._pace.took(began, _now())
        self._settle(complete=batch.complete)

    def _learn(self, errand: Errand, entry: JournalEntry, outcome: Written) -> None:
        match outcome:
            case Written.DONE:
                self._backlog.written(errand, entry)
            case Written.SUPERSEDED:
                self._supersede(errand)
            case Written.GAP if errand.journal.lost():
                self._backlog.doubt(errand)
            case Written.GAP:
                self._give_up(errand, LookupError("the journal is lost, and its first tokens are not known here"))

    def _forsaken(self, errand: Errand | CallErrand) -> None:
        """What follows from a record that is given up."""
        jobs = [errand] if isinstance(errand, Errand) else self._backlog.jobs_of(errand)
        for job in jobs:
            if errand.trust.superseded:
                self._supersede(job)
            else:
                self._backlog.close(job)

    def _supersede(self, job: Errand) -> None:
        """Somebody else carries the job on."""
        job.trust.forsaken = True
        self._backlog.close(job)
        told, job.told = job.told, True
        if not (told or job.ended):
            self._on_superseded(AttemptId(job.goal.id, job.goal.attempt))

    def _give_up(self, errand: Errand, reason: Exception) -> None:
        _log.warning("journal_given_up", request_id=errand.goal.id, reason=str(reason))
        self._backlog.close(errand)

    def _settle(self, *, complete: bool) -> None:
        """After a success; `complete`: all that was due when it began has been written."""
        if self._backlog.empty:
            self._settled.set()
        if complete and self._backlog.next_errand() is None:
            self._set_degraded(False, "everything is written")

    async def _idle(self, wait_s: float) -> None:
        """Waits for work; with none for a while, asks whether the book is there."""
        self._wake.clear()
        if self._backlog.num_due:
            await rang_within(self._wake, max(wait_s, _MIN_WAIT_S))
        elif not await rang_within(self._wake, self._idle_ping_s):
            await self._book.ping()
            self._settle(complete=self._backlog.num_due == 0)

    async def _pause(self) -> None:
        """Lets an absent book be for a while; a flush cuts it short once."""
        await rang_within(self._hurry, self._retry_s)
        self._hurry.clear()

    def _set_degraded(self, degraded: bool, reason: str) -> None:
        if degraded != self.degraded:
            self.degraded = degraded
            event = "state_degraded" if degraded else "state_restored"
            _log.warning(event, reason=reason, num_pending=self._backlog.num_pending)
            if degraded:
                self._backlog.doubt_live()
            self._on_degraded(degraded)


def _now() -> float:
    return asyncio.get_running_loop().time()
