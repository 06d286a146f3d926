"""What each way to place prompts finds cached, on a request trace in simulated time.

    python -m bench.router.placement_replay conversation_trace.jsonl [--workers 8] [--pages 1000] [--load 0.7]

Placement, its indexes, its correction for what was just placed, the prefix caches and their events are the product's
own. A prefill worker here computes one prompt after another, at a constant time a token. Its load is announced once a
heartbeat, and its cache events arrive a little later. There is one decode worker, without limits. So a figure does not
depend on the machine.

The oracle has all pools in one, so every prompt finds whatever is cached anywhere. `most cached` knows at each arrival
what every cache will have when the prompt's turn comes, and ignores what waits there: prompts that share a beginning
then follow each other to one worker, which is the death spiral of cache-aware placement.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from baton.domain.ids import AttemptId, Incarnation, PageKey, RequestId, WorkerId
from baton.domain.worker import LinkRecord, WorkerBudgets, WorkerLoad, WorkerRecord, WorkerRole
from baton.kv.events.event import CacheDelta
from baton.kv.events.log import CacheEventLog
from baton.kv.events.source import EventSource
from baton.kv.keys import page_keys
from baton.kv.page_table import PageTable
from baton.kv.pages import Hold, PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.services.cli.bench.results.distribution import percentile
from baton.services.cli.bench.workload.traces import MOONCAKE_BLOCK_TOKENS, TraceRow, read_mooncake
from baton.services.router.dispatch.cache_index.index import CacheIndex
from baton.services.router.dispatch.cache_index.known_pages import KnownPages
from baton.services.router.dispatch.in_flight import InFlight
from baton.services.router.dispatch.placement.choice import choose_pair
from baton.services.router.dispatch.placement.pair import linked_pairs
from baton.services.router.dispatch.placement.policy import PlacementPolicy, PlacementRules
from baton.services.router.dispatch.placement.query import PlacementQuery

BLOCK = MOONCAKE_BLOCK_TOKENS
TOKEN_S = 0.0004
HEARTBEAT_S, EVENT_LAG_S = 0.5, 0.02
MAX_INDEXED_PAGES = 1 << 18
_UNLIMITED = 1 << 30
_NO_LOAD = WorkerLoad(available_pages=_UNLIMITED, total_pages=_UNLIMITED)


@dataclass(frozen=True, slots=True)
class ReplayedPrompt:
    """One prompt of a trace: its blocks, which are pages here, and their keys."""

    number: int
    arrival_s: float
    blocks: tuple[int, ...]
    keys: tuple[PageKey, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens, in whole pages."""
        return len(self.blocks) * BLOCK


@dataclass(slots=True)
class _RunningPrompt:
    prompt: ReplayedPrompt
    table: PageTable
    ends_at: float


