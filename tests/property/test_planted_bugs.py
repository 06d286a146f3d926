"""Proof that the state machines can fail: each bug here is planted in a subclass, and each must be found."""

from __future__ import annotations

import pytest
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from baton.domain.errors import BatonError
from baton.domain.ids import AttemptId
from baton.engine.batch import Batch, HostCopy, StepOutput
from baton.kv.pages import Hold
from services.decode.arrivals import Arrivals
from services.decode.boarding import SealInfo
from services.decode.effects import DecodeEffect
from services.decode.landing import LandingBook
from services.decode.scheduler import DecodeScheduler
from services.prefill.offers import OfferBook
from services.prefill.scheduler import PrefillEffect, PrefillScheduler, PublishChunk, _Prompt
from tests.property.decode_machine import DecodeMachine
from tests.property.prefill_machine import PrefillMachine
from tests.property.split_machine import SplitMachine
from tests.simulation.planted import FreesBeforeTheReadsAreOver, PromisesTheSamePagesTwice
from tests.worlds import UNSHRUNK


class UnpinsBeforeTheCommit(OfferBook):
    """Decode is still reading when prefill gives the pages away."""

    def seal(self, id: AttemptId) -> None:
        super().seal(id)
        offer = self._open[id]
        self._pool.drop(offer.pages, Hold.PINNED)
        offer.pages = []


class NeverUnpins(OfferBook):
    """Committed pages stay pinned for ever."""

    def commit(self, id: AttemptId) -> bool:
        if id in self._open:
            self._open[id].pages = []
        return super().commit(id)


class PinsOnlyWhatDecodeLacks(PrefillScheduler):
    """Pins a page and not the one before it: the eviction of that one would never end."""

    def _publish(self, prompt: _Prompt, now: float) -> list[PrefillEffect]:
        prompt.num_pinned = max(prompt.num_pinned, prompt.num_published)
        return super()._publish(prompt, now)


class PublishesUnfinishedPages(PrefillScheduler):
    """Announces the page that the next chunk will write."""

    def _publish(self, prompt: _Prompt, now: float) -> list[PrefillEffect]:
        effects = super()._publish(prompt, now)
        if prompt.num_left and len(prompt.table.pages) > prompt.num_published:
            page = prompt.table.pages[prompt.num_published]
            self._offers.publish(prompt.request.id, [page], now)
            effects.append(PublishChunk(prompt.request.id, prompt.num_published, (page,)))
            prompt.num_published += 1
            prompt.num_pinned += 1
        return effects


class CommitsBeforeAllIsRead(LandingBook):
    """Boards while reads are in flight."""

    def ready(self, id: AttemptId) -> bool:
        landing = self._landings.get(id)
        return bool(landing and landing.seal and landing.request)


class BoardsWhatWasNotAnnounced(LandingBook):
    """Takes a seal for the end, whatever has been published."""

    def sealed(self, id: AttemptId, seal: SealInfo, now: float) -> None:
        landing = self._landings.get(id)
        if landing is not None:
            landing.num_announced = self._num_prompt_pages(landing)
        super().sealed(id, seal, now)


class ForgetsAttempts(LandingBook):
    """No fence: an attempt that was given up may come back."""

    def fence(self, id: AttemptId) -> None:
        return


class LetsTwoAttemptsRun(Arrivals):
    """No fence: the older attempt goes on beside the newer."""

    def _end_older(self, id: AttemptId) -> list[DecodeEffect]:
        return []


class EmitsTwice(DecodeScheduler):
    """Says the last token of a step again."""

    def commit(self, batch: Batch, output: StepOutput, now: float) -> list[DecodeEffect]:
        effects = super().commit(batch, output, now)
        return [*effects, *effects[-1:]]


class ForgetsTheWayBack(DecodeScheduler):
    """A preempted row comes back to pages that hold something else."""

    def _resume(self, copies: list[HostCopy]) -> None:
        super()._resume([])


def planted(machine: type[RuleBasedStateMachine], **replacements: object) -> type[RuleBasedStateMachine]:
    return type(f"Broken{machine.__name__}", (machine,), replacements)


@pytest.mark.parametrize(
    "machine",
    [
        planted(PrefillMachine, offer_book=UnpinsBeforeTheCommit),
        planted(SplitMachine, offer_book=UnpinsBeforeTheCommit, may_check_digests=False),
        planted(PrefillMachine, offer_book=NeverUnpins),
        planted(PrefillMachine, prefill_scheduler=PinsOnlyWhatDecodeLacks),
        planted(PrefillMachine, prefill_scheduler=PublishesUnfinishedPages),
        planted(DecodeMachine, landing_book=CommitsBeforeAllIsRead),
        planted(SplitMachine, landing_book=CommitsBeforeAllIsRead),
        planted(DecodeMachine, landing_book=BoardsWhatWasNotAnnounced),
        planted(DecodeMachine, landing_book=FreesBeforeTheReadsAreOver),
        planted(DecodeMachine, landing_book=PromisesTheSamePagesTwice),
        planted(DecodeMachine, landing_book=ForgetsAttempts),
        planted(DecodeMachine, arrivals=LetsTwoAttemptsRun),
        planted(DecodeMachine, decode_scheduler=EmitsTwice),
        planted(SplitMachine, decode_scheduler=EmitsTwice),
        planted(DecodeMachine, decode_scheduler=ForgetsTheWayBack),
    ],
    ids=lambda machine: "-".join([machine.__name__, *(v.__name__ for v in vars(machine).values() if type(v) is type)]),
)
def test_planted_bug_is_found(machine: type[RuleBasedStateMachine]):
    with pytest.raises((AssertionError, BatonError)):
        run_state_machine_as_test(machine, settings=UNSHRUNK)
