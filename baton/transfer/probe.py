"""Probe of a new link: a blocking pull of real pages that measures the bandwidth.

Called by decode before it announces a link. Works with every transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from baton.domain.errors import LinkBroken
from baton.domain.ids import PageId
from baton.transfer.base import Pull, PullEvent, PullOutcome, SourceInfo
from baton.transfer.puller import ThreadedPuller
from baton.transfer.puller_set import PullerSet

PROBE_DEADLINE_S = 5.0
FIRST_BYTES = 256 * 1024
"""Of the first measured pull."""
GROWTH = 4
"""How much larger the next pull is than one that was too short to measure."""
MEASURED_S = 2e-3
"""Least seconds of a pull that count as a measurement."""
MEASURED_STARTS = 4
"""Least length of such a pull, in pulls of one page: below it, a distant link would be measured by its latency."""


def probe_bandwidth(
    puller: ThreadedPuller | PullerSet,
    source: SourceInfo,
    local_pages: Sequence[PageId],
    num_pages: int,
    *,
    deadline_s: float = PROBE_DEADLINE_S,
    num_parts: int | None = None,
    on_pages_free: Callable[[], None],
) -> tuple[int, float]:
    """Pulls pages of a connected source; returns (bytes, seconds) of the pull that counts.

    The first pull, of one page, makes the connection, and the second one shows what a pull takes at least. The next
    ones grow until one takes long enough, and takes as long again: the faster one counts, since a process may have
    waited for its core. A slow link is measured with few bytes, as both processes need their cores for requests. No
    digests are checked, as the contents do not matter. `num_pages` is cut to the number of local pages and of the
    source's pages. `num_parts`: see `Pull`. Calls `on_pages_free` once, here or in the transfer thread, when
    `local_pages` may be reused; after a late pull that can be much later. Blocks for at most `deadline_s` per pull.
    Raises `LinkBroken`.
    """
    num_pages = min(num_pages, len(local_pages), source.num_pages)

    def pull(size: int) -> PullEvent:
        pages = tuple(PageId(page) for page in range(size))
        local = tuple(local_pages[:size])
        return _pull_once(puller, Pull(0, source.worker_id, pages, local, None, deadline_s, num_parts=num_parts))

    try:
        pull(1)
        enough_s = max(MEASURED_S, MEASURED_STARTS * pull(1).seconds)
        for size in _sizes(num_pages, source.page_bytes):
            event = pull(size)
            if event.seconds >= enough_s:
                event = min(event, pull(size), key=lambda one: one.seconds)
            if event.seconds >= enough_s:
                break
    except _ProbeLate as late:
        late.ended.add_done_callback(lambda _: on_pages_free())
        raise
    except LinkBroken:
        on_pages_free()
        raise
    on_pages_free()
    return event.num_bytes, event.seconds


def _sizes(num_pages: int, page_bytes: int) -> Iterator[int]:
    """Pages of each measured pull: more and more, the last time all."""
    size = max(1, FIRST_BYTES // page_bytes)
    while size < num_pages:
        yield size
        size *= GROWTH
    yield num_pages


class _ProbeLate(LinkBroken):
    """The probe is late: its pages are not free before `ended`."""

    def __init__(self, message: str, ended: Future[PullEvent]) -> None:
        super().__init__(message)
        self.ended = ended


def _pull_once(puller: ThreadedPuller | PullerSet, pull: Pull) -> PullEvent:
    """Waits for the terminal event. Raises `LinkBroken`."""
    ended: Future[PullEvent] = Future()

    def on_event(event: PullEvent) -> None:
        if event.outcome is not PullOutcome.LATE:
            ended.set_result(event)

    puller.submit_to(pull, on_event)
    try:
        event = ended.result(timeout=pull.deadline_s + 0.1)  # a late one that can be cancelled ends at its deadline
    except TimeoutError:
        raise _ProbeLate(f"probe of {pull.source}: nothing within {pull.deadline_s} s", ended) from None
    if event.outcome is not PullOutcome.DONE:
        raise LinkBroken(f"probe of {pull.source}: {event.reason}")
    return event
