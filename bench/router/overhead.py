"""G7: latency and CPU time that the router adds to a request and to a token, with workers that compute nothing.

    python -m bench.router.overhead [--rotations 20] [--requests 100] [--result FILE]

Added latency: a request of two tokens through the router, less the same calls made to the workers directly (`Reserve`,
then both streams at once, like the router). Requests run one at a time, and arms interleave. The direct arm runs twice
in every rotation; the difference of the two is noise (A/A). CPU a streamed token: the router's CPU time for long
answers less that for short ones, over the difference in tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
import uvloop
from rich.console import Console

from baton.domain.ids import AttemptId, RequestId
from baton.domain.request import EngineRequest, SamplingParams, StopParams
from baton.rpc.channel_pool import ChannelPool
from baton.rpc.codec import encode_request
from baton.rpc.gen import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from baton.services.cli.bench.client.bench_client import BenchClient, RequestTemplate
from baton.services.cli.bench.load_generator import run_load
from baton.services.cli.bench.options import ApiEndpoint
from baton.services.cli.bench.results.distribution import percentile
from baton.services.cli.bench.results.records import PlannedRequest
from bench.harness.probes import LoopbackProbe, process_cpu_s
from bench.harness.rotations import Block, Finding, OnRotation, ResultFile, make_finding, rotate, table_of
from bench.harness.signals import run_command
from bench.router.mock_cluster import MODEL, MockCluster, running_cluster

PROMPT = tuple(range(4, 68))
SHORT_TOKENS, LONG_TOKENS = 2, 258
DEADLINE_S = 30.0
TEMPLATE = RequestTemplate(MODEL, ApiEndpoint.COMPLETIONS, temperature=0.0, ignore_eos=True, continuous_usage=False)


@dataclass(slots=True)
class DirectClient:
    """Calls the mock workers as the router does, without the router."""

    cluster: MockCluster
    channels: ChannelPool
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def request(self, num_tokens: int) -> float:
        """Seconds from the reservation to the last token."""
        id = AttemptId(RequestId(f"direct-{next(self._numbers)}"), 0)
        request = encode_request(EngineRequest(id, PROMPT, len(PROMPT), SamplingParams(), StopParams(num_tokens)))
        to_prefill, to_decode = self.cluster.prefill, self.cluster.decode
        prefill = prefill_pb2_grpc.PrefillStub(self.channels.get(to_prefill.address, to_prefill.incarnation))
        decode = decode_pb2_grpc.DecodeStub(self.channels.get(to_decode.address, to_decode.incarnation))
        began_s = time.perf_counter()
        promise = decode_pb2.ReserveRequest(id=request.id, num_tokens=len(PROMPT), deadline_s=DEADLINE_S)
        promised = (await decode.Reserve(promise, timeout=DEADLINE_S)).reserved
        generate = decode_pb2.GenerateRequest(
            request=request,
            reservation_id=promised.reservation_id,
            prefill_id=to_prefill.id,
            prefill_incarnation=to_prefill.incarnation,
            deadline_s=DEADLINE_S,
        )
        await asyncio.gather(
            _drain(decode.Generate(generate, timeout=DEADLINE_S)),
            _drain(prefill.Prefill(prefill_pb2.PrefillRequest(request=request, deadline_s=DEADLINE_S))),
        )
        return time.perf_counter() - began_s


async def _drain(call: grpc.aio.UnaryStreamCall[object, object]) -> None:
    async for _ in call:
        pass


@dataclass(slots=True)
class RouterClient:
    """Sends completions through the router."""

    http: BenchClient

    async def request(self, num_tokens: int) -> float:
        """Seconds from sending to the last token. Raises `RuntimeError` for a request that failed."""
        answer = await self.http.measure(TEMPLATE, PlannedRequest(0, 0.0, PROMPT, num_tokens), lambda _: None)
        if answer.failure is not None or answer.num_output_tokens != num_tokens:
            raise RuntimeError(f"{answer.num_output_tokens} tokens: {answer.failure}")
        return answer.ended_s

    async def burst(self, num_requests: int, num_tokens: int, max_concurrency: int = 8) -> None:
        """Sends requests, `max_concurrency` at a time. Raises `RuntimeError` if one fails."""
        plan = [PlannedRequest(index, 0.0, PROMPT, num_tokens) for index in range(num_requests)]
        rows = await run_load(
            plan,
            lambda request: self.http.measure(TEMPLATE, request, lambda _: None),
            clock=time.perf_counter,
            max_concurrency=max_concurrency,
        )
        if failures := [row.failure for row in rows if row.failure is not None]:
            raise RuntimeError(failures[0])


def run(num_rotations: int, num_requests: int, seed: int, console: Console, on_rotation: OnRotation) -> list[Block]:
    """Runs all rotations on a cluster of its own."""
    with running_cluster() as cluster, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        channels, http = (
            ChannelPool(),
            BenchClient(cluster.router_url, api_key=None, timeout_s=DEADLINE_S, clock=time.perf_counter),
        )
        direct, router = DirectClient(cluster, channels), RouterClient(http)
        arms: dict[str, Callable[[], Sequence[float]]] = {
            "direct": lambda: runner.run(_one_by_one(direct.request, num_requests)),
            "direct again": lambda: runner.run(_one_by_one(direct.request, num_requests)),
            "router": lambda: runner.run(_one_by_one(router.request, num_requests)),
            "router cpu": lambda: runner.run(_cpu_a_token(router, cluster.router_pid, num_requests)),
        }
        probe = LoopbackProbe()
        try:
            for arm in arms.values():
                arm()  # connections, caches, lazily imported code
            return rotate(
                arms,
                lambda _: probe(),
                num_rotations=num_rotations,
                seed=seed,
                console=console,
                on_rotation=on_rotation,
            )
        finally:
            runner.run(channels.close())
            runner.run(http.__aexit__())


async def _one_by_one(request: Callable[[int], Awaitable[float]], num_requests: int) -> list[float]:
    return [await request(SHORT_TOKENS) for _ in range(num_requests)]


async def _cpu_a_token(router: RouterClient, pid: int, num_requests: int) -> list[float]:
    """The slope: CPU seconds of the router a token, without the cost of a request."""
    readings = [process_cpu_s(pid)]
    for num_tokens in (SHORT_TOKENS, LONG_TOKENS):
        await router.burst(num_requests, num_tokens)
        readings.append(process_cpu_s(pid))
    short_s, long_s = (after - before for before, after in itertools.pairwise(readings))
    return [(long_s - short_s) / (num_requests * (LONG_TOKENS - SHORT_TOKENS))]


def findings_of(blocks: Sequence[Block]) -> list[Finding]:
    """The table, from the blocks alone."""
    findings = [
        make_finding(f"p{percent} {name}", "us", blocks, ("direct", arm), partial(_added_us, percent))
        for percent in (50, 99)
        for name, arm in (("added by the router", "router"), ("not the router (A/A)", "direct again"))
    ]
    cpu = make_finding(
        "router's CPU a streamed token", "us", blocks, ("router cpu",), lambda group: group[0].values[0] * 1e6
    )
    return [*findings, cpu]


def _added_us(percent: float, group: tuple[Block, ...]) -> float:
    base, arm = (percentile(sorted(block.values), percent) for block in group)
    return (arm - base) * 1e6


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rotations", type=int, default=20)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    flags = parser.parse_args()
    result_file = ResultFile(flags.result, "router_overhead", flags.rotations, findings_of)
    blocks = run(flags.rotations, flags.requests, flags.seed, Console(stderr=True), result_file.write)
    Console().print(table_of(findings_of(blocks)))


if __name__ == "__main__":
    run_command(main)
