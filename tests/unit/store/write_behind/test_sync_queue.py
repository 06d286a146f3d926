"""Bounds of the queue while the store is away."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.errors import Broken
from baton.domain.ids import AttemptId, RequestId
from baton.domain.lifecycle import RequestState
from baton.domain.request import FinishReason, OutputToken, TokenLogprobs
from baton.store.store import SequenceRecord
from baton.store.write_behind.journal_buffer import MAX_ENTRY_TOKENS, JournalBuffer
from baton.store.write_behind.record_sync import RecordSync
from baton.store.write_behind.sync_queue import MAX_ENTRIES, SyncQueue
from baton.store.write_chain import PutSequence, WriteJournal


def tokens(start: int, end: int) -> list[OutputToken]:
    return [OutputToken(index, 5) for index in range(start, end)]


def emit(sync: RecordSync, num_tokens: int) -> None:
    sync.journal.append(tokens(0, num_tokens), num_cached_tokens=0, finish=None, failure_code="")


def decoding(queue: SyncQueue, id: str, *, num_tokens: int, stored: bool = True) -> RecordSync:
    record = SequenceRecord(RequestId(id), 1, RequestState.DECODING, "router", "tiny", num_prompt_tokens=3)
    sync = RecordSync(record, stored=record if stored else None)
    queue.add_sequence(sync)
    emit(sync, num_tokens)
    queue.update(sync)
    return sync


def finish(queue: SyncQueue, sync: RecordSync) -> None:
    sync.update(replace(sync.desired, state=RequestState.FINISHED))
    queue.update(sync)


def over_limit(queue: SyncQueue) -> bool:
    return queue.over_limit


def lags(queue: SyncQueue) -> bool:
    return queue.lags


def test_oldest_ended_sequences_are_dropped_over_the_token_limit() -> None:
    queue = SyncQueue(max_ended=100, max_ended_tokens=25)
    syncs = [decoding(queue, name, num_tokens=10) for name in "abcd"]
    for sync in syncs[:2]:
        finish(queue, sync)
    assert not over_limit(queue)
    finish(queue, syncs[2])
    assert over_limit(queue)
    assert queue.drop_oldest() == "a"
    assert not over_limit(queue)
    assert [queue.sequences.get(RequestId(name)) for name in "abcd"] == [None, *syncs[1:]]


def test_a_written_sequence_frees_its_tokens() -> None:
    queue = SyncQueue(max_ended=1, max_ended_tokens=10)
    for name in "abc":
        sync = decoding(queue, name, num_tokens=10)
        finish(queue, sync)
        assert not queue.over_limit
        batch = queue.next_batch(due=True)
        assert batch.complete
        [[journal, end]] = batch.chains
        assert isinstance(journal.write, WriteJournal)
        queue.journal_written(sync, journal.write.entries[0])
        assert end.after == sync.desired
        assert queue.has_due  # its end
        sync.stored = sync.desired
        queue.update(sync)
        assert queue.empty
        assert queue.sequences.get(RequestId(name)) is None


def test_a_batch_is_bounded_and_takes_the_longest_waiting() -> None:
    queue = SyncQueue(max_ended=1, max_ended_tokens=1)
    syncs = [decoding(queue, str(number), num_tokens=1) for number in range(MAX_ENTRIES + 3)]
    first = queue.next_batch(due=True).journals
    assert (first.syncs, first.complete) == (tuple(syncs[:MAX_ENTRIES]), False)
    for sync, entry in zip(first.syncs, first.entries, strict=True):
        queue.journal_written(sync, entry)
    assert queue.next_batch(due=True).journals.syncs == tuple(syncs[MAX_ENTRIES:])


def test_a_long_journal_is_split_and_requeued_behind_others() -> None:
    queue = SyncQueue(max_ended=1, max_ended_tokens=1)
    long = decoding(queue, "long", num_tokens=MAX_ENTRY_TOKENS + 1)
    batch = queue.next_batch(due=True).journals
    assert not batch.complete
    other = decoding(queue, "other", num_tokens=1)
    queue.journal_written(long, batch.entries[0])
    rest = queue.next_batch(due=True).journals
    assert rest.syncs == (other, long)
    assert rest.entries[1].first == MAX_ENTRY_TOKENS


def test_no_journal_entry_for_a_sequence_the_store_lacks() -> None:
    queue = SyncQueue(max_ended=1, max_ended_tokens=1)
    sync = decoding(queue, "a", num_tokens=1, stored=False)
    batch = queue.next_batch(due=True)
    assert batch.journals.entries == ()
    assert [type(planned.write) for planned in batch.chains[0]] == [PutSequence, WriteJournal]
    sync.stored = sync.desired
    queue.update(sync)
    assert [entry.id for entry in queue.next_batch(due=True).journals.entries] == [AttemptId(RequestId("a"), 1)]


def test_buffered_logprobs_count_as_tokens() -> None:
    journal = JournalBuffer()
    known = TokenLogprobs(-1.0, ((1, -1.0), (2, -2.0)))
    journal.append([OutputToken(0, 1), OutputToken(1, 1, known)], num_cached_tokens=0, finish=None, failure_code="")
    assert journal.num_buffered == 5


_JOURNAL_STEPS = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 4), st.booleans()),
    st.tuples(st.just("mark_written"), st.integers(0, 12), st.booleans()),
    st.sampled_from([("mark_end_stored",), ("rewind",), ("close",)]),
)


@given(st.lists(_JOURNAL_STEPS, max_size=12))
def test_a_journal_is_due_while_it_has_news(steps: list[tuple[Any, ...]]) -> None:
    journal, num_tokens = JournalBuffer(), 0
    for name, *given_values in steps:
        if name == "append":
            added, ends = given_values
            finish = FinishReason.STOP if ends else None
            end = num_tokens + added
            journal.append(tokens(num_tokens, end), num_cached_tokens=0, finish=finish, failure_code="")
            num_tokens = journal.first + len(journal.tokens)
        elif name == "mark_written":
            journal.mark_written(min(given_values[0], len(journal.tokens)), ends=given_values[1] and journal.ended)
        else:
            getattr(journal, name)()
        has_news = len(journal.tokens) > journal.num_written or (journal.ended and not journal.end_written)
        assert journal.due == (has_news and not journal.closed)


def test_a_part_of_an_append_that_leaves_a_gap_is_due() -> None:
    journal = JournalBuffer()
    with pytest.raises(Broken, match="cannot take token 5"):
        journal.append([*tokens(0, 1), *tokens(5, 6)], num_cached_tokens=0, finish=None, failure_code="")
    assert journal.due


def test_a_journal_refuses_a_gap() -> None:
    journal = JournalBuffer()
    journal.append(tokens(0, 2), num_cached_tokens=0, finish=None, failure_code="")
    with pytest.raises(Broken, match="cannot take token 3"):
        journal.append(tokens(3, 4), num_cached_tokens=0, finish=None, failure_code="")


def test_what_the_store_never_had_goes_before_what_it_may_have_lost() -> None:
    queue = SyncQueue(max_ended=10, max_ended_tokens=10)
    over = [decoding(queue, f"over-{number}", num_tokens=0) for number in range(3)]
    for sync in over:
        finish(queue, sync)
        sync.stored = sync.desired
        queue.update(sync)
    assert queue.empty
    queue.mark_reset()
    late = decoding(queue, "late", num_tokens=0)
    finish(queue, late)
    late.status.stale = True  # the store did not answer for it
    queue.update(late)
    assert queue.next_sync() is late
    assert lags(queue)
    late.stored, late.status.stale = late.desired, False
    queue.update(late)
    assert not lags(queue)
    assert queue.num_pending == len(over)
    found = []
    while (old := queue.next_sync()) is not None:
        assert isinstance(old, RecordSync)
        found.append(old)
        old.status.stale = False
        queue.update(old)
    assert found == over[::-1], "the newest first"
    assert queue.empty
