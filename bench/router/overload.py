"""A router under ten times the load that its workers can serve: refusals, goodput, memory.

    python -m bench.router.overload [--seconds 60] [--loads 1 2 10] [--result FILE]

Mock workers with few rows and slow tokens are the bottleneck. Poisson arrivals in an open loop come at multiples of
their capacity, and refused clients do not retry. An answer is good if it is complete and its first token came within
`OBJECTIVE_S`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from baton.services.cli.bench.client.bench_client import BenchClient, RequestTemplate
from baton.services.cli.bench.load_generator import run_load
from baton.services.cli.bench.options import ApiEndpoint
from baton.services.cli.bench.results.distribution import percentile
from baton.services.cli.bench.results.records import PlannedRequest, RequestRow
from baton.services.cli.bench.workload.arrivals import gamma_arrivals
from bench.harness.probes import process_cpu_s, process_rss_bytes
from bench.harness.rotations import write_atomically
from bench.harness.signals import run_command
from bench.router.mock_cluster import MODEL, DecodeCapacity, MockCluster, running_cluster

CAPACITY = DecodeCapacity(num_rows=8, token_s=0.2)
NUM_TOKENS = 11
NUM_PROMPT_TOKENS = 64
OBJECTIVE_S = 8.0
"""Bound on TTFT. The router gets three quarters of it as `--max-ttft-s`."""

TIMEOUT_S = 60.0
REFUSED = "HTTP 429:"
TEMPLATE = RequestTemplate(MODEL, ApiEndpoint.COMPLETIONS, temperature=0.0, ignore_eos=True, continuous_usage=False)


@dataclass(frozen=True, slots=True)
class OverloadFinding:
    """One load. Rates are a second; a refusal's latency is from sending to the end of the answer."""

    load: float
    offered_per_s: float
    num_requests: int
    num_answered: int
    num_refused: int
    other_failures: tuple[str, ...]
    goodput_per_s: float
    p50_ttft_s: float | None
    p99_ttft_s: float | None
    p50_refusal_s: float | None
    p99_refusal_s: float | None
    p99_client_lag_s: float
    router_cpu_s: float
    router_rss_bytes: int


def run(loads: Sequence[float], seconds: float, seed: int) -> Iterator[OverloadFinding]:
    """Runs one load after the other on a cluster of its own."""
    flags = ["--max-ttft-s", str(0.75 * OBJECTIVE_S)]
    with running_cluster(CAPACITY, flags) as cluster, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_measure(cluster, 0.5, 5.0, seed))  # warms up connections, caches and the wait estimate
        for load in loads:
            yield runner.run(_measure(cluster, load, seconds, seed))


async def _measure(cluster: MockCluster, load: float, seconds: float, seed: int) -> OverloadFinding:
    rate = load * CAPACITY.rate(NUM_TOKENS)
    draw = random.Random(seed)
    arrivals = gamma_arrivals(int(rate * seconds), rate, 1.0, draw)
    plan = [PlannedRequest(n, at_s, _prompt(draw), NUM_TOKENS) for n, at_s in enumerate(arrivals)]
    cpu_s, clock = process_cpu_s(cluster.router_pid), time.perf_counter
    async with BenchClient(cluster.router_url, api_key=None, timeout_s=TIMEOUT_S, clock=clock) as client:
        rows = await run_load(plan, lambda request: client.measure(TEMPLATE, request, lambda _: None), clock=clock)
    cpu_s = process_cpu_s(cluster.router_pid) - cpu_s
    return make_finding(load, seconds, rows, cpu_s, process_rss_bytes(cluster.router_pid))


def make_finding(
    load: float, seconds: float, rows: Sequence[RequestRow], cpu_s: float, rss_bytes: int
) -> OverloadFinding:
    """Computes the figures from the rows."""
    answered = [row for row in rows if row.failure is None]
    refused = [row for row in rows if row.failure is not None and row.failure.startswith(REFUSED)]
    ttfts = sorted(row.ttft_s for row in answered)
    refusals = sorted(row.ended_s for row in refused)
    good = [ttft_s for ttft_s in ttfts if ttft_s <= OBJECTIVE_S]
    return OverloadFinding(
        load=load,
        offered_per_s=len(rows) / seconds,
        num_requests=len(rows),
        num_answered=len(answered),
        num_refused=len(refused),
        other_failures=tuple(row.failure for row in rows if row.failure and not row.failure.startswith(REFUSED)),
        goodput_per_s=len(good) / max(seconds, max(row.sent_s + row.ended_s for row in rows)),
        p50_ttft_s=percentile(ttfts, 50) if ttfts else None,
        p99_ttft_s=percentile(ttfts, 99) if ttfts else None,
        p50_refusal_s=percentile(refusals, 50) if refusals else None,
        p99_refusal_s=percentile(refusals, 99) if refusals else None,
        p99_client_lag_s=percentile(sorted(row.lag_s for row in rows), 99),
        router_cpu_s=cpu_s,
        router_rss_bytes=rss_bytes,
    )


def _prompt(draw: random.Random) -> tuple[int, ...]:
    return tuple(draw.randrange(4, 2048) for _ in range(NUM_PROMPT_TOKENS))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--loads", type=float, nargs="+", default=[1.0, 2.0, 10.0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    flags = parser.parse_args()
    findings: list[OverloadFinding] = []
    for finding in run(flags.loads, flags.seconds, flags.seed):
        findings.append(finding)
        if flags.result is not None:
            write_atomically(flags.result, f"{_report(findings)}\n".encode())
    print(_report(findings))


def _report(findings: Sequence[OverloadFinding]) -> str:
    best = max(finding.goodput_per_s for finding in findings)
    report = {
        "sustainable_per_s": CAPACITY.rate(NUM_TOKENS),
        "objective_ttft_s": OBJECTIVE_S,
        "load_average": os.getloadavg(),
        "of_best": {f"{finding.load:g}": round(finding.goodput_per_s / best, 3) for finding in findings},
        "loads": [asdict(finding) for finding in findings],
    }
    return json.dumps(report, indent=2)


if __name__ == "__main__":
    run_command(main)
