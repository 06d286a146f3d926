"""Events of a prefix cache. Made by `EventSource`, numbered by `CacheEventLog`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.domain.ids import PageKey
from baton.domain.media.span import MediaSpan, shown_spans


@dataclass(frozen=True, slots=True)
class PageContent:
    """What readers of events learn of a page.

    `media`: the identity of each of its spans, and the place of the span's first token, below 0 if it is before the
    page.
    """

    tokens: tuple[int, ...] = ()
    media: tuple[tuple[bytes, int], ...] = ()


EMPTY = PageContent()

PageContents = Callable[[int, int], Sequence[PageContent]]
"""Gives those of a prompt's pages [first, end)."""


def page_contents(
    tokens: Sequence[int], media: Sequence[MediaSpan], page_size: int, first: int, end: int
) -> list[PageContent]:
    """Of the full pages [first, end) of a prompt with these spans, which are in order."""
    contents = []
    for start in range(first * page_size, end * page_size, page_size):
        stop = start + page_size
        shown = tuple((span.identity, span.first - start) for span, _, _ in shown_spans(media, start, stop))
        contents.append(PageContent(tuple(tokens[start:stop]), shown))
    return contents


def no_contents(_first: int, _end: int) -> Sequence[PageContent]:
    """Of pages whose prompt is not known."""
    return ()


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """A page entered the cache behind the cached page `parent` (None: it is the first of its prompt).

    `content`: of the page, where a reader wants it; otherwise empty.
    """

    key: PageKey
    parent: PageKey | None
    content: PageContent = EMPTY


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
