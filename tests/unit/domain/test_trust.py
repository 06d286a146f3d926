"""Registration signatures: only a holder of the secret can sign a worker's identity and address."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.domain.ids import Incarnation, WorkerId
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.domain.worker import WorkerLoad, WorkerRecord, WorkerRole, WorkerStatus

OURS, THEIRS = ClusterTrust(b"o" * 32), ClusterTrust(b"t" * 32)
RECORD = WorkerRecord(WorkerId("p"), WorkerRole.PREFILL, Incarnation(5), "10.0.0.1:50051", "m", "f", 16, 100, 100)


def wearing(signature: str) -> WorkerRecord:
    return replace(RECORD, signature=signature)


def test_a_signature_with_the_same_secret_is_valid():
    assert OURS.verify(wearing(OURS.sign(RECORD)))
    assert OPEN_CLUSTER.verify(RECORD)


@pytest.mark.parametrize(
    ("here", "signature", "why"),
    [
        (OURS, THEIRS.sign(RECORD), "a cluster secret here, another one there"),
        (OURS, "ünï", "a cluster secret here, another one there"),
        (OURS, "", "a cluster secret here, none there"),
        (OPEN_CLUSTER, OURS.sign(RECORD), "no cluster secret here, one there"),
    ],
)
def test_any_other_signature_is_invalid_with_a_reason(here: ClusterTrust, signature: str, why: str):
    assert not here.verify(wearing(signature))
    assert why in here.mismatch(wearing(signature))


@pytest.mark.parametrize(
    "change",
    [
        {"id": WorkerId("q")},
        {"role": WorkerRole.DECODE},
        {"incarnation": Incarnation(6)},
        {"address": "10.6.6.6:50051"},
    ],
    ids=str,
)
def test_a_signature_is_bound_to_role_id_incarnation_and_address(change: dict[str, Any]):
    assert not OURS.verify(replace(wearing(OURS.sign(RECORD)), **change))


def test_a_signature_does_not_cover_load_and_status():
    later = replace(wearing(OURS.sign(RECORD)), load=WorkerLoad(running_rows=3), status=WorkerStatus.DRAINING)
    assert OURS.verify(later)


def test_each_purpose_has_its_own_key():
    assert OURS.key("call-token") != OURS.key("registration")
    assert OURS.key("call-token") != THEIRS.key("call-token")
    assert OPEN_CLUSTER.key("call-token") is None


def test_in_a_rotation_both_secrets_verify_and_the_first_signs():
    both = ClusterTrust(b"t" * 32, second_secret=b"o" * 32)
    assert both.sign(RECORD) == THEIRS.sign(RECORD)
    assert both.verify(wearing(OURS.sign(RECORD)))
    assert both.verify(wearing(THEIRS.sign(RECORD)))
    assert not OURS.verify(wearing(both.sign(RECORD)))
    assert not both.verify(wearing(ClusterTrust(b"x" * 32).sign(RECORD)))
