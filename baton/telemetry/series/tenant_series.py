"""Counts requests and tokens by tenant. Owned by `request_traces`; one event loop.

Tenants come from a file of keys, so there may be many: those beyond `MAX_TENANTS` share one label.
"""

from __future__ import annotations

from functools import cache

from baton.telemetry import metrics
from baton.telemetry.request_trace import RequestTrace

MAX_TENANTS = 100
OTHERS = "other"

_KINDS = ("prompt", "cached", "output")

_requests = cache(metrics.TENANT_REQUESTS_TOTAL.labels)  # a metric keeps its children, too
_tokens = cache(metrics.TENANT_TOKENS_TOTAL.labels)


class TenantSeries:
    """The first `MAX_TENANTS` tenants have series of their own."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def observe(self, trace: RequestTrace) -> None:
        """Counts one request that has ended."""
        tenant = self._label(trace.tenant)
        _requests(tenant, trace.outcome._value_).inc()  # `value` is two Python calls
        for kind, count in zip(_KINDS, (trace.prompt_tokens, trace.cached_tokens, trace.output_tokens), strict=True):
            counter = _tokens(tenant, kind)  # shown even while it is 0
            if count:
                counter.inc(count)
        if trace.ttft_us is not None:
            metrics.TENANT_TTFT_SECONDS.labels(tenant).observe(1e-6 * trace.ttft_us)

    def _label(self, tenant: str) -> str:
        if tenant not in self._named:
            if len(self._named) >= MAX_TENANTS:
                return OTHERS
            self._named.add(tenant)
        return tenant
