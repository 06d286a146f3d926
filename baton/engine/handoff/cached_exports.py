"""Exports of cached pages: what any worker's prefix cache gives to another worker's. Pure.

`open` pins the cached pages of a prefix and announces them at once, so such an export begins *sealed*. Its leases, its
commit and its end are those of every export (`kv_export`). Pages that nothing else held are bounded, since they cannot
be evicted while they are pinned: `max_pages` of all such exports together, and never so many that fewer than none of
`num_free_pages` are left. Only whole pages are given: those before the first one without its window part. Where window
parts have slots of their own, those behind which a sequence can go on are given, and the slots of the window parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.domain.errors import PageVerdict
from baton.domain.handoff import PublishedChunk, Suspect
from baton.domain.ids import AttemptId, PageId, PageKey
from baton.engine.handoff.kv_export import ExportTable
from baton.engine.handoff.prompt_tags import PromptTags
from baton.kv.page_checks import PageChecks
from baton.kv.pages import Hold
from baton.kv.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class ExportLimits:
    """`max_pages`: pinned for other workers' caches only. `num_free_pages`: available ones that nothing counts on."""

    max_pages: int
    num_free_pages: Callable[[], int]


class CachedExports:
    """Opens exports of one pool's cached pages. Owned by the engine thread."""

    def __init__(
        self,
        cache: PrefixCache,
        exports: ExportTable,
        checks: PageChecks,
        limits: ExportLimits,
        tags: PromptTags | None = None,
    ) -> None:
        """`tags` None: pages are announced without tags."""
        self._cache = cache
        self._exports = exports
        self._checks = checks
        self._limits = limits
        self._tags = tags
        self._num_pinned: dict[AttemptId, int] = {}

    def find_wrong(self, keys: Sequence[PageKey]) -> list[PageId]:
        """Checks the cached pages of `keys`; returns those whose bytes differ, for the caller to quarantine first."""
        pages = self._cache.match(keys, Hold.LIVE)
        wrong = self._checks.check_matched(pages)
        self._cache.pool.drop(pages, Hold.LIVE)
        return wrong

    def open(
        self, id: AttemptId, keys: Sequence[PageKey], first_page: int, now: float, limits: ExportLimits | None = None
    ) -> PublishedChunk:
        """Pins the cached pages of `keys` and announces those from `first_page` on: none if there is no room.

        `limits`: of this export; None: the usual ones. Raises `Superseded` for an attempt that is not newer than all
        seen ones of its request.
        """
        pages = self._cache.match(keys, Hold.LIVE)
        try:
            num_own = self._cache.pool.num_held_once(pages)
            num_allowed = self._num_allowed(pages, num_own, limits or self._limits)
            num_allowed = self._cache.num_givable(pages[:num_allowed])
            chunk = self._pin(id, keys, pages[:num_allowed], first_page, now)
            if chunk.pages:
                self._num_pinned[id] = max(0, num_own - (len(pages) - num_allowed))
            return chunk
        finally:
            self._cache.pool.drop(pages, Hold.LIVE)

    def examine(self, id: AttemptId, suspects: Sequence[Suspect]) -> tuple[PageVerdict | None, list[PageId]]:
        """Compares suspects with the digests that they were announced with. Returns the verdict and the wrong pages."""
        announced = self._exports.announced(id)
        pages = [one.page for one in suspects if one.page in announced]
        if not pages:
            return None, []
        wrong = self._checks.compare(pages, [announced[page] for page in pages])
        return PageVerdict.SOURCE if wrong else PageVerdict.LINK, wrong

    def _pin(
        self, id: AttemptId, keys: Sequence[PageKey], pages: Sequence[PageId], first_page: int, now: float
    ) -> PublishedChunk:
        given = tuple(pages[first_page:])
        if not given:
            return PublishedChunk(id, first_page, (), ())
        windows, windowed = self._cache.pool.windows, self._cache.reached(pages)
        if windows is not None and len(windowed) > windows.num_unreserved:
            return PublishedChunk(id, first_page, (), ())
        digests = self._cache.pool.digests
        kept = tuple(map(digests.digest, given))
        tags = None
        if self._tags is not None:
            tags = self._tags.announced(given, self._tags.identities_of_keys(keys[first_page : len(pages)]))
        self._exports.open(id)
        # From the root on, even pages that the importer has: holds are closed towards the root.
        self._exports.publish(id, pages, now, dict(zip(given, kept, strict=True)), windowed)
        self._exports.seal(id)
        slots = () if windows is None else windows.slots_of(given, set(windowed))
        return PublishedChunk(id, first_page, given, kept, tags, slots)

    def _num_allowed(self, pages: Sequence[PageId], num_own: int, limits: ExportLimits) -> int:
        """Number of leading `pages`, all held for this call, that may be pinned.

        The last `num_own` are held by nothing else. They come last: holds are closed towards the root.
        """
        self._num_pinned = {id: num for id, num in self._num_pinned.items() if self._exports.is_open(id)}
        num_free = num_own + min(0, limits.num_free_pages())  # without those that this call holds
        num_allowed = min(num_own, num_free, limits.max_pages - sum(self._num_pinned.values()))
        return len(pages) - num_own + max(0, num_allowed)
