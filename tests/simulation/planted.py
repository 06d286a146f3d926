"""Protocol bugs to be planted in a simulated cluster. Each is a real class with one rule taken out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import grpc

from baton.domain.errors import WorkerLost
from baton.domain.handoff import LandingEvent, SourceEvent, advance_landing
from baton.domain.ids import AttemptId, OwnerId, RequestId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.request import EngineRequest
from baton.engine import observe
from baton.engine.batch import Batch, StepOutput
from baton.kv.pages import Hold
from baton.rpc import codec
from baton.rpc.gen import handoff_pb2
from baton.state.base import CallRecord, CallStatus, JournalEntry, JournalPart, Written
from baton.state.memory import MemoryBook
from baton.state.memory_calls import MemoryCalls
from baton.state.ownership import Ownership
from services.decode.boarding import SealInfo
from services.decode.commands import LeasesRenewed
from services.decode.effects import DecodeEffect, EmitTokens
from services.decode.handoffs import Handoffs
from services.decode.landing import Landing, LandingBook
from services.decode.links import Link
from services.decode.scheduler import DecodeScheduler
from services.prefill.offers import OfferBook, _Offer
from services.router.dispatch.booking import Booker, Booking
from services.router.dispatch.dispatcher import TokenDispatcher
from services.router.dispatch.journey import Journey
from services.router.dispatch.placement import Avoided
from services.router.generation import GenerationChunk


class UnpinsBeforeTheCommit(OfferBook):
    """Decode is still reading when prefill gives the pages away."""

    def seal(self, id: AttemptId) -> None:
        super().seal(id)
        offer = self._open[id]
        self._pool.drop(offer.pages, Hold.PINNED)
        offer.pages = []


class NeverUnpins(OfferBook):
    """Committed pages stay pinned for ever."""

    def _end(self, offer: _Offer, event: SourceEvent) -> None:
        if event is SourceEvent.COMMIT:
            offer.pages = []
        super()._end(offer, event)


class TakesOlderAttempts(OfferBook):
    """Has no fence: a message that comes late starts an attempt that is over."""

    def open(self, id: AttemptId) -> AttemptId | None:
        if id in self._open:
            return super().open(id)
        self._newest[id.request_id] = 0
        return super().open(id)


class CommitsBeforeTheReadsAreOver(LandingBook):
    """Boards while reads are in flight."""

    def ready(self, id: AttemptId) -> bool:
        landing = self._landings.get(id)
        return bool(landing and landing.seal and landing.request)


class CommitsBeforeAllIsAnnounced(LandingBook):
    """Takes a seal for the end, whatever has been published."""

    def sealed(self, id: AttemptId, seal: SealInfo, now: float) -> None:
        landing = self._landings.get(id)
        if landing is not None:
            landing.waiting.clear()
        super().sealed(id, seal, now)


class FreesBeforeTheReadsAreOver(LandingBook):
    """Gives pages back although a read into them may still land."""

    def _reap(self, landing: Landing) -> None:
        if landing in self._draining:
            landing.state = advance_landing(landing.state, LandingEvent.DRAINED)
            landing.table.release()
            self._draining.remove(landing)


class PromisesTheSamePagesTwice(LandingBook):
    """Forgets what it has promised."""

    @property
    def num_promisable(self) -> int:
        return self._cache.num_available


class EmitsTwice(DecodeScheduler):
    """Says every third token of a sequence twice."""

    def commit(self, batch: Batch, output: StepOutput, now: float) -> list[DecodeEffect]:
        effects: list[DecodeEffect] = []
        for effect in super().commit(batch, output, now):
            effects.append(effect)
            if isinstance(effect, EmitTokens) and effect.finish is None and effect.tokens[0].index % 3 == 2:
                effects.append(effect)
        return effects


class _ClaimedByWhoeverAsks(MemoryCalls):
    def claim(self, id: RequestId, epoch: int, owner: OwnerId) -> CallRecord | None:
        call = self.find(id)
        return super().claim(id, call.epoch if call is not None else epoch, owner)


class ClaimsWithoutComparing(MemoryBook):
    """Gives a call to whoever claims it, whatever epoch he has seen."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._calls = _ClaimedByWhoeverAsks(self._requests, self._options, self._clock)


class JournalsWithoutFencing(MemoryBook):
    """Writes down what any attempt says."""

    async def write_journal(self, entries: Sequence[JournalEntry]) -> list[Written]:
        records = [await self.get(entry.id.request_id) for entry in entries]
        newest = [
            replace(entry, id=AttemptId(record.id, max(record.attempt, entry.id.attempt))) if record else entry
            for entry, record in zip(entries, records, strict=True)
        ]
        return await super().write_journal(newest)


class ReadsOneTooFar(MemoryBook):
    """Goes on with a journal one token after the right one."""

    async def read_journal(self, id: RequestId, start: int, wait_s: float) -> JournalPart:
        return await super().read_journal(id, start + 1 if start else 0, wait_s)


class ForgetsToEndCalls(MemoryBook):
    """A call that has ended stays open."""

    async def end_call(self, id: RequestId, epoch: int, status: CallStatus) -> bool:
        return True


class _HoldsOnce:
    """A book in which an owner's lease is taken, and never renewed."""

    def __init__(self, book: Any) -> None:
        self._book = book
        self._held = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._book, name)

    async def hold(self, owner: OwnerId) -> None:
        if not self._held:
            self._held = True
            await self._book.hold(owner)


class NeverRenewsItsLease(Ownership):
    """Takes its lease at the start, and leaves it at that."""

    def __init__(self, book: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(_HoldsOnce(book), *args, **kwargs)


class DropsWhoWaits(TokenDispatcher):
    """A drain ends those that have not been called yet."""

    async def _attempts(self, journey: Journey) -> AsyncGenerator[GenerationChunk, None]:
        if self.draining:
            raise WorkerLost("it was still waiting")
        async with aclosing(super()._attempts(journey)) as chunks:
            async for chunk in chunks:
                yield chunk


class _AsksAnybody(Booker):
    async def book(
        self, request: EngineRequest, avoided: Avoided, deadline: float, fingerprint: str = ""
    ) -> Booking | None:
        return await super().book(request, avoided, deadline)


class ForgetsThePin(TokenDispatcher):
    """Goes on with whatever workers there are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._booker = _AsksAnybody(self._fleet, self._aborts, self._limits.booking)


class KeepsNoFingerprint(MemoryBook):
    """Whoever takes a request over does not learn which model began it."""

    async def advance(self, id: AttemptId, *events: RequestEvent, **news: Any) -> RequestState:
        return await super().advance(id, *events, **{**news, "fingerprint": ""})


class MeasuresFromTheReply(Handoffs):
    """Takes a lease to begin when its renewal is answered."""

    async def _renew(self, link: Link, ids: list[AttemptId]) -> None:
        incarnation = link.record.prefill_incarnation
        names = [codec.encode_id(id) for id in ids]
        request = handoff_pb2.RenewRequest(worker_id=link.record.prefill_id, incarnation=incarnation, ids=names)
        with suppress(grpc.aio.AioRpcError):
            reply = await self._links.stub(link).Renew(request)
            if reply.HasField("lease_s"):
                self._mailbox.post(LeasesRenewed(tuple(ids), observe.Clock() + reply.lease_s))
