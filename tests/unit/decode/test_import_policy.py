"""Rules of the import policy beyond single imports."""

from __future__ import annotations

import pytest

from baton.domain.errors import BatonError, LeaseEnded, LinkBroken, Superseded, WorkerLost
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import AttemptId, PageId, RequestId, WorkerId
from baton.domain.request import FinishReason, OutputToken, SampledToken, StopParams
from baton.engine.handoff.import_effects import AbortHandoff, ConfirmCommit
from baton.engine.messages import Fail
from baton.kv.keys import page_keys
from baton.services.decode.effects import AskCommit, DecodeEffect, ReportImported
from baton.services.decode.kv_import import ProofKind, Reserved, SealInfo
from baton.transfer.base import Pull, PullEvent, PullOutcome
from tests.tiny_workers import PAGE_SIZE, TinyDecode, assert_idle, engine_request, tiny_decode

SOURCE = WorkerId("prefill-0")
REQUEST = engine_request("r", [0, 1, 1], stop=StopParams(max_tokens=4))
ID = REQUEST.id


def chunk(digests: tuple[int, ...] | None) -> PublishedChunk:
    return PublishedChunk(ID, 0, (PageId(5), PageId(6)), digests)


def claimed(digests: bool) -> TinyDecode:
    world = tiny_decode(digests, num_host_pages=4)
    answer, _ = world.import_policy.reserve(ID, 3, page_keys(REQUEST.tokens, PAGE_SIZE, ""), 0.0, 5.0)
    assert isinstance(answer, Reserved)
    assert world.import_policy.claim(answer.id, REQUEST, SOURCE, 9.0) == []
    return world


def read(world: TinyDecode, digests: bool) -> list[DecodeEffect]:
    """Publishes, seals and reads the whole prompt."""
    (start,) = world.import_policy.on_chunk(chunk((1, 2) if digests else None), 1.0)
    assert isinstance(start, Pull)
    assert world.import_policy.on_seal(ID, SealInfo(SampledToken(1), None, 2), 1.0) == []
    return world.import_policy.on_pull_event(PullEvent(start, PullOutcome.DONE, 64, 0.1), 2.0)


def error_of(effects: list[DecodeEffect]) -> BatonError:
    (failure,) = [effect for effect in effects if isinstance(effect, Fail)]
    return failure.error


def test_matching_digests_validate_an_import():
    world = claimed(digests=True)
    confirm, report = read(world, digests=True)
    assert confirm == ConfirmCommit(ID, SOURCE)
    assert isinstance(report, ReportImported)
    assert report.times.pages == 2
    assert report.first_token == OutputToken(0, 1)
    assert world.scheduler.num_rows == 1


def test_without_digests_a_commit_asks_prefill():
    world = claimed(digests=False)
    assert read(world, digests=False) == [AskCommit(ID, SOURCE)]
    assert world.scheduler.num_rows == 0
    (report,) = world.import_policy.on_commit_reply(ID, True, 3.0)
    assert isinstance(report, ReportImported)
    assert world.import_policy.on_commit_reply(ID, True, 3.0) == []
    assert world.scheduler.num_rows == 1


def test_pins_that_were_not_held_fail_the_import():
    world = claimed(digests=False)
    read(world, digests=False)
    assert isinstance(error_of(world.import_policy.on_commit_reply(ID, False, 3.0)), LeaseEnded)
    assert_idle(world.cache)
    assert len(world.cache) == 0, "pages that may be wrong must not be found again"


@pytest.mark.parametrize(("lease_ends_at", "proof"), [(None, None), (2.0, None), (2.5, ProofKind.LEASE)])
def test_a_lease_replaces_the_answer_of_an_unreachable_prefill(lease_ends_at: float | None, proof: ProofKind | None):
    """A granted lease replaces the answer, if every read ended within it."""
    world = claimed(digests=False)
    read(world, digests=False)
    if lease_ends_at is not None:
        world.import_policy.on_leases_renewed([ID], lease_ends_at)
    effects = world.import_policy.on_commit_reply(ID, None, 9.0)
    assert [effect.times.proof for effect in effects if isinstance(effect, ReportImported)] == (
        [proof.value] if proof else []
    )
    assert world.scheduler.num_rows == (1 if proof else 0)
    if proof is None:
        assert isinstance(error_of(effects), LeaseEnded)


