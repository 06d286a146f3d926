"""A thousand clients hang up in every phase of their requests; nothing is left behind.

They use bare sockets, which are cheap and close without a word.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.domain.lifecycle import TERMINAL, RequestState
from tests.cluster import Cluster, eventually
from tests.lateness import in_time

pytestmark = pytest.mark.integration

NUM_HANG_UPS = 500
"""Number for each transport."""
NUM_AT_ONCE = 50
NUM_IN_A_ROW = 7
PAGES_FREE_WITHIN_S = 1.0
SETTLE_TIMEOUT_S = 5.0
PATIENCE_S = 60.0
VOCAB_SIZE = 500
SLOW_PREFILL = {"token-budget": 32}
"""Makes several chunks a prompt, so hang-ups find it half published and half pulled."""


@dataclass(frozen=True)
class HangUpPlan:
    """One client: its prompt, and the number of events or the time after which it hangs up."""

    prompt: list[int]
    num_events: int | None
    delay_s: float


def random_hang_up(rng: random.Random) -> HangUpPlan:
    prompt = [rng.randrange(5, VOCAB_SIZE) for _ in range(rng.randrange(2, 200))]
    if rng.random() < 0.4:
        return HangUpPlan(prompt, rng.randrange(1, 12), PATIENCE_S)
    return HangUpPlan(prompt, None, rng.choice([0.0, rng.uniform(0.0, 0.05), rng.uniform(0.0, 1.0)]))


async def hang_up(url: httpx2.URL, model: str, client: HangUpPlan) -> None:
    """Sends a request, reads for a while, and closes the connection."""
    body = json.dumps(
        {"model": model, "prompt": client.prompt, "stream": True, "max_tokens": 400, "ignore_eos": True}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {url.host}\r\ncontent-type: application/json\r\n"
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        async with asyncio.timeout(client.delay_s):
            await _listen(reader, client.num_events)
    except TimeoutError:
        assert client.num_events is None, "nothing was heard"
    finally:
        writer.transport.abort()


async def _listen(reader: asyncio.StreamReader, num_events: int | None) -> None:
    status = await reader.readline()
    assert b" 200 " in status, status
    while num_events is None or num_events > 0:
        line = await reader.readline()
        assert line, "the router hung up first"
        if num_events is not None and line.startswith(b"data: {"):
            num_events -= 1


async def hang_up_all(url: httpx2.URL, model: str, clients: list[HangUpPlan]) -> None:
    waiting = iter(clients)

    async def one_after_another() -> None:
        for client in waiting:
            await hang_up(url, model, client)

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_AT_ONCE):
            group.create_task(one_after_another())


def open_requests(cluster: Cluster) -> dict[str, float]:
    """The router's number of requests in each state that is not terminal."""
    names = [state.value for state in RequestState if state not in TERMINAL]
    return {name: cluster.metric("router-0", "baton_requests_in_state", state=name) for name in names}


def aborts_by_phase(cluster: Cluster) -> dict[str, float]:
    text = cluster._metrics("router-0")
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {s.labels["phase"]: s.value for s in samples if s.name == "baton_aborts_total"}


@pytest.fixture(scope="module", params=["nixl", "stream"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory: Path = tmp_path_factory.mktemp("cancel")
    with Cluster(directory, transport=request.param, prefill_flags=SLOW_PREFILL) as cluster:
        yield cluster


def test_one_token_moves_no_pages(cluster: Cluster) -> None:
    prompt = [7 + position % 50 for position in range(120)]
    num_bytes = cluster.bytes_moved
    answer = cluster.complete(prompt, max_tokens=1, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 1
    cluster.wait_pages_free(PAGES_FREE_WITHIN_S)
    assert cluster.bytes_moved == num_bytes
    longer = cluster.complete(prompt, max_tokens=4, ignore_eos=True)
    assert longer["choices"][0]["text"].startswith(answer["choices"][0]["text"])
    assert cluster.bytes_moved > num_bytes


def test_hang_ups_leave_nothing_behind(cluster: Cluster) -> None:
    rng = random.Random(1)
    before, num_bytes = open_requests(cluster), cluster.bytes_moved
    url = httpx2.URL(cluster.url)
    asyncio.run(hang_up_all(url, cluster.model_name, [random_hang_up(rng) for _ in range(NUM_HANG_UPS)]))
    in_time(cluster.page_hold_time_s(time.monotonic()), PAGES_FREE_WITHIN_S, "pages are free")
    eventually(lambda: open_requests(cluster) == before, SETTLE_TIMEOUT_S, "no request is counted that has ended")
    phases = aborts_by_phase(cluster)
    assert all(phases.get(phase, 0) > 0 for phase in ("queued", "prefilling", "sealed", "decoding")), phases
    assert cluster.bytes_moved > num_bytes
    assert cluster.tokens_recomputed == 0
    assert sum(phases.values()) > 0.9 * NUM_HANG_UPS
    answer = cluster.complete([7, 8, 9], max_tokens=3, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(("num_prompt_tokens", "num_events"), [(600, 0), (60, 1), (60, 20)])
def test_pages_are_free_a_second_after_a_hang_up(cluster: Cluster, num_prompt_tokens: int, num_events: int) -> None:
    """Hangs up during a prefill, right after the first token, and during decode. Repeats each; the worst counts."""
    model, url = cluster.model_name, httpx2.URL(cluster.url)
    for number in range(NUM_IN_A_ROW):
        prompt = [5 + (number * 31 + i * 7 + i * i * num_events) % 490 for i in range(num_prompt_tokens)]
        asyncio.run(hang_up_in_time(cluster, url, model, HangUpPlan(prompt, num_events, PATIENCE_S)))
        in_time(cluster.page_hold_time_s(time.monotonic()), PAGES_FREE_WITHIN_S, "pages are free")


async def hang_up_in_time(cluster: Cluster, url: httpx2.URL, model: str, client: HangUpPlan) -> None:
    """Hangs up after the events, or without events once a worker holds pages."""
    if client.num_events:
        await hang_up(url, model, client)
        return
    asking = asyncio.create_task(hang_up(url, model, replace(client, num_events=None)))
    await asyncio.to_thread(eventually, cluster.busy_pages, PATIENCE_S, "a worker holds pages")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
