"""Tokens of whole characters have their text in the table, and a detokenizer gives the same text with it."""

from __future__ import annotations

import codecs

from hypothesis import given
from hypothesis import strategies as st

from baton.services.router.text.detokenizer import ByteDetokenizer
from baton.services.router.text.token_table import TokenTable, TokenText
from tests.unit.router.text.text_models import bundled

FOX = "🦊é".encode()
VOCABULARY = [*(bytes([byte]) for byte in range(256)), b"", b" hello", FOX, FOX[:3], FOX[2:], b"a" + FOX[:1], b'"\\\n']
TOKENS = st.lists(st.one_of(st.integers(0, len(VOCABULARY) - 1), st.sampled_from(range(256, len(VOCABULARY)))))


def test_an_entry_is_computed_once_and_has_text_only_for_whole_characters() -> None:
    asked: list[int] = []

    def token_bytes(token: int) -> bytes:
        asked.append(token)
        return VOCABULARY[token]

    table = TokenTable(token_bytes)
    assert table[257] == table[257] == TokenText(b" hello", " hello")
    assert table[256] == TokenText(b"", "")
    assert table[259] == TokenText(FOX[:3], None)
    assert asked == [257, 256, 259]


@given(TOKENS)
def test_the_text_of_every_token_is_that_of_an_incremental_decoder(tokens: list[int]) -> None:
    detokenizer = ByteDetokenizer(TokenTable(VOCABULARY.__getitem__))
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        assert detokenizer.push(token) == decoder.decode(VOCABULARY[token])
    assert detokenizer.finish() == decoder.decode(b"", final=True)


def test_special_tokens_are_text_only_where_they_are_asked_for() -> None:
    shown, hidden = [bundled().detokenizer(skip_special_tokens=skip).push(2) for skip in (False, True)]
    assert (bool(shown), hidden) == (True, "")
