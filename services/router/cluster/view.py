"""Builds the snapshot of the cluster, from the router's own state, the requests that ended and what routers share.

    registry read --> observe: changes, rates        request event, end --> events, window
    other routers --> take_peers: rows, events, ends   `--> snapshot(tenant), when a viewer asks; share, when another
                                                            router watches

Without viewers, one comparison a heartbeat and one append a request are all that runs. One event loop owns it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from baton.domain.lifecycle import RequestState
from baton.services.router.cluster.changes import ClusterChanges
from baton.services.router.cluster.ended_requests import EndedRequests
from baton.services.router.cluster.event_log import ClusterEventLog
from baton.services.router.cluster.peers.merge import merged
from baton.services.router.cluster.peers.peer_routers import PeerRouters
from baton.services.router.cluster.peers.share import VERSION as SHARE_VERSION
from baton.services.router.cluster.peers.share import RouterShare, SharedRow, encode_share
from baton.services.router.cluster.rates import ClusterRates
from baton.services.router.cluster.rows import link_rows, lost_row, request_row, worker_row
from baton.services.router.cluster.snapshot import (
    MAX_EVENTS,
    MAX_LINKS,
    MAX_RECENT,
    MAX_REQUESTS,
    MAX_WORKERS,
    ClusterSnapshot,
    RouterRow,
    ServiceObjectives,
)
from baton.services.router.cluster.source import ClusterSource
from baton.services.router.cluster.window import RequestWindow, WindowTotals, summarize
from baton.store.views.view_store import MAX_VIEW_BYTES, StoredView
from baton.telemetry.metrics import ITL_SECONDS
from baton.telemetry.request_timer import RequestTimer
from baton.telemetry.request_trace import Outcome, RequestTrace, TraceEvent
from baton.telemetry.request_traces import RequestTraces

REFUSAL_EVENT_S = 1.0
"""Refusals within this time are one event."""
MAX_SCANNED = 512
"""Ended requests that one answer looks at."""
STORING_S = 30.0
"""A router that ended a request has stored its trace after this time, or the trace is lost."""
MAX_FOREIGN_EVENTS = 32
"""Events of other routers that one reading adds, the newest."""
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
        self.ends = EndedRequests(unix_s)
        self.peers = PeerRouters(identity.router, len(ITL_SECONDS.bounds) + 1)
        self._source = source
        self._traces = traces
        self._clock = clock
        self._unix_s = unix_s
        self._rates = ClusterRates()
        self._changes = ClusterChanges(self.events)
        self._window = RequestWindow()
        self._num_shares = 0
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
        now = self._clock()
        window = self._window_now(now)
        workers, breakers = self._source.workers(), self._source.breakers()
        shown = [each for each in self._source.requests() if tenant in (None, each.tenant)]
        own, router = tenant is not None, self.identity.router
        rows = [worker_row(worker, self._rates) for worker in workers[:MAX_WORKERS]]
        rows += [lost_row(worker, now) for worker in self._changes.lost(now)]
        snapshot = ClusterSnapshot(
            now_ms=round(1000 * self._unix_s()),
            build=self.identity.build,
            version=self.identity.version,
            router=router,
            model=self.identity.model,
            scope="own" if own else "all",
            demo=self.identity.demo and not own,
            objectives=ServiceObjectives(),
            window=summarize([], ()),
            degraded=self._source.degraded(),
            counts=self._counts(),
            num_requests=len(shown),
            num_workers=0 if own else len(workers),
            routers=(self._router_row(window),),
            workers=() if own else tuple(rows),
            links=() if own else tuple(link_rows(workers, breakers, self._rates)[:MAX_LINKS]),
            requests=tuple([request_row(each, router) for each in shown[:MAX_REQUESTS]]),
            recent=tuple(self.ends.newest(tenant, MAX_RECENT)),
            events=tuple(self.events.newest(tenant, MAX_EVENTS)),
        )
        peers = self.peers
        return merged(snapshot, window, ITL_SECONDS.bounds, peers.shares(now), peers.rows(now), tenant)

    def share(self) -> bytes:
        """What other routers show of this one. Private calls count, and are not listed."""
        now = self._clock()
        window, router = self._window_now(now), self.identity.router
        self._num_shares += 1
        requests = list(self._source.requests())
        listed = [each for each in requests if not each.private][:MAX_REQUESTS]
        share = RouterShare(
            v=SHARE_VERSION,
            number=self._num_shares,
            row=self._router_row(window),
            counts=self._counts(),
            num_requests=len(requests),
            window=window,
            rows=[SharedRow(each.tenant, request_row(each, router)) for each in listed],
            ends=self.ends.shared(),
            events=list(self.events.shared),
        )
        return encode_share(share, MAX_VIEW_BYTES)

    def take_peers(self, views: Sequence[StoredView], *, watching: bool = True) -> None:
        """Takes one reading of the other routers, and of what they share if this one watches."""
        news = self.peers.observe(views, self._clock(), watching=watching)
        events = [(event, each.router) for each in news for event in each.events]
        for event, router in sorted(events, key=lambda pair: pair[0].at_ms)[-MAX_FOREIGN_EVENTS:]:
            self.events.add_foreign(event, router)
        self.ends.add_foreign([end for each in news for end in each.ends])

    def recent(self, tenant: str | None, count: int, *, notable: bool = False) -> Iterator[RequestTrace]:
        """At most `count` requests that ended, newest first, among the last `MAX_SCANNED`."""
        found = 0
        for scanned, trace in enumerate(self._traces.recent(notable=notable)):
            if found == count or scanned == MAX_SCANNED:
                return
            if tenant in (None, trace.tenant):
                found += 1
                yield trace

    def held(self, tenant: str | None, *, notable: bool = False) -> Iterator[RequestTrace]:
        """The last `MAX_SCANNED` requests that ended, and as many notable ones, each once: the slowest are of those."""
        seen: set[str] = set()
        for only_notable in (True,) if notable else (False, True):
            for trace in self.recent(tenant, MAX_SCANNED, notable=only_notable):
                if trace.id not in seen:
                    seen.add(trace.id)
                    yield trace

    def trace(self, id: str, tenant: str | None) -> RequestTrace | None:
        """The trace of a running or recent request; None for an unknown one, and for that of another tenant."""
        trace = self._traces.find(id)
        return trace if trace is not None and tenant in (None, trace.tenant) else None

    def router_of(self, id: str, tenant: str | None) -> str | None:
        """The other router that runs this request, or ended it within `STORING_S`. None: no such one, as in `trace`."""
        since_ms = 1000 * (self._unix_s() - STORING_S)
        ended = [row.router for row in self.ends.foreign(tenant) if row.id == id and row.at_ms >= since_ms]
        return ended[0] if ended else self.peers.router_of(id, tenant, self._clock())

    def _window_now(self, now: float) -> WindowTotals:
        load = self._source.load()
        self._window.observe(load.num_tokens, ITL_SECONDS.counts(), now)
        self._report_refusals(now)
        return self._window.totals(load.num_tokens, ITL_SECONDS.counts(), now)

    def _router_row(self, window: WindowTotals) -> RouterRow:
        load = self._source.load()
        status = "draining" if load.draining else "ready"
        row = (load.num_open, load.num_queued, load.num_queued_tokens, window.output_tok_s)
        return RouterRow(self.identity.router, status, *row)

    def _counts(self) -> dict[str, int]:
        counts = dict.fromkeys((state.value for state in RequestState if not state.terminal), 0)
        for each in self._source.requests():
            counts[each.state.value] = counts.get(each.state.value, 0) + 1
        return counts

    def _on_trace(self, trace: RequestTrace, data: bytes) -> None:
        now = self._clock()
        self._window.add(trace, now)
        self.ends.add(trace)
        about = {"request": trace.id, "tenant": trace.tenant}
        if trace.outcome is Outcome.REFUSED:
            self._refusals[trace.code] += 1
            self._report_refusals(now)
        elif trace.outcome is Outcome.FAILED:
            self.events.add_request("failed", "bad", f"failed: {trace.code}", private=trace.private, **about)
        num = 0
        for sequence in trace.sequences:
            for attempt in sequence.attempts:
                num += attempt.decode_times.num_preemptions if attempt.decode_times is not None else 0
        if num:
            times = "once" if num == 1 else f"{num} times"
            text = f"was preempted {times}: its worker needed the pages"
            self.events.add_request("preempted", "warn", text, private=trace.private, **about)

    def _on_request_event(self, timer: RequestTimer, event: TraceEvent) -> None:
        level = _EVENT_LEVELS.get(event.kind, "info")
        about = {"request": timer.id, "tenant": timer.origin.tenant}
        self.events.add_request(event.kind, level, event.text, private=timer.private, **about)

    def _report_refusals(self, now: float) -> None:
        """One event for all refusals since the last one, at most one in `REFUSAL_EVENT_S`."""
        if not self._refusals or now - self._refused_at < REFUSAL_EVENT_S:
            return
        total = self._refusals.total()
        codes = ", ".join(sorted(self._refusals))
        self.events.add_request(
            "refused", "warn", f"{total} {'request' if total == 1 else 'requests'} refused: {codes}"
        )
        self._refusals.clear()
        self._refused_at = now
