"""The step `proxy`: how late events are behind the proxy, and how soon a router sees that a client has hung up.

Both are differences of wall clocks. Containers share their host's clock, so the router's record of a request
(`arrived_unix_us` and microseconds since then) and the times of this process can be compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tests.cluster import plain_client
from tests.compose.waiting import wait_until

if TYPE_CHECKING:
    from tests.compose.steps import ComposeTest

NUM_STREAMS = 40
NUM_HANG_UPS = 20
EVENTS_BEFORE_HANG_UP = 3
MANY_TOKENS = 3000
"""Far more than are generated before a hang-up is seen."""
CALL_TIMEOUT_S = 120.0
MAX_MEDIAN_LAG_S = 0.05
"""A proxy that collects events (HAProxy without `http-no-delay`) is 0.1 s late with each."""
MAX_HANG_UP_S = 2.0
"""A proxy that keeps the request of a client that left is as late as the answer is long."""


def proxy(test: ComposeTest) -> None:
    """Events come through the proxy at once, and a hang-up behind it ends the request as cancelled."""
    lags = [lag for _ in range(NUM_STREAMS) for lag in event_lags(test)]
    delays = [hang_up_delay(test) for _ in range(NUM_HANG_UPS)]
    test.notes += [f"events {percentiles(lags)} late", f"hang-ups seen after {percentiles(delays)}"]
    assert statistics.median(lags) < MAX_MEDIAN_LAG_S, "events wait in the proxy"
    assert max(delays) < MAX_HANG_UP_S, "a client's hang-up is seen late"


def event_lags(test: ComposeTest) -> list[float]:
    """Seconds from the router's first and last token of a stream to their arrival here, the router's work included."""
    expected = test.expected[0]
    id, times = stream(test, list(expected.prompt), len(expected.tokens))
    trace = ended(test, id)
    assert trace["outcome"] == "finished", trace
    (sequence,) = trace["sequences"]
    stamps = (sequence["first_token_us"], sequence["last_token_us"])
    return [at - (trace["arrived_unix_us"] + us) / 1e6 for at, us in zip((times[0], times[-1]), stamps, strict=True)]


def hang_up_delay(test: ComposeTest) -> float:
    """Seconds from the moment when a client hangs up to the end of its request at the router."""
    id, times = stream(test, list(test.expected[0].prompt), MANY_TOKENS, EVENTS_BEFORE_HANG_UP)
    trace = ended(test, id)
    assert (trace["outcome"], trace.get("client_gone", False)) == ("cancelled", True), trace
    return float((trace["arrived_unix_us"] + trace["e2e_us"]) / 1e6 - times[-1])


def stream(
    test: ComposeTest, prompt: list[int], num_tokens: int, num_events: int | None = None
) -> tuple[str, list[float]]:
    """Id of a call, and the wall clock at each token's event; hangs up after `num_events`, and adds that time."""
    body = {
        "model": "bundled", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    times: list[float] = []
    with (
        plain_client(timeout=CALL_TIMEOUT_S) as client,
        client.stream("POST", f"{test.url}/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {") and '"token_ids":[' in line:
                times.append(time.time())
            if len(times) == num_events:
                times.append(time.time())
                break
    return response.headers["x-baton-request-id"], times


def ended(test: ComposeTest, id: str) -> Any:
    """The record of a call that has ended. Raises `TimeoutError`."""
    found: list[Any] = []

    def complete() -> bool:
        with plain_client(timeout=5.0) as client:
            answer = client.get(f"{test.url}/v1/requests/{id}")
        if answer.status_code == 200 and (trace := answer.json()["trace"]) and trace["outcome"] != "running":
            found.append(trace)
        return bool(found)

    wait_until(complete, CALL_TIMEOUT_S, f"{id} has ended")
    return found[0]


def percentiles(seconds: Sequence[float]) -> str:
    """Median, 99th percentile and largest, in milliseconds."""
    ordered = sorted(1000 * each for each in seconds)
    high = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return f"{statistics.median(ordered):.1f} ms (p99 {high:.1f}, max {ordered[-1]:.1f}, n {len(ordered)})"
