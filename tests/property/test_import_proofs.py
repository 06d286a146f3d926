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
from tests.property.machines.lease_scenarios import Event, apply_event, deliver_all_published, deliver_everything
from tests.property.machines.split_pair import Client, SplitPair
from tests.tiny_workers import PAGE_BYTES, REPEATABLE_SETTINGS, assert_idle

NAME = RequestId("r")
ID = AttemptId(NAME, 1)
PROMPTS = st.lists(st.integers(0, 1), min_size=3, max_size=7)
CHUNKS = 3
PROOF_SETTINGS = settings(REPEATABLE_SETTINGS, max_examples=60)


class ProofKind(enum.Enum):
    """What the import has to stand on."""

    PINS = "v1"
    LEASE = "v2"
    DIGESTS = "v3"


def announced_pair(proof: ProofKind, prompt: list[int]) -> SplitPair:
    """A handoff whose pages are all announced_pair, sealed, leased, and not read yet."""
    pair = SplitPair()
    pair.build(proof is ProofKind.DIGESTS, num_host_pages=0)
    pair.clients[NAME] = Client(prompt, StopParams(4), seed=0)
    pair.start(NAME)
    for event in [Event.CHUNK] * CHUNKS + [Event.DELIVERED, Event.RENEWAL, Event.RENEWED, Event.GRANTED]:
        apply_event(pair, event)
    assert pair.pulls
    return pair


def finish_import(pair: SplitPair, proof: ProofKind) -> None:
    """What is still to be read is read; the commit is asked for, in vain where the lease has to do."""
    while pair.pulls:
        pair.end_pull(pair.pulls[0], broken=False)
    for message in [message for message in pair.messages if isinstance(message, AskCommit)]:
        pair.deliver_to_prefill(message) if proof is ProofKind.PINS else pair.drop_message(message, reached=False)
    deliver_everything(pair)


def assert_refused(pair: SplitPair, error: type[BatonError]) -> None:
    """The attempt is over for decode, for this reason; its client has the first token, which prefill sent, at most."""
    assert isinstance(pair.errors[ID], error), pair.errors
    assert pair.decode.scheduler.num_rows == 0
    assert len(pair.clients[NAME].received) <= 1
    assert not pair.num_proven_by
    assert_idle(pair.decode.cache)


@pytest.mark.parametrize("proof", ProofKind)
def test_what_is_whole_boards_by_its_proof(proof: ProofKind):
    """Or all that follows would prove nothing."""

    @PROOF_SETTINGS
    @given(prompt=PROMPTS)
    def each(prompt: list[int]) -> None:
        pair = announced_pair(proof, prompt)
        finish_import(pair, proof)
        assert pair.num_proven_by == {proof.value: 1}
        assert pair.decode.scheduler.num_rows == 1

    each()


@PROOF_SETTINGS
@given(prompt=PROMPTS, bit=st.integers(0, 8 * PAGE_BYTES - 1), last=st.booleans())
def test_a_flipped_bit(prompt: list[int], bit: int, last: bool):
    """Anywhere in a page, as often as it is read."""
    pair = announced_pair(ProofKind.DIGESTS, prompt)

    def flip(pull: Pull) -> None:
        page = pair.decode.memory.page(pull.local_pages[-1 if last else 0])
        page[bit // 8] ^= 1 << bit % 8

    first = pair.pulls[0]
    pair.end_pull(first, False, flip)
    (again,) = [pull for pull in pair.pulls if set(pull.local_pages) <= set(first.local_pages)]
    assert len(again.local_pages) == 1
    pair.end_pull(again, False, flip)
    finish_import(pair, ProofKind.DIGESTS)
    assert_refused(pair, IntegrityFailure)


@PROOF_SETTINGS
@given(prompt=PROMPTS, num_bytes=st.integers(0, PAGE_BYTES - 1))
def test_a_read_that_stops_in_the_middle_of_a_page_and_does_not_know(prompt: list[int], num_bytes: int):
    pair = announced_pair(ProofKind.DIGESTS, prompt)

    def truncate(pull: Pull) -> None:
        page = pair.decode.memory.page(pull.local_pages[0])
        rest = bytes(byte ^ 0xFF for byte in page[num_bytes:])
        page[num_bytes:] = rest

    while pair.pulls and ID not in pair.errors:
        pair.end_pull(pair.pulls[0], False, truncate)
    finish_import(pair, ProofKind.DIGESTS)
    assert_refused(pair, IntegrityFailure)


@pytest.mark.parametrize("proof", ProofKind)
def test_a_read_that_knows_that_it_was_cut_short(proof: ProofKind):
    @PROOF_SETTINGS
    @given(prompt=PROMPTS)
    def each(prompt: list[int]) -> None:
        pair = announced_pair(proof, prompt)
        pair.end_pull(pair.pulls[-1], broken=True)
        finish_import(pair, proof)
        assert_refused(pair, LinkBroken)

    each()


@pytest.mark.parametrize(
    ("proof", "error"),
    [(ProofKind.PINS, LeaseEnded), (ProofKind.LEASE, LeaseEnded), (ProofKind.DIGESTS, IntegrityFailure)],
)
def test_an_ended_lease(proof: ProofKind, error: type[BatonError]):
    """Prefill gave the pages to others before they were read."""

    @PROOF_SETTINGS
    @given(prompt=PROMPTS)
    def each(prompt: list[int]) -> None:
        pair = announced_pair(proof, prompt)
        apply_event(pair, Event.WAIT_LONG)
        for page in [page for pull in pair.pulls for page in pull.remote_pages]:
            assert pair.prefill.cache.pool.owner(page) in (Owner.FREE, Owner.CACHED)
            pair.prefill.memory.page(page)[:] = bytes([0xEE]) * PAGE_BYTES
        finish_import(pair, proof)
        assert_refused(pair, error)

    each()


@pytest.mark.parametrize("proof", ProofKind)
def test_a_stale_incarnation(proof: ProofKind):
    """The process that answers now is not the one that announced_pair the pages."""

    @PROOF_SETTINGS
    @given(prompt=PROMPTS)
    def each(prompt: list[int]) -> None:
        pair = announced_pair(proof, prompt)
        apply_event(pair, Event.RESTART)
        finish_import(pair, proof)
        assert_refused(pair, WorkerLost)

    each()


@pytest.mark.parametrize("proof", ProofKind)
def test_a_stale_attempt(proof: ProofKind):
    """A newer attempt was reserved room; what the older one still had on its way arrives all the same."""

    @PROOF_SETTINGS
    @given(prompt=PROMPTS)
    def each(prompt: list[int]) -> None:
        pair = announced_pair(proof, prompt)
        reads = list(pair.pulls)
        pair.clients[NAME].running = False
        pair.start(NAME)
        with pytest.raises(Superseded):
            pair.decode.import_policy.reserve(ID, len(prompt), [], pair.now, 5.0)
        for pull in reads:
            pair.end_pull(pull, broken=False)
        assert pair.decode.import_policy.on_commit_reply(ID, True, pair.now) == []
        assert not pair.num_proven_by
        deliver_all_published(pair)
        assert ID not in pair.decode.scheduler.ids()

    each()
