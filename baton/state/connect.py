"""One url, one book. Called by the services at start."""

from __future__ import annotations

from baton.state.base import StateBook, StateUnavailable
from baton.state.line import without_password
from baton.state.memory import MemoryBook
from baton.state.options import BookOptions
from baton.state.redis_book import RedisBook

_SCHEMES = ("redis", "rediss", "unix")


async def connect(url: str, options: BookOptions | None = None) -> StateBook:
    """Opens the book at `url` and makes sure that it answers.

    `memory://` is a fresh book in this process; `redis://[user:password@]host:port[/db]`, `rediss://...` and
    `unix:///path/to/socket` are a Redis server. Raises `StateUnavailable`, with the reason and the remedy, when the
    server does not answer within `options.timeout_s`, and `ValueError` for a url of another kind.
    """
    scheme = url.partition("://")[0]
    if scheme == "memory":
        return MemoryBook(options)
    if scheme not in _SCHEMES:
        raise ValueError(f"{without_password(url)!r} is no state url: use memory://, redis://, rediss:// or unix://")
    book = RedisBook(url, options)
    try:
        await book.ping()
    except StateUnavailable as error:
        await book.close()
        raise StateUnavailable(
            f"{error}; correct the state url, start a redis-server, or use memory:// when one process serves alone"
        ) from error
    return book
