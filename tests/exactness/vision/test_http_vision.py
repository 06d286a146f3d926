"""Images over HTTP through real processes: the answer has the tokens of the model's own `generate()`.

Pictures of equal size stand for the same tokens, so caches are warm with another picture's prompt: red then blue.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from tests.cluster import Cluster, eventually
from tests.exactness.vision.families import BREAK, IMAGE
from tests.exactness.vision.vision_reference import NUM_ROWS, PROCESSORS, VisionReference
from tests.lateness import met
from tests.stream_client import Event, ask, resume, tokens
from tests.tiny_models import VOCAB_SIZE

pytestmark = [pytest.mark.exactness, pytest.mark.integration]

NUM_TOKENS = 12
LONG = 150
"""Tokens of an answer that is still under way when a process is killed."""
SIDE = 112
TEMPLATE = (
    "{% for m in messages %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)


@dataclass
class World:
    """A cluster of one model, and the whole model for reference."""

    cluster: Cluster
    reference: VisionReference

    def expected(self, parts: Sequence[str | bytes], num_tokens: int = NUM_TOKENS) -> tuple[list[int], list[int]]:
        """The prompt, and the model's own tokens behind it."""
        ids: list[int] = []
        for part in parts:
            ids += [IMAGE] * NUM_ROWS if isinstance(part, bytes) else [int(word[1:]) for word in part.split()]
        files = [part for part in parts if isinstance(part, bytes)]
        return ids, self.reference.generate(ids, files, num_tokens)

    def body(self, parts: Sequence[str | bytes], num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
        """What a client posts for it."""
        content = [{"type": "text", "text": part} if isinstance(part, str) else image_part(part) for part in parts]
        options = {"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True, "return_token_ids": True}
        return {"model": self.cluster.model_name, "messages": [{"role": "user", "content": content}], **options}

    def ask(self, parts: Sequence[str | bytes]) -> dict[str, Any]:
        response = self.cluster.client.post("/v1/chat/completions", json=self.body(parts))
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def check(self, parts: Sequence[str | bytes]) -> dict[str, Any]:
        """Compares prompt and answer; returns the answer's usage."""
        ids, own = self.expected(parts)
        answer = self.ask(parts)
        assert answer["prompt_token_ids"] == ids
        assert answer["choices"][0]["token_ids"] == own
        usage: dict[str, Any] = answer["usage"]
        assert usage["prompt_tokens"] == len(ids)
        return usage


def image_part(file: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(file).decode()}"}}


def picture(colour: str) -> bytes:
    """A picture of one colour; all of them are of equal size."""
    file = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE), colour).save(file, "PNG")
    return file.getvalue()


def save_text(directory: Path) -> None:
    """Token n is the word `wn`, and the last one shows an image."""
    vocab = {f"w{n}" if n != IMAGE else "<image>": n for n in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocab, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<image>", special=True, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "chat_template.jinja").write_text(TEMPLATE)


VICTIMS = ("decode-0", "prefill-0", "router-1")


def check_kills(world: World, parts: Sequence[str | bytes], own: list[int], victims: Sequence[str] = VICTIMS) -> None:
    """Decode, prefill and the client's router, each killed while an answer of `LONG` tokens is under way."""
    cluster = world.cluster
    body = {**world.body(parts, LONG), "stream": True}
    other = cluster.start("router", "router-1")
    cluster.wait_ready()
    for victim in victims:
        url = (other if victim == "router-1" else cluster.processes["router-0"]).url
        events: list[Event] = []
        with ask(url, body) as stream:
            events += [next(stream) for _ in range(8)]
            process = cluster.kill(victim)
            if victim != "router-1":
                cluster.start(process.role, victim)
                events += stream
        if victim == "router-1":
            with resume(cluster.url, events[-1]) as stream:
                events += stream
        assert tokens(events) == own, victim
        cluster.wait_ready()
    if "decode-0" in victims:
        met(cluster.metric("router-0", "baton_retries_total", outcome="retried"), "the kill of decode-0 and an answer")
    met(cluster.metric("router-0", "baton_takeovers_total"), "the kill of router-1 and an answer")
    eventually(lambda: cluster.busy_pages() == 0, 20.0, "all pages free")


@pytest.fixture(scope="module", params=PROCESSORS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    family = request.param
    directory: Path = tmp_path_factory.mktemp(family)
    reference = VisionReference.save(family, directory)
    save_text(directory)
    with Cluster(
        tmp_path_factory.mktemp("cluster"), str(directory), flags={"page-size": 8}, prefill_flags={"token-budget": 16}
    ) as cluster:
        yield World(cluster, reference)


RED, BLUE, GREEN = map(picture, ("red", "blue", "green"))
ASKED = " ".join(f"w{n}" for n in range(30, 39))
BEFORE = " ".join(f"w{n}" for n in range(50, 61))


def test_red_then_blue_of_equal_size_on_warm_caches(world: World) -> None:
    """One to three images, cold and warm; a prefix hit covers images only where they are the same ones."""
    red, blue = (BEFORE, RED, ASKED), (BEFORE, BLUE, ASKED)
    assert world.expected(red)[1] != world.expected(blue)[1]  # else nothing here could fail
    world.check(red)
    assert world.check(blue)["prompt_tokens_details"]["cached_tokens"] == 8  # the page of text before it
    assert world.check(red)["prompt_tokens_details"]["cached_tokens"] >= 32
    world.check((RED, ASKED, BLUE, ASKED, RED, ASKED))
    world.check((ASKED,))
    assert world.cluster.client.get("/v1/models").json()["data"][0]["modalities"] == ["text", "image"]


def test_what_is_no_image_reaches_no_worker(world: World) -> None:
    before = world.cluster.metric("prefill-0", "baton_media_total")
    response = world.cluster.client.post("/v1/chat/completions", json=world.body((RED[:-20], ASKED)))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages[0].content[0].image_url.url")
    assert world.cluster.metric("prefill-0", "baton_media_total") == before


def test_killed_workers_and_routers_change_no_token(world: World) -> None:
    parts = (BEFORE, GREEN, ASKED)
    check_kills(world, parts, world.expected(parts, LONG)[1])
    world.check(parts)


def test_the_placeholder_is_not_a_word_that_clients_can_say(world: World) -> None:
    for text in ("<image>", f"w1 <image> w{BREAK}"):
        response = world.cluster.client.post("/v1/chat/completions", json=world.body((RED, text)))
        assert response.status_code == 400, response.text
