"""The life cycles as tables: what is not in them raises, ends have no way out, every state can be reached."""

from __future__ import annotations

import itertools

import pytest

from baton.domain.errors import Broken
from baton.domain.handoff import (
    EXPORT_TRANSITIONS,
    IMPORT_TRANSITIONS,
    ExportEvent,
    ExportState,
    ImportEvent,
    ImportState,
    advance_export,
    advance_import,
)
from baton.domain.lifecycle import TABLE, TERMINAL, RequestEvent, RequestState, advance

TABLES = [
    pytest.param(RequestState, RequestEvent, TABLE, advance, id="request"),
    pytest.param(ExportState, ExportEvent, EXPORT_TRANSITIONS, advance_export, id="source"),
    pytest.param(ImportState, ImportEvent, IMPORT_TRANSITIONS, advance_import, id="landing"),
]
FIRST = {RequestState: RequestState.RECEIVED, ExportState: ExportState.PINNED, ImportState: ImportState.RESERVED}
ENDS = {
    RequestState: TERMINAL,
    ExportState: {ExportState.COMMITTED, ExportState.EXPIRED, ExportState.ABORTED},
    ImportState: {ImportState.RELEASED},
}


@pytest.mark.parametrize(("states", "events", "table", "step"), TABLES)
def test_every_pair_is_in_the_table_or_raises(states, events, table, step):
    for state, event in itertools.product(states, events):
        if (state, event) in table:
            assert step(state, event) is table[state, event]
        else:
            with pytest.raises(Broken, match=f"{state.value} cannot {event.value}"):
                step(state, event)


@pytest.mark.parametrize(("states", "events", "table", "step"), TABLES)
def test_only_ends_have_no_way_out(states, events, table, step):
    """But for a resume, which takes up again what its client had left."""
    left = {source for source, event in table if event is not RequestEvent.RESUME}
    assert set(states) - left == set(ENDS[states])


@pytest.mark.parametrize(("states", "events", "table", "step"), TABLES)
def test_every_state_can_be_reached_and_left_for_an_end(states, events, table, step):
    reached = {FIRST[states]}
    for _ in states:
        reached |= {end for (start, _), end in table.items() if start in reached}
    assert reached == set(states)
    ending = set(ENDS[states])
    for _ in states:
        ending |= {start for (start, _), end in table.items() if end in ending}
    assert ending == set(states)


def test_terminal_says_the_same_as_the_table():
    assert {state for state in RequestState if state.terminal} == TERMINAL


def test_an_offer_is_committed_only_when_it_is_sealed():
    assert {state for state, event in EXPORT_TRANSITIONS if event is ExportEvent.COMMIT} == {ExportState.SEALED}


def test_an_offer_that_ended_is_not_renewed():
    assert not {state for state, event in EXPORT_TRANSITIONS if event is ExportEvent.RENEW} & ENDS[ExportState]


def test_a_landing_that_may_be_read_into_is_drained_before_it_is_released():
    for state in (ImportState.RESERVED, ImportState.ALLOCATED, ImportState.PULLING):
        assert advance_import(state, ImportEvent.ABORT) is ImportState.DRAINING
