"""A loss of the store counts as recent for the patience of its owners."""

from __future__ import annotations

import pytest

from baton.services.router.takeover.loss_watcher import LossWatcher


def test_a_loss_is_recent_until_owners_have_put_their_calls_again():
    times = iter([50.0, 50.1, 52.2, 52.4])
    losses = LossWatcher(2.3, lambda: next(times))
    assert not losses.recent
    losses.note()
    assert [losses.recent for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize(
    ("answered", "lost", "excused"), [(True, False, False), (True, True, True), (False, False, True)]
)
async def test_a_missing_call_is_unknown_only_after_a_renewal_without_a_loss(answered: bool, lost: bool, excused: bool):
    losses = LossWatcher(2.3)

    async def wait_for_renewal() -> bool:
        if lost:
            losses.note()
        return answered

    losses.follow(wait_for_renewal)
    assert await losses.excuses_missing() is excused


async def test_a_loss_that_was_noted_needs_no_renewal():
    losses = LossWatcher(2.3)
    losses.follow(_never)
    losses.note()
    assert await losses.excuses_missing()


async def _never() -> bool:
    raise AssertionError("waits for a renewal")
