"""The values of `GET /v1/cluster`. No behaviour; texts of requests never appear here.

Times are milliseconds: `*_ms` on the router's clock are durations, `now_ms` and `at_ms` are Unix times for display.
"""

from __future__ import annotations

import enum

import msgspec

MAX_WORKERS = 64
MAX_LINKS = 256
MAX_REQUESTS = 200
"""Rows of open requests; `num_requests` counts all."""
MAX_RECENT = 20
MAX_EVENTS = 50
UNREAD = "unread"
"""Status of a router that was asked for its requests, and has not answered yet."""
VERSION = 1


class ServiceWindow(msgspec.Struct, frozen=True):
    """The last minutes of all routers that answer. A quantile without a request is null, never 0.

    `error_ratio`: failed of all requests that were not refused. `output_tok_s`: of the last second.
    """

    seconds: int
    requests: int
    failed: int
    refused: int
    replayed: int
    error_ratio: float
    output_tok_s: float
    ttft_p95_ms: float | None
    itl_p99_ms: float | None


class ServiceObjectives(msgspec.Struct, frozen=True):
    """Objectives that the page marks values against; the same as those of docker/prometheus/alerts.yml."""

    ttft_p95_ms: float = 2500.0
    error_ratio: float = 0.001


class RouterRow(msgspec.Struct, frozen=True):
    """One router; the one that answers comes first. `open`: admitted sequences, waiting and running.

    `status`: ready, draining, `UNREAD`, silent or unreadable. The requests of the last
    three are not shown, and their numbers are null.
    """

    id: str
    status: str
    open: int | None = None
    queued: int | None = None
    queued_tokens: int | None = None
    output_tok_s: float | None = None


class WorkerRow(msgspec.Struct, frozen=True):
    """One worker process. `status`: ready, draining, silent, suspected, stuck or lost.

    `rows` are running, `queue` waits. `max_rows` and `prefill_tokens` are budgets; with 0 it takes none. Rates are from
    the totals of its heartbeats; null before the second one. Of an encode worker `queue` are images, `queue_tokens`
    their rows, and `tok_s` the rows that it encodes a second.
    `media`: images held, those that are encoded, and their bytes; null without images.
    `gone_ms`: time since a lost worker was removed.
    """

    id: str
    role: str
    incarnation: str
    status: str
    rows: int
    max_rows: int
    prefill_tokens: int
    queue: int
    queue_tokens: int
    tok_s: float | None
    hit_ratio: float | None
    step_age_ms: int
    total_pages: int
    pages: dict[str, int]
    gone_ms: int | None = None
    media: dict[str, int] | None = None


class LinkRow(msgspec.Struct, frozen=True):
    """A link that moves pages, or one that cannot. `state`: up, half_open, open (its breaker) or broken.

    `gib_s`: of the pulls of the last seconds, null without any; `probe_gib_s`: of the probe at link-up.
    """

    prefill: str = msgspec.field(name="from")
    decode: str = msgspec.field(name="to")
    state: str = "up"
    path: str = ""
    gib_s: float | None = None
    probe_gib_s: float | None = None
    moved_bytes: int = 0
    reason: str = ""


class OpenRequestRow(msgspec.Struct, frozen=True, array_like=True):
    """One open sequence of `router`, as an array in this order. `state`: as in `baton.domain.lifecycle`."""

    id: str
    router: str
    state: str
    prefill: str
    decode: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    age_ms: int
    attempt: int


class RecentRequest(msgspec.Struct, frozen=True):
    """A request that ended. `GET /v1/cluster/requests/{id}` has its stages."""

    id: str
    at_ms: int
    outcome: str
    code: str
    prefill: str
    decode: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    attempts: int
    ttft_ms: float | None
    e2e_ms: float
    notable: bool = False
    router: str = ""


class ClusterEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that happened. `level`: info, good, warn or bad. `seq` grows by one an event on this router.

    `router`: another one, which it happened on.
    """

    seq: int
    at_ms: int
    kind: str
    level: str
    text: str
    worker: str = ""
    request: str = ""
    tenant: str = ""
    router: str = ""


class ClusterSnapshot(msgspec.Struct, frozen=True):
    """The cluster as one router sees it, with the requests that the others share.

    `scope`: all, or own for a key that shows the requests of its tenant only.
    """

    now_ms: int
    build: str
    version: str
    router: str
    model: str
    scope: str
    demo: bool
    objectives: ServiceObjectives
    window: ServiceWindow
    degraded: tuple[str, ...]
    counts: dict[str, int]
    num_requests: int
    num_workers: int
    routers: tuple[RouterRow, ...]
    workers: tuple[WorkerRow, ...]
    links: tuple[LinkRow, ...]
    requests: tuple[OpenRequestRow, ...]
    recent: tuple[RecentRequest, ...]
    events: tuple[ClusterEvent, ...]
    v: int = VERSION


class ListOrder(enum.StrEnum):
    """Order of the requests of `GET /v1/cluster/requests`."""

    NEWEST = "newest"
    SLOWEST = "slowest"


class PendingTrace(msgspec.Struct, frozen=True):
    """Instead of the trace of a request of another router, `router`, that has not stored it yet."""

    id: str
    router: str
    trace: None = None


class RecentRequests(msgspec.Struct, frozen=True):
    """The answer of `GET /v1/cluster/requests`: newest or slowest first."""

    data: list[RecentRequest]
    object: str = "list"
