"""Event ids: written ids are read back, and all other texts are refused."""

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
def test_a_cursor_survives_its_text(call, counts, num_tail):
    cursor = Cursor(call, counts, num_tail)
    assert Cursor.parse(str(cursor)) == cursor


@given(st.text())
def test_any_other_text_is_refused_as_a_cursor(text):
    with suppress(InvalidRequest):
        assert str(Cursor.parse(text)).partition(":")[0] == text.partition(":")[0]


@pytest.mark.parametrize(
    "text",
    [
        *("", "7", "id", ":1", "id:1.", "id:.1", "id:-1", "id:1+", "id:1+0", "id:1+3", "id:1+1+1", "id:1:1", "i d:1"),
        *("id:1\n", "id:\N{ARABIC-INDIC DIGIT THREE}", "id:" + "1" * 10, "x" * 129 + ":1", "id:" + "1." * 5000 + "1"),
    ],
)
def test_malformed_cursors_are_refused(text):
    with pytest.raises(InvalidRequest) as refusal:
        Cursor.parse(text)
    assert refusal.value.param == "last_event_id"
