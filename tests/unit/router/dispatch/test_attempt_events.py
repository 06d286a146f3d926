"""Two racing streams, one order of tokens."""

from __future__ import annotations

import pytest

from baton.domain.errors import ContextOverflow, DeadlineExceeded, Superseded
from baton.domain.request import FinishReason, OutputToken
from baton.rpc.codec import encode_finish, encode_token
from baton.rpc.gen import common_pb2, decode_pb2, prefill_pb2
from services.router.dispatch.attempt_events import (
    AttemptEvent,
    AttemptEventOrder,
    Decoded,
    DecodeImported,
    PrefillAccepted,
    PrefillSealed,
    finish_of,
)
from services.router.dispatch.worker_errors import AttemptFailure, FaultSource, Side, lost_worker

ACCEPTED = prefill_pb2.PrefillEvent(accepted=prefill_pb2.Accepted())
PROGRESS = prefill_pb2.PrefillEvent(progress=prefill_pb2.Progress(num_computed_tokens=3))
IMPORTED = decode_pb2.GenerateEvent(imported=decode_pb2.Imported())


def sealed(index: int = 0, finish: FinishReason | None = None) -> prefill_pb2.PrefillEvent:
    token = encode_token(OutputToken(index, 10 + index))
    message = prefill_pb2.Sealed(first_token=token, finish_reason=encode_finish(finish), num_cached_tokens=8)
    return prefill_pb2.PrefillEvent(sealed=message)


def tokens(*indices: int, finish: FinishReason | None = None) -> decode_pb2.GenerateEvent:
    messages = [encode_token(OutputToken(index, 10 + index)) for index in indices]
    return decode_pb2.GenerateEvent(tokens=decode_pb2.Tokens(tokens=messages, finish_reason=encode_finish(finish)))


def failure(code: str) -> common_pb2.Failure:
    return common_pb2.Failure(code=code, message="said so")


def feed(order: AttemptEventOrder, *events: prefill_pb2.PrefillEvent | decode_pb2.GenerateEvent) -> list[AttemptEvent]:
    seen: list[AttemptEvent] = []
    for event in events:
        if isinstance(event, prefill_pb2.PrefillEvent):
            seen.extend(order.on_prefill_event(event))
        else:
            seen.extend(order.on_decode_event(event))
    return seen


def sealed_event(index: int = 0, finish: FinishReason | None = None) -> PrefillSealed:
    return PrefillSealed(OutputToken(index, 10 + index), 8, finish)


def decoded(*indices: int, finish: FinishReason | None = None) -> Decoded:
    return Decoded(tuple(OutputToken(index, 10 + index) for index in indices), finish)


def test_the_ordinary_order():
    seen = feed(
        AttemptEventOrder(0), ACCEPTED, PROGRESS, sealed(), IMPORTED, tokens(1), tokens(2, 3, finish=FinishReason.STOP)
    )
    assert seen == [
        PrefillAccepted(),
        sealed_event(),
        DecodeImported(),
        decoded(1),
        decoded(2, 3, finish=FinishReason.STOP),
    ]
    assert [finish_of(event) for event in seen] == [None, None, None, None, FinishReason.STOP]


def test_decode_heard_first_waits_for_the_seal():
    order = AttemptEventOrder(5)
    assert feed(order, IMPORTED, tokens(6, 7)) == []
    order.on_stream_ended(Side.DECODE, lost_worker(Side.DECODE, "ended"))
    heard = order.on_prefill_event(sealed(5))
    assert [next(heard), next(heard), next(heard)] == [sealed_event(5), DecodeImported(), decoded(6, 7)]
    with pytest.raises(AttemptFailure, match="decode ended"):
        next(heard)


def test_what_decode_said_before_it_failed_is_not_lost_where_the_seal_is_heard_later():
    order = AttemptEventOrder(5)
    failed = decode_pb2.GenerateEvent(failed=failure("link_broken"))
    assert feed(order, IMPORTED, tokens(6), failed) == []
    order.on_stream_ended(Side.DECODE, lost_worker(Side.DECODE, "ended"))
    heard = order.on_prefill_event(sealed(5))
    assert [next(heard), next(heard), next(heard)] == [sealed_event(5), DecodeImported(), decoded(6)]
    with pytest.raises(AttemptFailure, match="said so"):
        next(heard)


