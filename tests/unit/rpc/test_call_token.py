"""Call tokens: valid for one caller, callee and call. No gRPC."""

import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.ids import Incarnation
from baton.domain.trust import ClusterTrust
from baton.rpc.call_token import (
    MAX_SESSIONS,
    WINDOW_CALLS,
    CallToken,
    CallTokenFault,
    CallTokenIssuer,
    CallTokenVerifier,
)

KEY, OTHER_KEY = secrets.token_bytes(32), secrets.token_bytes(32)
WORKER, SUCCESSOR = Incarnation(2**63 + 1), Incarnation(3)
METHOD, BODY = "/baton.v1.Handoff/ReadPages", b"\x08\x01\x10\x02"


def check(verifier: CallTokenVerifier, method: str, body: bytes, token: bytes | None) -> CallTokenFault | bool:
    """The fault of a header; True for an accepted one that covers `body`."""
    accepted = verifier.accept(method, token)
    return accepted.covers(body) if isinstance(accepted, CallToken) else accepted


def test_a_token_is_accepted_once():
    issuer, verifier = CallTokenIssuer(KEY, WORKER), CallTokenVerifier((KEY,), WORKER)
    token = issuer.issue(METHOD, BODY)
    assert check(verifier, METHOD, BODY, token) is True
    assert check(verifier, METHOD, BODY, token) is CallTokenFault.REPLAYED
    assert check(verifier, METHOD, BODY, issuer.issue(METHOD, BODY)) is True


def test_a_missing_token_is_a_fault():
    assert check(CallTokenVerifier((KEY,), WORKER), METHOD, BODY, None) is CallTokenFault.MISSING


@pytest.mark.parametrize(
    ("key", "method"), [(OTHER_KEY, METHOD), (KEY, "/baton.v1.Decode/Abort")], ids=["another secret", "another method"]
)
def test_the_header_is_bound_to_secret_and_method(key, method):
    verifier = CallTokenVerifier((KEY,), WORKER)
    assert verifier.accept(METHOD, CallTokenIssuer(key, WORKER).issue(method, BODY)) is CallTokenFault.FORGED


@pytest.mark.parametrize("body", [BODY + b"\0", BODY[:-1], b"", b"\x08\x01\x10\x03"])
def test_the_token_covers_only_its_own_body(body):
    token = CallTokenVerifier((KEY,), WORKER).accept(METHOD, CallTokenIssuer(KEY, WORKER).issue(METHOD, BODY))
    assert isinstance(token, CallToken)
    assert token.num_bytes == len(BODY)
    assert token.covers(BODY)
    assert not token.covers(body)


def test_while_secrets_are_rotated_both_are_valid():
    verifier = CallTokenVerifier((KEY, OTHER_KEY), WORKER)
    for key in (KEY, OTHER_KEY):
        assert check(verifier, METHOD, BODY, CallTokenIssuer(key, WORKER).issue(METHOD, BODY)) is True


def test_a_token_is_invalid_for_another_incarnation():
    token = CallTokenIssuer(KEY, WORKER).issue(METHOD, BODY)
    assert check(CallTokenVerifier((KEY,), SUCCESSOR), METHOD, BODY, token) is CallTokenFault.OTHER_INCARNATION


@given(st.data())
def test_every_flipped_bit_is_detected(data: st.DataObject):
    token = bytearray(CallTokenIssuer(KEY, WORKER).issue(METHOD, BODY))
    at = data.draw(st.integers(0, 8 * len(token) - 1))
    token[at // 8] ^= 1 << at % 8
    assert check(CallTokenVerifier((KEY,), WORKER), METHOD, BODY, bytes(token)) in (CallTokenFault.FORGED, False)


@given(st.binary(max_size=200))
def test_garbage_is_a_forged_token(garbage: bytes):
    assert check(CallTokenVerifier((KEY,), WORKER), METHOD, BODY, garbage) is CallTokenFault.FORGED


@given(st.permutations(range(40)), st.lists(st.integers(0, 39), max_size=40))
def test_calls_may_arrive_in_any_order_but_only_once(order: list[int], again: list[int]):
    issuer, verifier = CallTokenIssuer(KEY, WORKER), CallTokenVerifier((KEY,), WORKER)
    tokens = [issuer.issue(METHOD, BODY) for _ in range(40)]
    assert [check(verifier, METHOD, BODY, tokens[i]) for i in order] == [True] * 40
    assert all(check(verifier, METHOD, BODY, tokens[i]) is CallTokenFault.REPLAYED for i in again)


def test_a_call_older_than_the_window_is_refused():
    issuer, verifier = CallTokenIssuer(KEY, WORKER), CallTokenVerifier((KEY,), WORKER)
    first, second, *_, last = [issuer.issue(METHOD, BODY) for _ in range(WINDOW_CALLS + 1)]
    assert check(verifier, METHOD, BODY, last) is True
    assert check(verifier, METHOD, BODY, first) is CallTokenFault.REPLAYED
    assert check(verifier, METHOD, BODY, second) is True


def test_sessions_are_bounded_and_forged_tokens_add_none():
    verifier = CallTokenVerifier((KEY,), WORKER)
    mine = CallTokenIssuer(KEY, WORKER)
    assert check(verifier, METHOD, BODY, mine.issue(METHOD, BODY)) is True
    for _ in range(2 * MAX_SESSIONS):
        check(verifier, METHOD, BODY, CallTokenIssuer(OTHER_KEY, WORKER).issue(METHOD, BODY))
    assert len(verifier._sessions) == 1
    for _ in range(MAX_SESSIONS):
        assert check(verifier, METHOD, BODY, CallTokenIssuer(KEY, WORKER).issue(METHOD, BODY)) is True
    assert len(verifier._sessions) == MAX_SESSIONS


def test_repr_shows_neither_secret_nor_key():
    trust = ClusterTrust(secret=b"x" * 32)
    assert "xxx" not in repr(trust)
    assert trust.key("call-token") != trust.key("registration")
