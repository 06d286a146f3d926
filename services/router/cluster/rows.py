"""Makes the rows of a snapshot from records, open sequences and traces. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from baton.domain.ids import Incarnation
from baton.domain.worker import LinkRecord, WorkerRecord, WorkerRole
from baton.services.router.cluster.changes import LostWorker
from baton.services.router.cluster.rates import GIB, ClusterRates
from baton.services.router.cluster.snapshot import LinkRow, OpenRequestRow, RecentRequest, WorkerRow
from baton.services.router.cluster.source import KnownWorker, OpenRequest
from baton.telemetry.request_trace import Outcome, RequestTrace

_WORST_FIRST = ("broken", "open", "half_open", "up")


def worker_row(worker: KnownWorker, rates: ClusterRates) -> WorkerRow:
    """The row of a worker that is there."""
    record = worker.record
    return _row(record, worker.absence or record.status.value, rates)


def lost_row(worker: LostWorker, now: float) -> WorkerRow:
    """The row of a worker that is gone, with the values of its last heartbeat."""
    record = worker.record
    return _row(record, "lost" if worker.lost else "left", None, round(1000 * (now - worker.at_s)))


def _row(record: WorkerRecord, status: str, rates: ClusterRates | None, gone_ms: int | None = None) -> WorkerRow:
    load = record.load
    tok_s = None if rates is None else rates.tokens_per_s(record.incarnation)
    hits = None if rates is None else rates.hit_ratio(record)
    return WorkerRow(
        id=record.id,
        role=record.role.value,
        incarnation=str(record.incarnation),
        status=status,
        rows=load.running_rows,
        max_rows=record.budgets.rows,
        prefill_tokens=record.budgets.prefill_tokens,
        queue=load.waiting_requests,
        queue_tokens=load.waiting_tokens,
        tok_s=None if tok_s is None else round(tok_s, 1),
        hit_ratio=None if hits is None else round(hits, 4),
        step_age_ms=round(1000 * load.step_age_s),
        total_pages=load.total_pages,
        pages=asdict(load.pages),
        gone_ms=gone_ms,
        media=asdict(load.media) if load.media.max_bytes else None,
    )


def link_rows(
    workers: Sequence[KnownWorker], breakers: Mapping[tuple[Incarnation, Incarnation], str], rates: ClusterRates
) -> list[LinkRow]:
    """Every link, those in trouble first."""
    there = {worker.record.incarnation for worker in workers}
    rows: list[LinkRow] = []
    for worker in workers:
        decode = worker.record
        if decode.role is not WorkerRole.DECODE:
            continue
        for link in decode.links:
            if link.prefill_incarnation in there:
                state = breakers.get((link.prefill_incarnation, decode.incarnation), "up")
                rows.append(_link_row(link, decode, state, rates))
        rows += [
            LinkRow(broken.prefill_id, decode.id, "broken", reason=broken.reason) for broken in decode.broken_links
        ]
    return sorted(rows, key=lambda row: (_WORST_FIRST.index(row.state), row.decode, row.prefill))


def _link_row(link: LinkRecord, decode: WorkerRecord, state: str, rates: ClusterRates) -> LinkRow:
    gib_s = rates.gib_per_s(link, decode.incarnation)
    return LinkRow(
        link.prefill_id,
        decode.id,
        state,
        path=link.path or link.transport,
        gib_s=None if gib_s is None else round(gib_s, 3),
        probe_gib_s=round(link.bandwidth_bytes_per_s / GIB, 3),
        moved_bytes=link.num_pulled_bytes,
    )


def request_row(request: OpenRequest, router: str) -> OpenRequestRow:
    """The row of an open sequence."""
    return OpenRequestRow(
        request.id,
        router,
        request.state.value,
        request.prefill,
        request.decode,
        request.num_prompt_tokens,
        request.num_cached_tokens,
        request.num_output_tokens,
        round(1000 * request.age_s),
        request.attempt,
    )


def recent_row(trace: RequestTrace) -> RecentRequest:
    """The row of a request that ended."""
    attempt = trace.last_attempt
    return RecentRequest(
        id=trace.id,
        at_ms=(trace.arrived_unix_us + trace.e2e_us) // 1000,
        outcome=trace.outcome.value,
        code=trace.code,
        prefill="" if attempt is None else attempt.prefill,
        decode="" if attempt is None else attempt.decode,
        prompt_tokens=trace.prompt_tokens,
        cached_tokens=trace.cached_tokens,
        output_tokens=trace.output_tokens,
        attempts=max((sequence.num_attempts for sequence in trace.sequences), default=0),
        ttft_ms=None if trace.ttft_us is None else trace.ttft_us / 1000,
        e2e_ms=trace.e2e_us / 1000,
        notable=trace.outcome is Outcome.FAILED or trace.num_attempts > trace.n,
        router=trace.router,
    )
