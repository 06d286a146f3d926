"""Events of a prefix cache. Made by `EventSource`, numbered by `CacheEventLog`."""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.ids import PageKey


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """A page entered the cache behind the cached page `parent` (None: it is the first of its prompt).

    `tokens`: of the page, where a reader wants them; otherwise empty.
    """

    key: PageKey
    parent: PageKey | None
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RemovedEvent:
    """A page left the cache: evicted or quarantined."""

    key: PageKey


@dataclass(frozen=True, slots=True)
class ClearedEvent:
    """All pages left the cache."""


CacheEvent = StoredEvent | RemovedEvent | ClearedEvent


@dataclass(frozen=True, slots=True)
class CacheDelta:
    """What events (after_seq, seq] changed. Applies to the content at `after_seq` only, unless `reset`.

    `reset`: the content is `stored` alone, whatever it was. A snapshot is a reset after 0. `stored` and `removed` have
    no key in common.
    """

    after_seq: int
    seq: int
    stored: tuple[PageKey, ...] = ()
    removed: tuple[PageKey, ...] = ()
    reset: bool = False
