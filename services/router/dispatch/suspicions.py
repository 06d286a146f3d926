"""Workers that get no new requests, since a call to them failed. Owned by `workers`; pure.

    trusted --(a call fails)--> suspected --(one TTL)--> trusted
                                    `--(a good answer of the same process, once a TTL)--> trusted

One lost message breaks a call, while the worker answers others. A worker that fails again within a TTL of such an
answer is suspected for a whole TTL, and so is one that refuses requests: its rows go on answering.
"""

from __future__ import annotations

from baton.domain.ids import Incarnation


class Suspicions:
    """Suspected worker processes. Times in seconds, of any one clock."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._until: dict[Incarnation, float] = {}
        self._firm_until: dict[Incarnation, float] = {}
        self.any = False
        """False only if nobody is suspected: a plain attribute, since it is read at every token."""

    def add(self, incarnation: Incarnation, now: float, *, refuses: bool = False) -> None:
        """Suspects a worker for one TTL from `now`. `refuses`: it has answered, and takes no requests."""
        self._until[incarnation] = now + self._ttl_s
        if refuses:
            self._firm_until[incarnation] = now + self._ttl_s
        self.any = True

    def holds(self, incarnation: Incarnation, now: float) -> bool:
        """True while the worker is suspected."""
        return self._until.get(incarnation, now) > now

    def on_answer(self, incarnation: Incarnation, now: float) -> bool:
        """Records a good answer. True if the worker was suspected until now, and is no longer."""
        for over in [one for one, until in self._until.items() if until <= now]:
            del self._until[over]
        is_ended = incarnation in self._until and self._firm_until.get(incarnation, now) <= now
        if is_ended:
            del self._until[incarnation]
            self._firm_until[incarnation] = now + self._ttl_s
        self.any = bool(self._until)
        return is_ended

    def forget(self, incarnation: Incarnation) -> None:
        """Forgets a worker that is lost. Idempotent."""
        self._firm_until.pop(incarnation, None)
        self._until.pop(incarnation, None)
        self.any = bool(self._until)
