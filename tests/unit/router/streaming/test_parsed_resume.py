"""A client with any event of an answer with reasoning and calls gets exactly the rest."""

from __future__ import annotations

import re

import pytest

from baton.domain.ids import RequestId
from baton.domain.request import FinishReason
from baton.services.router.openai.request_parser import ParsedRequest, RawRequest, RequestParser
from baton.services.router.openai.validation import RequestMetadata, RequestValidator
from baton.services.router.streaming.cursor import Cursor
from baton.services.router.streaming.sse_stream import SseStream
from baton.services.router.streaming.token_stream import TokenStream
from baton.services.router.text.text_model import TextModel
from tests.unit.router.streaming.chunk_sources import ScriptedSource, chunks
from tests.unit.router.text.text_models import marked

TEMPLATE, THINK, CALL_MARKERS = (
    "{{ tools }}{# <tool_call> #}<think>",
    ["<think>", "</think>"],
    ["<tool_call>", "</tool_call>"],
)
WHOLE_CALLS, CALLS_IN_PARTS = marked(TEMPLATE, THINK), marked(TEMPLATE, [*THINK, *CALL_MARKERS])
"""Where the marker is a token calls are constrained, and come while they are written."""
CALL = '<tool_call>{"name": "now", "arguments": {"a": "é🦊"}}</tool_call>'
BODY = b"""{"model": "m", "stream": true, "stream_options": {"include_usage": true}, "messages":
[{"role": "user", "content": "hi"}], "tools": [{"type": "function", "function": {"name": "now"}}]}"""


async def parsed(model: TextModel) -> ParsedRequest:
    metadata = RequestMetadata(RequestId("call"), 1, 5)
    parser = RequestParser(RequestValidator(model, "m", 4096, 9.0), model, "f")
    return await parser.parse(RawRequest("/v1/chat/completions", BODY, metadata))


async def received(model: TextModel, after: Cursor | None) -> bytes:
    """What a client with this cursor gets."""
    parts: list[bytes] = []

    async def send(message: object) -> None:
        parts.append(message.get("body", b""))  # type: ignore[attr-defined]

    async def headers() -> dict[str, str]:
        return {}

    request, tokens = (
        await parsed(model),
        model.encode(f"one é two</think>\n\nso\n{CALL}{CALL} en", add_special_tokens=False),
    )
    stream = TokenStream(model, request.request, ScriptedSource({0: chunks([*tokens, 2], FinishReason.STOP)}))
    await SseStream(send, request, stream, with_ids=True, after=after).run(headers, 5.0)
    return b"".join(parts)


@pytest.mark.parametrize("model", [WHOLE_CALLS, CALLS_IN_PARTS], ids=["whole", "parts"])
async def test_every_cursor_splits_a_parsed_answer_in_two(model: TextModel) -> None:
    """Also one in the middle of a call: the client has its beginning, and gets the rest of its arguments."""
    whole = await received(model, None)
    assert whole.count(b'"name":"now"') == 2
    num_parts = whole.count(b'"tool_calls":')
    assert num_parts == 2 if model is WHOLE_CALLS else num_parts > 10
    assert b'"reasoning_content"' in whole
    starts = [found.start() for found in re.finditer(rb"id: ", whole)]
    ids = re.findall(rb"id: (\S+)\n", whole)
    assert len(ids) > 30
    for id, start in zip(ids, [*starts[1:], len(whole)], strict=True):
        assert await received(model, Cursor.parse(id.decode())) == whole[start:]
