"""One vocabulary for equal files, for as long as somebody has it."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

from baton.bundled import MODEL_DIR
from baton.grammar.tokenizer import GrammarTokenizer, logits_size, slices
from tests import grammars

INDENTED = json.dumps({"a": [1, {"b": "two words", "c": []}], "d": "line\nline", "e": None}, indent=4)
SPACED = "alpha   =   12 ;\n\n\n      beta = 7;    gamma\n=\n\n 9 ;"
ITEMS = """%llguidance {}
start: item+
item: WORD "=" NUMBER ";"
WORD: /[a-z]+/
NUMBER: /[0-9]+/
%ignore /[ \\t\\n\\r]+/
"""


def masks(tokenizer: LLTokenizer, grammar: str, tokens: Sequence[int]) -> list[bytes]:
    """Before each of `tokens`, and after the last."""
    matcher = LLMatcher(tokenizer, grammar)
    found = [bytes(matcher.compute_bitmask())]
    for token in tokens:
        assert matcher.consume_tokens([token])
        found.append(bytes(matcher.compute_bitmask()))
    return found


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (LLMatcher.grammar_from_json_schema('{"type": "object"}'), INDENTED),
        (ITEMS, SPACED),
        (LLMatcher.grammar_from_regex(r"[ \n\t]*x"), "      \n\n   \t x"),
        (LLMatcher.grammar_from_regex(r"(.|\n){1,500}"), SPACED),
    ],
    ids=["indented JSON", "ignored spaces", "spaces", "any text"],
)
def test_masks_are_those_of_the_library_with_all_slices(grammar, text):
    own, tokens = grammars.compiler().tokenizer, grammars.encode(text)
    source = (MODEL_DIR / "tokenizer.json").read_text(encoding="utf-8")
    whole = LLTokenizer(source, n_vocab=own.vocab_size, eos_token=sorted(own.eos), slices=LLTokenizer.general_slices())
    assert len(tokens) > 5
    assert masks(own.ll, grammar, tokens) == masks(whole, grammar, tokens)


def test_there_is_a_slice_less_than_in_the_library():
    """That of spaces alone: another version of the library may write it in another way."""
    [left_out] = set(LLTokenizer.general_slices()) - set(slices())
    matcher = LLMatcher(grammars.compiler().tokenizer.ll, LLMatcher.grammar_from_regex(left_out))
    assert matcher.validate_tokens(list(grammars.encode("   \n"))) > 0
    assert matcher.validate_tokens(list(grammars.encode("word"))) == 0


def test_equal_files_give_the_same_vocabulary_while_it_is_in_use(tmp_path: Path) -> None:
    size = logits_size(MODEL_DIR)
    assert size is not None
    model, copy = tmp_path / "model", tmp_path / "copy"
    shutil.copytree(MODEL_DIR, model)
    tokenizer = model / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "  ")  # content that no other test of this process uses
    shutil.copytree(model, copy)
    first = GrammarTokenizer.of_directory(model, size)
    assert GrammarTokenizer.of_directory(copy, size) is first
    assert GrammarTokenizer.of_directory(model, size + 32) is not first
    tokenizer = copy / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    assert GrammarTokenizer.of_directory(copy, size) is not first
    first.mark = 7  # type: ignore[attr-defined]
    del first
    gc.collect()
    assert not hasattr(GrammarTokenizer.of_directory(model, size), "mark")


def test_the_size_of_logits_is_that_of_the_text_model(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    assert logits_size(tmp_path) is None
    config.write_text('{"vocab_size": 7}')
    assert logits_size(tmp_path) == 7
    config.write_text('{"vocab_size": 7, "text_config": {"vocab_size": 9}}')
    assert logits_size(tmp_path) == 9
