"""Images over HTTP through real processes, of the families that `test_http_vision` has no cluster of.

Each checkpoint is on disk and loaded as any other. The answer has the tokens of the whole model's `generate()` behind
the prompt that the router made, whose marks a contract test compares with those of the processors. Each family has both
transports and an encode worker, and is killed in the middle of an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from tests.cluster import Cluster, eventually, links_in
from tests.exactness.vision.families import IMAGE
from tests.exactness.vision.test_file_to_tokens import tinted
from tests.exactness.vision.test_http_vision import ASKED, BEFORE, LONG, NUM_TOKENS, TEMPLATE, World, check_kills
from tests.exactness.vision.test_remote_encoder import media, wait_encoder
from tests.exactness.vision.vision_reference import VisionReference
from tests.lateness import Late
from tests.stream_client import ask, tokens
from tests.tiny_models import VOCAB_SIZE

pytestmark = [pytest.mark.exactness, pytest.mark.integration]

TRANSPORTS = {
    "gemma3": "auto",
    "idefics3": "auto",
    "smolvlm": "stream",
    "internvl": "stream",
    "mistral3": "auto",
    "qwen2_5_vl": "stream",
    "qwen3_vl": "auto",
}
"""Of the first decode worker and of encode workers; `auto` is NIXL here. The second decode worker has the other one."""
MAX_TRIES = 5
_SPLIT = ("<fake_token_around_image>", "<global-img>", *(f"<row_{n // 4 + 1}_col_{n % 4 + 1}>" for n in range(16)))
MARKS: dict[str, tuple[str, ...]] = {
    "gemma3": ("<start_of_image>", "<end_of_image>"),
    "idefics3": _SPLIT,
    "smolvlm": _SPLIT,
    "internvl": ("<img>", "</img>"),
    "mistral3": ("[IMG_BREAK]", "[IMG_END]"),
}
"""Special tokens around and between the rows of an image."""

ROWS = {"gemma3": "<image_soft_token>"}
SHOWN = {"gemma3": "<start_of_image>"}
"""The text of a placeholder, and what the chat template writes for an image, where they are not `<image>`."""


def save_text(family: str, directory: Path) -> set[int]:
    """Token n is the word `wn`; the last ones are the placeholder and the marks, whose ids it returns."""
    row, marks = ROWS.get(family, "<image>"), MARKS.get(family, ())
    special = {IMAGE: row} | {IMAGE - 1 - at: mark for at, mark in enumerate(marks)}
    tokenizer = Tokenizer(models.WordLevel({special.get(n, f"w{n}"): n for n in range(VOCAB_SIZE)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special.values()])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "chat_template.jinja").write_text(TEMPLATE.replace("<image>", SHOWN.get(family, "<image>")))
    return set(special)


@dataclass
class FamilyWorld(World):
    """`special`: ids of the placeholder and the marks."""

    family: str
    special: set[int]

    def own(self, answer: dict[str, Any], parts: Sequence[str | bytes], num_tokens: int = NUM_TOKENS) -> list[int]:
        """The model's own tokens behind the prompt of an answer, whose words are compared with `parts`."""
        ids: list[int] = answer["prompt_token_ids"]
        words = " ".join(part for part in parts if isinstance(part, str))
        assert [f"w{id}" for id in ids if id not in self.special] == words.split()
        return self.reference.generate(ids, [part for part in parts if isinstance(part, bytes)], num_tokens)

    def compare(self, parts: Sequence[str | bytes]) -> tuple[list[int], int]:
        """Compares an answer; returns its tokens, and how many tokens of its prompt were cached."""
        answer = self.ask(parts)
        ids: list[int] = answer["choices"][0]["token_ids"]
        assert ids == self.own(answer, parts)
        return ids, answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module", params=TRANSPORTS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FamilyWorld]:
    family = request.param
    directory: Path = tmp_path_factory.mktemp(family)
    reference = VisionReference.save(family, directory)
    special = save_text(family, directory)
    with Cluster(
        tmp_path_factory.mktemp("cluster"), str(directory), transport=TRANSPORTS[family],
        flags={"page-size": 8}, prefill_flags={"token-budget": 16, "encode-budget-tokens": 64, "transport": "auto"},
    ) as cluster:  # fmt: skip
        yield FamilyWorld(cluster, reference, family, special)


COLOURS = ("red", "blue", "green", "yellow", "purple", "white", "black")
RED, BLUE, GREEN, YELLOW, PURPLE, WHITE, BLACK = (tinted(colour, seed) for seed, colour in enumerate(COLOURS))


