"""Images encoded by an encode worker, over HTTP through real processes: the tokens of the model's own `generate()`.

Prefill workers without a tower wait for a lost encode worker; one that has a tower does not. Embeddings come over the
stream, or from the second one on by NIXL.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from chaos.testbed.fork_server import ForkedProcess, shared_fork_server
from tests.cluster import Cluster, eventually
from tests.exactness.vision.test_http_vision import (
    ASKED,
    BEFORE,
    BLUE,
    GREEN,
    LONG,
    RED,
    World,
    picture,
    save_text,
)
from tests.exactness.vision.vision_reference import VisionReference
from tests.unit.model.drafts.tiny_heads import random_head, save_head

pytestmark = [pytest.mark.exactness, pytest.mark.integration]

VISION = {"llava": ("remote", "stream"), "qwen2_vl": ("auto", "auto"), "qwen3_vl": ("remote", "nixl")}
"""Of the prefill worker, and the transport. Embeddings of the last have DeepStack rows."""
YELLOW = picture("yellow")


DRAFTERS = {"llava": "ngram", "qwen2_vl": "ngram", "qwen3_vl": "eagle"}
"""What decode drafts with. The head of the last is random, and seldom right."""
ROT = {"llava": "after", "qwen2_vl": "copy", "qwen3_vl": "before"}
"""Where embeddings change at their source once they rot; the last is the control, which no digest can find."""
PROGRAM = "tests.exactness.vision.rotting_encode"


@dataclass
class RottingCluster(Cluster):
    """A cluster whose encode worker has faulty memory once the file `trigger` exists, its prefill worker by another."""

    mode: str = ""

    @property
    def trigger(self) -> Path:
        return self.directory / "rot"

    @property
    def held_trigger(self) -> Path:
        return self.directory / "rot-held"

    def spawn(self, name: str, words: list[str], log: Path) -> ForkedProcess:
        if not name.startswith(("encode", "prefill")):
            return super().spawn(name, words, log)
        is_encode = name.startswith("encode")
        words = [*((self.mode, str(self.trigger)) if is_encode else ("held", str(self.held_trigger))), *words]
        return shared_fork_server().spawn(name, words, log, self.environment, PROGRAM)


@pytest.fixture(scope="module", params=VISION)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory: Path = tmp_path_factory.mktemp(request.param)
    reference, (vision, transport) = VisionReference.save(request.param, directory), VISION[request.param]
    save_text(directory)
    drafter, flags = DRAFTERS[request.param], dict[str, Any]({"page-size": 8})
    if drafter == "eagle":
        flags["draft-model"] = str(save_head(random_head("eagle3"), tmp_path_factory.mktemp("head")))
    with RottingCluster(
        tmp_path_factory.mktemp("cluster"), str(directory), mode=ROT[request.param], transport=transport, flags=flags,
        prefill_flags={"token-budget": 16, "vision": vision}, decode_flags={"drafter": drafter},
    ) as cluster:  # fmt: skip
        cluster.start("encode", "encode-0")
        wait_encoder(cluster)
        yield World(cluster, reference)


def wait_encoder(cluster: Cluster, num_lost: int = 0) -> None:
    """Waits until the router knows a ready encode worker, and has lost so many before it."""

    def is_ready() -> bool:
        lost = cluster.metric("router-0", "baton_workers_lost_total", role="encode")
        ready = cluster.metric("router-0", "baton_workers", role="encode", status="ready")
        return (lost, ready) == (num_lost, 1)

    eventually(is_ready, 60.0, "an encode worker is ready")


def media(world: World, name: str, outcome: str) -> float:
    return world.cluster.metric(name, "baton_media_total", outcome=outcome)


def uses_nixl(world: World) -> bool:
    return world.cluster.transport != "stream"


def wait_linked(world: World, num_links: int = 1) -> None:
    """Waits until the prefill worker has made so many links to encode workers' memory, unless it makes none."""
    log = world.cluster.processes["prefill-0"].log
    if uses_nixl(world):
        eventually(lambda: log.read_text().count("embedding_link_up") == num_links, 20.0, "embeddings go by NIXL")


def embedding_paths(world: World) -> str:
    """Which way UCX has reported for embeddings, in the log."""
    log = world.cluster.processes["prefill-0"].log.read_text()
    return "\n".join(line for line in log.splitlines() if "embedding_link_up" in line)


def num_damaged(world: World, *names: str) -> float:
    """Embeddings that these workers have found to differ from their digests."""
    return sum(world.cluster.metric(one, "baton_integrity_failures_total", kind="embedding") for one in names)


def pulled_bytes(world: World, transport: str) -> float:
    return world.cluster.metric("prefill-0", "baton_embedding_bytes_total", transport=transport)


