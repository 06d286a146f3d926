"""Event ids of a resumed response count the events of the client, not those of the response."""

from __future__ import annotations

import asyncio
import re

from starlette.types import Message

from services.router.openai.chat import ChatResponseBuilder
from services.router.openai.request_parser import ParsedRequest
from services.router.streaming.cursor import Cursor
from services.router.streaming.sse_stream import SseStream
from services.router.streaming.token_stream import TokenStream
from tests.unit.router.streaming.chunk_sources import ScriptedSource, chunks, request
from tests.unit.router.text.text_models import bundled


async def test_a_choice_behind_the_client_does_not_pull_ids_back() -> None:
    """Choices interleave differently in a resumed response: one gives new events while another is still replayed."""
    parts: list[bytes] = []
    gate = asyncio.Event()

    async def send(message: Message) -> None:
        parts.append(message.get("body", b""))
        if b":3.3\n" in parts[-1]:
            gate.set()

    async def headers() -> dict[str, str]:
        return {}

    valid = request(2)
    waiting = chunks([10, 11, 12, 13])
    source = ScriptedSource({0: chunks([5, 6, 7]), 1: [gate, *waiting]})
    parsed = ParsedRequest(valid, ChatResponseBuilder(valid, bundled(), "f"))
    stream = SseStream(
        send, parsed, TokenStream(bundled(), valid, source), with_ids=True, after=Cursor(valid.id, (1, 3))
    )
    await stream.run(headers, 5.0)
    assert re.findall(rb"id: call:([\d.+]+)\n", b"".join(parts)) == [b"2.3", b"3.3", b"3.4", b"3.4+1"]
