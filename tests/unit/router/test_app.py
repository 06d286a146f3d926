"""The whole router over mock workers and a store in memory."""

from __future__ import annotations

import asyncio
import errno
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx2
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from baton.domain.ids import OwnerId
from baton.domain.worker import WorkerRecord
from baton.services.router.app import listen, run
from baton.services.router.settings import RouterSettings
from baton.services.router.text.text_model import TextModel
from baton.settings.base import SettingsError
from baton.store.memory_store import MemoryStore
from baton.store.options import StoreOptions
from baton.store.store import CallRecord, LeaseState
from baton.telemetry.metrics import REGISTRY
from tests.lateness import in_time
from tests.mock_workers import MODEL, Fail, Hold, MockCluster, MockDecode, MockPrefill, Phase, ScriptedAction, token_at

pytestmark = pytest.mark.timeout(30)
STORE_OPTIONS = StoreOptions(worker_ttl_s=60.0, heartbeat_s=0.05)


@dataclass(slots=True)
class Running:
    """A running router."""

    client: httpx2.AsyncClient
    cluster: MockCluster
    stop: asyncio.Event
    task: asyncio.Task[int]

    async def complete(self, **body: object) -> httpx2.Response:
        return await self.client.post("/v1/completions", json={"model": MODEL, "prompt": [1, 2, 3], **body})


