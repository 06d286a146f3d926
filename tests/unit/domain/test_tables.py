"""The lifecycle tables: other pairs raise, terminal states have no successor, every state is reachable."""

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
    pytest.param(ExportState, ExportEvent, EXPORT_TRANSITIONS, advance_export, id="export"),
    pytest.param(ImportState, ImportEvent, IMPORT_TRANSITIONS, advance_import, id="import"),
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
def test_only_terminal_states_have_no_successor(states, events, table, step):
    """RESUME is the exception: a client may come back to a cancelled sequence."""
    left = {source for source, event in table if event is not RequestEvent.RESUME}
    assert set(states) - left == set(ENDS[states])


@pytest.mark.parametrize(("states", "events", "table", "step"), TABLES)
def test_every_state_is_reachable_and_reaches_an_end(states, events, table, step):
    reached = {FIRST[states]}
    for _ in states:
        reached |= {end for (start, _), end in table.items() if start in reached}
    assert reached == set(states)
    ending = set(ENDS[states])
    for _ in states:
        ending |= {start for (start, _), end in table.items() if end in ending}
    assert ending == set(states)


def test_terminal_agrees_with_the_table():
    assert {state for state in RequestState if state.terminal} == TERMINAL


def test_an_export_is_committed_only_after_its_seal():
    assert {state for state, event in EXPORT_TRANSITIONS if event is ExportEvent.COMMIT} == {ExportState.SEALED}


def test_an_ended_export_is_not_renewed():
    assert not {state for state, event in EXPORT_TRANSITIONS if event is ExportEvent.RENEW} & ENDS[ExportState]


def test_an_import_with_reads_is_drained_before_its_release():
    for state in (ImportState.RESERVED, ImportState.ALLOCATED, ImportState.PULLING):
        assert advance_import(state, ImportEvent.ABORT) is ImportState.DRAINING
