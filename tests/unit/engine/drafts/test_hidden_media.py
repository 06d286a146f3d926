"""Drafts of prompts with images: no placeholder is drafted, and nothing is matched from rows of images."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.domain.ids import AttemptId, RequestId
from baton.domain.media.span import MediaSpan
from baton.domain.request import EngineRequest, SamplingParams, StopParams
from baton.domain.timing.step_time import StepShape
from baton.engine.drafts.base import Drafter, Proposal
from baton.engine.drafts.hidden_media import FIRST_HIDDEN, hide_media, last_text, num_drafted_tokens
from baton.engine.drafts.native_suffix import NativeSuffixAutomaton, open_suffix_library
from baton.engine.drafts.ngram import NGramDrafter
from baton.engine.drafts.policy import DraftLimits, DraftPolicy
from baton.engine.drafts.store import SuffixStore
from baton.engine.drafts.suffix_automaton import SuffixAutomaton, SuffixIndex
from baton.kv.pages import PagePool

IMAGE = 500
A, B = (AttemptId(RequestId(name), 1) for name in "ab")


def span(first: int, num_tokens: int, number: int = 1) -> MediaSpan:
    return MediaSpan(first, num_tokens, number.to_bytes(16))


def drafts_of(drafter: Drafter, tokens: list[int], media: tuple[MediaSpan, ...], id: AttemptId = A) -> tuple[int, ...]:
    """What the policy lets a step verify behind a prompt."""
    policy = DraftPolicy(drafter, 15, 16, PagePool(8))
    request = EngineRequest(id, tuple(tokens), len(tokens), SamplingParams(), StopParams(100), media=media)
    policy.begin(request, tokens)
    limits = DraftLimits.of(request, tokens, len(tokens) + 15)
    (proposal,) = policy.plan([limits], StepShape.of([(1, len(tokens) - 1)]), None, 0)
    drafts = proposal.tokens
    return drafts


def test_a_prompt_of_text_is_passed_on_as_it_is() -> None:
    tokens = [1, 2, 3]
    assert hide_media(tokens, ()) is tokens


def test_a_span_is_one_token_that_is_in_no_vocabulary() -> None:
    tokens = [1, *[IMAGE] * 3, 2, *[IMAGE] * 2, 3]
    assert hide_media(tokens, (span(1, 3), span(5, 2))) == [1, FIRST_HIDDEN, 2, FIRST_HIDDEN - 1, 3]


def test_rows_of_an_image_match_nothing() -> None:
    """Without spans the same tokens are the longest match that there is."""
    prompt = [7, *[IMAGE] * 9]
    assert drafts_of(NGramDrafter(), prompt, ()) == (IMAGE,) * 15
    assert drafts_of(NGramDrafter(), prompt, (span(1, 9),)) == ()


def test_a_match_goes_through_no_image() -> None:
    """Two words behind either image: with the rows before them they would be a match of three."""
    prompt = [*[IMAGE] * 4, 1, 2, 9, 8, *[IMAGE] * 4, 1, 2]
    assert drafts_of(NGramDrafter(), prompt, ())
    assert drafts_of(NGramDrafter(), prompt, (span(0, 4), span(8, 4, 2))) == ()


def test_drafts_end_before_an_image() -> None:
    prompt = [1, 2, 3, 4, *[IMAGE] * 4, 9, 1, 2, 3]
    assert drafts_of(NGramDrafter(), prompt, (span(4, 4),)) == (4,)


def test_outputs_behind_images_are_shared_without_them() -> None:
    """Another request's image is hidden by the same negative token; so it must not be in the store."""
    store = SuffixStore(1 << 20, SuffixAutomaton)
    for id, words in ((A, [1, 2, 5, 6]), (B, [1, 2])):
        drafter = NGramDrafter(store=store)
        drafts = drafts_of(drafter, [*[IMAGE] * 4, *words], (span(0, 4),), id)
        assert drafts == ()
        drafter.end(id)
    assert drafts_of(NGramDrafter(store=store), [9, 1, 2, 5], ()) == (6,)


class _Garbage:
    """A drafter of another package that proposes what it was told."""

    def begin(self, id: AttemptId, tokens: Sequence[int], salt: str = "") -> None:
        self._tokens = tuple(tokens)

    def propose(self, id: AttemptId, max_tokens: int) -> Proposal:
        return Proposal(self._tokens[:max_tokens])

    def accepted(self, id: AttemptId, tokens: Sequence[int]) -> None: ...

    def end(self, id: AttemptId) -> None: ...


def test_proposals_of_other_drafters_are_cut() -> None:
    assert drafts_of(_Garbage(), [1, 2, *[IMAGE] * 4, 3], (span(2, 4),)) == (1, 2)
    assert num_drafted_tokens([]) == 0


@pytest.mark.parametrize(("max_tokens", "expected"), [(9, [4, 5, 6]), (2, [5, 6])])
def test_last_text(max_tokens: int, expected: list[int]) -> None:
    assert list(last_text([1, FIRST_HIDDEN, 4, 5, 6], max_tokens)) == expected
    assert list(last_text([1, FIRST_HIDDEN], max_tokens)) == []


def _indexes() -> list[Callable[[], SuffixIndex]]:
    library = open_suffix_library()
    return [SuffixAutomaton] if library is None else [SuffixAutomaton, lambda: NativeSuffixAutomaton(library)]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 3), st.just(IMAGE)), min_size=1, max_size=60))
def test_nothing_of_an_image_is_proposed_or_matched(tokens: list[int]) -> None:
    """Each run of placeholders is a span. A proposal followed, somewhere, the same words with no image among them."""
    media: list[MediaSpan] = []
    at = 0
    while at < len(tokens):
        first = at
        while at < len(tokens) and tokens[at] == IMAGE:
            at += 1
        media += [span(first, at - first, len(media))] if at > first else []
        at += 1
    found = [drafts_of(NGramDrafter(new_index=index), tokens, tuple(media)) for index in _indexes()]
    assert all(one == found[0] for one in found)
    if drafts := found[0]:
        assert IMAGE not in drafts
        assert min(drafts) >= 0
        assert IMAGE not in tokens[-3:]
        text = [*tokens[-3:], drafts[0]]
        assert any(tokens[place : place + 4] == text for place in range(len(tokens) - 3))
