"""Check numbers of tokens: every single flipped bit of a checked message is detected or harmless."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError

from baton.domain.errors import LinkBroken
from baton.rpc.gen import common_pb2, decode_pb2, handoff_pb2, prefill_pb2
from baton.rpc.tokens.token_check import Checked, set_check, verify_check

PLAIN = common_pb2.OutputToken(index=7, token=1234)
SCORED = common_pb2.OutputToken(index=8, token=99, logprob=-0.5, top=[common_pb2.TokenLogprob(token=5, logprob=-1.5)])
MESSAGES: list[Checked] = [
    prefill_pb2.Sealed(first_token=PLAIN),
    prefill_pb2.Sealed(first_token=SCORED, finish_reason=common_pb2.FINISH_REASON_STOP),
    handoff_pb2.Seal(first_token=PLAIN, num_pages=3),
    decode_pb2.Tokens(tokens=[PLAIN]),
    decode_pb2.Tokens(tokens=[PLAIN, SCORED], finish_reason=common_pb2.FINISH_REASON_LENGTH),
]


def content(message: Checked) -> tuple[object, ...]:
    """The fields that reach a client."""
    tokens = message.tokens if isinstance(message, decode_pb2.Tokens) else [message.first_token]
    read = [(token.index, token.token, token.logprob, [(e.token, e.logprob) for e in token.top]) for token in tokens]
    return read, message.finish_reason


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_no_flipped_bit_changes_a_token_unnoticed(message: Checked):
    set_check(message)
    verify_check(message)
    sent = message.SerializeToString()
    num_detected = 0
    for bit in range(8 * len(sent)):
        damaged = bytearray(sent)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            received = type(message).FromString(bytes(damaged))
            verify_check(received)
        except (DecodeError, LinkBroken):
            num_detected += 1
        else:
            assert content(received) == content(message)
    assert num_detected > 4 * len(sent)


@pytest.mark.parametrize("empty", [prefill_pb2.Sealed(), handoff_pb2.Seal(num_pages=3), decode_pb2.Tokens()])
def test_a_message_without_a_token_is_damaged(empty: Checked):
    with pytest.raises(LinkBroken, match="without a token"):
        verify_check(empty)


def test_an_accepted_that_became_a_seal_is_damaged():
    sent = bytearray(prefill_pb2.PrefillEvent(accepted=prefill_pb2.Accepted()).SerializeToString())
    sent[0] ^= 0x10
    received = prefill_pb2.PrefillEvent.FromString(bytes(sent))
    assert received.WhichOneof("event") == "sealed"
    with pytest.raises(LinkBroken):
        verify_check(received.sealed)


def test_a_message_without_a_number_is_accepted():
    for message in MESSAGES:
        message.ClearField("check")
        verify_check(message)
