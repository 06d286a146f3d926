"""A state store that checks claims and journal writes. Wraps the store for all processes.

Every operation is checked: a call has one owner at a time, no router claims it from a healthy owner, an older attempt
writes nothing (I3), and a journal holds the tokens of one model (I2, I4, I10).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from baton.domain.ids import AttemptId, Ballot, OwnerId, RequestId
from baton.store.store import NO_BALLOT, CallOwner, CallRecord, CallStatus, JournalEntry, StateStore, WriteOutcome
from baton.store.write_chain import ChainedWrite, EndCall, WriteJournal, WriteResult
from simulation.checks.invariants import Violation

BrokenRule = Callable[[RequestId, Sequence[int]], str]
"""The rule that these tokens of a sequence break; "" if none, and for an unknown sequence."""


class CheckedStore:
    """A `StateStore` that reports violations to `on_violation`. `is_healthy`: the owner lives and can reach the
    store."""

    def __init__(
        self,
        store: StateStore,
        is_healthy: Callable[[OwnerId], bool],
        broken_rule: BrokenRule,
        on_violation: Callable[[Violation], None],
        owners: dict[RequestId, tuple[OwnerId, float]],
    ) -> None:
        """`owners`: receives the latest owner of every call, and when the call was first entered.

        An abandoned call has none: its client has left, and no router has a copy.
        """
        self._store = store
        self._is_healthy = is_healthy
        self._broken_rule = broken_rule
        self._on_violation = on_violation
        self._owners = owners
        self._ballots: dict[RequestId, Ballot] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def on_data_lost(self) -> None:
        """Forgets ballots that the store no longer has."""
        self._ballots.clear()

    async def put_call(self, record: CallRecord) -> CallOwner:
        """See `CallStore.put_call`."""
        answer = await self._store.put_call(record)
        self._add_owner(record.id, answer.owner)
        return answer

    async def end_call(
        self,
        id: RequestId,
        ballot: Ballot,
        status: CallStatus,
        trace: bytes = b"",
        ended_sequences: Sequence[RequestId] = (),
    ) -> bool:
        """See `CallStore.end_call`."""
        ended = await self._store.end_call(id, ballot, status, trace, ended_sequences)
        if ended and status is CallStatus.ABANDONED:
            self._owners.pop(id, None)
        return ended

    async def claim_call(
        self, id: RequestId, ballot: Ballot, owner: OwnerId, *, floor: int = 0, seed: CallRecord | None = None
    ) -> CallRecord | None:
        """See `CallStore.claim_call`."""
        before = await self._store.get_call(id)
        claimed = await self._store.claim_call(id, ballot, owner, floor=floor, seed=seed)
        if claimed is not None:
            self._add_owner(id, claimed.owner)
        if claimed is not None and before is not None:
            self._check_claim(before, claimed, ballot)
        return claimed

    async def write_chains(self, chains: Sequence[Sequence[ChainedWrite]]) -> list[list[WriteResult]]:
        """See `StateStore.write_chains`. A journal is compared with the attempts before the first write."""
        journals = [write for chain in chains for write in chain if isinstance(write, WriteJournal)]
        before = {id(write): [await self._newest(entry.id.request_id) for entry in write.entries] for write in journals}
        found = await self._store.write_chains(chains)
        for chain, results in zip(chains, found, strict=True):
            for write, result in zip(chain, results, strict=False):
                if result.owner is not None:
                    self._add_owner(write.id, result.owner.owner)
                elif isinstance(write, EndCall) and result.accepted and write.status is CallStatus.ABANDONED:
                    self._owners.pop(write.id, None)
                elif isinstance(write, WriteJournal):
                    await self._check_journal(write.entries, before[id(write)], result.outcomes)
        return found

    async def write_journal(self, entries: Sequence[JournalEntry]) -> list[WriteOutcome]:
        """See `CallStore.write_journal`."""
        attempts = [await self._newest(entry.id.request_id) for entry in entries]
        written = await self._store.write_journal(entries)
        await self._check_journal(entries, attempts, written)
        return written

    async def _check_journal(
        self, entries: Sequence[JournalEntry], attempts: Sequence[AttemptId], written: Sequence[WriteOutcome]
    ) -> None:
        """`attempts`: those that the store had before."""
        for entry, attempt, what in zip(entries, attempts, written, strict=True):
            if what is WriteOutcome.DONE and entry.id.order < attempt.order:
                self._violate("I3", f"{entry.id} writes tokens, and {attempt} is in the store", entry)
            if what is WriteOutcome.DONE:
                await self._check_tokens(entry)

    def _add_owner(self, id: RequestId, owner: OwnerId) -> None:
        now = asyncio.get_running_loop().time()
        self._owners[id] = owner, self._owners.get(id, (owner, now))[1]

    def _check_claim(self, before: CallRecord, claimed: CallRecord, ballot: Ballot) -> None:
        newest = max(before.ballot, self._ballots.get(before.id, NO_BALLOT))
        self._ballots[claimed.id] = claimed.ballot
        if ballot != newest:
            why = f"{claimed.owner} claims it from ballot {ballot}, and it is at {newest}"
            self._on_violation(Violation("I3", why, before.id))
        if before.status is CallStatus.OPEN and before.owner != claimed.owner and self._is_healthy(before.owner):
            self._on_violation(
                Violation("I3", f"{claimed.owner} takes it from {before.owner}, which is well", before.id)
            )

    async def _check_tokens(self, entry: JournalEntry) -> None:
        journal = await self._store.read_journal(entry.id.request_id, 0, 0.0)
        tokens = [token.token for token in journal.tokens]
        if [token.index for token in journal.tokens] != list(range(len(tokens))):
            self._violate("I4", "its journal has a gap, or says something twice", entry)
        if rule := self._broken_rule(entry.id.request_id, tokens):
            self._violate(rule, f"its journal says {tokens}: not what one model says", entry)

    async def _newest(self, id: RequestId) -> AttemptId:
        record = await self._store.get(id)
        return record.attempt_id if record is not None else AttemptId(id, 0)

    def _violate(self, rule: str, why: str, entry: JournalEntry) -> None:
        self._on_violation(Violation(rule, why, entry.id.request_id))
