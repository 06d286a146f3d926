"""Sends requests of fresh tokens to one server and times their tokens. Used by `interference` and `goodput`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncIterator, Callable

from baton.services.cli.bench.client.bench_client import BenchClient, RequestTemplate
from baton.services.cli.bench.options import ApiEndpoint
from baton.services.cli.bench.results.records import MeasuredAnswer, PlannedRequest, inter_token_gaps
from baton.services.cli.bench.workload.prompts import Vocabulary

HEAD_TOKENS = 8
"""First tokens of a stream, excluded from figures: other prompts are still computed meanwhile."""


class TokenTimes:
    """Arrival times of one stream's tokens; called with the number of tokens of each event.

    `on_event` is called at each of them, after its time was taken.
    """

    def __init__(self, clock: Callable[[], float], on_event: Callable[[], None] | None = None) -> None:
        self._clock = clock
        self._on_event = on_event
        self._arrivals: list[tuple[float, int]] = []
        self.num_tokens = 0
        self.past_head = asyncio.Event()

    def __call__(self, num_tokens: int) -> None:
        """Records tokens that arrive now."""
        self._arrivals.append((self._clock(), num_tokens))
        self.num_tokens += num_tokens
        if self.num_tokens >= HEAD_TOKENS:
            self.past_head.set()
        if self._on_event is not None:
            self._on_event()

    def gaps(self, began_s: float, ended_s: float) -> list[float]:
        """Gaps before the tokens that arrived between two times; n tokens are n gaps."""
        found: list[float] = []
        for (before_s, _), (at_s, num_tokens) in itertools.pairwise(self._arrivals):
            if began_s <= at_s <= ended_s:
                found += [(at_s - before_s) / num_tokens] * num_tokens
        return found


class LoadClient:
    """Client of one server. Raises `RuntimeError` for a request that fails."""

    def __init__(self, url: str, vocabulary: Vocabulary, *, timeout_s: float, clock: Callable[[], float]) -> None:
        self._vocabulary = vocabulary
        self._clock = clock
        self._client = BenchClient(url, api_key=None, timeout_s=timeout_s, clock=clock)
        self._run = uuid.uuid4().hex  # keeps a second run on the same system from hitting the first one's prompts
        self._numbers = itertools.count()
        self._template: RequestTemplate | None = None

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.__aexit__()

    def draw(self, num_tokens: int) -> tuple[int, ...]:
        """A prompt that shares no prefix with any other."""
        return self._vocabulary.draw(num_tokens, self._run, next(self._numbers))

    async def ask(self, num_tokens: int, max_tokens: int) -> MeasuredAnswer:
        """Sends one request with a fresh prompt."""
        return await self.send(PlannedRequest(0, 0.0, self.draw(num_tokens), max_tokens))

    async def send(
        self, request: PlannedRequest, on_tokens: Callable[[int], None] = lambda num: None
    ) -> MeasuredAnswer:
        """Sends a planned request now; `on_tokens` receives the number of tokens of every event on arrival."""
        if self._template is None:
            model = await self._client.first_model()
            self._template = RequestTemplate(
                model, ApiEndpoint.COMPLETIONS, temperature=0.0, ignore_eos=True, continuous_usage=True
            )
        answer = await self._client.measure(self._template, request, on_tokens)
        if answer.failure is not None:
            raise RuntimeError(f"a request of {len(request.prompt)} tokens failed: {answer.failure}")
        return answer

    @contextlib.asynccontextmanager
    async def running_streams(
        self, num_streams: int, num_tokens: int, max_tokens: int, on_event: Callable[[], None] | None = None
    ) -> AsyncIterator[list[TokenTimes]]:
        """Streams `num_streams` answers at once until the context ends. Yields when each is past its head.

        `on_event` is called at each event of the first stream.
        A finished answer is followed by a new one, whose first token continues the old one's gaps. Raises
        `ExceptionGroup` with the failures, here or inside.
        """
        times = [TokenTimes(self._clock, on_event if at == 0 else None) for at in range(num_streams)]

        async def stream(note: TokenTimes) -> None:
            while True:
                await self.send(PlannedRequest(0, 0.0, self.draw(num_tokens), max_tokens), note)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(stream(note)) for note in times]
            await asyncio.gather(*(note.past_head.wait() for note in times))
            yield times
            for task in tasks:
                task.cancel()

    async def stream_gaps(self, num_streams: int, num_tokens: int, max_tokens: int) -> list[float]:
        """Gaps between tokens of `num_streams` concurrent answers, in seconds, without their heads."""
        asked = (self.ask(num_tokens, max_tokens) for _ in range(num_streams))
        return [gap for answer in await asyncio.gather(*asked) for gap in gaps_of(answer)]


def gaps_of(answer: MeasuredAnswer) -> list[float]:
    """Gaps between an answer's tokens after `HEAD_TOKENS`; an event of n tokens counts as n gaps of an n-th."""
    return inter_token_gaps(answer.deliveries)[HEAD_TOKENS:]
