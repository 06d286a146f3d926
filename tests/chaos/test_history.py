"""A good history breaks no rule of the history checker; each planted one breaks its rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.ids import AttemptId, RequestId, first_attempt
from baton.domain.lifecycle import RequestState
from baton.domain.request import FinishReason, OutputToken
from baton.store.store import JournalPart, SequenceRecord
from chaos.checks.history import ClientHistory, Rule, SequenceHistory, check
from chaos.clients.client import Event, StreamEnd

CALL = "cmpl-1"


def event(choice: int, counts: str, token: int, finish: str = "") -> Event:
    return Event(f"{CALL}:{counts}", choice, (token,), str(token), finish, 0.0)


def record(state: RequestState, attempt: int, num_emitted: int) -> SequenceRecord:
    return SequenceRecord(RequestId(CALL), attempt, state, "router-0", "m", 4, num_emitted)


def journal(*tokens: int, finish: FinishReason | None = FinishReason.LENGTH) -> JournalPart:
    return JournalPart(tuple(OutputToken(i, token) for i, token in enumerate(tokens)), 0, finish, "")


CLIENT = ClientHistory(
    CALL,
    (
        event(0, "1.0", 10),
        event(1, "1.1", 20),
        event(0, "2.1", 11),
        event(0, "3.1", 12, "length"),
        event(1, "3.2", 21, "length"),
    ),
    StreamEnd.DONE,
)
FIRST = SequenceHistory(
    0,
    (
        record(RequestState.QUEUED, 1, 0),
        record(RequestState.DECODING, 1, 2),
        record(RequestState.QUEUED, 2, 2),
        record(RequestState.FINISHED, 2, 3),
    ),
    journal(10, 11, 12),
)
SECOND = SequenceHistory(1, (record(RequestState.FINISHED, 1, 2),), journal(20, 21))


def violated_rules(client: ClientHistory, *sequences: SequenceHistory) -> set[Rule]:
    return {found.rule for found in check(client, sequences)}


def test_a_good_history_breaks_no_rule() -> None:
    assert check(CLIENT, [FIRST, SECOND]) == []


STOPPED_EVENTS = (*CLIENT.events[:3], event(0, "3.1", 12, "stop"))
MORE_WRITTEN = replace(FIRST, journal=journal(10, 11, 12, 13), observations=(record(RequestState.FINISHED, 2, 4),))


def test_tokens_behind_a_stop_string_may_be_written() -> None:
    """One message brings several tokens, and is written before its text is read."""
    stopped = replace(CLIENT, events=STOPPED_EVENTS, has_stop_strings=True)
    assert check(stopped, [MORE_WRITTEN]) == []
    assert violated_rules(replace(stopped, has_stop_strings=False), MORE_WRITTEN) == {Rule.COUNTS_AGREE}
    fewer = replace(FIRST, journal=journal(10, 11), observations=(record(RequestState.FINISHED, 2, 2),))
    assert violated_rules(stopped, fewer) == {Rule.COUNTS_AGREE}


def test_a_lost_store_contradicts_nothing() -> None:
    assert check(CLIENT, [SequenceHistory(0, (), None), SequenceHistory(1, (), None)]) == []


def test_a_cancelled_sequence_may_resume_under_a_new_attempt() -> None:
    observations = (record(RequestState.CANCELLED, 1, 2), record(RequestState.FINISHED, 2, 3))
    assert check(CLIENT, [replace(FIRST, observations=observations)]) == []


@pytest.mark.parametrize(("stored", "is_found"), [(None, False), ("steady", False), ("flood", True), ("", True)])
def test_a_call_is_its_tenants_in_the_store(stored: str | None, is_found: bool) -> None:
    found = check(replace(CLIENT, tenant="steady"), [FIRST, SECOND], stored)
    assert [one.rule for one in found] == [Rule.OWN_TENANT] * is_found


def with_events(*events: Event) -> ClientHistory:
    return replace(CLIENT, events=events)


FINISHED = record(RequestState.FINISHED, 2, 3)
OUR_ATTEMPT, THEIR_ATTEMPT = AttemptId(RequestId(CALL), 1, 5), AttemptId(RequestId(CALL), first_attempt(2), 4)
GAP = (event(0, "1.0", 10), event(0, "3.0", 12, "length"))
DUPLICATE = (event(0, "1.0", 10), event(0, "1.0", 10), event(0, "2.0", 11), event(0, "3.0", 12, "length"))
WRONG_CHOICE = (event(0, "1.0", 10), event(0, "1.1", 11))
AFTER_THE_END = (*CLIENT.events, event(0, "4.2", 13))

OF_ANOTHER_CALL = (CLIENT.events[0], replace(CLIENT.events[1], id="cmpl-2:1.1"), *CLIENT.events[2:])

PLANTED: list[tuple[Rule, str, ClientHistory, SequenceHistory]] = [
    (Rule.INDICES, "gap", with_events(*GAP), SequenceHistory(0, (), None)),
    (Rule.INDICES, "duplicate", with_events(*DUPLICATE), SequenceHistory(0, (), None)),
    (Rule.INDICES, "another choice's count", with_events(*WRONG_CHOICE), SequenceHistory(0, (), None)),
    (Rule.OWN_CALL, "an event of another call", with_events(*OF_ANOTHER_CALL), SequenceHistory(0, (), None)),
    (Rule.ENDS_ONCE, "a token after the end", with_events(*AFTER_THE_END), SequenceHistory(0, (), None)),
    (
        Rule.ONE_END,
        "failed, then finished",
        CLIENT,
        replace(FIRST, observations=(record(RequestState.FAILED, 2, 3), FINISHED)),
    ),
    (
        Rule.ONE_END,
        "finished, then run again",
        CLIENT,
        replace(FIRST, observations=(FINISHED, record(RequestState.QUEUED, 3, 3), record(RequestState.FINISHED, 3, 3))),
    ),
    (
        Rule.ONE_END,
        "cancelled, then finished under the same attempt",
        CLIENT,
        replace(FIRST, observations=(record(RequestState.CANCELLED, 2, 2), FINISHED)),
    ),
    (
        Rule.ATTEMPTS_GROW,
        "an older attempt writes again",
        CLIENT,
        replace(FIRST, observations=(record(RequestState.DECODING, 3, 2), FINISHED)),
    ),
    (
        Rule.EMITTED_GROWS,
        "tokens taken back",
        CLIENT,
        replace(FIRST, observations=(record(RequestState.DECODING, 2, 5), FINISHED)),
    ),
    (Rule.JOURNAL_AGREES, "another token", CLIENT, replace(FIRST, journal=journal(10, 99, 12))),
    (
        Rule.JOURNAL_AGREES,
        "a hole in the journal",
        CLIENT,
        replace(FIRST, journal=JournalPart((OutputToken(0, 10), OutputToken(2, 11)), 0, None, "")),
    ),
    (Rule.COUNTS_AGREE, "a journal that ends too late", CLIENT, replace(FIRST, journal=journal(10, 11, 12, 13))),
    (
        Rule.COUNTS_AGREE,
        "a record that counts more",
        CLIENT,
        replace(FIRST, observations=(record(RequestState.FINISHED, 2, 4),)),
    ),
    (
        Rule.ENDS_AGREE,
        "finished for the client, failed in the store",
        CLIENT,
        replace(FIRST, observations=(record(RequestState.FAILED, 2, 3),)),
    ),
    (
        Rule.ENDS_AGREE,
        "failed for the client, finished in the store",
        ClientHistory(CALL, CLIENT.events[:1], StreamEnd.FAILED),
        replace(FIRST, journal=None),
    ),
    (
        Rule.ENDS_AGREE,
        "[DONE] without the choice's end",
        with_events(event(0, "1.0", 10)),
        replace(FIRST, journal=None),
    ),
    (
        Rule.ONE_OWNER,
        "two owners in one epoch",
        CLIENT,
        replace(FIRST, observations=(replace(FINISHED, owner_tag=1), replace(FINISHED, owner_tag=2))),
    ),
    (
        Rule.WRITERS_GROW,
        "an old owner writes the journal",
        CLIENT,
        replace(FIRST, journal=replace(journal(10, 11, 12), writers=(THEIR_ATTEMPT, OUR_ATTEMPT))),
    ),
    (
        Rule.DURABLE,
        "durable, and lost",
        ClientHistory(CALL, CLIENT.events[:1], StreamEnd.LOST, durable=True),
        replace(FIRST, journal=None),
    ),
    (
        Rule.DURABLE,
        "durable, and silent",
        ClientHistory(CALL, (), StreamEnd.TIMED_OUT, durable=True),
        replace(FIRST, observations=(), journal=None),
    ),
]


@pytest.mark.parametrize(
    ("rule", "client", "sequence"),
    [(rule, client, sequence) for rule, _, client, sequence in PLANTED],
    ids=[f"{rule.name}-{name}" for rule, name, _, _ in PLANTED],
)
def test_a_planted_history_is_caught(rule: Rule, client: ClientHistory, sequence: SequenceHistory) -> None:
    assert rule in violated_rules(client, sequence)


def test_every_rule_catches_a_planted_history() -> None:
    assert {rule for rule, _, _, _ in PLANTED} == set(Rule) - {Rule.OWN_TENANT}  # above
