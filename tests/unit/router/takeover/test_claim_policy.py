"""When a router claims a call that it follows: the patience, the floor, the seed and the back-off."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from baton.domain.ids import OwnerId, RequestId
from baton.domain.ownership import CallRole
from baton.services.router.takeover.claim_policy import CLAIM_BACKOFF_S, CallClaim, ClaimPolicy, ClaimStep
from baton.store.store import NO_BALLOT, CallRecord, CallStatus

P = 2.0
ME, OTHER = OwnerId("me/1"), OwnerId("other/1")
CALL = CallRecord(RequestId("c"), OTHER, 1, CallStatus.OPEN, "/v1/completions", b"{}", "", 0, 1, (RequestId("c"),))


def policy(seed: CallRecord | None = CALL) -> ClaimPolicy:
    return ClaimPolicy(ME, P, seed)


def steps(policy: ClaimPolicy, record: CallRecord | None, *times: float) -> list[ClaimStep]:
    return [policy.decide(record, runs_here=False, now=now) for now in times]


def test_a_call_that_another_router_answers_is_followed() -> None:
    assert steps(policy(), CALL, *range(100)) == [ClaimStep.FOLLOW] * 100


def test_an_abandoned_call_is_claimed_at_once() -> None:
    found = replace(CALL, status=CallStatus.ABANDONED, epoch=3)
    reader = policy()
    assert steps(reader, found, 1.0) == [ClaimStep.CLAIM]
    assert reader.claim(found) == CallClaim((3, 0), 0, None)
    reader.on_answer((4, 9), 1.1)
    assert reader.role is CallRole.OWNER


def test_a_lost_call_is_entered_again_after_the_patience() -> None:
    reader = policy()
    assert steps(reader, None, 1.0, 2.0, 2.9) == [ClaimStep.FOLLOW] * 3
    assert steps(reader, None, 3.0) == [ClaimStep.CLAIM]
    assert reader.claim(None) == CallClaim(NO_BALLOT, 0, CALL)


def test_a_lost_call_without_a_copy_is_given_up_after_the_patience() -> None:
    assert steps(policy(None), None, 1.0, 2.0, 3.0) == [ClaimStep.FOLLOW, ClaimStep.FOLLOW, ClaimStep.GIVE_UP]


def test_a_call_that_its_owner_puts_again_is_not_claimed() -> None:
    reader = policy()
    assert steps(reader, None, 1.0, 2.5) == [ClaimStep.FOLLOW] * 2
    assert steps(reader, CALL, 2.9, 3.4) == [ClaimStep.FOLLOW] * 2
    assert steps(reader, None, 3.5, 4.5) == [ClaimStep.FOLLOW] * 2, "the patience begins again"


def test_a_router_that_stood_still_begins_its_patience_again() -> None:
    """SIGSTOP: what it saw before proves nothing about the owners that ran meanwhile."""
    assert steps(policy(), None, 1.0, 9.0, 10.0, 11.0) == [*[ClaimStep.FOLLOW] * 3, ClaimStep.CLAIM]


def test_an_outage_of_the_store_begins_the_patience_again() -> None:
    reader = policy()
    assert steps(reader, None, 1.0, 2.0) == [ClaimStep.FOLLOW] * 2
    reader.on_outage()
    assert steps(reader, None, 3.0, 4.0, 5.0) == [ClaimStep.FOLLOW, ClaimStep.FOLLOW, ClaimStep.CLAIM]


def test_a_ballot_that_workers_have_seen_gets_the_patience_then_a_floor() -> None:
    mine = replace(CALL, owner=ME, status=CallStatus.ABANDONED)
    reader = policy()
    reader.on_superseded((5, 7), 0.0)
    assert reader.role is CallRole.DOUBTFUL
    assert steps(reader, mine, 0.5, 1.5, 2.5) == [ClaimStep.FOLLOW, ClaimStep.FOLLOW, ClaimStep.CLAIM]
    assert reader.claim(mine) == CallClaim((1, 0), 5, None)


def test_the_owner_of_a_seen_ballot_is_followed_once_the_store_shows_it() -> None:
    reader = policy()
    reader.on_superseded((5, 7), 0.0)
    newer = replace(CALL, epoch=5, owner_tag=7)
    assert steps(reader, newer, 1.0, 5.0, 10.0) == [ClaimStep.FOLLOW] * 3
    assert reader.role is CallRole.READER


def test_denied_claims_and_lost_duels_back_off() -> None:
    found = replace(CALL, status=CallStatus.ABANDONED)
    reader, claims, now = policy(), list[float](), 0.0
    while len(claims) < 6:
        if steps(reader, found, now) == [ClaimStep.CLAIM]:
            claims.append(now)
            reader.on_answer(None, now)
        now += 0.125
    pauses = [later - earlier for earlier, later in pairwise(claims)]
    assert pauses == [*CLAIM_BACKOFF_S, CLAIM_BACKOFF_S[-1]]
    owner = policy()
    assert steps(owner, found, 0.0) == [ClaimStep.CLAIM]
    owner.on_answer((2, 1), 0.0)
    owner.on_superseded((3, 2), 0.1)
    assert steps(owner, replace(found, epoch=3, owner_tag=2), 0.2, 0.7) == [ClaimStep.FOLLOW, ClaimStep.CLAIM]


def test_one_claim_is_under_way_at_a_time() -> None:
    reader = policy()
    found = replace(CALL, status=CallStatus.ABANDONED)
    assert steps(reader, found, 1.0, 1.0) == [ClaimStep.CLAIM, ClaimStep.FOLLOW]


def test_an_ended_call_is_over_in_every_role() -> None:
    ended = replace(CALL, status=CallStatus.ENDED, body=b"")
    reader = policy()
    reader.on_superseded((5, 7), 0.0)
    assert steps(reader, ended, 1.0) == [ClaimStep.FINISH]
    assert reader.role is CallRole.OVER


RECORDS = st.none() | st.builds(
    replace,
    st.just(CALL),
    owner=st.sampled_from([ME, OTHER]),
    epoch=st.integers(1, 4),
    owner_tag=st.integers(0, 2),
    status=st.sampled_from([CallStatus.OPEN, CallStatus.ABANDONED]),
)
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["decide", "granted", "denied", "superseded"]), RECORDS, st.floats(0.0, 1.0)), max_size=40
)


@given(ACTIONS)
def test_every_claim_is_above_what_was_seen_in_any_history(actions) -> None:
    reader, now, claiming, seen = policy(), 0.0, False, NO_BALLOT
    for action, record, wait_s in actions:
        now += wait_s
        if claiming:
            granted = (max(seen[0], 1) + 1, 1) if action == "granted" else None
            reader.on_answer(granted, now)
            claiming, seen = False, max(seen, granted or NO_BALLOT)
        elif action == "superseded" and record is not None:
            reader.on_superseded(record.ballot, now)
            seen = max(seen, record.ballot)
        elif reader.decide(record, runs_here=False, now=now) is ClaimStep.CLAIM:
            claiming = True
            claim = reader.claim(record)
            assert max(claim.floor, claim.ballot[0]) >= seen[0]
