"""A tier below the pool: reads pages for waiting prompts, writes copies of cached pages. Engine thread only.

Files and host memory differ by their mover. That of host memory ends what it starts at once, so that a waiting prompt
has the pages in the same turn. `READ_BYTES` and `WRITE_BACK_BYTES` bound what a turn copies.

Failures cost misses: a read that fails, comes late or has another digest is computed instead, and a write that finds no
room is dropped. A read later than `READ_DEADLINE_S`, or `MAX_ERRORS` errors in a row, opens a circuit breaker: the tier
rests for `BREAK_S`.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.domain.errors import Broken
from baton.domain.ids import PageId, PageKey
from baton.kv.memory import PoolMemory
from baton.kv.page_digests import is_windowless
from baton.kv.pages import Hold
from baton.kv.prefix_cache import PrefixCache
from baton.kv.quarantine import Quarantine
from baton.kv.tiers.lower_tier import TierUse
from baton.kv.tiers.tier import CacheTier, SlotEntry
from baton.kv.windows.arrival_slots import ArrivalSlots
from baton.settings.tiers import TierWrite
from baton.telemetry import metrics
from baton.telemetry.logs import get_logger
from baton.transfer.file_tier.mover import EndedRead, EndedWrite

log = get_logger()

READ_BYTES = 16 * 1024 * 1024
"""Most bytes of one read, and of the reads of a turn: what is late is little."""
WRITE_BYTES = 16 * 1024 * 1024
"""Most bytes that wait to be written; they are copies."""
WRITE_BACK_BYTES = 16 * 1024 * 1024
"""Most bytes that write-back copies in a turn; pages that are evicted beyond it get no copies."""
READ_DEADLINE_S = 1.0
MAX_WAIT_S = 2.0
"""Longest time that a prompt waits for the tier."""
AHEAD_SHARE = 0.1
"""Of the pool: pages of waiting prompts that are read ahead."""
MAX_ERRORS = 3
BREAK_S = 30.0
MAX_CHAINS = 64
"""Chains of pages that wait to be copied; the oldest is dropped."""


class TierMover(Protocol):
    """See `baton.transfer.file_tier.mover.FileMover` and `baton.transfer.host_tier.mover.HostMover`."""

    @property
    def tier(self) -> str:
        """The tier's name."""
        ...

    def read(self, number: int, slots: Sequence[int]) -> None: ...

    def write(self, entry: SlotEntry, page: bytes) -> None: ...

    def erase(self, slot: int) -> None: ...

    def take_ended(self) -> list[EndedWrite | EndedRead]: ...

    def first_slot_of_segment(self, slot: int) -> int: ...


@dataclass(slots=True)
class _Load:
    """A read of the pages that follow the first `first` of `use.keys`."""

    number: int
    use: TierUse
    first: int
    keys: Sequence[PageKey]
    slots: Sequence[int]
    started_at: float
    late: bool = False


