"""Throughput of page transfer: a pool is pulled whole, and speeds are compared with the baseline."""

import time

from bench.harness.probes import PROBE_BYTES
from bench.harness.rotations import Block
from bench.transfer import throughput


def test_a_pool_is_pulled_whole():
    with throughput.running_pair("stream", 1024 * 1024, {}) as pool:
        began_s = time.perf_counter()
        [speed] = pool.pull()
        assert PROBE_BYTES / (time.perf_counter() - began_s) <= speed


def test_speed_is_compared_with_the_baseline():
    blocks = [Block(0, name, 1e9, 1e9, (speed,)) for name, speed in (("nixl", 0.9e9), ("stream", 0.5e9))]
    found = throughput.findings_of(blocks)
    assert [finding.overall.median for finding in found] == [0.9, 1.0, 0.9, 0.5, 1.0, 0.5]
