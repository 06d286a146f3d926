"""The router's admin port: metrics and probes without a key, while no key of the API opens them on its own port."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import pytest

from baton.services.router.app import listen, run, serve
from baton.services.router.edge.api_keys import make_entry, new_key
from baton.services.router.settings import RouterSettings
from baton.store.memory_store import MemoryStore
from baton.store.options import StoreOptions
from tests.mock_workers import MODEL, Hold, MockCluster, MockDecode, MockPrefill, Phase, ScriptedAction
from tests.service.cluster.live_router import TIMEOUT_S, bearer
from tests.unit.router.text.text_models import bundled

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def routers(tmp_path: Path):
    """A router with API keys: clients of both ports, a key, its workers, and a function that asks it to stop."""
    key, text = new_key(), bundled()
    keys = tmp_path / "keys"
    keys.write_text(make_entry("red", key, operator=True).line())
    store = MemoryStore(StoreOptions(worker_ttl_s=600.0, heartbeat_s=0.05))
    mock = MockCluster(store, [MockPrefill("prefill-0")], [MockDecode("decode-0")], text_digest=text.digest)
    settings = RouterSettings(model=MODEL, port=0, heartbeat_interval_s=0.05, api_keys_file=keys)
    stop, public, admin = asyncio.Event(), listen("127.0.0.1", 0), listen("127.0.0.1", 0)
    await mock.start()
    serving = asyncio.create_task(run(settings, text, store, public, stop, admin))
    urls = [f"http://127.0.0.1:{sock.getsockname()[1]}" for sock in (public, admin)]
    try:
        async with (
            httpx2.AsyncClient(base_url=urls[0], timeout=TIMEOUT_S, verify=False) as api,
            httpx2.AsyncClient(base_url=urls[1], timeout=TIMEOUT_S, verify=False) as operator,
        ):
            async with asyncio.timeout(TIMEOUT_S):
                while (await api.get("/ready")).status_code != 200:
                    pass
            yield api, operator, key, mock, stop.set
    finally:
        stop.set()
        for worker in mock.workers:
            worker.release()
        async with asyncio.timeout(TIMEOUT_S):
            assert await serving == 0
            await mock.stop()


async def test_metrics_are_on_the_admin_port_only(routers):
    api, operator, key, *_ = routers
    metrics = await operator.get("/metrics")
    assert metrics.status_code == 200
    assert metrics.headers["content-type"].startswith("text/plain")
    assert "baton_requests_in_state" in metrics.text
    own = [line for line in metrics.text.splitlines() if line.startswith("baton_")]
    assert len(own) > 100
    assert [line for line in own if 'model="' not in line] == []
    assert [line for line in own if f'model="{MODEL}"' in line]  # other tests of this process serve other models
    for path in ("/metrics", "/admin/cluster"):
        assert (await api.get(path)).status_code == 401
        assert (await api.get(path, headers=bearer(key))).status_code == 404, "no key opens it here"


async def test_probes_are_on_both_ports(routers):
    api, operator, *_ = routers
    for path in ("/health", "/ready"):
        assert (await api.get(path)).json() == (await operator.get(path)).json()


async def test_the_admin_port_shows_the_cluster_and_nothing_of_the_api(routers):
    _, operator, key, *_ = routers
    shown = (await operator.get("/admin/cluster")).json()
    assert (shown["scope"], len(shown["workers"])) == ("all", 2)
    for path in ("/v1/models", "/v1/cluster", "/", "/openapi.json"):
        assert (await operator.get(path, headers=bearer(key))).status_code == 404
    assert (await operator.post("/metrics")).status_code == 405


async def test_the_admin_port_answers_while_the_router_drains(routers):
    api, operator, key, mock, stop = routers
    decode = mock.decodes[0]
    decode.script = [ScriptedAction(Phase.DECODE, Hold(), index=2)]
    body = {"model": MODEL, "prompt": [100, 101, 102], "max_tokens": 4}
    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(api.post("/v1/completions", json=body, headers=bearer(key)))
        await decode.reached(Phase.DECODE, 2)
        stop()
        while (await operator.get("/ready")).status_code != 503:
            pass
        assert (await operator.get("/health")).status_code == 200
        assert "baton_requests_in_state" in (await operator.get("/metrics")).text
        decode.release()
    assert answer.result().status_code == 200


async def test_a_busy_port_names_its_flag():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        settings = RouterSettings(model=MODEL, port=0, host="127.0.0.1", metrics_port=port)
        with pytest.raises(OSError, match=f"--metrics-port {port + 1}"):
            await serve(settings)
