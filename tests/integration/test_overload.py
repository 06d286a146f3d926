"""Two hundred clients hang up at once on a cluster of real processes; it stays responsive and leaks nothing."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import pytest

from baton.domain.lifecycle import TERMINAL, RequestState
from tests.cluster import Cluster, eventually
from tests.lateness import in_time

pytestmark = pytest.mark.integration

NUM_REQUESTS = 200
CLIENT_TIMEOUT_S = 0.5
ANSWERS_WITHIN_S = 5.0
FLAGS = {"max-running-requests": 16, "max-queued-mib": 2}
"""Limits that the clients exceed: some requests run, some wait, some are refused."""


async def storm(cluster: Cluster, model: str) -> Counter[str]:
    """Ends of the requests, each of them too long to finish in time."""
    endings: Counter[str] = Counter()
    limits = httpx2.Limits(max_connections=NUM_REQUESTS)
    timeout = httpx2.Timeout(CLIENT_TIMEOUT_S, connect=30.0, pool=30.0)
    async with httpx2.AsyncClient(
        base_url=cluster.url, timeout=timeout, limits=limits, trust_env=False, verify=False
    ) as client:

        async def one(n: int) -> None:
            prompt = [5 + (n * 131 + i * 7) % 500 for i in range(120)]
            body = {"model": model, "prompt": prompt, "max_tokens": 3000, "ignore_eos": True, "stream": n % 2 == 0}
            try:
                async with asyncio.timeout(
                    CLIENT_TIMEOUT_S if n % 2 else 3 * CLIENT_TIMEOUT_S
                ):  # of silence, or in all
                    response = await client.post("/v1/completions", json=body)
            except (httpx2.TransportError, TimeoutError):
                endings["hung up"] += 1
            else:
                endings[str(response.status_code)] += 1
                assert response.status_code != 429 or 1 <= int(response.headers["retry-after"]) <= 120

        await asyncio.wait_for(asyncio.gather(*map(one, range(NUM_REQUESTS))), 120.0)
    return endings


def open_requests(cluster: Cluster) -> dict[str, float]:
    """The router's count of open requests."""
    states = [state.value for state in RequestState if state not in TERMINAL]
    inside = {state: cluster.metric("router-0", "baton_requests_in_state", state=state) for state in states}
    queued = ("baton_queued_requests", "baton_queued_tokens")
    return inside | {name: cluster.metric("router-0", name) for name in queued}


def answer_or_none(cluster: Cluster, body: dict[str, Any]) -> httpx2.Response | None:
    """None for 429: the router may not have noticed every hang-up yet."""
    answer = cluster.client.post("/v1/completions", json=body)
    return None if answer.status_code == 429 else answer


def test_two_hundred_hang_ups_block_nothing(tmp_path: Path) -> None:
    with Cluster(tmp_path, router_flags=FLAGS) as cluster:
        model = cluster.model_name
        cluster.complete([7, 8, 9], max_tokens=2)
        cluster.wait_pages_free(10.0)
        before = open_requests(cluster)
        assert set(before.values()) == {0.0}

        endings = asyncio.run(storm(cluster, model))
        assert endings["hung up"] > 0
        assert set(endings) <= {"hung up", "429"}, endings

        body = {"model": model, "prompt": [7, 8, 9], "max_tokens": 2}
        began_s = time.monotonic()
        answer = eventually(lambda: answer_or_none(cluster, body), ANSWERS_WITHIN_S, "the queue is empty again")
        assert answer.status_code == 200, answer.text
        in_time(time.monotonic() - began_s, ANSWERS_WITHIN_S, "a short request is answered")
        cluster.wait_pages_free(10.0)
        eventually(lambda: open_requests(cluster) == before, 10.0, f"every request is out: {open_requests(cluster)}")
        assert cluster.tokens_recomputed == 0