def test_an_encoder_of_its_own_gives_the_models_own_tokens(world: World) -> None:
    """One to three images, red then blue of equal size, cold and with warm caches; each is encoded once, elsewhere."""
    red, blue = (BEFORE, RED, ASKED), (BEFORE, BLUE, ASKED)
    assert world.expected(red)[1] != world.expected(blue)[1]  # else nothing here could fail
    world.check(red)
    wait_linked(world)
    for parts in (blue, red, (RED, ASKED, BLUE, ASKED, RED, ASKED), (ASKED,)):
        world.check(parts)
    eventually(lambda: media(world, "encode-0", "exported") == 2, 20.0, "both pulls have ended")
    assert (media(world, "encode-0", "encoded"), media(world, "encode-0", "pull_failed")) == (2, 0)
    assert (media(world, "prefill-0", "encoded"), media(world, "prefill-0", "pulled")) == (0, 2)
    by_stream, by_nixl = pulled_bytes(world, "stream"), pulled_bytes(world, "nixl")
    assert by_stream > 0
    assert by_nixl == (by_stream if uses_nixl(world) else 0)  # the second image
    assert ("nixl/ucx (" in embedding_paths(world)) is uses_nixl(world)
    assert world.cluster.client.get("/v1/models").json()["data"][0]["modalities"] == ["text", "image"]


def test_drafts_beside_images_change_no_token(world: World) -> None:
    """In chunks of 16, behind one image and two, cold and with warm caches, in answers long enough to loop."""
    again = " ".join(["w9 w8 w7 w6 w5"] * 4)
    for parts in ((BEFORE, RED, again), (BEFORE, RED, ASKED, picture("purple"), again)):
        own = world.expected(parts, LONG)[1]
        for _ in range(2):
            response = world.cluster.client.post("/v1/chat/completions", json=world.body(parts, LONG))
            assert response.json()["choices"][0]["token_ids"] == own
    drafted, accepted = (
        world.cluster.metric("decode-0", f"baton_draft_{kind}_total") for kind in ("tokens", "accepted")
    )
    assert drafted > 0
    assert accepted > 0 or world.cluster.decode_flags["drafter"] == "eagle"


def test_an_encoder_that_is_killed_while_it_encodes_changes_no_token(world: World) -> None:
    """Its process is stopped as soon as it holds an image of the request, and then killed."""
    cluster, parts = world.cluster, (BEFORE, GREEN, ASKED, YELLOW, ASKED)
    _, own = world.expected(parts)
    encoder = cluster.processes["encode-0"]
    num_held = media(world, "encode-0", "held")
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(world.ask, parts)
        eventually(lambda: media(world, "encode-0", "held") > num_held, 20.0, "the encode worker holds an image")
        encoder.popen.send_signal(signal.SIGSTOP)
        encoder.expected_running = False
        encoder.popen.kill()
        encoder.popen.wait(10.0)
        cluster.start("encode", "encode-0")
        assert asked.result(60.0)["choices"][0]["token_ids"] == own
    wait_encoder(cluster, num_lost=1)
    world.check((BEFORE, picture("white"), ASKED))
    wait_linked(world, 2)
    before = pulled_bytes(world, "nixl")
    world.check((BEFORE, picture("black"), ASKED))
    assert (pulled_bytes(world, "nixl") > before) is uses_nixl(world)
    assert media(world, "encode-0", "exported") >= 1
    eventually(lambda: cluster.busy_pages() == 0, 20.0, "all pages free")


def test_embeddings_that_rot_where_they_are_held_change_no_token(world: World) -> None:
    """Every second one that the prefill worker takes. The one before is shown again, from its memory."""
    cluster = world.cluster
    assert isinstance(cluster, RottingCluster)
    before = num_damaged(world, "prefill-0")
    cluster.held_trigger.touch()
    for seed in range(3):
        shown = picture(f"hsl({20 + 100 * seed}, 80%, 40%)")
        world.check((BEFORE, shown, ASKED))
        world.check((ASKED, shown, BEFORE))
    cluster.held_trigger.unlink()
    assert num_damaged(world, "prefill-0") - before >= 3
    eventually(lambda: cluster.busy_pages() == 0, 20.0, "all pages free")


def test_embeddings_that_rot_at_their_source_change_no_token(world: World) -> None:
    """Every second one, behind its digests or in the memory that NIXL reads. They are late, never wrong.

    The control damages them before their digests, and so shows that answers depend on them.
    """
    cluster = world.cluster
    assert isinstance(cluster, RottingCluster)
    before = num_damaged(world, "encode-0", "prefill-0")
    cluster.trigger.touch()
    wrong = 0
    for seed in range(8):
        parts = (BEFORE, picture(f"hsl({45 * seed}, 90%, 35%)"), ASKED)
        wrong += world.ask(parts)["choices"][0]["token_ids"] != world.expected(parts)[1]
    found = num_damaged(world, "encode-0", "prefill-0") - before
    if cluster.mode == "before":
        assert (wrong > 0, found) == (True, 0)
    else:
        assert (wrong, found >= 3) == (0, True)
    eventually(lambda: cluster.busy_pages() == 0, 20.0, "all pages free")
