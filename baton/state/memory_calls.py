"""Calls, owners and journals of a `MemoryBook`. Knows requests only through the shelf it is given.

Lifetimes run on the injected clock, in seconds; a reader that waits for tokens waits on the running loop's clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from baton.domain.ids import OwnerId, RequestId
from baton.domain.request import FinishReason, OutputToken
from baton.state import ledger
from baton.state.base import CallRecord, CallStatus, JournalEntry, JournalPart, RequestRecord, Written
from baton.state.bell import rang_within
from baton.state.options import BookOptions


class Shelf(Protocol):
    """Where a book keeps its request records."""

    def find(self, id: RequestId) -> RequestRecord | None: ...

    def keep(self, record: RequestRecord) -> None: ...


@dataclass(frozen=True, slots=True)
class _KeptCall:
    record: CallRecord
    expires_at: float


@dataclass(slots=True)
class _Journal:
    tokens: list[OutputToken] = field(default_factory=list)
    num_cached_tokens: int = 0
    finish: FinishReason | None = None
    failure_code: str = ""
    expires_at: float = 0.0

    @property
    def ended(self) -> bool:
        return self.finish is not None or bool(self.failure_code)

    def has_news(self, start: int) -> bool:
        return len(self.tokens) > start or (self.ended and len(self.tokens) == start)


class MemoryCalls:
    """The `CallStore` of a `MemoryBook`, which checks that the book is open before it calls here."""

    def __init__(self, shelf: Shelf, options: BookOptions, clock: Callable[[], float]) -> None:
        self._shelf = shelf
        self._options = options
        self._clock = clock
        self._calls: dict[RequestId, _KeptCall] = {}  # ordered by expiry: every write moves to the end
        self._open: dict[RequestId, None] = {}  # in the order in which they were opened
        self._leases: dict[OwnerId, float] = {}
        self._journals: dict[RequestId, _Journal] = {}
        self._readers: dict[RequestId, set[asyncio.Event]] = {}
        self._closed = False

    def close(self) -> None:
        """Lets every reader go."""
        self._closed = True
        for readers in self._readers.values():
            for news in readers:
                news.set()

    def open(self, record: CallRecord) -> bool:
        ledger.check_opened(record)
        self._forget()
        if record.id in self._calls:
            return False
        self._keep(record)
        if self._leases.get(record.owner, 0.0) <= self._clock():
            self.hold(record.owner)
        return True

    def end(self, id: RequestId, epoch: int, status: CallStatus) -> bool:
        ledger.check_ended(id, status)
        call = self.find(id)
        if call is None or call.epoch > epoch:
            return False
        self._keep(replace(call, status=status))
        return True

    def find(self, id: RequestId) -> CallRecord | None:
        kept = self._calls.get(id)
        return kept.record if kept and self._clock() < kept.expires_at else None

    def claim(self, id: RequestId, epoch: int, owner: OwnerId) -> CallRecord | None:
        call = self.find(id)
        if call is None or call.epoch != epoch or call.status is CallStatus.ENDED:
            return None
        router_id = ledger.router_of(owner)
        for job in call.jobs:
            record = self._shelf.find(job)
            if record is None:
                self._shelf.keep(ledger.placeholder(job, router_id, epoch + 1))
            elif carried_on := ledger.resumed(record, router_id, epoch + 1):
                self._shelf.keep(carried_on)
        claimed = replace(call, owner=owner, epoch=epoch + 1, status=CallStatus.OPEN)
        self._keep(claimed)
        return claimed

    def hold(self, owner: OwnerId) -> None:
        self._leases[owner] = self._clock() + self._options.owner_ttl_s

    def let_go(self, owner: OwnerId) -> None:
        self._leases.pop(owner, None)

    def orphans(self) -> list[CallRecord]:
        now = self._clock()
        self._forget()
        self._leases = {owner: until for owner, until in self._leases.items() if now < until}
        calls = (self._calls[id].record for id in self._open)
        return list(itertools.islice((c for c in calls if c.owner not in self._leases), self._options.max_orphans))

    def write(self, entries: Sequence[JournalEntry]) -> list[Written]:
        for entry in entries:
            ledger.check_entry(entry)
        self._forget()
        return [self._write(entry) for entry in entries]

    async def read(self, id: RequestId, start: int, wait_s: float) -> JournalPart:
        with self._reading(id) as news:
            if not self._journal(id).has_news(start):
                await self._await_news(id, start, news, wait_s)
        journal = self._journal(id)
        if not journal.has_news(start):
            return JournalPart((), 0, None, "")
        return JournalPart(
            tuple(journal.tokens[start:]), journal.num_cached_tokens, journal.finish, journal.failure_code
        )

    def _write(self, entry: JournalEntry) -> Written:
        id = entry.id.request_id
        record = self._shelf.find(id)
        if record is None:
            return Written.GAP
        if record.attempt > entry.id.attempt:
            return Written.SUPERSEDED
        journal = self._journal(id)
        if entry.tokens and entry.tokens[0].index > len(journal.tokens):
            return Written.GAP
        has_news = bool(entry.tokens) and entry.tokens[-1].index >= len(journal.tokens)
        if not journal.ended and (has_news or entry.ends):
            self._append(journal, entry)
            self._journals.pop(id, None)
            self._journals[id] = journal
        return Written.DONE

    def _append(self, journal: _Journal, entry: JournalEntry) -> None:
        num_held = len(journal.tokens)
        journal.tokens.extend(token for token in entry.tokens if token.index >= num_held)
        journal.num_cached_tokens = entry.num_cached_tokens
        journal.finish, journal.failure_code = entry.finish, entry.failure_code
        journal.expires_at = self._clock() + self._options.retention_s
        for news in self._readers.get(entry.id.request_id, ()):
            news.set()

    @contextlib.contextmanager
    def _reading(self, id: RequestId) -> Iterator[asyncio.Event]:
        news = asyncio.Event()
        self._readers.setdefault(id, set()).add(news)
        try:
            yield news
        finally:
            self._readers[id].discard(news)
            if not self._readers[id]:
                del self._readers[id]

    async def _await_news(self, id: RequestId, start: int, news: asyncio.Event, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while await rang_within(news, max(0.0, deadline - loop.time())):
            news.clear()
            if self._journal(id).has_news(start) or self._closed:
                return

    def _journal(self, id: RequestId) -> _Journal:
        journal = self._journals.get(id)
        return journal if journal and self._clock() < journal.expires_at else _Journal()

    def _keep(self, record: CallRecord) -> None:
        self._calls.pop(record.id, None)
        self._calls[record.id] = _KeptCall(record, self._clock() + self._options.retention_s)
        if record.status is CallStatus.OPEN:
            self._open.setdefault(record.id)
        else:
            self._open.pop(record.id, None)

    def _forget(self) -> None:
        """Drops what is past its retention."""
        now = self._clock()
        while self._calls and (call := next(iter(self._calls.values()))).expires_at <= now:
            del self._calls[call.record.id]
            self._open.pop(call.record.id, None)
        while self._journals and (journal := next(iter(self._journals.items())))[1].expires_at <= now:
            del self._journals[journal[0]]
