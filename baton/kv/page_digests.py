"""Digests of one pool's pages, kept from the moment a page settles until it is freed. Pure; engine thread only.

A page settles when its last byte is written: a prefill step has filled it, or a transfer has delivered it with the
announced digest. Its digest is taken then and never again: later damage differs from the kept digest instead of being
signed anew. The lifecycle of a page, one instance a pool:

    NONE --set--> SETTLED --freed--> NONE
    NONE | SETTLED --condemn--> CONDEMNED --freed--> NONE | RETIRED

A page's digest is one number of 64 bits a part of the page (`baton.kv.geometry`), the first part lowest.

A page is windowless if its window part (`baton.kv.geometry`) was not delivered with the rest. Its digest then covers
that part as it lies, so that damage is found there too.

A condemned page is neither matched nor announced. A page with two faults within `FAULT_WINDOW_S` is retired at its
next release and never allocated again.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

from baton.domain.errors import Broken
from baton.domain.ids import PageId

PART_BITS = 64
PART_MASK = (1 << PART_BITS) - 1
FAULT_WINDOW_S = 3600.0
"""Two faults of one page within this time retire it."""


class PageHasher(Protocol):
    """Hashes pages of one pool. `baton.transfer.digest` has the implementation; the caller bounds the number."""

    def digests(self, pages: Sequence[PageId]) -> Sequence[int]:
        """Digests of the bytes of `pages` as they are now, of 64 bits a part."""
        ...


class PageTagger(Protocol):
    """Makes tags of pages of one pool. `baton.kv.page_tags` has the implementation."""

    def tags(self, pages: Sequence[PageId], identities: Sequence[bytes]) -> Sequence[bytes]:
        """Tags of the bytes of `pages` as they are now, each bound to its identity."""
        ...


def join_parts(parts: Sequence[int], num_parts: int) -> tuple[int, ...]:
    """Digests of pages from those of their parts, page after page. Raises `ValueError` for an incomplete page."""
    if len(parts) % num_parts:
        raise ValueError(f"{len(parts)} digests are not {num_parts} a page")
    if num_parts == 1:
        return tuple(parts)
    pages = (parts[start : start + num_parts] for start in range(0, len(parts), num_parts))
    return tuple([sum(part << (PART_BITS * at) for at, part in enumerate(page)) for page in pages])


def split_parts(digests: Sequence[int], num_parts: int) -> list[int]:
    """The inverse of `join_parts`: digests of the parts of pages, page after page."""
    if num_parts == 1:
        return list(digests)
    return [(digest >> (PART_BITS * at)) & PART_MASK for digest in digests for at in range(num_parts)]


class PageState(enum.IntEnum):
    """State of a page's digest."""

    NONE = 0  # free, or not completely written yet
    SETTLED = 1
    CONDEMNED = 2
    RETIRED = 3


_SETTLED, _CONDEMNED, _RETIRED = int(PageState.SETTLED), int(PageState.CONDEMNED), int(PageState.RETIRED)
"""Plain numbers: these run for every page of every step."""
_STATES = tuple(PageState)  # by number


class PageDigests:
    """Digests and states of `num_pages` pages."""

    def __init__(self, num_pages: int) -> None:
        self._digests = [0] * num_pages
        self._states = bytearray(num_pages)  # PageState.NONE == 0
        self._checked_at = array("Q", bytes(8 * num_pages))  # number of the last check or of `set`
        self._num_checks = 0
        self._tags: dict[PageId, bytes] = {}
        self._faulted_at: dict[PageId, float] = {}
        self._worn: set[PageId] = set()  # retired when they are freed
        self._windowless = bytearray(num_pages)

    def state(self, page: PageId) -> PageState:
        return _STATES[self._states[page]]

    def unsettled(self, pages: Sequence[PageId]) -> list[PageId]:
        """Those of `pages` that have no digest and are not condemned."""
        states = self._states
        return [page for page in pages if not states[page]]  # PageState.NONE == 0

    def settled(self, pages: Sequence[PageId]) -> list[PageId]:
        """Those of `pages` that have a digest and are not condemned."""
        states = self._states
        return [page for page in pages if states[page] == _SETTLED]

    def is_settled(self, page: PageId) -> bool:
        """True if the page has a digest and is not condemned."""
        return self._states[page] == _SETTLED

    def is_condemned(self, page: PageId) -> bool:
        return self._states[page] == _CONDEMNED

    def is_retired(self, page: PageId) -> bool:
        return self._states[page] == _RETIRED

    def set(self, page: PageId, digest: int) -> None:
        """Settles a page whose bytes are final. Raises `Broken` for a page that has settled already."""
        if self._states[page]:
            raise Broken(f"page {page} is {self.state(page).name} and cannot settle")
        self._states[page] = _SETTLED
        self._digests[page] = digest
        self._num_checks += 1
        self._checked_at[page] = self._num_checks

    def digest(self, page: PageId) -> int:
        """Digest of a settled page. Raises `Broken` for any other."""
        if self._states[page] != _SETTLED:
            raise Broken(f"page {page} is {self.state(page).name} and has no digest")
        return self._digests[page]

    def keep_tag(self, page: PageId, tag: bytes) -> None:
        """Keeps the tag of a settled page until it is freed. Raises `Broken` for any other page."""
        self.digest(page)
        self._tags[page] = tag

    def tag(self, page: PageId) -> bytes | None:
        """The kept tag of a page; None if it has none."""
        return self._tags.get(page)

    def mark_windowless(self, pages: Iterable[PageId]) -> None:
        """Tells that `pages` get no KV of layers with a sliding window, until they are freed. Idempotent."""
        for page in pages:
            self._windowless[page] = True

    def is_windowless(self, page: PageId) -> bool:
        """True if the page has no KV of layers with a sliding window."""
        return bool(self._windowless[page])

    def condemn(self, page: PageId) -> None:
        """Forbids the use of a page until it is freed. Idempotent. Only the prefix cache and tests call this."""
        if self._states[page] == _RETIRED:
            raise Broken(f"page {page} is retired and cannot be condemned")
        self._states[page] = _CONDEMNED

    def record_fault(self, page: PageId, now: float) -> None:
        """Records that the page's bytes differed from its digest; the second time in an hour retires it when freed."""
        before = self._faulted_at.get(page)
        if before is not None and now - before <= FAULT_WINDOW_S:
            self._worn.add(page)
        self._faulted_at[page] = now

    def mark_checked(self, pages: Sequence[PageId]) -> None:
        """Makes `pages` the most recently checked ones."""
        self._num_checks += 1
        number, checked_at = self._num_checks, self._checked_at
        for page in pages:
            checked_at[page] = number

    def least_recently_checked(self, pages: Sequence[PageId], num_pages: int) -> list[PageId]:
        """The `num_pages` of `pages` whose last check is the longest ago."""
        return sorted(pages, key=self._checked_at.__getitem__)[:num_pages]

    def on_freed(self, page: PageId) -> bool:
        """Forgets the digest of a page without holds. True if the page is retired. Only the pool calls this."""
        if self._tags:
            self._tags.pop(page, None)
        self._windowless[page] = False
        if page in self._worn:
            self._states[page] = _RETIRED
            return True
        self._states[page] = 0
        return False
