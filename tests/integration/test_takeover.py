"""Two real routers over one cluster: one is killed or stopped in mid-stream, and clients get every token once."""

from __future__ import annotations

import asyncio
import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from redis.asyncio import Redis

from baton.bundled import MODEL_DIR
from baton.domain.ids import AttemptId, RequestId
from baton.services.router.streaming.cursor import Cursor
from baton.store.connect import connect
from baton.store.options import StoreOptions
from baton.store.redis.keys import RedisKeys
from baton.store.store import JournalEntry
from tests.cluster import Cluster, Process, eventually
from tests.exactness.reference import Reference
from tests.lateness import in_time
from tests.stream_client import Event, ask, call_id, resume, tokens

pytestmark = pytest.mark.integration

NUM_TOKENS = 300
SURVIVOR = "router-0"
TAKEOVER_WITHIN_S = 2.0
"""Bound from a router's death to the claim, by the survivor's log."""
MISSED_RENEWAL_S = 1.5
"""Delay if the survivor missed a renewal of its own: a whole lease and the next check. The log shows it."""
PATIENCE_S = 15.0
PAGES_FREE_WITHIN_S = 1.0

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("takeover")) as cluster:
        yield cluster


@pytest.fixture
def victim(cluster: Cluster) -> Iterator[Process]:
    """A second router, ready; it is gone afterwards."""
    router = cluster.start("router", f"router-{next(_numbers)}")
    try:
        cluster.wait_ready()
        yield router
    finally:
        router.expected_running = False
        router.popen.kill()
        router.popen.wait(10.0)


