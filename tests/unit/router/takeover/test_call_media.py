"""Files of a call's images: what makes the call durable, outages, resets, and bytes of another image."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.domain.ids import RequestId
from baton.domain.media.identity import media_identity
from baton.domain.request import SamplingParams, StopParams
from baton.services.router.generation import MediaFile, SequenceSpec
from baton.services.router.openai.valid_request import ValidRequest
from baton.services.router.takeover import call_media
from baton.services.router.takeover.call_media import CallMedia
from baton.store.media.media_file_store import FILE_OVERHEAD_BYTES, PutOutcome
from baton.store.media.memory_media_file_store import MemoryMediaFileStore
from baton.store.store import StoreUnavailable

ID, WAIT_S = RequestId("call"), 10.0


class SlowStore(MemoryMediaFileStore):
    """Answers while `answers` is set; fails while `away`."""

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        super().__init__(max_bytes=max_bytes)
        self.answers = asyncio.Event()
        self.answers.set()
        self.away = False
        self.num_puts = self.num_gets = 0
        self._asked: dict[str, asyncio.Event] = {}

    async def put(self, tenant: str, identity: bytes, data: bytes) -> PutOutcome:
        self._check()
        self.num_puts += 1
        self._note("put")
        await self.answers.wait()
        return await super().put(tenant, identity, data)

    async def get(self, tenant: str, identity: bytes) -> bytes | None:
        self._check()
        self.num_gets += 1
        self._note("get")
        await self.answers.wait()
        return await super().get(tenant, identity)

    async def holds(self, tenant: str, identities: Sequence[bytes]) -> bool:
        self._check()
        await self.answers.wait()
        return await super().holds(tenant, identities)

    async def was_asked(self, operation: str) -> None:
        async with asyncio.timeout(WAIT_S):
            await self._asked.setdefault(operation, asyncio.Event()).wait()

    def _note(self, operation: str) -> None:
        self._asked.setdefault(operation, asyncio.Event()).set()

    def _check(self) -> None:
        if self.away:
            raise StoreUnavailable("away")


def file(data: bytes, *, sent: bool = True) -> MediaFile:
    identity = media_identity(data, "print", "auto")
    return MediaFile(identity, data if sent else None, len(data), "print", "auto", 4, None, "url")


def call(*files: MediaFile, num_choices: int = 1, id: RequestId = ID) -> ValidRequest:
    sequence = SequenceSpec(id, (1, 2), SamplingParams(), StopParams(4), "", 10.0, tenant="acme", files=files)
    return ValidRequest(id, "m", 7, ((1, 2),), (sequence,) * num_choices, num_choices, (), True, False, None)


@pytest.fixture
async def store():
    return SlowStore()


@pytest.fixture
async def media(store, monkeypatch):
    monkeypatch.setattr(call_media, "RETRY_S", 0.001)
    made = CallMedia(store)
    yield made
    await made.close()


async def test_files_are_kept_once_all_are_acknowledged(media, store):
    store.answers.clear()
    media.keep(call(file(b"red"), file(b"blue"), file(b"red")))
    assert not await media.kept(ID, 0.0)
    store.answers.set()
    assert await media.kept(ID, WAIT_S)
    assert store.num_puts == 2
    assert not await media.kept(RequestId("other"), WAIT_S)


async def test_a_file_beyond_the_bound_makes_the_call_not_durable(monkeypatch):
    media = CallMedia(SlowStore(max_bytes=5 + FILE_OVERHEAD_BYTES))
    media.keep(call(file(b"red"), file(b"blue")))
    assert not await media.kept(ID, WAIT_S)
    await media.close()


async def test_headers_do_not_wait_for_a_store_that_is_away(media, store):
    store.away = True
    media.keep(call(file(b"red")))
    async with asyncio.timeout(WAIT_S):
        while not media._away:
            await media.kept(ID, 0.0)
        assert not await media.kept(ID, 100 * WAIT_S)
    store.away = False
    async with asyncio.timeout(WAIT_S):
        while not await media.kept(ID, 0.0):
            pass


async def test_an_emptied_store_gets_the_files_of_running_calls_again(media, store):
    media.keep(call(file(b"red")))
    assert await media.kept(ID, WAIT_S)
    await store.discard("acme", file(b"red").identity)
    media.put_again()
    assert await media.kept(ID, WAIT_S)
    assert await media.holds(call(file(b"red")), WAIT_S)
    media.forget(ID)
    await store.discard("acme", file(b"red").identity)
    media.put_again()
    assert not await media.holds(call(file(b"red")), WAIT_S)


async def test_a_claimed_call_gets_back_what_the_store_has(media, store):
    media.keep(call(file(b"red")))
    assert await media.kept(ID, WAIT_S)
    found = await media.restored(call(file(b"red", sent=False), file(b"blue", sent=False), num_choices=2))
    for sequence in found.sequences:
        assert [one.data for one in sequence.files] == [b"red", None]
    first, second = found.sequences
    assert first.files[0].data is second.files[0].data, "choices share the bytes"
    media.forget(ID)
    store.away = True
    assert (await media.restored(call(file(b"red", sent=False)))).files[0].data is None
    assert not await media.holds(call(file(b"red")), WAIT_S)


async def test_claimed_calls_share_one_copy_of_a_file(media, store):
    red = file(b"red", sent=False)
    await store.put("acme", red.identity, b"red")
    calls = [call(red, id=RequestId(f"call-{n}")) for n in range(50)]
    store.answers.clear()
    restoring = [asyncio.create_task(media.restored(one)) for one in calls]
    await store.was_asked("get")
    store.answers.set()
    found = [await one for one in restoring]
    found.append(await media.restored(call(red)))
    assert len({id(one.files[0].data) for one in found}) == 1
    assert (found[0].files[0].data, store.num_gets) == (b"red", 1)


async def test_a_claimed_call_uses_the_bytes_of_a_call_that_runs_here(media, store):
    mine = file(b"red")
    media.keep(call(mine, id=RequestId("mine")))
    found = await media.restored(call(file(b"red", sent=False)))
    assert found.files[0].data is mine.data
    assert store.num_gets == 0


async def test_files_beyond_the_bound_are_not_read(store):
    media = CallMedia(store, max_restored_bytes=5)
    red, blue, also = file(b"red", sent=False), file(b"blue", sent=False), RequestId("also")
    for data in (b"red", b"blue"):
        await store.put("acme", file(data).identity, data)
    assert (await media.restored(call(red))).files[0].data == b"red"
    for again in range(2):
        found = await media.restored(call(red, blue, id=also))
        assert [one.data for one in found.files] == [b"red", None], again
    media.forget(ID)
    assert (await media.restored(call(blue))).files[0].data is None, "the other call still has the first one"
    media.forget(also)
    assert (await media.restored(call(blue))).files[0].data == b"blue"
    media.forget(ID)
    assert (await media.restored(call(file(b"green", sent=False)))).files[0].data is None
    assert (await media.restored(call(blue))).files[0].data == b"blue", "a file that is missing takes no room"
    await media.close()


async def test_a_store_that_hangs_delays_a_claimed_call_for_a_bounded_time(media, store):
    red = file(b"red", sent=False)
    await store.put("acme", red.identity, b"red")
    store.answers.clear()
    async with asyncio.timeout(WAIT_S):
        assert (await media.restored(call(red), 0.001)).files[0].data is None
        assert not await media.holds(call(red), 0.001)
        store.answers.set()
        assert (await media.restored(call(red))).files[0].data == b"red", "the read that was given up keeps no place"


async def test_any_answer_ends_an_outage(media, store):
    red = file(b"red", sent=False)
    await store.put("acme", red.identity, b"red")
    for answer in (media.holds(call(red), WAIT_S), media.restored(call(red))):
        media._away = True
        await answer
        assert not media._away


async def test_no_call_inherits_an_outage(media, store):
    store.away = True
    media.keep(call(file(b"red")))
    async with asyncio.timeout(WAIT_S):
        while not media._away:
            await media.kept(ID, 0.0)
    media.forget(ID)
    store.away = False
    media.keep(call(file(b"blue"), id=RequestId("next")))
    assert await media.kept(RequestId("next"), WAIT_S)


async def test_close_waits_for_its_tasks(store):
    media = CallMedia(store)
    store.answers.clear()
    media.keep(call(file(b"red")))
    restoring = asyncio.create_task(media.restored(call(file(b"blue", sent=False), id=RequestId("other"))))
    await store.was_asked("put")
    await store.was_asked("get")
    tasks = list(media._tasks)
    await media.close()
    assert [task.done() for task in tasks] == [True, True]
    assert (await restoring).files[0].data is None


async def test_bytes_of_another_image_are_not_used_and_removed(media, store):
    red = file(b"red", sent=False)
    await store.put("acme", red.identity, b"blue")
    assert (await media.restored(call(red))).files[0].data is None
    assert not await store.holds("acme", [red.identity])


async def test_a_tenant_gets_no_file_of_another_one(media):
    media.keep(call(file(b"red")))
    assert await media.kept(ID, WAIT_S)
    theirs = call(file(b"red", sent=False))
    theirs = replace(theirs, sequences=(replace(theirs.sequences[0], tenant="mallory"),))
    assert (await media.restored(theirs)).files[0].data is None
    assert not await media.holds(theirs, WAIT_S)


async def test_a_call_of_text_writes_nothing(media, store):
    media.keep(call())
    assert (store.num_puts, await media.restored(call())) == (0, call())
