"""Which prefill worker computes a prompt and which decode worker continues it. Called by `workers`; no I/O, no clock.

A pair is eligible when both workers are ready, not stuck, large enough, of the fingerprint that the request is pinned
to, if it is, and the decode worker's link to this very incarnation of the prefill worker is up and has moved bytes.
Among the eligible the cheapest wins, all costs in prefill tokens: what waits at prefill, what prefill must still
compute, what must be moved, and how crowded decode is. Workers that earlier attempts of the request were lost on come
last, not never. Equal pairs take turns.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from baton.domain.arithmetic import ceil_div
from baton.domain.ids import Incarnation, PageKey
from baton.domain.worker import LinkRecord, WorkerRecord, WorkerRole, WorkerStatus

MOVED_TOKENS_PER_COMPUTED = 16
"""Moving a token's KV is taken for this many times cheaper than computing it."""

LOCAL_TOKENS_PER_COMPUTED = 4
"""A token that decode computes beside its rows is taken for this many times dearer than one that prefill computes: it
waits for its share of the steps, and all rows wait for it."""

FULL_DECODE_TOKENS = 512
"""A decode worker with all rows taken is worth this many prefill tokens less than an idle one."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two linked workers; or one that is both, which prefills for itself."""

    prefill: WorkerRecord
    decode: WorkerRecord

    @property
    def local(self) -> bool:
        """Whether decode computes the prompt itself."""
        return self.prefill.incarnation == self.decode.incarnation

    @property
    def workers(self) -> tuple[WorkerRecord, ...]:
        """The different ones."""
        return (self.decode,) if self.local else (self.prefill, self.decode)

    def worker(self, role: WorkerRole) -> WorkerRecord:
        """The worker in this role."""
        return self.prefill if role is WorkerRole.PREFILL else self.decode

    @property
    def incarnations(self) -> tuple[Incarnation, Incarnation]:
        return self.prefill.incarnation, self.decode.incarnation

    def matches(self, fingerprint: str) -> bool:
        """Whether both workers are of that kind; all are when it is ""."""
        return not fingerprint or all(worker.fingerprint == fingerprint for worker in self.workers)


@dataclass(frozen=True, slots=True)
class Avoided:
    """What earlier attempts of one request were lost on: worker incarnations, and (prefill, decode) links."""

    workers: frozenset[Incarnation] = frozenset()
    links: frozenset[tuple[Incarnation, Incarnation]] = frozenset()

    def with_worker(self, incarnation: Incarnation) -> Avoided:
        return Avoided(self.workers | {incarnation}, self.links)

    def with_link(self, pair: Pair) -> Avoided:
        return Avoided(self.workers, self.links | {pair.incarnations})

    def num_avoided(self, pair: Pair) -> int:
        """How much of the pair is to be avoided; 0 for none of it."""
        if not self.workers and not self.links:
            return 0
        return sum(incarnation in self.workers for incarnation in pair.incarnations) + (pair.incarnations in self.links)


@dataclass(frozen=True, slots=True)
class PlacementQuery:
    """What a request needs. `num_tokens` are to be prefilled, `max_tokens` bounds them and all output together.

    `keys` are those of the full pages of the tokens, by page size. `busy` decode workers have just said "not now".
    `fingerprint`: the only one that its workers may have, "" if any will do.
    """

    num_tokens: int
    max_tokens: int
    keys: Mapping[int, Sequence[PageKey]]
    avoided: Avoided = Avoided()
    busy: frozenset[Incarnation] = frozenset()
    fingerprint: str = ""


class PrefixIndex:
    """Which worker incarnations probably hold which pages: a bounded memory of what was sent where.

    Workers evict without telling, so this is a hint. Least recently used keys are forgotten beyond `max_keys`.
    """

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._holders: OrderedDict[PageKey, frozenset[Incarnation]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, holder: Incarnation, keys: Sequence[PageKey]) -> None:
        """`holder` now has the pages named by `keys`, given in chain order."""
        for key in reversed(keys):  # the chain's root ends up the most recently used: it is the last to be forgotten
            self._holders[key] = self._holders.pop(key, frozenset()) | {holder}
        while len(self._holders) > self._max_keys:
            self._holders.popitem(last=False)

    def retain(self, alive: frozenset[Incarnation]) -> None:
        """Forgets every holder that is not `alive`."""
        kept = ((key, holders & alive) for key, holders in self._holders.items())
        self._holders = OrderedDict((key, holders) for key, holders in kept if holders)

    def num_hit_pages(self, holder: Incarnation, keys: Iterable[PageKey]) -> int:
        """Length of the leading run of `keys` that `holder` probably has."""
        num_pages = 0
        for key in keys:
            if holder not in self._holders.get(key, ()):
                break
            num_pages += 1
        return num_pages


