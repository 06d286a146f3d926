"""Carries calls on that this router has claimed: whoever answered them is gone, or their client had left and is back.

`app` hands it orphans, `follower` what was abandoned. Jobs are built again from the book (what was posted, the attempt
that the claim has opened, the tokens that are journalled) and run as ever, with nobody listening: a stop string still
ends its choice, and whoever wants the answer follows the journal. A call that runs for a client that came back is
aborted when it hangs up again; one taken over without a client runs to its end, which its deadline bounds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from baton.domain.errors import BatonError, Cancelled, ContextOverflow, Refused, Superseded, WorkerLost, from_code
from baton.domain.ids import RequestId
from baton.domain.lifecycle import RequestState
from baton.state.base import CallRecord, CallStatus, CallStore, JournalPart, RequestRecord, StateUnavailable
from baton.state.ledger import first_attempt
from baton.telemetry.metrics import CALLS_CARRIED_TOTAL
from services.router.api.calls import ValidCall
from services.router.api.connection import end
from services.router.api.custody import Charge, Custody
from services.router.api.fence import Fence
from services.router.api.reader import CallReader, posting_of
from services.router.api.relay import Relay, admit_all
from services.router.generation import Dispatcher, GenerationJob
from services.router.text.model import TextModel

SILENCE_S = 60.0
"""How long one wait for an event takes at most; nobody is told of a silence."""

log = structlog.get_logger(__name__)


class CarryStore(CallStore, Protocol):
    """The part of the book that is read here."""

    async def get(self, id: RequestId) -> RequestRecord | None: ...


@dataclass(frozen=True, slots=True)
class CarryContext:
    """What calls are carried on with."""

    store: CarryStore
    reader: CallReader
    dispatcher: Dispatcher
    text: TextModel
    custody: Custody
    fence: Fence


@dataclass(slots=True)
class _Carried:
    """One call that is carried on. `forsaken`: its client has gone again. `successor`: the same call, claimed once more
    meanwhile under a later epoch, which has fenced this one off."""

    task: asyncio.Task[BaseException | None]
    forsaken: bool = False
    successor: tuple[CallRecord, str] | None = None  # and its cause


@dataclass(frozen=True, slots=True)
class _Standing:
    """How a job stands in the book. The claim has fenced off the attempt of its record."""

    job: GenerationJob
    journal: JournalPart
    record: RequestRecord | None

    @property
    def failure_code(self) -> str:
        """What it has failed with, "" if it has not."""
        if self.journal.finish is not None:
            return ""
        if self.journal.failure_code:
            return self.journal.failure_code
        if self.record is None or not self.record.state.terminal:
            return ""
        return self.record.failure_code or WorkerLost.code  # its journal is lost, and nobody will write it

    def is_of_later_owner(self, epoch: int) -> bool:
        """Whether its call has been claimed again since the claim that made `epoch`."""
        return self.record is not None and self.record.attempt >= first_attempt(epoch + 1)

    def carried_on(self, epoch: int) -> GenerationJob:
        """A job that is not in the book yet may run all the same, so its attempts are fenced off by their numbers."""
        attempt = first_attempt(epoch) if self.record is None else self.record.attempt
        return replace(
            self.job,
            attempt=attempt,
            emitted=self.journal.tokens,
            num_cached_tokens=self.journal.num_cached_tokens,
            fingerprint="" if self.record is None else self.record.fingerprint,
        )


class Carrier:
    """Owned by one event loop; `close` it before what it runs on."""

    def __init__(self, context: CarryContext) -> None:
        self._context = context
        self._carried: dict[RequestId, _Carried] = {}
        self._claims: dict[RequestId, asyncio.Task[None]] = {}
        self._listeners: Counter[RequestId] = Counter()
        self._draining = False

    @property
    def draining(self) -> bool:
        """Whether no further call is taken."""
        return self._draining

    async def look(self, record: CallRecord) -> None:
        """A client follows this call, and the book has it so. If nobody answers it, it is claimed and carried on here:
        it was abandoned, or it is ours and we do not know it (the answer to our claim was lost). No effect if somebody
        else is quicker, or while this router drains. Raises `StateUnavailable`.
        """
        custody = self._context.custody
        forgotten = record.owner == custody.owner and not custody.holds(record.id)
        unattended = record.status is CallStatus.ABANDONED or (record.status is CallStatus.OPEN and forgotten)
        if self._draining or not unattended or record.id in self._carried:
            return
        if record.id not in self._claims:
            self._claims[record.id] = asyncio.create_task(self._claim(record), name=f"claim-{record.id}")
        await asyncio.shield(self._claims[record.id])  # who claims must also carry, even if nobody waits any more

    async def take(self, record: CallRecord) -> None:
        """An orphan that was claimed for this router; returns at once."""
        self._begin(record, "orphan")

    def attend(self, id: RequestId) -> None:
        """A client follows the call."""
        self._listeners[id] += 1

    def leave(self, id: RequestId, *, satisfied: bool) -> None:
        """A client follows no longer. When the last one leaves unsatisfied, the call is not carried on either."""
        self._listeners[id] -= 1
        if self._listeners[id] == 0:
            del self._listeners[id]
            if not satisfied:
                self._forsake(id)

    def drain(self) -> None:
        """Takes no further call."""
        self._draining = True

    async def close(self) -> None:
        """Stops carrying; the calls stay open in the book, for the next router."""
        self._draining = True
        await end(self._claims.values())
        tasks = [carried.task for carried in self._carried.values()]
        for task in tasks:
            task.cancel()
        await end(tasks)

    async def _claim(self, record: CallRecord) -> None:
        try:
            claimed = await self._context.store.claim_call(record.id, record.epoch, self._context.custody.owner)
        finally:
            del self._claims[record.id]
        if claimed is not None:
            self._begin(claimed, "client")
            if not self._listeners[record.id]:
                self._forsake(record.id)

    def _begin(self, record: CallRecord, cause: str) -> None:
        if record.id in self._carried:
            self._carried[record.id].successor = record, cause
            return
        charge = self._context.custody.adopt(record)
        log.info("call_carried_on", request_id=record.id, epoch=record.epoch, cause=cause)
        CALLS_CARRIED_TOTAL.labels(cause).inc()
        task = asyncio.create_task(self._run(record), name=f"carry-{record.id}")
        task.add_done_callback(lambda done: self._ended(record.id, charge, done))
        self._carried[record.id] = _Carried(task)

    def _forsake(self, id: RequestId) -> None:
        carried = self._carried.get(id)
        if carried is not None:
            carried.forsaken = True
            carried.task.cancel()

    def _ended(self, id: RequestId, charge: Charge, task: asyncio.Task[BaseException | None]) -> None:
        carried = self._carried.pop(id)
        if not task.cancelled():
            charge.over(task.result())
        else:
            charge.over(Cancelled("its client went away again") if carried.forsaken else asyncio.CancelledError())
        if carried.successor is not None and not self._draining:  # otherwise nobody would ever end it
            self._begin(*carried.successor)
            if carried.forsaken:
                self._forsake(id)

    async def _run(self, record: CallRecord) -> BaseException | None:
        """The root of a carried call's task: how it ended."""
        try:
            await self._carry(record)
        except BatonError as failure:
            log.warning("carried_call_failed", request_id=record.id, code=failure.code, reason=str(failure))
            return failure
        except Exception as failure:
            log.exception("carried_call_failed", request_id=record.id)
            return failure
        return None

    async def _carry(self, record: CallRecord) -> None:
        context = self._context
        reading = await context.reader.read(posting_of(record))
        if reading.call.streaming is None and not self._listeners[record.id]:
            raise Cancelled("a client that wants its answer whole has asked again by now")
        call, unfinished = await self._rebuilt(reading.call, record.epoch)
        try:
            tickets = admit_all(context.dispatcher, call, unfinished)
        except ContextOverflow:
            raise
        except Refused as refusal:
            raise Cancelled(f"not taken at the door: {refusal}") from None
        relay = Relay(context.dispatcher, context.text, call, tickets)
        with context.fence.watching([call.jobs[choice] for choice in unfinished], relay.break_off):
            async with relay:
                while not relay.finished:
                    await relay.next(SILENCE_S)

    async def _rebuilt(self, call: ValidCall, epoch: int) -> tuple[ValidCall, list[int]]:
        """The call with its jobs as they stand, and the choices that have not finished. Raises the error that one has
        failed with: the call has failed then, and what has not ended of it is settled as failed, too. Raises
        `Superseded` when the call has another owner already."""
        try:
            standings = [await self._standing(job) for job in call.jobs]
        except StateUnavailable as error:
            raise Cancelled(f"the book went away again: {error}") from None
        if any(standing.is_of_later_owner(epoch) for standing in standings):
            raise Superseded(f"call {call.id} has been claimed once more")  # its attempts are not ours to use
        code = next((standing.failure_code for standing in standings if standing.failure_code), "")
        for standing in standings:
            self._settle(standing, code)
        if code:
            raise from_code(code, f"request {call.id} has failed before")
        unfinished = [choice for choice, standing in enumerate(standings) if standing.journal.finish is None]
        return replace(call, jobs=tuple(standing.carried_on(epoch) for standing in standings)), unfinished

    async def _standing(self, job: GenerationJob) -> _Standing:
        journal = await self._context.store.read_journal(job.id, 0, 0.0)
        return _Standing(job, journal, await self._context.store.get(job.id))

    def _settle(self, standing: _Standing, failure_code: str) -> None:
        """Writes down what the last owner did not come to: that a job has ended, by itself or with its call."""
        record, journal = standing.record, standing.journal
        if record is None or record.state.terminal:
            return
        if journal.finish is not None:
            self._context.custody.settle(record, RequestState.FINISHED, len(journal.tokens))
        elif failure_code:
            self._context.custody.settle(record, RequestState.FAILED, len(journal.tokens), failure_code)
