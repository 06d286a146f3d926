"""Tickets: who may call whom, once. No gRPC here."""

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


def test_a_ticket_lets_its_call_in_once():
    issuer, verifier = CallTokenIssuer(KEY, WORKER), CallTokenVerifier(KEY, WORKER)
    token = issuer.issue(METHOD, BODY)
    assert verifier.check(METHOD, BODY, token) is None
    assert verifier.check(METHOD, BODY, token) is CallTokenFault.REPLAYED
    assert verifier.check(METHOD, BODY, issuer.issue(METHOD, BODY)) is None


def test_no_ticket_is_no_entry():
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
def test_a_ticket_is_for_one_secret_one_method_and_these_bytes(key, method, body):
    verifier = CallTokenVerifier(KEY, WORKER)
    assert verifier.check(METHOD, BODY, CallTokenIssuer(key, WORKER).issue(method, body)) is CallTokenFault.FORGED


def test_what_was_captured_means_nothing_to_the_workers_successor():
    token = CallTokenIssuer(KEY, WORKER).issue(METHOD, BODY)
    assert CallTokenVerifier(KEY, SUCCESSOR).check(METHOD, BODY, token) is CallTokenFault.OTHER_INCARNATION


@given(st.data())
def test_no_changed_bit_goes_unnoticed(data: st.DataObject):
    token = bytearray(CallTokenIssuer(KEY, WORKER).issue(METHOD, BODY))
    at = data.draw(st.integers(0, 8 * len(token) - 1))
    token[at // 8] ^= 1 << at % 8
    assert CallTokenVerifier(KEY, WORKER).check(METHOD, BODY, bytes(token)) is CallTokenFault.FORGED


@given(st.binary(max_size=200))
def test_garbage_is_no_ticket(garbage: bytes):
    assert CallTokenVerifier(KEY, WORKER).check(METHOD, BODY, garbage) is CallTokenFault.FORGED


@given(st.permutations(range(40)), st.lists(st.integers(0, 39), max_size=40))
def test_calls_may_overtake_each_other_and_none_comes_twice(order: list[int], again: list[int]):
    issuer, verifier = CallTokenIssuer(KEY, WORKER), CallTokenVerifier(KEY, WORKER)
    tickets = [issuer.issue(METHOD, BODY) for _ in range(40)]
    assert [verifier.check(METHOD, BODY, tickets[i]) for i in order] == [None] * 40
    assert all(verifier.check(METHOD, BODY, tickets[i]) is CallTokenFault.REPLAYED for i in again)


def test_what_is_too_old_to_be_known_is_refused():
    issuer, verifier = CallTokenIssuer(KEY, WORKER), CallTokenVerifier(KEY, WORKER)
    first, second, *_, last = [issuer.issue(METHOD, BODY) for _ in range(WINDOW_CALLS + 1)]
    assert verifier.check(METHOD, BODY, last) is None
    assert verifier.check(METHOD, BODY, first) is CallTokenFault.REPLAYED
    assert verifier.check(METHOD, BODY, second) is None


def test_sessions_are_bounded_and_forgers_take_no_room():
    verifier = CallTokenVerifier(KEY, WORKER)
    mine = CallTokenIssuer(KEY, WORKER)
    assert verifier.check(METHOD, BODY, mine.issue(METHOD, BODY)) is None
    for _ in range(2 * MAX_SESSIONS):
        verifier.check(METHOD, BODY, CallTokenIssuer(OTHER_KEY, WORKER).issue(METHOD, BODY))
    assert len(verifier._sessions) == 1
    for _ in range(MAX_SESSIONS):
        assert verifier.check(METHOD, BODY, CallTokenIssuer(KEY, WORKER).issue(METHOD, BODY)) is None
    assert len(verifier._sessions) == MAX_SESSIONS


def test_neither_secret_nor_key_is_shown():
    trust = ClusterTrust(secret=b"x" * 32)
    assert "xxx" not in repr(trust)
    assert trust.key("call-token") != trust.key("registration")
