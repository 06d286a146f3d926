"""`Hello` links no two workers that compute with different things, and names the part that differs."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from baton.bundled import MODEL_DIR
from baton.domain.fingerprint import Fingerprint, FingerprintPart
from baton.domain.ids import Incarnation, WorkerId
from baton.engine.mailbox import Mailbox
from baton.kv.geometry import KVGeometry, LayerGeometry
from baton.model.loading.identity import checkpoint_root, model_fingerprint
from baton.model.loading.quantization import Quantization
from baton.rpc.gen import handoff_pb2
from baton.rpc.version import PROTOCOL_VERSION
from baton.settings.text_digest import text_digest
from baton.worker.handoff.handoff_handlers import LinkConfig
from baton.worker.handoff.handoff_log import HandoffLog
from baton.worker.handoff.handoff_server import HandoffServicer

GEOMETRY = KVGeometry.of_layers((LayerGeometry(2, 8, 8),), "float32", 16)
PARTS = tuple(FingerprintPart(name, f"{name} 1") for name in ("adapters", "page_size", "tokenizer", "weights"))
OURS = Fingerprint(PARTS)


def parts_of(geometry: KVGeometry) -> Fingerprint:
    return Fingerprint(tuple(FingerprintPart(*part) for part in geometry.parts().items()))


def say_hello(ours: Fingerprint, theirs: Fingerprint, digest: str | None = None) -> handoff_pb2.HelloReply:
    """The reply of a prefill worker with the fingerprint `ours`."""
    terms = LinkConfig(WorkerId("prefill-0"), Incarnation(1), "m", ours, {"stream": b""}, 0, 8, 64, 1.0)
    servicer = HandoffServicer(terms, Mailbox(1), HandoffLog(), None)
    request = handoff_pb2.HelloRequest(
        worker_id="decode-0",
        protocol_version=PROTOCOL_VERSION,
        model="m",
        fingerprint=theirs.digest if digest is None else digest,
        transports=["stream"],
        parts=[handoff_pb2.FingerprintPart(name=part.name, digest=part.digest) for part in theirs.parts],
    )
    context = cast("grpc.aio.ServicerContext[Any, Any]", None)
    return asyncio.run(servicer.Hello(request, context))


def test_equal_fingerprints_link():
    assert say_hello(OURS, Fingerprint(PARTS[::-1])).source.worker_id == "prefill-0"


@pytest.mark.parametrize("number", range(len(PARTS)))
def test_a_part_that_differs_refuses_the_link_and_is_named(number: int):
    name = PARTS[number].name
    theirs = Fingerprint((*PARTS[:number], FingerprintPart(name, "2"), *PARTS[number + 1 :]))
    assert say_hello(OURS, theirs).refused.message == f"{name}: {name} 1 here, 2 there"


def test_an_older_peer_without_parts_links_by_its_digest_only():
    assert say_hello(OURS, Fingerprint(()), OURS.digest).source.worker_id == "prefill-0"
    assert "fingerprint: differs" in say_hello(OURS, Fingerprint(()), "0").refused.message


def test_page_formats_that_differ_refuse_the_link_by_format_or_field():
    ours, halves = (parts_of(KVGeometry.of_layers(GEOMETRY.layers, "float32", 16, groups)) for groups in (1, 2))
    older = Fingerprint(tuple(part for part in ours.parts if part.name in ("dtype", "page_size")))
    assert say_hello(ours, halves).refused.message == "kv_head_groups: 1 here, 2 there"
    message = "page_format: 2 here, 1 there; run one version of Baton on both"
    assert say_hello(ours, older).refused.message == message


def test_models_that_differ_in_one_middle_byte_do_not_link(tmp_path: Path):
    changed = Path(shutil.copytree(MODEL_DIR, tmp_path / "changed"))
    weights = changed / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    ours, theirs = (
        model_fingerprint(path, checkpoint_root(path), text_digest(path), GEOMETRY, Quantization.NONE)
        for path in (MODEL_DIR, changed)
    )
    assert say_hello(ours, theirs).refused.message.startswith("weights: ")
