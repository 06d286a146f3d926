"""The outermost middleware's figures: a request's time ends with its answer, whoever ends it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from baton.services.router.edge.middleware import RequestMiddleware
from baton.telemetry.metrics import REGISTRY

SCOPE: dict[str, Any] = {"type": "http", "path": "/nowhere", "headers": []}


def num_requests() -> float:
    return REGISTRY.get_sample_value("baton_http_request_seconds_count", {"route": "none"}) or 0.0


async def never() -> Message:
    raise AssertionError("nothing is read")


async def send(message: Message) -> None:
    """Takes everything."""


class SlowAnswer:
    """An application whose body ends when the test says so, or that fails behind its first bytes."""

    def __init__(self, error: Exception | None = None) -> None:
        self.has_begun, self.may_end = asyncio.Event(), asyncio.Event()
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        self.has_begun.set()
        await self.may_end.wait()
        if self._error is not None:
            raise self._error
        await send({"type": "http.response.body", "body": b"end"})


@pytest.mark.parametrize("error", [None, ValueError("broken")])
async def test_the_time_of_a_request_ends_with_its_answer(error: Exception | None) -> None:
    answer, before = SlowAnswer(error), num_requests()
    request = asyncio.create_task(RequestMiddleware(answer)({**SCOPE}, never, send))
    await answer.has_begun.wait()
    assert num_requests() == before, "the answer has only begun"
    answer.may_end.set()
    await request
    assert num_requests() == before + 1


async def test_a_client_that_leaves_ends_the_time() -> None:
    answer, before = SlowAnswer(), num_requests()
    request = asyncio.create_task(RequestMiddleware(answer)({**SCOPE}, never, send))
    await answer.has_begun.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert num_requests() == before + 1
