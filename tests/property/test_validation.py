"""The three proofs against five faults: each fault is found every time, and nothing of it is ever emitted.

V3 checks digests; V1 asks prefill; V2 asks in vain and counts on the lease. Prompts, pages and bits are drawn.
"""

from __future__ import annotations

import enum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.domain.errors import BatonError, IntegrityFailure, LeaseEnded, LinkBroken, Superseded, WorkerLost
from baton.domain.ids import AttemptId, RequestId
from baton.domain.request import StopParams
from baton.kv.pages import Owner
from baton.transfer.base import Pull
from services.decode.effects import AskCommit
from tests.property.lease_story import Event, announce_all, happen, settle
from tests.property.split_pair import Client, SplitPair
from tests.worlds import PAGE_BYTES, REPRODUCIBLE, assert_idle

NAME = RequestId("r")
ID = AttemptId(NAME, 1)
PROMPTS = st.lists(st.integers(0, 1), min_size=3, max_size=7)
CHUNKS = 3
EVERY_TIME = settings(REPRODUCIBLE, max_examples=60)


class Proof(enum.Enum):
    """What the landing has to stand on."""

    PINS = "v1"
    LEASE = "v2"
    DIGESTS = "v3"


def announced(proof: Proof, prompt: list[int]) -> SplitPair:
    """A handoff whose pages are all announced, sealed, leased, and not read yet."""
    pair = SplitPair()
    pair.make(proof is Proof.DIGESTS, num_host_pages=0)
    pair.clients[NAME] = Client(prompt, StopParams(4), seed=0)
    pair.start(NAME)
    for event in [Event.CHUNK] * CHUNKS + [Event.ANNOUNCED, Event.RENEWAL, Event.RENEWED, Event.GRANTED]:
        happen(pair, event)
    assert pair.pulls
    return pair


def conclude(pair: SplitPair, proof: Proof) -> None:
    """What is still to be read is read; the commit is asked for, in vain where the lease has to do."""
    while pair.pulls:
        pair.end_read(pair.pulls[0], broken=False)
    for word in [word for word in pair.words if isinstance(word, AskCommit)]:
        pair.tell_prefill(word) if proof is Proof.PINS else pair.lose(word, reached=False)
    settle(pair)


def assert_refused(pair: SplitPair, error: type[BatonError]) -> None:
    """The attempt is over for decode, for this reason; its client has the first token, which prefill sent, at most."""
    assert isinstance(pair.errors[ID], error), pair.errors
    assert pair.decode.scheduler.num_rows == 0
    assert len(pair.clients[NAME].received) <= 1
    assert not pair.num_proven_by
    assert_idle(pair.decode.cache)


@pytest.mark.parametrize("proof", Proof)
def test_what_is_whole_boards_by_its_proof(proof: Proof):
    """Or all that follows would prove nothing."""

    @EVERY_TIME
    @given(prompt=PROMPTS)
    def each(prompt: list[int]) -> None:
        pair = announced(proof, prompt)
        conclude(pair, proof)
        assert pair.num_proven_by == {proof.value: 1}
        assert pair.decode.scheduler.num_rows == 1

    each()


@EVERY_TIME
@given(prompt=PROMPTS, bit=st.integers(0, 8 * PAGE_BYTES - 1), last=st.booleans())
def test_a_flipped_bit(prompt: list[int], bit: int, last: bool):
    """Anywhere in a page, as often as it is read."""
    pair = announced(Proof.DIGESTS, prompt)

    def flip(pull: Pull) -> None:
        page = pair.decode.memory.page(pull.local_pages[-1 if last else 0])
        page[bit // 8] ^= 1 << bit % 8

    first = pair.pulls[0]
    pair.end_read(first, False, flip)
    (again,) = [pull for pull in pair.pulls if set(pull.local_pages) <= set(first.local_pages)]
    assert len(again.local_pages) == 1
    pair.end_read(again, False, flip)
    conclude(pair, Proof.DIGESTS)
    assert_refused(pair, IntegrityFailure)


@EVERY_TIME
@given(prompt=PROMPTS, num_bytes=st.integers(0, PAGE_BYTES - 1))
def test_a_read_that_stops_in_the_middle_of_a_page_and_does_not_know(prompt: list[int], num_bytes: int):
    pair = announced(Proof.DIGESTS, prompt)

    def truncate(pull: Pull) -> None:
        page = pair.decode.memory.page(pull.local_pages[0])
        rest = bytes(byte ^ 0xFF for byte in page[num_bytes:])
        page[num_bytes:] = rest

    while pair.pulls and ID not in pair.errors:
        pair.end_read(pair.pulls[0], False, truncate)
    conclude(pair, Proof.DIGESTS)
    assert_refused(pair, IntegrityFailure)


@pytest.mark.parametrize("proof", Proof)
def test_a_read_that_knows_that_it_was_cut_short(proof: Proof):
    @EVERY_TIME
    @given(prompt=PROMPTS)
    def each(prompt: list[int]) -> None:
        pair = announced(proof, prompt)
        pair.end_read(pair.pulls[-1], broken=True)
        conclude(pair, proof)
        assert_refused(pair, LinkBroken)

    each()


@pytest.mark.parametrize(
    ("proof", "error"),
    [(Proof.PINS, LeaseEnded), (Proof.LEASE, LeaseEnded), (Proof.DIGESTS, IntegrityFailure)],
)
def test_an_ended_lease(proof: Proof, error: type[BatonError]):
    """Prefill gave the pages to others before they were read."""

    @EVERY_TIME
    @given(prompt=PROMPTS)
    def each(prompt: list[int]) -> None:
        pair = announced(proof, prompt)
        happen(pair, Event.WAIT_LONG)
        for page in [page for pull in pair.pulls for page in pull.remote_pages]:
            assert pair.prefill.cache.pool.owner(page) in (Owner.FREE, Owner.CACHED)
            pair.prefill.memory.page(page)[:] = bytes([0xEE]) * PAGE_BYTES
        conclude(pair, proof)
        assert_refused(pair, error)

    each()


@pytest.mark.parametrize("proof", Proof)
def test_a_stale_incarnation(proof: Proof):
    """The process that answers now is not the one that announced the pages."""

    @EVERY_TIME
    @given(prompt=PROMPTS)
    def each(prompt: list[int]) -> None:
        pair = announced(proof, prompt)
        happen(pair, Event.RESTART)
        conclude(pair, proof)
        assert_refused(pair, WorkerLost)

    each()


@pytest.mark.parametrize("proof", Proof)
def test_a_stale_attempt(proof: Proof):
    """A newer attempt was promised room; what the older one still had on its way arrives all the same."""

    @EVERY_TIME
    @given(prompt=PROMPTS)
    def each(prompt: list[int]) -> None:
        pair = announced(proof, prompt)
        reads = list(pair.pulls)
        pair.clients[NAME].running = False
        pair.start(NAME)
        with pytest.raises(Superseded):
            pair.decode.arrivals.promise(ID, len(prompt), [], pair.now, 5.0)
        for pull in reads:
            pair.end_read(pull, broken=False)
        assert pair.decode.arrivals.commit_answer(ID, True, pair.now) == []
        assert not pair.num_proven_by
        announce_all(pair)
        assert ID not in pair.decode.scheduler.ids()

    each()
