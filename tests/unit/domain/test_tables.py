"""The life cycles as tables: what is not in them raises, ends have no way out, every state can be reached."""

from __future__ import annotations

import itertools

import pytest

from baton.domain.errors import Broken
from baton.domain.handoff import (
    LANDING_TABLE,
    SOURCE_TABLE,
    LandingEvent,
    LandingState,
    SourceEvent,
    SourceState,
    advance_landing,
    advance_source,
)
from baton.domain.lifecycle import TABLE, TERMINAL, RequestEvent, RequestState, advance

TABLES = [
    pytest.param(RequestState, RequestEvent, TABLE, advance, id="request"),
    pytest.param(SourceState, SourceEvent, SOURCE_TABLE, advance_source, id="source"),
    pytest.param(LandingState, LandingEvent, LANDING_TABLE, advance_landing, id="landing"),
]
FIRST = {RequestState: RequestState.RECEIVED, SourceState: SourceState.PINNED, LandingState: LandingState.PROMISED}
ENDS = {
    RequestState: TERMINAL,
    SourceState: {SourceState.COMMITTED, SourceState.EXPIRED, SourceState.ABORTED},
    LandingState: {LandingState.RELEASED},
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
    assert {state for state, event in SOURCE_TABLE if event is SourceEvent.COMMIT} == {SourceState.SEALED}


def test_an_offer_that_ended_is_not_renewed():
    assert not {state for state, event in SOURCE_TABLE if event is SourceEvent.RENEW} & ENDS[SourceState]


def test_a_landing_that_may_be_read_into_is_drained_before_it_is_released():
    for state in (LandingState.PROMISED, LandingState.BOUND, LandingState.PULLING):
        assert advance_landing(state, LandingEvent.ABORT) is LandingState.DRAINING
