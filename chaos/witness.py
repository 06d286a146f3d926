"""Reads the reception book while a cell or a soak runs, so that `history` can hold it against what clients heard.

It reads past the proxies, and looks once more after the end: the routers' writers are a little behind by design.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from baton.domain.errors import BatonError
from baton.domain.ids import RequestId
from baton.state.base import JournalPart, RequestRecord, StateBook
from chaos.client import End, Transcript
from chaos.cluster import NotInTime, eventually
from chaos.history import ClientStory, JobStory, check

WRITTEN_TIMEOUT_S = 10.0
LOOK_INTERVAL_S = 0.25
NO_WAIT_S = 0.001


class Witness:
    """What one cell's jobs looked like in the book, over time."""

    def __init__(self, book: StateBook) -> None:
        self._book = book
        self._sightings: defaultdict[RequestId, list[RequestRecord]] = defaultdict(list)

    async def look(self, transcripts: Iterable[Transcript]) -> None:
        """One sighting of every job of calls that are known by now. A book that is away is looked at another time."""
        for transcript in transcripts:
            for job in _jobs(transcript):
                try:
                    record = await self._book.get(job)
                except BatonError:
                    return
                if record is not None and (not self._sightings[job] or self._sightings[job][-1] != record):
                    self._sightings[job].append(record)

    def forget(self) -> None:
        """The book was lost: what was seen before says nothing of what will be."""
        self._sightings.clear()

    async def watch(self, transcripts: Callable[[], Iterable[Transcript]]) -> None:
        """Looks again and again, until cancelled."""
        while True:
            await self.look(transcripts())
            await asyncio.sleep(LOOK_INTERVAL_S)  # the rate of looking itself

    async def contradictions(self, transcripts: Sequence[Transcript]) -> list[str]:
        """All that does not fit, once the book has caught up; and jobs that the book never lets end."""
        known = [t for t in transcripts if t.call_id and t.end is not End.REFUSED]
        problems = []
        try:
            await eventually(lambda: self._caught_up(known), WRITTEN_TIMEOUT_S, "the book has every job's end")
        except NotInTime as late:
            problems.append(f"{late}: {await self._unended(known)}")
        for transcript in known:
            stories = [await self._story(choice, job) for choice, job in enumerate(_jobs(transcript))]
            problems += [str(each) for each in check(ClientStory.of(transcript), stories)]
        return problems

    async def _caught_up(self, transcripts: Sequence[Transcript]) -> bool:
        return not await self._unended(transcripts)

    async def _unended(self, transcripts: Sequence[Transcript]) -> list[str]:
        await self.look(transcripts)
        last = [(job, seen[-1]) for job, seen in self._sightings.items() if seen]
        return [f"{job} is {record.state.value}" for job, record in last if not record.state.terminal]

    async def _story(self, choice: int, job: RequestId) -> JobStory:
        return JobStory(choice, tuple(self._sightings[job]), await self._journal(job))

    async def _journal(self, job: RequestId) -> JournalPart | None:
        try:
            part = await self._book.read_journal(job, 0, NO_WAIT_S)
        except BatonError:
            return None
        return part if part.tokens else None


def _jobs(transcript: Transcript) -> list[RequestId]:
    """The call's id names its first choice, `-1`, `-2`, ... the others."""
    num_choices = int(transcript.question.parameters.get("n", 1))
    return [
        RequestId(transcript.call_id + (f"-{n}" if n else "")) for n in range(num_choices if transcript.call_id else 0)
    ]