class ReplayedWorker:
    """A prefill worker in simulated time. `advance` runs it; its clock is its own."""

    def __init__(self, number: int, num_pages: int) -> None:
        self.incarnation = Incarnation(number + 1)
        self.num_hit_pages = self.num_pages = 0
        self.busy_s = 0.0
        self.waits: list[float] = []
        self._cache = PrefixCache(PagePool(num_pages))
        self._log = CacheEventLog()
        self._cache.events = EventSource(self._log.extend)
        self._seq = 0
        self._queue: deque[ReplayedPrompt] = deque()
        self._running: _RunningPrompt | None = None
        self._free_at = 0.0
        self._coming: Counter[PageKey] = Counter()  # pages of prompts that are not done
        self.deltas: deque[tuple[float, CacheDelta]] = deque()  # when they arrive at the router

    def add(self, prompt: ReplayedPrompt) -> None:
        """Queues a prompt that has just come."""
        self._queue.append(prompt)
        self._coming.update(prompt.keys)

    def advance(self, now: float) -> None:
        """Computes what ends or begins until `now`."""
        while True:
            if self._running is not None:
                if self._running.ends_at > now:
                    return
                self._finish(self._running)
            if not self._queue or max(self._free_at, self._queue[0].arrival_s) > now:
                return
            self._begin(self._queue.popleft())

    def waiting_tokens(self, now: float) -> int:
        """Tokens that are still to be computed, those of queued prompts whole."""
        running = 0 if self._running is None else max(0, round((self._running.ends_at - now) / TOKEN_S))
        return running + sum(prompt.num_tokens for prompt in self._queue)

    def num_waiting(self) -> int:
        """Prompts that are not done."""
        return len(self._queue) + (self._running is not None)

    def future_hits(self, prompt: ReplayedPrompt) -> int:
        """Pages that will be cached when the prompt's turn comes, if none of them is evicted before."""
        coming = self._coming
        num_coming = next((number for number, key in enumerate(prompt.keys) if not coming[key]), len(prompt.keys))
        return max(self._cache.num_matching(prompt.keys), num_coming)

    def _begin(self, prompt: ReplayedPrompt) -> None:
        table = PageTable(self._cache, 1, "", Hold.LIVE)
        num_hit = table.match(prompt.keys[: len(prompt.keys) - 1])  # the last token is computed always
        fits = table.extend(len(prompt.blocks))
        start = max(self._free_at, prompt.arrival_s)
        seconds = (len(prompt.blocks) - num_hit) * BLOCK * TOKEN_S
        self._running = _RunningPrompt(prompt, table, start + seconds)
        self._free_at = start + seconds
        self.busy_s += seconds
        self.num_hit_pages += num_hit
        self.num_pages += len(prompt.blocks)
        self.waits.append(self._free_at - prompt.arrival_s)
        if not fits:
            table.release()

    def _finish(self, running: _RunningPrompt) -> None:
        blocks = running.prompt.blocks
        if running.table.pages:
            running.table.cache_full_pages(blocks, len(blocks))
        running.table.release()
        self._running = None
        self._coming.subtract(running.prompt.keys)
        assert self._cache.events is not None
        self._cache.events.flush()
        delta = self._log.since(self._seq)
        if delta is not None:
            self._seq = delta.seq
            self.deltas.append((running.ends_at + EVENT_LAG_S, delta))


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Of one replay. `busiest`: computed time of the busiest worker, over the mean. Times to the first token."""

    hit_share: float
    busiest: float
    p50_s: float
    p99_s: float


Choose = Callable[["PlacementReplay", ReplayedPrompt, float], ReplayedWorker]


@dataclass
class PlacementReplay:
    """A router's view of `num_workers` prefill workers with `num_pages` pages each."""

    num_workers: int
    num_pages: int
    exact: bool = True
    workers: list[ReplayedWorker] = field(init=False)

    def __post_init__(self) -> None:
        self.workers = [ReplayedWorker(number, self.num_pages) for number in range(self.num_workers)]
        self.num_choices = 0
        self._now = 0.0
        self._index = CacheIndex()
        self._pages = KnownPages(MAX_INDEXED_PAGES, self._index, lambda: self._now)
        self._in_flight = InFlight(2 * HEARTBEAT_S)
        self._records = [_record(worker) for worker in self.workers]
        links = tuple(LinkRecord(record.id, record.incarnation, "stream", 1e9, 1) for record in self._records)
        self._decode = _decode(links)
        self._announced_at = -HEARTBEAT_S
        if self.exact:
            for worker in self.workers:
                self._index.clear(worker.incarnation)

    def run(self, prompts: Iterable[ReplayedPrompt], choose: Choose) -> ReplayResult:
        """Replays all prompts, in order of arrival."""
        for prompt in prompts:
            self._pass_time(prompt.arrival_s)
            self.num_choices += 1
            choose(self, prompt, prompt.arrival_s).add(prompt)
        for worker in self.workers:
            worker.advance(float("inf"))
        waits = sorted(wait for worker in self.workers for wait in worker.waits)
        busy = [worker.busy_s for worker in self.workers]
        hits, pages = sum(worker.num_hit_pages for worker in self.workers), sum(one.num_pages for one in self.workers)
        return ReplayResult(
            hits / pages, max(busy) * len(busy) / sum(busy), percentile(waits, 50), percentile(waits, 99)
        )

    def place(self, prompt: ReplayedPrompt, now: float, policy: PlacementPolicy) -> ReplayedWorker:
        """Chooses as a router does with this policy for prefill."""
        query = PlacementQuery(prompt.num_tokens, prompt.num_tokens + 1, {BLOCK: prompt.keys})
        records = [self._in_flight.adjust(record, now) for record in self._records]
        pairs, policies = linked_pairs([*records, self._decode]), PlacementRules(prefill=policy)
        pair = choose_pair(pairs, query, self._pages, self.num_choices, policies)
        assert pair is not None
        num_cached = self._pages.num_hit_tokens(pair.prefill, query.keys)
        self._in_flight.add(AttemptId(RequestId(str(prompt.number)), 1), pair, prompt.num_tokens, now, num_cached)
        self._index.expect(pair.prefill.incarnation, prompt.keys, now)
        self._pages.add(pair.prefill.incarnation, prompt.keys)
        return self.workers[pair.prefill.incarnation - 1]

    def _pass_time(self, now: float) -> None:
        self._now = now
        for worker in self.workers:
            worker.advance(now)
            while worker.deltas and worker.deltas[0][0] <= now:
                _, delta = worker.deltas.popleft()
                if self.exact:
                    self._index.update(worker.incarnation, delta.stored, delta.removed)
        if now >= self._announced_at + HEARTBEAT_S:
            self._announced_at = now
            for place, worker in enumerate(self.workers):
                load = replace(
                    self._records[place].load,
                    waiting_tokens=worker.waiting_tokens(now),
                    waiting_requests=worker.num_waiting(),
                )
                self._records[place] = replace(self._records[place], load=load)


