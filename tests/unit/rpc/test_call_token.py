"""Call tokens: valid for one caller, callee and call. No gRPC."""

import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.ids import Incarnation
from baton.domain.trust import ClusterTrust
from baton.rpc.call_token import MAX_SESSIONS, WINDOW_CALLS, CallTokenFault, CallTokenIssuer, CallTokenVerifier

KEY, OTHER_KEY = secrets.token_bytes(32), secrets.token_bytes(32)
WORKER, SUCCESSOR = Incarnation(2**63 + 1), Incarnation(3)
METHOD, BODY = "/baton.v1.Handoff/ReadPages", b"\x08\x01\x10\x02"


def test_a_token_is_accepted_once():
    issuer, verifier = CallTokenIssuer(KEY, WORKER), CallTokenVerifier(KEY, WORKER)
    token = issuer.issue(METHOD, BODY)
    assert verifier.check(METHOD, BODY, token) is None
    assert verifier.check(METHOD, BODY, token) is CallTokenFault.REPLAYED
    assert verifier.check(METHOD, BODY, issuer.issue(METHOD, BODY)) is None


def test_a_missing_token_is_a_fault():
    assert CallTokenVerifier(KEY, WORKER).check(METHOD, BODY, None) is CallTokenFault.MISSING


@pytest.mark.parametrize(
    ("key", "method", "body"),
    [
        (OTHER_KEY, METHOD, BODY),
        (KEY, "/baton.v1.Decode/Abort", BODY),
        (KEY, METHOD, BODY + b"\0"),
        (KEY, METHOD, b""),
    ],
    ids=["another secret", "another method", "a longer body", "no body"],
)
def test_a_token_is_bound_to_secret_method_and_bytes(key, method, body):
    verifier = CallTokenVerifier(KEY, WORKER)
    assert verifier.check(METHOD, BODY, CallTokenIssuer(key, WORKER).issue(method, body)) is CallTokenFault.FORGED


def test_a_token_is_invalid_for_another_incarnation():
    token = CallTokenIssuer(KEY, WORKER).issue(METHOD, BODY)
    assert CallTokenVerifier(KEY, SUCCESSOR).check(METHOD, BODY, token) is CallTokenFault.OTHER_INCARNATION


@given(st.data())
def test_every_flipped_bit_is_detected(data: st.DataObject):
    token = bytearray(CallTokenIssuer(KEY, WORKER).issue(METHOD, BODY))
    at = data.draw(st.integers(0, 8 * len(token) - 1))
    token[at // 8] ^= 1 << at % 8
    assert CallTokenVerifier(KEY, WORKER).check(METHOD, BODY, bytes(token)) is CallTokenFault.FORGED


@given(st.binary(max_size=200))
def test_garbage_is_a_forged_token(garbage: bytes):
    assert CallTokenVerifier(KEY, WORKER).check(METHOD, BODY, garbage) is CallTokenFault.FORGED


@given(st.permutations(range(40)), st.lists(st.integers(0, 39), max_size=40))
def test_calls_may_arrive_in_any_order_but_only_once(order: list[int], again: list[int]):
    issuer, verifier = CallTokenIssuer(KEY, WORKER), CallTokenVerifier(KEY, WORKER)
    tokens = [issuer.issue(METHOD, BODY) for _ in range(40)]
    assert [verifier.check(METHOD, BODY, tokens[i]) for i in order] == [None] * 40
    assert all(verifier.check(METHOD, BODY, tokens[i]) is CallTokenFault.REPLAYED for i in again)


def test_a_call_older_than_the_window_is_refused():
    issuer, verifier = CallTokenIssuer(KEY, WORKER), CallTokenVerifier(KEY, WORKER)
    first, second, *_, last = [issuer.issue(METHOD, BODY) for _ in range(WINDOW_CALLS + 1)]
    assert verifier.check(METHOD, BODY, last) is None
    assert verifier.check(METHOD, BODY, first) is CallTokenFault.REPLAYED
    assert verifier.check(METHOD, BODY, second) is None


def test_sessions_are_bounded_and_forged_tokens_add_none():
    verifier = CallTokenVerifier(KEY, WORKER)
    mine = CallTokenIssuer(KEY, WORKER)
    assert verifier.check(METHOD, BODY, mine.issue(METHOD, BODY)) is None
    for _ in range(2 * MAX_SESSIONS):
        verifier.check(METHOD, BODY, CallTokenIssuer(OTHER_KEY, WORKER).issue(METHOD, BODY))
    assert len(verifier._sessions) == 1
    for _ in range(MAX_SESSIONS):
        assert verifier.check(METHOD, BODY, CallTokenIssuer(KEY, WORKER).issue(METHOD, BODY)) is None
    assert len(verifier._sessions) == MAX_SESSIONS


def test_repr_shows_neither_secret_nor_key():
    trust = ClusterTrust(secret=b"x" * 32)
    assert "xxx" not in repr(trust)
    assert trust.key("call-token") != trust.key("registration")
