"""Who has to hear that a newer attempt, another router's, has taken over a job that runs here.

The book's pen tells it what it was refused; `delivery` and `carry` listen while they run a call. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from baton.domain.errors import Superseded
from baton.domain.ids import AttemptId, RequestId
from services.router.generation import GenerationJob

BreakOff = Callable[[Superseded], None]


@dataclass(frozen=True, slots=True)
class _Watch:
    """Who runs a job, begun under `attempt`."""

    attempt: int
    break_off: BreakOff


class Fence:
    """Owned by one event loop."""

    def __init__(self) -> None:
        self._watches: dict[RequestId, _Watch] = {}

    @contextmanager
    def watching(self, jobs: Iterable[GenerationJob], break_off: BreakOff) -> Iterator[None]:
        """Meanwhile `break_off` hears when a newer attempt at one of the jobs is in the book."""
        watches = {job.id: _Watch(job.attempt, break_off) for job in jobs}
        self._watches |= watches
        try:
            yield
        finally:
            for id, watch in watches.items():
                if self._watches.get(id) is watch:
                    del self._watches[id]

    def superseded(self, id: AttemptId) -> None:
        """The book refused this attempt. No effect if the job is run here under a newer one by now."""
        watch = self._watches.get(id.request_id)
        if watch is not None and id.attempt >= watch.attempt:
            watch.break_off(Superseded(f"request {id.request_id} is carried on by another router"))
