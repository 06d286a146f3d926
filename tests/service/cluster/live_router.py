"""A whole router over scripted workers and a memory store, and readers of its live view."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from baton.domain.worker import IMAGE, TEXT, WorkerLoad
from baton.services.router.app import listen, run
from baton.services.router.edge.api_keys import new_key
from baton.services.router.settings import RouterSettings
from baton.services.router.text.text_model import TextModel
from baton.services.router.vision.image_model import ImageModel
from baton.store.memory_store import MemoryStore
from baton.store.options import StoreOptions
from tests.mock_workers import MODEL, MockCluster, MockDecode, MockPrefill
from tests.mocks.encode import MockEncode
from tests.unit.router.text.text_models import bundled

TIMEOUT_S = 20.0
RED, BLUE, OPERATOR = new_key(), new_key(), new_key()
"""API keys of two tenants and an operator; `conftest` puts them in a file."""


class SharedStore(MemoryStore):
    """A store that outlives a router which closes it, until `end`."""

    async def close(self) -> None:
        pass

    async def end(self) -> None:
        await super().close()


@dataclass
class LiveRouter:
    """A running router. `mock`: its workers."""

    url: str
    client: httpx2.AsyncClient
    mock: MockCluster
    store: SharedStore

    async def complete(self, key: str | None = None, **body: Any) -> httpx2.Response:
        whole = {"model": MODEL, "prompt": list(range(100, 117)), "max_tokens": 4, **body}
        return await self.client.post("/v1/completions", json=whole, headers=bearer(key))

    async def snapshot(self, key: str | None = None) -> dict[str, Any]:
        return (await self.client.get("/v1/cluster", headers=bearer(key))).raise_for_status().json()

    async def kill(self, worker: MockDecode) -> None:
        """Ends a worker's process, as far as the router can tell, and its registration."""
        await worker.stop()
        self.mock.decodes.remove(worker)
        await self.mock.registry.withdraw(worker.id, worker.incarnation)

    @asynccontextmanager
    async def encode_worker(self, load: WorkerLoad) -> AsyncIterator[MockEncode]:
        """An encode worker with this load; it is withdrawn by the test, or at the end."""
        worker = MockEncode("encode-0", "p" * 32, "v" * 32)
        worker.load = load
        await worker.start()
        try:
            await self.mock.registry.announce(worker.record())
            yield worker
            await self.mock.registry.withdraw(worker.id, worker.incarnation)
        finally:
            await worker.stop()

    @asynccontextmanager
    async def watch(self, key: str | None = None) -> AsyncIterator[LiveView]:
        request = self.client.stream("GET", "/v1/cluster/events", headers=bearer(key))
        async with request as response, asyncio.timeout(TIMEOUT_S):
            response.raise_for_status()
            lines = response.aiter_lines()
            async with aclosing(lines):  # type: ignore[type-var]
                view = LiveView(lines)
                assert (await view.next())[0] == "snapshot", "a viewer begins with everything"
                yield view


@dataclass
class LiveView:
    """What a page would show: the last snapshot with the frames after it."""

    lines: AsyncIterator[str]
    state: dict[str, Any] = field(default_factory=dict)
    messages: list[tuple[str, dict]] = field(default_factory=list)

    async def next(self) -> tuple[str, dict]:
        """The next message, after it is taken in."""
        kind, data = "", ""
        async for line in self.lines:
            if not line and data:
                break
            name, _, value = line.partition(": ")
            kind, data = (value, data) if name == "event" else (kind, value if name == "data" else data)
        content = json.loads(data)
        self.messages.append((kind, content))
        if kind == "snapshot":
            self.state = content
        elif kind == "frame":
            self.state |= content
        return kind, content

    async def until(self, condition: Callable[[LiveView], Any]) -> Any:
        """Reads until `condition` holds; returns its value."""
        while not (found := condition(self)):
            await self.next()
        return found

    def worker(self, id: str) -> dict[str, Any]:
        return next((row for row in self.state.get("workers", ()) if row["id"] == id), {})

    def ended(self) -> list[dict]:
        """Requests that ended, newest first; a snapshot holds those before it."""
        told = [content for name, content in self.messages if name == "request"]
        known = {row["id"] for row in told}
        return [*told[::-1], *[row for row in self.state.get("recent", ()) if row["id"] not in known]]

    def events(self, kind: str) -> list[dict]:
        told = {event["seq"]: event for event in self.state.get("events", ())}
        told |= {content["seq"]: content for name, content in self.messages if name == "event"}
        return [event for event in told.values() if event["kind"] == kind]


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


@asynccontextmanager
async def live_router(
    *, text: TextModel | None = None, images: ImageModel | None = None, keys_file: Path | None = None,
    num_decode: int = 2, beside: LiveRouter | None = None, **fields: Any,
) -> AsyncIterator[LiveRouter]:  # fmt: skip
    """`images`: of the model; the workers serve them. `beside`: another router, with the same workers and store."""
    text = text or bundled()
    if beside is None:
        store = SharedStore(StoreOptions(worker_ttl_s=600.0, heartbeat_s=0.05))
        decodes = [MockDecode(f"decode-{n}") for n in range(num_decode)]
        mock = MockCluster(store, [MockPrefill("prefill-0")], decodes, text_digest=text.digest)
    else:
        store, mock = beside.store, beside.mock
    if images is not None:
        for worker in mock.workers:
            worker.modalities, worker.processor = (TEXT, IMAGE), images.processor
    settings = RouterSettings(model=MODEL, port=0, heartbeat_interval_s=0.05, api_keys_file=keys_file, **fields)
    stop, sock = asyncio.Event(), listen("127.0.0.1", 0)
    if beside is None:
        await mock.start()
    serving = asyncio.create_task(run(settings, text, store, sock, stop, images=images))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        async with httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_S, verify=False) as client:
            async with asyncio.timeout(TIMEOUT_S):
                while (await client.get("/ready")).status_code != 200:
                    pass
            yield LiveRouter(url, client, mock, store)
    finally:
        stop.set()
        for worker in mock.workers:
            worker.release()
        async with asyncio.timeout(TIMEOUT_S):
            await serving
            if beside is None:
                await mock.stop()
                await store.end()
