"""Reads what the cluster view shows from the dispatcher and the worker set. Built by `app`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from baton.domain.ids import Incarnation
from baton.services.router.cluster.source import KnownWorker, OpenRequest, RouterLoad
from baton.services.router.dispatch.dispatcher import TokenDispatcher
from baton.services.router.dispatch.workers import WorkerSet


class ClusterReader:
    """Implements `ClusterSource`. `degraded`: components that the router does without."""

    def __init__(
        self,
        dispatcher: TokenDispatcher,
        workers: WorkerSet,
        degraded: Callable[[], tuple[str, ...]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dispatcher = dispatcher
        self._workers = workers
        self._clock = clock
        self.degraded = degraded

    def workers(self) -> Sequence[KnownWorker]:
        """See `ClusterSource.workers`."""
        served = sorted(self._workers.served(), key=lambda record: record.id)
        return [KnownWorker(record, self._workers.absence(record).value) for record in served]

    def breakers(self) -> Mapping[tuple[Incarnation, Incarnation], str]:
        """See `ClusterSource.breakers`."""
        return {link: state.value for link, state in self._workers.breakers().items()}

    def requests(self) -> Iterator[OpenRequest]:
        """See `ClusterSource.requests`."""
        now = self._clock()
        for tracked in self._dispatcher.tracked():
            sequence, pair, timer = tracked.sequence, tracked.pair, tracked.timer.request
            yield OpenRequest(
                sequence.id,
                timer.id,
                sequence.tenant,
                tracked.state,
                pair.prefill.id if pair is not None else "",
                pair.decode.id if pair is not None else "",
                len(sequence.prompt_tokens),
                tracked.num_cached_tokens,
                tracked.num_emitted,
                now - timer.arrived_s,
                tracked.id.attempt,
                timer.private,
            )

    def load(self) -> RouterLoad:
        """See `ClusterSource.load`."""
        dispatcher, queue = self._dispatcher, self._dispatcher.admission_queue
        return RouterLoad(
            dispatcher.num_open,
            queue.num_waiting,
            queue.num_waiting_tokens,
            dispatcher.num_tokens,
            dispatcher.draining,
        )
