"""Growth of resources, and noise that is none."""

from __future__ import annotations

import random

import pytest

from chaos.checks.resource_monitor import MAX_RSS_GROWTH_BYTES, ResourceSample, resource_growths, slope
from chaos.testbed.metrics import parse_metrics
from chaos.testbed.process import ProcessResources

MIB = 1024 * 1024


def counts(name: str, rss_mib: list[float], fds: list[int] | None = None, generation: int = 7) -> list[ResourceSample]:
    files = fds or [20] * len(rss_mib)
    pairs = enumerate(zip(rss_mib, files, strict=True))
    return [
        ResourceSample(60.0 * n, name, generation, ProcessResources(int(rss * MIB), num, 10), 0)
        for n, (rss, num) in pairs
    ]


def test_the_slope_ignores_outliers() -> None:
    points = [(float(x), 3.0 * x) for x in range(20)]
    points[4], points[11] = (4.0, 900.0), (11.0, -900.0)
    assert slope(points) == pytest.approx(3.0, abs=0.5)


def test_a_leak_is_found_in_noise() -> None:
    rng = random.Random(1)
    leaking = [500 + 4 * n + rng.uniform(-8, 8) for n in range(20)]
    growth, *_ = resource_growths(counts("decode-0", leaking))
    assert growth.rss_bytes > MAX_RSS_GROWTH_BYTES
    assert [problem for problem in growth.problems if "RSS" in problem]


def test_leaked_files_are_found() -> None:
    growth, *_ = resource_growths(counts("router-0", [90.0] * 20, [20 + n for n in range(20)]))
    assert [problem for problem in growth.problems if "open files" in problem]


def test_filling_caches_and_noise_are_no_leak() -> None:
    rng = random.Random(2)
    filling = [300 + min(n, 8) * 20 + rng.uniform(-4, 4) for n in range(20)]
    growth, *_ = resource_growths(counts("prefill-0", filling, [rng.choice([25, 26, 27]) for _ in range(20)]))
    assert growth.problems == []


def test_a_restarted_process_is_not_checked() -> None:
    lived = counts("decode-0", [500.0] * 12)
    died = counts("decode-1", [500.0] * 9) + counts("decode-1", [400.0] * 12, generation=8)[9:]
    both = sorted(lived + died, key=lambda count: count.at_s)
    assert [growth.name for growth in resource_growths(both)] == ["decode-0"]


def test_metrics_are_parsed_from_prometheus_text() -> None:
    text = """# HELP baton_kv_pages Pages of the pool by owner.
# TYPE baton_kv_pages gauge
baton_kv_pages{owner="free"} 100.0
baton_kv_pages{owner="live"} 3.0
baton_kv_pages{owner="pinned"} 2.0
baton_requests_in_state{state="decoding"} 1.0
baton_requests_in_state{state="finished"} 9.0
baton_queued_requests 4.0
process_open_fds 12.0
"""
    metrics = parse_metrics(text)
    assert metrics.busy_pages == 5
    assert metrics.open_requests == 1
    assert metrics.sum("baton_queued_requests") == 4
    assert metrics.sum("process_open_fds") == 0
