"""The page table of one request: its pages in order, their hold, and their keys in the prefix cache.

Both schedulers keep one per request. Only this class keeps tokens, page keys and pages consistent.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.domain.arithmetic import ceil_div
from baton.domain.ids import PageId, PageKey
from baton.domain.media.span import MediaSpan
from baton.domain.request import EngineRequest
from baton.kv.eviction import NO_PRIORITY
from baton.kv.keys import next_key, page_extras, page_keys, root_key
from baton.kv.page_checks import PageChecks
from baton.kv.pages import Hold
from baton.kv.prefix_cache import PrefixCache
from baton.kv.quarantine import Quarantine


class PageTable:
    """Pages [0, len(pages)) of a token sequence with its media spans, under a salt."""

    def __init__(
        self, cache: PrefixCache, page_size: int, salt: str, hold: Hold, media: Sequence[MediaSpan] = ()
    ) -> None:
        self.pages: list[PageId] = []
        self.cache = cache
        self._page_size = page_size
        self._hold = hold
        self.salt = salt  # salt and media may be set until the first page is cached
        self.media = media
        self._keys: list[PageKey] = []  # of the cached pages
        self._blocking: PageKey | None = None  # behind `_keys`: cached in a page that the last insert did not pass
        self._counts_hits = False  # the matched pages are still to be counted as hits
        self._priority = NO_PRIORITY  # of the request

    @property
    def num_slots(self) -> int:
        """Token slots that the pages cover."""
        return len(self.pages) * self._page_size

    @property
    def cached_keys(self) -> Sequence[PageKey]:
        """Keys of the pages that are in the prefix cache, from the first one on."""
        return self._keys

    @property
    def num_own_pages(self) -> int:
        """Pages that nothing else holds."""
        return self.cache.pool.num_held_once(self.pages)

    @property
    def can_continue(self) -> bool:
        """True if the token behind the pages can be computed over them: no window reaches a windowless page."""
        window, is_windowless = self.cache.window, self.cache.pool.digests.is_windowless
        return window is None or window.num_usable(self.pages, is_windowless, None) == len(self.pages)

    def set_priority(self, priority: int) -> None:
        """Sets the request's priority, for the eviction of the pages that it uses."""
        self._priority = priority
        if not self._counts_hits:
            self.cache.raise_priority(self._keys, priority)

    def match(self, keys: Sequence[PageKey], next_position: int | None = None) -> int:
        """Fills an empty table with the cached pages of the longest prefix of `keys`; returns the number of tokens.

        `next_position`: see `PrefixCache.match`.
        """
        self.pages = self.cache.match(keys, self._hold, next_position)
        self._keys = list(keys[: len(self.pages)])
        self._counts_hits = bool(self._keys)
        return self.num_slots

    def match_tokens(self, tokens: Sequence[int]) -> int:
        """`match` for all full pages of `tokens`."""
        return self.match(page_keys(tokens, self._page_size, self.salt, self.media))

    def match_checked(self, keys: Sequence[PageKey], checks: PageChecks, quarantine: Quarantine, now: float) -> int:
        """`match` of checked pages only: quarantines a page that is wrong and matches again."""
        while True:
            num_tokens = self.match(keys)
            wrong = checks.check_matched(self.pages)
            if not wrong:
                return num_tokens
            quarantine.add_pages(wrong, now)
            self.release()

    def verify_prefix(self, request: EngineRequest, num_pages: int) -> bool:
        """True if the first `num_pages` pages, which were matched by keys, belong to the tokens of `request`.

        The table then takes its salt and media. The reservation brought only keys, the request brings the rest.
        """
        tokens = request.tokens[: num_pages * self._page_size]
        if page_keys(tokens, self._page_size, request.salt, request.media) != self._keys[:num_pages]:
            return False
        self.salt, self.media = request.salt, request.media
        return True

    def num_missing(self, num_tokens: int) -> int:
        """Number of pages needed beyond the present ones to cover `num_tokens` slots."""
        return max(0, ceil_div(num_tokens, self._page_size) - len(self.pages))

    def extend(self, num_tokens: int) -> bool:
        """Allocates pages to cover `num_tokens` slots. False, without a change, if there are not enough."""
        pages = self.cache.allocate(self.num_missing(num_tokens), self._hold)
        if pages is None:
            return False
        self.pages += pages
        if self._counts_hits:  # now, not at the match: a request without room matches again every turn
            self.cache.count_hits(self._keys)
            self.cache.raise_priority(self._keys, self._priority)
            self._counts_hits = False
        return True

    def shrink(self, num_tokens: int) -> None:
        """Frees pages beyond those that cover `num_tokens` slots: extended for drafts that were rejected."""
        first = ceil_div(num_tokens, self._page_size)
        if first < len(self.pages):
            self.cache.pool.drop(self.pages[first:], self._hold)
            del self.pages[first:]

    def cache_full_pages(self, tokens: Sequence[int], num_filled: int) -> None:
        """Enters the full pages of `tokens[:num_filled]`, whose KV is in place, into the prefix cache.

        Visits only pages that were not entered before; those without a digest settle. A page that another request
        cached meanwhile replaces the table's own: the bytes are the same. A tainted table enters nothing. Neither does
        one whose next page is held elsewhere without its window part; it makes no key until that has changed.
        """
        if self.is_tainted:
            return
        num_cached, num_full = len(self._keys), min(num_filled, len(tokens)) // self._page_size
        if num_full <= num_cached:
            return
        if self._blocking is not None and self.cache.is_held_windowless(self._blocking, self.pages[num_cached]):
            self.cache.settle(self.pages[num_cached:num_full])
            return
        parent = self._keys[-1] if self._keys else None
        key = parent or root_key(self.salt)
        keys: list[PageKey] = []
        for start in range(num_cached * self._page_size, num_full * self._page_size, self._page_size):
            end = start + self._page_size
            key = next_key(key, tokens[start:end], page_extras(start, end, self.media))
            keys.append(key)
        new = tokens[num_cached * self._page_size : num_full * self._page_size]
        used = self.cache.insert(parent, keys, self.pages[num_cached:num_full], self._hold, new)
        self.pages[num_cached : num_cached + len(used)] = used
        self._keys += keys[: len(used)]
        self._blocking = keys[len(used)] if len(used) < len(keys) else None
        self.cache.raise_priority(keys[: len(used)], self._priority)

    def digests(self, num_pages: int) -> list[int]:
        """Digests of the first `num_pages` pages: the kept ones, and new ones of pages that are not full yet.

        Empty if digests are off.
        """
        return self.cache.digests(self.pages[:num_pages])

    def windowless(self, num_pages: int) -> list[int]:
        """Numbers of those of the first `num_pages` pages that have no window part."""
        pages = enumerate(self.pages[:num_pages])
        return [at for at, page in pages if self.cache.pool.digests.is_windowless(page)]

    def settle(self, digests: Sequence[int], windowless: Sequence[int] = ()) -> None:
        """Settles the first pages, which are not cached and get their full bytes from a copy with `digests`.

        `windowless`: numbers of those whose copies have no window part.
        """
        self.cache.pool.digests.mark_windowless(self.pages[at] for at in windowless)
        for page, digest in zip(self.pages, digests, strict=False):
            self.cache.pool.digests.set(page, digest)

    def holds_condemned(self) -> bool:
        """True if any page is condemned, cached or not."""
        return any(map(self.cache.pool.digests.is_condemned, self.pages))

    @property
    def is_tainted(self) -> bool:
        """True if a page of the table was quarantined: what is computed from here on is wrong.

        Quarantine takes a page's descendants along, so the last cached page tells.
        """
        return bool(self._keys) and self.cache.pool.digests.is_condemned(self.pages[len(self._keys) - 1])

    def change_hold(self, hold: Hold) -> None:
        """Changes the hold of all pages without a gap."""
        self.cache.pool.move(self.pages, self._hold, hold)
        self._hold = hold

    def release(self) -> None:
        """Drops the hold of all pages and empties the table. Cached pages stay in the cache."""
        self.cache.touch(self._keys)
        self.cache.pool.drop(self.pages, self._hold)
        self.pages, self._keys, self._blocking = [], [], None
