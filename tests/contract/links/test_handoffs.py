"""What an importer may ask an exporter: one suite by calls, and in sessions over memory, gRPC and sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from baton.domain.errors import Cancelled, InvalidRequest, LinkBroken, Superseded, WorkerLost
from baton.domain.fingerprint import FingerprintPart
from baton.domain.handoff import PublishedChunk, Suspect
from baton.domain.ids import AttemptId, Incarnation, PageId, RequestId, WorkerId
from baton.engine.handoff.export_commands import CommitExport, OpenExport, ReleaseExport, RenewalAnswer, RenewLeases
from baton.engine.handoff.import_commands import (
    CommitReplied,
    ExportAnswer,
    LeasesRenewed,
    QuarantineArrived,
    VerdictArrived,
)
from baton.engine.handoff.import_effects import AskExport
from baton.engine.step_metrics import monotonic_s
from baton.services.decode.commands import SealArrived, SourceLost
from tests.contract.links.link_rig import FINGERPRINT, KEY, ONE, TWO, WAIT_S, WAYS, LinkRig, chunk, link_rig, seal


@pytest.fixture(params=WAYS)
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[LinkRig]:
    async with link_rig(request.param) as made:
        yield made


async def test_a_watch_brings_all_events_in_order(rig: LinkRig):
    rig.publish(ONE, chunk(ONE, 0))
    watch = rig.watch(ONE)
    await rig.inbox.until(PublishedChunk)
    rig.publish(ONE, chunk(ONE, 2), seal(ONE))
    async with asyncio.timeout(WAIT_S):
        await watch
    assert rig.inbox.of(PublishedChunk) == [chunk(ONE, 0), chunk(ONE, 2)], "from the first, each once"
    (sealed,) = rig.inbox.of(SealArrived)
    assert (sealed.id, sealed.seal.first_token.token, sealed.seal.num_pages) == (ONE, 7, 4)
    assert len(rig.inbox.commands) == 3


async def test_watches_of_several_handoffs_are_apart(rig: LinkRig):
    rig.watch(ONE)
    rig.watch(TWO)
    rig.publish(TWO, chunk(TWO, 0))
    assert await rig.inbox.until(PublishedChunk) == [chunk(TWO, 0)]
    rig.publish(ONE, chunk(ONE, 0), seal(ONE))
    assert (await rig.inbox.until(SealArrived))[0].id == ONE


async def test_an_end_at_the_source_is_the_importers_loss(rig: LinkRig):
    rig.watch(ONE)
    rig.publish(ONE, chunk(ONE, 0))
    await rig.inbox.until(PublishedChunk)
    rig.handoffs.end(ONE)
    (lost,) = await rig.inbox.until(SourceLost)
    assert isinstance(lost.error, Cancelled)


async def test_an_error_has_its_class_at_the_importer(rig: LinkRig):
    rig.watch(AttemptId(RequestId("one"), 0))
    (lost,) = await rig.inbox.until(SourceLost)
    assert isinstance(lost.error, InvalidRequest)


async def test_a_watch_that_is_not_wanted_ends_at_the_source(rig: LinkRig):
    watch = rig.watch(ONE)
    rig.publish(ONE, chunk(ONE, 0))
    await rig.inbox.until(PublishedChunk)
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    assert await rig.ended_watches.until(AttemptId) == [ONE]
    rig.publish(ONE, chunk(ONE, 2))
    rig.watch(TWO)
    rig.publish(TWO, chunk(TWO, 0))
    assert await rig.inbox.until(PublishedChunk, 2) == [chunk(ONE, 0), chunk(TWO, 0)]


@pytest.mark.parametrize("valid", [True, False])
async def test_a_commit_has_the_engines_answer(rig: LinkRig, valid: bool):
    rig.engine.valid = valid
    await watched(rig)
    rig.client.commit(ONE, wants_reply=True)
    assert await rig.inbox.until(CommitReplied) == [CommitReplied(ONE, valid)]
    assert [command.id for command in rig.engine.of(CommitExport)] == [ONE]


async def test_a_renewal_names_all_open_handoffs_in_one_message(rig: LinkRig):
    await watched(rig, ONE)
    await watched(rig, TWO)
    rig.engine.renewal = RenewalAnswer((TWO,), (KEY,), 4)
    began = monotonic_s()
    rig.client._start_renewals()
    (renewed,) = await rig.inbox.until(LeasesRenewed)
    assert renewed.ids == (ONE,), "the other has ended"
    assert began + 3.0 <= renewed.lease_ends_at <= monotonic_s() + 3.0, "from the send"
    assert await rig.inbox.until(QuarantineArrived) == [QuarantineArrived(WorkerId("prefill-0"), (KEY,))]
    (asked,) = rig.engine.of(RenewLeases)
    assert set(asked.ids) == {ONE, TWO}
    assert len(rig.client) == 1


async def test_an_abort_releases_the_export(rig: LinkRig):
    await watched(rig)
    rig.client.abort(ONE)
    (released,) = await rig.engine.until(ReleaseExport)
    assert (released.id, released.suspects) == (ONE, ())


async def test_suspects_get_a_verdict(rig: LinkRig):
    await watched(rig)
    rig.client.ask_verdict(ONE, [Suspect(0, PageId(3), 9)], "damaged")
    assert await rig.inbox.until(VerdictArrived) == [VerdictArrived(ONE, None, "damaged")]
    (released,) = rig.engine.of(ReleaseExport)
    assert released.suspects == (Suspect(0, PageId(3), 9),)


@pytest.mark.parametrize("answer", [chunk(ONE, 0), Superseded("seen", ONE)])
async def test_an_export_is_given_or_refused(rig: LinkRig, answer: PublishedChunk | Superseded):
    rig.engine.given = answer
    rig.exports.perform(AskExport(ONE, WorkerId("prefill-0"), Incarnation(77), (KEY,), 3))
    (given,) = await rig.inbox.until(ExportAnswer)
    assert (given.answer == answer) if isinstance(answer, PublishedChunk) else isinstance(given.answer, Superseded)
    (asked,) = rig.engine.of(OpenExport)
    assert (asked.keys, asked.first_page) == ((KEY,), 3)
    assert len(rig.exports) == isinstance(answer, PublishedChunk), "its pins are renewed"


async def test_a_hello_gives_the_memory_or_names_what_differs(rig: LinkRig):
    assert (await rig.hello(*FINGERPRINT.parts)).source.num_pages == 8
    assert "root" in (await rig.hello(FingerprintPart("root", "2"))).refused.message


async def test_a_source_that_is_gone_ends_the_import(rig: LinkRig):
    rig.watch(ONE)
    rig.publish(ONE, chunk(ONE, 0))
    await rig.inbox.until(PublishedChunk)
    await rig.stop()
    (lost,) = await rig.inbox.until(SourceLost)
    assert isinstance(lost.error, WorkerLost)
    rig.client.commit(ONE, wants_reply=True)
    assert await rig.inbox.until(CommitReplied) == [CommitReplied(ONE, None)], "unknown, not invalid"


@pytest.mark.parametrize("way", WAYS)
async def test_another_incarnation_is_refused(way: str):
    async with link_rig(way, Incarnation(78)) as rig:
        rig.publish(ONE, chunk(ONE, 0))
        rig.watch(ONE)
        (lost,) = await rig.inbox.until(SourceLost)
        assert isinstance(lost.error, WorkerLost | LinkBroken)
        assert rig.inbox.of(PublishedChunk) == []


async def watched(rig: LinkRig, id: AttemptId = ONE) -> None:
    """An import whose first chunk has come."""
    num = len(rig.inbox.of(PublishedChunk))
    rig.watch(id)
    rig.publish(id, chunk(id, 0))
    await rig.inbox.until(PublishedChunk, num + 1)
