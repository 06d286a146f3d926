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
from baton.store.media.media_file_store import PutOutcome
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
        self.num_puts = 0

    async def put(self, tenant: str, identity: bytes, data: bytes) -> PutOutcome:
        self._check()
        self.num_puts += 1
        await self.answers.wait()
        return await super().put(tenant, identity, data)

    async def get(self, tenant: str, identity: bytes) -> bytes | None:
        self._check()
        return await super().get(tenant, identity)

    async def holds(self, tenant: str, identities: Sequence[bytes]) -> bool:
        self._check()
        return await super().holds(tenant, identities)

    def _check(self) -> None:
        if self.away:
            raise StoreUnavailable("away")


def file(data: bytes, *, sent: bool = True) -> MediaFile:
    identity = media_identity(data, "print", "auto")
    return MediaFile(identity, data if sent else None, len(data), "print", "auto", 4, None, "url")


def call(*files: MediaFile, num_choices: int = 1) -> ValidRequest:
    sequence = SequenceSpec(ID, (1, 2), SamplingParams(), StopParams(4), "", 10.0, tenant="acme", files=files)
    return ValidRequest(ID, "m", 7, ((1, 2),), (sequence,) * num_choices, num_choices, (), True, False, None)


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
    media = CallMedia(SlowStore(max_bytes=5))
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
    assert await media.holds(call(file(b"red")))
    media.forget(ID)
    await store.discard("acme", file(b"red").identity)
    media.put_again()
    assert not await media.holds(call(file(b"red")))


async def test_a_claimed_call_gets_back_what_the_store_has(media, store):
    media.keep(call(file(b"red")))
    assert await media.kept(ID, WAIT_S)
    found = await media.restored(call(file(b"red", sent=False), file(b"blue", sent=False), num_choices=2))
    for sequence in found.sequences:
        assert [one.data for one in sequence.files] == [b"red", None]
    first, second = found.sequences
    assert first.files[0].data is second.files[0].data, "choices share the bytes"
    store.away = True
    assert (await media.restored(call(file(b"red", sent=False)))).files[0].data is None
    assert not await media.holds(call(file(b"red")))


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
    assert not await media.holds(theirs)


async def test_a_call_of_text_writes_nothing(media, store):
    media.keep(call())
    assert (store.num_puts, await media.restored(call())) == (0, call())
