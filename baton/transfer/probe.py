"""Probe of a new link: a blocking pull of real pages that measures the bandwidth.

Called by decode before it announces a link. Works with every transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from baton.domain.errors import LinkBroken
from baton.domain.ids import PageId
from baton.transfer.base import Pull, PullEvent, PullOutcome, SourceInfo
from baton.transfer.puller import ThreadedPuller
from baton.transfer.puller_set import PullerSet

PROBE_DEADLINE_S = 5.0
_NUM_ROUNDS = 2


def probe_bandwidth(
    puller: ThreadedPuller | PullerSet,
    source: SourceInfo,
    local_pages: Sequence[PageId],
    num_pages: int,
    *,
    deadline_s: float = PROBE_DEADLINE_S,
    on_pages_free: Callable[[], None],
) -> tuple[int, float]:
    """Pulls the first `num_pages` of a connected source twice; returns (bytes, seconds) of the second pull.

    The first pull makes the connection. No digests are checked, as the contents do not matter. `num_pages` is cut to
    the number of local pages and of the source's pages. Calls `on_pages_free` once, here or in the transfer thread,
    when `local_pages` may be reused; after a late pull that can be much later. Blocks for at most `deadline_s` per
    pull. Raises `LinkBroken`.
    """
    num_pages = min(num_pages, len(local_pages), source.num_pages)
    pages = tuple(PageId(page) for page in range(num_pages))
    try:
        for _ in range(_NUM_ROUNDS):
            ended: Future[PullEvent] = Future()
            pull = Pull(0, source.worker_id, pages, tuple(local_pages[:num_pages]), None, deadline_s)
            event = _pull_once(puller, pull, ended)
    except _ProbeLate:
        ended.add_done_callback(lambda _: on_pages_free())
        raise
    except LinkBroken:
        on_pages_free()
        raise
    on_pages_free()
    return event.num_bytes, event.seconds


class _ProbeLate(LinkBroken):
    """The probe is late, and its pages are not free yet."""


def _pull_once(puller: ThreadedPuller | PullerSet, pull: Pull, ended: Future[PullEvent]) -> PullEvent:
    """Waits for the terminal event, which becomes the result of `ended` even if it comes late."""

    def on_event(event: PullEvent) -> None:
        if event.outcome is not PullOutcome.LATE:
            ended.set_result(event)

    puller.submit_to(pull, on_event)
    try:
        event = ended.result(timeout=pull.deadline_s + 0.1)  # a late one that can be cancelled ends at its deadline
    except TimeoutError:
        raise _ProbeLate(f"probe of {pull.source}: nothing within {pull.deadline_s} s") from None
    if event.outcome is not PullOutcome.DONE:
        raise LinkBroken(f"probe of {pull.source}: {event.reason}")
    return event
