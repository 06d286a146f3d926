"""What a NIXL source tells its pullers, as bytes in `SourceInfo.metadata`. Called by `nixl` and `nixl_mover`."""

from __future__ import annotations

import msgspec
import xxhash

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation, WorkerId
from baton.transfer.base import SourceInfo
from baton.transfer.region import MemoryKind, MemoryRegion


class NixlMetadata(msgspec.Struct, frozen=True):
    """NIXL itself accepted a flipped byte in `agent`, its own metadata; hence `digest`, the xxh3-64 of that."""

    agent: bytes
    digest: int
    kind: MemoryKind
    device_id: int


def agent_name(role: str, worker_id: WorkerId, incarnation: Incarnation) -> str:
    """A restarted worker has another name: NIXL refuses to replace an agent of the same one."""
    return f"{role}:{worker_id}:{incarnation:x}"


def encode_metadata(agent: bytes, region: MemoryRegion) -> bytes:
    """For a source whose agent describes itself by `agent` and serves `region`."""
    digest = xxhash.xxh3_64_intdigest(agent)
    return msgspec.msgpack.encode(NixlMetadata(agent, digest, region.kind, region.device_id))


def decode_metadata(source: SourceInfo) -> NixlMetadata:
    """Raises `LinkBroken` for bytes that `encode_metadata` did not make."""
    try:
        metadata = msgspec.msgpack.decode(source.metadata, type=NixlMetadata)
    except msgspec.DecodeError as error:
        raise LinkBroken(f"{source.worker_id}: metadata cannot be read: {error}") from error
    if xxhash.xxh3_64_intdigest(metadata.agent) != metadata.digest:
        raise LinkBroken(f"{source.worker_id}: metadata was damaged on its way")
    return metadata