class CountingStore(MemoryStore):
    """Counts renewals of owner leases, and searches for orphans."""

    num_renewals = num_searches = 0

    def __init__(self) -> None:
        super().__init__(STORE_OPTIONS)
        self._renewed = asyncio.Condition()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Looks at each renewal."""
        async with self._renewed:
            await self._renewed.wait_for(condition)

    async def hold_lease(self, owner: OwnerId, number: int) -> LeaseState:
        async with self._renewed:
            self.num_renewals += 1
            self._renewed.notify_all()
        return await super().hold_lease(owner, number)

    async def list_orphans(self) -> list[CallRecord]:
        self.num_searches += 1
        return await super().list_orphans()


@pytest.fixture
def text(tmp_path) -> TextModel:
    vocab = {f"w{n}": n for n in range(2000)}
    Tokenizer(WordLevel(vocab, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 2000, "max_position_embeddings": 150}))
    return TextModel.load(tmp_path)


@asynccontextmanager
async def router(
    text: TextModel,
    decode: Sequence[ScriptedAction] = (),
    drain_timeout_s: float = 5.0,
    otlp_endpoint: str | None = None,
    shutdown_delay_s: float = 0.0,
    store: MemoryStore | None = None,
) -> AsyncIterator[Running]:
    store = store or MemoryStore(STORE_OPTIONS)
    cluster = MockCluster(store, [MockPrefill("prefill-0")], [MockDecode("decode-0", decode)], text_digest=text.digest)
    settings = RouterSettings(
        model=MODEL,
        port=0,
        heartbeat_interval_s=0.05,
        drain_timeout_s=drain_timeout_s,
        otlp_endpoint=otlp_endpoint,
        shutdown_delay_s=shutdown_delay_s,
    )
    stop, sock = asyncio.Event(), listen("127.0.0.1", 0)
    await cluster.start()
    task = asyncio.create_task(run(settings, text, store, sock, stop))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        async with httpx2.AsyncClient(base_url=url, timeout=10.0, verify=False) as client:
            yield Running(client, cluster, stop, task)
    finally:
        stop.set()
        async with asyncio.timeout(10):
            await task
        await cluster.stop()
    left = [t.get_name() for t in asyncio.all_tasks() if t is not asyncio.current_task()]
    assert left == []


async def ready(running: Running) -> None:
    async with asyncio.timeout(5):
        while (await running.client.get("/ready")).status_code != 200:
            pass


def sample(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


async def test_a_completion_is_served_and_measured(text):
    before = sample("baton_ttft_seconds_count", path="split")
    async with router(text) as running:
        await ready(running)
        response = await running.complete(max_tokens=4)
        assert response.status_code == 200
        body = response.json()
        assert body["usage"]["completion_tokens"] == 4
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["choices"][0]["text"].split() == [f"w{token_at(index)}" for index in range(4)]
        assert sample("baton_ttft_seconds_count", path="split") == before + 1
        assert sample("baton_degraded", component="redis") == 0
        assert sample("baton_requests_in_state", state="decoding") == 0
    assert running.task.result() == 0


async def test_a_router_that_starts_refuses_nobody_before_it_knows_workers(text, monkeypatch: pytest.MonkeyPatch):
    """Its socket is open before it has read the registry."""
    read = MemoryStore.workers

    async def read_late(store: MemoryStore) -> list[WorkerRecord]:
        await asyncio.sleep(0.3)
        return await read(store)

    monkeypatch.setattr(MemoryStore, "workers", read_late)
    async with router(text) as running:
        assert (await running.complete(max_tokens=4)).status_code == 200


async def test_the_announced_context_is_what_the_workers_hold(text):
    """The model allows more than the workers: a client that trusts /v1/models would be refused."""
    text.max_position_tokens = 4096
    async with router(text) as running:
        await ready(running)
        [model] = (await running.client.get("/v1/models")).json()["data"]
        assert model["max_model_len"] == 200
        assert (await running.client.get(f"/v1/models/{model['id']}")).json()["max_model_len"] == 200


async def test_the_spans_of_a_request_reach_the_collector(text, monkeypatch: pytest.MonkeyPatch):
    exporter = InMemorySpanExporter()
    monkeypatch.setattr("baton.telemetry.spans.otlp_exporter", lambda endpoint: exporter)
    async with router(text, otlp_endpoint="http://collector:4318") as running:
        await ready(running)
        id = (await running.complete(max_tokens=4)).headers["x-baton-request-id"]
    spans = exporter.get_finished_spans()
    assert {span.name for span in spans} >= {"request", "admit", "attempt 1", "reserve"}
    assert {(span.attributes or {})["baton.request_id"] for span in spans if span.name == "request"} == {id}


async def test_spans_without_the_extra_are_refused_at_start(text, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "baton.telemetry.spans", None)
    monkeypatch.delattr("baton.telemetry.spans", raising=False)
    settings = RouterSettings(model=MODEL, otlp_endpoint="http://collector:4318")
    with listen("127.0.0.1", 0) as sock, pytest.raises(SettingsError, match="otel"):
        await run(settings, text, MemoryStore(StoreOptions()), sock, asyncio.Event())


async def test_a_router_without_workers_is_alive_but_not_ready(text):
    async with router(text) as running:
        decode = running.cluster.decodes[0]
        await running.cluster.registry.withdraw(decode.id, decode.incarnation)
        async with asyncio.timeout(5):
            while (response := await running.client.get("/ready")).status_code != 503:
                pass
        assert "1 prefill, 0 decode ready" in response.json()["error"]["message"]
        assert (await running.client.get("/health")).status_code == 200
        refused = await running.complete()
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "no_workers"
        assert int(refused.headers["retry-after"]) >= 1


async def test_sigterm_refuses_new_requests_and_finishes_running_ones(text):
    async with router(text, [ScriptedAction(Phase.DECODE, Hold(), index=2)], drain_timeout_s=10.0) as running:
        await ready(running)
        decode = running.cluster.decodes[0]
        answer = asyncio.create_task(running.complete(max_tokens=4))
        await decode.reached(Phase.DECODE, times=2)
        running.stop.set()
        refused = await running.complete()
        async with asyncio.timeout(5):
            while refused.status_code == 200:
                refused = await running.complete(max_tokens=1)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert (await running.client.get("/ready")).status_code == 503
        decode.release()
        assert (await answer).json()["usage"]["completion_tokens"] == 4
        async with asyncio.timeout(5):
            assert await running.task == 0


async def test_requests_are_served_while_a_load_balancer_notices_the_stop(text):
    delay_s = 3.0
    async with router(text, shutdown_delay_s=delay_s) as running:
        await ready(running)
        began = time.monotonic()
        running.stop.set()
        assert (await running.client.get("/ready")).status_code == 503
        answer = await running.complete(max_tokens=1)
        in_time(time.monotonic() - began, delay_s, "an answer before the drain begins")
        assert answer.status_code == 200
        async with asyncio.timeout(10):
            assert await running.task == 0


async def searches_after_renewals(running: Running, store: CountingStore, num_renewals: int) -> int:
    """Searches for orphans when the router has renewed its lease so often again, or has ended."""
    until = store.num_renewals + num_renewals
    waiting = asyncio.create_task(store.wait_until(lambda: store.num_renewals >= until))
    await asyncio.wait((waiting, running.task), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return store.num_searches


async def test_a_router_that_will_end_claims_no_orphans(text):
    """Also while it serves on. Another router would finish them."""
    store = CountingStore()
    async with router(text, shutdown_delay_s=3.0, store=store) as running:
        async with asyncio.timeout(20):
            await store.wait_until(lambda: store.num_searches > 0)
            running.stop.set()
            before = [await searches_after_renewals(running, store, num_renewals) for num_renewals in (1, 2)]
        assert before[0] == before[1]


async def test_a_drain_timeout_aborts_running_requests(text):
    async with router(text, [ScriptedAction(Phase.DECODE, Hold(), index=2)], drain_timeout_s=0.1) as running:
        await ready(running)
        decode = running.cluster.decodes[0]
        answer = asyncio.create_task(running.complete(max_tokens=4))
        await decode.reached(Phase.DECODE, times=2)
        running.stop.set()
        async with asyncio.timeout(10):
            assert await running.task == 0
        await asyncio.gather(answer, return_exceptions=True)
        assert [reason for _, reason in decode.aborts] == ["cancelled"]


async def test_a_request_without_attempts_left_gets_503(text):
    async with router(text, [ScriptedAction(Phase.IMPORT, Fail("lease_ended"), times=9)]) as running:
        await ready(running)
        response = await running.complete()
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "lease_ended"


def test_the_error_names_a_busy_port():
    with listen("127.0.0.1", 0) as sock, pytest.raises(OSError, match=r"HTTP port .* is in use") as failure:
        listen("127.0.0.1", sock.getsockname()[1])
    assert failure.value.errno == errno.EADDRINUSE


def test_the_error_names_a_foreign_host():
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1:0"):
        listen("192.0.2.1", 0)
