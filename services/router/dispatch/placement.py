"""Chooses the prefill worker that computes a prompt and the decode worker that continues it. Called by `workers`; pure.

A pair is eligible when both workers are ready, not stuck, large enough, and have the fingerprint that the request
requires. The decode worker's link to this incarnation of the prefill worker must be up and have moved bytes.

The cheapest eligible pair wins. Costs are in prefill tokens: those waiting at prefill, those to compute, those to move,
by the workers' step times where they are known (`prompt_cost`), and the occupancy of decode. Workers on which earlier
attempts failed come last. Equal pairs take turns.

A query with an `affinity` takes the pair that had the last one of this affinity, if that costs at most
`AFFINITY_TOKENS` more and has no less of the prompt cached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from baton.domain.arithmetic import ceil_div
from baton.domain.ids import Incarnation, PageKey
from baton.domain.timing.prompt_cost import CostBasis, PromptLoad, basis_of, handover_cost, local_cost, token_seconds
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.domain.worker import IMAGE, NO_KERNELS, LinkRecord, WorkerRecord, WorkerRole, WorkerStatus

FULL_DECODE_TOKENS = 512
"""Cost of a decode worker with all rows taken, in prefill tokens. An idle one costs nothing."""

AFFINITY_TOKENS = 256
"""Most that it may cost, in prefill tokens, to place a request where the last one of its affinity was."""


@dataclass(frozen=True, slots=True)
class WorkerFilter:
    """The router uses workers with this model, this `text_digest` (empty: any) and a valid signature."""

    model: str
    trust: ClusterTrust = OPEN_CLUSTER
    text_digest: str = ""

    def serves(self, record: WorkerRecord) -> bool:
        """True for a worker with this model, tokenizer and template."""
        return record.model == self.model and self.text_digest in ("", record.text_digest)

    def strangers_note(self, records: Sequence[WorkerRecord]) -> str:
        """The reasons why some of `records` are of no use, as text behind others; "" without any."""
        strangers = sorted({record.model for record in records if record.model != self.model})
        note = f"; workers announced {', '.join(strangers)} instead of {self.model}" if strangers else ""
        texts = [record.id for record in records if record.model == self.model and not self.serves(record)]
        return note + (
            f"; {', '.join(texts)} have another tokenizer or chat template than this router" if texts else ""
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """Two linked workers, or one that prefills for itself and is both."""

    prefill: WorkerRecord
    decode: WorkerRecord

    @property
    def local(self) -> bool:
        """True when decode computes the prompt itself."""
        return self.prefill.incarnation == self.decode.incarnation

    @property
    def workers(self) -> tuple[WorkerRecord, ...]:
        """The workers, without repetition."""
        return (self.decode,) if self.local else (self.prefill, self.decode)

    def worker(self, role: WorkerRole) -> WorkerRecord:
        """The worker in this role."""
        return self.prefill if role is WorkerRole.PREFILL else self.decode

    @property
    def incarnations(self) -> tuple[Incarnation, Incarnation]:
        return self.prefill.incarnation, self.decode.incarnation

    @property
    def cost_basis(self) -> CostBasis:
        """What the cost of its prompts goes by."""
        return basis_of(self.prefill)

    def encodes(self, processor: str) -> bool:
        """True when prefill encodes images with this processor and decode continues such prompts. All do for "".

        A decode worker computes no prompt with images itself.
        """
        if not processor:
            return True
        is_served = all(IMAGE in worker.modalities for worker in self.workers)
        return not self.local and is_served and self.prefill.processor == processor

    def has(self, needs: frozenset[str]) -> bool:
        """True when both workers have these capabilities."""
        return all(needs.issubset(worker.capabilities) for worker in self.workers) if needs else True

    def matches(self, fingerprint: str, grammars: str = "") -> bool:
        """True when both workers have this fingerprint and grammar library. Every pair matches ""."""
        return all(
            fingerprint in ("", worker.fingerprint) and grammars in ("", worker.grammars) for worker in self.workers
        )


@dataclass(frozen=True, slots=True)
class Avoided:
    """Worker incarnations, and (prefill, decode) links, on which earlier attempts of a request failed."""

    workers: frozenset[Incarnation] = frozenset()
    links: frozenset[tuple[Incarnation, Incarnation]] = frozenset()

    def with_worker(self, incarnation: Incarnation) -> Avoided:
        return Avoided(self.workers | {incarnation}, self.links)

    def with_link(self, pair: Pair) -> Avoided:
        return Avoided(self.workers, self.links | {pair.incarnations})

    def num_avoided(self, pair: Pair) -> int:
        """Counts the workers and links of the pair to avoid."""
        if not self.workers and not self.links:
            return 0
        return sum(incarnation in self.workers for incarnation in pair.incarnations) + (pair.incarnations in self.links)


@dataclass(frozen=True, slots=True)
class PlacementQuery:
    """The needs of an attempt. `num_tokens` are to be prefilled; `max_tokens` bounds them and all output together.

    `keys`: page size -> keys of the full pages of the tokens. `busy`: decode workers that had no room just now.
    `fingerprint`, `grammars`: those that the workers must have; "" for any. `needs`: capabilities of both.
    `affinity`: a digest of the tenant and its `prompt_cache_key`; "" for none. `last`: the (prefill, decode) workers
    that had it last, if it is known. `processor`: digest of the image processor of a prompt with images; "" for text.
    """

    num_tokens: int
    max_tokens: int
    keys: Mapping[int, Sequence[PageKey]]
    avoided: Avoided = Avoided()
    busy: frozenset[Incarnation] = frozenset()
    fingerprint: str = ""
    grammars: str = ""
    needs: frozenset[str] = frozenset()
    affinity: str = ""
    last: tuple[Incarnation, Incarnation] | None = None
    processor: str = ""


_Cost = tuple[int, bool, float]
"""Compared in order: workers and links to avoid, no room at decode now, cost in prefill tokens."""


class PrefixIndex:
    """Estimates which worker incarnations hold which pages, from what was sent where.

    Workers evict pages without a message, so the index is a hint. It keeps the `max_keys` most recently used keys.
    """

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._holders: OrderedDict[PageKey, frozenset[Incarnation]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, holder: Incarnation, keys: Sequence[PageKey]) -> None:
        """Records that `holder` has the pages of `keys`, which are in chain order."""
        for key in reversed(keys):  # the chain's root ends up the most recently used: it is the last to be forgotten
            self._holders[key] = self._holders.pop(key, frozenset()) | {holder}
        while len(self._holders) > self._max_keys:
            self._holders.popitem(last=False)

    def retain(self, alive: frozenset[Incarnation]) -> None:
        """Forgets every holder that is not in `alive`."""
        kept = ((key, holders & alive) for key, holders in self._holders.items())
        self._holders = OrderedDict((key, holders) for key, holders in kept if holders)

    def num_hit_pages(self, holder: Incarnation, keys: Iterable[PageKey]) -> int:
        """Counts the leading `keys` that `holder` probably has."""
        num_pages = 0
        for key in keys:
            if holder not in self._holders.get(key, ()):
                break
            num_pages += 1
        return num_pages

    def num_cached_pages(self, worker: WorkerRecord, keys: Sequence[PageKey]) -> int:
        """Counts the leading `keys` that `worker` probably has, by all that is known of it."""
        return self.num_hit_pages(worker.incarnation, keys)


def linked_pairs(records: Iterable[WorkerRecord]) -> list[Pair]:
    """Lists the pairs with a working link, by worker ids, then the workers that prefill for themselves.

    Budgets decide what a worker takes, not its role.
    """
    workers = sorted(records, key=lambda record: record.id)
    decodes = [worker for worker in workers if worker.budgets.takes_rows]
    split = [
        Pair(prefill, decode)
        for prefill in workers
        if prefill.budgets.takes_prompts
        for decode in decodes
        if any(_is_link_to(link, prefill) for link in decode.links)
    ]
    return split + [Pair(decode, decode) for decode in decodes if decode.budgets.takes_prompts]


def placeable(record: WorkerRecord, max_step_age_s: float) -> bool:
    """True for a worker that is ready and not stuck in one step."""
    return record.status is WorkerStatus.READY and record.load.step_age_s <= max_step_age_s


def kernels_note(records: Iterable[WorkerRecord]) -> str:
    """The kernels that workers run, and the workers that run none; "" if none has told."""
    named = {record.id: record.kernels for record in records}
    levels = ", ".join(sorted({level for level in named.values() if level not in ("", NO_KERNELS)}))
    without = ", ".join(sorted(id for id, level in named.items() if level == NO_KERNELS))
    slow = f"; no native kernels on {without}: torch computes there, several times slower" if without else ""
    return (f"; kernels: {levels}" if levels else "") + slow


def capacity_tokens(pair: Pair) -> int:
    """Most tokens of one request, prompt and output, that both workers of a pair can hold."""
    prefill, decode = pair.prefill, pair.decode
    num_prefill = min(prefill.max_model_len, prefill.load.total_pages * prefill.page_size)
    return min(num_prefill, decode.max_model_len, decode.load.total_pages * decode.page_size)


def choose_pair(pairs: Iterable[Pair], query: PlacementQuery, index: PrefixIndex, tie_breaker: int) -> Pair | None:
    """Returns the cheapest of `pairs`, or the one near the last of its affinity; None when none can take the query.

    `tie_breaker` decides between equals. Those of an affinity have their own, so that all routers begin with one pair.
    """
    able, hits = [pair for pair in pairs if _can_take(pair, query)], _HitIndex(query, index)
    token_s = token_seconds([pair.prefill for pair in able])
    costs = [(_cost(pair, query, hits, token_s), pair) for pair in able]
    if not costs:
        return None
    lowest = min(cost for cost, _ in costs)
    best = [pair for cost, pair in costs if cost == lowest]
    if query.affinity:
        tie_breaker = int(query.affinity[:8], 16)
    cheapest = best[tie_breaker % len(best)]
    return cheapest if query.last is None else _nearest(costs, (lowest, cheapest), query, hits)


def _can_take(pair: Pair, query: PlacementQuery) -> bool:
    if pair.decode.incarnation in query.busy or not pair.matches(query.fingerprint, query.grammars):
        return False
    if not pair.encodes(query.processor):
        return False
    return capacity_tokens(pair) >= query.max_tokens and pair.has(query.needs)


def _nearest(
    costs: Iterable[tuple[_Cost, Pair]], cheapest: tuple[_Cost, Pair], query: PlacementQuery, hits: _HitIndex
) -> Pair:
    """The pair with most of the `last` workers, prefill first, that is little worse than the cheapest; else that."""
    (num_avoided, full, lowest), nearest = cheapest
    prefill_hit, decode_hit = hits.of_pair(nearest)
    most = lowest + min(AFFINITY_TOKENS, query.num_tokens - prefill_hit)
    rank = (_nearness(nearest, query), -lowest)
    for cost, pair in costs:
        if cost[:2] != (num_avoided, full) or cost[2] > most or (_nearness(pair, query), -cost[2]) <= rank:
            continue
        prefill_here, decode_here = hits.of_pair(pair)
        if prefill_here >= prefill_hit and decode_here >= decode_hit:
            nearest, rank = pair, (_nearness(pair, query), -cost[2])
    return nearest


def _nearness(pair: Pair, query: PlacementQuery) -> tuple[bool, bool]:
    """Whether prefill and decode are the workers that had the affinity last."""
    prefill, decode = query.last or (None, None)
    return pair.prefill.incarnation == prefill, pair.decode.incarnation == decode


def _is_link_to(link: LinkRecord, prefill: WorkerRecord) -> bool:
    return (
        link.prefill_id == prefill.id and link.prefill_incarnation == prefill.incarnation and link.num_probe_bytes > 0
    )


class _HitIndex:
    """Leading tokens of a query that workers probably have cached. A worker is asked once, whatever pairs it is in."""

    def __init__(self, query: PlacementQuery, index: PrefixIndex) -> None:
        self._query = query
        self._index = index
        self._found: dict[Incarnation, int] = {}

    def of_pair(self, pair: Pair) -> tuple[int, int]:
        """Those of prefill and decode."""
        return self._of(pair.prefill), self._of(pair.decode)

    def _of(self, worker: WorkerRecord) -> int:
        if (found := self._found.get(worker.incarnation)) is None:
            keys = self._query.keys.get(worker.page_size, ())
            found = self._found[worker.incarnation] = worker.page_size * self._index.num_cached_pages(worker, keys)
        return found


def _cost(pair: Pair, query: PlacementQuery, hits: _HitIndex, token_s: float) -> _Cost:
    """The three parts of a `_Cost`."""
    decode, load = pair.decode, pair.decode.load
    num_prefill_hit, num_decode_hit = hits.of_pair(pair)
    work = PromptLoad(query.num_tokens, num_prefill_hit, num_decode_hit)
    if pair.local:
        prompt_cost = local_cost(decode, work, token_s)
    else:
        prompt_cost = handover_cost(pair.prefill, decode, work, token_s)
    occupancy = (load.running_rows + load.waiting_requests) / max(1, decode.budgets.rows)
    num_pages = ceil_div(query.num_tokens - num_decode_hit + 1, decode.page_size)  # 1: the first output token
    full = load.running_rows >= decode.budgets.rows or load.available_pages < num_pages
    return query.avoided.num_avoided(pair), full, prompt_cost + FULL_DECODE_TOKENS * occupancy