def test_decode_that_fails_before_it_has_landed_does_not_wait_for_the_seal():
    with pytest.raises(AttemptFailure, match="said so"):
        feed(AttemptEventOrder(5), decode_pb2.GenerateEvent(failed=failure("link_broken")))


@pytest.mark.parametrize(
    "events",
    [
        pytest.param((sealed(1),), id="seal too far"),
        pytest.param((sealed(), tokens(2)), id="gap"),
        pytest.param((sealed(), tokens(0)), id="duplicate of the first"),
        pytest.param((sealed(), tokens(1), tokens(1)), id="duplicate"),
        pytest.param((sealed(), tokens(1, 3)), id="gap in a message"),
        pytest.param((tokens(2), sealed()), id="gap in what was held"),
    ],
)
def test_a_gap_or_duplicate_loses_the_attempt(events):
    with pytest.raises(AttemptFailure) as loss:
        feed(AttemptEventOrder(0), *events)
    assert loss.value.error.code == "integrity_failure"


@pytest.mark.parametrize("side", Side)
def test_a_loss_before_the_seal_is_fatal_to_the_attempt(side):
    with pytest.raises(AttemptFailure):
        AttemptEventOrder(0).on_stream_failed(side, lost_worker(side, "died"))


def test_after_the_seal_prefill_may_end_die_or_complain_but_decode_may_not():
    order = AttemptEventOrder(0)
    feed(order, sealed())
    order.on_stream_ended(Side.PREFILL, lost_worker(Side.PREFILL, "ended"))
    order.on_stream_failed(Side.PREFILL, lost_worker(Side.PREFILL, "died"))
    assert feed(order, prefill_pb2.PrefillEvent(failed=failure("lease_ended")), sealed()) == []
    with pytest.raises(AttemptFailure):
        order.on_stream_ended(Side.DECODE, lost_worker(Side.DECODE, "ended"))


def test_prefill_that_ends_without_a_seal_is_lost():
    with pytest.raises(AttemptFailure):
        AttemptEventOrder(0).on_stream_ended(Side.PREFILL, lost_worker(Side.PREFILL, "ended"))


@pytest.mark.parametrize(
    ("code", "from_prefill", "from_decode"),
    [
        ("worker_lost", FaultSource.DECODE, FaultSource.PREFILL),
        ("link_broken", FaultSource.LINK, FaultSource.LINK),
        ("integrity_failure", FaultSource.LINK, FaultSource.LINK),
        ("lease_ended", FaultSource.NOTHING, FaultSource.NOTHING),
        ("sent_back", FaultSource.PREFILL, FaultSource.DECODE),
        ("draining", FaultSource.PREFILL, FaultSource.DECODE),
        ("cancelled", FaultSource.PREFILL, FaultSource.DECODE),
        ("broken", FaultSource.PREFILL, FaultSource.DECODE),
    ],
)
def test_what_a_reported_failure_makes_the_next_attempt_avoid(code, from_prefill, from_decode):
    with pytest.raises(AttemptFailure) as loss:
        feed(AttemptEventOrder(0), prefill_pb2.PrefillEvent(failed=failure(code)))
    assert loss.value.fault_source is from_prefill
    with pytest.raises(AttemptFailure) as loss:
        feed(AttemptEventOrder(0), decode_pb2.GenerateEvent(failed=failure(code)))
    assert loss.value.fault_source is from_decode


@pytest.mark.parametrize("error", [Superseded, DeadlineExceeded, ContextOverflow])
def test_failures_that_another_attempt_cannot_mend_end_the_request(error):
    with pytest.raises(error, match="said so"):
        feed(AttemptEventOrder(0), decode_pb2.GenerateEvent(failed=failure(error.code)))
