"""The page table of one request: its pages in order, their hold, and their keys in the prefix cache.

Both schedulers keep one per request. Only this class keeps tokens, page keys and pages consistent.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.domain.arithmetic import ceil_div
from baton.domain.errors import Broken
from baton.domain.ids import PageId, PageKey
from baton.domain.media.span import MediaSpan
from baton.domain.request import EngineRequest
from baton.kv.events.event import PageContent, page_contents
from baton.kv.eviction import NO_PRIORITY
from baton.kv.keys import next_key, page_extras, page_keys, root_key
from baton.kv.page_checks import PageChecks
from baton.kv.pages import Hold, Owner
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
        self._windows = cache.pool.windows
        self.has_windows = self._windows is not None and cache.window is not None  # window parts have slots
        self._held = range(0)  # numbers of the pages whose window parts are held
        self._num_reserved = 0  # window slots
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

    @property
    def window_slots(self) -> tuple[int, ...]:
        """Slot of each page's window part, or `NO_SLOT`; empty if window parts are in their pages."""
        return () if self._windows is None else self._windows.slots(self.pages)

    def reserve_windows(
        self, num_tokens: int, least_tokens: int | None = None, end: int | None = None, *, num_spare: int = 0
    ) -> bool:
        """Makes sure of the slots for steps of up to `num_tokens` tokens over the table's pages, and no more.

        `least_tokens`: steps may be as short as that where others would take more than half of all slots. `end`: where
        the steps end at the latest; a page has one window part. False, without a change, if too many slots are reserved
        for others, or there are not so many, or fewer than `num_spare` would be left.
        """
        windows, window = self._windows, self.cache.window
        if windows is None or window is None:
            return True
        num_slots = window.most_pages(num_tokens)
        if least_tokens is not None:
            num_slots = min(num_slots, max(window.most_pages(least_tokens), windows.num_usable // 2))
        if end is not None:
            num_slots = min(num_slots, ceil_div(end, self._page_size))
        num_more = num_slots - self._num_reserved
        if num_spare and windows.num_unreserved < num_more + num_spare:
            return False
        if num_more and not windows.reserve(num_more):
            return False
        self._num_reserved = num_slots
        return True

    def reach_back(self, position: int) -> None:
        """Holds what the token at `position` reads, too, which comes before the one that the match was made for.

        Raises `Broken` if a window part is not there: see `can_continue`.
        """
        if self._windows is None or self.cache.window is None:
            return
        begin, stop = (self._held.start, self._held.stop) if self._held else (len(self.pages), len(self.pages))
        first = self.cache.window.first_page(position)
        if first < begin:
            self._windows.hold(self.pages[first:begin], matched=True)
            self._held = range(first, stop)

    def max_step_tokens(self, start: int) -> int | None:
        """Most tokens from position `start` on for whose window parts there are slots; None: any number."""
        if self._windows is None or self.cache.window is None:
            return None
        return (self.cache.window.first_page(start) + self._num_reserved) * self._page_size - start

    def cover_windows(self, start: int, end: int) -> None:
        """Holds the window parts that the tokens [start, end) read and write.

        Raises `Broken`, without a change, for more than were reserved. Positions before an earlier `start` must not be
        covered again.
        """
        if self._windows is None or self.cache.window is None:
            return
        first, last = self.cache.window.first_page(start), ceil_div(end, self._page_size)
        begin, stop = (self._held.start, self._held.stop) if self._held else (first, first)
        if max(last, stop) - begin > self._num_reserved or not self._windows.take(self.pages[stop:last]):
            kept = f"{self._num_reserved} are reserved, pages {self._held} are held"
            raise Broken(f"no window slots for tokens [{start}, {end}): {kept}")
        self._held = range(begin, max(last, stop))

    def pass_windows(self, position: int) -> None:
        """Gives up the window parts that neither the token at `position` nor a later one reads."""
        if self._windows is None or self.cache.window is None:
            return
        first = min(self.cache.window.first_page(position), self._held.stop)
        if first > self._held.start:
            self._windows.drop(self.pages[self._held.start : first], passed=True)
            self._held = range(first, self._held.stop)

    def _drop_windows(self, first: int = 0) -> None:
        """Drops the holds of the window parts from page number `first` on."""
        first = max(first, self._held.start)
        if self._windows is not None and first < self._held.stop:
            self._windows.drop(self.pages[first : self._held.stop])
            self._held = range(self._held.start, first)

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
        if self._windows is not None and self.cache.window is not None:
            position = self.num_slots if next_position is None else next_position
            num_pages = len(self.pages)
            self._held = range(min(self.cache.window.first_page(position), num_pages), num_pages)
            self._windows.hold(self.pages[self._held.start :], matched=True)
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
            self._drop_windows(first)
            self.cache.pool.drop(self.pages[first:], self._hold)
            del self.pages[first:]

    def cache_full_pages(self, tokens: Sequence[int], num_filled: int) -> None:
        """Enters the full pages of `tokens[:num_filled]`, whose KV is in place, into the prefix cache.

        Visits only pages that were not entered before; those without a digest settle. A page that another request
        cached meanwhile replaces the table's own: the bytes are the same. A tainted table enters nothing. Neither does
        one whose next page is held elsewhere without its window part (only without window slots); it makes no key until
        that has changed.
        """
        if self.is_tainted:
            return
        num_cached, num_full = len(self._keys), min(num_filled, len(tokens)) // self._page_size
        if num_full <= num_cached:
            return
        if self._blocking is not None and self.cache.is_held_windowless(self._blocking, self.pages[num_cached]):
            self.cache.settle(self.pages[num_cached:num_full])
            return
        parent, keys = self._keys[-1] if self._keys else None, self._next_keys(tokens, num_full)
        contents = self.contents(tokens, num_cached, num_full)
        used = self.cache.insert(parent, keys, self.pages[num_cached:num_full], self._hold, contents)
        self.pages[num_cached : num_cached + len(used)] = used
        self._keys += keys[: len(used)]
        self._blocking = keys[len(used)] if len(used) < len(keys) else None
        self.cache.raise_priority(keys[: len(used)], self._priority)

    def num_taken(self, tokens: Sequence[int], num_filled: int) -> int:
        """Number of available pages that `cache_full_pages` would hold in place of the table's own."""
        keys = self._next_keys(tokens, min(num_filled, len(tokens)) // self._page_size)
        found = [page for key in keys if (page := self.cache.find(key)) is not None]
        return sum(self.cache.pool.owner(page) == Owner.CACHED for page in found)

    def _next_keys(self, tokens: Sequence[int], num_full: int) -> list[PageKey]:
        """Keys of the pages behind the cached ones, up to page number `num_full`."""
        key, keys = self._keys[-1] if self._keys else root_key(self.salt), list[PageKey]()
        for start in range(len(self._keys) * self._page_size, num_full * self._page_size, self._page_size):
            end = start + self._page_size
            key = next_key(key, tokens[start:end], page_extras(start, end, self.media) if self.media else b"")
            keys.append(key)
        return keys

    def contents(self, tokens: Sequence[int], first: int, end: int) -> list[PageContent]:
        """What readers of events learn of the pages [first, end) with these tokens, from the table's start on.

        Empty if there is no such reader.
        """
        if self.cache.events is None or not self.cache.events.with_content:
            return []
        return page_contents(tokens, self.media, self._page_size, first, end)

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
        self._drop_windows()
        if self._windows is not None:
            self._windows.reserve(-self._num_reserved)
            self._held, self._num_reserved = range(0), 0
        self.cache.pool.drop(self.pages, self._hold)
        self.pages, self._keys, self._blocking = [], [], None
