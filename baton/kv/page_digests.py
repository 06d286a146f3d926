"""Digests of one pool's pages, kept from the moment a page settles until it is freed. Pure; engine thread only.

A page settles when its last byte is written: a prefill step has filled it, or a transfer has delivered it with the
announced digest. Its digest is taken then and never again: later damage differs from the kept digest instead of being
signed anew. The lifecycle of a page, one instance a pool:

    NONE --set--> SETTLED --freed--> NONE
    NONE | SETTLED --condemn--> CONDEMNED --freed--> NONE | RETIRED

A page's digest is one number of 64 bits a part of the page (`baton.kv.geometry`), the first part lowest.

A page is windowless if its window part (`baton.kv.geometry`) was not delivered with the rest. Its digest then covers
that part as it lies, so that damage is found there too. Where window parts have slots of their own
(`baton.kv.windows.slots`), a page without one is windowless, and its last part has the digest of no bytes.

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
ABSENT_DIGEST = 0x2D06800538D394C2
"""xxh3-64 of no bytes: digest of a window part that is not there."""
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


def without_window(digest: int, num_parts: int) -> int:
    """Digest of a page of `num_parts` parts, with `digest`, once its last part is not there."""
    shift = PART_BITS * (num_parts - 1)
    return (digest & ((1 << shift) - 1)) | (ABSENT_DIGEST << shift)


def is_windowless(digest: int, num_parts: int) -> bool:
    """True if `digest` is of a page whose window part is not there."""
    return num_parts > 1 and digest >> (PART_BITS * (num_parts - 1)) == ABSENT_DIGEST


def is_same(found: int, wanted: int, num_parts: int) -> bool:
    """True if bytes with the digest `found` are those of a page with `wanted`, whose window part may be absent."""
    return wanted == (without_window(found, num_parts) if is_windowless(wanted, num_parts) else found)


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
        self._num_parts = 0  # of a page, where window parts have slots of their own; 0: they have none

    @property
    def num_pages(self) -> int:
        return len(self._states)

    def keep_windows_apart(self, num_parts: int) -> None:
        """Window parts have slots of their own: every page begins without one. `num_parts`: of a page."""
        self._num_parts = num_parts
        self._windowless = bytearray(b"\1" * self.num_pages)

    @property
    def num_parts(self) -> int:
        """Parts of a page where window parts have slots of their own; 0: they have none."""
        return self._num_parts

    def gain_window(self, page: PageId) -> None:
        """A page that is not settled has got a slot for its window part."""
        self._windowless[page] = False

    def lose_window(self, page: PageId) -> None:
        """A page has given its slot back."""
        self._windowless[page] = True
        if self._states[page] == _SETTLED:
            self._digests[page] = without_window(self._digests[page], self._num_parts)

    def move_window(self, page: PageId, other: PageId) -> None:
        """The window part of one settled page is now that of another one, with its digest."""
        shift = PART_BITS * (self._num_parts - 1)
        if self._states[page] == _SETTLED == self._states[other]:
            window = self._digests[page] >> shift
            self._digests[other] = (self._digests[other] & ((1 << shift) - 1)) | (window << shift)
        self._tags.pop(other, None)  # it does not cover this window part
        self._windowless[other] = False
        self.lose_window(page)

    def as_it_is(self, page: PageId, digest: int) -> int:
        """The digest to expect of a page that had `digest`, perhaps with its window part, if it has no slot now."""
        return without_window(digest, self._num_parts) if self._num_parts and self._windowless[page] else digest

    def fits(self, page: PageId, found: int, wanted: int) -> bool:
        """True if a page whose bytes have the digest `found` may be one that had `wanted` earlier.

        It may have lost its window part since then, or got it back, where window parts have slots.
        """
        if not self._num_parts:
            return found == wanted
        return is_same(found, self.as_it_is(page, wanted), self._num_parts)

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
        self.set_all((page,), (digest,))

    def set_all(self, pages: Sequence[PageId], digests: Sequence[int]) -> None:
        """`set` for each of `pages`. Raises `Broken` at the first one that has settled already."""
        states, kept, checked_at = self._states, self._digests, self._checked_at
        has_slots = self._num_parts > 0
        self._num_checks += 1
        number = self._num_checks
        for page, digest in zip(pages, digests, strict=True):
            if states[page]:
                raise Broken(f"page {page} is {self.state(page).name} and cannot settle")
            states[page] = _SETTLED
            kept[page] = self.as_it_is(page, digest) if has_slots else digest
            checked_at[page] = number

    def digest(self, page: PageId) -> int:
        """Digest of a settled page. Raises `Broken` for any other."""
        if self._states[page] != _SETTLED:
            raise Broken(f"page {page} is {self.state(page).name} and has no digest")
        return self._digests[page]

    def all_of(self, pages: Sequence[PageId]) -> list[int]:
        """`digest` of each of `pages`."""
        states, kept = self._states, self._digests
        return [kept[page] if states[page] == _SETTLED else self.digest(page) for page in pages]

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
        self._windowless[page] = self._num_parts > 0
        if page in self._worn:
            self._states[page] = _RETIRED
            return True
        self._states[page] = 0
        return False
