"""Ends of a response that its own router cuts off."""

from __future__ import annotations

import asyncio

from starlette.types import Message

from baton.domain.ids import OwnerId, RequestId
from baton.services.router.frontend import ApiLimits
from baton.services.router.openai.request_parser import CHAT, RawRequest
from baton.services.router.openai.validation import RequestMetadata
from baton.services.router.respond import GenerationResponse
from baton.store.memory_store import MemoryStore
from baton.store.store import CallStatus
from baton.store.write_behind.writer import StoreWriter
from baton.telemetry.request_timer import RequestOrigin
from tests.fake_dispatcher import FakeDispatcher, one_token_chunks
from tests.unit.router.memory_frontend import memory_frontend

ID = RequestId("chatcmpl-1")
BODY = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": true, "stop": ["ab"]}'


async def test_a_complete_answer_is_ended_if_its_router_stops_before_done() -> None:
    """Left open, the next router would take over a call that has nothing left to generate."""
    store, last_events = MemoryStore(), asyncio.Event()

    async def send(message: Message) -> None:
        if b"[DONE]" in message.get("body", b""):
            last_events.set()
            await asyncio.Event().wait()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async with StoreWriter(store) as writer:
        dispatcher = FakeDispatcher(lambda sequence: one_token_chunks([5, 6]))
        frontend = memory_frontend(dispatcher, ApiLimits("m", 256), writer=writer)
        raw = RawRequest(CHAT, BODY, RequestMetadata(ID, 7, 99, ""))
        parsed = await frontend.parser.parse(raw)
        timer = frontend.traces.start(RequestOrigin(CHAT), 0.0)
        timer.begin(ID, 1, parsed.request.num_prompt_tokens, stream=True)
        response = GenerationResponse(frontend.response_context, parsed, raw, timer)
        responding = asyncio.create_task(response({"type": "http", "headers": []}, receive, send))
        async with asyncio.timeout(5.0):
            await last_events.wait()
        responding.cancel()
        await asyncio.wait([responding])
        await writer.flush(1.0)
    record = await store.get_call(ID)
    assert record is not None
    assert (record.status, record.owner) == (CallStatus.ENDED, OwnerId("router/0"))
