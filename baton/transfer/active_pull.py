"""A pull in progress, from `submit` to its one terminal event.

Made by `baton.transfer.puller`, completed by a mover (`nixl`, `stream`, `fake`). Owned by the transfer thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.domain.errors import Broken
from baton.transfer.base import OnPullEvent, Pull, PullEvent, PullOutcome, SourceInfo

ClockFn = Callable[[], float]
"""Monotonic seconds."""


class ActivePull:
    """Mutable state of a `Pull`. Movers add the bytes that have arrived to `num_bytes`.

    `found`: see `PullEvent`, by position.
    """

    __slots__ = ("_clock", "_ended", "_late", "_on_event", "_submitted_at", "deadline", "found", "num_bytes", "pull")

    def __init__(self, pull: Pull, submitted_at: float, on_event: OnPullEvent, clock: ClockFn) -> None:
        self.pull = pull
        self.deadline = submitted_at + pull.deadline_s
        self.num_bytes = 0
        self.found: dict[int, int] = {}
        self._submitted_at = submitted_at
        self._on_event = on_event
        self._clock = clock
        self._late = False
        self._ended = False

    @property
    def late(self) -> bool:
        """True if the data may not be used any more. Nothing new should be started for it."""
        return self._late

    @property
    def ended(self) -> bool:
        """True after the terminal event: no byte can arrive any more."""
        return self._ended

    def expire(self, reason: str) -> None:
        """Reports `LATE`, once. The pages stay in use until `complete` or `fail`."""
        if not self._late and not self._ended:
            self._late = True
            self._emit(PullOutcome.LATE, reason)

    def complete(self, corrupt: Sequence[int] = ()) -> None:
        """Ends the pull: all bytes arrived; `corrupt` positions did not match. After the deadline that is a failure."""
        if self._clock() > self.deadline:
            self.expire("past its deadline")
        if self._late:
            self._end(PullOutcome.FAILED, "completed after its deadline")
        elif corrupt:
            reason = f"{len(corrupt)} pages do not match their digest or tag"
            self._end(PullOutcome.CORRUPT, reason, tuple(sorted(corrupt)))
        else:
            self._end(PullOutcome.DONE, "")

    def fail(self, reason: str) -> None:
        """Ends the pull: bytes are missing, and none can arrive from now on."""
        self._end(PullOutcome.FAILED, reason)

    def _end(self, outcome: PullOutcome, reason: str, corrupt: tuple[int, ...] = ()) -> None:
        if self._ended:
            raise Broken(f"pull {self.pull.id} ended twice")
        self._ended = True
        self._emit(outcome, reason, corrupt)

    def _emit(self, outcome: PullOutcome, reason: str, corrupt: tuple[int, ...] = ()) -> None:
        seconds = self._clock() - self._submitted_at
        complete = outcome in (PullOutcome.DONE, PullOutcome.CORRUPT)
        found = tuple(self.found[at] for at in sorted(self.found)) if complete else ()
        self._on_event(PullEvent(self.pull, outcome, self.num_bytes, seconds, reason, corrupt, found))


def pull_problem(pull: Pull, num_local_pages: int, source: SourceInfo) -> str | None:
    """Reason why `pull` cannot be started; None if it can. Checks page ids, as they may come from a peer."""
    num_pages = len(pull.local_pages)
    if len(pull.remote_pages) != num_pages:
        return f"{len(pull.remote_pages)} remote pages for {num_pages} local ones"
    if pull.digests is not None and len(pull.digests) != num_pages:
        return f"{len(pull.digests)} digests for {num_pages} pages"
    if pull.tags is not None and len(pull.tags) != num_pages:
        return f"{len(pull.tags)} tags for {num_pages} pages"
    if not _all_below(pull.local_pages, num_local_pages):
        return f"a local page is outside the pool of {num_local_pages}"
    if not _all_below(pull.remote_pages, source.num_pages):
        return f"a remote page is outside the pool of {source.num_pages}"
    windows, num_slots = pull.remote_windows if pull.num_parts is None else (), source.num_window_slots
    if len(windows) not in (0, num_pages) or not _all_below(windows, num_slots):
        return f"window slots {list(windows)[:8]} of {num_pages} pages are not {num_pages} of {num_slots}"
    return None


def _all_below(numbers: Sequence[int], end: int) -> bool:
    """True if all are in [0, end)."""
    return not numbers or (min(numbers) >= 0 and max(numbers) < end)
