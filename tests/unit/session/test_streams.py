"""Streams of a session: numbers, late messages and reconciliation."""

from __future__ import annotations

import pytest

from baton.domain.errors import LinkBroken
from baton.session.streams import MAX_STREAM, UNLISTED_GRACE_S, StreamTable


def test_numbers_grow_and_are_never_reused():
    table: StreamTable[str] = StreamTable()
    assert [table.draw(name, 0.0) for name in "abc"] == [1, 2, 3]
    assert table.close(3) == "c"
    assert table.close(3) is None
    assert table.draw("d", 0.0) == 4
    assert table.numbers == (1, 2, 4)


@pytest.mark.parametrize("number", [0, 2, 1, MAX_STREAM + 1])
def test_a_listener_refuses_a_number_that_was_used(number: int):
    table: StreamTable[str] = StreamTable()
    table.accept(2, "a", 0.0)
    table.close(2)
    with pytest.raises(LinkBroken, match="opened after"):
        table.accept(number, "b", 0.0)
    assert len(table) == 0


def test_a_session_without_numbers_left_says_so():
    table: StreamTable[str] = StreamTable()
    table.accept(MAX_STREAM, "a", 0.0)
    with pytest.raises(LinkBroken, match="no stream numbers"):
        table.draw("b", 0.0)


def test_a_late_message_has_no_stream():
    table: StreamTable[str] = StreamTable()
    number = table.draw("a", 0.0)
    assert table.get(number) == "a"
    table.close(number)
    assert table.get(number) is None


def test_a_lost_session_ends_all_streams():
    table: StreamTable[str] = StreamTable()
    for name in "abc":
        table.draw(name, 0.0)
    assert table.close_all() == ["a", "b", "c"]
    assert len(table) == 0


def test_a_comparison_names_unknown_and_old_unlisted_streams():
    table: StreamTable[str] = StreamTable()
    for name, opened_at in zip("abc", (0.0, 0.0, 5.0), strict=True):
        table.draw(name, opened_at)
    found = table.compare([1, 9, 7], 5.0 + UNLISTED_GRACE_S / 2)
    assert found.unknown == (7, 9)
    assert found.unlisted == ((2, "b"),), "the third may have been opened since"
    assert table.compare([1, 2, 3], 99.0) == type(found)((), ())
