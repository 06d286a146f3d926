"""An answer's objects are freed by themselves: none of them waits for a garbage collection."""

from __future__ import annotations

import asyncio
import gc

import pytest

from baton.services.router.openai.valid_request import ValidRequest
from baton.services.router.respond import GenerationResponse
from baton.services.router.streaming.token_stream import TokenStream
from baton.services.router.streaming.unread_buffer import UnreadBuffer
from baton.telemetry.request_timer import RequestTimer
from baton.telemetry.sequence_timer import SequenceTimer
from tests.service.http.http_server import router, says

KINDS = (GenerationResponse, RequestTimer, SequenceTimer, TokenStream, UnreadBuffer, ValidRequest)


def alive() -> list[object]:
    return [each for each in gc.get_objects() if type(each) in KINDS]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("origin", [{}, {"origin": "http://localhost"}])  # the short way, and Starlette's
async def test_no_object_of_an_answer_waits_for_a_collection(stream: bool, origin: dict[str, str]):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    async with router(says("hi you")) as world:
        gc.collect()
        gc.disable()
        before = alive()  # what the traceback of a test that failed in this process holds
        known = set(map(id, before))
        try:
            response = await world.http.post("/v1/chat/completions", json=body, headers=origin)
            assert response.status_code == 200
            others = {task for task in asyncio.all_tasks() if "run_asgi" in repr(task.get_coro())}
            if others:
                await asyncio.wait(others, timeout=20)
            del others
            await asyncio.sleep(0)  # callbacks of the task
            assert [type(each).__name__ for each in alive() if id(each) not in known] == []
        finally:
            gc.enable()
