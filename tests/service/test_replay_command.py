"""`baton replay` over a real router, its store and mock workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from baton.domain.errors import NoWorkers
from baton.domain.ids import AttemptId, RequestId
from baton.services.cli.replay import NotReplayable, ReplayedSequence, replay_call
from baton.services.cli.settings import ReplaySettings
from baton.store.memory_store import MemoryStore
from baton.store.options import StoreOptions
from baton.store.store import CallStatus
from tests.contract.stores import journal_entry
from tests.mock_workers import MODEL
from tests.redis_server import running_redis
from tests.service.takeover.router_cluster import CHAT, COMPLETIONS, PROMPTS, RouterCluster, router_cluster, text_model
from tests.unit.router.vision.pictures import coloured, data_url
from tests.unit.router.vision.vision_models import load_vision_model, save_vision_model

SETTINGS = ReplaySettings(model=MODEL, wait_s=5.0)


async def answered(w: RouterCluster, endpoint: str = COMPLETIONS, **body: Any) -> RequestId:
    """The id of a call that a router has answered, and that the store has to its end."""
    response = await w.routers[0].http.post(endpoint, json={"model": MODEL, **PROMPTS[endpoint], **body})
    assert response.status_code == 200, response.text
    id = response.headers["x-baton-request-id"]
    await w.until(id, CallStatus.ENDED)
    return RequestId(id)


async def tampered(w: RouterCluster, id: RequestId, index: int) -> MemoryStore:
    """A store with the same call, one token of its journal changed."""
    copy = MemoryStore(StoreOptions(worker_ttl_s=60.0, heartbeat_s=0.05))
    for worker in await w.store.workers():
        await copy.announce(worker)
    call, record = await w.call(id), await w.store.get(id)
    assert record is not None
    await copy.put_call(replace(call, status=CallStatus.OPEN))
    await copy.create(replace(record, state=record.state.RECEIVED))
    tokens = list((await w.store.read_journal(id, 0, 0.0)).tokens)
    tokens[index] = replace(tokens[index], token=7)
    await copy.write_journal([journal_entry(AttemptId(id, record.attempt), tokens)])
    return copy


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
async def test_an_answered_call_computes_the_same_tokens_again(tmp_path: Path, endpoint: str) -> None:
    async with router_cluster(tmp_path, num_routers=1) as w:
        id = await answered(w, endpoint, max_tokens=5, n=2)
        sequences = await replay_call(id, w.store, text_model(tmp_path), SETTINGS)
        assert [(len(sequence.stored), sequence.difference) for sequence in sequences] == [(5, None), (5, None)]
        assert (await w.call(id)).status is CallStatus.ENDED


async def test_a_tampered_journal_differs_at_its_token(tmp_path: Path) -> None:
    async with router_cluster(tmp_path, num_routers=1) as w:
        id = await answered(w, max_tokens=5)
        [sequence] = await replay_call(id, await tampered(w, id, 3), text_model(tmp_path), SETTINGS)
        assert sequence.difference == 3
        assert (sequence.stored[3], sequence.computed[3]) == (
            7,
            (await w.store.read_journal(id, 3, 0.0)).tokens[0].token,
        )


def test_a_computed_sequence_that_ends_earlier_differs() -> None:
    assert ReplayedSequence((1, 2, 3), (1, 2)).difference == 2
    assert ReplayedSequence((1, 2), (1, 2)).difference is None


async def test_unknown_calls_and_lost_journals_are_refused(tmp_path: Path) -> None:
    async with router_cluster(tmp_path, num_routers=1) as w:
        text = text_model(tmp_path)
        with pytest.raises(NotReplayable, match="not durable"):
            await replay_call(RequestId("cmpl-unknown"), w.store, text, SETTINGS)
        id = await answered(w, max_tokens=2)
        lost = MemoryStore()
        await lost.put_call(replace(await w.call(id), status=CallStatus.OPEN))
        with pytest.raises(NotReplayable, match="expired"):
            await replay_call(id, lost, text, SETTINGS)


async def test_a_call_with_images_is_computed_again_from_its_files(tmp_path: Path) -> None:
    save_vision_model(tmp_path)
    model = load_vision_model(tmp_path)
    parts = [{"type": "image_url", "image_url": {"url": data_url(coloured("red"))}}]
    with running_redis() as server:
        async with router_cluster(tmp_path, num_routers=1, model=model, redis_url=server.url) as w:
            id = await answered(w, CHAT, messages=[{"role": "user", "content": parts}], max_tokens=2)
            settings = replace_settings(redis_url=server.url, fresh=True)
            [sequence] = await replay_call(id, w.store, model[0], settings, model[1])
            assert (len(sequence.stored), sequence.difference) == (2, None)
            assert len(w.cluster.prefills[0].media.headers) == 2, "under another salt it is sent again"
            with pytest.raises(NotReplayable, match="served without"):
                await replay_call(id, w.store, model[0], settings)
            away = replace_settings(redis_url="redis://127.0.0.1:1")
            with pytest.raises(NotReplayable, match="cannot be read now"):
                await replay_call(id, w.store, model[0], away, model[1])
            Redis.from_url(server.url).flushall()
            with pytest.raises(NotReplayable, match="not all images"):
                await replay_call(id, w.store, model[0], settings, model[1])


async def test_only_chosen_workers_compute(tmp_path: Path) -> None:
    async with router_cluster(tmp_path, num_routers=1) as w:
        id = await answered(w, max_tokens=2)
        chosen = replace_settings(prefill="prefill-0", decode="decode-0")
        assert len(await replay_call(id, w.store, text_model(tmp_path), chosen)) == 1
        with pytest.raises(NoWorkers, match="0 decode"):
            await replay_call(id, w.store, text_model(tmp_path), replace_settings(decode="decode-9", wait_s=0.2))


def replace_settings(**changes: Any) -> ReplaySettings:
    return SETTINGS.model_copy(update=changes)
