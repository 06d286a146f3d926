"""Two racing streams, one order of tokens."""

from __future__ import annotations

import pytest

from baton.domain.errors import ContextOverflow, DeadlineExceeded, Superseded
from baton.domain.request import FinishReason, OutputToken
from baton.rpc.codec import encode_finish, encode_token
from baton.rpc.gen import common_pb2, decode_pb2, prefill_pb2
from services.router.dispatch.conversation import (
    Conversation,
    Decoded,
    DecodeLanded,
    PrefillAccepted,
    PrefillSealed,
    Step,
    finish_of,
)
from services.router.dispatch.loss import AttemptLost, Fault, Side, silent

ACCEPTED = prefill_pb2.PrefillEvent(accepted=prefill_pb2.Accepted())
PROGRESS = prefill_pb2.PrefillEvent(progress=prefill_pb2.Progress(num_computed_tokens=3))
LANDED = decode_pb2.GenerateEvent(landed=decode_pb2.Landed())


def sealed(index: int = 0, finish: FinishReason | None = None) -> prefill_pb2.PrefillEvent:
    token = encode_token(OutputToken(index, 10 + index))
    message = prefill_pb2.Sealed(first_token=token, finish_reason=encode_finish(finish), num_cached_tokens=8)
    return prefill_pb2.PrefillEvent(sealed=message)


def tokens(*indices: int, finish: FinishReason | None = None) -> decode_pb2.GenerateEvent:
    messages = [encode_token(OutputToken(index, 10 + index)) for index in indices]
    return decode_pb2.GenerateEvent(tokens=decode_pb2.Tokens(tokens=messages, finish_reason=encode_finish(finish)))


def failure(code: str) -> common_pb2.Failure:
    return common_pb2.Failure(code=code, message="said so")


def hear(conversation: Conversation, *events: prefill_pb2.PrefillEvent | decode_pb2.GenerateEvent) -> list[Step]:
    steps: list[Step] = []
    for event in events:
        if isinstance(event, prefill_pb2.PrefillEvent):
            steps.extend(conversation.hear_prefill(event))
        else:
            steps.extend(conversation.hear_decode(event))
    return steps


def seal_step(index: int = 0, finish: FinishReason | None = None) -> PrefillSealed:
    return PrefillSealed(OutputToken(index, 10 + index), 8, finish)


def decoded(*indices: int, finish: FinishReason | None = None) -> Decoded:
    return Decoded(tuple(OutputToken(index, 10 + index) for index in indices), finish)


def test_the_ordinary_order():
    steps = hear(
        Conversation(0), ACCEPTED, PROGRESS, sealed(), LANDED, tokens(1), tokens(2, 3, finish=FinishReason.STOP)
    )
    assert steps == [
        PrefillAccepted(),
        seal_step(),
        DecodeLanded(),
        decoded(1),
        decoded(2, 3, finish=FinishReason.STOP),
    ]
    assert [finish_of(step) for step in steps] == [None, None, None, None, FinishReason.STOP]


def test_decode_heard_first_waits_for_the_seal():
    conversation = Conversation(5)
    assert hear(conversation, LANDED, tokens(6, 7)) == []
    conversation.hear_end(Side.DECODE, silent(Side.DECODE, "ended"))
    heard = conversation.hear_prefill(sealed(5))
    assert [next(heard), next(heard), next(heard)] == [seal_step(5), DecodeLanded(), decoded(6, 7)]
    with pytest.raises(AttemptLost, match="decode ended"):
        next(heard)


def test_what_decode_said_before_it_failed_is_not_lost_where_the_seal_is_heard_later():
    conversation = Conversation(5)
    failed = decode_pb2.GenerateEvent(failed=failure("link_broken"))
    assert hear(conversation, LANDED, tokens(6), failed) == []
    conversation.hear_end(Side.DECODE, silent(Side.DECODE, "ended"))
    heard = conversation.hear_prefill(sealed(5))
    assert [next(heard), next(heard), next(heard)] == [seal_step(5), DecodeLanded(), decoded(6)]
    with pytest.raises(AttemptLost, match="said so"):
        next(heard)


def test_decode_that_fails_before_it_has_landed_does_not_wait_for_the_seal():
    with pytest.raises(AttemptLost, match="said so"):
        hear(Conversation(5), decode_pb2.GenerateEvent(failed=failure("link_broken")))


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
    with pytest.raises(AttemptLost) as loss:
        hear(Conversation(0), *events)
    assert loss.value.error.code == "integrity_failure"


@pytest.mark.parametrize("side", Side)
def test_a_loss_before_the_seal_is_fatal_to_the_attempt(side):
    with pytest.raises(AttemptLost):
        Conversation(0).hear_loss(side, silent(side, "died"))


def test_after_the_seal_prefill_may_end_die_or_complain_but_decode_may_not():
    conversation = Conversation(0)
    hear(conversation, sealed())
    conversation.hear_end(Side.PREFILL, silent(Side.PREFILL, "ended"))
    conversation.hear_loss(Side.PREFILL, silent(Side.PREFILL, "died"))
    assert hear(conversation, prefill_pb2.PrefillEvent(failed=failure("lease_ended")), sealed()) == []
    with pytest.raises(AttemptLost):
        conversation.hear_end(Side.DECODE, silent(Side.DECODE, "ended"))


def test_prefill_that_ends_without_a_seal_is_lost():
    with pytest.raises(AttemptLost):
        Conversation(0).hear_end(Side.PREFILL, silent(Side.PREFILL, "ended"))


@pytest.mark.parametrize(
    ("code", "from_prefill", "from_decode"),
    [
        ("worker_lost", Fault.DECODE, Fault.PREFILL),
        ("link_broken", Fault.LINK, Fault.LINK),
        ("integrity_failure", Fault.LINK, Fault.LINK),
        ("lease_ended", Fault.NOTHING, Fault.NOTHING),
        ("sent_back", Fault.PREFILL, Fault.DECODE),
        ("draining", Fault.PREFILL, Fault.DECODE),
        ("cancelled", Fault.PREFILL, Fault.DECODE),
        ("broken", Fault.PREFILL, Fault.DECODE),
    ],
)
def test_what_a_reported_failure_makes_the_next_attempt_avoid(code, from_prefill, from_decode):
    with pytest.raises(AttemptLost) as loss:
        hear(Conversation(0), prefill_pb2.PrefillEvent(failed=failure(code)))
    assert loss.value.fault is from_prefill
    with pytest.raises(AttemptLost) as loss:
        hear(Conversation(0), decode_pb2.GenerateEvent(failed=failure(code)))
    assert loss.value.fault is from_decode


@pytest.mark.parametrize("error", [Superseded, DeadlineExceeded, ContextOverflow])
def test_failures_that_another_attempt_cannot_mend_end_the_request(error):
    with pytest.raises(error, match="said so"):
        hear(Conversation(0), decode_pb2.GenerateEvent(failed=failure(error.code)))
