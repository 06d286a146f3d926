"""Series by tenant are filled and bounded."""

from __future__ import annotations

import msgspec

from baton.telemetry.metrics import REGISTRY
from baton.telemetry.request_trace import Outcome, RequestTrace
from baton.telemetry.series.tenant_series import MAX_TENANTS, OTHERS, TenantSeries

TRACE = RequestTrace("cmpl-1", "router-0", "m", "/v1/completions", 0, Outcome.FINISHED, 900_000)
replace = msgspec.structs.replace


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def test_requests_and_tokens_are_counted_under_their_tenant():
    series, tenant = TenantSeries(), "tenant-of-this-test"
    trace = replace(TRACE, tenant=tenant, prompt_tokens=100, cached_tokens=30, output_tokens=7, ttft_us=250_000)
    for _ in range(2):
        series.observe(trace)
    counted = {k: value("baton_tenant_tokens_total", tenant=tenant, kind=k) for k in ("prompt", "cached", "output")}
    assert counted == {"prompt": 200.0, "cached": 60.0, "output": 14.0}
    assert value("baton_tenant_requests_total", tenant=tenant, outcome=trace.outcome.value) == 2.0
    assert value("baton_tenant_ttft_seconds_sum", tenant=tenant) == 0.5


def test_a_request_without_a_token_has_no_time_to_first_token():
    series, tenant = TenantSeries(), "tenant-without-a-token"
    series.observe(replace(TRACE, tenant=tenant, ttft_us=None))
    assert value("baton_tenant_ttft_seconds_count", tenant=tenant) == 0.0


def test_tenants_beyond_the_bound_share_one_label():
    series = TenantSeries()
    before = value("baton_tenant_requests_total", tenant=OTHERS, outcome=TRACE.outcome.value)
    for number in range(MAX_TENANTS + 5):
        series.observe(replace(TRACE, tenant=f"many-{number}"))
    samples = [sample for family in REGISTRY.collect() for sample in family.samples]
    labels = {each.labels["tenant"] for each in samples if each.name == "baton_tenant_requests_total"}
    assert len({label for label in labels if label.startswith("many-")}) == MAX_TENANTS
    after = value("baton_tenant_requests_total", tenant=OTHERS, outcome=TRACE.outcome.value)
    assert after - before == 5.0
