"""The ids of a resumed answer's events: they count what the client has, not what this answer has passed."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
from starlette.types import Message

from baton.domain.ids import RequestId
from baton.domain.request import OutputToken
from services.router.openai.response_builder import FinishedChoice
from services.router.openai.schemas import Usage
from services.router.openai.valid_request import StreamOptions, ValidChatRequest
from services.router.streaming.cursor import Cursor
from services.router.streaming.sse_stream import SseStream
from services.router.text.choice_text import TokenEvent

REQUEST = ValidChatRequest(
    id=RequestId("call"),
    model="m",
    created_s=0,
    prompts=((1, 2),),
    sequences=(),
    num_choices=2,
    stop_strings=(),
    skip_special_tokens=True,
    return_token_ids=False,
    stream_options=StreamOptions(),
)


class Said(msgspec.Struct):
    choice: int
    token: int


class PlainShape:
    def chunk(self, event: TokenEvent, usage: object) -> Said:
        assert event.token is not None
        return Said(event.choice, event.token.token)

    def usage_chunk(self, usage: Usage) -> Said:
        raise AssertionError("nobody asked for usage")

    def response(self, choices: Sequence[FinishedChoice], usage: Usage) -> Said:
        raise AssertionError("it is streamed")


async def test_a_choice_that_is_behind_what_the_client_has_does_not_pull_its_ids_back() -> None:
    """Choices interleave differently in a resumed answer: one may give new events while another is still replayed."""
    parts: list[bytes] = []

    async def send(message: Message) -> None:
        parts.append(message.get("body", b""))

    after = Cursor(REQUEST.id, (1, 3))
    stream = SseStream(send, REQUEST, PlainShape(), with_ids=True, after=after)
    await stream.start({})
    for choice, index in ((0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (1, 2), (1, 3)):
        await stream.event(TokenEvent(choice, OutputToken(index, 10 * choice + index), "", 0))
    ids = re.findall(rb"id: call:([\d.]+)\n", b"".join(parts))
    assert ids == [b"2.3", b"3.3", b"3.4"]
