"""Ratios of two routers are those of the latency that each adds."""

from __future__ import annotations

from bench.harness.rotations import Block
from bench.router.short_requests import findings_of


def block(arm: str, *values: float) -> Block:
    return Block(0, arm, 1e9, 1e9, values)


def test_ratios_leave_out_the_workers_time():
    blocks = [
        block("direct", 1e-3, 1e-3, 1e-3),
        *(block("this alone", 2e-3, 2e-3, 4e-3), block("this CPU", 2e-3), block("this at 8", 600.0, 1.5e-3)),
        *(block("baseline alone", 3e-3, 3e-3, 7e-3), block("baseline CPU", 4e-3), block("baseline at 8", 400.0, 2e-3)),
    ]
    found = {finding.name: round(finding.overall.median, 3) for finding in findings_of(blocks)}
    assert found["added p50, this"] == 1000.0
    ratios = {name.removesuffix(", ratio"): value for name, value in found.items() if name.endswith("ratio")}
    assert ratios == {
        "added p50": 0.5,
        "added p99": 0.5,
        "CPU a request alone": 0.5,
        "requests/s at 8": 1.5,
        "CPU a request at 8": 0.75,
    }


def test_one_router_has_no_ratios():
    blocks = [block("direct", 1e-3), block("this alone", 2e-3), block("this CPU", 2e-3), block("this at 8", 6e2, 1e-3)]
    assert len(findings_of(blocks)) == 5
