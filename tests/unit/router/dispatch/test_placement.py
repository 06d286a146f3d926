"""The choice of a pair, as tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.ids import Incarnation, PageKey, WorkerId
from baton.domain.worker import LinkRecord, WorkerBudgets, WorkerLoad, WorkerRecord, WorkerRole, WorkerStatus
from baton.services.router.dispatch.placement.choice import AFFINITY_TOKENS, choose_pair
from baton.services.router.dispatch.placement.pair import Pair, capacity_tokens, linked_pairs, placeable
from baton.services.router.dispatch.placement.prefix_index import PrefixIndex
from baton.services.router.dispatch.placement.query import Avoided, PlacementQuery

PAGE = 4
KEYS = tuple(PageKey(bytes([n]) * 16) for n in range(8))
QUERY = PlacementQuery(num_tokens=32, max_tokens=40, keys={PAGE: KEYS})


def worker(role: WorkerRole, number: int, **load: float) -> WorkerRecord:
    return WorkerRecord(
        id=WorkerId(f"{role.value}-{number}"),
        role=role,
        incarnation=Incarnation(number + (100 if role is WorkerRole.DECODE else 0)),
        address="",
        model="m",
        fingerprint="f",
        page_size=PAGE,
        max_model_len=400,
        vocab_size=10,
        budgets=WorkerBudgets(prefill_tokens=512) if role is WorkerRole.PREFILL else WorkerBudgets(rows=4),
        load=replace(WorkerLoad(available_pages=50, total_pages=50), **load),  # type: ignore[arg-type]
    )


def prefill(number: int, **load: float) -> WorkerRecord:
    return worker(WorkerRole.PREFILL, number, **load)


def decode(number: int, **load: float) -> WorkerRecord:
    return worker(WorkerRole.DECODE, number, **load)


def link(to: WorkerRecord, num_probe_bytes: int = 1) -> LinkRecord:
    return LinkRecord(to.id, to.incarnation, "stream", 1e9, num_probe_bytes)


def pairs(*records: WorkerRecord) -> list[Pair]:
    """Returns all pairs of `records`."""
    prefills = [record for record in records if record.role is WorkerRole.PREFILL]
    decodes = [record for record in records if record.role is WorkerRole.DECODE]
    return [Pair(p, d) for p in prefills for d in decodes]


def chosen(
    candidates: list[Pair], query: PlacementQuery = QUERY, index: PrefixIndex | None = None, tie_breaker: int = 0
) -> tuple[str, str]:
    pair = choose_pair(candidates, query, index or PrefixIndex(100), tie_breaker)
    assert pair is not None
    return pair.prefill.id, pair.decode.id


def test_only_working_links_between_living_incarnations_make_a_pair():
    p0, p1 = prefill(0), prefill(1)
    restarted = replace(p0, incarnation=Incarnation(99))
    linked = replace(decode(0), links=(link(p0), link(p1, num_probe_bytes=0)))
    assert [pair.incarnations for pair in linked_pairs([linked, p1, p0])] == [(p0.incarnation, linked.incarnation)]
    assert linked_pairs([linked, restarted, p1]) == []
    assert linked_pairs([p0, p1]) == []


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (prefill(0), True),
        (replace(prefill(0), status=WorkerStatus.DRAINING), False),
        (prefill(0, step_age_s=30.0), True),
        (prefill(0, step_age_s=30.1), False),
    ],
)
def test_a_worker_is_placeable_when_ready_and_not_stuck(record, expected):
    assert placeable(record, max_step_age_s=30.0) is expected


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        pytest.param({"waiting_tokens": 1}, {}, 1, id="the shorter queue"),
        pytest.param({"waiting_tokens": 1}, {"waiting_tokens": 2}, 0, id="the less long queue"),
        pytest.param({"total_pages": 9}, {"waiting_tokens": 900}, 1, id="too small a pool"),
    ],
)
def test_load_decides_between_prefill_workers(first, second, expected):
    assert chosen(pairs(prefill(0, **first), prefill(1, **second), decode(0)))[0] == f"prefill-{expected}"


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        pytest.param({"running_rows": 2}, {"running_rows": 1}, 1, id="fewer rows"),
        pytest.param({"running_rows": 4}, {"running_rows": 3}, 1, id="no row left"),
        pytest.param({"available_pages": 8}, {"running_rows": 3}, 1, id="no page for the first output"),
        pytest.param({"available_pages": 9}, {"running_rows": 3}, 0, id="just enough pages"),
        pytest.param({"running_rows": 4}, {"running_rows": 5}, 0, id="all are full"),
        pytest.param({"total_pages": 9}, {"running_rows": 4}, 1, id="too small a pool"),
    ],
)
def test_load_decides_between_decode_workers(first, second, expected):
    assert chosen(pairs(prefill(0), decode(0, **first), decode(1, **second)))[1] == f"decode-{expected}"


def test_a_cached_prefix_is_worth_the_tokens_it_saves():
    index = PrefixIndex(100)
    index.add(Incarnation(1), KEYS[:5])
    assert chosen(pairs(prefill(0), prefill(1, waiting_tokens=19), decode(0)), index=index)[0] == "prefill-1"
    assert chosen(pairs(prefill(0), prefill(1, waiting_tokens=21), decode(0)), index=index)[0] == "prefill-0"


def test_a_cached_prefix_decides_between_equal_decode_workers():
    index = PrefixIndex(100)
    index.add(Incarnation(101), KEYS)
    assert chosen(pairs(prefill(0), decode(0), decode(1)), index=index)[1] == "decode-1"
    assert chosen(pairs(prefill(0), decode(0), decode(1, running_rows=1)), index=index)[1] == "decode-0"


@pytest.mark.parametrize(
    ("avoided", "expected"),
    [
        (Avoided().with_worker(Incarnation(0)), ("prefill-1", "decode-0")),
        (Avoided().with_worker(Incarnation(100)), ("prefill-0", "decode-1")),
        (Avoided().with_link(Pair(prefill(0), decode(0))), ("prefill-0", "decode-1")),
        (Avoided().with_worker(Incarnation(0)).with_worker(Incarnation(100)), ("prefill-1", "decode-1")),
    ],
)
def test_what_failed_before_comes_last(avoided, expected):
    candidates = pairs(prefill(0), prefill(1, waiting_tokens=500), decode(0), decode(1, running_rows=3))
    assert chosen(candidates) == ("prefill-0", "decode-0")
    assert chosen(candidates, replace(QUERY, avoided=avoided)) == expected


def test_an_avoided_pair_is_used_when_it_is_the_only_one():
    avoided = Avoided().with_worker(Incarnation(0)).with_worker(Incarnation(100))
    assert chosen(pairs(prefill(0), decode(0)), replace(QUERY, avoided=avoided)) == ("prefill-0", "decode-0")


def test_busy_decode_workers_and_those_too_small_are_never_chosen():
    busy = replace(QUERY, busy=frozenset({Incarnation(100)}))
    assert choose_pair(pairs(prefill(0), decode(0)), busy, PrefixIndex(1), 0) is None
    assert choose_pair(pairs(prefill(0), decode(0)), replace(QUERY, max_tokens=201), PrefixIndex(1), 0) is None
    assert choose_pair([], QUERY, PrefixIndex(1), 0) is None


def test_equals_take_turns():
    candidates = pairs(prefill(0), prefill(1), decode(0))
    assert [chosen(candidates, tie_breaker=tie_breaker)[0] for tie_breaker in range(4)] == [
        "prefill-0",
        "prefill-1",
    ] * 2


def test_capacity_is_bounded_by_pools_and_context_on_both_sides():
    assert capacity_tokens(Pair(prefill(0), decode(0))) == 200
    assert capacity_tokens(Pair(prefill(0, total_pages=10), decode(0))) == 40
    assert capacity_tokens(Pair(prefill(0), replace(decode(0), max_model_len=7))) == 7


def test_the_index_counts_leading_pages_of_one_holder_only():
    index = PrefixIndex(100)
    index.add(Incarnation(1), KEYS[:3])
    index.add(Incarnation(2), KEYS)
    assert index.num_hit_pages(Incarnation(1), KEYS) == 3
    assert index.num_hit_pages(Incarnation(2), KEYS) == 8
    assert index.num_hit_pages(Incarnation(1), KEYS[1:]) == 2
    assert index.num_hit_pages(Incarnation(3), KEYS) == 0


def test_a_full_index_forgets_the_ends_of_chains_before_their_roots():
    index = PrefixIndex(3)
    index.add(Incarnation(1), KEYS[:5])
    assert len(index) == 3
    assert index.num_hit_pages(Incarnation(1), KEYS) == 3


def test_the_index_forgets_lost_workers():
    index = PrefixIndex(100)
    index.add(Incarnation(1), KEYS[:2])
    index.add(Incarnation(2), KEYS[:3])
    index.retain(frozenset({Incarnation(1)}))
    assert index.num_hit_pages(Incarnation(1), KEYS) == 2
    assert index.num_hit_pages(Incarnation(2), KEYS) == 0
    assert len(index) == 2


def test_a_required_fingerprint_restricts_the_pairs():
    old = pairs(prefill(0, waiting_tokens=900), decode(0, running_rows=3))[0]
    new = pairs(replace(prefill(1), fingerprint="new"), replace(decode(1), fingerprint="new"))[0]
    assert chosen([old, new]) == ("prefill-1", "decode-1")
    assert chosen([old, new], replace(QUERY, fingerprint="f")) == ("prefill-0", "decode-0")
    assert choose_pair([new], replace(QUERY, fingerprint="f"), PrefixIndex(100), 0) is None


def test_a_required_fingerprint_restricts_local_pairs():
    alone = replace(decode(0), budgets=WorkerBudgets(64, 4), fingerprint="f+int8")
    (pair,) = linked_pairs([alone])
    assert not pair.matches("f")
    assert pair.matches("f+int8")
    assert pair.matches("")


def test_both_workers_of_a_pair_must_match_the_fingerprint():
    (pair,) = pairs(prefill(0), replace(decode(0), fingerprint="new"))
    assert not pair.matches("f")
    assert not pair.matches("new")


def test_constrained_output_needs_the_same_grammar_library_on_both():
    """A worker without it, perhaps an older one, would answer unconstrained."""
    plain, able, other = (
        [replace(record, grammars=name) for record in (prefill(number), decode(number))]
        for number, name in ((1, ""), (2, "llguidance/1"), (3, "llguidance/2"))
    )
    query = replace(QUERY, grammars="llguidance/1")
    index = PrefixIndex(100)
    assert choose_pair([Pair(plain[0], able[1]), Pair(able[0], other[1]), Pair(*plain)], query, index, 0) is None
    assert choose_pair([Pair(*plain), Pair(*able)], query, index, 0) == Pair(*able)
    assert choose_pair([Pair(*plain)], QUERY, index, 0) == Pair(*plain)


def test_budgets_decide_what_a_worker_takes_whatever_its_role():
    able = replace(decode(0), links=(link(prefill(0)),), budgets=WorkerBudgets(64, 4))

    def names(*records: WorkerRecord) -> list[tuple[str, str]]:
        return [(pair.prefill.id, pair.decode.id) for pair in linked_pairs(records)]

    assert names(prefill(0), able) == [("prefill-0", "decode-0"), ("decode-0", "decode-0")]
    assert names(prefill(0), replace(able, budgets=WorkerBudgets(0, 4))) == [("prefill-0", "decode-0")]
    assert names(replace(prefill(0), budgets=WorkerBudgets(0)), able) == [("decode-0", "decode-0")]
    assert names(prefill(0), replace(able, budgets=WorkerBudgets(64, 0))) == []
    assert names(prefill(0), replace(able, budgets=WorkerBudgets(64, 4, 0))) == []


def test_a_lowered_bound_of_rows_makes_a_worker_full():
    one, other = pairs(prefill(0), decode(0, running_rows=3))[0], pairs(prefill(1), decode(1, running_rows=3))[0]
    lowered = Pair(one.prefill, replace(one.decode, budgets=WorkerBudgets(rows=2)))
    assert chosen([lowered, other]) == ("prefill-1", "decode-1")


LAST = (Incarnation(1), Incarnation(101))
NEAR = replace(QUERY, num_tokens=400, max_tokens=200, keys={}, affinity="0" * 64, last=LAST)


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        pytest.param(pairs(prefill(0), prefill(1), decode(0), decode(1)), ("prefill-1", "decode-1"), id="equals"),
        pytest.param(pairs(prefill(0), prefill(1), decode(0)), ("prefill-1", "decode-0"), id="decode is gone"),
        pytest.param(pairs(prefill(0), decode(0), decode(1)), ("prefill-0", "decode-1"), id="prefill is gone"),
        pytest.param(pairs(prefill(0), decode(0)), ("prefill-0", "decode-0"), id="both are gone"),
        pytest.param(
            pairs(prefill(0), prefill(1, waiting_tokens=AFFINITY_TOKENS), decode(0)),
            ("prefill-1", "decode-0"), id="busier by no more than it is worth",
        ),
        pytest.param(
            pairs(prefill(0), prefill(1, waiting_tokens=AFFINITY_TOKENS + 1), decode(0)),
            ("prefill-0", "decode-0"), id="too busy",
        ),
        pytest.param(
            pairs(prefill(1), decode(0), decode(1, running_rows=4)), ("prefill-1", "decode-0"), id="decode is full"
        ),
        pytest.param(
            pairs(prefill(0), prefill(1, waiting_tokens=200), decode(0), decode(1, running_rows=1)),
            ("prefill-1", "decode-0"), id="prefill before decode, where both cost too much",
        ),
    ],
)  # fmt: skip
def test_requests_of_an_affinity_go_where_the_last_was(candidates, expected):
    assert chosen(candidates, NEAR) == expected


def test_a_cached_prefix_is_stronger_than_an_affinity():
    index = PrefixIndex(100)
    index.add(Incarnation(0), KEYS[:1])
    query = replace(NEAR, num_tokens=32, keys=QUERY.keys)
    candidates = pairs(prefill(0), prefill(1), decode(0))
    assert chosen(candidates, query, PrefixIndex(100))[0] == "prefill-1"
    assert chosen(candidates, query, index)[0] == "prefill-0"


def test_an_affinity_is_worth_no_more_than_is_left_to_compute():
    index = PrefixIndex(100)
    for number in (0, 1):
        index.add(Incarnation(number), KEYS[:7])  # 4 of 32 tokens are left
    query = replace(NEAR, num_tokens=32, keys=QUERY.keys)
    assert chosen(pairs(prefill(0), prefill(1, waiting_tokens=4), decode(0)), query, index)[0] == "prefill-1"
    assert chosen(pairs(prefill(0), prefill(1, waiting_tokens=5), decode(0)), query, index)[0] == "prefill-0"


def test_all_routers_begin_an_affinity_alike():
    candidates = pairs(prefill(0), prefill(1), decode(0))
    for digest, expected in (("00000000ff", "prefill-0"), ("00000001ff", "prefill-1")):
        first = replace(QUERY, affinity=digest)
        assert {chosen(candidates, first, tie_breaker=n)[0] for n in range(4)} == {expected}


def test_a_failed_worker_is_avoided_although_it_had_the_affinity():
    avoided = Avoided().with_worker(Incarnation(1))
    assert chosen(pairs(prefill(0), prefill(1), decode(0)), replace(NEAR, avoided=avoided))[0] == "prefill-0"
