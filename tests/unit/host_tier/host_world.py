"""A prefill side of tiny pages over a host tier, and perhaps another one below it."""

from __future__ import annotations

from collections.abc import Sequence

from baton.domain.ids import PageKey
from baton.engine.handoff.export_events import Seal
from baton.engine.handoff.kv_export import ExportTable
from baton.engine.tiers.controller import TierController
from baton.kv.memory import PoolMemory
from baton.kv.page_checks import PageChecks
from baton.kv.tiers.lower_tier import LowerTier
from baton.kv.tiers.tier import CacheTier
from baton.kv.tiers.tier_stack import TierStack
from baton.services.prefill.page_sharing import PageSharing
from baton.services.prefill.policy import PrefillLimits
from baton.services.prefill.scheduler import PrefillScheduler
from baton.settings.tiers import TierWrite
from baton.transfer.host_tier.mover import HostMover
from simulation.runtime.page_memory import SimMemory
from tests.tiny_workers import (
    NUM_PAGES,
    PAGE_SIZE,
    check_invariants,
    engine_request,
    expected_output,
    tiny_cache,
    tiny_memory,
    tiny_runner,
)

MAX_TURNS = 100


class OtherMover(HostMover):
    """Another tier's, with its own slots."""

    tier = "other"


class HostWorld:
    """One worker whose pool of eight pages cannot keep two long prompts."""

    def __init__(
        self,
        writes: Sequence[TierWrite] = (TierWrite.BACK,),
        num_slots: int = 32,
        num_window_slots: int | None = None,
    ) -> None:
        """A tier for each of `writes`, the fastest first."""
        pool, leading, windowed = tiny_memory(num_window_slots)
        self.leading = leading
        self.memory: PoolMemory = windowed or leading
        self.cache = tiny_cache(pool, leading, windowed, digests=True)
        part_ends = self.memory.part_ends
        self.copies = [SimMemory(num_slots, self.memory.page_bytes, part_ends) for _ in writes]
        self.tiers = [CacheTier(num_slots, num_parts=len(part_ends)) for _ in writes]
        movers = [kind(memory) for kind, memory in zip((HostMover, OtherMover), self.copies, strict=False)]
        self.controllers: list[LowerTier] = [
            TierController(tier, mover, self.cache, self.memory, write, compute_s=lambda num_pages, first: 0.0)
            for tier, mover, write in zip(self.tiers, movers, writes, strict=True)
        ]
        self.exports = ExportTable(self.cache.pool, 1e6, False)
        limits = PrefillLimits(PAGE_SIZE, 4 * PAGE_SIZE, 4, NUM_PAGES)
        self.stack = TierStack(self.controllers)
        sharing = PageSharing(self.stack)
        self.scheduler = PrefillScheduler(self.cache, self.exports, limits, PageChecks(self.cache), None, sharing)
        self.runner = tiny_runner(self.cache, leading, windowed, None, None)
        self.num_asked = 0
        self.num_turns = 0

    def ask(self, tokens: Sequence[int]) -> Seal:
        """Runs one prompt to its seal; its first token must be the model's, and its tokens add up."""
        self.num_asked += 1
        request = engine_request(f"r{self.num_asked}", list(tokens))
        self.scheduler.add(request, 0, 1e9, 0.0)
        for self.num_turns in range(1, MAX_TURNS):
            batch = self.scheduler.schedule(0.0)
            effects = self.scheduler.take_pending_effects()
            if batch is not None:
                effects += self.scheduler.commit(batch, self.runner.run(batch), 0.0)
            self.check()
            for seal in effects:
                if isinstance(seal, Seal):
                    assert seal.first_token.token == expected_output(request)[0]
                    assert seal.times.cached_tokens + seal.times.computed_tokens == len(tokens)
                    assert sum(seal.num_from_tiers.values()) <= seal.times.cached_tokens
                    self.exports.commit(request.id)
                    return seal
            assert batch is not None or self.scheduler.next_wakeup() is not None, "nothing wakes the loop"
        raise AssertionError("the prompt does not end")

    def check(self) -> None:
        check_invariants(self.cache)
        for tier in self.tiers:
            tier.check()

    def flip(self, key: PageKey, tier: int = 0) -> None:
        """Flips a bit of a copy."""
        slot = self.tiers[tier].slot(key)
        assert slot is not None
        self.copies[tier].page(slot)[0] ^= 1
