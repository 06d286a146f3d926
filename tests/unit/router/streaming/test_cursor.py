"""Event ids: written ids are read back, and all other texts are refused."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.domain.errors import InvalidRequest
from baton.domain.ids import RequestId
from baton.services.router.streaming.cursor import Cursor
from tests.unit.router.streaming.chunk_sources import digest_of

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
        *("id:1~", "id:1~1234567", "id:1~123456789", "id:1~ABCDEF01", "id:~12345678", "id:1~12345678~12345678"),
        *("", "7", "id", ":1", "id:1.", "id:.1", "id:-1", "id:1+", "id:1+0", "id:1+3", "id:1+1+1", "id:1:1", "i d:1"),
        *("id:1\n", "id:\N{ARABIC-INDIC DIGIT THREE}", "id:" + "1" * 10, "x" * 129 + ":1", "id:" + "1." * 5000 + "1"),
    ],
)
def test_malformed_cursors_are_refused(text):
    with pytest.raises(InvalidRequest) as refusal:
        Cursor.parse(text)
    assert refusal.value.param == "last_event_id"


@example("id", [(1, 0), (2, None)])  # the digest of a choice's tokens may be 0
@given(IDS, st.lists(st.tuples(st.integers(1, 10**9 - 1), st.none() | st.integers(0, 2**32 - 1)), max_size=20))
def test_the_digests_of_a_cursor_survive_its_text(call, choices):
    counts, digests = tuple(count for count, _ in choices), tuple(digest for _, digest in choices)
    cursor = Cursor.parse(str(Cursor(call, counts, 0, digests)))
    assert cursor.counts == counts
    assert (cursor.digests or (None,) * len(counts)) == digests


def test_the_digest_of_tokens_is_their_order_too() -> None:
    answers: list[tuple[int | None, ...]] = [(), (1,), (2,), (1, 2), (2, 1), (1, None), (None, 1), (0,), (0, 0)]
    assert len({digest_of(*tokens) for tokens in answers}) == len(answers)
    assert digest_of(1, 2) == 0x0381177C  # CRC-32 of both as u32, little-endian: another router must find the same
