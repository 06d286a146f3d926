"""The id from a client's header appears in the logs of all three processes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import pytest

from tests.cluster import Cluster, eventually

HTTP_REQUEST_ID = "trace-me-7"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
WAIT_S = 30.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("logs")) as cluster:
        yield cluster


def lines(cluster: Cluster, name: str, event: str) -> list[str]:
    return [line for line in cluster.processes[name].log.read_text(errors="replace").splitlines() if event in line]


def test_one_streamed_request_appears_in_all_logs(cluster: Cluster) -> None:
    body = {"model": cluster.model_name, "prompt": "Once upon a time", "max_tokens": 5, "stream": True}
    headers = {"x-request-id": HTTP_REQUEST_ID, "traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
    with cluster.client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        text = "".join(response.iter_text())
    (call_id,) = set(re.findall(r'"id":\s*"([^"]+)"', text))
    expected = {
        "router-0": ["request_end"],
        "prefill-0": ["attempt_sealed"],
        "decode-0": ["attempt_imported", "attempt_end"],
    }
    for name, events in expected.items():
        for event in events:
            eventually(partial(lines, cluster, name, event), WAIT_S, f"{event} of {name}")
            (line,) = lines(cluster, name, event)
            for id in (call_id, HTTP_REQUEST_ID, TRACE_ID):
                assert id in line, line


def test_times_of_the_attempt_are_in_the_workers_lines(cluster: Cluster) -> None:
    (sealed,) = lines(cluster, "prefill-0", "attempt_sealed")
    (imported,) = lines(cluster, "decode-0", "attempt_imported")
    (ended,) = lines(cluster, "decode-0", "attempt_end")
    assert int(re.findall(r"compute_us=(\d+)", sealed)[0]) > 0
    assert int(re.findall(r"bytes=(\d+)", imported)[0]) > 0
    assert "proof=v3" in imported
    assert re.findall(r"steps=(\d+)", ended) == ["4"]
    assert "output_tokens=5" in ended
