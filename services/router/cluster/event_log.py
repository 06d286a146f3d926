"""The last events of the cluster, with numbers. Owned by `view`; one event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from baton.services.router.cluster.snapshot import ClusterEvent

MAX_KEPT = 512
MAX_TEXT_CHARS = 240


class ClusterEventLog:
    """`unix_s`: the time for display."""

    def __init__(self, unix_s: Callable[[], float]) -> None:
        self._unix_s = unix_s
        self._events: deque[ClusterEvent] = deque(maxlen=MAX_KEPT)
        self.last_seq = 0

    def add(self, kind: str, level: str, text: str, *, worker: str = "", request: str = "", tenant: str = "") -> None:
        """Adds an event; the oldest one leaves when there are `MAX_KEPT`."""
        self.last_seq += 1
        at_ms = round(1000 * self._unix_s())
        self._events.append(
            ClusterEvent(self.last_seq, at_ms, kind, level, text[:MAX_TEXT_CHARS], worker, request, tenant)
        )

    def after(self, seq: int) -> Iterator[ClusterEvent]:
        """Events with a number above `seq`, oldest first."""
        return (event for event in self._events if event.seq > seq)

    def newest(self, tenant: str | None, count: int) -> list[ClusterEvent]:
        """At most `count` events, oldest first. `tenant`: only those of its requests; None: all."""
        found: list[ClusterEvent] = []
        for event in reversed(self._events):
            if len(found) == count:
                break
            if is_visible(event, tenant):
                found.append(event)
        return found[::-1]


def is_visible(event: ClusterEvent, tenant: str | None) -> bool:
    """True if a viewer sees the event. `tenant` None: it sees everything."""
    return tenant is None or (bool(event.request) and event.tenant == tenant)
