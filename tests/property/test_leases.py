"""Validation by lease (V2): scenarios that must end well, and planted bugs that they must find."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.domain.errors import BatonError
from baton.domain.ids import AttemptId, WorkerId
from baton.engine.handoff.kv_export import ExportTable
from baton.services.decode.effects import DecodeEffect
from baton.services.decode.import_policy import ImportPolicy
from baton.services.decode.import_table import ImportTable
from tests.property.machines.lease_scenarios import Event, run_scenario, scenarios
from tests.property.machines.split_pair import LEASE_S, Renewal, SplitPair
from tests.tiny_workers import PLANTED_BUG_SETTINGS, REPEATABLE_SETTINGS

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=11)


def test_every_scenario_ends_well():
    num_proven_by: Counter[str] = Counter()

    @settings(REPEATABLE_SETTINGS, max_examples=400)
    @given(prompt=PROMPTS, events=scenarios())
    def each(prompt: list[int], events: list[Event]) -> None:
        pair = SplitPair()
        run_scenario(pair, prompt, events)
        num_proven_by.update(pair.num_proven_by)

    each()
    assert num_proven_by["v2"] > 0, "no lease was ever the proof"


class NeedsNoLease(ImportTable):
    """Accepts unproven pages if prefill does not answer."""

    def is_proven(self, id: AttemptId) -> bool:
        return True


class TakesLateReads(ImportTable):
    """Checks that there is a lease, but not when a read ended."""

    def is_proven(self, id: AttemptId) -> bool:
        return self._imports[id].proof.lease_ends_at is not None


class KeepsWhatIsNotProven(ImportTable):
    """Caches every page that was read."""

    def abort(self, id: AttemptId) -> WorkerId | None:
        if (kv_import := self._imports.get(id)) is not None:
            kv_import.proof.extend_lease(math.inf)
        return super().abort(id)


class BreaksItsLeases(ExportTable):
    """Unpins on a router's abort in spite of a granted lease."""

    def abort(self, id: AttemptId) -> bool:
        return self.release(id)


class RenewsWhatHasEnded(ExportTable):
    """Renews leases whose pins are gone."""

    def renew(self, ids: list[AttemptId], now: float) -> list[AttemptId]:  # type: ignore[override]
        super().renew(ids, now)
        return []


class TrustsANewProcess(ImportPolicy):
    """Continues to read from a restarted prefill worker."""

    def on_source_replaced(self, source: WorkerId) -> list[DecodeEffect]:
        return []


A_SLOW_REPLY = [
    *[Event.CHUNK] * 3, Event.DELIVERED, Event.RENEWAL, Event.RENEWED, Event.WAIT, Event.GRANTED, Event.WAIT,
    Event.WAIT, Event.BUSY, *[Event.READ] * 6,
]  # fmt: skip
"""The lease ends at the third wait. Measured from the reply it would last for one more."""


class MeasuresLeaseFromReply(SplitPair):
    """Measures a lease from the answer to its renewal."""

    def lease_ends_at(self, renewal: Renewal) -> float:
        return self.now + LEASE_S


def planted(**replacements: object) -> type[SplitPair]:
    return type("Broken", (SplitPair,), replacements)


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(planted(import_table=NeedsNoLease), id="needs no lease"),
        pytest.param(planted(import_table=TakesLateReads), id="takes late reads"),
        pytest.param(planted(import_table=KeepsWhatIsNotProven), id="keeps what is not proven"),
        pytest.param(planted(export_table=BreaksItsLeases), id="breaks its leases"),
        pytest.param(planted(export_table=RenewsWhatHasEnded), id="renews what has ended"),
        pytest.param(planted(import_policy=TrustsANewProcess), id="trusts a new process"),
    ],
)
def test_a_planted_bug_is_found(broken: type[SplitPair]):
    @settings(PLANTED_BUG_SETTINGS, max_examples=3000)
    @given(prompt=PROMPTS, events=scenarios())
    def each(prompt: list[int], events: list[Event]) -> None:
        run_scenario(broken(), prompt, events)

    with pytest.raises((AssertionError, BatonError)):
        each()


def test_a_lease_begins_when_its_renewal_is_sent():
    pair = SplitPair()
    run_scenario(pair, [0, 1, 1, 0, 1, 0, 1], A_SLOW_REPLY)
    assert "v2" not in pair.num_proven_by
    with pytest.raises((AssertionError, BatonError)):
        run_scenario(MeasuresLeaseFromReply(), [0, 1, 1, 0, 1, 0, 1], A_SLOW_REPLY)