def test_a_negative_answer_outweighs_a_lease():
    world = claimed(digests=False)
    read(world, digests=False)
    world.import_policy.on_leases_renewed([ID], 9.0)
    assert isinstance(error_of(world.import_policy.on_commit_reply(ID, False, 3.0)), LeaseEnded)
    assert world.scheduler.num_rows == 0


def test_a_restarted_source_fails_unread_imports():
    world = claimed(digests=True)
    world.import_policy.on_chunk(PublishedChunk(ID, 0, (PageId(5),), (1,)), 1.0)
    assert world.import_policy.on_source_replaced(WorkerId("prefill-1")) == []
    effects = world.import_policy.on_source_replaced(SOURCE)
    assert AbortHandoff(ID, SOURCE) in effects
    assert isinstance(error_of(effects), WorkerLost)
    world = claimed(digests=False)
    read(world, digests=False)
    assert world.import_policy.on_source_replaced(SOURCE) == [], "everything was read from the process that is gone"


def test_chunks_without_digests_are_refused_where_digests_are_on():
    world = claimed(digests=True)
    effects = world.import_policy.on_chunk(chunk(None), 1.0)
    assert AbortHandoff(ID, SOURCE) in effects
    assert isinstance(error_of(effects), LinkBroken)


def test_a_seal_of_a_finished_sequence_ends_the_attempt():
    world = claimed(digests=True)
    effects = world.import_policy.on_seal(ID, SealInfo(SampledToken(1), FinishReason.STOP, 2), 1.0)
    assert effects == [AbortHandoff(ID, SOURCE)]
    assert_idle(world.cache)


def test_a_lost_source_matters_until_the_seal():
    world = claimed(digests=True)
    assert isinstance(error_of(world.import_policy.on_source_lost(ID, WorkerLost("gone"))), WorkerLost)
    world = claimed(digests=True)
    (start,) = world.import_policy.on_chunk(chunk((1, 2)), 1.0)
    assert isinstance(start, Pull)
    world.import_policy.on_seal(ID, SealInfo(SampledToken(1), None, 2), 1.0)
    assert world.import_policy.on_source_lost(ID, WorkerLost("gone")) == []
    assert len(world.import_policy.on_pull_event(PullEvent(start, PullOutcome.DONE, 64, 0.1), 2.0)) == 2


def test_a_decoding_attempt_gets_no_second_reservation():
    world = claimed(digests=True)
    read(world, digests=True)
    with pytest.raises(Superseded, match="decoding here already"):
        world.import_policy.reserve(ID, 3, [], 3.0, 5.0)


def test_a_newer_attempt_ends_the_row_of_the_older():
    world = claimed(digests=True)
    read(world, digests=True)
    answer, effects = world.import_policy.reserve(AttemptId(ID.request_id, 2), 4, [], 3.0, 5.0)
    assert isinstance(answer, Reserved)
    assert world.scheduler.num_rows == 0
    (failed,) = effects
    assert isinstance(failed, Fail)
    assert isinstance(failed.error, Superseded)
    assert (failed.id, failed.error.seen) == (ID, AttemptId(ID.request_id, 2))


def test_a_lower_ballot_ends_nothing_here_and_learns_the_newest():
    world = claimed(digests=True)
    newer = AttemptId(ID.request_id, 1, owner_tag=7)
    world.import_policy.reserve(newer, 4, [], 3.0, 5.0)
    for late in (ID, AttemptId(ID.request_id, 9, owner_tag=6)):
        with pytest.raises(Superseded) as refused:
            world.import_policy.reserve(late, 4, [], 3.0, 5.0)
        assert refused.value.seen == newer
    assert world.imports.get(newer) is not None


@pytest.mark.parametrize("id", [ID, AttemptId(RequestId("nobody"), 1)])
def test_an_abort_is_legal_at_any_time(id: AttemptId):
    world = claimed(digests=True)
    world.import_policy.abort(id)
    assert world.import_policy.abort(id) == []
    assert world.import_policy.on_chunk(PublishedChunk(ID, 0, (PageId(5),), (1,)), 1.0) == [] or id != ID
