"""Event ids of a resumed response count the events of the client, not those of the response."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import pytest
from starlette.types import Message

from baton.domain.errors import ModelReplaced
from baton.services.router.openai.chat import ChatResponseBuilder
from baton.services.router.openai.request_parser import ParsedRequest
from baton.services.router.openai.valid_request import StreamOptions
from baton.services.router.streaming.cursor import Cursor
from baton.services.router.streaming.sse_stream import SseStream
from baton.services.router.streaming.token_stream import TokenStream
from tests.unit.router.streaming.chunk_sources import ScriptedSource, chunks, digest_of, request
from tests.unit.router.text.text_models import bundled


async def test_a_choice_behind_the_client_does_not_pull_ids_back() -> None:
    """Choices interleave differently in a resumed response: one gives new events while another is still replayed."""
    parts: list[bytes] = []
    gate = asyncio.Event()

    async def send(message: Message) -> None:
        parts.append(message.get("body", b""))
        if re.search(rb":3~\w{8}\.3\n", parts[-1]):
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
    ids = [Cursor.parse(id.decode()) for id in re.findall(rb"id: (\S+)\n", b"".join(parts))]
    assert [(id.counts, id.num_tail) for id in ids] == [((2, 3), 0), ((3, 3), 0), ((3, 4), 0), ((3, 4), 1)]
    assert ids[0].digests == (digest_of(5, 6), None)  # the client has not said which tokens of choice 1 it has
    assert ids[-1].digests == (digest_of(5, 6, 7), digest_of(10, 11, 12, 13))


async def resumed_after(after: Cursor, *tokens: int) -> bytes:
    """What a client with this cursor gets of a response that has these tokens here."""
    parts: list[bytes] = []

    async def send(message: Message) -> None:
        parts.append(message.get("body", b""))

    async def headers() -> dict[str, str]:
        return {}

    valid = request(1)
    parsed = ParsedRequest(valid, ChatResponseBuilder(valid, bundled(), "f"))
    stream = TokenStream(bundled(), valid, ScriptedSource({0: chunks(list(tokens))}))
    await SseStream(send, parsed, stream, with_ids=True, after=after).run(headers, 5.0)
    return b"".join(parts)


async def test_a_client_with_the_same_tokens_gets_the_rest() -> None:
    rest = await resumed_after(Cursor(request(1).id, (2,), 0, (digest_of(5, 6),)), 5, 6, 7)
    assert re.findall(rb"id: call:(\d)", rest) == [b"3", b"3"]  # the last token and [DONE]


@pytest.mark.parametrize("here", [(5, 9, 7), (9, 6, 7), (6, 5, 7), (5,)])
async def test_a_client_with_other_tokens_gets_none_of_another_answer(here: tuple[int, ...]) -> None:
    """Its router was cut off from the store: the answer was begun again with other weights."""
    with pytest.raises(ModelReplaced, match="another model"):
        await resumed_after(Cursor(request(1).id, (2,), 0, (digest_of(5, 6),)), *here)


async def test_a_client_that_names_a_number_only_is_not_compared() -> None:
    assert b"[DONE]" in await resumed_after(Cursor(request(1).id, (2,)), 9, 9, 7)


async def test_the_last_token_usage_done_and_the_end_are_one_message() -> None:
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async def headers() -> dict[str, str]:
        return {}

    valid = replace(request(1), stream_options=StreamOptions(include_usage=True))
    parsed = ParsedRequest(valid, ChatResponseBuilder(valid, bundled(), "f"))
    stream = TokenStream(bundled(), valid, ScriptedSource({0: chunks([5, 6])}))
    await SseStream(send, parsed, stream, with_ids=True).run(headers, 5.0)
    last = messages[-1]
    ids = [Cursor.parse(id.decode()) for id in re.findall(rb"id: (\S+)\n", last["body"])]
    assert [(id.counts, id.num_tail) for id in ids] == [((2,), 0), ((2,), 1), ((2,), 2)]
    assert last["body"].endswith(b"data: [DONE]\n\n")
    assert [message.get("more_body") for message in messages[1:]] == [True] * (len(messages) - 2) + [False]
