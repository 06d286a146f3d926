"""Page keys: equal exactly for equal prefixes under equal salts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.media.span import MediaGrid, MediaSpan
from baton.kv.keys import KEY_BYTES, next_key, page_keys, root_key
from tests.tiny_workers import REPEATABLE_SETTINGS

TOKENS = st.lists(st.integers(0, 3), max_size=9)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[MediaSpan]]:
    """Up to three spans of two items between texts; all ids are equal, so that only spans differ."""
    tokens: list[int] = []
    media: list[MediaSpan] = []
    for _ in range(draw(st.integers(0, 3))):
        tokens += draw(st.lists(st.integers(0, 1), max_size=2))
        grid = draw(st.none() | st.builds(MediaGrid, st.integers(1, 2), st.integers(1, 2)))
        num_tokens = draw(st.integers(1, 4)) if grid is None else grid.height * grid.width
        first_row = draw(st.integers(0, 1)) if grid is None else 0
        identity = draw(st.sampled_from([b"r" * 16, b"b" * 16]))
        last = media[-1] if media else None
        if last is not None and (last.end, last.identity, last.first_row + last.num_tokens) == (
            len(tokens), identity, first_row,
        ):  # fmt: skip
            tokens.append(1)  # else both spans together are one
        media.append(MediaSpan(len(tokens), num_tokens, identity, grid, first_row))
        tokens += [0] * num_tokens
    return tokens + draw(st.lists(st.integers(0, 1), max_size=3)), media


PROMPTS = prompts()


def rows_of(tokens: list[int], media: list[MediaSpan]) -> list[object]:
    """What each token is: an id, or an id and a row of an item."""
    shown: list[object] = list(tokens)
    for span in media:
        for place in range(span.first, span.end):
            shown[place] = (tokens[place], span.identity, span.first_row + place - span.first, span.grid)
    return shown


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


def test_keys_of_images_do_not_change_between_releases():
    assert page_keys([1, 2], 2, "", [MediaSpan(1, 1, b"i" * 16)])[0].hex() == "3f9d3e1c1fbb6a0cb45d87d0d639403b"


def test_images_of_equal_size_share_no_page():
    """The placeholder ids of red and blue are equal. Pages before the image are shared, none from it on."""
    tokens = [1, 2, 0, 0, 0, 3, 4, 5]
    red, blue = (page_keys(tokens, 2, "", [MediaSpan(2, 3, name * 16)]) for name in (b"r", b"b"))
    assert [a == b for a, b in zip(red, blue, strict=True)] == [True, False, False, False]


@REPEATABLE_SETTINGS
@given(st.data(), st.integers(1, 3))
def test_pages_are_shared_exactly_where_ids_and_rows_are_equal(data: st.DataObject, page_size: int):
    """Keys equal a model in which each token has the row that it stands for, or none."""
    (one, ours), (other, theirs) = data.draw(PROMPTS), data.draw(PROMPTS)
    pairs = zip(page_keys(one, page_size, "", ours), page_keys(other, page_size, "", theirs), strict=False)
    shown, also = rows_of(one, ours), rows_of(other, theirs)
    for page, (mine, yours) in enumerate(pairs):
        end = (page + 1) * page_size
        assert (mine == yours) is (shown[:end] == also[:end])


@REPEATABLE_SETTINGS
@given(PROMPTS, st.integers(1, 3))
def test_a_prompt_without_spans_has_the_keys_of_text(prompt: tuple[list[int], list[MediaSpan]], page_size: int):
    tokens, media = prompt
    first = media[0].first if media else len(tokens)
    text = page_keys(tokens, page_size, "")
    num_text_pages = first // page_size
    mixed = page_keys(tokens, page_size, "", media)
    assert mixed[:num_text_pages] == text[:num_text_pages]
    assert not set(mixed[num_text_pages:]) & set(text[num_text_pages:]) or not media


def test_a_token_outside_32_bits_is_refused():
    with pytest.raises(OverflowError):
        page_keys([-1, 2], 2, "")


@REPEATABLE_SETTINGS
@given(prompt=PROMPTS, data=st.data())
def test_known_keys_are_continued_as_if_computed(prompt, data):
    tokens, media = prompt
    keys = page_keys(tokens, 2, "", media)
    known = keys[: data.draw(st.integers(0, len(keys)))]
    assert page_keys(tokens, 2, "", media, known) == keys
    if known:
        marked = [*known[:-1], root_key("other")]
        assert page_keys(tokens, 2, "", media, marked)[: len(known)] == marked  # taken, not computed again
