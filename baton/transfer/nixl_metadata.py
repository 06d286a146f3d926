"""Codec of `SourceInfo.metadata` of NIXL sources. Called by `nixl` and `nixl_mover`.

NIXL 1.5.1 with UCX ends the process with a segmentation fault for some single flipped bits in an agent's metadata. So
a checksum precedes the metadata: a digest in an open cluster (against accidents), else a MAC under the cluster's secret
(against forgery as well).
"""

from __future__ import annotations

import hmac
from typing import Annotated

import msgspec
import xxhash

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation, WorkerId
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.kv.memory import MemoryKind
from baton.transfer.base import MemoryRegion, SourceInfo

MAX_AGENT_BYTES = 1024 * 1024
MAX_DEVICE_ID = 1023


class NixlMetadata(msgspec.Struct, frozen=True):
    """`agent` is NIXL's own metadata, `kind` and `device_id` describe the memory of the pages."""

    agent: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_AGENT_BYTES)]
    kind: MemoryKind
    device_id: Annotated[int, msgspec.Meta(ge=0, le=MAX_DEVICE_ID)]


def agent_name(role: str, worker_id: WorkerId, incarnation: Incarnation) -> str:
    """Name of an agent. It contains the incarnation, as NIXL refuses to replace an agent of the same name."""
    return f"{role}:{worker_id}:{incarnation:x}"


def encode_metadata(agent: bytes, region: MemoryRegion, trust: ClusterTrust = OPEN_CLUSTER) -> bytes:
    """Encodes the metadata `agent` of a source that serves `region`."""
    body = msgspec.msgpack.encode(NixlMetadata(agent, region.kind, region.device_id))
    return _macs(body, trust)[0] + body


def decode_metadata(source: SourceInfo, trust: ClusterTrust = OPEN_CLUSTER) -> NixlMetadata:
    """Decodes a source's metadata. Raises `LinkBroken` unless `encode_metadata` made it with the same `trust`."""
    num_mac_bytes = len(_macs(b"", trust)[0])
    mac, body = source.metadata[:num_mac_bytes], source.metadata[num_mac_bytes:]
    if not any([hmac.compare_digest(mac, valid) for valid in _macs(body, trust)]):
        raise LinkBroken(f"{source.worker_id}: metadata was damaged on its way, or made with another cluster secret")
    try:
        return msgspec.msgpack.decode(body, type=NixlMetadata)
    except msgspec.DecodeError as error:  # a source of another version
        raise LinkBroken(f"{source.worker_id}: metadata cannot be read: {error}") from error


def _macs(body: bytes, trust: ClusterTrust) -> list[bytes]:
    """The valid checksums of `body`, the one to send first."""
    macs = [hmac.digest(key, body, "sha256") for key in trust.keys("nixl-metadata")]
    return macs or [xxhash.xxh3_64_digest(body)]
