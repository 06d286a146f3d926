"""The client of `baton chat` over real routers: a cut connection costs no token, at the same router and at the next."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.services.cli.chat.client import ChatClient
from tests.mock_workers import MODEL, Hold, Phase, ScriptedAction
from tests.service.takeover.router_cluster import COMPLETIONS, TIMEOUT_S, Router, router_cluster, undisturbed

pytestmark = pytest.mark.timeout(60)

BODY = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 8, "stream": True}
NUM_SEEN = 4


@asynccontextmanager
async def cutting_proxy(router: Router, num_events: int, cut: asyncio.Event) -> AsyncIterator[str]:
    """Forwards to `router`; breaks the first connection after so many events and then sets `cut`."""

    forwarding: set[asyncio.Task[object]] = set()  # asyncio itself keeps no task alive

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        forwarding.add(task)
        theirs, ours = await asyncio.open_connection(router.http.base_url.host, router.http.base_url.port)
        sending = asyncio.create_task(_copy(reader, ours))
        seen = 0
        try:
            while data := await theirs.read(65536):
                writer.write(data)
                await writer.drain()
                seen += data.count(b"data: ")
                if not cut.is_set() and seen >= num_events:
                    cut.set()
                    break
        finally:
            sending.cancel()
            ours.close()
            writer.transport.abort()

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for task in forwarding:
            task.cancel()
        await asyncio.gather(*forwarding, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)


@pytest.mark.parametrize("others", [False, True], ids=["the same router", "another router"])
async def test_a_cut_connection_costs_no_token(tmp_path, others):
    held = [ScriptedAction(Phase.DECODE, Hold(), index=NUM_SEEN)]
    async with router_cluster(tmp_path, decode=held) as w:
        here, there = w.routers
        cut = asyncio.Event()
        async with cutting_proxy(here, NUM_SEEN, cut) as proxy, asyncio.timeout(TIMEOUT_S):
            client = ChatClient([proxy, str(there.http.base_url)] if others else [proxy], None)

            async def release() -> None:
                await cut.wait()
                w.decode.release()

            releasing = asyncio.create_task(release())
            events = [event async for event in client.stream(COMPLETIONS, BODY)]
            await releasing
            await client.close()
        *whole, done = await undisturbed(there, max_tokens=8)
    texts = [json.loads(event.data)["choices"][0]["text"] for event in events]
    assert done.data == "[DONE]"
    assert texts == [json.loads(event.data)["choices"][0]["text"] for event in whole]
    assert sum(event.resumed for event in events) == 1
