"""Tokens of a request from the dispatcher. Used by `respond`, and by `takeover` for a claimed call.

The first choice of a prompt leads: the others start after its first token, and find the prompt in the prefix cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from baton.services.router.generation import AdmittedRequest, Dispatcher, TakeChunk, TokenChunk
from baton.services.router.openai.valid_request import ValidRequest
from baton.telemetry.sequence_timer import SequenceTimer


class GenerationSource:
    """A `ChunkSource`. Admits all choices; `close` releases those that never ran."""

    holds_workers = True

    def __init__(
        self,
        dispatcher: Dispatcher,
        request: ValidRequest,
        timers: Sequence[SequenceTimer],
        choices: Sequence[int] | None = None,
    ) -> None:
        """`timers`: of all choices. `choices`: the choices to run; default all.

        Raises the first `Refused`; then none is admitted.
        """
        self.choices = range(len(request.sequences)) if choices is None else choices
        self._dispatcher = dispatcher
        self._leader = request.leader
        self._admitted: dict[int, AdmittedRequest] = {}
        self._unstarted: dict[int, AdmittedRequest] = {}
        self._leader_started: dict[int, asyncio.Event] = {}
        try:
            for choice in self.choices:
                self._admitted[choice] = self._unstarted[choice] = dispatcher.admit(
                    request.sequences[choice], timers[choice]
                )
                if request.leader(choice) != choice:
                    self._leader_started.setdefault(request.leader(choice), asyncio.Event())
        except BaseException:
            self.close(finished=False)
            dispatcher.forgo(request.sequences)
            raise

    async def open(self, choice: int, take: TakeChunk | None = None) -> AsyncGenerator[TokenChunk, None]:
        """Waits for the leader of the choice, unless it ended before."""
        leader = self._leader(choice)
        if leader != choice and leader in self._admitted:
            await self._leader_started[leader].wait()
        return self._dispatcher.run(self._unstarted.pop(choice), take)

    def on_first_chunk(self, choice: int) -> None:
        """Starts the choices that this one leads."""
        if choice in self._leader_started:
            self._leader_started[choice].set()

    def complete(self, choice: int) -> None:
        """From now on, closing the run is an end, not an abort."""
        self._admitted[choice].complete()

    def close(self, *, finished: bool) -> None:
        """Releases the choices that never ran."""
        while self._unstarted:
            self._dispatcher.release(self._unstarted.popitem()[1])
