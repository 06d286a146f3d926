"""A prefill side of tiny pages over a file tier in a real folder. Reopening it is a worker's restart."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import ClassVar

from baton.domain.arithmetic import ceil_div
from baton.domain.ids import AttemptId, PageKey
from baton.domain.request import EngineRequest
from baton.engine.fake_runner import FakeRunner
from baton.engine.handoff.export_events import Seal
from baton.engine.handoff.kv_export import ExportTable
from baton.engine.tiers.controller import TierController, TierMover
from baton.kv.page_checks import PageChecks
from baton.kv.pages import PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.kv.tiers.tier import CacheTier
from baton.services.prefill.page_sharing import PageSharing
from baton.services.prefill.policy import PrefillLimits
from baton.services.prefill.scheduler import PrefillEffect, PrefillScheduler
from baton.settings.tiers import TierWrite
from baton.transfer.digest import PoolHasher
from baton.transfer.file_tier.index_log import IndexLog
from baton.transfer.file_tier.mover import FileMover
from baton.transfer.file_tier.nixl_slot_file import NixlSlotFile
from baton.transfer.file_tier.slot_file import FolderClaim, SlotFile
from simulation.runtime.page_memory import SimMemory
from tests.cluster import eventually
from tests.tiny_workers import PAGE_BYTES, PAGE_SIZE, VOCAB_SIZE, check_invariants, engine_request, expected_output

NUM_PAGES = 16
NUM_SLOTS = 32
LEASE_S = 1e6
WAIT_S = 30.0
KINDS: dict[str, type[SlotFile]] = {"preadv": SlotFile, "nixl": NixlSlotFile}
"""What moves the bytes, by the first word of its `mover`."""


class TierWorld:
    """One worker over `root`. `close` it, or leave it as a killed process would."""

    kind: ClassVar[type[SlotFile]] = SlotFile

    def __init__(
        self,
        root: Path,
        write: TierWrite = TierWrite.THROUGH,
        num_slots: int = NUM_SLOTS,
        segment_bytes: int = 8 * PAGE_BYTES,
        file: type[SlotFile] | None = None,
    ) -> None:
        """`file`: default `kind`."""
        self.folder = FolderClaim(root, "fingerprint")
        self.file = (file or self.kind)(self.folder.path, PAGE_BYTES, num_slots, segment_bytes)
        self.index = IndexLog(self.folder.path, PAGE_BYTES, 1)
        self.tier = CacheTier(num_slots)
        self.tier.restore(self.index.entries)
        self.ended = threading.Event()
        self.mover: TierMover = FileMover(self.file, self.index, (PAGE_BYTES,), self.ended.set)
        memory = SimMemory(NUM_PAGES, PAGE_BYTES)
        self.memory = memory
        self.cache = PrefixCache(PagePool(NUM_PAGES), PoolHasher(memory))
        self.controller = TierController(
            self.tier, self.mover, self.cache, memory, write, compute_s=lambda num_pages, first: 0.0
        )
        self.exports = ExportTable(self.cache.pool, LEASE_S, False)
        limits = PrefillLimits(PAGE_SIZE, 4 * PAGE_SIZE, 4, NUM_PAGES)
        self.scheduler = PrefillScheduler(
            self.cache, self.exports, limits, PageChecks(self.cache), None, PageSharing(self.controller)
        )
        self.runner = FakeRunner(memory, PAGE_SIZE, VOCAB_SIZE)
        self.now = 0.0
        self.requests: dict[str, EngineRequest] = {}
        self.seals: dict[AttemptId, Seal] = {}

    def turn(self) -> list[PrefillEffect]:
        """One turn of the loop. `now` stands still: a slow machine makes no read late."""
        batch = self.scheduler.schedule(self.now)
        effects = self.scheduler.take_pending_effects()
        if batch is not None:
            effects += self.scheduler.commit(batch, self.runner.run(batch), self.now)
        check_invariants(self.cache)
        self.tier.check()
        return effects

    def ask(self, name: str, tokens: list[int]) -> Seal:
        """Runs one prompt to its seal; its first token must be the model's."""
        self.begin(name, tokens)
        return self.finish(name)

    def begin(self, name: str, tokens: list[int]) -> None:
        self.requests[name] = engine_request(name, tokens)
        self.scheduler.add(self.requests[name], 0, 1e9, self.now)

    def finish(self, name: str) -> Seal:
        """Takes turns until a prompt is sealed."""
        request, seals = self.requests[name], self.seals

        def step() -> bool:
            seals.update({one.id: one for one in self.turn() if isinstance(one, Seal)})
            return request.id in seals

        eventually(step, WAIT_S, f"{name} is sealed")
        seal = seals[request.id]
        assert seal.first_token.token == expected_output(request)[0]
        assert seal.times.cached_tokens + seal.times.computed_tokens == len(request.tokens)
        self.exports.commit(request.id)
        return seal

    def wait_read(self) -> None:
        """Takes turns until no read is in flight."""

        def step() -> bool:
            self.turn()
            return not self.controller.is_reading

        eventually(step, WAIT_S, "no read is in flight")

    def key_in(self, slot: int) -> PageKey:
        """Key of the page whose copy is in `slot`."""
        return next(entry.key for entry in self.tier.entries() if entry.slot == slot and entry.key is not None)

    def wait_written(self, num_copies: int) -> None:
        """Takes turns until so many copies are complete."""

        def step() -> bool:
            self.turn()
            return self.num_present == num_copies

        eventually(step, WAIT_S, f"{num_copies} copies")

    @property
    def num_present(self) -> int:
        return self.tier.num_present

    def close(self) -> None:
        """An orderly end."""
        assert isinstance(self.mover, FileMover)
        self.mover.close(WAIT_S)
        self.folder.close()


def num_full_pages(tokens: list[int]) -> int:
    """Pages of a prompt that may be cached."""
    return ceil_div(len(tokens) + 1, PAGE_SIZE) - 1
