"""Images by way of encode workers: encoded once for all prefill workers, and elsewhere when one fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from baton.domain.errors import BatonError, Draining, InvalidRequest, NoWorkers, Overloaded, WorkerLost
from baton.domain.ids import Incarnation
from baton.domain.worker import CAPABILITIES, EMBEDDINGS, NO_TOWER, LinkRecord, WorkerRecord, WorkerStatus
from baton.rpc.gen import prefill_pb2
from baton.services.router.dispatch.media import uploader
from baton.services.router.dispatch.media.encoder_choice import rank_encoders
from tests.mock_workers import MockPrefill
from tests.mocks.encode import MockEncode
from tests.service.dispatch.dispatch_world import World, scripted, sequence, tokens
from tests.service.dispatch.media.vision_world import BLUE, PROCESSOR, RED, announce, image, seen, vision

VISION = "v" * 32


@dataclass
class EncoderWorld:
    """`encoders`: the first is the best one for `RED`."""

    base: World
    encoders: list[MockEncode]

    async def announce(self) -> None:
        for encoder in self.encoders:
            await self.base.cluster.registry.announce(encoder.record())
            for prefill in self.base.cluster.prefills:
                prefill.media.sources[encoder.incarnation] = encoder.media
        await announce(self.base)

    async def ask(self, name: str, *data: bytes, salt: str = "") -> None:
        assert tokens(await self.base.generate(seen(name, *data, salt=salt))) == scripted(5)

    @property
    def prefill(self) -> MockPrefill:
        return self.base.prefill

    def bytes_at_prefill(self) -> int:
        """Uploads of files to prefill workers."""
        headers = [header for prefill in self.base.cluster.prefills for header in prefill.media.headers]
        return sum(not header.HasField("source") for header in headers)


@asynccontextmanager
async def encoders(
    num_encoders: int = 1, num_prefill: int = 1, capabilities: Sequence[str] = (EMBEDDINGS,)
) -> AsyncIterator[EncoderWorld]:
    async with vision(num_prefill=num_prefill) as base:
        for prefill in base.cluster.prefills:
            prefill.capabilities = (*CAPABILITIES, *capabilities)
            _announce_vision(prefill)
        found = [MockEncode(f"encode-{number}", PROCESSOR, VISION) for number in range(num_encoders)]
        for encoder in found:
            await encoder.start()
        order = [one.id for one in rank_encoders([one.record() for one in found], image(RED).identity)]
        w = EncoderWorld(base, sorted(found, key=lambda one: order.index(one.id)))
        try:
            await w.announce()
            yield w
        finally:
            await asyncio.gather(*(encoder.stop() for encoder in {*found, *w.encoders}))


def _announce_vision(prefill: MockPrefill) -> None:
    plain = prefill.record

    def record(links: Sequence[LinkRecord] = ()) -> WorkerRecord:
        return replace(plain(links), vision=VISION)

    prefill.record = record  # type: ignore[method-assign]


async def test_the_file_goes_to_the_encode_worker_once_and_its_name_to_prefill():
    async with encoders() as w:
        for name in ("a", "b"):
            await w.ask(name, RED, BLUE, RED)
        assert len(w.encoders[0].media.headers) == 2
        assert (w.prefill.media.num_pulled, w.bytes_at_prefill()) == (2, 0)
        assert {header.source.worker_id for header in w.prefill.media.headers} == {"encode-0"}
        assert tokens(await w.base.generate(sequence("text"))) == scripted(5)


@pytest.mark.parametrize("is_apart", [True, False])
async def test_the_way_over_an_encode_worker_is_the_stage_encode(is_apart: bool):
    """A file that goes to prefill itself is a part of DISPATCH."""
    async with encoders(capabilities=(EMBEDDINGS,) if is_apart else ()) as w:
        for name in ("a", "b"):
            await w.ask(name, RED)
        timers, now = w.base.timings.timers, time.monotonic()
        first, second = ([part.stage.value for part in timer.stages(now, finished=True)] for timer in timers)
        assert ("encode" in first) is is_apart
        assert "encode" not in second, "prefill holds it"


async def test_prefill_workers_share_an_embedding():
    async with encoders(num_prefill=2) as w:
        first, second = w.base.cluster.prefills
        for name, other in (("a", second), ("b", first)):
            first.status = second.status = WorkerStatus.READY
            other.status = WorkerStatus.DRAINING
            await w.announce()
            await w.ask(name, RED)
        assert [prefill.media.num_pulled for prefill in (first, second)] == [1, 1]
        assert len(w.encoders[0].media.headers) == 1


async def test_images_of_another_salt_are_encoded_again():
    async with encoders() as w:
        for salt in ("one", "two"):
            await w.ask(salt, RED, salt=salt)
        assert [header.salt for header in w.encoders[0].media.headers] == ["one", "two"]


async def test_an_embedding_that_prefill_lost_is_pulled_again():
    async with encoders() as w:
        await w.ask("a", RED)
        w.prefill.media.held.clear()
        await w.ask("b", RED)
        assert (w.prefill.media.num_pulled, len(w.encoders[0].media.headers)) == (2, 1)


async def test_an_embedding_that_both_lost_is_encoded_again():
    async with encoders() as w:
        await w.ask("a", RED)
        w.prefill.media.held.clear()
        w.encoders[0].media.held.clear()
        await w.ask("b", RED)
        assert (w.prefill.media.num_pulled, len(w.encoders[0].media.headers)) == (2, 2)
        assert w.bytes_at_prefill() == 0


@pytest.mark.parametrize("how", ["stops", "fails", "loses", "another processor"])
async def test_without_the_encode_worker_prefill_encodes(how: str):
    async with encoders() as w:
        encoder = w.encoders[0]
        if how == "stops":
            await encoder.stop()
        elif how == "fails":
            encoder.media.errors = [WorkerLost("restarted")]
        elif how == "loses":
            encoder.media.num_forgotten = 1
        else:
            encoder.media.outcomes.append(prefill_pb2.MEDIA_OUTCOME_OTHER_PROCESSOR)
        await w.ask("a", RED)
        assert w.bytes_at_prefill() == 1
        assert [request.id.attempt for request in w.prefill.requests] == [1]


@pytest.mark.parametrize("error", [Overloaded("no room"), Draining("drains"), WorkerLost("restarted")])
async def test_the_next_encode_worker_is_asked(error):
    async with encoders(num_encoders=3) as w:
        w.encoders[0].media.errors = [error]
        await w.ask("a", RED)
        assert [len(encoder.media.held) for encoder in w.encoders] == [0, 1, 0]
        assert w.bytes_at_prefill() == 0


async def test_a_failed_encode_worker_is_left_alone_for_a_while():
    async with encoders() as w:
        w.encoders[0].media.errors = [WorkerLost("restarted")] * 9
        await w.ask("a", RED)
        await w.ask("b", BLUE)
        assert len(w.encoders[0].media.headers) == 1


@pytest.mark.parametrize("capabilities", [(EMBEDDINGS,), (EMBEDDINGS, NO_TOWER)])
async def test_an_embedding_that_cannot_be_pulled_comes_from_another(capabilities: tuple[str, ...]):
    """Nobody is suspected: the reason may be a queue there, or a fault of the worker that pulls."""
    async with encoders(num_encoders=2, capabilities=capabilities) as w:
        w.encoders[0].media.num_forgotten = 1
        await w.ask("a", RED)
        assert not w.base.workers.suspicions.any
        assert [len(encoder.media.headers) for encoder in w.encoders] == [1, 1]
        assert [request.id.attempt for request in w.prefill.requests] == [1]


async def test_an_encode_worker_that_hangs_costs_a_bounded_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(uploader, "MAX_ENCODE_S", 0.2)
    monkeypatch.setattr(uploader, "GRACE_S", 0.1)
    async with encoders() as w:
        w.encoders[0].media.hangs = True
        async with asyncio.timeout(10):
            await w.ask("a", RED)
        assert w.bytes_at_prefill() == 1


@pytest.mark.parametrize("outcome", [prefill_pb2.MEDIA_OUTCOME_TOO_LARGE, prefill_pb2.MEDIA_OUTCOME_COUNT_DIFFERS])
async def test_what_an_encode_worker_alone_refuses_is_encoded_by_prefill(outcome):
    async with encoders() as w:
        w.encoders[0].media.outcomes.append(outcome)
        await w.ask("a", RED)
        assert w.bytes_at_prefill() == 1


@pytest.mark.parametrize("outcome", [prefill_pb2.MEDIA_OUTCOME_TOO_LARGE, prefill_pb2.MEDIA_OUTCOME_COUNT_DIFFERS])
async def test_what_all_ways_refuse_is_the_clients_mistake(outcome):
    async with encoders(capabilities=(EMBEDDINGS, NO_TOWER)) as w:
        w.encoders[0].media.outcomes.append(outcome)
        with pytest.raises(InvalidRequest, match="the image"):
            await w.base.generate(seen("a", RED))


@pytest.mark.parametrize("capabilities", [(EMBEDDINGS,), (EMBEDDINGS, NO_TOWER)], ids=["tower", "no tower"])
async def test_an_encode_worker_lost_during_a_pull_is_left(capabilities):
    async with encoders(capabilities=capabilities) as w:
        w.prefill.media.holds_pulls = True
        asked = asyncio.create_task(w.ask("a", RED))
        async with asyncio.timeout(10):
            await w.prefill.media.pull_begun.wait()
            w.prefill.media.holds_pulls = False
            old, new = w.encoders[0], MockEncode(w.encoders[0].id, PROCESSOR, VISION)
            await new.start()
            await w.base.cluster.registry.withdraw(old.record().id, old.incarnation)
            w.encoders[0] = new
            await w.announce()
            await asyncio.gather(asked, w.prefill.media.pull_ended.wait())
        assert (w.bytes_at_prefill(), w.prefill.media.num_pulled) == ((0, 1) if NO_TOWER in capabilities else (1, 0))


async def test_a_refused_file_is_the_clients_mistake():
    async with encoders() as w:
        w.encoders[0].media.outcomes.append(prefill_pb2.MEDIA_OUTCOME_UNREADABLE)
        with pytest.raises(InvalidRequest, match="the image is damaged"):
            await w.base.generate(seen("a", RED))
        assert w.prefill.media.headers == []


async def test_embeddings_of_other_weights_are_not_used():
    async with encoders() as w:
        w.encoders[0].vision = "w" * 32
        await w.announce()
        await w.ask("a", RED)
        assert (len(w.encoders[0].media.headers), w.bytes_at_prefill()) == (0, 1)


async def test_workers_that_cannot_pull_get_files():
    async with encoders(capabilities=()) as w:
        await w.ask("a", RED)
        assert (len(w.encoders[0].media.headers), w.bytes_at_prefill()) == (0, 1)


async def test_without_a_tower_images_need_an_encode_worker():
    async with encoders(capabilities=(EMBEDDINGS, NO_TOWER)) as w:
        await w.ask("a", RED)
        w.encoders[0].vision = "w" * 32
        await w.announce()
        with pytest.raises(NoWorkers, match="serves images"):
            w.base.admit(seen("b", RED))
        assert tokens(await w.base.generate(sequence("text"))) == scripted(5)


async def test_without_a_tower_a_lost_encode_worker_makes_an_answer_late():
    """Its image waits until an encode worker takes it again."""
    async with encoders(capabilities=(EMBEDDINGS, NO_TOWER)) as w:
        w.encoders[0].media.num_forgotten = 1
        await w.ask("a", RED)
        assert (w.prefill.media.num_pulled, w.bytes_at_prefill()) == (1, 0)


@pytest.mark.parametrize("error", [Overloaded("no room"), Draining("drains")])
async def test_without_a_tower_a_busy_encode_worker_is_asked_on(error, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(uploader, "MAX_RETRY_S", 0.01)
    async with encoders(capabilities=(EMBEDDINGS, NO_TOWER)) as w:
        w.encoders[0].media.errors = [error] * 20
        await w.ask("a", RED)
        assert len(w.encoders[0].media.headers) == 21
        assert [request.id.attempt for request in w.prefill.requests] == [1]


async def test_a_busy_encode_worker_is_asked_less_and_less(monkeypatch: pytest.MonkeyPatch):
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        uploading = asyncio.current_task()
        if uploading is None or uploading.get_name() != "put-media":
            return await sleep(seconds)
        pauses.append(seconds)
        await sleep(0)

    async with encoders(capabilities=(EMBEDDINGS, NO_TOWER)) as w:
        w.encoders[0].media.errors = [Overloaded("no room")] * 8
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "sleep", note)
            await w.ask("a", RED)
    grown = [pause for pause in pauses if pause >= uploader.MIN_RETRY_S]
    assert grown == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("is_prefill", "expected"), [(False, [0.7, 0.7, 0.7, 0.8, 2.0]), (True, [0.7, 1.4, 2.0, 2.0, 2.0])]
)
async def test_a_busy_worker_is_not_asked_before_the_time_it_names(
    is_prefill: bool, expected: list[float], monkeypatch: pytest.MonkeyPatch
):
    """Over gRPC: the time is in the call's trailing metadata. A prefill worker with a tower is sent the file."""
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    async with encoders(capabilities=(EMBEDDINGS,) if is_prefill else (EMBEDDINGS, NO_TOWER)) as w:
        times = (0.7, 0.7, 0.7, 0.7, 60.0)
        busy: list[BatonError] = [Overloaded("no room", retry_after_s=seconds) for seconds in times]
        for encoder in w.encoders:
            encoder.media.errors = [WorkerLost("restarted")] if is_prefill else list(busy)
        if is_prefill:
            w.prefill.media.errors = busy
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "sleep", note)
            await w.ask("a", RED)
    assert [pause for pause in pauses if pause >= uploader.MIN_RETRY_S] == expected


async def test_a_suspected_encode_worker_still_admits_images():
    """One failed upload is no reason to tell clients that images are not served."""
    async with encoders(capabilities=(EMBEDDINGS, NO_TOWER)) as w:
        w.base.workers.suspect(w.encoders[0].record(), WorkerLost("restarted"))
        assert w.base.workers.encode_workers(w.prefill.record()) == []
        assert w.base.workers.encodes(PROCESSOR)
        w.base.dispatcher.release(w.base.admit(seen("b", BLUE)))


async def test_a_lost_encode_worker_leaves_no_suspicion():
    async with encoders() as w:
        record = w.encoders[0].record()
        await w.base.cluster.registry.withdraw(record.id, record.incarnation)
        await w.base.cluster.registry.announce(replace(record, incarnation=Incarnation(record.incarnation + 1)))
        await w.base.workers.wait_for_change()
        w.base.workers.suspect(record, WorkerLost("restarted"))
        assert not w.base.workers.suspicions.any
