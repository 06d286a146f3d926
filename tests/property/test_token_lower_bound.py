"""The lower bound never exceeds the token count, so no prompt that fits is refused."""

from __future__ import annotations

import json
import unicodedata
from functools import cache

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers

from baton.bundled import MODEL_DIR
from baton.services.router.text.token_lower_bound import TokenLowerBound, read_token_lower_bound

LONG_ONES = ("e" * 9, "é" * 5, " " * 12, "12345", "<|im_start|>", "-----------", "한")
COMPOSABLE = ["e", "\u0301", "\u0323", "\u1112", "\u1161", "\u11ab", "\u212b", "\u1fef", "A", "\u030a"]

pieces = st.one_of(
    st.text(max_size=8),
    st.text("ab e1-\n", max_size=12),
    st.sampled_from(COMPOSABLE),
    st.builds(lambda piece, n: piece * n, st.sampled_from(LONG_ONES), st.integers(1, 6)),
)
texts = st.lists(pieces, max_size=12).map("".join)


@cache
def tokenizer(normal_form_c: bool) -> tuple[Tokenizer, TokenLowerBound]:
    """Returns the bundled tokenizer with some longer tokens."""
    made = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    made.add_tokens([AddedToken(token, normalized=False) for token in LONG_ONES])
    if normal_form_c:
        made.normalizer = normalizers.NFC()
    floor = read_token_lower_bound(json.loads(made.to_str()))
    assert floor is not None
    return made, floor


@given(texts, st.booleans())
def test_the_bound_never_exceeds_the_token_count(text: str, normal_form_c: bool) -> None:
    made, floor = tokenizer(normal_form_c)
    assert floor.min_tokens(text) <= len(made.encode(text, add_special_tokens=False).ids)


@given(texts.filter(len))
def test_every_text_in_normal_form_has_a_bound(text: str) -> None:
    assert tokenizer(False)[1].min_tokens(text) >= 1
    expected = 0 if not unicodedata.is_normalized("NFC", text) or not any(char < "\x80" for char in text) else 1
    assert min(1, tokenizer(True)[1].min_tokens(text)) == expected
