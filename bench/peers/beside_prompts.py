"""Gaps of streams while long prompts arrive, on one server. A load of `bench.peers.compare`.

Some answers stream while prompts arrive at fixed times, the same for all servers; the run ends with the last prompt's
second token. Prompts of equal lengths, but not of equal tokens: each is drawn anew.
"""

from __future__ import annotations

import asyncio
import time

import uvloop

from baton.services.cli.bench.load_generator import run_load
from baton.services.cli.bench.results.records import PlannedRequest
from baton.services.cli.bench.workload.prompts import Vocabulary
from bench.peers.loads import LoadResult
from bench.system.load_client import LoadClient

NUM_STREAMS, STREAM_PROMPT_TOKENS, STREAM_TOKENS = 4, 16, 2000
NUM_PROMPTS, PROMPT_TOKENS, PROMPT_GAP_S = 3, 1024, 2.5
PROMPT_OUTPUT_TOKENS = 2
VOCABULARY_SIZE = 2048
TIMEOUT_S = 300.0


def measure_beside_prompts(url: str, seed: int) -> list[float]:
    """Values of a block: the prompts' results and the p99 gap of the streams. Raises `RuntimeError` for a failure."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_measure(url, seed)).values
    except ExceptionGroup as group:
        raise RuntimeError(f"streams beside prompts: {group.exceptions[0]}") from group


async def _measure(url: str, seed: int) -> LoadResult:
    clock = time.perf_counter
    client = LoadClient(url, Vocabulary(VOCABULARY_SIZE, seed), timeout_s=TIMEOUT_S, clock=clock)
    try:
        plan = [
            PlannedRequest(index, index * PROMPT_GAP_S, client.draw(PROMPT_TOKENS), PROMPT_OUTPUT_TOKENS)
            for index in range(NUM_PROMPTS)
        ]
        async with client.running_streams(NUM_STREAMS, STREAM_PROMPT_TOKENS, STREAM_TOKENS) as streams:
            began_s = clock()
            rows = await run_load(plan, client.send, clock=clock)
            gaps = [gap for stream in streams for gap in stream.gaps(began_s, clock())]
        return LoadResult.of_rows(rows, gaps)
    finally:
        await client.close()
