"""Two real routers over one cluster: one is killed or stopped in mid-stream, and clients get every token once."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from baton.bundled import MODEL_DIR
from tests.cluster import Cluster, Process, eventually
from tests.exactness.reference import Reference

pytestmark = pytest.mark.integration

NUM_TOKENS = 300
SURVIVOR = "router-0"
TAKEN_WITHIN_S = 5.0
"""The promise is 2 s; this machine may be busy."""
FREE_WITHIN_S = 1.5
"""The promise is one second; the rest is the scrape."""

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("takeover")) as cluster:
        yield cluster


@pytest.fixture
def victim(cluster: Cluster) -> Iterator[Process]:
    """A second router, ready; gone afterwards, however it was treated."""
    router = cluster.start("router", f"router-{next(_numbers)}")
    try:
        eventually(lambda: _is_ready(router), 60.0, "the second router is ready")
        yield router
    finally:
        router.expected_to_live = False
        router.popen.kill()
        router.popen.wait(10.0)


def _is_ready(router: Process) -> bool:
    assert router.popen.poll() is None, router.tail()
    try:
        return bool(httpx2.get(f"{_url(router)}/ready", timeout=5.0, trust_env=False).status_code == 200)
    except httpx2.TransportError:
        return False


def _url(router: Process) -> str:
    return f"http://127.0.0.1:{router.port}"


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream, with the token in it (None for one without choices)."""

    id: str
    choice: int | None
    token: int | None


@contextmanager
def stream(method: str, url: str, **arguments: Any) -> Iterator[Iterator[Event]]:
    """A stream's events as they come; leaving hangs up."""
    headers = {"accept": "text/event-stream", **arguments.pop("headers", {})}
    with (
        httpx2.Client(timeout=60.0, trust_env=False) as client,
        client.stream(method, url, headers=headers, **arguments) as response,
    ):
        assert response.status_code == 200, response.read()
        yield _events(response)


def _events(response: httpx2.Response) -> Iterator[Event]:
    id = ""
    for line in response.iter_lines():
        if line.startswith("id: "):
            id = line.removeprefix("id: ")
        elif line == "data: [DONE]":
            yield Event(id, None, None)
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"] or [{"index": None, "token_ids": [None]}]:
                yield Event(id, choice["index"], choice["token_ids"][0])


def asked(cluster: Cluster, **parameters: Any) -> dict[str, Any]:
    body = {"prompt": list(range(5, 45)), "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
    options = {"include_usage": True}
    return {"model": cluster.model_name, "stream": True, "stream_options": options, **body, **parameters}


def fresh(router: Process, body: dict[str, Any]) -> Any:
    return stream("POST", f"{_url(router)}/v1/completions", json=body)


def again(cluster: Cluster, last: Event) -> Any:
    id = last.id.partition(":")[0]
    return stream("GET", f"{cluster.url}/v1/requests/{id}/stream", headers={"last-event-id": last.id})


def status(cluster: Cluster, event: Event) -> dict[str, Any]:
    answer: dict[str, Any] = cluster.client.get(f"/v1/requests/{event.id.partition(':')[0]}").json()
    return answer


def tokens(events: list[Event], choice: int = 0) -> list[int | None]:
    return [event.token for event in events if event.choice == choice]


def test_a_client_goes_on_at_another_router_after_its_own_was_killed(cluster: Cluster, victim: Process) -> None:
    expected = Reference(MODEL_DIR).generate(asked(cluster)["prompt"], NUM_TOKENS)
    with fresh(victim, asked(cluster, temperature=0)) as events:
        seen = list(itertools.islice(events, 25))
        victim.signal(signal.SIGKILL)
    with again(cluster, seen[-1]) as events:
        seen.append(next(events))
        assert status(cluster, seen[0])["choices"][0]["num_tokens"] < NUM_TOKENS, "nothing was left to take over"
        seen += events
    eventually(lambda: status(cluster, seen[0])["status"] == "ended", 10.0, "the book knows of the end")
    record = status(cluster, seen[0])
    assert tokens(seen) == expected
    assert [event.id.partition(":")[2] for event in seen[-2:]] == [f"{NUM_TOKENS}+1", f"{NUM_TOKENS}+2"]
    assert (record["num_owners"], record["owner"].split("/")[0]) == (2, SURVIVOR)
    cluster.wait_pages_free(FREE_WITHIN_S)


def test_an_orphan_is_taken_over_in_time_and_sampled_choices_stay_the_same(cluster: Cluster, victim: Process) -> None:
    body = asked(cluster, temperature=1.0, seed=11, n=2, max_tokens=150)
    with fresh(victim, body) as events:
        seen = list(itertools.islice(events, 30))
        victim.signal(signal.SIGKILL)
    eventually(lambda: status(cluster, seen[0])["owner"].startswith(SURVIVOR), TAKEN_WITHIN_S, "it is taken over")
    with again(cluster, seen[-1]) as events:
        seen += events
    with stream("POST", f"{cluster.url}/v1/completions", json=body) as events:
        expected = list(events)
    for choice in range(2):
        assert tokens(seen, choice) == tokens(expected, choice)
    assert tokens(seen, 0) != tokens(seen, 1)
    cluster.wait_pages_free(FREE_WITHIN_S)


def test_a_router_that_was_stopped_follows_the_one_that_took_over(cluster: Cluster, victim: Process) -> None:
    """Its client never lets go of the connection, and sees a pause."""
    expected = Reference(MODEL_DIR).generate(asked(cluster)["prompt"], NUM_TOKENS)
    with fresh(victim, asked(cluster, temperature=0)) as events:
        seen = list(itertools.islice(events, 25))
        victim.signal(signal.SIGSTOP)
        try:
            eventually(lambda: status(cluster, seen[0])["num_owners"] == 2, TAKEN_WITHIN_S, "it is taken over")
        finally:
            victim.signal(signal.SIGCONT)
        seen += events
    assert tokens(seen) == expected
    assert status(cluster, seen[0])["owner"].startswith(SURVIVOR)
    cluster.wait_pages_free(FREE_WITHIN_S)


def test_a_hang_up_frees_all_pages_every_time_and_the_call_can_still_be_resumed(cluster: Cluster) -> None:
    survivor = cluster.processes[SURVIVOR]
    expected = Reference(MODEL_DIR).generate(asked(cluster)["prompt"], NUM_TOKENS)
    with fresh(survivor, asked(cluster, temperature=0)) as events:
        seen = list(itertools.islice(events, 20))
    cluster.wait_pages_free(FREE_WITHIN_S)
    for _ in range(2):
        with again(cluster, seen[-1]) as events:
            seen += itertools.islice(events, 20)
        cluster.wait_pages_free(FREE_WITHIN_S)
    with again(cluster, seen[-1]) as events:
        seen += events
    assert tokens(seen) == expected
    assert len({event.id for event in seen}) == len(seen) == NUM_TOKENS + 2
    assert status(cluster, seen[0])["num_owners"] == 4
    cluster.wait_pages_free(FREE_WITHIN_S)
