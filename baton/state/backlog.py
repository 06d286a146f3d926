"""What is not in the book yet: errands in line, journals that are due, and the bounds on both. Pure bookkeeping.

A live job is never dropped. Of jobs and calls that have ended, the oldest are when there are too many of them, or when
their tokens are too many. Owned by `BookWriter`; knows no book and no time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baton.domain.ids import RequestId
from baton.state.base import JournalEntry
from baton.state.call_errand import CallErrand
from baton.state.errand import Errand

MAX_ENTRIES = 512
MAX_ENTRY_TOKENS = 4096
MAX_BATCH_TOKENS = 32_768


@dataclass(frozen=True, slots=True)
class Batch:
    """Entries for one round trip, each with its errand. `complete`: nothing else was due that could be written."""

    errands: tuple[Errand, ...]
    entries: tuple[JournalEntry, ...]
    complete: bool


class Backlog:
    """Errands by the ids of their jobs and calls, and what of them waits."""

    def __init__(self, max_finished: int, max_finished_tokens: int) -> None:
        self._max_finished = max_finished
        self._max_finished_tokens = max_finished_tokens
        self._jobs: dict[RequestId, Errand] = {}
        self._calls: dict[RequestId, CallErrand] = {}
        self._call_of: dict[RequestId, CallErrand] = {}  # job id -> its open call
        self._line: dict[Errand | CallErrand, None] = {}
        self._due: dict[Errand, None] = {}  # whose journal has something to write
        self._finished: dict[Errand | CallErrand, None] = {}  # not at rest, and ended
        self._num_finished_tokens = 0

    @property
    def num_pending(self) -> int:
        """Jobs and calls whose last change, or last token, is not in the book yet."""
        return len(self._line.keys() | self._due.keys() | self._finished.keys())

    @property
    def empty(self) -> bool:
        """Whether everything is in the book."""
        return not (self._line or self._due or self._finished)

    @property
    def overfull(self) -> bool:
        """Whether `lose_oldest` must be called."""
        return len(self._finished) > self._max_finished or self._num_finished_tokens > self._max_finished_tokens

    @property
    def num_due(self) -> int:
        """Jobs whose journal has something to write."""
        return len(self._due)

    def job(self, id: RequestId) -> Errand | None:
        """The job's errand while it is live or not at rest."""
        return self._jobs.get(id)

    def call(self, id: RequestId) -> CallErrand | None:
        """The call's errand while it is open or not at rest."""
        return self._calls.get(id)

    def next_errand(self) -> Errand | CallErrand | None:
        """The one that has waited longest; it stays first in line until it is done."""
        return next(iter(self._line), None)

    def add_call(self, call: CallErrand) -> None:
        """A call that is open here from now on: jobs that are added later belong to it by their ids."""
        self._calls[call.goal.id] = call
        self._call_of.update(dict.fromkeys(call.goal.jobs, call))
        self.note(call)

    def add_job(self, errand: Errand) -> None:
        """A job that is live here from now on. One whose call is not written is not journalled."""
        id = errand.goal.id
        errand.call = self._call_of.get(id)
        if errand.call is not None:
            errand.call.journals[id] = errand.journal
            if errand.call.trust.forsaken:
                errand.journal.close()
        self._jobs[id] = errand
        self.note(errand)

    def note(self, errand: Errand | CallErrand) -> None:
        """Something about it has changed: it gets in line, unless it waits there or for a journal."""
        if errand.ended and not errand.at_rest and errand not in self._finished:
            self._finished[errand] = None
            self._num_finished_tokens += _num_kept(errand)
        if not errand.done:
            self._line.setdefault(errand)
        if isinstance(errand, Errand) and errand.journal.due:
            self._due.setdefault(errand)
        self.settle(errand)

    def settle(self, errand: Errand | CallErrand) -> None:
        """Takes it off every list that it need not be on any more."""
        if errand.done:
            self._line.pop(errand, None)
        if isinstance(errand, Errand) and not errand.journal.due:
            self._due.pop(errand, None)
            self._requeue(errand)
        if errand.ended and errand.at_rest:
            self._drop(errand)

    def batch(self) -> Batch:
        """The journal entries to write next, those that have waited longest first."""
        errands, entries, num_tokens = list[Errand](), list[JournalEntry](), 0
        for errand in self._due:
            if len(entries) == MAX_ENTRIES or num_tokens >= MAX_BATCH_TOKENS:
                return Batch(tuple(errands), tuple(entries), complete=False)
            entry = errand.entry(MAX_ENTRY_TOKENS)
            if entry is not None:
                errands.append(errand)
                entries.append(entry)
                num_tokens += len(entry.tokens)
        whole = all(len(entry.tokens) < MAX_ENTRY_TOKENS for entry in entries)
        return Batch(tuple(errands), tuple(entries), complete=whole)

    def written(self, errand: Errand, entry: JournalEntry) -> None:
        """The book holds the entry; what is left waits behind the others."""
        errand.journal.written(entry)
        if self._due.pop(errand, self) is not self and errand.journal.due:
            self._due[errand] = None
        self.settle(errand)

    def close(self, errand: Errand) -> None:
        """Its journal is given up."""
        self._num_finished_tokens -= _num_kept(errand) if errand in self._finished else 0
        errand.journal.close()
        self.settle(errand)

    def jobs_of(self, call: CallErrand) -> list[Errand]:
        """The jobs of a call that are live or not at rest."""
        found = (self._jobs.get(id) for id in call.goal.jobs)
        return [errand for errand in found if errand is not None and errand.call is call]

    def doubt(self, errand: Errand) -> None:
        """The book has lost its journal, so it may have lost its record and its call."""
        for mistrusted in (errand.call, errand):
            if mistrusted is not None and not mistrusted.trust.forsaken:
                mistrusted.trust.doubtful = True
                self.note(mistrusted)

    def doubt_live(self) -> None:
        """The book may have lost what it held of the living: each of them looks again."""
        for errand in self._living():
            errand.trust.doubtful = True
            self.note(errand)

    def lose_oldest(self) -> RequestId:
        """Drops what ended first; returns its id."""
        errand = next(iter(self._finished))
        self._line.pop(errand, None)
        if isinstance(errand, Errand):
            self._due.pop(errand, None)
        self._drop(errand)
        if isinstance(errand, Errand):
            errand.journal.close()
            self._requeue(errand)
        return errand.goal.id

    def _requeue(self, errand: Errand) -> None:
        """Its journal is written, or given up: what waited for that may go on."""
        for waiting in (errand, errand.call):
            if waiting is not None and not waiting.done and waiting in self._finished:
                self._line.setdefault(waiting)

    def _drop(self, errand: Errand | CallErrand) -> None:
        if errand in self._finished:
            del self._finished[errand]
            self._num_finished_tokens -= _num_kept(errand)
        if isinstance(errand, Errand):
            if self._jobs.get(errand.goal.id) is errand:
                del self._jobs[errand.goal.id]
        else:
            if self._calls.get(errand.goal.id) is errand:
                del self._calls[errand.goal.id]
            for id in errand.goal.jobs:
                if self._call_of.get(id) is errand:
                    del self._call_of[id]

    def _living(self) -> Iterator[Errand | CallErrand]:
        everyone: list[Errand | CallErrand] = [*self._calls.values(), *self._jobs.values()]
        return (errand for errand in everyone if not errand.ended and not errand.trust.forsaken)


def _num_kept(errand: Errand | CallErrand) -> int:
    return errand.journal.num_kept if isinstance(errand, Errand) else 0
