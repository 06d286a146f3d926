"""Policies of placement: what counts, who is asked, and that no policy overrides what makes a pair able."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.services.router.dispatch.placement.choice import choose_pair
from baton.services.router.dispatch.placement.pair import Pair
from baton.services.router.dispatch.placement.policy import PlacementPolicy, PlacementRules
from baton.services.router.dispatch.placement.prefix_index import PrefixIndex
from baton.services.router.dispatch.placement.query import Avoided
from baton.services.router.limits import worker_limits
from baton.services.router.settings import RouterSettings
from tests.unit.router.dispatch.test_placement import KEYS, QUERY, decode, pairs, prefill

LEAST, TWO, TURNS = PlacementPolicy.LEAST_LOAD, PlacementPolicy.TWO_CHOICES, PlacementPolicy.ROUND_ROBIN
CANDIDATES = pairs(prefill(0, waiting_tokens=30), prefill(1, waiting_tokens=10), prefill(2), decode(0), decode(1))


def place(
    candidates: list[Pair], policies: PlacementRules, number: int, index: PrefixIndex | None = None
) -> tuple[str, str]:
    pair = choose_pair(candidates, QUERY, index or PrefixIndex(100), number, policies)
    assert pair is not None
    return pair.prefill.id, pair.decode.id


def test_least_load_ignores_what_is_cached():
    index = PrefixIndex(100)
    index.add(CANDIDATES[0].prefill.incarnation, KEYS)
    assert place(CANDIDATES, PlacementRules(), 0, index)[0] == "prefill-0"
    assert place(CANDIDATES, PlacementRules(prefill=LEAST), 0, index)[0] == "prefill-2"


def test_a_decode_policy_leaves_prefill_as_it_is():
    index = PrefixIndex(100)
    for worker in (CANDIDATES[0].prefill, CANDIDATES[1].decode):
        index.add(worker.incarnation, KEYS)
    assert place(CANDIDATES, PlacementRules(), 0, index) == ("prefill-0", "decode-1")
    turns = [place(CANDIDATES, PlacementRules(decode=TURNS), number, index) for number in range(3)]
    assert turns == [("prefill-0", "decode-0"), ("prefill-0", "decode-1"), ("prefill-0", "decode-0")]


def test_two_choices_take_the_less_loaded_of_two_random_workers():
    taken = Counter(place(CANDIDATES, PlacementRules(prefill=TWO), number)[0] for number in range(900))
    assert "prefill-0" not in taken, "it is the most loaded one of any two"
    assert taken["prefill-2"] == pytest.approx(600, abs=90), "it is in two of the three pairs"
    two = [pair for pair in CANDIDATES if pair.prefill.id != "prefill-1"]
    assert {place(two, PlacementRules(prefill=TWO), number)[0] for number in range(9)} == {"prefill-2"}


def test_round_robin_takes_turns_whatever_waits():
    policies = PlacementRules(prefill=TURNS)
    assert [place(CANDIDATES, policies, number)[0] for number in range(4)] == [
        "prefill-0", "prefill-1", "prefill-2", "prefill-0",
    ]  # fmt: skip


@pytest.mark.parametrize("policy", [TURNS, TWO])
def test_every_decode_worker_gets_its_turn_in_a_partial_mesh(policy: PlacementPolicy):
    """Half of the workers have other weights: each prefill worker is linked to two of four decode workers."""
    linked = [pair for pair in pairs(prefill(0), prefill(1), *map(decode, range(4))) if _linked(pair)]
    taken = Counter(place(linked, PlacementRules(policy, policy), number) for number in range(400))
    assert len(taken) == 4
    assert min(taken.values()) >= (100 if policy is TURNS else 60)


def _linked(pair: Pair) -> bool:
    return (pair.prefill.id == "prefill-0") == (pair.decode.id in ("decode-0", "decode-1"))


@pytest.mark.parametrize("policy", PlacementPolicy)
def test_a_worker_to_avoid_and_a_full_one_come_last(policy: PlacementPolicy):
    full = decode(2, running_rows=4)
    candidates = pairs(prefill(0), prefill(1), decode(0), full)
    query = replace(QUERY, avoided=Avoided().with_worker(candidates[0].prefill.incarnation))
    policies = PlacementRules(policy, policy)
    for number in range(6):
        pair = choose_pair(candidates, query, PrefixIndex(100), number, policies)
        assert pair is not None
        assert (pair.prefill.id, pair.decode.id) == ("prefill-1", "decode-0")


def test_an_affinity_counts_only_where_caches_do():
    last = CANDIDATES[0]
    query = replace(QUERY, affinity="0" * 16, last=last.incarnations)
    for policies, expected in ((PlacementRules(), "prefill-0"), (PlacementRules(prefill=LEAST), "prefill-2")):
        pair = choose_pair(CANDIDATES, query, PrefixIndex(100), 0, policies)
        assert pair is not None
        assert pair.prefill.id == expected
    equals = pairs(prefill(0), prefill(1), decode(0))
    query = replace(QUERY, affinity="0" * 16)
    chosen = {choose_pair(equals, query, PrefixIndex(100), number, PlacementRules(prefill=LEAST)) for number in (0, 1)}
    assert len(chosen) == 2, "equals take turns"


policies = st.builds(PlacementRules, st.sampled_from(PlacementPolicy), st.sampled_from(PlacementPolicy))


@given(policies, st.integers(0, 1000), st.sets(st.integers(0, 5)), st.integers(0, 6))
def test_any_policy_finds_a_pair_if_there_is_one(
    policies: PlacementRules, number: int, missing: set[int], num_full: int
) -> None:
    """Some pairs have no link, some decode workers no room: the pair is one of those given, and one with room."""
    decodes = [decode(each, running_rows=4 if each < num_full else 0) for each in range(2)]
    given = pairs(prefill(0), prefill(1, waiting_tokens=99), prefill(2), *decodes)
    linked = [pair for place, pair in enumerate(given) if place not in missing]
    chosen = choose_pair(linked, QUERY, PrefixIndex(100), number, policies)
    if not linked:
        assert chosen is None
    else:
        assert chosen in linked
        has_room = [pair for pair in linked if pair.decode.load.running_rows == 0]
        assert chosen in (has_room or linked)


def test_settings_name_the_policies():
    settings = RouterSettings(prefill_placement=TWO, decode_placement=LEAST)
    assert worker_limits(settings).policies == PlacementRules(TWO, LEAST)
    assert worker_limits(RouterSettings()).policies == PlacementRules()