def request_body(cluster: Cluster, **parameters: Any) -> dict[str, Any]:
    body = {"prompt": list(range(5, 45)), "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
    options = {"include_usage": True}
    return {"model": cluster.model_name, "stream": True, "stream_options": options, **body, **parameters}


def status(cluster: Cluster, event: Event) -> dict[str, Any]:
    answer: dict[str, Any] = cluster.client.get(f"/v1/requests/{call_id(event)}").json()
    return answer


def logged_at(line: str) -> datetime:
    """The time of a log line."""
    return datetime.fromisoformat(line.partition(" ")[0])


def assert_claimed_in_time(cluster: Cluster, event: Event, lost_at: datetime) -> None:
    """Checks that the survivor claimed the call in time."""
    log = cluster.processes[SURVIVOR].log

    def claim() -> list[str]:
        lines = log.read_text().splitlines()
        return [line for line in lines if "call_claimed" in line and f"call_id={call_id(event)} " in line]

    [line] = eventually(claim, PATIENCE_S, "it is taken over")
    missed = [
        line
        for line in log.read_text().splitlines()
        if "call_lease_renewal_failed" in line and logged_at(line) > lost_at
    ]
    limit_s = TAKEOVER_WITHIN_S + len(missed) * MISSED_RENEWAL_S
    in_time((logged_at(line) - lost_at).total_seconds(), limit_s, "the call is taken over")


def test_a_client_resumes_at_another_router_after_a_kill(cluster: Cluster, victim: Process) -> None:
    expected = Reference(MODEL_DIR).generate(request_body(cluster)["prompt"], NUM_TOKENS)
    with ask(victim.url, request_body(cluster, temperature=0)) as events:
        seen = list(itertools.islice(events, 25))
        victim.signal(signal.SIGKILL)
    with resume(cluster.url, seen[-1]) as events:
        seen.append(next(events))
        assert status(cluster, seen[0])["choices"][0]["num_tokens"] < NUM_TOKENS, "nothing was left to take over"
        seen += events
    eventually(lambda: status(cluster, seen[0])["status"] == "ended", 10.0, "the store knows of the end")
    record = status(cluster, seen[0])
    assert tokens(seen) == expected
    cursors = [Cursor.parse(event.id) for event in seen[-2:]]
    assert [(cursor.counts, cursor.num_tail) for cursor in cursors] == [((NUM_TOKENS,), 1), ((NUM_TOKENS,), 2)]
    assert (record["epoch"], record["owner"].split("/")[0]) == (2, SURVIVOR)
    in_time(cluster.page_hold_time_s(time.monotonic()), PAGES_FREE_WITHIN_S, "pages are free")


def test_an_orphan_is_taken_over_in_time_with_the_same_samples(cluster: Cluster, victim: Process) -> None:
    body = request_body(cluster, temperature=1.0, seed=11, n=2, max_tokens=150)
    with ask(victim.url, body) as events:
        seen = list(itertools.islice(events, 30))
        victim.signal(signal.SIGKILL)
        killed_at = datetime.now(UTC)
    assert_claimed_in_time(cluster, seen[0], killed_at)
    assert status(cluster, seen[0])["owner"].startswith(SURVIVOR)
    with resume(cluster.url, seen[-1]) as events:
        seen += events
    with ask(cluster.url, body) as events:
        expected = list(events)
    for choice in range(2):
        assert tokens(seen, choice) == tokens(expected, choice)
    assert tokens(seen, 0) != tokens(seen, 1)
    in_time(cluster.page_hold_time_s(time.monotonic()), PAGES_FREE_WITHIN_S, "pages are free")


def test_a_stopped_router_follows_its_successor(cluster: Cluster, victim: Process) -> None:
    """The client keeps its connection and sees a pause."""
    expected = Reference(MODEL_DIR).generate(request_body(cluster)["prompt"], NUM_TOKENS)
    with ask(victim.url, request_body(cluster, temperature=0)) as events:
        seen = list(itertools.islice(events, 25))
        victim.signal(signal.SIGSTOP)
        try:
            assert_claimed_in_time(cluster, seen[0], datetime.now(UTC))
            assert status(cluster, seen[0])["epoch"] == 2
        finally:
            victim.signal(signal.SIGCONT)
        seen += events
    assert tokens(seen) == expected
    assert status(cluster, seen[0])["owner"].startswith(SURVIVOR)
    # the victim had all tokens before it was stopped; its successor computes those that were not stored
    eventually(lambda: status(cluster, seen[0])["status"] == "ended", PATIENCE_S, "the successor has finished")
    in_time(cluster.page_hold_time_s(time.monotonic()), PAGES_FREE_WITHIN_S, "pages are free")


def num_journalled_after_hang_up(cluster: Cluster, event: Event) -> int:
    """Waits until the store records the hang-up; returns the number of journalled tokens."""
    eventually(lambda: status(cluster, event)["status"] == "abandoned", PATIENCE_S, "the store knows of the hang-up")
    return int(status(cluster, event)["choices"][0]["num_tokens"])


def test_a_hang_up_frees_all_pages_and_the_call_can_resume(cluster: Cluster) -> None:
    survivor = cluster.processes[SURVIVOR]
    expected = Reference(MODEL_DIR).generate(request_body(cluster)["prompt"], NUM_TOKENS)
    with ask(survivor.url, request_body(cluster, temperature=0)) as events:
        seen = list(itertools.islice(events, 20))
    in_time(cluster.page_hold_time_s(time.monotonic()), PAGES_FREE_WITHIN_S, "pages are free")
    for _ in range(2):
        num_more = num_journalled_after_hang_up(cluster, seen[0]) - len(seen) + 2  # so that a takeover is needed
        with resume(cluster.url, seen[-1]) as events:
            seen += itertools.islice(events, num_more)
        in_time(cluster.page_hold_time_s(time.monotonic()), PAGES_FREE_WITHIN_S, "pages are free")
    num_journalled_after_hang_up(cluster, seen[0])
    with resume(cluster.url, seen[-1]) as events:
        seen += events
    assert tokens(seen) == expected
    assert len({event.id for event in seen}) == len(seen) == NUM_TOKENS + 2
    assert status(cluster, seen[0])["epoch"] == 4
    in_time(cluster.page_hold_time_s(time.monotonic()), PAGES_FREE_WITHIN_S, "pages are free")


def replay(cluster: Cluster, id: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "baton.services.cli.main", "replay", id, "--model", str(cluster.model)]
    chosen = ["--redis-url", cluster.redis.url, "--prefill", "prefill-0", "--decode", "decode-0", "--fresh"]
    return subprocess.run([*command, *chosen], capture_output=True, text=True, timeout=60.0, check=False)


async def change_token(cluster: Cluster, id: RequestId, index: int) -> None:
    """Rewrites the journal of a sequence with another token at `index`."""
    store, redis = await connect(cluster.redis.url), Redis.from_url(cluster.redis.url)
    record, journal = await store.get(id), await store.read_journal(id, 0, 0.0)
    assert record is not None
    tokens = [token.token + (token.index == index) for token in journal.tokens]
    await redis.delete(RedisKeys(StoreOptions().prefix).journal(id))
    await store.write_journal([JournalEntry(AttemptId(id, record.attempt), 0, tuple(tokens))])
    await redis.aclose()
    await store.close()


def test_replay_computes_the_same_tokens_and_finds_a_tampered_one(cluster: Cluster) -> None:
    body = {**request_body(cluster, temperature=1.0, n=2), "stream": False, "stream_options": None, "max_tokens": 30}
    id = cluster.client.post("/v1/completions", json=body).raise_for_status().json()["id"]
    eventually(lambda: cluster.client.get(f"/v1/requests/{id}").json()["status"] == "ended", PATIENCE_S, "it is stored")
    same = replay(cluster, id)
    assert (same.returncode, same.stdout) == (0, "choice 0: 30 tokens, all equal\nchoice 1: 30 tokens, all equal\n")
    asyncio.run(change_token(cluster, RequestId(f"{id}-1"), 12))
    changed = replay(cluster, id)
    assert changed.returncode == 1, changed.stderr
    assert "choice 1: first difference at token 12: stored" in changed.stdout
    unknown = replay(cluster, "cmpl-unknown")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "not durable" in unknown.stderr
