"""Registration signatures: only a holder of the secret can sign a worker's record, and no older one is replayed."""

from __future__ import annotations

from dataclasses import fields, replace
from enum import Enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.ids import Incarnation, WorkerId
from baton.domain.timing.step_time import StepTimeFit
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust, RecordVerifier
from baton.domain.worker import (
    Activity,
    LinkRecord,
    MediaCounts,
    PageCounts,
    WorkerBudgets,
    WorkerLoad,
    WorkerRecord,
    WorkerRole,
)
from baton.store.redis.record_codec import worker_from_json, worker_to_json

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


def other(value: object) -> Any:
    """Another value of the same kind."""
    match value:
        case Enum():
            return next(member for member in type(value) if member is not value)
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "x"
        case tuple():
            return (*value, LinkRecord(WorkerId("q"), Incarnation(1), "nixl", 1.5, 1))
        case WorkerBudgets():
            return replace(value, prefill_tokens=value.prefill_tokens + 1)
        case WorkerLoad():
            return replace(value, running_rows=value.running_rows + 1)
        case PageCounts():
            return replace(value, live=value.live + 1)
        case None:
            return StepTimeFit((0.1,) * 7, 0.0)
        case MediaCounts():
            return replace(value, num_bytes=value.num_bytes + 1)
        case Activity():
            return replace(value, num_cached_tokens=value.num_cached_tokens + 1)
    raise AssertionError(value)


@pytest.mark.parametrize("name", [field.name for field in fields(WorkerRecord) if field.name != "signature"])
def test_a_signature_covers_every_field(name: str):
    signed = wearing(OURS.sign(RECORD))
    assert not OURS.verify(replace(signed, **{name: other(getattr(signed, name))}))


@pytest.mark.parametrize("name", [field.name for field in fields(WorkerLoad)])
def test_a_signature_covers_every_number_of_the_load(name: str):
    load = WorkerLoad()
    forged = replace(load, **{name: other(getattr(load, name))})
    assert not OURS.verify(replace(wearing(OURS.sign(RECORD)), load=forged))


@given(
    step_age_s=st.floats(0.0, 1e9) | st.integers(0, 100),
    bandwidth=st.floats(0.0, 1e12) | st.integers(0, 2**40),
    incarnation=st.integers(0, 2**64 - 1),
    model=st.text(max_size=20),
    weights=st.tuples(*[st.floats(-1e3, 1e3) | st.integers(-3, 3).map(float)] * 7),
)
def test_a_signature_survives_the_store(
    step_age_s: float, bandwidth: float, incarnation: int, model: str, weights: tuple[float, ...]
):
    links = (LinkRecord(WorkerId("p"), Incarnation(incarnation), "nixl", bandwidth, 1),)
    record = replace(
        RECORD, model=model, links=links, load=WorkerLoad(step_age_s=step_age_s, step_time=StepTimeFit(weights, 0.5))
    )
    signed = replace(record, signature=OURS.sign(record))
    assert OURS.verify(worker_from_json(worker_to_json(signed)))


def announced(number: int) -> WorkerRecord:
    record = replace(RECORD, announcement=number)
    return replace(record, signature=OURS.sign(record))


def test_a_replayed_older_record_is_refused_and_named():
    verifier = RecordVerifier(OURS)
    assert verifier.accept(announced(1))
    assert verifier.accept(announced(3))
    assert verifier.accept(announced(3)), "the same record is read many times"
    assert not verifier.accept(announced(2))
    assert "older (2) than one read before" in verifier.reason(announced(2))


def test_a_forged_record_does_not_move_the_newest_number():
    verifier = RecordVerifier(OURS)
    assert verifier.accept(announced(1))
    assert not verifier.accept(replace(announced(2), announcement=2**60))
    assert verifier.accept(announced(2))


def test_a_forgotten_incarnation_starts_again():
    verifier = RecordVerifier(OURS)
    assert verifier.accept(announced(5))
    verifier.retain(())
    assert verifier.accept(announced(1))


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
