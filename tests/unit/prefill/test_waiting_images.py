"""A prompt that waits for an image holds up no other: first come, first served is among those that can begin."""

from __future__ import annotations

from dataclasses import replace

from baton.domain.media.span import MediaSpan
from baton.engine.media.store import HeldMedia, MediaStore
from baton.services.prefill.media_gate import MediaGate
from baton.services.prefill.policy import PolicySettings, PrefillPolicy
from tests.tiny_workers import NUM_PAGES, TinyPrefill, engine_request, tiny_prefill

IMAGE = bytes(16)


def step(world: TinyPrefill) -> list[str]:
    batch = world.scheduler.schedule(0.0)
    return [] if batch is None else [row.id.request_id for row in batch.rows]


def test_text_passes_a_prompt_that_waits_for_its_image():
    order = PolicySettings(PrefillPolicy.FCFS, oldest_prompt_share=0.0)
    world = tiny_prefill(9.0, 8, NUM_PAGES, 4, order=order)
    store: MediaStore[str, str] = MediaStore(100)
    store.hold(("", IMAGE), HeldMedia("pixels", 2, None, 8, 8))
    world.scheduler.media = gate = MediaGate(store, 4)
    picture = replace(engine_request("image", [0, 1, 1, 0]), media=(MediaSpan(1, 2, IMAGE),))
    world.scheduler.add(picture, 0, 99.0)
    world.scheduler.add(engine_request("text", [1, 0, 0, 1]), 0, 99.0)
    assert step(world) == ["text"]
    ((key, _),) = gate.next_batch()
    store.on_encoded(key, "rows")
    gate.on_encoded(0.25)
    assert step(world)[0] == "image"
