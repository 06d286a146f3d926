"""Damaged NIXL metadata and impossible memory break a link, never the process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation, WorkerId
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.kv.memory import MemoryKind
from baton.transfer.base import MemoryRegion, SourceInfo
from baton.transfer.nixl_agent import nixl_available
from baton.transfer.nixl_metadata import MAX_AGENT_BYTES, MAX_DEVICE_ID, decode_metadata, encode_metadata
from tests.fuzz.grpc_messages import corrupted
from tests.fuzz.nixl_subprocess import NUM_CORRUPTED

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120.0
REGION = MemoryRegion(4096, 8, 4096)
GOOD = encode_metadata(b"nixlSerDes|" + bytes(range(256)), REGION)


def source_info(metadata: bytes) -> SourceInfo:
    return SourceInfo(WorkerId("p"), Incarnation(1), "", "nixl", metadata, 4096, 8, 4096)


def sealed(fields: Any) -> bytes:
    """`fields` in a valid envelope."""
    body = msgspec.msgpack.encode(fields)
    return xxhash.xxh3_64_digest(body) + body


def test_encoded_metadata_is_decoded() -> None:
    metadata = decode_metadata(source_info(GOOD))
    assert (metadata.agent[:11], metadata.kind, metadata.device_id) == (b"nixlSerDes|", MemoryKind.DRAM, 0)


@given(corrupted(GOOD))
def test_damage_is_detected_before_the_library(metadata: bytes) -> None:
    if metadata != GOOD:
        with pytest.raises(LinkBroken):
            decode_metadata(source_info(metadata))


def test_only_a_holder_of_the_secret_can_make_metadata() -> None:
    ours, theirs = ClusterTrust(b"o" * 32), ClusterTrust(b"t" * 32)
    metadata = encode_metadata(b"agent", REGION, ours)
    assert decode_metadata(source_info(metadata), ours).agent == b"agent"
    for trust, foreign in ((theirs, metadata), (OPEN_CLUSTER, metadata), (ours, GOOD), (ours, b"")):
        with pytest.raises(LinkBroken, match="another cluster secret"):
            decode_metadata(source_info(foreign), trust)


@given(corrupted(encode_metadata(b"agent", REGION, ClusterTrust(b"o" * 32))))
def test_damage_under_a_secret_is_detected(metadata: bytes) -> None:
    trust = ClusterTrust(b"o" * 32)
    if metadata != encode_metadata(b"agent", REGION, trust):
        with pytest.raises(LinkBroken):
            decode_metadata(source_info(metadata), trust)


@given(st.binary(max_size=100))
def test_garbage_is_no_metadata(metadata: bytes) -> None:
    with pytest.raises(LinkBroken):
        decode_metadata(source_info(metadata))


@pytest.mark.parametrize(
    "change",
    [
        {"agent": b""},
        {"agent": b"x" * (MAX_AGENT_BYTES + 1)},
        {"agent": 5},
        {"kind": "DISK"},
        {"device_id": -1},
        {"device_id": MAX_DEVICE_ID + 1},
        {"device_id": 2**64 - 1},
        {"device_id": "0"},
    ],
    ids=lambda change: str(change)[:30],
)
def test_a_valid_envelope_with_impossible_contents(change: dict[str, Any]) -> None:
    fields = {"agent": b"a", "kind": "DRAM", "device_id": 0}
    assert decode_metadata(source_info(sealed(fields))).agent == b"a"
    with pytest.raises(LinkBroken, match="cannot be read"):
        decode_metadata(source_info(sealed(fields | change)))
    for missing in fields:
        with pytest.raises(LinkBroken):
            decode_metadata(source_info(sealed({name: value for name, value in fields.items() if name != missing})))


@pytest.mark.skipif(nixl_available() is not None, reason=f"NIXL: {nixl_available()}")
def test_a_real_puller_survives_all_of_it() -> None:
    command = [sys.executable, "-m", "tests.fuzz.nixl_subprocess"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr[-2000:]}"
    report = json.loads(done.stdout)
    outcomes = report["outcomes"]
    assert outcomes.pop("good") == "linked"
    assert report["moved"]
    assert len(outcomes) > NUM_CORRUPTED
    assert {name: outcome for name, outcome in outcomes.items() if not outcome.startswith("broken: ")} == {}
    assert {outcome for name, outcome in outcomes.items() if name.startswith("corrupted")} == {
        "broken: prefill-0: metadata was damaged on its way, or made with another cluster secret"
    }
