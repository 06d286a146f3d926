"""Three proofs against five faults: every fault is detected, and no token of it is emitted.

V3 checks digests, V1 asks prefill, V2 gets no answer and relies on the lease. Prompts, pages and bits are drawn.
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
from baton.services.decode.effects import AskCommit
from baton.transfer.base import Pull
from tests.property.machines.lease_scenarios import Event, apply_event, deliver_all_published, deliver_everything
from tests.property.machines.split_pair import Client, SplitPair
from tests.tiny_workers import PAGE_BYTES, REPEATABLE_SETTINGS, assert_idle

NAME = RequestId("r")
ID = AttemptId(NAME, 1)
PROMPTS = st.lists(st.integers(0, 1), min_size=3, max_size=7)
CHUNKS = 3
PROOF_SETTINGS = settings(REPEATABLE_SETTINGS, max_examples=60)


class ProofKind(enum.Enum):
    """Proofs that an import may rely on."""

    PINS = "v1"
    LEASE = "v2"
    DIGESTS = "v3"


def published_pair(proof: ProofKind, prompt: list[int]) -> SplitPair:
    """A handoff with all pages published, sealed, leased and not read."""
    pair = SplitPair()
    pair.build(proof is ProofKind.DIGESTS, num_host_pages=0)
    pair.clients[NAME] = Client(prompt, StopParams(4), seed=0)
    pair.start(NAME)
    for event in [Event.CHUNK] * CHUNKS + [Event.DELIVERED, Event.RENEWAL, Event.RENEWED, Event.GRANTED]:
        apply_event(pair, event)
    assert pair.pulls
    return pair


def finish_import(pair: SplitPair, proof: ProofKind) -> None:
    """Reads the remaining pages and asks for the commit; for V2 the answer is lost."""
    while pair.pulls:
        pair.end_pull(pair.pulls[0], broken=False)
    for message in [message for message in pair.messages if isinstance(message, AskCommit)]:
        pair.deliver_to_prefill(message) if proof is ProofKind.PINS else pair.drop_message(message, reached=False)
    deliver_everything(pair)


def assert_refused(pair: SplitPair, error: type[BatonError]) -> None:
    """Asserts that the attempt failed with this error and emitted no token of decode."""
    assert isinstance(pair.errors[ID], error), pair.errors
    assert pair.decode.scheduler.num_rows == 0
    assert len(pair.clients[NAME].received) <= 1
    assert not pair.num_proven_by
    assert_idle(pair.decode.cache)


@pytest.mark.parametrize("proof", ProofKind)
def test_an_intact_import_joins_by_each_proof(proof: ProofKind):
    """The faultless case, without which the tests below prove nothing."""

    @PROOF_SETTINGS
    @given(prompt=PROMPTS)
    def each(prompt: list[int]) -> None:
        pair = published_pair(proof, prompt)
        finish_import(pair, proof)
        assert pair.num_proven_by == {proof.value: 1}
        assert pair.decode.scheduler.num_rows == 1

    each()


@PROOF_SETTINGS
@given(prompt=PROMPTS, bit=st.integers(0, 8 * PAGE_BYTES - 1), last=st.booleans())
def test_a_flipped_bit(prompt: list[int], bit: int, last: bool):
    """Flips a bit anywhere in a page, at every read."""
    pair = published_pair(ProofKind.DIGESTS, prompt)

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
def test_a_torn_read_that_reports_success(prompt: list[int], num_bytes: int):
    pair = published_pair(ProofKind.DIGESTS, prompt)

    def truncate(pull: Pull) -> None:
        page = pair.decode.memory.page(pull.local_pages[0])
        rest = bytes(byte ^ 0xFF for byte in page[num_bytes:])
        page[num_bytes:] = rest

    while pair.pulls and ID not in pair.errors:
        pair.end_pull(pair.pulls[0], False, truncate)
    finish_import(pair, ProofKind.DIGESTS)
    assert_refused(pair, IntegrityFailure)


@pytest.mark.parametrize("proof", ProofKind)
def test_a_torn_read_that_reports_a_failure(proof: ProofKind):
    @PROOF_SETTINGS
    @given(prompt=PROMPTS)
    def each(prompt: list[int]) -> None:
        pair = published_pair(proof, prompt)
        pair.end_pull(pair.pulls[-1], broken=True)
        finish_import(pair, proof)
        assert_refused(pair, LinkBroken)

    each()


@pytest.mark.parametrize(
    ("proof", "error"),
    [(ProofKind.PINS, LeaseEnded), (ProofKind.LEASE, LeaseEnded), (ProofKind.DIGESTS, IntegrityFailure)],
)
def test_an_ended_lease(proof: ProofKind, error: type[BatonError]):
    """Prefill reuses the pages before they are read."""

    @PROOF_SETTINGS
    @given(prompt=PROMPTS)
    def each(prompt: list[int]) -> None:
        pair = published_pair(proof, prompt)
        apply_event(pair, Event.WAIT_LONG)
        for page in [page for pull in pair.pulls for page in pull.remote_pages]:
            assert pair.prefill.cache.pool.owner(page) in (Owner.FREE, Owner.CACHED)
            pair.prefill.memory.page(page)[:] = bytes([0xEE]) * PAGE_BYTES
        finish_import(pair, proof)
        assert_refused(pair, error)

    each()


@pytest.mark.parametrize("proof", ProofKind)
def test_a_stale_incarnation(proof: ProofKind):
    """Another process than the publisher answers the commit."""

    @PROOF_SETTINGS
    @given(prompt=PROMPTS)
    def each(prompt: list[int]) -> None:
        pair = published_pair(proof, prompt)
        apply_event(pair, Event.RESTART)
        finish_import(pair, proof)
        assert_refused(pair, WorkerLost)

    each()


@pytest.mark.parametrize("proof", ProofKind)
def test_a_stale_attempt(proof: ProofKind):
    """A newer attempt has a reservation when messages of the older one arrive."""

    @PROOF_SETTINGS
    @given(prompt=PROMPTS)
    def each(prompt: list[int]) -> None:
        pair = published_pair(proof, prompt)
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
