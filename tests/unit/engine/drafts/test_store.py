"""The store of earlier outputs: salts are isolated, memory is bounded, and the oldest goes first."""

from __future__ import annotations

import random

import pytest

from baton.domain.ids import AttemptId, RequestId
from baton.engine.drafts.base import NO_PROPOSAL, Proposal
from baton.engine.drafts.native_suffix import new_suffix_index
from baton.engine.drafts.ngram import STORED_GRADES, NGramDrafter
from baton.engine.drafts.store import GENERATION_BYTES, MAX_OUTPUT_TOKENS, SuffixStore
from baton.engine.drafts.suffix_automaton import BYTES_PER_TOKEN, SuffixAutomaton

A, B, C = (AttemptId(RequestId(name), 1) for name in "abc")
OUTPUT = [5, 6, 7, 8, 9, 10]
NEW_INDEX = [SuffixAutomaton, new_suffix_index]


@pytest.mark.parametrize("new_index", NEW_INDEX)
def test_an_output_is_found_under_its_own_salt_only(new_index):
    store = SuffixStore(1 << 20, new_index)
    store.add("one", OUTPUT)
    store.add("two", [5, 6, 7, 1])
    assert store.continuation("one", [0, 5, 6, 7], 3, 8) == ((8, 9, 10), 3)
    assert store.continuation("two", [0, 5, 6, 7], 3, 8) == ((1,), 3)
    for salt in ("", "on", "one ", "three"):
        assert store.continuation(salt, [5, 6, 7], 3, 8) == ((), 0)
    assert store.continuation("one", [5, 6, 7], 4, 8) == ((), 0), "too short"
    store.add("one", [])
    store.add("none", [])
    assert len(store._salts) == 2


@pytest.mark.parametrize("new_index", NEW_INDEX)
def test_memory_is_bounded_and_the_salt_used_last_stays(new_index):
    """Whatever comes: short outputs of ever new salts, long ones of few."""
    rng, max_bytes = random.Random(3), 60_000
    store = SuffixStore(max_bytes, new_index)
    for turn in range(400):
        salt = str(rng.choice([turn, 0, 1]))
        store.add(salt, [rng.randrange(50) for _ in range(rng.choice([1, 9, 90]))])
        store.continuation("kept", [1, 2, 3, 4], 3, 4)
        if turn % 20 == 0:
            store.add("kept", [1, 2, 3, 4, 5 + turn])
        generations = [each for found in store._salts.values() for each in found]
        assert store.num_bytes == sum(GENERATION_BYTES + each.index.num_bytes for each in generations) <= max_bytes
        assert all(store._salts.values())
    assert store.continuation("kept", [1, 2, 3, 4], 4, 1) == ((385,), 4), "its newest output"


def test_the_oldest_outputs_of_one_salt_go_first():
    store = SuffixStore(4 * (GENERATION_BYTES + 100 * BYTES_PER_TOKEN), SuffixAutomaton)
    for first in range(0, 3000, 10):
        store.add("s", range(first, first + 10))
    assert store.continuation("s", range(2990, 2995), 5, 2)[0] == (2995, 2996)
    assert store.continuation("s", range(0, 5), 5, 2)[0] == ()
    assert 2 <= len(store._salts["s"]) <= 4


def test_an_output_that_exceeds_all_is_not_kept():
    store = SuffixStore(2000, SuffixAutomaton)
    store.add("s", range(MAX_OUTPUT_TOKENS + 10))
    assert (store.num_bytes, len(store._salts)) == (0, 0)
    large = SuffixStore(1 << 24, SuffixAutomaton)
    large.add("s", range(MAX_OUTPUT_TOKENS + 10))
    assert large.continuation("s", [MAX_OUTPUT_TOKENS - 2, MAX_OUTPUT_TOKENS - 1], 1, 5) == ((), 2), "cut there"


def drafter(store: SuffixStore | None) -> NGramDrafter:
    return NGramDrafter(store=store)


def run(drafter: NGramDrafter, id: AttemptId, prompt: list[int], output: list[int], salt: str) -> None:
    drafter.begin(id, [*prompt, output[0]], salt)
    drafter.accepted(id, output[1:])
    drafter.end(id)


def test_a_later_request_of_the_salt_drafts_what_an_earlier_one_said():
    """From its first token on: the end of the prompt is stored with the output."""
    store = SuffixStore(1 << 20, SuffixAutomaton)
    drafts = drafter(store)
    run(drafts, A, [1, 2, 3], OUTPUT, "tenant")
    drafts.begin(B, [70, 1, 2, 3, 5], "tenant")
    assert drafts.propose(B, 4) == Proposal((6, 7, 8, 9), STORED_GRADES + 4)
    drafts.begin(C, [70, 1, 2, 3, 5], "another tenant")
    assert drafts.propose(C, 4) == NO_PROPOSAL
    drafts.accepted(B, [6, 7, 8])
    assert drafts.propose(B, 4).tokens == (9, 10)


def test_the_longer_match_counts():
    store = SuffixStore(1 << 20, SuffixAutomaton)
    store.add("", [2, 3, 4, 99])
    drafts = drafter(store)
    drafts.begin(A, [1, 2, 3, 4, 5, 0, 1, 2, 3, 4])
    assert drafts.propose(A, 1) == Proposal((5,), 4)
    drafts.begin(B, [8, 2, 3, 4, 5, 0, 1, 2, 3, 4])
    assert drafts.propose(B, 1) == Proposal((5,), 3), "its own words, of two equal ones"


def test_nothing_is_kept_without_a_store():
    drafts = drafter(None)
    run(drafts, A, [1, 2, 3], OUTPUT, "")
    drafts.begin(B, [70, 1, 2, 3, 5])
    assert drafts.propose(B, 4) == NO_PROPOSAL
    assert not drafts._indexes[B].output[6:]
