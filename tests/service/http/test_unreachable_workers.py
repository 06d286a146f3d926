"""A worker that cannot be reached until the attempts run out: what clients read has no text of gRPC."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.mock_workers import MODEL, Crash, Phase, ScriptedAction
from tests.service.takeover.router_cluster import SSE, router_cluster

pytestmark = pytest.mark.timeout(60)

LEAKS = ("grpc", "gRPC", "UNAVAILABLE", "ipv4:", "127.0.0.1", "details", "decode-0", "prefill-0", "connect to")
BODY = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 6}


def checked_error(text: str) -> None:
    """Checks the body, or the last event of a stream."""
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith(("data: ", "{"))]
    error = json.loads(data[-1])["error"]
    assert error["code"] in ("worker_lost", "link_broken", "deadline_exceeded")
    assert error["message"]
    assert [leak for leak in LEAKS if leak in text] == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("lost", ["prefill", "decode"])
async def test_an_unreachable_worker_is_told_in_our_words(
    tmp_path: Path, stream: bool, lost: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("baton.services.router.limits.WORKER_WAIT_S", 0.5)
    async with router_cluster(tmp_path, num_routers=1) as w:
        worker = w.cluster.prefills[0] if lost == "prefill" else w.decode
        await worker.stop()
        response = await w.routers[0].http.post("/v1/completions", json={**BODY, "stream": stream})
        assert stream or response.status_code == 503  # a stream has begun when its headers cannot wait any longer
        checked_error(response.text)


async def test_an_error_event_of_a_lost_worker_is_in_our_words(tmp_path: Path):
    crash = [ScriptedAction(Phase.DECODE, Crash(), index=3)]
    async with router_cluster(tmp_path, num_routers=1, decode=crash, request_deadline_s=3.0) as w:
        response = await w.routers[0].http.post("/v1/completions", json={**BODY, "stream": True}, headers=SSE)
        assert response.status_code == 200
        checked_error(response.text)
