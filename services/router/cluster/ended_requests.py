"""The latest requests that ended, here and on other routers. Owned by `view`; one event loop.

Rows are made when somebody looks. Requests of other routers cannot push out the own ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from baton.services.router.cluster.peers.merge import newest
from baton.services.router.cluster.peers.share import MAX_SHARED_ENDS, SharedEnd
from baton.services.router.cluster.rows import recent_row
from baton.services.router.cluster.snapshot import MAX_RECENT, RecentRequest
from baton.telemetry.request_trace import RequestTrace

MAX_FOREIGN = 200
MAX_TOLD = 64
"""Requests that `after` can still tell."""


class EndedRequests:
    """`unix_s`: the time for display. `count`: of all that were added."""

    def __init__(self, unix_s: Callable[[], float]) -> None:
        self._unix_s = unix_s
        self._own: deque[tuple[int, RequestTrace]] = deque(maxlen=MAX_SHARED_ENDS)  # with its number, from 1
        self._foreign: deque[SharedEnd] = deque(maxlen=MAX_FOREIGN)
        self._told: deque[RequestTrace | SharedEnd] = deque(maxlen=MAX_TOLD)
        self._num_own = 0
        self.count = 0

    def add(self, trace: RequestTrace) -> None:
        """Adds a request of this router."""
        self._num_own += 1
        self._own.append((self._num_own, trace))
        self._tell(trace)

    def add_foreign(self, ends: Sequence[SharedEnd]) -> None:
        """Adds requests of other routers, of which viewers are told the last `MAX_RECENT`."""
        now_ms = round(1000 * self._unix_s())
        ordered = sorted((_not_after(end, now_ms) for end in ends), key=lambda end: end.row.at_ms)
        self._foreign.extend(ordered)
        for end in ordered[-MAX_RECENT:]:
            self._tell(end)

    def after(self, count: int, tenant: str | None) -> list[RecentRequest]:
        """The latest requests, beginning after the first `count` of all, oldest first."""
        new = list(self._told)[-(self.count - count) :] if self.count > count else []
        return [_row(each) for each in new if tenant in (None, each.tenant)]

    def newest(self, tenant: str | None, count: int) -> list[RecentRequest]:
        """At most `count` requests, newest first. `tenant`: only its own; None: all."""
        own = [recent_row(trace) for trace in [t for _, t in self._own if tenant in (None, t.tenant)][-count:]]
        return newest(own, self.foreign(tenant), count, at=lambda row: row.at_ms)[::-1]

    def foreign(self, tenant: str | None) -> list[RecentRequest]:
        """Requests of other routers, as long as somebody watched."""
        return [end.row for end in self._foreign if tenant in (None, end.tenant)]

    def shared(self) -> list[SharedEnd]:
        """Requests of this router for the others, oldest first."""
        return [SharedEnd(n, trace.tenant, recent_row(trace)) for n, trace in self._own if not trace.private]

    def _tell(self, end: RequestTrace | SharedEnd) -> None:
        self._told.append(end)
        self.count += 1


def _row(end: RequestTrace | SharedEnd) -> RecentRequest:
    return end.row if isinstance(end, SharedEnd) else recent_row(end)


def _not_after(end: SharedEnd, now_ms: int) -> SharedEnd:
    """A clock that is ahead must not keep its requests in front."""
    if end.row.at_ms <= now_ms:
        return end
    return SharedEnd(end.number, end.tenant, msgspec.structs.replace(end.row, at_ms=now_ms))
