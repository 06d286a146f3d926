"""A worker asks its store for room before it pulls an embedding."""

from __future__ import annotations

import pytest

from baton.domain.errors import Overloaded
from baton.rpc.gen import prefill_pb2 as pb
from tests.unit.worker.media.test_media_receiver import PULLED, Puller, Worker, from_encoder


async def test_an_embedding_without_room_is_asked_for_again():
    worker = Worker(max_bytes=31)
    worker.receiver.puller = Puller(PULLED)  # type: ignore[assignment]
    with pytest.raises(Overloaded):
        await worker.put(from_encoder())


async def test_without_room_nothing_is_pulled():
    worker, puller = Worker(max_bytes=40), Puller(PULLED)
    worker.receiver.puller = puller  # type: ignore[assignment]
    assert (await worker.put(from_encoder()))[0].outcome == pb.MEDIA_OUTCOME_HELD
    worker.store.pin(1, [("s", next(iter(worker.store._held))[1])])
    with pytest.raises(Overloaded, match="no room"):
        await worker.put(from_encoder(salt="other"))
    assert len(puller.headers) == 1
    worker.store.unpin(1)
    assert (await worker.put(from_encoder(salt="other")))[0].outcome == pb.MEDIA_OUTCOME_HELD
    assert len(puller.headers) == 2
