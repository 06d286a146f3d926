"""KV events as vLLM's and SGLang's own decoders read them: the types here are declared as theirs are."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.ids import PageKey
from baton.kv.events.event import CacheEvent, ClearedEvent, PageContent, RemovedEvent, StoredEvent
from baton.settings.choices import KvEventsFormat
from baton.worker.kv_events.wire import BatchEncoder, block_hash, to_wire

SIZE = 2


def decoder(batch_as_array: bool, events_as_arrays: bool) -> msgspec.msgpack.Decoder:
    """A consumer's decoder, with the optional last fields that some versions have."""
    options: dict[str, Any] = {"array_like": events_as_arrays, "tag": True, "omit_defaults": True}
    stored = msgspec.defstruct(
        "BlockStored",
        [
            ("block_hashes", list[int]), ("parent_block_hash", int | None), ("token_ids", list[int]),
            ("block_size", int), ("lora_id", int | None), ("medium", str | None, None), ("lora_name", str | None, None),
            ("extra_keys", list[tuple[Any, ...] | None] | None, None),
        ],
        **options,
    )  # fmt: skip
    removed = msgspec.defstruct("BlockRemoved", [("block_hashes", list[int]), ("medium", str | None, None)], **options)
    cleared = msgspec.defstruct("AllBlocksCleared", [], **options)
    batch = msgspec.defstruct(
        "KVEventBatch",
        [("ts", float), ("events", list[stored | removed | cleared]), ("data_parallel_rank", int | None, None)],  # type: ignore[valid-type]
        array_like=batch_as_array,
        omit_defaults=True,
    )
    return msgspec.msgpack.Decoder(batch)


DECODERS = {
    KvEventsFormat.ARRAYS: decoder(batch_as_array=True, events_as_arrays=True),
    KvEventsFormat.TAGGED: decoder(batch_as_array=True, events_as_arrays=False),
    KvEventsFormat.MAPS: decoder(batch_as_array=False, events_as_arrays=False),
}


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(16, "big"))


def stored(number: int, parent: int | None = None, media: tuple[tuple[bytes, int], ...] = ()) -> StoredEvent:
    content = PageContent((10 * number, 10 * number + 1), media)
    return StoredEvent(key(number), None if parent is None else key(parent), content)


@pytest.mark.parametrize("format", KvEventsFormat)
def test_a_consumer_of_each_format_reads_every_event(format: KvEventsFormat):
    events: list[CacheEvent] = [ClearedEvent(), stored(1), stored(2, 1), RemovedEvent(key(2)), stored(3, 1)]
    batch = DECODERS[format].decode(BatchEncoder(format).encode(12.5, to_wire(events, SIZE)))
    assert (batch.ts, batch.data_parallel_rank) == (12.5, 0)
    cleared, first, removed, second = batch.events
    assert type(cleared).__name__ == "AllBlocksCleared"
    assert (first.block_hashes, first.parent_block_hash) == ([1, 2], None)
    assert (first.token_ids, first.block_size, first.lora_id, first.medium) == ([10, 11, 20, 21], SIZE, None, "GPU")
    assert (removed.block_hashes, removed.medium) == ([2], "GPU")
    assert (second.block_hashes, second.parent_block_hash, second.token_ids) == ([3], 1, [30, 31])


@pytest.mark.parametrize("format", KvEventsFormat)
def test_a_consumer_tells_images_apart(format: KvEventsFormat):
    """As vLLM names them: (identity, offset of the image in the block) of each image of each block.

    Dynamo reads only identities of 64 hex digits, and takes others for text.
    """
    red, blue = b"r" * 16, b"b" * 16
    red_name, blue_name = (identity.hex() + 32 * "0" for identity in (red, blue))
    events: list[CacheEvent] = [
        stored(1), stored(2, 1, ((red, 1),)), stored(3, 2, ((red, -1), (blue, 1))), stored(4, 3),
        stored(5, 1, ((blue, 1),)),
    ]  # fmt: skip
    batch = DECODERS[format].decode(BatchEncoder(format).encode(0.0, to_wire(events, SIZE)))
    assert [(event.block_hashes, event.parent_block_hash, event.extra_keys) for event in batch.events] == [
        ([1], None, None),
        ([2, 3], 1, [([red_name, 1],), ([red_name, -1], [blue_name, 1])]),
        ([4], 3, None),
        ([5], 1, [([blue_name, 1],)]),
    ]


@pytest.mark.parametrize("format", KvEventsFormat)
def test_events_of_text_have_no_fields_for_images(format: KvEventsFormat):
    encoded = BatchEncoder(format).encode(0.0, to_wire([stored(1), stored(2, 1)], SIZE))
    assert b"extra_keys" not in encoded
    assert b"lora_name" not in encoded
    (event,) = msgspec.msgpack.decode(encoded)["events" if format is KvEventsFormat.MAPS else 1]
    assert len(event) == 7, "the type, and six fields"


def test_only_pages_that_follow_each_other_share_an_event():
    merged = to_wire([stored(1), stored(2, 1), stored(3, 1), stored(4), stored(5, 4)], SIZE)
    assert [event.block_hashes for event in merged] == [[1, 2], [3], [4, 5]]  # type: ignore[union-attr]


@given(st.binary(min_size=16, max_size=16))
def test_a_hash_fits_signed_and_unsigned_integers_of_64_bits(name: bytes):
    assert 0 <= block_hash(PageKey(name)) < 1 << 63


@given(st.lists(st.tuples(st.sampled_from("src"), st.integers(1, 6), st.integers(0, 6)), max_size=30))
def test_a_consumer_that_applies_the_events_has_the_cache(script: list[tuple[str, int, int]]):
    """Order matters: a page may leave and come back in one batch."""
    events: list[CacheEvent] = []
    expected: set[int] = set()
    for kind, number, parent in script:
        if kind == "s":
            events.append(stored(number, parent or None))
            expected.add(number)
        elif kind == "r":
            events.append(RemovedEvent(key(number)))
            expected.discard(number)
        else:
            events.append(ClearedEvent())
            expected.clear()
    found: set[int] = set()
    for event in (
        DECODERS[KvEventsFormat.TAGGED]
        .decode(BatchEncoder(KvEventsFormat.TAGGED).encode(0.0, to_wire(events, SIZE)))
        .events
    ):
        match type(event).__name__:
            case "BlockStored":
                found |= set(event.block_hashes)
                assert len(event.token_ids) == SIZE * len(event.block_hashes)
            case "BlockRemoved":
                found -= set(event.block_hashes)
            case _:
                found.clear()
    assert found == expected
