"""Writes the router's calls, jobs and tokens into the book behind its back: nothing in a token's path waits for Redis.

The router notes what happens (`open_call`, `create`, `advance`, `write_tokens`, ...) and goes on at once. One task
brings the book there: calls and jobs in the order in which they changed, one at a time, and between them the tokens of
all jobs together, every `journal_interval_s`. What is remembered of a job is its goal and its tokens, not its history:
while the book is slow or away, steps melt into the latest one, so the backlog is bounded by the live jobs plus
`max_finished` ended ones. When the book is back, every errand asks where its record stands and walks the table from
there; records and journals that were lost are written again. Uses the contracts of `base` only; knows no Redis.

Order: a call is opened before its jobs' tokens are written; a job ends after its last token, and so does its call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

from baton.domain.errors import Broken
from baton.domain.ids import AttemptId, RequestId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.request import FinishReason, OutputToken
from baton.state import ledger
from baton.state.backlog import Backlog
from baton.state.base import CallRecord, CallStatus, RequestRecord, StateBook
from baton.state.call_errand import CallErrand
from baton.state.errand import Errand
from baton.state.pace import Pace
from baton.state.scribe import Scribe

MAX_BODY_BYTES = 256 * 1024
"""A call with a larger body is not written."""

MAX_WAITING_TOKENS = 64
"""A job with so many unwritten tokens has its journal written before its time."""

MAX_FINISHED_TOKENS = 1 << 20
"""Most tokens of ended jobs that are kept for a book that is away."""


class BookWriter:
    """The router's pen. One event loop; what notes something never waits and never fails for the book's sake."""

    def __init__(
        self,
        book: StateBook,
        *,
        on_degraded: Callable[[bool], None] = lambda degraded: None,
        on_superseded: Callable[[AttemptId], None] = lambda id: None,
        max_finished: int = 10_000,
        retry_s: float = 0.5,
        idle_ping_s: float = 1.0,
        journal_interval_s: float = 0.05,
    ) -> None:
        """`on_degraded` hears True when the book stops answering or an ended job is lost to the backlog's bound, and
        False once everything is written again. `on_superseded` hears, once, of a live job that the book says somebody
        else has carried on: nothing more is written of it. `idle_ping_s`: with nothing to write, how often the book is
        asked whether it is there. The book stays the caller's to close."""
        self._backlog = Backlog(max_finished, MAX_FINISHED_TOKENS)
        self._scribe = Scribe(
            book,
            self._backlog,
            Pace(journal_interval_s),
            on_degraded=on_degraded,
            on_superseded=on_superseded,
            retry_s=retry_s,
            idle_ping_s=idle_ping_s,
        )

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def degraded(self) -> bool:
        """Whether the book lags behind for want of an answer: new requests are then not durable."""
        return self._scribe.degraded

    @property
    def num_pending(self) -> int:
        """Calls and jobs whose last change, or last token, is not in the book yet."""
        return self._backlog.num_pending

    @property
    def num_lost(self) -> int:
        """Ended calls and jobs that were dropped because the backlog was full."""
        return self._scribe.num_lost

    def open_call(self, record: CallRecord) -> asyncio.Event | None:
        """Notes a new OPEN call, before its jobs are created; the event is set when the book has it. None when its body
        is too large to be written: neither the call nor its jobs' tokens are. Raises `Broken` when it is not OPEN or
        its id is in use here."""
        ledger.check_opened(record)
        errand = CallErrand(record)
        return errand.entered if self._add_call(errand) else None

    def adopt_call(self, record: CallRecord) -> None:
        """Notes a call that this owner has claimed: the book has it just as `record` says."""
        ledger.check_opened(record)
        self._add_call(CallErrand(record, held=CallStatus.OPEN))

    def end_call(self, id: RequestId, status: CallStatus) -> None:
        """Notes that a call is ABANDONED or ENDED; no effect when it is not open here."""
        ledger.check_ended(id, status)
        call = self._backlog.call(id)
        if call is not None and not call.ended:
            call.goal = replace(call.goal, status=status)
            self._note(call)

    def writes_call(self, id: RequestId) -> bool:
        """Whether the call is open here, or its end is not in the book yet."""
        return self._backlog.call(id) is not None

    def create(self, record: RequestRecord) -> None:
        """Notes a new job. Raises `Broken` unless it is in state RECEIVED and its id is not in use here."""
        ledger.check_new(record)
        if self._backlog.job(record.id) is not None:
            raise Broken(f"request {record.id} is already being written")
        self._backlog.add_job(Errand(record))
        self._scribe.noted()

    def adopt(self, record: RequestRecord) -> None:
        """Notes a job that is carried on: the book has it QUEUED under `record.attempt`, as the claim left it.

        Write what earlier attempts emitted first (`write_tokens` from index 0): the book keeps what it has, and a
        journal that is lost can be written again. Raises `Broken` in another state, or when the job is live here.
        """
        earlier = self._backlog.job(record.id)
        if record.state is not RequestState.QUEUED or not _over(earlier):
            raise Broken(f"request {record.id} cannot be carried on: it is {record.state.value}, or still live here")
        self._backlog.add_job(Errand(record, known=record))
        self._scribe.noted()

    def settle(self, record: RequestRecord, end: RequestState, *, num_emitted: int, failure_code: str = "") -> None:
        """Notes the end of a job whose last owner died before it had told the book, which has it as `record` says.

        No effect when there is no way from there to `end`, or when the job is live here.
        """
        goal = replace(record, state=end, num_emitted=num_emitted, failure_code=failure_code)
        if ledger.route(record, goal) and _over(self._backlog.job(record.id)):
            self._backlog.add_job(Errand(goal, known=record))
            self._scribe.noted()

    def advance(
        self,
        id: AttemptId,
        event: RequestEvent,
        *,
        num_emitted: int = 0,
        failure_code: str = "",
        fingerprint: str = "",
    ) -> RequestState:
        """Notes a step and returns the new state; the errors are those of `RequestStore.advance`."""
        errand = self._backlog.job(id.request_id)
        if errand is None or errand.ended:
            raise Broken(f"{event.value} of {id}: no such request here, or it has ended")
        news = {"failure_code": failure_code, "fingerprint": fingerprint}
        errand.aim(ledger.moved(errand.goal, id.attempt, event, num_emitted=num_emitted, **news))
        self._note(errand)
        return errand.goal.state

    def write_tokens(
        self,
        id: AttemptId,
        tokens: Sequence[OutputToken],
        *,
        num_cached_tokens: int,
        finish: FinishReason | None = None,
        failure_code: str = "",
    ) -> None:
        """Notes what a live job has emitted, in order; `finish` or `failure_code` end its journal. Tokens it has seen
        are skipped. To be called before the `advance` that ends the job; no effect afterwards. Raises `Broken` when
        a token is missing."""
        errand = self._backlog.job(id.request_id)
        if errand is None or errand.ended:
            return
        journal = errand.journal
        was_due = journal.due
        journal.add(tokens, num_cached_tokens=num_cached_tokens, finish=finish, failure_code=failure_code)
        if not was_due and journal.due:
            self._note(errand)
        if journal.num_waiting >= MAX_WAITING_TOKENS:
            self._scribe.full()

    def doubt(self) -> None:
        """Our lease had ended meanwhile: the book is asked of everything live whether it is ours still, so that
        `on_superseded` hears of a job that has nothing to write, too."""
        self._backlog.doubt_live()
        self._scribe.noted()

    def start(self) -> None:
        """Starts the task, inside a running loop; idempotent."""
        self._scribe.start()

    async def flush(self, timeout_s: float) -> int:
        """Waits until everything is written, for at most `timeout_s`; returns how many calls and jobs are not."""
        await self._scribe.flush(timeout_s)
        return self.num_pending

    async def close(self, timeout_s: float = 2.0) -> int:
        """Flushes and stops; returns how many calls and jobs stay unwritten. Idempotent."""
        await self._scribe.close(timeout_s)
        return self.num_pending

    def _add_call(self, call: CallErrand) -> bool:
        earlier = self._backlog.call(call.goal.id)
        if not _over(earlier):
            raise Broken(f"call {call.goal.id} is already being written")
        call.trust.forsaken = len(call.goal.body) > MAX_BODY_BYTES
        self._backlog.add_call(call)
        self._scribe.noted()
        return not call.trust.forsaken

    def _note(self, errand: Errand | CallErrand) -> None:
        self._backlog.note(errand)
        self._scribe.noted()


def _over(errand: Errand | CallErrand | None) -> bool:
    """Whether nothing is written of it any more, or nothing new: its id may be used again."""
    return errand is None or errand.ended or errand.trust.forsaken
