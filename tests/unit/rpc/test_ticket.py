"""Tickets: who may call whom, once. No gRPC here."""

import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.ids import Incarnation
from baton.domain.trust import ClusterTrust
from baton.rpc.ticket import MAX_SESSIONS, WINDOW_CALLS, TicketFault, TicketIssuer, TicketVerifier

KEY, OTHER_KEY = secrets.token_bytes(32), secrets.token_bytes(32)
WORKER, SUCCESSOR = Incarnation(2**63 + 1), Incarnation(3)
METHOD, BODY = "/baton.v1.Handoff/ReadPages", b"\x08\x01\x10\x02"


def test_a_ticket_lets_its_call_in_once():
    issuer, verifier = TicketIssuer(KEY, WORKER), TicketVerifier(KEY, WORKER)
    ticket = issuer.issue(METHOD, BODY)
    assert verifier.fault(METHOD, BODY, ticket) is None
    assert verifier.fault(METHOD, BODY, ticket) is TicketFault.REPLAYED
    assert verifier.fault(METHOD, BODY, issuer.issue(METHOD, BODY)) is None


def test_no_ticket_is_no_entry():
    assert TicketVerifier(KEY, WORKER).fault(METHOD, BODY, None) is TicketFault.MISSING


@pytest.mark.parametrize(
    ("key", "method", "body"),
    [
        (OTHER_KEY, METHOD, BODY),
        (KEY, "/baton.v1.Decode/Abort", BODY),
        (KEY, METHOD, BODY + b"\0"),
        (KEY, METHOD, b""),
    ],
)
def test_a_ticket_is_for_one_secret_one_method_and_these_bytes(key, method, body):
    verifier = TicketVerifier(KEY, WORKER)
    assert verifier.fault(METHOD, BODY, TicketIssuer(key, WORKER).issue(method, body)) is TicketFault.FORGED


def test_what_was_captured_means_nothing_to_the_workers_successor():
    ticket = TicketIssuer(KEY, WORKER).issue(METHOD, BODY)
    assert TicketVerifier(KEY, SUCCESSOR).fault(METHOD, BODY, ticket) is TicketFault.OTHER_INCARNATION


@given(st.data())
def test_no_changed_bit_goes_unnoticed(data: st.DataObject):
    ticket = bytearray(TicketIssuer(KEY, WORKER).issue(METHOD, BODY))
    at = data.draw(st.integers(0, 8 * len(ticket) - 1))
    ticket[at // 8] ^= 1 << at % 8
    assert TicketVerifier(KEY, WORKER).fault(METHOD, BODY, bytes(ticket)) is TicketFault.FORGED


@given(st.binary(max_size=200))
def test_garbage_is_no_ticket(garbage: bytes):
    assert TicketVerifier(KEY, WORKER).fault(METHOD, BODY, garbage) is TicketFault.FORGED


@given(st.permutations(range(40)), st.lists(st.integers(0, 39), max_size=40))
def test_calls_may_overtake_each_other_and_none_comes_twice(order: list[int], again: list[int]):
    issuer, verifier = TicketIssuer(KEY, WORKER), TicketVerifier(KEY, WORKER)
    tickets = [issuer.issue(METHOD, BODY) for _ in range(40)]
    assert [verifier.fault(METHOD, BODY, tickets[i]) for i in order] == [None] * 40
    assert all(verifier.fault(METHOD, BODY, tickets[i]) is TicketFault.REPLAYED for i in again)


def test_what_is_too_old_to_be_known_is_refused():
    issuer, verifier = TicketIssuer(KEY, WORKER), TicketVerifier(KEY, WORKER)
    first, second, *_, last = [issuer.issue(METHOD, BODY) for _ in range(WINDOW_CALLS + 1)]
    assert verifier.fault(METHOD, BODY, last) is None
    assert verifier.fault(METHOD, BODY, first) is TicketFault.REPLAYED
    assert verifier.fault(METHOD, BODY, second) is None


def test_sessions_are_bounded_and_forgers_take_no_room():
    verifier = TicketVerifier(KEY, WORKER)
    mine = TicketIssuer(KEY, WORKER)
    assert verifier.fault(METHOD, BODY, mine.issue(METHOD, BODY)) is None
    for _ in range(2 * MAX_SESSIONS):
        verifier.fault(METHOD, BODY, TicketIssuer(OTHER_KEY, WORKER).issue(METHOD, BODY))
    assert len(verifier._sessions) == 1
    for _ in range(MAX_SESSIONS):
        assert verifier.fault(METHOD, BODY, TicketIssuer(KEY, WORKER).issue(METHOD, BODY)) is None
    assert len(verifier._sessions) == MAX_SESSIONS


def test_neither_secret_nor_key_is_shown():
    trust = ClusterTrust(secret=b"x" * 32)
    assert "xxx" not in repr(trust)
    assert trust.key("ticket") != trust.key("badge")
