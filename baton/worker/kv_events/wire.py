"""The wire format of KV events that vLLM and SGLang publish: batches of msgpack, made from this worker's cache events.

Pure. Consumers name a block by an integer. Here it is 63 bits of the page key, so that it fits signed and unsigned
integers of 64 bits. A consumer that hashes tokens itself reads `token_ids`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from baton.domain.ids import PageKey
from baton.kv.events.event import CacheEvent, ClearedEvent, PageContent, RemovedEvent, StoredEvent
from baton.settings.choices import KvEventsFormat

DEVICE_MEDIUM = "GPU"
"""Name of the tier of the device pool in this format, on CPU workers too."""

_MASK = (1 << 63) - 1
_IDENTITY_DIGITS = 64
_RANK = 0  # data parallel rank: each worker is one


class BlockStored(msgspec.Struct, tag=True, frozen=True):
    """Consecutive blocks entered the cache behind `parent_block_hash`; `token_ids` are those of all of them.

    The last two fields are there if the blocks have images: `extra_keys` of each block are the image of each of its
    spans, as its identity in hex, and where the span begins, counted from the block's first token.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = DEVICE_MEDIUM
    lora_name: str | msgspec.UnsetType | None = msgspec.UNSET
    extra_keys: list[tuple[tuple[str, int], ...]] | msgspec.UnsetType = msgspec.UNSET


class BlockRemoved(msgspec.Struct, tag=True, frozen=True):
    """Blocks left the cache."""

    block_hashes: list[int]
    medium: str | None = DEVICE_MEDIUM


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True):
    """The cache is empty."""


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


def block_hash(key: PageKey) -> int:
    """The integer that names a page."""
    return int.from_bytes(key[-8:], "big") & _MASK


def to_wire(events: Iterable[CacheEvent], page_size: int) -> list[WireEvent]:
    """The events in their order. Pages that follow each other in one prompt become one event; so do removed ones.

    Pages with images and pages without share none.
    """
    made: list[WireEvent] = []
    last: PageKey | None = None  # the last page of the chain that is being merged
    for event in events:
        previous = made[-1] if made else None
        match event:
            case StoredEvent(key, parent, content):
                follows = parent is not None and parent == last
                if not (follows and isinstance(previous, BlockStored) and _add(previous, key, content)):
                    made.append(_block_stored(key, parent, content, page_size))
                last = key
            case RemovedEvent(key):
                if isinstance(previous, BlockRemoved):
                    previous.block_hashes.append(block_hash(key))
                else:
                    made.append(BlockRemoved([block_hash(key)]))
            case ClearedEvent():
                made.append(AllBlocksCleared())
    return made


def _block_stored(key: PageKey, parent: PageKey | None, content: PageContent, page_size: int) -> BlockStored:
    behind = None if parent is None else block_hash(parent)
    event = BlockStored([block_hash(key)], behind, list(content.tokens), page_size)
    if not content.media:
        return event
    return msgspec.structs.replace(event, lora_name=None, extra_keys=[_extra_keys(content)])


def _add(event: BlockStored, key: PageKey, content: PageContent) -> bool:
    """Adds a page to the event of those before it. False if only one of both has images."""
    if bool(content.media) is (event.extra_keys is msgspec.UNSET):
        return False
    event.block_hashes.append(block_hash(key))
    event.token_ids.extend(content.tokens)
    if not isinstance(event.extra_keys, msgspec.UnsetType):
        event.extra_keys.append(_extra_keys(content))
    return True


def _extra_keys(content: PageContent) -> tuple[tuple[str, int], ...]:
    """Identities in 64 hex digits: Dynamo takes a shorter one for no image at all, and the block for one of text."""
    return tuple((identity.hex().ljust(_IDENTITY_DIGITS, "0"), offset) for identity, offset in content.media)


class BatchEncoder:
    """Encodes batches of one format as msgpack. Not thread-safe."""

    def __init__(self, format: KvEventsFormat) -> None:
        self._format = format
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, timestamp_s: float, events: Sequence[WireEvent]) -> bytes:
        """A batch of events that happened by `timestamp_s`, in seconds since the epoch."""
        laid_out = [self._lay_out(event) for event in events]
        if self._format is KvEventsFormat.MAPS:
            return self._encoder.encode({"ts": timestamp_s, "events": laid_out, "data_parallel_rank": _RANK})
        return self._encoder.encode((timestamp_s, laid_out, _RANK))

    def _lay_out(self, event: WireEvent) -> object:
        if self._format is not KvEventsFormat.ARRAYS:
            return event
        fields = (field for field in msgspec.structs.astuple(event) if field is not msgspec.UNSET)  # only the last ones
        return (type(event).__name__, *fields)
