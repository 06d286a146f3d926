"""Page keys: equal exactly for equal prefixes under equal salts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv.keys import KEY_BYTES, next_key, page_keys, root_key
from tests.tiny_workers import REPEATABLE_SETTINGS

TOKENS = st.lists(st.integers(0, 3), max_size=9)


@REPEATABLE_SETTINGS
@given(TOKENS, TOKENS, st.integers(1, 3))
def test_keys_are_equal_up_to_the_first_other_token(one: list[int], other: list[int], page_size: int):
    num_equal = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    pairs = zip(page_keys(one, page_size, ""), page_keys(other, page_size, ""), strict=False)
    assert [a == b for a, b in pairs] == [
        (i + 1) * page_size <= num_equal for i in range(min(len(one), len(other)) // page_size)
    ]


@REPEATABLE_SETTINGS
@given(TOKENS, st.integers(1, 3))
def test_keys_name_full_pages_only(tokens: list[int], page_size: int):
    keys = page_keys(tokens, page_size, "")
    assert len(keys) == len(tokens) // page_size
    assert all(len(key) == KEY_BYTES for key in keys)
    assert len(set(keys)) == len(keys)


def test_salts_share_nothing():
    assert not set(page_keys([1, 2, 3, 4], 2, "a")) & set(page_keys([1, 2, 3, 4], 2, "b"))


def test_chaining_single_pages_gives_the_same_keys():
    first = next_key(root_key("s"), [1, 2])
    assert page_keys([1, 2, 3, 4, 5], 2, "s") == [first, next_key(first, [3, 4])]


def test_keys_do_not_change_between_releases():
    """Router, prefill and decode of different versions compute the same key."""
    assert page_keys([1, 2], 2, "")[0].hex() == "c16a2294d860f48da5a5037c88c9fd5f"


def test_a_token_outside_32_bits_is_refused():
    with pytest.raises(OverflowError):
        page_keys([-1, 2], 2, "")
