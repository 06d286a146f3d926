"""One tenant offers ten times what the workers can serve, beside a steady one: refusals, TTFT, goodput, shares.

    python -m bench.router.flood [--seconds 60] [--result FILE]

The workers and the objective are those of `overload`. Three runs, each on a router of its own: both tenants under one
key (one queue for all), both under their own keys, and unlike tenants that each offer twice the capacity. Refused
clients do not retry.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from baton.services.cli.bench.client.bench_client import BenchClient
from baton.services.cli.bench.load_generator import run_load
from baton.services.cli.bench.results.distribution import percentile
from baton.services.cli.bench.results.records import PlannedRequest, RequestRow
from baton.services.cli.bench.workload.arrivals import gamma_arrivals
from baton.services.router.edge.api_keys import make_entry, new_key
from bench.harness.rotations import write_atomically
from bench.harness.signals import run_command
from bench.router.mock_cluster import running_cluster
from bench.router.overload import CAPACITY, NUM_PROMPT_TOKENS, NUM_TOKENS, OBJECTIVE_S, REFUSED, TEMPLATE, TIMEOUT_S

STEADY_LOAD, FLOOD_LOAD = 0.3, 10.0
UNLIKE_TOKENS: Mapping[str, int] = {"tiny": 4, "short": 8, "middle": 16, "long": 32}
"""Output tokens of the tenants whose shares are measured; each offers `UNLIKE_LOAD`."""

UNLIKE_LOAD = 2.0


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """What one tenant offers. `load`: as a multiple of what the workers can serve."""

    tenant: str
    load: float
    num_tokens: int = NUM_TOKENS

    def plan(self, seconds: float, seed: int) -> list[PlannedRequest]:
        """Poisson arrivals of random prompts."""
        draw, rate = random.Random(f"{seed} {self.tenant}"), self.load * CAPACITY.rate(self.num_tokens)
        arrivals = gamma_arrivals(int(rate * seconds), rate, 1.0, draw)
        return [
            PlannedRequest(n, at_s, tuple(draw.randrange(4, 2048) for _ in range(NUM_PROMPT_TOKENS)), self.num_tokens)
            for n, at_s in enumerate(arrivals)
        ]


@dataclass(frozen=True, slots=True)
class TenantFinding:
    """Counts of one tenant. `service`: charged tokens of its answers, prompt tokens once and output tokens twice."""

    num_requests: int
    num_answered: int
    num_refused: int
    other_failures: tuple[str, ...]
    num_good: int
    p50_ttft_s: float | None
    p99_ttft_s: float | None
    service: float


def run(loads: Sequence[TenantLoad], seconds: float, seed: int, *, one_key: bool = False) -> dict[str, TenantFinding]:
    """Runs all tenants at once. `one_key`: they are one tenant to the router."""
    with tempfile.TemporaryDirectory() as folder:
        keys = {load.tenant: new_key() for load in loads}
        if one_key:
            keys = dict.fromkeys(keys, new_key())
        entries = {key: make_entry(tenant, key).line() for tenant, key in keys.items()}
        path = Path(folder) / "keys"
        path.write_text("\n".join(entries.values()))
        flags = ["--max-ttft-s", str(0.75 * OBJECTIVE_S), "--api-keys-file", str(path)]
        with running_cluster(CAPACITY, flags) as cluster, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_measure(cluster.router_url, loads, keys, seconds, seed))


async def _measure(
    url: str, loads: Sequence[TenantLoad], keys: Mapping[str, str], seconds: float, seed: int
) -> dict[str, TenantFinding]:
    async def measure(load: TenantLoad) -> list[RequestRow]:
        clock = time.perf_counter
        async with BenchClient(url, api_key=keys[load.tenant], timeout_s=TIMEOUT_S, clock=clock) as client:
            plan = load.plan(seconds, seed)
            return await run_load(plan, lambda request: client.measure(TEMPLATE, request, lambda _: None), clock=clock)

    rows = await asyncio.gather(*map(measure, loads))
    return {load.tenant: make_finding(load, each) for load, each in zip(loads, rows, strict=True)}


def make_finding(load: TenantLoad, rows: Sequence[RequestRow]) -> TenantFinding:
    """Computes the figures from the rows."""
    answered = [row for row in rows if row.failure is None]
    failures = [row.failure for row in rows if row.failure is not None]
    ttfts = sorted(row.ttft_s for row in answered)
    return TenantFinding(
        num_requests=len(rows),
        num_answered=len(answered),
        num_refused=sum(failure.startswith(REFUSED) for failure in failures),
        other_failures=tuple(failure for failure in failures if not failure.startswith(REFUSED)),
        num_good=sum(ttft_s <= OBJECTIVE_S for ttft_s in ttfts),
        p50_ttft_s=percentile(ttfts, 50) if ttfts else None,
        p99_ttft_s=percentile(ttfts, 99) if ttfts else None,
        service=float(len(answered) * (NUM_PROMPT_TOKENS + 2 * load.num_tokens)),
    )


def jain(services: Sequence[float]) -> float:
    """Jain's index of the services: 1 when all are equal."""
    return sum(services) ** 2 / (len(services) * sum(service * service for service in services))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    flags = parser.parse_args()
    flood = [TenantLoad("steady", STEADY_LOAD), TenantLoad("flood", FLOOD_LOAD)]
    unlike = [TenantLoad(tenant, UNLIKE_LOAD, num_tokens) for tenant, num_tokens in UNLIKE_TOKENS.items()]
    before = run(flood, flags.seconds, flags.seed, one_key=True)
    after = run(flood, flags.seconds, flags.seed)
    shares = run(unlike, 2 * flags.seconds, flags.seed)
    report = {
        "load_average": os.getloadavg(),
        "goodput_of_one_queue": sum(each.num_good for each in after.values())
        / sum(each.num_good for each in before.values()),
        "jain": jain([each.service for each in shares.values()]),
        "one_queue": {tenant: asdict(finding) for tenant, finding in before.items()},
        "fair": {tenant: asdict(finding) for tenant, finding in after.items()},
        "unlike": {tenant: asdict(finding) for tenant, finding in shares.items()},
    }
    text = json.dumps(report, indent=2)
    if flags.result is not None:
        write_atomically(flags.result, f"{text}\n".encode())
    print(text)


if __name__ == "__main__":
    run_command(main)
