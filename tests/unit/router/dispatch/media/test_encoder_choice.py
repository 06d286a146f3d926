"""Rendezvous hashing: all routers agree, a worker that leaves moves its own images only, a long queue is avoided."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.ids import Incarnation, WorkerId
from baton.domain.worker import EMBEDDINGS, NO_TOWER, WorkerLoad, WorkerRecord, WorkerRole
from baton.services.router.dispatch.media.encoder_choice import (
    MAX_EXTRA_ROWS,
    has_tower,
    makes_embeddings,
    rank_encoders,
)


def encoder(number: int, waiting: int = 0) -> WorkerRecord:
    id, load = WorkerId(f"encode-{number}"), WorkerLoad(waiting_tokens=waiting)
    return WorkerRecord(
        id, WorkerRole.ENCODE, Incarnation(number), "host:1", "m", "", 0, 1, 1, load=load, processor="p", vision="v"
    )


def prefill(*capabilities: str, vision: str = "v", processor: str = "p") -> WorkerRecord:
    return WorkerRecord(
        WorkerId("prefill-0"), WorkerRole.PREFILL, Incarnation(99), "host:2", "m", "f", 16, 1, 1,
        capabilities=capabilities, processor=processor, vision=vision,
    )  # fmt: skip


identities = st.binary(min_size=16, max_size=16)


@given(st.permutations(range(6)), identities)
def test_the_order_of_records_does_not_matter(numbers: list[int], identity: bytes):
    expected = rank_encoders(map(encoder, range(6)), identity)
    assert rank_encoders(map(encoder, numbers), identity) == expected


@given(st.integers(0, 5), identities)
def test_a_worker_that_leaves_moves_its_own_images_only(gone: int, identity: bytes):
    before = rank_encoders(map(encoder, range(6)), identity)
    after = rank_encoders(map(encoder, [number for number in range(6) if number != gone]), identity)
    assert after == [one for one in before if one.id != f"encode-{gone}"]


def test_images_are_spread():
    firsts = Counter(rank_encoders(map(encoder, range(4)), n.to_bytes(16))[0].id for n in range(2000))
    assert len(firsts) == 4
    assert min(firsts.values()) > 400


@given(identities, st.integers(0, 100_000))
def test_only_a_queue_that_is_much_longer_is_avoided(identity: bytes, least: int):
    best, other = rank_encoders(map(encoder, range(2)), identity)
    numbers = int(best.id[-1]), int(other.id[-1])
    for extra, first in ((MAX_EXTRA_ROWS, best), (MAX_EXTRA_ROWS + 1, other)):
        found = rank_encoders([encoder(numbers[0], least + extra), encoder(numbers[1], least)], identity)
        assert found[0].id == first.id


@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        (prefill(EMBEDDINGS), True),
        (prefill(), False),
        (prefill(EMBEDDINGS, vision="w"), False),
        (prefill(EMBEDDINGS, processor="q"), False),
    ],
)
def test_only_equal_fingerprints_exchange_embeddings(worker: WorkerRecord, expected: bool):
    assert makes_embeddings(encoder(0), worker) is expected
    assert not makes_embeddings(prefill(EMBEDDINGS), worker)


def test_a_worker_without_a_tower_says_so():
    assert has_tower(prefill())
    assert has_tower(prefill(EMBEDDINGS))
    assert not has_tower(prefill(EMBEDDINGS, NO_TOWER))
