"""The last events of the cluster, with numbers. Owned by `view`; one event loop."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

from baton.services.router.cluster.peers.merge import newest
from baton.services.router.cluster.snapshot import MAX_EVENTS, ClusterEvent

MAX_KEPT = 512
MAX_TEXT_CHARS = 240
LEVELS = frozenset({"info", "good", "warn", "bad"})


class ClusterEventLog:
    """`unix_s`: the time for display. Events of other routers cannot push out the own ones."""

    def __init__(self, unix_s: Callable[[], float]) -> None:
        self._unix_s = unix_s
        self._own: deque[ClusterEvent] = deque(maxlen=MAX_KEPT)
        self._foreign: deque[ClusterEvent] = deque(maxlen=MAX_KEPT)
        self.shared: deque[ClusterEvent] = deque(maxlen=MAX_EVENTS)
        """The latest of this router's events that other routers show, too, oldest first."""
        self.last_seq = 0

    def add(self, kind: str, level: str, text: str, *, worker: str = "") -> None:
        """Adds an event that every router sees for itself; the oldest one leaves when there are `MAX_KEPT`."""
        self._own.append(self._event(kind, level, text, worker=worker))

    def add_request(
        self, kind: str, level: str, text: str, *, request: str = "", tenant: str = "", private: bool = False
    ) -> None:
        """Adds an event of this router's requests. `private`: other routers do not get it."""
        event = self._event(kind, level, text, request=request, tenant=tenant)
        self._own.append(event)
        if not private:
            self.shared.append(event)

    def add_foreign(self, event: ClusterEvent, router: str) -> None:
        """Adds an event of another router's requests."""
        self.last_seq += 1
        at_ms, level = min(event.at_ms, self._now_ms()), event.level if event.level in LEVELS else "info"
        self._foreign.append(
            ClusterEvent(
                self.last_seq,
                at_ms,
                event.kind[:MAX_TEXT_CHARS],
                level,
                event.text[:MAX_TEXT_CHARS],
                request=event.request[:MAX_TEXT_CHARS],
                tenant=event.tenant,
                router=router,
            )
        )

    def after(self, seq: int) -> list[ClusterEvent]:
        """Events with a number above `seq`, oldest first."""
        found = [event for event in (*self._own, *self._foreign) if event.seq > seq]
        return sorted(found, key=lambda event: event.seq)

    def newest(self, tenant: str | None, count: int) -> list[ClusterEvent]:
        """At most `count` events, oldest first. `tenant`: only those of its requests; None: all."""
        own, foreign = (_last(events, tenant, count) for events in (self._own, self._foreign))
        return newest(own, foreign, count, at=lambda event: event.at_ms)

    def _event(self, kind: str, level: str, text: str, **about: str) -> ClusterEvent:
        self.last_seq += 1
        return ClusterEvent(self.last_seq, self._now_ms(), kind, level, text[:MAX_TEXT_CHARS], **about)

    def _now_ms(self) -> int:
        return round(1000 * self._unix_s())


def _last(events: deque[ClusterEvent], tenant: str | None, count: int) -> list[ClusterEvent]:
    """The last `count` events that a viewer sees, oldest first."""
    found = itertools.islice((event for event in reversed(events) if is_visible(event, tenant)), count)
    return list(found)[::-1]


def is_visible(event: ClusterEvent, tenant: str | None) -> bool:
    """True if a viewer sees the event. `tenant` None: it sees everything."""
    return tenant is None or (bool(event.request) and event.tenant == tenant)