def test_chats_get_the_models_own_tokens(world: FamilyWorld) -> None:
    """One to three images, red then blue of equal size, cold and with warm caches, and a chat of text."""
    red, blue = (BEFORE, RED, ASKED), (BEFORE, BLUE, ASKED)
    cold, num_cold = world.compare(red)
    other, num_shared = world.compare(blue)
    warm, num_warm = world.compare(red)
    assert (cold == warm, cold == other, num_cold) == (True, False, 0)
    assert 8 <= num_shared < 16  # the page of text before it
    assert num_warm > num_shared
    world.compare((RED, ASKED, GREEN, ASKED))
    world.compare((RED, ASKED, BLUE, ASKED, RED, ASKED))
    world.compare((ASKED,))
    links = set(links_in(world.cluster.processes["decode-0"].log.read_text()))
    assert links == {"stream" if TRANSPORTS[world.family] == "stream" else "nixl"}
    assert world.cluster.bytes_moved > 0
    assert world.cluster.tokens_recomputed == 0
    assert world.cluster.metric("prefill-0", "baton_media_total", outcome="encoded") == 3
    world.cluster.wait_pages_free(20.0)


def other_transport(world: FamilyWorld) -> str:
    return "auto" if TRANSPORTS[world.family] == "stream" else "stream"


def killed_in_an_answer(world: FamilyWorld, parts: Sequence[str | bytes]) -> list[int | None]:
    """The tokens of an answer of `LONG` in whose middle prefill and decode were killed. Others take their places.

    Their new prefill worker has then pulled every image of the prompt. An answer that had ended before the kill needs
    none: the next one is asked for.
    """
    cluster, num_images = world.cluster, len({part for part in parts if isinstance(part, bytes)})
    for _ in range(MAX_TRIES):
        with ask(cluster.url, {**world.body(parts, LONG), "stream": True}) as stream:
            events = [next(stream) for _ in range(4)]
            for process in reversed(cluster.workers()):  # decode first
                cluster.kill(process.name)
            cluster.start("prefill", "prefill-0")
            cluster.start("decode", "decode-1", {"transport": other_transport(world)})
            events += stream
        cluster.wait_links(1)  # their metrics are served
        if (num_pulled := media(world, "prefill-0", "pulled")) == num_images:
            return tokens(events)
        assert num_pulled == 0
    raise Late("all answers had ended before the kill")


def test_encode_workers_other_transports_and_kills_change_no_token(world: FamilyWorld) -> None:
    """New images are encoded by an encode worker. Prefill and decode are killed in the middle of an answer.

    It goes on at a decode worker of the other transport, behind a new prefill worker, which pulls the embeddings again.
    Then the encode worker is killed, and prefill encodes.
    """
    cluster, moved = world.cluster, (BEFORE, YELLOW, ASKED, PURPLE, ASKED)
    cluster.start("encode", "encode-0")
    wait_encoder(cluster)
    encoded = media(world, "prefill-0", "encoded")
    world.compare((BEFORE, WHITE, ASKED))
    first = world.ask(moved)
    assert first["choices"][0]["token_ids"] == world.own(first, moved)
    assert media(world, "prefill-0", "encoded") == encoded
    assert media(world, "prefill-0", "pulled") == 3
    eventually(lambda: media(world, "encode-0", "exported") == 3, 20.0, "all pulls have ended")

    assert killed_in_an_answer(world, moved) == world.own(first, moved, LONG)
    for _ in range(2):  # cold and with warm caches
        world.compare((WHITE, ASKED, YELLOW, ASKED, PURPLE, ASKED))
    links = set(links_in(cluster.processes["decode-1"].log.read_text()))
    assert links == {"stream" if other_transport(world) == "stream" else "nixl"}
    assert media(world, "encode-0", "encoded") == 3

    assert media(world, "prefill-0", "encoded") == 0
    cluster.kill("encode-0")
    world.compare((BEFORE, BLACK, ASKED))
    assert media(world, "prefill-0", "encoded") == 1
    cluster.wait_pages_free(20.0)


@pytest.mark.parametrize("world", ["gemma3"], indirect=True)
def test_a_killed_router_changes_no_token(world: FamilyWorld) -> None:
    """Of a family whose images no step may cut."""
    parts = (BEFORE, RED, ASKED, GREEN, ASKED)
    check_kills(world, parts, world.own(world.ask(parts), parts, LONG), ["router-1"])
    world.compare(parts)
