"""A loss of the store counts as recent for the patience of its owners."""

from __future__ import annotations

from services.router.takeover.loss_watcher import LossWatcher


def test_a_loss_is_recent_until_owners_have_put_their_calls_again():
    times = iter([50.0, 50.1, 52.2, 52.4])
    losses = LossWatcher(2.3, lambda: next(times))
    assert not losses.recent
    losses.note()
    assert [losses.recent for _ in range(3)] == [True, True, False]
