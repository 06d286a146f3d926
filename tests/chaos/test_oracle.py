"""What the oracle calls wrong."""

from __future__ import annotations

from chaos.client import COMPLETIONS, End, Event, Question, Transcript
from chaos.oracle import Answer, Choice, answer_in, compare

QUESTION = Question("q", COMPLETIONS, {"prompt": "x"})
EXPECTED = Answer((Choice((1, 2, 3), "abc", "length"), Choice((4,), "d", "stop")))
NONE = frozenset[str]()


def heard(*events: tuple[int, int, str, str], end: End | None = End.DONE, code: str = "") -> Transcript:
    transcript = Transcript(QUESTION)
    for choice, token, text, finish in events:
        transcript.hear(Event("", choice, (token,), text, finish, 0.0))
    transcript.end, transcript.code = end, code
    return transcript


WHOLE = ((0, 1, "a", ""), (1, 4, "d", "stop"), (0, 2, "b", ""), (0, 3, "c", "length"))


def test_choices_are_put_together_however_they_are_mixed() -> None:
    assert answer_in(heard(*WHOLE)) == EXPECTED
    assert list(compare(heard(*WHOLE), EXPECTED, NONE)) == []


def test_gap_duplicate_and_other_tokens_are_wrong() -> None:
    gap = WHOLE[:2] + WHOLE[3:]
    duplicate = (*WHOLE[:1], *WHOLE)
    other = ((0, 9, "a", ""), *WHOLE[1:])
    other_text = ((0, 1, "A", ""), *WHOLE[1:])
    for events in (gap, duplicate, other, other_text, WHOLE[1:2], ()):
        assert len(list(compare(heard(*events), EXPECTED, NONE))) == 1, events


def test_no_end_is_wrong_even_with_all_tokens() -> None:
    for end in (End.LOST, End.LATE, None):
        assert list(compare(heard(*WHOLE, end=end), EXPECTED, NONE)) != []


def test_an_error_is_right_only_where_it_is_allowed() -> None:
    failed = heard(WHOLE[0], end=End.FAILED, code="no_workers")
    assert list(compare(failed, EXPECTED, frozenset({"no_workers"}))) == []
    assert list(compare(failed, EXPECTED, NONE)) != []
    wrong_so_far = heard((0, 7, "a", ""), end=End.FAILED, code="no_workers")
    assert list(compare(wrong_so_far, EXPECTED, frozenset({"no_workers"}))) != []


def test_who_hung_up_heard_a_beginning() -> None:
    assert list(compare(heard(*WHOLE[:3], end=End.HUNG_UP), EXPECTED, NONE)) == []
    assert list(compare(heard((0, 2, "b", ""), end=End.HUNG_UP), EXPECTED, NONE)) != []
