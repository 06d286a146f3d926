"""Images over HTTP: the openai SDK, what is stored of a call, and another router that takes it over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from baton.domain.ids import RequestId
from baton.store.store import CallStatus
from tests.mock_workers import MODEL, Hold, Phase, ScriptedAction
from tests.service.takeover.router_cluster import CHAT, TIMEOUT_S, RouterCluster, opened, router_cluster
from tests.unit.router.vision.pictures import coloured, data_url, picture
from tests.unit.router.vision.vision_models import NUM_ROWS, load_vision_model, save_vision_model

RED = coloured("red")
ALL = 6
AWAY = "redis://127.0.0.1:1"
"""No store of files answers here; `test_stored_images` has one."""


def messages(*files: bytes, text: str = "what is it?") -> Any:
    parts = [{"type": "image_url", "image_url": {"url": data_url(file)}} for file in files]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@pytest.fixture
def model(tmp_path):
    save_vision_model(tmp_path)
    return load_vision_model(tmp_path)


@pytest.fixture
async def world(tmp_path, model) -> AsyncIterator[RouterCluster]:
    async with router_cluster(tmp_path, num_routers=1, model=model, redis_url=AWAY) as made:
        yield made


def client(w: RouterCluster) -> openai.AsyncOpenAI:
    base = str(w.routers[0].http.base_url)
    return openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, http_client=w.routers[0].http)


async def test_the_openai_sdk_sends_images(world):
    sdk = client(world)
    for file in (RED, picture(90, 60, "JPEG"), picture(60, 90, "WEBP")):
        answer = await sdk.chat.completions.create(model=MODEL, messages=messages(file), max_tokens=3)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens > NUM_ROWS
    assert len(world.cluster.prefills[0].media.headers) == 3
    [listed] = (await sdk.models.list()).data
    assert listed.model_extra is not None
    assert listed.model_extra["modalities"] == ["text", "image"]


async def test_an_error_names_the_part(world):
    with pytest.raises(openai.BadRequestError) as refused:
        await client(world).chat.completions.create(model=MODEL, messages=messages(RED, b"no image"))
    assert refused.value.param == "messages[0].content[1].image_url.url"
    assert world.cluster.prefills[0].media.headers == []


async def test_images_fit_in_a_body_that_text_may_not_have(world):
    large = picture(1200, 1000)  # noise does not compress: 3.6 MB
    answer = await client(world).chat.completions.create(model=MODEL, messages=messages(large, large), max_tokens=2)
    assert answer.choices
    assert len(world.cluster.prefills[0].media.headers) == 1


async def test_only_files_of_images_make_a_body_larger(world):
    http, large = world.routers[0].http, "x" * (5 * 1024 * 1024)
    for path, body in (
        ("/v1/completions", {"prompt": "hi", "unknown": large}),
        ("/tokenize", {"prompt": "hi", "unknown": large}),
        (CHAT, {"messages": messages(text="hi"), "unknown": large}),
        (CHAT, {"messages": messages(RED), "unknown": large}),
    ):
        response = await http.post(path, json={"model": MODEL, **body})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (413, "body_too_large")
        assert ("beside files" in error["message"]) == (path == CHAT)  # others are not read to their end
    assert world.cluster.prefills[0].media.headers == []


async def test_workers_without_a_tower_get_no_image(world):
    for worker in world.cluster.workers:
        worker.modalities = ("text",)
    await world.cluster.announce()
    sdk = client(world)
    async with asyncio.timeout(TIMEOUT_S):
        while (await sdk.models.list()).data[0].model_extra != {"max_model_len": 200, "modalities": ["text"]}:
            pass
    with pytest.raises(openai.InternalServerError, match="serves images"):
        await sdk.chat.completions.create(model=MODEL, messages=messages(RED))


async def test_a_call_without_stored_files_is_not_durable_and_keeps_no_bytes(world):
    async with opened(world.routers[0], CHAT, messages=messages(RED), max_tokens=ALL) as stream:
        assert stream.response.headers["x-baton-durable"] == "false"
        events = await stream.rest()
        record = await world.until(stream.call_id, CallStatus.ENDED)
    assert len(record.body) < 600
    assert b"baton-media:" in record.body
    async with world.routers[0].http.stream("GET", f"/v1/requests/{record.id}/stream") as response:
        assert response.headers["x-baton-durable"] == "false"
        again = [line.removeprefix("data: ") async for line in response.aiter_lines() if line.startswith("data: ")]
    assert again == [event.data for event in events]


@pytest.mark.parametrize("is_held", [True, False])
async def test_another_router_continues_while_a_worker_holds_the_image(tmp_path, model, is_held):
    """The first router is cut off in the middle of decode. The other one has no file of the image."""
    hold = (ScriptedAction(Phase.DECODE, Hold(), index=4, times=1),)
    async with router_cluster(tmp_path, decode=hold, model=model, redis_url=AWAY) as w:
        here, there = w.routers
        async with opened(here, CHAT, messages=messages(RED), max_tokens=ALL) as stream:
            await stream.take(4)
            await w.until_emitted(stream.call_id, 4)
            if not is_held:
                w.cluster.prefills[0].media.held.clear()
            here.store.away = True
            await w.until_owned(stream.call_id, "router-1")
            await w.until(stream.call_id, CallStatus.ENDED)
            journal = await w.store.read_journal(RequestId(stream.call_id), 0, 1.0)
            here.store.away = False
        first, *_, last = w.cluster.prefills[0].requests
        assert last.media == first.media
        assert there.name == "router-1"
    if is_held:
        assert len(journal.tokens) == ALL
    else:
        assert (len(journal.tokens), journal.failure_code) == (4, "need_media")
