"""Problems that the oracle reports."""

from __future__ import annotations

import pytest

from chaos.checks.oracle import GeneratedAnswer, GeneratedChoice, collect_answer, compare
from chaos.clients.client import COMPLETIONS, ClientRequest, Event, ReceivedUsage, StreamEnd, Transcript

REQUEST = ClientRequest("q", COMPLETIONS, {"prompt": "x"})
USAGE = ReceivedUsage(5, 4, 9, 0)
EXPECTED = GeneratedAnswer((GeneratedChoice((1, 2, 3), "abc", "length"), GeneratedChoice((4,), "d", "stop")), USAGE)
NONE = frozenset[str]()


def transcript_of(
    *events: tuple[int, int, str, str], end: StreamEnd | None = StreamEnd.DONE, code: str = ""
) -> Transcript:
    transcript = Transcript(REQUEST, usage=USAGE)
    for choice, token, text, finish in events:
        transcript.add_event(Event("", choice, (token,), text, finish, 0.0))
    transcript.end, transcript.code = end, code
    return transcript


WHOLE = ((0, 1, "a", ""), (1, 4, "d", "stop"), (0, 2, "b", ""), (0, 3, "c", "length"))


def test_interleaved_choices_are_collected() -> None:
    assert collect_answer(transcript_of(*WHOLE).events) == EXPECTED
    assert list(compare(transcript_of(*WHOLE), EXPECTED, NONE)) == []


def test_gap_duplicate_and_other_tokens_are_wrong() -> None:
    gap = WHOLE[:2] + WHOLE[3:]
    duplicate = (*WHOLE[:1], *WHOLE)
    other = ((0, 9, "a", ""), *WHOLE[1:])
    other_text = ((0, 1, "A", ""), *WHOLE[1:])
    for events in (gap, duplicate, other, other_text, WHOLE[1:2], ()):
        assert len(list(compare(transcript_of(*events), EXPECTED, NONE))) == 1, events


def test_all_tokens_without_an_end_are_wrong() -> None:
    for end in (StreamEnd.LOST, StreamEnd.TIMED_OUT, None):
        assert list(compare(transcript_of(*WHOLE, end=end), EXPECTED, NONE)) != []


def test_only_allowed_errors_are_accepted() -> None:
    failed = transcript_of(WHOLE[0], end=StreamEnd.FAILED, code="no_workers")
    assert list(compare(failed, EXPECTED, frozenset({"no_workers"}))) == []
    assert list(compare(failed, EXPECTED, NONE)) != []
    wrong_so_far = transcript_of((0, 7, "a", ""), end=StreamEnd.FAILED, code="no_workers")
    assert list(compare(wrong_so_far, EXPECTED, frozenset({"no_workers"}))) != []


def test_a_hung_up_client_received_a_prefix() -> None:
    assert list(compare(transcript_of(*WHOLE[:3], end=StreamEnd.HUNG_UP), EXPECTED, NONE)) == []
    assert list(compare(transcript_of((0, 2, "b", ""), end=StreamEnd.HUNG_UP), EXPECTED, NONE)) != []


def test_tokens_of_a_call_that_was_sent_again_were_received_too() -> None:
    for first, num_problems in (((0, 1, "a", ""), 0), ((0, 9, "a", ""), 1)):
        transcript = transcript_of(first)
        transcript.call_id = "call-1"
        transcript.drop_answer()
        assert transcript.usage is None
        transcript.usage = USAGE
        for event in transcript_of(*WHOLE).events:
            transcript.add_event(event)
        assert len(transcript.dropped) == 1
        assert len(list(compare(transcript, EXPECTED, NONE))) == num_problems


@pytest.mark.parametrize(
    "usage",
    [
        None,
        ReceivedUsage(6, 4, 10, 0),
        ReceivedUsage(5, 3, 8, 0),
        ReceivedUsage(5, 4, 8, 0),
        ReceivedUsage(5, 4, 9, 6),
        ReceivedUsage(5, 4, 9, -1),
    ],
    ids=["none", "another prompt", "a token less", "another sum", "more cached than there is", "negative"],
)
def test_a_wrong_usage_is_a_problem(usage: ReceivedUsage | None) -> None:
    transcript = transcript_of(*WHOLE)
    transcript.usage = usage
    assert len(list(compare(transcript, EXPECTED, NONE))) == 1
