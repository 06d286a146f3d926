"""Builds the snapshot of the cluster, from the router's own state and from the requests that ended.

    registry read --> observe: changes, rates        request event, end --> events, window
                                    `--> snapshot(tenant), when a viewer asks

Without viewers, one comparison a heartbeat and one append a request are all that runs. One event loop owns it.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from baton.domain.lifecycle import RequestState
from baton.services.router.cluster.changes import ClusterChanges
from baton.services.router.cluster.event_log import ClusterEventLog
from baton.services.router.cluster.rates import ClusterRates
from baton.services.router.cluster.rows import link_rows, lost_row, recent_row, request_row, worker_row
from baton.services.router.cluster.snapshot import (
    MAX_EVENTS,
    MAX_LINKS,
    MAX_RECENT,
    MAX_REQUESTS,
    MAX_WORKERS,
    ClusterSnapshot,
    RecentRequest,
    RouterRow,
    ServiceObjectives,
)
from baton.services.router.cluster.source import ClusterSource
from baton.services.router.cluster.window import RequestWindow
from baton.telemetry.metrics import ITL_SECONDS
from baton.telemetry.request_timer import RequestTimer
from baton.telemetry.request_trace import Outcome, RequestTrace, TraceEvent
from baton.telemetry.request_traces import RequestTraces

REFUSAL_EVENT_S = 1.0
"""Refusals within this time are one event."""
MAX_SCANNED = 512
"""Ended requests that one answer looks at."""
_EVENT_LEVELS = {"attempt_failed": "bad", "replayed": "warn"}


@dataclass(frozen=True, slots=True)
class ViewIdentity:
    """Facts that do not change while the router runs. `build`: of the page; `demo`: workers can be killed from it."""

    router: str
    model: str
    version: str
    build: str = ""
    demo: bool = False


class ClusterView:
    """What this router knows. `clock` in seconds; `unix_s` for display."""

    def __init__(
        self,
        identity: ViewIdentity,
        source: ClusterSource,
        traces: RequestTraces,
        clock: Callable[[], float] = time.monotonic,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        """Subscribes to the ends and events of requests."""
        self.identity = identity
        self.events = ClusterEventLog(unix_s)
        self.ended: deque[RequestTrace] = deque(maxlen=MAX_RECENT)
        """The latest requests, oldest first; `num_ended` counts all."""
        self.num_ended = 0
        self._source = source
        self._traces = traces
        self._clock = clock
        self._unix_s = unix_s
        self._rates = ClusterRates()
        self._changes = ClusterChanges(self.events)
        self._window = RequestWindow(ITL_SECONDS.bounds)
        self._refusals: Counter[str] = Counter()
        self._refused_at = -REFUSAL_EVENT_S
        traces.add_sink(self._on_trace)
        traces.on_event(self._on_request_event)

    def observe(self) -> None:
        """One reading of the registry; `WorkerSet` calls it after each."""
        now, workers = self._clock(), self._source.workers()
        self._rates.observe([worker.record for worker in workers], now)
        self._changes.observe(workers, self._source.breakers(), now)
        self._changes.observe_degraded(self._source.degraded())
        self._window.observe(self._source.load().num_tokens, ITL_SECONDS.counts(), now)
        self._report_refusals(now)

    def snapshot(self, tenant: str | None = None) -> ClusterSnapshot:
        """The cluster now. `tenant`: its own requests and no workers; None: everything."""
        now, load = self._clock(), self._source.load()
        self._window.observe(load.num_tokens, ITL_SECONDS.counts(), now)
        self._report_refusals(now)
        workers, breakers = self._source.workers(), self._source.breakers()
        lost = self._changes.lost(now)
        shown = [each for each in self._source.requests() if tenant in (None, each.tenant)]
        own = tenant is not None
        router = self.identity.router
        rows = [worker_row(worker, self._rates) for worker in workers[:MAX_WORKERS]]
        rows += [lost_row(worker, now) for worker in lost]
        status = "draining" if load.draining else "ready"
        tokens = self._window.output_tokens_per_s(load.num_tokens, now)
        return ClusterSnapshot(
            now_ms=round(1000 * self._unix_s()),
            build=self.identity.build,
            version=self.identity.version,
            router=router,
            model=self.identity.model,
            scope="own" if own else "all",
            demo=self.identity.demo and not own,
            objectives=ServiceObjectives(),
            window=self._window.summary(load.num_tokens, ITL_SECONDS.counts(), now),
            degraded=self._source.degraded(),
            counts=self._counts(),
            num_requests=len(shown),
            num_workers=0 if own else len(workers),
            routers=(
                RouterRow(router, status, load.num_open, load.num_queued, load.num_queued_tokens, round(tokens, 1)),
            ),
            workers=() if own else tuple(rows),
            links=() if own else tuple(link_rows(workers, breakers, self._rates)[:MAX_LINKS]),
            requests=tuple([request_row(each, router) for each in shown[:MAX_REQUESTS]]),
            recent=tuple([recent_row(trace) for trace in reversed(self.ended) if tenant in (None, trace.tenant)]),
            events=tuple(self.events.newest(tenant, MAX_EVENTS)),
        )

    def recent(self, tenant: str | None, count: int, *, notable: bool = False) -> Iterator[RequestTrace]:
        """At most `count` requests that ended, newest first, among the last `MAX_SCANNED`."""
        found = 0
        for scanned, trace in enumerate(self._traces.recent(notable=notable)):
            if found == count or scanned == MAX_SCANNED:
                return
            if tenant in (None, trace.tenant):
                found += 1
                yield trace

    def trace(self, id: str, tenant: str | None) -> RequestTrace | None:
        """The trace of a running or recent request; None for an unknown one, and for that of another tenant."""
        trace = self._traces.find(id)
        return trace if trace is not None and tenant in (None, trace.tenant) else None

    def ended_after(self, count: int, tenant: str | None) -> list[RecentRequest]:
        """The latest requests, beginning after the first `count` of all, oldest first."""
        new = list(self.ended)[-(self.num_ended - count) :] if self.num_ended > count else []
        return [recent_row(trace) for trace in new if tenant in (None, trace.tenant)]

    def _counts(self) -> dict[str, int]:
        counts = dict.fromkeys((state.value for state in RequestState if not state.terminal), 0)
        for each in self._source.requests():
            counts[each.state.value] = counts.get(each.state.value, 0) + 1
        return counts

    def _on_trace(self, trace: RequestTrace, data: bytes) -> None:
        now = self._clock()
        self._window.add(trace, now)
        self.ended.append(trace)
        self.num_ended += 1
        if trace.outcome is Outcome.REFUSED:
            self._refusals[trace.code] += 1
            self._report_refusals(now)
        elif trace.outcome is Outcome.FAILED:
            self.events.add("failed", "bad", f"failed: {trace.code}", request=trace.id, tenant=trace.tenant)
        num = 0
        for sequence in trace.sequences:
            for attempt in sequence.attempts:
                num += attempt.decode_times.num_preemptions if attempt.decode_times is not None else 0
        if num:
            times = "once" if num == 1 else f"{num} times"
            text = f"was preempted {times}: its worker needed the pages"
            self.events.add("preempted", "warn", text, request=trace.id, tenant=trace.tenant)

    def _on_request_event(self, timer: RequestTimer, event: TraceEvent) -> None:
        level = _EVENT_LEVELS.get(event.kind, "info")
        self.events.add(event.kind, level, event.text, request=timer.id, tenant=timer.origin.tenant)

    def _report_refusals(self, now: float) -> None:
        """One event for all refusals since the last one, at most one in `REFUSAL_EVENT_S`."""
        if not self._refusals or now - self._refused_at < REFUSAL_EVENT_S:
            return
        total = self._refusals.total()
        codes = ", ".join(sorted(self._refusals))
        self.events.add("refused", "warn", f"{total} {'request' if total == 1 else 'requests'} refused: {codes}")
        self._refusals.clear()
        self._refused_at = now