class TierController:
    """`LowerTier` over a `CacheTier` and its mover. Write-back needs `PrefixCache.on_evict` to call `on_evict`."""

    def __init__(
        self,
        tier: CacheTier,
        mover: TierMover,
        cache: PrefixCache,
        memory: PoolMemory,
        write: TierWrite,
        compute_s: Callable[[int, int], float],
    ) -> None:
        """`compute_s(num_pages, first)`: predicted seconds to compute pages after the first `first`; 0.0: unknown."""
        self._tier = tier
        self._mover = mover
        self._cache = cache
        self._memory = memory
        self._write = write
        self._compute_s = compute_s
        self._load: _Load | None = None
        self._num_loads = 0
        self._page_s = 0.0  # seconds to read a page, a moving average
        self._seen = self._seen_foreign = 0  # numbers of quarantined keys that were dropped
        self._has_more = False  # to read, beyond what this turn may
        self._now = 0.0  # of the last turn
        self._ended_reads: list[EndedRead] = []
        self._chains: deque[tuple[PageKey, ...]] = deque(maxlen=MAX_CHAINS)
        self._num_writing = 0
        self._num_written_back = 0  # in this turn
        self._fresh: set[PageKey] = set()  # read from the tier, used by no prompt yet
        self._num_errors = 0
        self._rests_until = float("-inf")

    @property
    def is_reading(self) -> bool:
        """True while a read is in flight, late ones included."""
        return self._load is not None

    def poll(self, quarantine: Quarantine, now: float) -> None:
        """See `LowerTier`."""
        self._now, self._num_written_back = now, 0
        keys, self._seen = quarantine.since(self._seen)
        foreign, self._seen_foreign = quarantine.foreign_since(self._seen_foreign)
        for key in (*keys, *foreign):  # a copy does not tell who computed its page
            self._drop(key)
            self._fresh.discard(key)
        for ended in self._take_reads(now):
            self._end_read(ended, now)
        if self._load is not None and not self._load.late and now >= self._load.started_at + READ_DEADLINE_S:
            self._load.late = True
            self._rest(now, "a read is late")
        self._copy_chains(now)

    def prefetch(self, waiting: Iterable[TierUse], now: float) -> None:
        """See `LowerTier`."""
        ahead = int(AHEAD_SHARE * self._cache.pool.num_pages)
        most, self._has_more = self._max_read_pages, False
        for number, use in enumerate(waiting):
            if self._load is not None or now < self._rests_until:
                return
            ahead -= len(use.keys)
            if number and ahead < 0:
                return
            first, num_pages = self._extension(use)
            if not num_pages or self._is_given_up(use):
                continue
            if most == 0:
                self._has_more = True
                return
            num_read = self._num_usable(use, first, min(num_pages, most))
            if not num_read:
                self._has_more = True
                return
            self._start_read(use, first, num_read, now)
            for ended in self._take_reads(now):
                self._end_read(ended, now)
            most -= num_read
            if num_read < num_pages:
                self._has_more = self._load is None and not self._is_given_up(use)
                return

    def must_wait(self, use: TierUse, now: float) -> bool:
        """See `LowerTier`."""
        first, num_pages = self._extension(use)
        is_stuck = self._load is not None and self._load.late
        if not num_pages or self._is_given_up(use) or is_stuck or now < self._rests_until:
            return False
        if use.waits_since is None:
            use.waits_since = now
        compute_s = self._compute_s(num_pages, first)
        if now - use.waits_since >= MAX_WAIT_S or 0.0 < compute_s < num_pages * self._page_s:
            use.gave_up.add(self._mover.tier)
        return not self._is_given_up(use)

    def on_admitted(self, keys: Sequence[PageKey]) -> Mapping[str, int]:
        """See `LowerTier`."""
        self._tier.touch(keys)
        if self._write is TierWrite.SELECTIVE:
            self._add_chain(keys)
        used = self._fresh.intersection(keys)
        self._fresh -= used
        return {self._mover.tier: len(used)} if used else {}

    def on_filled(self, keys: Sequence[PageKey], num_matched: int) -> None:
        """See `LowerTier`."""
        self._fresh.difference_update(keys[num_matched:])
        if self._write is TierWrite.THROUGH:
            self._add_chain(keys)

    def on_evict(self, key: PageKey) -> None:
        """See `LowerTier`. A copy needs that of the page before it: copies those, too, the first one first."""
        self._fresh.discard(key)  # whoever reads it next, it is no page of this read any more
        if self._write is not TierWrite.BACK or self._now < self._rests_until or not self._may_write_back():
            return
        chain: list[PageKey] = []
        above: PageKey | None = key
        while above is not None and above not in self._tier:
            if len(chain) == self._tier.num_slots:
                return  # it could not keep them all; the first ones come when they are evicted themselves
            chain.append(above)
            above = self._cache.parent_of(above)
        for one in reversed(chain):
            if not self._may_write_back() or not self._copy(one, above):
                return
            self._num_written_back += 1
            above = one

    def next_wakeup(self) -> float | None:
        """See `LowerTier`."""
        if self._has_more:
            return self._now
        return None if self._load is None or self._load.late else self._load.started_at + READ_DEADLINE_S

    def _extension(self, use: TierUse) -> tuple[int, int]:
        """Number of pages that a prompt has in the cache, and of those that the tier has behind them."""
        first = self._cache.num_matching(use.keys)
        num_pages = self._tier.num_matching(use.keys[first:]) if first < len(use.keys) else 0
        if not self._num_usable(use, first, min(num_pages, self._max_read_pages)):
            return first, 0
        return first, self._num_usable(use, first, num_pages)

    @property
    def _max_read_pages(self) -> int:
        return max(1, READ_BYTES // self._memory.page_bytes)

    def _num_usable(self, use: TierUse, first: int, num_pages: int) -> int:
        """How many of the next `num_pages` copies leave a prefix behind which a prompt can go on."""
        window = self._cache.window
        if not num_pages or window is None or self._cache.pool.windows is None:
            return num_pages
        pages = [PageId(page) for page in range(first + num_pages)]
        lacks_window = lambda page: page >= first and self._tier.is_windowless(use.keys[page])  # noqa: E731
        return max(0, window.num_usable(pages, lacks_window, None) - first)

    def _add_chain(self, keys: Sequence[PageKey]) -> None:
        """Queues a chain to be copied; copies are closed to the root, so the last page tells what is missing."""
        if keys and keys[-1] not in self._tier:
            self._chains.append(tuple(keys))

    def _copy_chains(self, now: float) -> None:
        if now < self._rests_until:
            self._chains.clear()
        while self._chains:
            parent: PageKey | None = None
            for key in self._chains[0]:
                if key not in self._tier:
                    if not self._may_write():
                        return  # goes on when a write has ended
                    if not self._copy(key, parent):
                        break
                parent = key
            self._chains.popleft()

    def _may_write(self) -> bool:
        """True if few enough pages wait to be written."""
        most = max(1, WRITE_BYTES // self._memory.page_bytes)
        if self._num_writing >= most:
            self._end_writes(self._now)
        return self._num_writing < most

    def _may_write_back(self) -> bool:
        """True if this turn has copied few enough evicted pages, and few enough wait to be written."""
        return self._num_written_back < max(1, WRITE_BACK_BYTES // self._memory.page_bytes) and self._may_write()

    def _copy(self, key: PageKey, parent: PageKey | None) -> bool:
        """Starts to write a cached page with the digest that it settled with. False if it is gone or has no room."""
        page = self._cache.find(key)
        digests = self._cache.pool.digests
        if page is None or not digests.is_settled(page):
            return False
        slot = self._tier.begin_write(key, parent, digests.digest(page))
        if slot is None:
            return False
        self._num_writing += 1
        entry = SlotEntry(slot, key, parent, digests.digest(page))
        self._mover.write(entry, bytes(self._memory.read([page])[0]))
        return True

    def _start_read(self, use: TierUse, first: int, num_pages: int, now: float) -> None:
        keys = use.keys[first : first + num_pages]
        slots = self._tier.begin_read(keys)
        self._num_loads += 1
        self._load = _Load(self._num_loads, use, first, keys, slots, now)
        self._mover.read(self._num_loads, slots)

    def _is_given_up(self, use: TierUse) -> bool:
        return self._mover.tier in use.gave_up

    def _take_reads(self, now: float) -> list[EndedRead]:
        self._end_writes(now)
        reads, self._ended_reads = self._ended_reads, []
        return reads

    def _end_writes(self, now: float) -> None:
        """Ends writes only: entering pages that were read may evict others, whose copies wait for ended writes."""
        for ended in self._mover.take_ended():
            if isinstance(ended, EndedWrite):
                self._end_write(ended, now)
            else:
                self._ended_reads.append(ended)

    def _end_write(self, ended: EndedWrite, now: float) -> None:
        self._num_writing -= 1
        self._tier.end_write(ended.key, ended.slot, ok=ended.error is None)
        if ended.error is None:
            self._num_errors = 0
            metrics.TIER_PAGES_TOTAL.labels(self._mover.tier, "written").inc()
            return
        metrics.TIER_PAGES_TOTAL.labels(self._mover.tier, "write_failed").inc()
        if ended.error.errno == errno.ENOSPC:
            before = self._tier.num_slots
            self._tier.limit(self._mover.first_slot_of_segment(ended.slot))
            if self._tier.num_slots < before:
                log.warning(f"{self._mover.tier}_tier_full", slots=self._tier.num_slots, error=str(ended.error))
        else:
            self._count_error(now, str(ended.error))

    def _end_read(self, ended: EndedRead, now: float) -> None:
        load, self._load = self._load, None
        if load is None or load.number != ended.number:
            raise Broken(f"read {ended.number} ended and was not the one in flight")
        self._page_s += 0.3 * ((now - load.started_at) / len(load.keys) - self._page_s)
        intact: list[tuple[bytearray, int]] = []
        for number, (key, slot, found) in enumerate(zip(load.keys, load.slots, ended.pages, strict=True)):
            digest = self._tier.end_read(key, slot, None if found is None else found[1])
            if digest is not None and found is not None:
                if len(intact) == number:
                    intact.append((found[0], digest))
            elif self._tier.slot(key) == slot:  # else it was dropped meanwhile
                self._on_bad_copy(key, torn=found is None, now=now)
        num_entered = self._enter(load, intact)
        metrics.TIER_PAGES_TOTAL.labels(self._mover.tier, "read").inc(num_entered)
        if not num_entered:
            load.use.gave_up.add(self._mover.tier)

    def _on_bad_copy(self, key: PageKey, *, torn: bool, now: float) -> None:
        self._drop(key)
        if torn:
            metrics.TIER_PAGES_TOTAL.labels(self._mover.tier, "read_failed").inc()
            self._count_error(now, "a page cannot be read")
        else:
            metrics.TIER_CORRUPT_TOTAL.labels(self._mover.tier).inc()
            log.warning(f"{self._mover.tier}_tier_corrupt", hint="The page is computed again.")

    def _enter(self, load: _Load, pages: Sequence[tuple[bytearray, int]]) -> int:
        """Enters pages that were read into the cache, behind those that it has; returns their number."""
        cache, pool = self._cache, self._cache.pool
        held = cache.match(load.use.keys[: load.first + len(pages)], Hold.LIVE)
        new = pages[len(held) - load.first :] if len(held) >= load.first else ()
        ids: list[PageId] = cache.allocate(min(len(new), cache.num_available), Hold.LIVE) or []
        keys = load.use.keys[len(held) : len(held) + len(ids)]
        slots = ArrivalSlots(cache)
        if ids:
            has_window = lambda at: not is_windowless(new[at][1], len(self._memory.part_ends))  # noqa: E731
            if slots.take(ids, len(held), has_window) == len(ids):
                pool.drop([*held, *ids], Hold.LIVE)
                return 0  # no prompt could go on behind them
            self._memory.write(ids, [memoryview(content) for content, _ in new[: len(ids)]])
            for page, (_, digest) in zip(ids, new, strict=False):
                pool.digests.set(page, digest)
            parent = load.use.keys[len(held) - 1] if held else None
            contents = load.use.contents(len(held), len(held) + len(ids))
            # Files do not tell who computed them.
            used = cache.insert(parent, keys, ids, Hold.LIVE, contents, foreign=True)
            slots.follow(ids, used)
            ids[: len(used)] = used
        cache.touch(load.use.keys[: len(held) + len(ids)])
        slots.drop(ids)
        pool.drop([*held, *ids], Hold.LIVE)
        self._fresh.update(keys)
        return len(ids)

    def _drop(self, key: PageKey) -> None:
        for slot in self._tier.drop(key):
            self._mover.erase(slot)

    def _count_error(self, now: float, error: str) -> None:
        self._num_errors += 1
        if self._num_errors >= MAX_ERRORS:
            self._rest(now, error)

    def _rest(self, now: float, why: str) -> None:
        self._num_errors = 0
        self._rests_until = now + BREAK_S
        log.warning(f"{self._mover.tier}_tier_rests", seconds=BREAK_S, error=why)
