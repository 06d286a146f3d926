"""Several routers over one store and the same mock workers, for the tests of resume and takeover."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from baton.domain.ids import RequestId
from baton.domain.worker import IMAGE, TEXT
from baton.services.router.app import listen, run
from baton.services.router.settings import RouterSettings
from baton.services.router.text.text_model import TextModel
from baton.services.router.vision.image_model import ImageModel
from baton.store.memory_store import MemoryStore
from baton.store.options import StoreOptions
from baton.store.store import CallRecord, CallStatus, StateStore
from tests.mock_workers import MODEL, MockCluster, MockDecode, MockPrefill, ScriptedAction
from tests.service.takeover.flaky_store import PartitionedStore

TIMEOUT_S = 20.0
SSE = {"accept": "text/event-stream"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": [1, 2, 3]},
    CHAT: {"messages": [{"role": "user", "content": "w1 w2"}]},
}


@dataclass(frozen=True, slots=True)
class Event:
    """One event as a client sees it. `choice` None: one of the tail."""

    id: str
    data: str

    @property
    def choice(self) -> int | None:
        choices = json.loads(self.data)["choices"] if self.data != "[DONE]" else []
        return choices[0]["index"] if choices else None


@dataclass
class Router:
    """One router, as `serve` runs it."""

    name: str
    store: PartitionedStore
    http: httpx2.AsyncClient
    stop: asyncio.Event
    task: asyncio.Task[int]


@dataclass
class RouterCluster:
    """Routers, their store and their workers."""

    store: StateStore
    cluster: MockCluster
    routers: list[Router] = field(default_factory=list)

    @property
    def decode(self) -> MockDecode:
        return self.cluster.decodes[0]

    async def call(self, id: str) -> CallRecord:
        record = await self.store.get_call(RequestId(id))
        assert record is not None
        return record

    async def until_known(self, id: str) -> None:
        """Waits until the store has the call, which is written after the first response bytes."""
        async with asyncio.timeout(TIMEOUT_S):
            while await self.store.get_call(RequestId(id)) is None:
                await self.routers[0].http.get("/health")

    async def until(self, id: str, status: CallStatus, timeout_s: float = TIMEOUT_S) -> CallRecord:
        """Waits until the call has the status. Polls: the store does not notify."""
        await self.until_known(id)
        async with asyncio.timeout(timeout_s):
            while (record := await self.call(id)).status is not status:
                await self.routers[0].http.get("/health")
        return record

    async def until_owned(self, id: str, router: str) -> CallRecord:
        """Waits until `router` owns the call."""
        async with asyncio.timeout(TIMEOUT_S):
            while not (record := await self.call(id)).owner.startswith(f"{router}/"):
                await self.routers[0].http.get("/health")
        return record

    async def until_emitted(self, id: str, num_tokens: int) -> None:
        """Waits until the journal of the first choice has `num_tokens` tokens."""
        async with asyncio.timeout(TIMEOUT_S):
            while len((await self.store.read_journal(RequestId(id), 0, 1.0)).tokens) < num_tokens:
                await self.routers[0].http.get("/health")


@cache
def text_model(directory: Path) -> TextModel:
    """Token n is the word `wn`, so a text shows its tokens."""
    vocab = {f"w{n}": n for n in range(2000)}
    Tokenizer(WordLevel(vocab, unk_token="w0")).save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"vocab_size": 2000, "max_position_embeddings": 150}))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return TextModel.load(directory)


@asynccontextmanager
async def router_cluster(
    directory: Path,
    *,
    num_routers: int = 2,
    decode: Sequence[ScriptedAction] = (),
    store: StateStore | None = None,
    model: tuple[TextModel, ImageModel] | None = None,
    later_text: TextModel | None = None,
    **settings: Any,
) -> AsyncIterator[RouterCluster]:
    """Ready routers. Everything is closed afterwards. `model`: one with images, in place of that of the directory.

    `later_text`: of all routers but the first.
    """
    text, images = model or (text_model(directory), ImageModel())
    shared = store or MemoryStore(StoreOptions(worker_ttl_s=60.0, heartbeat_s=0.05))
    cluster = MockCluster(shared, [MockPrefill("prefill-0")], [MockDecode("decode-0", decode)], text_digest=text.digest)
    if images.rules is not None:
        cluster.prefills[0].processor = images.processor
        for worker in cluster.workers:
            worker.modalities = (TEXT, IMAGE)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(shared.close)
        stack.push_async_callback(cluster.stop)
        await cluster.start()
        w = RouterCluster(shared, cluster)
        for number in range(num_routers):
            used = later_text if number and later_text is not None else text
            entered = _router(f"router-{number}", shared, (used, images), settings)
            w.routers.append(await stack.enter_async_context(entered))
        yield w


@asynccontextmanager
async def _router(
    name: str, shared: StateStore, model: tuple[TextModel, ImageModel], settings: dict[str, Any]
) -> AsyncIterator[Router]:
    store, stop, sock = PartitionedStore(shared), asyncio.Event(), listen("127.0.0.1", 0)
    limits = {"heartbeat_interval_s": 0.05, "drain_timeout_s": 5.0, **settings}
    chosen = RouterSettings(model=MODEL, port=0, router_id=name, **limits)
    task = asyncio.create_task(run(chosen, model[0], store, sock, stop, images=model[1]))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        async with httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False, verify=False) as http:
            async with asyncio.timeout(TIMEOUT_S):
                while (await http.get("/ready")).status_code != 200:
                    pass
            yield Router(name, store, http, stop, task)
    finally:
        stop.set()
        async with asyncio.timeout(TIMEOUT_S):
            await task


@dataclass
class Stream:
    """A client of one stream; reads event by event."""

    response: httpx2.Response
    _lines: AsyncIterator[str]

    @property
    def call_id(self) -> str:
        return str(self.response.headers["x-baton-request-id"])

    async def take(self, num_events: int) -> list[Event]:
        """The next events."""
        return [await self._next() for _ in range(num_events)]

    async def rest(self) -> list[Event]:
        """All remaining events."""
        return [event async for event in self._events()]

    async def _next(self) -> Event:
        async with asyncio.timeout(TIMEOUT_S):
            return await anext(self._events())

    async def _events(self) -> AsyncIterator[Event]:
        id = ""
        async for line in self._lines:
            if line.startswith("id: "):
                id = line.removeprefix("id: ")
            elif line.startswith("data: "):
                yield Event(id, line.removeprefix("data: "))


@asynccontextmanager
async def opened(router: Router, endpoint: str = COMPLETIONS, **body: Any) -> AsyncIterator[Stream]:
    """A new streamed call. Leaving the block disconnects."""
    whole = {"model": MODEL, "stream": True, **PROMPTS[endpoint], **body}
    async with router.http.stream("POST", endpoint, json=whole, headers=SSE) as response:
        assert response.status_code == 200, await response.aread()
        yield Stream(response, response.aiter_lines())


@asynccontextmanager
async def resumed(router: Router, id: str, after: str = "", *, endpoint: str = "") -> AsyncIterator[Stream]:
    """An earlier call, once the store has it: at the path of its stream, or posted again to `endpoint`."""
    async with asyncio.timeout(TIMEOUT_S):
        while await router.store.shared.get_call(RequestId(id)) is None:
            await router.http.get("/health")
    headers = {**SSE, **({"last-event-id": after} if after else {})}
    body = {"model": MODEL, "stream": True, **PROMPTS[endpoint]} if endpoint else None
    path, method = (endpoint, "POST") if endpoint else (f"/v1/requests/{id}/stream", "GET")
    async with router.http.stream(method, path, json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        yield Stream(response, response.aiter_lines())


async def undisturbed(router: Router, endpoint: str = COMPLETIONS, **body: Any) -> list[Event]:
    """All events of a call without interruption."""
    async with opened(router, endpoint, **body) as stream:
        return await stream.rest()


def same(events: Sequence[Event], expected: Sequence[Event]) -> bool:
    """True if the events of two calls are equal, except for ids and times."""
    return [_nameless(event) for event in events] == [_nameless(event) for event in expected]


def by_choice(events: Sequence[Event], choice: int) -> list[Event]:
    """The events of one choice; they are the same however choices interleave."""
    return [event for event in events if event.choice == choice]


def contents(events: Sequence[Event]) -> list[tuple[str, str]]:
    """The data of events without their ids, which depend on the interleaving."""
    return [("", _nameless(event)[1]) for event in events]


def _nameless(event: Event) -> tuple[str, str]:
    cursor = event.id.partition(":")[2]
    if event.data == "[DONE]":
        return cursor, event.data
    data = json.loads(event.data)
    return cursor, json.dumps({key: value for key, value in data.items() if key not in ("id", "created")})
