"""Both suffix indexes: the definition of the longest match, and the native one equals the reference call by call."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.domain.ids import AttemptId, RequestId
from baton.engine.drafts.native_suffix import (
    NATIVE_STEP_TOKENS,
    NativeSuffixAutomaton,
    new_suffix_index,
    open_suffix_library,
)
from baton.engine.drafts.ngram import NGramDrafter
from baton.engine.drafts.registry import find_drafter
from baton.engine.drafts.suffix_automaton import SEPARATOR, SuffixAutomaton, SuffixIndex
from baton.model.kernels import build as building
from tests.unit.engine.drafts.test_suffix_automaton import longest_repeated_suffix

LIBRARY = open_suffix_library()
needs_library = pytest.mark.skipif(LIBRARY is None, reason="the suffix index is not built: make kernels")
INDEXES = [SuffixAutomaton, pytest.param(new_suffix_index, marks=needs_library)]
SMALL = st.lists(st.integers(0, 2), max_size=8)
TOKENS = st.lists(SMALL | st.lists(st.integers(0, 300), max_size=30), max_size=12)
TEXT = [(n * n // 7 + n % 5) % 97 for n in range(12_000)]


def test_the_library_is_built_where_there_is_a_compiler():
    assert LIBRARY is not None or not any(map(shutil.which, building.COMPILERS)), "make kernels"


@pytest.mark.parametrize("new_index", INDEXES)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(parts=TOKENS)
def test_the_longest_match_is_found_after_every_call(new_index, parts: list[list[int]]):
    index: SuffixIndex = new_index()
    tokens: list[int] = []
    for part in parts:
        index.extend(part)
        tokens += part
        length, end = index.match_length, index.match_end
        assert length == longest_repeated_suffix(tokens)
        assert len(index) == len(tokens)
        if length:
            assert end < len(tokens)
            assert tokens[end - length : end] == tokens[-length:]
            assert index.continuation(3) == tuple((tokens[end:] * 3)[:3])


@needs_library
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(parts=TOKENS, other=SMALL)
def test_the_native_index_is_the_reference(parts: list[list[int]], other: list[int]):
    reference, native = SuffixAutomaton(), new_suffix_index()
    for part in parts:
        for index in (reference, native):
            index.extend(part)
        assert (native.match_length, native.match_end) == (reference.match_length, reference.match_end)
        for num_tokens in (1, 15):
            assert native.continuation(num_tokens) == reference.continuation(num_tokens)
        assert native.match(other) == reference.match(other)


@pytest.mark.parametrize("new_index", INDEXES)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(texts=st.lists(SMALL, max_size=5), other=SMALL)
def test_another_text_is_matched_by_its_longest_suffix(new_index, texts: list[list[int]], other: list[int]):
    """Of an index of several texts, no match and no continuation reaches over the end of one."""
    index: SuffixIndex = new_index()
    tokens: list[int] = []
    for text in texts:
        index.extend([*text, SEPARATOR])
        tokens += [*text, SEPARATOR]
    length, end = index.match(other)
    suffixes = [other[len(other) - n :] for n in range(len(other), 0, -1)]
    found = [s for s in suffixes if any(tokens[at : at + len(s)] == s for at in range(len(tokens)))]
    assert length == (len(found[0]) if found else 0)
    if length:
        assert tokens[end - length : end] == other[-length:]
        assert index.continuation_at(end, 4) == tuple(tokens[end : tokens.index(SEPARATOR, end)][:4])


@needs_library
@pytest.mark.parametrize("text", [TEXT, [5] * 12_000, [*range(12_000)], [n % 3 * (n % 7) for n in range(12_000)]])
def test_long_texts_are_bounded_and_equal_the_reference(text: Sequence[int]):
    """One child has thousands of siblings, chains are long, states split often."""
    assert LIBRARY is not None
    native, reference = NativeSuffixAutomaton(LIBRARY), SuffixAutomaton()
    for first in range(0, len(text), 1000):
        native.extend(text[first : first + 1000])
        reference.extend(text[first : first + 1000])
        assert (native.match_length, native.match_end) == (reference.match_length, reference.match_end)
    assert native.num_bytes < 140 * len(text)


@needs_library
def test_memory_goes_with_the_index():
    assert LIBRARY is not None
    freed: list[int] = []
    index = NativeSuffixAutomaton(replace(LIBRARY, free=freed.append))
    handle = index._handle
    del index
    assert freed == [handle]
    LIBRARY.free(handle)
    with pytest.raises(MemoryError):
        NativeSuffixAutomaton(replace(LIBRARY, new=lambda: None))
    full = NativeSuffixAutomaton(replace(LIBRARY, append=lambda *_: -1))
    with pytest.raises(MemoryError):
        full.extend([1])


def test_a_library_of_other_sources_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(building, "BUILT_DIR", tmp_path)
    assert open_suffix_library() is None, "there is none"
    (tmp_path / "suffix_index.so").write_bytes(b"junk")
    assert open_suffix_library() is None


@needs_library
def test_another_digest_is_refused():
    assert open_suffix_library(replace(building.SUFFIX_INDEX, flags=("-DOTHER",))) is None


@needs_library
def test_a_prompt_of_12000_tokens_is_ready_after_three_steps():
    """`--drafter ngram` takes the native index, and more tokens a step with it."""
    entry, id = find_drafter("ngram"), AttemptId(RequestId("r"), 1)
    assert entry is not None
    drafter = entry.make(100)
    assert isinstance(drafter, NGramDrafter)
    drafter.begin(id, [*TEXT, *TEXT[:9]][-12_000:])
    proposals = [drafter.propose(id, 4).tokens for _ in range(3)]
    assert [bool(tokens) for tokens in proposals] == [False, False, True]
    assert 2 * NATIVE_STEP_TOKENS < 12_000 <= 3 * NATIVE_STEP_TOKENS
