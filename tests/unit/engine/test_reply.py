"""Replies: resolved once, from any thread, with or without a waiter."""

from __future__ import annotations

import asyncio
import threading

import pytest

from baton.domain.errors import DeadlineExceeded, Superseded
from baton.engine.reply import Reply


def from_another_thread(call) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(10.0)


async def test_an_answer_from_the_engine_thread():
    reply: Reply[int] = Reply()
    from_another_thread(lambda: reply.send(7))
    assert await reply.wait(10.0) == 7


async def test_an_error_is_raised_where_it_is_awaited():
    reply: Reply[int] = Reply()
    from_another_thread(lambda: reply.send(Superseded("older")))
    with pytest.raises(Superseded, match="older"):
        await reply.wait(10.0)


async def test_only_the_first_answer_counts():
    reply: Reply[int] = Reply()
    reply.send(1)
    reply.send(2)
    assert await reply.wait(10.0) == 1


async def test_a_missing_answer_raises_deadline_exceeded():
    with pytest.raises(DeadlineExceeded, match="did not answer"):
        await Reply[int]().wait(0.01)


async def test_a_late_answer_goes_to_on_late():
    late: asyncio.Queue[int] = asyncio.Queue()
    reply: Reply[int] = Reply(on_late=late.put_nowait)
    with pytest.raises(DeadlineExceeded):
        await reply.wait(0.01)
    from_another_thread(lambda: reply.send(7))
    assert await asyncio.wait_for(late.get(), 10.0) == 7


async def test_an_answer_in_time_is_not_late():
    late: list[int] = []
    reply: Reply[int] = Reply(on_late=late.append)
    reply.send(7)
    assert await reply.wait(10.0) == 7
    assert late == []


def test_an_answer_to_a_closed_loop_is_dropped():
    async def make() -> Reply[int]:
        return Reply()

    reply = asyncio.run(make())
    reply.send(7)
