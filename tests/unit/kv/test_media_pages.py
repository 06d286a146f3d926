"""Red, then blue: requests whose images are of equal size, on warm caches of both workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.ids import WorkerId
from baton.domain.media.span import MediaSpan
from baton.domain.request import EngineRequest
from baton.engine.handoff.export_events import Seal
from baton.kv.events.event import EMPTY, CacheEvent, PageContent, StoredEvent
from baton.kv.events.source import EventSource
from baton.kv.keys import page_keys
from baton.kv.page_table import PageTable
from baton.kv.pages import Hold, PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.services.decode.import_table import ImportTable
from baton.services.decode.kv_import import ImportLimits, Reserved
from tests.tiny_workers import NUM_PAGES, PAGE_SIZE, engine_request, tiny_prefill

TOKENS = [1, 1, 0, 0, 0, 1, 1]  # a page of text, three rows of an image, text


def request(name: str, image: bytes, row: int = 0) -> EngineRequest:
    return replace(engine_request(name, TOKENS), media=(MediaSpan(2, 3, image * 16, first_row=row),))


RED, BLUE = request("red", b"r"), request("blue", b"b")


def num_cached_tokens(requests: list[EngineRequest]) -> list[int]:
    """Tokens of each that one prefill worker had cached."""
    world, counts = tiny_prefill(3.0), []
    for one in requests:
        world.scheduler.add(one, 0, 9.0)
        while batch := world.scheduler.schedule(0.0):
            effects = world.scheduler.commit(batch, world.runner.run(batch), 0.0)
            counts += [effect.times.cached_tokens for effect in effects if isinstance(effect, Seal)]
        assert world.exports.commit(one.id)
    return counts


def test_prefill_shares_the_text_before_the_image_and_the_same_image():
    again, shifted = replace(RED, id=request("again", b"r").id), request("shifted", b"r", row=1)
    assert num_cached_tokens([RED, BLUE, again, shifted]) == [0, PAGE_SIZE, 3 * PAGE_SIZE, PAGE_SIZE]


@pytest.mark.parametrize("is_wanted", [True, False])
def test_events_name_the_images_of_a_page(is_wanted: bool):
    """The row of an image that begins in the page before has a place below 0."""
    events: list[CacheEvent] = []
    cache = PrefixCache(PagePool(NUM_PAGES))
    cache.events = EventSource(events.extend, with_content=is_wanted)
    for request in (RED, BLUE):
        table = PageTable(cache, PAGE_SIZE, "", Hold.LIVE, request.media)
        table.match_tokens(TOKENS)
        table.extend(len(TOKENS))
        table.cache_full_pages(TOKENS, len(TOKENS))
        table.release()
    cache.events.flush()
    stored = [event.content for event in events if isinstance(event, StoredEvent)]
    red, blue = b"r" * 16, b"b" * 16
    if not is_wanted:
        assert stored == [EMPTY] * 5
        return
    assert stored == [
        PageContent((1, 1)), PageContent((0, 0), ((red, 0),)), PageContent((0, 1), ((red, -2),)),
        PageContent((0, 0), ((blue, 0),)), PageContent((0, 1), ((blue, -2),)),
    ]  # fmt: skip


def test_decode_refuses_a_reservation_for_another_image():
    """The reservation matched cached pages by the keys of one image; the request that claims it shows another."""
    cache = PrefixCache(PagePool(NUM_PAGES))
    table = PageTable(cache, PAGE_SIZE, "", Hold.LIVE, RED.media)
    table.extend(len(TOKENS))
    table.cache_full_pages(TOKENS, len(TOKENS))
    table.release()
    for claims, expected in ((RED, True), (replace(BLUE, id=RED.id), False), (replace(RED, media=()), False)):
        imports = ImportTable(cache, ImportLimits(PAGE_SIZE, 4, 2, pull_deadline_s=1.0))
        keys = page_keys(TOKENS, PAGE_SIZE, "", RED.media)
        reserved = imports.reserve(RED.id, len(TOKENS), keys, 0, now=0.0, deadline_s=5.0)
        assert isinstance(reserved, Reserved)
        assert reserved.prefix_len == 3 * PAGE_SIZE
        assert imports.claim(reserved.id, claims, WorkerId("p"), deadline=9.0, received_at=0.0) is expected
        imports.abort(RED.id)


def test_what_decode_caches_of_an_import_has_the_keys_of_its_image():
    """The reservation knew no image: the claim brings it, before the first page is cached."""
    cache = PrefixCache(PagePool(NUM_PAGES))
    table = PageTable(cache, PAGE_SIZE, "", Hold.LIVE)
    assert table.verify_prefix(BLUE, 0)
    table.extend(len(TOKENS))
    table.cache_full_pages(TOKENS, len(TOKENS))
    assert list(table.cached_keys) == page_keys(TOKENS, PAGE_SIZE, "", BLUE.media)
    assert cache.num_matching(page_keys(TOKENS, PAGE_SIZE, "", RED.media)) == 1
