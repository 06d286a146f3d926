"""Images through real workers: file, child process, tower, chunks, transfer and decode give `generate()`'s tokens.

A client sends what a router sends. Chunks of 16 tokens cut images; the second round finds pages and images in caches.
"""

from __future__ import annotations

import base64
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.domain.errors import InvalidRequest, NeedMedia
from baton.domain.media.span import MediaGrid, MediaSpan
from baton.domain.worker import IMAGE as IMAGE_MODALITY
from baton.domain.worker import TEXT
from baton.rpc.gen import prefill_pb2
from tests.cluster import Cluster, completion_tokens
from tests.exactness.vision.families import BREAK, IMAGE
from tests.exactness.vision.image_tokenizer import add_image_tokenizer
from tests.exactness.vision.vision_reference import NUM_ROWS, PROCESSORS, VisionReference
from tests.exactness.vision.worker_client import SentImage, WorkerClient, make_request, picture_file

pytestmark = [pytest.mark.exactness, pytest.mark.integration]

PAGE_SIZE = 8
NUM_TOKENS = 8
TRANSPORTS = {"llava": "stream", "qwen2_vl": "auto"}


@dataclass
class World:
    """A cluster of one model, and the whole model for reference."""

    family: str
    cluster: Cluster
    reference: VisionReference

    def image(self, seed: int) -> SentImage:
        """All images are of equal size."""
        return SentImage(picture_file(seed), NUM_ROWS, MediaGrid(4, 4) if self.family == "qwen2_vl" else None)

    def own_tokens(self, ids: list[int], images: list[SentImage]) -> list[int]:
        return self.reference.generate(ids, [image.file for image in images], NUM_TOKENS)


@pytest.fixture(scope="module", params=PROCESSORS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    family = request.param
    directory: Path = tmp_path_factory.mktemp(family)
    reference = VisionReference.save(family, directory)
    add_image_tokenizer(directory)
    with Cluster(
        tmp_path_factory.mktemp("cluster"), str(directory), transport=TRANSPORTS[family],
        flags={"page-size": PAGE_SIZE}, prefill_flags={"token-budget": 16, "encode-budget-tokens": 16},
    ) as cluster:  # fmt: skip
        yield World(family, cluster, reference)


@pytest.fixture
async def client(world: World) -> AsyncIterator[WorkerClient]:
    async with WorkerClient(world.cluster, PAGE_SIZE) as client:
        yield client


def prompt(client: WorkerClient, seed: int, images: list[SentImage]) -> tuple[list[int], tuple[MediaSpan, ...]]:
    """Text before, between and behind `images`. Equal seeds give equal ids."""
    rng = random.Random(seed)
    ids, spans = [rng.randrange(3, BREAK) for _ in range(11)], []
    for image in images:
        spans.append(MediaSpan(len(ids), image.num_rows, client.identity(image), image.grid))
        ids += [IMAGE] * image.num_rows + [rng.randrange(3, BREAK) for _ in range(7)]
    return ids, tuple(spans)


async def test_images_give_the_models_own_tokens(world: World, client: WorkerClient) -> None:
    """Two images, cold and with warm caches; text beside; then the same words about another image of equal size."""
    assert client.prefill_record.modalities == client.decode_record.modalities == (TEXT, IMAGE_MODALITY)
    first, second, third = (world.image(seed) for seed in (1, 2, 3))
    for images in ([first, second], [], [first, second], [first, third], [third]):
        ids, spans = prompt(client, 5, images)
        expected = world.own_tokens(ids, images)
        assert await client.tokens(ids, spans, images, NUM_TOKENS) == expected
    red, blue = ([first, second], [first, third])
    assert world.own_tokens(prompt(client, 5, red)[0], red) != world.own_tokens(prompt(client, 5, blue)[0], blue)
    assert world.cluster.metric("prefill-0", "baton_media_total", outcome="encoded") == 3
    assert world.cluster.tokens_recomputed == 0


def chat(world: World, images: list[SentImage]) -> dict[str, Any]:
    """The answer of the router to one message with `images` between words."""
    content: list[dict[str, Any]] = [{"type": "text", "text": "Here they are:"}]
    for image in images:
        url = f"data:image/png;base64,{base64.b64encode(image.file).decode()}"
        content += [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "and what now?"}]
    body = {"model": world.cluster.model_name, "messages": [{"role": "user", "content": content}], "temperature": 0}
    body |= {"max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
    response = world.cluster.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def encode_us(world: World, answer: dict[str, Any]) -> int | None:
    """The stage `encode` of an answered chat, whose stages add up; None without one."""
    trace = world.cluster.client.get(f"/v1/requests/{answer['id']}").json()["trace"]
    found = {stage["stage"]: stage["duration_us"] for stage in trace["stages"]}
    assert sum(found.values()) == trace["e2e_us"]
    return found.get("encode")


def test_a_chat_over_http_gives_the_models_own_tokens(world: World) -> None:
    """The router counts by headers and sends the files; the worker counts by tensors, or the request fails."""
    first, second, third = (world.image(seed) for seed in (21, 22, 23))
    for images, is_cold in (
        ([first], True),
        ([first, second], True),
        ([first, third], True),
        ([first, second], False),
        ([], False),
    ):
        answer = chat(world, images)
        assert bool(encode_us(world, answer)) is is_cold
        ids = answer["prompt_token_ids"]
        assert ids.count(IMAGE) == NUM_ROWS * len(images)
        assert answer["usage"]["prompt_tokens"] == len(ids)
        assert completion_tokens(answer) == world.own_tokens(ids, images)
    world.cluster.wait_pages_free(10.0)


async def test_a_bad_image_ends_its_own_request_only(world: World, client: WorkerClient) -> None:
    whole = world.image(7)
    for image, outcome in (
        (SentImage(whole.file[:200], whole.num_rows, whole.grid), prefill_pb2.MEDIA_OUTCOME_UNREADABLE),
        (SentImage(whole.file, whole.num_rows + 1), prefill_pb2.MEDIA_OUTCOME_COUNT_DIFFERS),
        (SentImage(bytes(11 << 20), whole.num_rows, whole.grid), prefill_pb2.MEDIA_OUTCOME_TOO_LARGE),
    ):
        response = await client.put(image)
        assert response.outcome == outcome, response
    ids, spans = prompt(client, 8, [whole])
    with pytest.raises(NeedMedia) as lost:
        await client.attempt(make_request(ids, spans, NUM_TOKENS))
    assert lost.value.identities == (client.identity(whole),)
    with pytest.raises(InvalidRequest):
        await client.attempt(make_request(ids, (), NUM_TOKENS))
    assert await client.tokens(ids, spans, [whole], NUM_TOKENS) == world.own_tokens(ids, [whole])
    world.cluster.wait_pages_free(10.0)
