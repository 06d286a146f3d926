"""Watches the reception book: who claims what, and what is written into journals. Stands between it and everybody.

The book is only as right as its answers, so they are checked here, one by one: a call has one owner at a time, nobody
takes it from an owner that is well, an older attempt writes nothing (I3), and a journal says what one model says
(I2, I4, I10).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from baton.domain.ids import OwnerId, RequestId
from baton.state.base import CallRecord, CallStatus, JournalEntry, StateBook, Written
from simulation.oracle import Violation

Breach = Callable[[RequestId, Sequence[int]], str]
"""The rule that these tokens of a job break; "" if none, and for a job that nobody knows."""


class WitnessedBook:
    """A `StateBook` that tells `violated` what is wrong. `is_well`: whether an owner lives and can reach the book."""

    def __init__(
        self,
        book: StateBook,
        is_well: Callable[[OwnerId], bool],
        breach: Breach,
        violated: Callable[[Violation], None],
    ) -> None:
        self._book = book
        self._is_well = is_well
        self._breach = breach
        self._violated = violated
        self._epochs: dict[RequestId, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._book, name)

    async def claim_call(self, id: RequestId, epoch: int, owner: OwnerId) -> CallRecord | None:
        """See `CallStore.claim_call`."""
        before = await self._book.get_call(id)
        claimed = await self._book.claim_call(id, epoch, owner)
        if claimed is not None and before is not None:
            self._check_claim(before, claimed, epoch)
        return claimed

    async def write_journal(self, entries: Sequence[JournalEntry]) -> list[Written]:
        """See `CallStore.write_journal`."""
        attempts = [await self._attempt(entry.id.request_id) for entry in entries]
        written = await self._book.write_journal(entries)
        for entry, attempt, what in zip(entries, attempts, written, strict=True):
            if what is Written.DONE and entry.id.attempt < attempt:
                self._violate("I3", f"{entry.id} writes tokens, and attempt {attempt} is in the book", entry)
            if what is Written.DONE:
                await self._check_tokens(entry)
        return written

    def _check_claim(self, before: CallRecord, claimed: CallRecord, epoch: int) -> None:
        newest = max(before.epoch, self._epochs.get(before.id, 0))
        self._epochs[claimed.id] = claimed.epoch
        if epoch != newest:
            why = f"{claimed.owner} claims it from epoch {epoch}, and it is at {newest}"
            self._violated(Violation("I3", why, before.id))
        if before.status is CallStatus.OPEN and before.owner != claimed.owner and self._is_well(before.owner):
            self._violated(Violation("I3", f"{claimed.owner} takes it from {before.owner}, which is well", before.id))

    async def _check_tokens(self, entry: JournalEntry) -> None:
        journal = await self._book.read_journal(entry.id.request_id, 0, 0.0)
        said = [token.token for token in journal.tokens]
        if [token.index for token in journal.tokens] != list(range(len(said))):
            self._violate("I4", "its journal has a gap, or says something twice", entry)
        if rule := self._breach(entry.id.request_id, said):
            self._violate(rule, f"its journal says {said}: not what one model says", entry)

    async def _attempt(self, id: RequestId) -> int:
        record = await self._book.get(id)
        return record.attempt if record is not None else 0

    def _violate(self, rule: str, why: str, entry: JournalEntry) -> None:
        self._violated(Violation(rule, why, entry.id.request_id))
