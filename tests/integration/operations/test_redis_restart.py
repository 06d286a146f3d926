"""The Redis of `baton up` is killed and stopped: streams go on, and the system is as before."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.cluster import START_TIMEOUT_S, eventually, plain_client
from tests.integration.operations.steady_load import WITH_IDS, prompt_of
from tests.integration.operations.up_process import UpProcess, running_up
from tests.stream_client import Event, ask, call_id, tokens

pytestmark = pytest.mark.integration

NUM_TOKENS = 1000
REDIS = r"(redis|valkey)-server"
STOPPED_S = 4.0
"""Two TTLs of a worker's record: all of them have expired when Redis goes on."""
DURABLE = "x-baton-durable-scope"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    """In the end Redis is killed again, and `baton up` ends without it."""
    with running_up(tmp_path_factory.mktemp("up")) as process:
        yield process
        redis = process.child(REDIS)
        assert redis is not None
        os.kill(redis, signal.SIGKILL)
        assert process.end(signal.SIGTERM) == 0


@pytest.fixture(scope="module")
def client(up: UpProcess) -> Iterator[httpx2.Client]:
    with plain_client(base_url=up.url, timeout=60.0) as made:
        yield made


@pytest.fixture(scope="module")
def body(client: httpx2.Client) -> dict[str, Any]:
    model = client.get("/v1/models").json()["data"][0]["id"]
    sampling = {"temperature": 0, "max_tokens": NUM_TOKENS, **WITH_IDS}
    return {"model": model, "prompt": prompt_of(1), "stream": True, **sampling}


@pytest.fixture(scope="module")
def undisturbed(up: UpProcess, body: dict[str, Any]) -> list[Event]:
    with ask(up.url, body) as events:
        seen = list(events)
    assert len(tokens(seen)) == NUM_TOKENS
    return seen


def short_answer(client: httpx2.Client, body: dict[str, Any]) -> httpx2.Response:
    """The answer to a new request, whatever it is."""
    return client.post("/v1/completions", json={**body, "stream": False, "max_tokens": 2})


def is_durable(client: httpx2.Client, body: dict[str, Any]) -> bool:
    """True if a new request is served and survives the next kill; False also for one that is to be sent again."""
    response = short_answer(client, body)
    assert response.status_code in (200, 503), response.text
    return response.status_code == 200 and response.headers.get(DURABLE) == "restart"


def is_ready(client: httpx2.Client) -> bool:
    return client.get("/ready").status_code == 200


def test_a_killed_redis_comes_back_under_a_running_stream(
    up: UpProcess, client: httpx2.Client, body: dict[str, Any], undisturbed: list[Event]
) -> None:
    ended = f"/v1/requests/{call_id(undisturbed[0])}"
    eventually(lambda: client.get(ended).json()["status"] == "ended", START_TIMEOUT_S, "the store knows of the end")
    killed = up.child(REDIS)
    assert killed is not None
    with ask(up.url, body) as events:
        seen = list(itertools.islice(events, 10))
        os.kill(killed, signal.SIGKILL)
        assert tokens([*seen, *events]) == tokens(undisturbed)
    eventually(lambda: up.child(REDIS) not in (None, killed), START_TIMEOUT_S, "it is started again")
    eventually(lambda: is_durable(client, body), START_TIMEOUT_S, "new requests are durable again")
    eventually(lambda: is_ready(client), START_TIMEOUT_S, "the router is ready")
    assert client.get(ended).json()["status"] == "ended", "it came back with its data"
    told = up.errors.read_text()
    assert "redis ended by itself with exit code -9" in told
    assert "It is started again." in told
    assert told.count("ended by itself") == 1, "no other process ended"


def test_a_redis_that_stands_still_delays_nothing(
    up: UpProcess, client: httpx2.Client, body: dict[str, Any], undisturbed: list[Event]
) -> None:
    eventually(lambda: is_durable(client, body), START_TIMEOUT_S, "it serves as before")
    stopped, family = up.child(REDIS), up.children()
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    try:
        until = time.monotonic() + STOPPED_S
        with ask(up.url, body) as events:
            assert tokens(list(events)) == tokens(undisturbed)
        answers = [short_answer(client, body)]
        while time.monotonic() < until:
            answers.append(short_answer(client, body))
        assert {answer.status_code for answer in answers} == {200}
        assert answers[0].headers.get(DURABLE) != "restart"
    finally:
        os.kill(stopped, signal.SIGCONT)
    eventually(lambda: is_durable(client, body), START_TIMEOUT_S, "new requests are durable again")
    eventually(lambda: is_ready(client), START_TIMEOUT_S, "the router is ready")
    assert up.children().keys() == family.keys(), "no process ended"