def linked_pairs(records: Iterable[WorkerRecord]) -> list[Pair]:
    """All pairs whose link is up between the incarnations that are alive now, ordered by worker ids; then those that
    prefill for themselves."""
    by_role: dict[WorkerRole, list[WorkerRecord]] = {role: [] for role in WorkerRole}
    for record in sorted(records, key=lambda record: record.id):
        by_role[record.role].append(record)
    split = [
        Pair(prefill, decode)
        for prefill in by_role[WorkerRole.PREFILL]
        for decode in by_role[WorkerRole.DECODE]
        if any(_is_link_to(link, prefill) for link in decode.links)
    ]
    return split + [Pair(decode, decode) for decode in by_role[WorkerRole.DECODE] if decode.prefills]


def placeable(record: WorkerRecord, max_step_age_s: float) -> bool:
    """Whether a worker may be given anything new: ready, and not stuck in one step."""
    return record.status is WorkerStatus.READY and record.load.step_age_s <= max_step_age_s


def capacity_tokens(pair: Pair) -> int:
    """Most tokens of one request, prompt and output, that both of a pair can ever hold."""
    prefill, decode = pair.prefill, pair.decode
    num_prefill = min(prefill.max_model_len, prefill.load.total_pages * prefill.page_size)
    return min(num_prefill, decode.max_model_len, decode.load.total_pages * decode.page_size)


def choose_pair(pairs: Iterable[Pair], query: PlacementQuery, index: PrefixIndex, tie_breaker: int) -> Pair | None:
    """The cheapest of `pairs` for `query`, or None when none can take it now; `tie_breaker` decides between equals."""
    best: list[Pair] = []
    lowest: tuple[int, bool, float] | None = None
    for pair in pairs:
        if pair.decode.incarnation in query.busy or not pair.matches(query.fingerprint):
            continue
        if capacity_tokens(pair) < query.max_tokens:
            continue
        cost = _cost(pair, query, index)
        if lowest is None or cost < lowest:
            best, lowest = [], cost
        if cost == lowest:
            best.append(pair)
    return best[tie_breaker % len(best)] if best else None


def _is_link_to(link: LinkRecord, prefill: WorkerRecord) -> bool:
    return (
        link.prefill_id == prefill.id and link.prefill_incarnation == prefill.incarnation and link.num_probe_bytes > 0
    )


def _cost(pair: Pair, query: PlacementQuery, index: PrefixIndex) -> tuple[int, bool, float]:
    """Compared in order: how much is to be avoided, whether decode has no room now, cost in prefill tokens."""
    prefill, decode, load = pair.prefill, pair.decode, pair.decode.load
    prefill_keys, decode_keys = query.keys.get(prefill.page_size, ()), query.keys.get(decode.page_size, ())
    num_prefill_hit = prefill.page_size * index.num_hit_pages(prefill.incarnation, prefill_keys)
    num_decode_hit = decode.page_size * index.num_hit_pages(decode.incarnation, decode_keys)
    num_to_compute = prefill.load.waiting_tokens + query.num_tokens - num_prefill_hit
    num_to_move = (query.num_tokens - num_decode_hit) / MOVED_TOKENS_PER_COMPUTED
    if pair.local:
        num_to_compute, num_to_move = LOCAL_TOKENS_PER_COMPUTED * num_to_compute, 0.0
    occupancy = (load.running_rows + load.waiting_requests) / max(1, load.max_rows)
    num_pages = ceil_div(query.num_tokens - num_decode_hit + 1, decode.page_size)  # 1: the first output token
    full = load.running_rows >= load.max_rows or load.available_pages < num_pages
    return query.avoided.num_avoided(pair), full, num_to_compute + num_to_move + FULL_DECODE_TOKENS * occupancy
