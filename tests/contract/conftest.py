"""Books for the contract tests: memory and a real Redis, opened under a name of their own and closed afterwards."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from baton.state.base import StateBook
from baton.state.connect import connect
from baton.state.embedded import EmbeddedRedis
from baton.state.keys import Keys
from baton.state.options import BookOptions
from tests.contract.books import RARE, OpenBook
from tests.redis_server import running_redis


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedRedis]:
    with running_redis() as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
async def open_book(request: pytest.FixtureRequest) -> AsyncIterator[OpenBook]:
    url = "memory://" if request.param == "memory" else request.getfixturevalue("server").url
    async with contextlib.AsyncExitStack() as stack:

        async def open_it(options: BookOptions) -> StateBook:
            book = await connect(url, replace(options, prefix=f"test:{uuid.uuid4().hex}:"))
            stack.push_async_callback(book.close)
            return book

        yield open_it


@pytest.fixture
async def book(open_book: OpenBook) -> StateBook:
    return await open_book(RARE)


@pytest.fixture
async def redis_book(server: EmbeddedRedis) -> AsyncIterator[tuple[StateBook, Keys, Redis]]:
    """A book, the names it uses, and a way to look at them from outside."""
    prefix = f"test:{uuid.uuid4().hex}:"
    book, outside = await connect(server.url, replace(RARE, prefix=prefix)), Redis.from_url(server.url)
    yield book, Keys(prefix), outside
    await outside.aclose()
    await book.close()
