"""The bounds on what waits for a book that is away."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.errors import Broken
from baton.domain.ids import AttemptId, RequestId
from baton.domain.lifecycle import RequestState
from baton.domain.request import OutputToken, TokenLogprobs
from baton.state.backlog import MAX_ENTRIES, MAX_ENTRY_TOKENS, Backlog
from baton.state.base import RequestRecord
from baton.state.errand import Errand
from baton.state.journal import Journal


def tokens(start: int, end: int) -> list[OutputToken]:
    return [OutputToken(index, 5) for index in range(start, end)]


def emit(errand: Errand, num_tokens: int) -> None:
    errand.journal.add(tokens(0, num_tokens), num_cached_tokens=0, finish=None, failure_code="")


def decoding(backlog: Backlog, id: str, *, num_tokens: int, known: bool = True) -> Errand:
    record = RequestRecord(RequestId(id), 1, RequestState.DECODING, "router", "tiny", num_prompt_tokens=3)
    errand = Errand(record, known=record if known else None)
    backlog.add_job(errand)
    emit(errand, num_tokens)
    backlog.note(errand)
    return errand


def finish(backlog: Backlog, errand: Errand) -> None:
    errand.aim(replace(errand.goal, state=RequestState.FINISHED))
    backlog.note(errand)


def overfull(backlog: Backlog) -> bool:
    return backlog.overfull


def test_ended_jobs_whose_tokens_are_too_many_are_lost_the_oldest_first() -> None:
    backlog = Backlog(max_finished=100, max_finished_tokens=25)
    errands = [decoding(backlog, name, num_tokens=10) for name in "abcd"]
    for errand in errands[:2]:
        finish(backlog, errand)
    assert not overfull(backlog)
    finish(backlog, errands[2])
    assert overfull(backlog)
    assert backlog.lose_oldest() == "a"
    assert not overfull(backlog)
    assert [backlog.job(RequestId(name)) for name in "abcd"] == [None, *errands[1:]]


def test_what_is_written_makes_room() -> None:
    backlog = Backlog(max_finished=1, max_finished_tokens=10)
    for name in "abc":
        errand = decoding(backlog, name, num_tokens=10)
        finish(backlog, errand)
        assert not backlog.overfull
        batch = backlog.batch()
        assert batch.complete
        backlog.written(errand, batch.entries[0])
        assert backlog.next_errand() is errand  # its end may be written now
        errand.known = errand.goal
        backlog.settle(errand)
        assert backlog.empty
        assert backlog.job(RequestId(name)) is None


def test_a_round_trip_is_bounded_and_takes_those_that_waited_longest() -> None:
    backlog = Backlog(max_finished=1, max_finished_tokens=1)
    errands = [decoding(backlog, str(number), num_tokens=1) for number in range(MAX_ENTRIES + 3)]
    first = backlog.batch()
    assert (first.errands, first.complete) == (tuple(errands[:MAX_ENTRIES]), False)
    for errand, entry in zip(first.errands, first.entries, strict=True):
        backlog.written(errand, entry)
    assert backlog.batch().errands == tuple(errands[MAX_ENTRIES:])


def test_a_long_journal_goes_in_pieces_and_lets_others_go_first() -> None:
    backlog = Backlog(max_finished=1, max_finished_tokens=1)
    long = decoding(backlog, "long", num_tokens=MAX_ENTRY_TOKENS + 1)
    batch = backlog.batch()
    assert not batch.complete
    other = decoding(backlog, "other", num_tokens=1)
    backlog.written(long, batch.entries[0])
    rest = backlog.batch()
    assert rest.errands == (other, long)
    assert [token.index for token in rest.entries[1].tokens] == [MAX_ENTRY_TOKENS]


def test_nothing_is_journalled_of_a_job_that_the_book_does_not_know() -> None:
    backlog = Backlog(max_finished=1, max_finished_tokens=1)
    errand = decoding(backlog, "a", num_tokens=1, known=False)
    assert backlog.batch().entries == ()
    errand.known = errand.goal
    assert [entry.id for entry in backlog.batch().entries] == [AttemptId(RequestId("a"), 1)]


def test_a_journal_counts_what_its_logprobs_take() -> None:
    journal = Journal()
    known = TokenLogprobs(-1.0, ((1, -1.0), (2, -2.0)))
    journal.add([OutputToken(0, 1), OutputToken(1, 1, known)], num_cached_tokens=0, finish=None, failure_code="")
    assert journal.num_kept == 5


def test_a_journal_takes_no_gap() -> None:
    journal = Journal()
    journal.add(tokens(0, 2), num_cached_tokens=0, finish=None, failure_code="")
    with pytest.raises(Broken, match="cannot take token 3"):
        journal.add(tokens(3, 4), num_cached_tokens=0, finish=None, failure_code="")
