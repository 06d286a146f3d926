"""Open link breakers and their probes."""

from __future__ import annotations

import pytest

from baton.domain.ids import AttemptId, Incarnation, RequestId
from baton.services.router.dispatch.link_breaker import LinkBreakerLimits, LinkBreakers, LinkFailure

LINK = (Incarnation(1), Incarnation(2))
OTHER = (Incarnation(1), Incarnation(3))
LIMITS = LinkBreakerLimits(first_open_s=1.0, max_open_s=4.0, grace_s=10.0)


def attempt(number: int) -> AttemptId:
    return AttemptId(RequestId(f"r{number}"), 1)


@pytest.fixture
def breakers() -> LinkBreakers:
    breakers = LinkBreakers(LIMITS)
    breakers.on_placed(attempt(0), LINK)
    assert breakers.on_failure(attempt(0), LINK, now=0.0) == LinkFailure(1.0, in_grace=False)
    return breakers


def failed_probe(breakers: LinkBreakers, number: int, now: float) -> LinkFailure | None:
    assert breakers.allows(LINK, now)
    breakers.on_placed(attempt(number), LINK)
    return breakers.on_failure(attempt(number), LINK, now)


def test_a_failure_opens_the_breaker_of_its_link_only(breakers):
    assert not breakers.allows(LINK, now=0.99)
    assert breakers.allows(LINK, now=1.0)
    assert breakers.allows(OTHER, now=0.0)


def test_many_failures_of_one_break_count_once(breakers):
    for number in range(1, 9):
        assert breakers.on_failure(attempt(number), LINK, now=0.5) is None
    assert breakers.allows(LINK, now=1.0)


def test_one_attempt_at_a_time_probes_an_open_link(breakers):
    breakers.on_placed(attempt(1), LINK)
    assert not breakers.allows(LINK, now=2.0)
    breakers.on_ended(attempt(1))  # ended without a result
    breakers.on_ended(attempt(1))
    assert breakers.allows(LINK, now=2.0)


def test_open_times_double_and_early_probes_do_not_count(breakers):
    failures = [failed_probe(breakers, n, now) for n, now in enumerate([1.0, 3.0, 7.0, 11.0], start=1)]
    assert failures == [LinkFailure(2.0, True), LinkFailure(4.0, True), LinkFailure(4.0, True), LinkFailure(4.0, False)]
    assert not breakers.allows(LINK, now=14.9)
    assert breakers.allows(LINK, now=15.0)


def test_an_imported_probe_closes_the_breaker(breakers):
    breakers.on_placed(attempt(1), LINK)
    assert breakers.on_imported(attempt(1))
    assert not breakers.on_imported(attempt(1))
    assert len(breakers) == 0
    assert breakers.allows(LINK, now=1.0)
    assert breakers.on_failure(attempt(1), LINK, now=1.0) == LinkFailure(1.0, in_grace=False), "a new breaker"


def test_pages_of_earlier_attempts_do_not_close_a_breaker(breakers):
    assert not breakers.on_imported(attempt(7))
    assert not breakers.allows(LINK, now=0.5)


def test_a_link_that_is_announced_again_is_closed(breakers):
    breakers.on_placed(attempt(1), LINK)
    breakers.retain({LINK, OTHER})
    assert not breakers.allows(LINK, now=5.0)
    breakers.retain({OTHER})
    assert breakers.allows(LINK, now=0.0)
    breakers.on_ended(attempt(1))
    assert not breakers.on_imported(attempt(1))
