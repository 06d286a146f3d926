"""Starts labelled counters at 0, so that `increase()` sees the first event. Called once by each service's `app`.

A label set that is not known here (a link, a route, a tenant) appears with its first event.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Counter

from baton.domain.errors import (
    BatonError,
    Broken,
    Cancelled,
    DeadlineExceeded,
    FailedConstraint,
    Interrupted,
    Refused,
)
from baton.domain.lifecycle import RequestState
from baton.domain.request import FinishReason
from baton.domain.timing.prompt_cost import CostBasis
from baton.telemetry import metrics
from baton.telemetry.fast.fast_counter import FastCounter
from baton.telemetry.request_trace import Outcome
from baton.telemetry.series.vllm_series import VllmSeries

_ROUTER = "router"
_PHASES = tuple(state.value for state in RequestState if not state.terminal)
_ATTEMPT_PHASES = ("queued", "reserved", "prefilling", "sealed", "decoding")


def start_series(version: str, role: str, model: str, *, vllm_names: bool = False) -> None:
    """Shows this build and every known label set of the role's counters. `role`: router, or a worker's.

    `vllm_names`: show some metrics under vLLM's names, too; at most once a process.
    """
    metrics.BUILD_INFO.labels(version, role, model).set(1)
    if vllm_names:
        metrics.REGISTRY.register(VllmSeries(role, model))
    for counter, values in _router_series() if role == _ROUTER else _worker_series(role):
        counter.labels(*values)


def _router_series() -> Iterable[tuple[Counter | FastCounter, tuple[str, ...]]]:
    for failure in FailedConstraint:
        yield metrics.CONSTRAINT_FAILURES_TOTAL, (failure.value,)
    refused, lost = _codes(Refused), _codes(Interrupted)
    for reason in FinishReason:
        yield metrics.REQUESTS_TOTAL, (Outcome.FINISHED.value, reason.value)
    for code in refused:
        yield metrics.REQUESTS_TOTAL, (Outcome.REFUSED.value, code)
        yield metrics.ADMISSION_TOTAL, ("refused", code, "")
    for code in (*lost, DeadlineExceeded.code, Broken.code):
        yield metrics.REQUESTS_TOTAL, (Outcome.FAILED.value, code)
    yield metrics.REQUESTS_TOTAL, (Outcome.CANCELLED.value, Cancelled.code)
    yield metrics.ADMISSION_TOTAL, ("admitted", "", "")
    for phase in _ATTEMPT_PHASES:
        for code in lost:
            for outcome in ("retried", "given_up"):
                yield metrics.RETRIES_TOTAL, (phase, code, outcome)
    for basis in CostBasis:
        yield metrics.PLACEMENTS_TOTAL, (basis.value,)
    for outcome in ("reserved", "no_room", "ended"):
        yield metrics.EARLY_PREFILLS_TOTAL, (outcome,)
    for phase in _PHASES:
        yield metrics.ABORTS_TOTAL, (phase,)
    for outcome in ("encoder_used", "encoder_failed"):
        yield metrics.MEDIA_TOTAL, (outcome,)
    for cause in ("orphan", "client"):
        yield metrics.TAKEOVERS_TOTAL, (cause,)


def _worker_series(role: str) -> Iterable[tuple[Counter | FastCounter, tuple[str, ...]]]:
    for failure in FailedConstraint:
        yield metrics.CONSTRAINT_FAILURES_TOTAL, (failure.value,)
    yield metrics.PROMPT_TOKENS_TOTAL, (role,)
    yield metrics.GENERATED_TOKENS_TOTAL, (role,)
    yield metrics.CACHED_TOKENS_TOTAL, (role, "device")
    for kind in ("incarnation", "prefill" if role == "prefill" else "renew"):
        yield metrics.STALE_MESSAGES_TOTAL, (kind,)
    yield metrics.INTEGRITY_FAILURES_TOTAL, ("pool_page",)
    if role in ("prefill", "encode"):
        yield metrics.INTEGRITY_FAILURES_TOTAL, ("embedding",)
        for outcome in ("held", "encoded", "encode_failed", "pulled" if role == "prefill" else "exported"):
            yield metrics.MEDIA_TOTAL, (outcome,)
    if role == "prefill":
        yield metrics.CACHED_TOKENS_TOTAL, (role, "peer")
        for source in ("prefill", "decode"):
            yield metrics.IMPORTED_TOKENS_TOTAL, (source,)
        for tier in ("host", "file"):
            yield metrics.CACHED_TOKENS_TOTAL, (role, tier)
            yield metrics.TIER_CORRUPT_TOTAL, (tier,)
            for result in ("read", "written", "read_failed", "write_failed"):
                yield metrics.TIER_PAGES_TOTAL, (tier, result)
    if role == "decode":
        for result in ("v1", "v2", "v3", "invalid"):
            yield metrics.COMMIT_TOTAL, (result,)
        yield metrics.INTEGRITY_FAILURES_TOTAL, ("page_digest",)
        yield metrics.PREEMPTIONS_TOTAL, ("pages",)
        for reason in ("no_memory", "damaged_copy"):
            yield metrics.SEND_BACKS_TOTAL, (reason,)


def _codes(root: type[BatonError]) -> list[str]:
    """The codes of the classes below `root`."""
    return [code for child in root.__subclasses__() for code in (child.code, *_codes(child))]
