"""What a NIXL source tells its pullers, as bytes in `SourceInfo.metadata`. Called by `nixl` and `nixl_mover`."""

from __future__ import annotations

import msgspec
import xxhash

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation, WorkerId
from baton.transfer.base import SourceInfo
from baton.transfer.region import MemoryKind, MemoryRegion

_DIGEST_BYTES = 8


class NixlMetadata(msgspec.Struct, frozen=True):
    """`agent` is NIXL's own metadata; NIXL accepted a flipped byte in it, hence the digest in front of all this."""

    agent: bytes
    kind: MemoryKind
    device_id: int


def agent_name(role: str, worker_id: WorkerId, incarnation: Incarnation) -> str:
    """A restarted worker has another name: NIXL refuses to replace an agent of the same one."""
    return f"{role}:{worker_id}:{incarnation:x}"


def encode_metadata(agent: bytes, region: MemoryRegion) -> bytes:
    """For a source whose agent describes itself by `agent` and serves `region`."""
    body = msgspec.msgpack.encode(NixlMetadata(agent, region.kind, region.device_id))
    return xxhash.xxh3_64_digest(body) + body


def decode_metadata(source: SourceInfo) -> NixlMetadata:
    """Raises `LinkBroken` for bytes that `encode_metadata` did not make."""
    digest, body = source.metadata[:_DIGEST_BYTES], source.metadata[_DIGEST_BYTES:]
    if xxhash.xxh3_64_digest(body) != digest:
        raise LinkBroken(f"{source.worker_id}: metadata was damaged on its way")
    try:
        return msgspec.msgpack.decode(body, type=NixlMetadata)
    except msgspec.DecodeError as error:  # a source of another version
        raise LinkBroken(f"{source.worker_id}: metadata cannot be read: {error}") from error
