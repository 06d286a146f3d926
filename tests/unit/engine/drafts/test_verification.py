"""Verification by drawing: what a row emits of its draws, and the histories that they are drawn after."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.errors import Broken
from baton.domain.ids import AttemptId, PageId, RequestId
from baton.domain.request import EngineRequest, SampledToken, SamplingParams, StopParams
from baton.engine.batch import Batch, DraftedHistory, Row, SampleSpec
from baton.engine.drafts.base import emitted_tokens
from baton.engine.fake_runner import SLOT_BYTES, FakeRunner, fake_token
from baton.kv.memory import PageMemory

PAGE_SIZE, VOCAB_SIZE = 4, 101
STOP = StopParams(max_tokens=9, min_tokens=5, stop_token_ids=frozenset({7}))


@given(
    tokens=st.lists(st.integers(0, 9), max_size=6),
    drafts=st.lists(st.integers(0, 9), max_size=4),
    start=st.integers(-8, 12) | st.none(),
    stop=st.integers(-8, 12) | st.none(),
    step=st.sampled_from([None, 1, 2, -1]),
)
def test_a_drafted_history_is_one_sequence(tokens, drafts, start, stop, step):
    history, whole = DraftedHistory(tokens, drafts), tokens + drafts
    assert list(history) == whole
    assert len(history) == len(whole)
    assert history[slice(start, stop, step)] == whole[slice(start, stop, step)]
    for place in range(-len(whole), len(whole)):
        assert history[place] == whole[place]
    with pytest.raises(IndexError):
        history[len(whole)]


def test_a_drafted_history_does_not_grow_with_the_row():
    tokens = [1, 2]
    history = DraftedHistory(tokens, [3])
    tokens.append(9)
    assert list(history) == [1, 2, 3]


def draws(*tokens: int) -> tuple[SampledToken, ...]:
    return tuple(map(SampledToken, tokens))


@pytest.mark.parametrize(
    ("drafts", "drawn", "num_output", "emitted"),
    [
        ([], [4], 0, [4]),
        ([4, 5], [4, 5, 6], 0, [4, 5, 6]),
        ([4, 5], [4, 6, 8], 0, [4, 6]),
        ([4, 5], [3, 5, 8], 0, [3]),
        ([7, 5], [7, 5, 8], 0, [7, 5, 8]),  # a stop id that min_tokens forbids to end with
        ([4, 7, 5], [4, 7, 5, 8], 5, [4, 7]),  # nothing behind a finish
        ([4, 5, 6], [4, 5, 6, 8], 7, [4, 5]),  # max_tokens
    ],
)
def test_a_row_emits_the_drafts_that_were_drawn_and_one_more(drafts, drawn, num_output, emitted):
    assert emitted_tokens(drafts, draws(*drawn), STOP, num_output) == draws(*emitted)


def request() -> EngineRequest:
    return EngineRequest(AttemptId(RequestId("r"), 1), (1, 2, 3), 3, SamplingParams(seed=5), STOP)


def test_each_place_has_the_spec_of_plain_decoding():
    tokens, drafts = [1, 2, 3, 4, 5, 6], [7, 8, 9]
    specs = SampleSpec.after_drafts(request(), tokens, drafts)
    for count, spec in enumerate(specs, start=1):
        plain = SampleSpec.of(request(), [*tokens, *drafts[:count]])
        assert list(spec.history) == plain.history
        assert (spec.banned, spec.num_prompt_tokens, spec.sampling) == (plain.banned, 3, plain.sampling)
    assert [bool(spec.banned) for spec in specs] == [True, False, False]  # min_tokens is reached among them


def drafted_row(tokens: list[int], start: int, drafts: list[int]) -> Row:
    specs = [SampleSpec.of(request(), tokens), *SampleSpec.after_drafts(request(), tokens, drafts)]
    new = [*tokens[start:], *drafts]
    return Row(request().id, new, start, [PageId(page) for page in (3, 1, 4)], specs[0], drafted=tuple(specs[1:]))


def runner() -> FakeRunner:
    return FakeRunner(PageMemory(8, PAGE_SIZE * SLOT_BYTES), PAGE_SIZE, VOCAB_SIZE)


def test_draws_behind_right_drafts_are_those_of_single_steps():
    tokens = [1, 2, 3]
    for _ in range(4):
        banned = SampleSpec.of(request(), tokens).banned
        tokens.append(fake_token(tokens, VOCAB_SIZE, 5, banned))
    fake = runner()
    fake.run(Batch((Row(request().id, tokens[:3], 0, [PageId(3)], None),)))
    ((*drawn,),) = fake.run(Batch((drafted_row(tokens[:4], 3, tokens[4:]),))).sampled
    assert [one.token for one in drawn[:3]] == tokens[4:]
    assert len(drawn) == 4


def test_a_rejected_draft_that_counts_as_filled_is_found():
    fake = runner()
    fake.run(Batch((drafted_row([1, 2, 3, 4], 0, [50, 51]),)))
    fake.run(Batch((drafted_row([1, 2, 3, 4, 60], 4, []),)))  # overwrites
    fake.run(Batch((drafted_row([1, 2, 3, 4, 60], 4, [70]),)))
    with pytest.raises(Broken, match="position 5"):
        fake.run(Batch((drafted_row([1, 2, 3, 4, 60, 61, 62], 6, []),)))


def test_a_row_knows_how_far_it_is_filled():
    row = drafted_row([1, 2, 3, 4], 3, [5, 6])
    assert row.num_known_tokens == 1
    ends = [row.filled_end(num_emitted) for num_emitted in (1, 2, 3)]
    assert ends[0] == 4
    assert all(later - earlier == 1 for earlier, later in pairwise(ends))
