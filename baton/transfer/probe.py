"""Proof that a link moves bytes, and how fast: a blocking pull of real pages at link-up.

Called by decode before it reports a link as working. Knows no transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from baton.domain.errors import LinkBroken
from baton.domain.ids import PageId
from baton.transfer.base import Pull, PullEvent, PullOutcome, SourceInfo
from baton.transfer.puller import ThreadedPuller

PROBE_DEADLINE_S = 5.0
_NUM_ROUNDS = 2


def probe_bandwidth(
    puller: ThreadedPuller,
    source: SourceInfo,
    local_pages: Sequence[PageId],
    num_pages: int,
    *,
    deadline_s: float = PROBE_DEADLINE_S,
    on_pages_free: Callable[[], None],
) -> tuple[int, float]:
    """Pulls the first `num_pages` of a connected source twice: (bytes, seconds) of the second time.

    The first pull makes the connection. What the pages hold is of no matter, so no digests are checked. At most
    `len(local_pages)` and the source's number of pages are moved. `on_pages_free` is called once, here or in the
    transfer thread, when `local_pages` may be used again: after a `LinkBroken` by lateness that can be much later.
    Blocks for `deadline_s` a round at most. Raises `LinkBroken`.
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
    """The probe is late and its pages are not free yet."""


def _pull_once(puller: ThreadedPuller, pull: Pull, ended: Future[PullEvent]) -> PullEvent:
    """The terminal event, which is also the result of `ended`, whenever that comes."""

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
