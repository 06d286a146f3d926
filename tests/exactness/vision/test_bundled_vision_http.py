"""The bundled model for images over HTTP, asked with the openai SDK: red, then blue, on caches warm with red."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from scripts.bundled_pictures import PictureSpec, draw
from tests.cluster import Cluster
from tests.unit.test_bundled_vision_model import png_url

pytestmark = [pytest.mark.exactness, pytest.mark.integration]

QUESTION = "What is in the picture?"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("toy")
    with (
        Cluster(folder, model="bundled-vision", flags={"page-size": 8}) as cluster,
        openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="-", max_retries=0) as client,
    ):
        yield client


def ask(client: openai.OpenAI, url: str) -> tuple[str | None, int]:
    """The answer, and how many tokens of the prompt were cached."""
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    messages: list[Any] = [{"role": "user", "content": parts}]
    answer = client.chat.completions.create(model="bundled-vision", messages=messages, temperature=0)
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    return answer.choices[0].message.content, (details.cached_tokens or 0) if details else 0


def test_red_then_blue_on_a_warm_cache(client: openai.OpenAI) -> None:
    """Both prompts have the same token ids, also the second time, when all of red is cached on both workers."""
    specs = [PictureSpec(colour, "circle", "on the left") for colour in ("red", "blue")]
    urls = [png_url(draw(spec, random.Random(1), smallest=64)) for spec in specs]
    for spec, url in zip(specs, urls, strict=True):
        text, num_cached = ask(client, url)
        assert text == spec.description
        assert num_cached < 16, "only the words before the picture are in the cache"
    for spec, url in reversed(list(zip(specs, urls, strict=True))):
        text, num_cached = ask(client, url)
        assert text == spec.description
        assert num_cached >= 32, "the rows of the picture are in the cache"


def test_the_model_list_says_that_it_takes_images(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.modalities == ["text", "image"]  # type: ignore[attr-defined]
