"""Publishes the finished pages of prompts under the pins of their exports. Pure.

Pages that decode has already are pinned but not published. Each is announced with the digest that it settled with.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.domain.handoff import PublishedChunk
from baton.domain.ids import PageId
from baton.domain.request import EngineRequest
from baton.engine.handoff.kv_export import ExportTable
from baton.engine.handoff.prompt_tags import PromptTags
from baton.kv.prefix_cache import PrefixCache
from baton.services.prefill.prompt import Prompt


class PagePublisher:
    """Publishes pages of the prompts of one scheduler."""

    def __init__(self, cache: PrefixCache, exports: ExportTable, tags: PromptTags | None, page_size: int) -> None:
        """`tags` None: pages are published without tags."""
        self._cache = cache
        self._exports = exports
        self._tags = tags
        self._page_size = page_size

    def identities(self, request: EngineRequest) -> list[bytes]:
        """What the tags of the prompt's pages vouch for; nothing without tags."""
        return [] if self._tags is None else self._tags.identities(request)

    def publish(self, prompt: Prompt, now: float) -> list[PublishedChunk]:
        """Publishes what is filled and not published yet: full pages, and the partial tail of a prompt that is done."""
        done = prompt.num_remaining == 0
        end = len(prompt.table.pages) if done else prompt.num_filled // self._page_size
        first = prompt.num_published
        if self._tags is not None:
            new = slice(prompt.num_pinned, end)
            self._tags.settle(prompt.table.pages[new], prompt.identities[new])
        if end <= first:
            return []
        pages, read_from = prompt.table.pages[first:end], self._first_read(prompt)
        digests = self._digests(pages, prompt.tail_digest)
        announced = {} if digests is None else dict(zip(pages, digests, strict=True))
        # From the root on, even pages that decode has: holds are closed towards the root (`baton.kv.prefix_cache`).
        # Decode reads the window parts of the last pages only: those are pinned, and are not passed before the seal.
        windowed = prompt.table.pages[max(prompt.num_pinned, read_from) : end]
        pinned = prompt.table.pages[prompt.num_pinned : end]
        self._exports.publish(prompt.request.id, pinned, now, announced, windowed)
        prompt.num_published = prompt.num_pinned = end
        tags = None if self._tags is None else self._tags.announced(pages, prompt.identities[first:end])
        windows = self._cache.pool.windows
        slots = () if windows is None else windows.slots_of(pages, set(prompt.table.pages[read_from:end]))
        return [PublishedChunk(prompt.request.id, first, tuple(pages), digests, tags, slots)]

    def _first_read(self, prompt: Prompt) -> int:
        """Number of the first page whose window part decode reads."""
        window = self._cache.window
        return 0 if window is None else window.first_page(len(prompt.request.tokens))

    def _digests(self, pages: Sequence[PageId], tail_digest: int | None) -> tuple[int, ...] | None:
        """Digests to announce: the kept ones. Only a partial tail, which never settles, is hashed here.

        `tail_digest`: its digest, if it was computed before.
        """
        if self._cache.hasher is None:
            return None
        kept = self._cache.pool.digests
        *full, last = pages
        if kept.is_settled(last):
            tail_digest = kept.digest(last)
        elif tail_digest is None:
            tail_digest = self._cache.hasher.digests([last])[0]
        return (*kept.all_of(full), tail_digest)
