"""For any tokens the pieces join to the text of all, and no piece is half a character."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.services.router.text.detokenizer import REPLACEMENT, WindowDetokenizer
from baton.services.router.text.text_model import TextModel
from tests.unit.router.text.text_models import TEMPLATE, bundled, byte_level_tokenizer, sentencepiece


def pieces(model: TextModel, tokens: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = model.detokenizer(skip_special_tokens=skip)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.finish()]


@settings(deadline=None)
@given(tokens=st.lists(st.integers(0, 2047), max_size=60), skip=st.booleans())
def test_pieces_of_random_tokens_join_to_their_text(tokens: list[int], skip: bool):
    assert "".join(pieces(bundled(), tokens, skip=skip)) == bundled().decode(tokens, skip_special_tokens=skip)


@settings(deadline=None)
@given(tokens=st.lists(st.integers(0, 255), max_size=60))
def test_random_bytes_decode_as_the_tokenizer_does(tokens: list[int]):
    model = TextModel(byte_level_tokenizer(), {}, {}, TEMPLATE)
    assert "".join(pieces(model, tokens)) == model.decode(tokens, skip_special_tokens=True)


@settings(deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=30))
@pytest.mark.parametrize("make", [bundled, sentencepiece])
def test_no_piece_holds_half_a_character(make, text: str):
    model: TextModel = make()
    tokens = list(model.encode(text, add_special_tokens=False))
    given_pieces = pieces(model, tokens)
    whole = model.decode(tokens, skip_special_tokens=True)
    assert "".join(given_pieces) == whole
    if REPLACEMENT not in whole:
        assert not any(REPLACEMENT in piece for piece in given_pieces)


def test_text_is_returned_as_soon_as_it_is_certain():
    model = bundled()
    tokens = list(model.encode("the fox — 狐", add_special_tokens=False))
    detokenizer = model.detokenizer(skip_special_tokens=True)
    shown = ""
    for count, token in enumerate(tokens, start=1):
        shown += detokenizer.push(token)
        assert shown == model.decode(tokens[:count], skip_special_tokens=True).rstrip(REPLACEMENT)
    assert detokenizer.finish() == ""


def test_a_character_cut_short_shows_at_the_end():
    tokens = list(bundled().encode("🦊", add_special_tokens=False))[:-1]
    assert tokens
    *early, last = pieces(bundled(), tokens)
    assert "".join(early) == ""
    assert set(last) == {REPLACEMENT}


def test_a_completion_keeps_the_space_after_its_prompt():
    model = sentencepiece()
    prompt = model.encode("hello", add_special_tokens=True)
    token = model.encode("w", add_special_tokens=False)[0]
    assert model.detokenizer(skip_special_tokens=True, context=prompt).push(token) == " w"
    assert model.detokenizer(skip_special_tokens=True).push(token) == "w"


def test_a_window_of_bytes_that_are_no_text_stays_short():
    sizes = []

    def decode(tokens):
        sizes.append(len(tokens))
        return REPLACEMENT * len(tokens)

    detokenizer = WindowDetokenizer(decode)
    shown = "".join(detokenizer.push(token) for token in range(500)) + detokenizer.finish()
    assert shown == REPLACEMENT * 500
    assert max(sizes) < 50


def test_special_tokens_are_shown_on_demand():
    end = bundled().encode("<|im_end|>", add_special_tokens=False)
    assert len(end) == 1
    assert "".join(pieces(bundled(), list(end), skip=False)) == "<|im_end|>"
    assert "".join(pieces(bundled(), list(end), skip=True)) == ""
