"""Event ids: what is written is read back, and nothing else is taken for one."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.errors import InvalidRequest
from baton.domain.ids import RequestId
from services.router.streaming.cursor import Cursor

IDS = st.from_regex(r"[A-Za-z0-9_-]{1,40}", fullmatch=True).map(RequestId)
COUNTS = st.lists(st.integers(0, 10**9 - 1), max_size=20).map(tuple)


@given(IDS, COUNTS, st.integers(0, 2))
def test_a_cursor_is_read_back_as_it_was_written(call, counts, num_tail):
    cursor = Cursor(call, counts, num_tail)
    assert Cursor.parse(str(cursor)) == cursor


@given(st.text())
def test_what_is_no_cursor_is_refused_and_nothing_worse(text):
    with suppress(InvalidRequest):
        assert str(Cursor.parse(text)).partition(":")[0] == text.partition(":")[0]


@pytest.mark.parametrize(
    "text",
    [
        *("", "7", "id", ":1", "id:1.", "id:.1", "id:-1", "id:1+", "id:1+0", "id:1+3", "id:1+1+1", "id:1:1", "i d:1"),
        *("id:1\n", "id:\N{ARABIC-INDIC DIGIT THREE}", "id:" + "1" * 10, "x" * 129 + ":1", "id:" + "1." * 5000 + "1"),
    ],
)
def test_malformed_cursors(text):
    with pytest.raises(InvalidRequest) as refusal:
        Cursor.parse(text)
    assert refusal.value.param == "last_event_id"
