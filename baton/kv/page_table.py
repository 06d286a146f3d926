"""One request's page table: its pages in order, the reason they are held, and how many are in the prefix cache.

Both schedulers keep one a request. It is the only place where tokens, page keys and pages are kept in step.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.domain.arithmetic import ceil_div
from baton.domain.ids import PageId, PageKey
from baton.kv.keys import next_key, page_keys, root_key
from baton.kv.pages import Hold
from baton.kv.prefix_cache import PrefixCache


class PageTable:
    """Pages [0, len(pages)) of a token sequence under a salt."""

    def __init__(self, cache: PrefixCache, page_size: int, salt: str, hold: Hold) -> None:
        self.pages: list[PageId] = []
        self._cache = cache
        self._page_size = page_size
        self._hold = hold
        self.salt = salt  # may be set until the first page is entered
        self._keys: list[PageKey] = []  # of the pages entered in the cache

    @property
    def num_slots(self) -> int:
        """Token slots that the pages cover."""
        return len(self.pages) * self._page_size

    def match(self, keys: Sequence[PageKey]) -> int:
        """Starts the (empty) table with the cached pages of the longest prefix of `keys`; returns how many tokens."""
        self.pages = self._cache.match(keys, self._hold)
        self._keys = list(keys[: len(self.pages)])
        return self.num_slots

    def match_tokens(self, tokens: Sequence[int]) -> int:
        """`match` for all full pages of `tokens`."""
        return self.match(page_keys(tokens, self._page_size, self.salt))

    def verify_prefix(self, tokens: Sequence[int], salt: str, num_pages: int) -> bool:
        """Whether the first `num_pages` pages, matched by keys alone, are those of `tokens` under `salt`.

        If so the table goes on under that salt: keys came with the reservation, tokens only come with the request.
        """
        if page_keys(tokens[: num_pages * self._page_size], self._page_size, salt) != self._keys[:num_pages]:
            return False
        self.salt = salt
        return True

    def num_missing(self, num_tokens: int) -> int:
        """Pages that are still needed to cover `num_tokens` slots."""
        return max(0, ceil_div(num_tokens, self._page_size) - len(self.pages))

    def extend(self, num_tokens: int) -> bool:
        """Covers `num_tokens` slots; False (and no change) when there are not enough pages."""
        pages = self._cache.allocate(self.num_missing(num_tokens), self._hold)
        if pages is None:
            return False
        self.pages += pages
        return True

    def cache_full_pages(self, tokens: Sequence[int], num_filled: int) -> None:
        """Enters the full pages of `tokens[:num_filled]`, whose KV is in place, into the prefix cache.

        Costs as much as there are pages that were not entered before. A page that another request cached meanwhile
        replaces ours in the table: the bytes are the same.
        """
        num_cached, num_full = len(self._keys), min(num_filled, len(tokens)) // self._page_size
        if num_full <= num_cached:
            return
        parent = self._keys[-1] if self._keys else None
        key = parent or root_key(self.salt)
        for start in range(num_cached * self._page_size, num_full * self._page_size, self._page_size):
            key = next_key(key, tokens[start : start + self._page_size])
            self._keys.append(key)
        new = slice(num_cached, num_full)
        self.pages[new] = self._cache.insert(parent, self._keys[new], self.pages[new], self._hold)

    def change_hold(self, hold: Hold) -> None:
        """Changes why the pages are held, without a gap."""
        self._cache.pool.move(self.pages, self._hold, hold)
        self._hold = hold

    def release(self) -> None:
        """Gives all pages up; the cached ones stay in the cache. The table is empty and usable again."""
        self._cache.touch(self._keys)
        self._cache.pool.drop(self.pages, self._hold)
        self.pages, self._keys = [], []
