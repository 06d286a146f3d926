"""Reads the state store while a cell or a soak runs, so `history` can compare it with the clients' events.

It reads past the proxies, and once more after the end, since write-behind lags by design.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from baton.domain.errors import BatonError
from baton.domain.ids import RequestId
from baton.store.store import JournalPart, SequenceRecord, StateStore
from chaos.checks.history import ClientHistory, SequenceHistory, check
from chaos.clients.client import StreamEnd, Transcript
from chaos.testbed.cluster import WaitTimeout, eventually

WRITTEN_TIMEOUT_S = 10.0
LOOK_INTERVAL_S = 0.25
NO_WAIT_S = 0.001


class StoreWatcher:
    """Observations of one cell's sequences in the store, over time."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._observations: defaultdict[RequestId, list[SequenceRecord]] = defaultdict(list)

    async def observe(self, transcripts: Iterable[Transcript]) -> None:
        """Observes every sequence of the known calls once. Skips a store that is away."""
        for transcript in transcripts:
            for sequence in _sequence_ids(transcript):
                try:
                    record = await self._store.get(sequence)
                except BatonError:
                    return
                if record is not None and (
                    not self._observations[sequence] or self._observations[sequence][-1] != record
                ):
                    self._observations[sequence].append(record)

    def clear(self) -> None:
        """Forgets earlier observations after the store was lost."""
        self._observations.clear()

    async def watch(self, transcripts: Callable[[], Iterable[Transcript]]) -> None:
        """Observes repeatedly until cancelled."""
        while True:
            await self.observe(transcripts())
            await asyncio.sleep(LOOK_INTERVAL_S)  # the polling interval

    async def contradictions(self, transcripts: Sequence[Transcript]) -> list[str]:
        """All contradictions after the store has caught up, and sequences that never end in it."""
        known = [t for t in transcripts if t.call_id and t.end is not StreamEnd.REFUSED]
        problems = []
        try:
            await eventually(lambda: self._caught_up(known), WRITTEN_TIMEOUT_S, "the store has every sequence's end")
        except WaitTimeout as late:
            problems.append(f"{late}: {await self._unfinished(known)}")
        for transcript in known:
            histories = [
                await self._history(choice, sequence) for choice, sequence in enumerate(_sequence_ids(transcript))
            ]
            tenant = await self._tenant(transcript)
            problems += [str(each) for each in check(ClientHistory.of(transcript), histories, tenant)]
        return problems

    async def _caught_up(self, transcripts: Sequence[Transcript]) -> bool:
        return not await self._unfinished(transcripts)

    async def _unfinished(self, transcripts: Sequence[Transcript]) -> list[str]:
        await self.observe(transcripts)
        last = [(sequence, seen[-1]) for sequence, seen in self._observations.items() if seen]
        return [f"{sequence} is {record.state.value}" for sequence, record in last if not record.state.terminal]

    async def _history(self, choice: int, sequence: RequestId) -> SequenceHistory:
        return SequenceHistory(choice, tuple(self._observations[sequence]), await self._journal(sequence))

    async def _tenant(self, transcript: Transcript) -> str | None:
        """The tenant in the call's record; None for a call that nobody's key asked for, or without a record."""
        if transcript.request.tenant is None:
            return None
        try:
            call = await self._store.get_call(RequestId(transcript.call_id))
        except BatonError:
            return None
        return None if call is None or not call.body else call.tenant

    async def _journal(self, sequence: RequestId) -> JournalPart | None:
        try:
            part = await self._store.read_journal(sequence, 0, NO_WAIT_S)
        except BatonError:
            return None
        return part if part.tokens else None


def _sequence_ids(transcript: Transcript) -> list[RequestId]:
    """The call's id names its first choice, `-1`, `-2`, ... the others."""
    num_choices = int(transcript.request.parameters.get("n", 1))
    return [
        RequestId(transcript.call_id + (f"-{n}" if n else "")) for n in range(num_choices if transcript.call_id else 0)
    ]
