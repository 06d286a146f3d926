"""A takeover reads files of images only for choices that are not finished, and only for a while."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from baton.domain.errors import ContextOverflow
from baton.domain.ids import OwnerId
from baton.domain.request import FinishReason
from baton.services.router.openai.valid_request import StreamOptions
from baton.services.router.takeover.call_media import CallMedia
from baton.services.router.takeover.takeover import Takeovers
from baton.store.store import CallRecord, CallStatus, JournalPart
from tests.unit.router.takeover.test_call_media import ID, WAIT_S, SlowStore, call, file

RECORD = CallRecord(ID, OwnerId("r/1"), 2, CallStatus.OPEN, "/", b"{}", "acme", 0, 0, (ID,))
BLUE = file(b"blue", sent=False)


def made(journal: JournalPart, store: SlowStore) -> tuple[Takeovers, CallMedia, list[Any]]:
    """Takeovers of a router that claims a call with an image and this journal; and what it would generate."""
    admitted: list[Any] = []

    def admit(sequence: Any, timer: Any) -> None:
        admitted.append(sequence)

    async def parse(raw: Any) -> Any:
        return SimpleNamespace(request=replace(call(BLUE), stream_options=StreamOptions()))

    async def read_journal(*_: Any) -> JournalPart:
        return journal

    async def get(id: Any) -> None:
        return None

    media = CallMedia(store)
    context: Any = SimpleNamespace(
        store=SimpleNamespace(read_journal=read_journal, get=get),
        parser=SimpleNamespace(parse=parse),
        dispatcher=SimpleNamespace(admit=admit, release=lambda one: None, forgo=lambda all: None),
        call_ownership=SimpleNamespace(),
        text=SimpleNamespace(digest=""),
        media=media,
    )
    return Takeovers(context), media, admitted


async def test_a_finished_call_reads_no_file():
    store = SlowStore()
    takeovers, media, admitted = made(JournalPart((), 0, FinishReason.STOP, ""), store)
    _, _, unfinished = await takeovers._admit(RECORD)
    assert (unfinished, admitted, store.num_gets) == ([], [], 0)
    await media.close()


async def test_a_failed_call_reads_no_file():
    store = SlowStore()
    takeovers, media, _ = made(JournalPart((), 0, None, ContextOverflow.code), store)
    with pytest.raises(ContextOverflow):
        await takeovers._admit(RECORD)
    assert store.num_gets == 0
    await media.close()


@pytest.mark.parametrize("hangs", [False, True])
async def test_an_unfinished_call_gets_its_files_or_goes_on_without(monkeypatch, hangs):
    store = SlowStore()
    await store.put("acme", BLUE.identity, b"blue")
    if hangs:
        store.answers.clear()
    takeovers, media, admitted = made(JournalPart((), 0, None, ""), store)
    monkeypatch.setattr(media, "restored", lambda one: CallMedia.restored(media, one, 0.01 if hangs else WAIT_S))
    await takeovers._admit(RECORD)
    assert [one.data for one in admitted[0].files] == [None if hangs else b"blue"]
    assert store.num_gets == 1
    await media.close()