def by(policy: PlacementPolicy) -> Choose:
    """As a router with this policy does."""
    return lambda replay, prompt, now: replay.place(prompt, now, policy)


def place_by_hits(replay: PlacementReplay, prompt: ReplayedPrompt, now: float) -> ReplayedWorker:
    """Where most will be cached, whatever waits there; among equals where least waits."""
    return max(replay.workers, key=lambda worker: (worker.future_hits(prompt), -worker.waiting_tokens(now)))


POLICIES: dict[str, tuple[Choose, bool]] = {
    "round-robin": (by(PlacementPolicy.ROUND_ROBIN), True),
    "two-choices": (by(PlacementPolicy.TWO_CHOICES), True),
    "least-load": (by(PlacementPolicy.LEAST_LOAD), True),
    "cache-aware, estimated caches": (by(PlacementPolicy.CACHE_AWARE), False),
    "cache-aware, cache events": (by(PlacementPolicy.CACHE_AWARE), True),
    "most cached, whatever waits": (place_by_hits, True),
}
"""Name -> choice, and whether the router gets cache events."""
ORACLE = "oracle"


def replayed(rows: Sequence[TraceRow], num_workers: int, load: float) -> list[ReplayedPrompt]:
    """The prompts of a trace whose blocks would keep `num_workers` workers busy for `load` of the time without hits."""
    seconds = sum(len(row.block_ids) for row in rows) * BLOCK * TOKEN_S
    speed = load * num_workers * rows[-1].arrival_s / seconds
    return [
        ReplayedPrompt(number, row.arrival_s / speed, row.block_ids, tuple(page_keys(row.block_ids, 1, "")))
        for number, row in enumerate(rows)
    ]


def conversations(num_conversations: int, seed: int) -> list[TraceRow]:
    """A trace like Mooncake's: one first block for all, turns that repeat all before them, times to think."""
    rng, rows, numbers = random.Random(seed), list[TraceRow](), itertools.count(1)
    for _ in range(num_conversations):
        arrival_s, blocks = rng.uniform(0.0, 3600.0), [0]
        for _ in range(1 + int(rng.expovariate(1 / 3))):
            blocks += itertools.islice(numbers, 1 + int(rng.expovariate(1 / 8)))
            rows.append(TraceRow(arrival_s, len(blocks) * BLOCK, 1, tuple(blocks)))
            arrival_s += rng.expovariate(1 / 60)
    return sorted(rows, key=lambda row: row.arrival_s)


def replay_all(prompts: Sequence[ReplayedPrompt], num_workers: int, num_pages: int) -> dict[str, ReplayResult]:
    """All policies, and as `ORACLE` one worker with all pools together, whose times mean nothing."""
    results = {
        name: PlacementReplay(num_workers, num_pages, exact).run(prompts, choose)
        for name, (choose, exact) in POLICIES.items()
    }
    return {
        **results,
        ORACLE: PlacementReplay(1, num_workers * num_pages).run(prompts, by(PlacementPolicy.ROUND_ROBIN)),
    }


def _record(worker: ReplayedWorker) -> WorkerRecord:
    return WorkerRecord(
        id=WorkerId(f"prefill-{worker.incarnation}"), role=WorkerRole.PREFILL, incarnation=worker.incarnation,
        address="", model="m", fingerprint="f", page_size=BLOCK, max_model_len=_UNLIMITED, vocab_size=_UNLIMITED,
        budgets=WorkerBudgets(prefill_tokens=BLOCK), load=_NO_LOAD,
    )  # fmt: skip


def _decode(links: tuple[LinkRecord, ...]) -> WorkerRecord:
    return WorkerRecord(
        id=WorkerId("decode-0"), role=WorkerRole.DECODE, incarnation=Incarnation(1000), address="", model="m",
        fingerprint="f", page_size=BLOCK, max_model_len=_UNLIMITED, vocab_size=_UNLIMITED, links=links,
        budgets=WorkerBudgets(rows=_UNLIMITED), load=_NO_LOAD,
    )  # fmt: skip


def main() -> None:
    """Prints the table of one trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--pages", type=int, default=1000, help="of each worker, 512 tokens each")
    parser.add_argument("--load", type=float, default=0.7)
    options = parser.parse_args()
    prompts = replayed(read_mooncake(options.trace), options.workers, options.load)
    print("| placement | cached | of the oracle's | busiest worker / mean | TTFT p50 s | p99 s |")
    print("|---" * 6 + "|")
    results = replay_all(prompts, options.workers, options.pages)
    for name, result in results.items():
        share = result.hit_share / results[ORACLE].hit_share
        cells = (f"{result.hit_share:.1%}", f"{share:.0%}", f"{result.busiest:.2f}", f"{result.p50_s:.2f}")
        print(f"| {name} | {' | '.join(cells)} | {result.p99_s:.1f} |")


if __name__ == "__main__":
    main()
