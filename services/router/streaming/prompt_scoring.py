"""The scores of a request's prompts, for the first event of each choice. Owned by its token stream.

They come with the first chunk of the choice that leads a prompt. The journal has none: a client that resumes before
its first event, or whose router was overruled before it, gets scores that are computed again, by a sequence of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from baton.domain.errors import Broken
from baton.domain.ids import RequestId
from baton.domain.request import SamplingParams, StopParams
from baton.domain.scores.prompt_scores import PromptScores
from baton.services.router.generation import Dispatcher
from baton.services.router.openai.valid_request import ValidRequest
from baton.telemetry.request_timer import RequestOrigin, RequestTimer

FingerprintOf = Callable[[RequestId], Awaitable[str]]
"""The fingerprint of the workers that run a sequence; "" if it is not known."""


class PromptScoring:
    """Used by one task a choice. `scores`: by prompt, those that are there."""

    def __init__(
        self,
        request: ValidRequest,
        dispatcher: Dispatcher,
        fingerprint_of: FingerprintOf,
        name: str,
        seen: Sequence[int] = (),
    ) -> None:
        """`name`: of the sequences that it runs; no other router or request uses it.

        `seen`: events of each choice that the client has; one that has the first has the scores.
        """
        self.scores: dict[int, PromptScores] = {}
        self._request = request
        self._dispatcher = dispatcher
        self._fingerprint_of = fingerprint_of
        self._name = name
        self._seen = seen
        self._locks: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    def offer(self, choice: int, scores: PromptScores | None) -> None:
        """Takes the scores that came with a chunk of `choice`."""
        if scores is not None:
            self.scores[choice // self._request.num_choices] = scores

    async def wait(self, choice: int) -> None:
        """Returns when the scores of the choice's prompt are there. Raises the `BatonError` of the run for them."""
        if self._seen and self._seen[choice]:
            return
        prompt = choice // self._request.num_choices
        async with self._locks[prompt]:
            if prompt not in self.scores:
                self.scores[prompt] = await self._compute(self._request.leader(choice))

    async def _compute(self, leader: int) -> PromptScores:
        """Runs the prompt once more, for one token that nobody sees."""
        asked = self._request.sequences[leader]
        sequence = replace(
            asked,
            id=RequestId(f"{self._name}-{leader}"),
            sampling=SamplingParams(temperature=0.0),
            stop=StopParams(1),
            attempt=1,
            emitted=(),
            num_cached_tokens=0,
            fingerprint=await self._fingerprint_of(asked.id),
            owner_tag=0,
            constraint=None,
        )
        timer = RequestTimer(RequestOrigin("", asked.tenant), time.monotonic())
        timer.begin(sequence.id, 1, len(sequence.prompt_tokens), stream=False)
        admitted = self._dispatcher.admit(sequence, timer.sequences[0])
        scores: PromptScores | None = None
        async with aclosing(self._dispatcher.run(admitted)) as chunks:
            async for chunk in chunks:
                scores = scores or chunk.prompt_scores
        if scores is None:
            raise Broken("a prompt that was to be scored ended without its scores")
        return scores
