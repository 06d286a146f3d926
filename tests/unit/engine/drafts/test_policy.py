"""What a row may take for its drafts: slots that it has, and free pages that nothing else needs."""

from __future__ import annotations

import pytest

from baton.domain.ids import AttemptId, RequestId
from baton.domain.request import EngineRequest, SamplingParams, StopParams
from baton.domain.timing.step_time import StepShape
from baton.engine.drafts.base import DRAFT_PLACEHOLDER
from baton.engine.drafts.policy import DraftLimits, DraftPolicy, DraftSkipReason
from baton.engine.drafts.runner_drafter import MAX_RUNNER_DRAFTS, RunnerDrafter
from baton.kv.pages import Hold, PagePool

PAGE_SIZE, NUM_PAGES = 4, 8
TOKENS = list(range(PAGE_SIZE))


def planned(num_free: int, num_spare: int, num_slots: int, max_tokens: int = 20) -> tuple[tuple[int, ...], DraftPolicy]:
    """The drafts of one row, in a pool with `num_free` free pages; all others are cached and could be evicted."""
    pool = PagePool(NUM_PAGES)
    pages = pool.allocate(pool.num_free - num_free, Hold.LIVE)
    assert pages is not None
    for page in pages:
        pool.set_cached(page, True)
    pool.drop(pages, Hold.LIVE)
    assert pool.num_free == num_free
    assert pool.num_cached == len(pages)
    policy = DraftPolicy(RunnerDrafter(), 15, PAGE_SIZE, pool)
    request = EngineRequest(
        AttemptId(RequestId("r"), 1), tuple(TOKENS), len(TOKENS), SamplingParams(), StopParams(max_tokens)
    )
    limits = DraftLimits.of(request, TOKENS, num_slots)
    (proposal,) = policy.plan([limits], StepShape.of([(1, len(TOKENS) - 1)]), None, num_spare)
    return proposal.tokens, policy


@pytest.mark.parametrize(
    ("num_free", "num_spare", "num_slots", "num_drafts"),
    [
        (0, 5, PAGE_SIZE, 0),  # only an eviction would make room
        (0, 5, PAGE_SIZE + 2, 2),  # slots that the row has
        (1, 5, PAGE_SIZE, PAGE_SIZE),  # one more page
        (5, 0, PAGE_SIZE, 0),  # running rows want what is free
        (5, 5, PAGE_SIZE + 2, 2 + PAGE_SIZE),
        (5, 5, 3 * PAGE_SIZE, MAX_RUNNER_DRAFTS),
    ],
)
def test_drafts_evict_no_page(num_free: int, num_spare: int, num_slots: int, num_drafts: int) -> None:
    drafts, policy = planned(num_free, num_spare, num_slots)
    assert drafts == (DRAFT_PLACEHOLDER,) * num_drafts
    assert policy.totals.skipped[DraftSkipReason.PAGES] == int(num_drafts == 0)


def test_no_draft_is_made_behind_the_last_token() -> None:
    assert planned(5, 5, 3 * PAGE_SIZE, max_tokens=3)[0] == (DRAFT_PLACEHOLDER,) * 2
    drafts, policy = planned(5, 5, 3 * PAGE_SIZE, max_tokens=1)
    assert not drafts
    assert policy.totals.skipped[DraftSkipReason.LIMIT] == 1
