"""Protocol bugs to be planted in a simulated cluster. Each is a real class with one rule taken out."""

from __future__ import annotations

from baton.domain.handoff import LandingEvent, SourceEvent, advance_landing
from baton.domain.ids import AttemptId
from baton.engine.batch import Batch, StepOutput
from baton.kv.pages import Hold
from services.decode.effects import DecodeEffect, EmitTokens
from services.decode.landing import Landing, LandingBook, SealInfo
from services.decode.scheduler import DecodeScheduler
from services.prefill.offers import OfferBook, _Offer


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
