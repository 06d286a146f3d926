"""Validation by lease (V2): stories that must end well, and bugs that the same stories must find."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.domain.errors import BatonError
from baton.domain.ids import AttemptId, WorkerId
from services.decode.arrivals import Arrivals
from services.decode.effects import DecodeEffect
from services.decode.landing import Landing, LandingBook
from services.prefill.offers import OfferBook
from tests.property.lease_story import Event, stories, tell
from tests.property.split_pair import LEASE_S, Renewal, SplitPair
from tests.worlds import REPRODUCIBLE, UNSHRUNK

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=11)


def test_no_story_ends_badly():
    num_proven_by: Counter[str] = Counter()

    @settings(REPRODUCIBLE, max_examples=400)
    @given(prompt=PROMPTS, events=stories())
    def each(prompt: list[int], events: list[Event]) -> None:
        pair = SplitPair()
        tell(pair, prompt, events)
        num_proven_by.update(pair.num_proven_by)

    each()
    assert num_proven_by["v2"] > 0, "no lease was ever the proof"


class NeedsNoLease(LandingBook):
    """When prefill cannot be asked it takes the bytes on trust."""

    def proven(self, id: AttemptId) -> bool:
        return True


class TakesLateReads(LandingBook):
    """Knows of the lease, and not when a read was over."""

    def proven(self, id: AttemptId) -> bool:
        return self._landings[id].evidence.lease_ends_at is not None


class KeepsWhatIsNotProven(LandingBook):
    """Lets whatever has landed serve the cache."""

    def _num_proven_tokens(self, landing: Landing) -> int:
        landing.evidence.renewed(math.inf)
        return super()._num_proven_tokens(landing)


class BreaksItsLeases(OfferBook):
    """Unpins for the router although decode was told that it could count on the pins."""

    def abort(self, id: AttemptId) -> bool:
        return self.release(id)


class RenewsWhatHasEnded(OfferBook):
    """Grants a lease on pins that are gone."""

    def renew(self, ids: list[AttemptId], now: float) -> list[AttemptId]:  # type: ignore[override]
        super().renew(ids, now)
        return []


class TrustsANewProcess(Arrivals):
    """Goes on reading from a prefill worker that has restarted."""

    def source_replaced(self, source: WorkerId) -> list[DecodeEffect]:
        return []


A_SLOW_REPLY = [
    *[Event.CHUNK] * 3, Event.ANNOUNCED, Event.RENEWAL, Event.RENEWED, Event.WAIT, Event.GRANTED, Event.WAIT,
    Event.WAIT, Event.BUSY, *[Event.READ] * 6,
]  # fmt: skip
"""The lease is over at the third wait; measured from the reply it would last for one more."""


class MeasuresFromTheReply(SplitPair):
    """Takes the lease to begin when the answer to its renewal came."""

    def lease_ends_at(self, renewal: Renewal) -> float:
        return self.now + LEASE_S


def planted(**replacements: object) -> type[SplitPair]:
    return type("Broken", (SplitPair,), replacements)


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(planted(landing_book=NeedsNoLease), id="needs no lease"),
        pytest.param(planted(landing_book=TakesLateReads), id="takes late reads"),
        pytest.param(planted(landing_book=KeepsWhatIsNotProven), id="keeps what is not proven"),
        pytest.param(planted(offer_book=BreaksItsLeases), id="breaks its leases"),
        pytest.param(planted(offer_book=RenewsWhatHasEnded), id="renews what has ended"),
        pytest.param(planted(arrivals=TrustsANewProcess), id="trusts a new process"),
    ],
)
def test_a_planted_bug_is_found(broken: type[SplitPair]):
    @settings(UNSHRUNK, max_examples=3000)
    @given(prompt=PROMPTS, events=stories())
    def each(prompt: list[int], events: list[Event]) -> None:
        tell(broken(), prompt, events)

    with pytest.raises((AssertionError, BatonError)):
        each()


def test_a_lease_begins_when_its_renewal_is_sent():
    pair = SplitPair()
    tell(pair, [0, 1, 1, 0, 1, 0, 1], A_SLOW_REPLY)
    assert "v2" not in pair.num_proven_by
    with pytest.raises((AssertionError, BatonError)):
        tell(MeasuresFromTheReply(), [0, 1, 1, 0, 1, 0, 1], A_SLOW_REPLY)
