"""An affinity changes the choice of a pair within bounds, whatever loads and caches are."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from baton.domain.ids import Incarnation, PageKey, WorkerId
from baton.domain.timing.prompt_cost import MOVED_TOKENS_PER_COMPUTED
from baton.domain.worker import WorkerBudgets, WorkerLoad, WorkerRecord, WorkerRole
from baton.services.router.dispatch.placement.choice import AFFINITY_TOKENS, FULL_DECODE_TOKENS, choose_pair
from baton.services.router.dispatch.placement.pair import Pair
from baton.services.router.dispatch.placement.prefix_index import PrefixIndex
from baton.services.router.dispatch.placement.query import PlacementQuery

PAGE, ROWS, POOL = 4, 8, 200
KEYS = tuple(PageKey(bytes([n]) * 16) for n in range(100))


def worker(role: WorkerRole, number: int, load: WorkerLoad) -> WorkerRecord:
    return WorkerRecord(
        id=WorkerId(f"{role.value}-{number}"),
        role=role,
        incarnation=Incarnation(number + (100 if role is WorkerRole.DECODE else 0)),
        address="",
        model="m",
        fingerprint="f",
        page_size=PAGE,
        max_model_len=10_000,
        vocab_size=10,
        budgets=WorkerBudgets(prefill_tokens=512) if role is WorkerRole.PREFILL else WorkerBudgets(rows=ROWS),
        load=load,
    )


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[Pair], PrefixIndex]:
    """Up to 3 x 3 pairs with any loads, and what their workers have cached."""
    index, workers = PrefixIndex(10_000), []
    for role in WorkerRole:
        for number in range(draw(st.integers(1, 3))):
            load = WorkerLoad(
                waiting_tokens=draw(st.integers(0, 800)),
                running_rows=draw(st.integers(0, ROWS)),
                available_pages=draw(st.integers(0, POOL)),
                total_pages=POOL,
            )
            workers.append(worker(role, number, load))
            index.add(workers[-1].incarnation, KEYS[: draw(st.integers(0, 100))])
    prefills, decodes = ([w for w in workers if w.role is role] for role in (WorkerRole.PREFILL, WorkerRole.DECODE))
    return [Pair(p, d) for p in prefills for d in decodes], index


def hits(pair: Pair, query: PlacementQuery, index: PrefixIndex) -> tuple[int, int]:
    of_prefill, of_decode = (PAGE * index.num_hit_pages(w.incarnation, query.keys[PAGE]) for w in pair.workers)
    return of_prefill, of_decode


def cost(pair: Pair, query: PlacementQuery, index: PrefixIndex) -> tuple[bool, float]:
    of_prefill, of_decode = hits(pair, query, index)
    load = pair.decode.load
    full = load.running_rows >= ROWS or load.available_pages * PAGE < query.num_tokens - of_decode + 1
    waiting = pair.prefill.load.waiting_tokens + query.num_tokens - of_prefill
    moved = (query.num_tokens - of_decode) / MOVED_TOKENS_PER_COMPUTED
    return full, waiting + moved + FULL_DECODE_TOKENS * load.running_rows / ROWS


def near(pair: Pair, last: tuple[Incarnation, Incarnation]) -> tuple[bool, bool]:
    return pair.prefill.incarnation == last[0], pair.decode.incarnation == last[1]


@given(clusters(), st.integers(1, 400), st.integers(0, 2), st.integers(100, 102), st.integers(0, 2**32 - 1))
def test_an_affinity_is_bounded_by_load_and_by_what_is_cached(cluster, num_tokens, prefill, decode, digest):
    pairs, index = cluster
    last = Incarnation(prefill), Incarnation(decode)
    plain = PlacementQuery(num_tokens, num_tokens + 1, {PAGE: KEYS[: num_tokens // PAGE]}, affinity=f"{digest:08x}")
    query = replace(plain, last=last)
    cheapest, chosen = (choose_pair(pairs, each, index, 0) for each in (plain, query))
    assert cheapest is not None
    assert chosen is not None
    full, lowest = cost(cheapest, query, index)
    of_prefill, of_decode = hits(cheapest, query, index)

    def permitted(pair: Pair) -> bool:
        its_full, its_cost = cost(pair, query, index)
        bound = lowest + min(AFFINITY_TOKENS, num_tokens - of_prefill)
        cached = hits(pair, query, index)
        return its_full == full and its_cost <= bound and cached[0] >= of_prefill and cached[1] >= of_decode

    assert permitted(chosen)
    assert near(chosen, last) == max(near(pair, last) for pair in pairs if permitted(pair))
    if near(chosen, last) == near(cheapest, last):
        assert cost(chosen, query, index) == cost(cheapest, query, index)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=60), st.integers(2, 3))
def test_one_key_for_everything_does_not_pile_up_on_a_worker(prompts, num_workers):
    """The adversary: all requests have one key, and no worker ever gets done."""
    waiting = [0] * num_workers
    last = None
    for num_tokens in prompts:
        loads = [WorkerLoad(waiting_tokens=n, available_pages=POOL, total_pages=POOL) for n in waiting]
        decode = worker(WorkerRole.DECODE, 0, WorkerLoad(available_pages=POOL, total_pages=POOL))
        pairs = [Pair(worker(WorkerRole.PREFILL, n, load), decode) for n, load in enumerate(loads)]
        query = PlacementQuery(num_tokens, num_tokens + 1, {}, affinity="0" * 8, last=last)
        chosen = choose_pair(pairs, query, PrefixIndex(1), 0)
        assert chosen is not None
        last = chosen.incarnations
        waiting[chosen.prefill.incarnation] += num_tokens
        assert max(waiting) - min(waiting) <= AFFINITY_TOKENS + max(prompts)
