"""Serves prompts of a trace through the product's prefix cache, page tables, tier policy and mover. Counts pages.

A page is a block of the trace and has eight bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.engine.tiers.controller import TierController
from baton.kv.keys import page_keys
from baton.kv.memory import PageMemory
from baton.kv.page_table import PageTable
from baton.kv.pages import Hold, PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.kv.quarantine import Quarantine
from baton.kv.tiers.lower_tier import TierUse
from baton.kv.tiers.tier import CacheTier, SlotEntry
from baton.settings.tiers import TierWrite
from baton.transfer.digest import PoolHasher
from baton.transfer.host_tier.mover import HostMover

PAGE_BYTES = 8


class _CountingMover(HostMover):
    num_written = 0

    def write(self, entry: SlotEntry, page: bytes) -> None:
        self.num_written += 1
        super().write(entry, page)


class TieredReplay:
    """One process: a pool of `num_pages` over a tier of `num_slots`. Counts blocks by where they were cached."""

    def __init__(
        self,
        num_pages: int,
        num_slots: int,
        write: TierWrite,
        slots: PageMemory | None = None,
        kept: Iterable[SlotEntry] = (),
    ) -> None:
        """`slots`, `kept`: what an earlier process has left of its tier."""
        self._sizes = num_pages, num_slots, write
        self._slots = PageMemory(num_slots, PAGE_BYTES) if slots is None else slots
        memory = PageMemory(num_pages, PAGE_BYTES)
        self._cache = PrefixCache(PagePool(num_pages), PoolHasher(memory))
        self._quarantine, self._mover = Quarantine(self._cache), _CountingMover(self._slots)
        self._copies = CacheTier(num_slots)
        self._copies.restore(kept)
        self._tier = TierController(self._copies, self._mover, self._cache, memory, write, lambda num, first: 0.0)
        self._cache.on_evict = self._tier.on_evict
        self.num_blocks = self.num_device = self.num_tier = 0

    @property
    def num_written(self) -> int:
        """Copies written to the tier."""
        return self._mover.num_written

    def restarted(self, *, keeps: bool) -> TieredReplay:
        """The next process: an empty pool, and the tier as it was if it `keeps` its copies."""
        self._tier.poll(self._quarantine, 0.0)
        return TieredReplay(*self._sizes, self._slots, self._copies.entries()) if keeps else TieredReplay(*self._sizes)

    def serve(self, prompts: Sequence[Sequence[int]]) -> None:
        """Serves prompts one after another."""
        for blocks in prompts:
            self.num_blocks += len(blocks)
            keys = page_keys(tuple(blocks), 1, "")
            self._tier.poll(self._quarantine, 0.0)
            self._tier.prefetch([TierUse(keys)], 0.0)
            table = PageTable(self._cache, 1, "", Hold.LIVE)
            num_matched = table.match_tokens(blocks)
            if table.extend(len(blocks)):
                hits = self._tier.on_admitted(keys[:num_matched]).get(self._mover.tier, 0)
                self.num_device, self.num_tier = self.num_device + num_matched - hits, self.num_tier + hits
                table.cache_full_pages(blocks, len(blocks))
                self._tier.on_filled(keys, num_matched)
            table.release()
