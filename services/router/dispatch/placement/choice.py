"""Chooses the prefill worker that computes a prompt and the decode worker that continues it. Called by `workers`; pure.

A pair is eligible when both workers are ready, not stuck, large enough, and have the fingerprint that the request
requires. The decode worker's link to this incarnation of the prefill worker must be up and have moved bytes.

The cheapest eligible pair wins. Costs are in prefill tokens: those waiting at prefill, those to compute, those to move,
by the workers' step times where they are known (`prompt_cost`), and the occupancy of decode. Workers on which earlier
attempts failed come last. Equal pairs take turns. A `PlacementPolicy` of a role may leave caches out of the cost, and
leave fewer workers to choose from.

A query with an `affinity` takes the pair that had the last one of this affinity, if that costs at most
`AFFINITY_TOKENS` more and has no less of the prompt cached. With other policies than `BY_CACHE` it has no effect.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.domain.arithmetic import ceil_div
from baton.domain.ids import Incarnation
from baton.domain.timing.prompt_cost import PromptLoad, handover_cost, local_cost, token_seconds
from baton.domain.worker import WorkerRecord
from baton.services.router.dispatch.placement.pair import Pair, capacity_tokens
from baton.services.router.dispatch.placement.policy import BY_CACHE, PlacementPolicy, PlacementRules
from baton.services.router.dispatch.placement.prefix_index import PrefixIndex
from baton.services.router.dispatch.placement.query import PlacementQuery

FULL_DECODE_TOKENS = 512
"""Cost of a decode worker with all rows taken, in prefill tokens. An idle one costs nothing."""

AFFINITY_TOKENS = 256
"""Most that it may cost, in prefill tokens, to place a request where the last one of its affinity was."""

_Rank = tuple[int, bool]
"""Compared before the cost: workers and links to avoid, no room at decode now."""


def choose_pair(
    pairs: Iterable[Pair],
    query: PlacementQuery,
    index: PrefixIndex,
    number: int,
    policies: PlacementRules = BY_CACHE,
) -> Pair | None:
    """Returns the cheapest of `pairs`, or the one near the last of its affinity; None when none can take the query.

    `number`: of this placement; by it equals take turns. Those of an affinity have their own turn, so that all routers
    begin with one pair.
    """
    able = [pair for pair in pairs if _can_take(pair, query)]
    if len(able) < 2:
        return able[0] if able else None
    by_cache, hits = policies is BY_CACHE or policies == BY_CACHE, _HitIndex(query, index, policies)
    token_s = token_seconds([pair.prefill for pair in able])
    ranks = [_rank(pair, query, hits) for pair in able]
    best_rank = min(ranks)
    able = [pair for rank, pair in zip(ranks, able, strict=True) if rank == best_rank]
    if not by_cache:
        able = policies.narrow(able, number)
    costs = [(_cost(pair, query, hits, token_s), pair) for pair in able]
    lowest = min(cost for cost, _ in costs)
    best = [pair for cost, pair in costs if cost == lowest]
    turn = int(query.affinity[:8], 16) if query.affinity and by_cache else number
    cheapest = best[turn % len(best)]
    if query.last is None or not by_cache:
        return cheapest
    return _nearest(costs, (lowest, cheapest), query, hits)


def _can_take(pair: Pair, query: PlacementQuery) -> bool:
    if pair.decode.incarnation in query.busy or not pair.matches(query.fingerprint, query.grammars):
        return False
    if not pair.encodes(query.processor) or query.prefill not in (None, pair.prefill.incarnation):
        return False
    return capacity_tokens(pair) >= query.max_tokens and pair.has(query.needs)


def _nearest(
    costs: Iterable[tuple[float, Pair]], cheapest: tuple[float, Pair], query: PlacementQuery, hits: _HitIndex
) -> Pair:
    """The pair with most of the `last` workers, prefill first, that is little worse than the cheapest; else that."""
    lowest, nearest = cheapest
    prefill_hit, decode_hit = hits.of_pair(nearest)
    most = lowest + min(AFFINITY_TOKENS, query.num_tokens - prefill_hit)
    rank = (_nearness(nearest, query), -lowest)
    for cost, pair in costs:
        if cost > most or (_nearness(pair, query), -cost) <= rank:
            continue
        prefill_here, decode_here = hits.of_pair(pair)
        if prefill_here >= prefill_hit and decode_here >= decode_hit:
            nearest, rank = pair, (_nearness(pair, query), -cost)
    return nearest


def _nearness(pair: Pair, query: PlacementQuery) -> tuple[bool, bool]:
    """Whether prefill and decode are the workers that had the affinity last."""
    prefill, decode = query.last or (None, None)
    return pair.prefill.incarnation == prefill, pair.decode.incarnation == decode


class _HitIndex:
    """Leading tokens of a query that workers probably have cached. A worker is asked once, whatever pairs it is in."""

    def __init__(self, query: PlacementQuery, index: PrefixIndex, policies: PlacementRules) -> None:
        self._query = query
        self._index = index
        self._counts = [policy is PlacementPolicy.CACHE_AWARE for policy in (policies.prefill, policies.decode)]
        self._found: dict[Incarnation, int] = {}

    def of_pair(self, pair: Pair) -> tuple[int, int]:
        """Those of prefill and decode, as far as their policies count them."""
        prefill, decode = self._counts
        return self.of(pair.prefill) if prefill else 0, self.of(pair.decode) if decode else 0

    def of(self, worker: WorkerRecord) -> int:
        """Those of one worker."""
        if (found := self._found.get(worker.incarnation)) is None:
            keys = self._query.keys.get(worker.page_size, ())
            found = self._found[worker.incarnation] = worker.page_size * self._index.num_cached_pages(worker, keys)
        return found


def _rank(pair: Pair, query: PlacementQuery, hits: _HitIndex) -> _Rank:
    decode, load = pair.decode, pair.decode.load
    num_pages = ceil_div(query.num_tokens - hits.of(decode) + 1, decode.page_size)  # 1: the first output token
    full = load.running_rows >= decode.budgets.rows or load.available_pages < num_pages
    return query.avoided.num_avoided(pair), full


def _cost(pair: Pair, query: PlacementQuery, hits: _HitIndex, token_s: float) -> float:
    """The cost in prefill tokens."""
    decode, load = pair.decode, pair.decode.load
    work = PromptLoad(query.num_tokens, *hits.of_pair(pair))
    if pair.local:
        prompt_cost = local_cost(decode, work, token_s)
    else:
        prompt_cost = handover_cost(pair.prefill, decode, work, token_s)
    occupancy = (load.running_rows + load.waiting_requests) / max(1, decode.budgets.rows)
    return prompt_cost + FULL_DECODE_TOKENS * occupancy
