"""A link session outlives its connections, and ends what is asked in it when it is lost. Over every wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import cast

import pytest

from baton.domain.errors import LinkBroken, WorkerLost
from baton.domain.handoff import PublishedChunk
from baton.domain.worker import SESSION_LINKS
from baton.engine.handoff.export_commands import CommitExport, ReleaseExport, RenewalAnswer, RenewLeases
from baton.engine.handoff.import_commands import CommitReplied, LeasesRenewed
from baton.engine.step_metrics import monotonic_s
from baton.rpc.codec import encode_id
from baton.rpc.gen import handoff_pb2
from baton.rpc.gen import session_pb2 as pb
from baton.services.decode.commands import SealArrived, SourceLost
from baton.session.session import MessageSession
from baton.worker.handoff.handoff_handlers import HandoffHandlers
from baton.worker.handoff.link_session import LinkSession
from tests.contract.links.link_rig import LIMITS, ONE, TWO, WAIT_S, LinkRig, chunk, link_rig, seal
from tests.contract.links.test_handoffs import watched
from tests.unit.worker.handoff.test_replaced_source import prefill_record


@pytest.fixture(params=["session-memory", "session-grpc", "session-socket"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[LinkRig]:
    async with link_rig(request.param) as made:
        yield made


@pytest.fixture
async def near() -> AsyncIterator[LinkRig]:
    async with link_rig("session-memory") as made:
        yield made


def served_session(rig: LinkRig) -> MessageSession:
    """The exporter's end."""
    (session,) = rig.listener._served
    return session


async def test_a_reset_ends_no_import_and_repeats_no_event(rig: LinkRig):
    await watched(rig)
    for first_page in (2, 4, 6):
        rig.reset()
        rig.publish(ONE, chunk(ONE, first_page))
    await rig.inbox.until(PublishedChunk, 4)
    rig.reset()
    rig.publish(ONE, seal(ONE))
    await rig.inbox.until(SealArrived)
    assert rig.inbox.of(PublishedChunk) == [chunk(ONE, first_page) for first_page in (0, 2, 4, 6)]
    assert rig.inbox.of(SourceLost) == []
    assert len(rig.served) > 1, "it was connected anew"


async def test_a_commit_in_a_reset_is_made_once_and_answered(rig: LinkRig):
    await watched(rig)
    rig.engine.holds_commits = True
    rig.client.commit(ONE, wants_reply=True)
    (commit,) = await rig.engine.until(CommitExport)
    rig.reset()
    commit.reply.send(True)
    assert await rig.inbox.until(CommitReplied) == [CommitReplied(ONE, True)]
    assert len(rig.engine.of(CommitExport)) == 1


async def test_a_renewal_in_a_break_counts_from_its_send(rig: LinkRig):
    await watched(rig)
    rig.engine.holds_renewals = True
    rig.client._start_renewals()
    (asked,) = await rig.engine.until(RenewLeases)
    asked_by = monotonic_s()
    rig.reset()
    asked.reply.send(RenewalAnswer(()))
    (renewed,) = await rig.inbox.until(LeasesRenewed)
    assert renewed.lease_ends_at <= asked_by + 3.0, "neither from the reply nor from a frame that was sent again"
    assert len(rig.engine.of(RenewLeases)) == 1


async def test_a_lost_session_ends_watches_and_releases_no_pin(near: LinkRig):
    assert near.sessions is not None
    near.sessions._limits = replace(LIMITS, resume_s=0.8)
    await watched(near)
    near.listener.close()
    (lost,) = await near.inbox.until(SourceLost)
    assert isinstance(lost.error, WorkerLost)
    assert await near.ended_watches.until(type(ONE)) == [ONE]
    assert near.engine.of(ReleaseExport) == [], "its lease does"


async def test_a_session_that_was_lost_is_dialled_anew(near: LinkRig):
    await watched(near)
    served_session(near).lose("a test")
    near.reset()
    await near.inbox.until(SourceLost)
    near.client.commit(ONE, wants_reply=True)
    assert await near.inbox.until(CommitReplied) == [CommitReplied(ONE, True)], "by its id, in the next session"


async def test_an_importer_that_leaves_ends_its_watches_at_the_source(near: LinkRig):
    await watched(near)
    assert near.sessions is not None
    await near.sessions.close()
    assert await near.ended_watches.until(type(ONE)) == [ONE]
    assert isinstance((await near.inbox.until(SourceLost))[0].error, WorkerLost)


async def test_the_chunks_of_one_step_share_a_frame(near: LinkRig):
    await watched(near, ONE)
    await watched(near, TWO)
    before = served_session(near).outbox.last_seq
    near.publish(ONE, chunk(ONE, 2))
    near.publish(TWO, chunk(TWO, 2))
    await near.inbox.until(PublishedChunk, 4)
    assert served_session(near).outbox.last_seq == before + 1


async def test_an_abort_follows_the_watch_that_it_ends(near: LinkRig):
    """A call may overtake another one; what is posted in a session may not."""
    near.watch(ONE)
    near.tasks.append(asyncio.create_task(_abort(near)))
    await near.engine.until(ReleaseExport)
    assert near.order == ["watch", "release"]


async def _abort(rig: LinkRig) -> None:
    rig.client.abort(ONE)


async def test_a_reply_of_another_kind_is_damage(near: LinkRig):
    session = cast(LinkSession, near.stub(near.link))
    stream = session.open(pb.LinkRequest(commit=handoff_pb2.CommitRequest()))
    session.apply([pb.StreamMessage(stream=1, link_reply=pb.LinkReply(renew=handoff_pb2.RenewReply()))])
    with pytest.raises(LinkBroken, match="renew"):
        await stream.read()


async def test_a_bug_in_a_handler_is_a_lost_worker(near: LinkRig, monkeypatch: pytest.MonkeyPatch):
    async def fail(self: HandoffHandlers, request: handoff_pb2.RenewRequest) -> handoff_pb2.RenewReply:
        raise ZeroDivisionError

    monkeypatch.setattr(HandoffHandlers, "renew", fail)
    with pytest.raises(WorkerLost, match="ZeroDivisionError"):
        await near.stub(near.link).Renew(handoff_pb2.RenewRequest(), timeout=WAIT_S)


async def test_a_reply_that_does_not_come_is_a_lost_worker(near: LinkRig):
    near.engine.holds_commits = True
    with pytest.raises(WorkerLost, match="in time"):
        await near.stub(near.link).Commit(handoff_pb2.CommitRequest(id=encode_id(ONE)), timeout=0.05)
    assert len(near.stub(near.link)._streams) == 0


async def test_a_worker_without_the_capability_is_asked_by_calls(near: LinkRig):
    old = prefill_record(1)
    assert not near.stubs.in_session(old)
    assert near.stubs.in_session(replace(old, capabilities=(SESSION_LINKS,)))
