"""Requests of fresh tokens to one server, and when their tokens came. Called by `interference` and `goodput`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncIterator, Callable

from services.cli.bench.client.bench_client import BenchClient, RequestTemplate
from services.cli.bench.options import ApiEndpoint
from services.cli.bench.results.records import MeasuredAnswer, PlannedRequest
from services.cli.bench.workload.prompts import Vocabulary

HEAD_TOKENS = 8
"""A stream's first tokens come while the others' prompts are still computed; they are in no figure."""


class TokenTimes:
    """When the tokens of one stream came. Called with how many an event brought."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._arrivals: list[tuple[float, int]] = []
        self.num_tokens = 0
        self.past_head = asyncio.Event()

    def __call__(self, num_tokens: int) -> None:
        """Tokens came now."""
        self._arrivals.append((self._clock(), num_tokens))
        self.num_tokens += num_tokens
        if self.num_tokens >= HEAD_TOKENS:
            self.past_head.set()

    def gaps(self, began_s: float, ended_s: float) -> list[float]:
        """Gaps before the tokens that came in a time, however long before it they began; n tokens are n gaps."""
        found: list[float] = []
        for (before_s, _), (at_s, num_tokens) in itertools.pairwise(self._arrivals):
            if began_s <= at_s <= ended_s:
                found += [(at_s - before_s) / num_tokens] * num_tokens
        return found


class LoadClient:
    """One server. Raises `RuntimeError` for a request that fails."""

    def __init__(self, url: str, vocabulary: Vocabulary, *, timeout_s: float, clock: Callable[[], float]) -> None:
        self._vocabulary = vocabulary
        self._clock = clock
        self._client = BenchClient(url, api_key=None, timeout_s=timeout_s, clock=clock)
        self._run = uuid.uuid4().hex  # or a second run on the same system would find the first one's prompts
        self._numbers = itertools.count()
        self._template: RequestTemplate | None = None

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.__aexit__()

    def draw(self, num_tokens: int) -> tuple[int, ...]:
        """A prompt that shares nothing with any other."""
        return self._vocabulary.draw(num_tokens, self._run, next(self._numbers))

    async def ask(self, num_tokens: int, max_tokens: int) -> MeasuredAnswer:
        """One request of its own."""
        return await self.send(PlannedRequest(0, 0.0, self.draw(num_tokens), max_tokens))

    async def send(
        self, request: PlannedRequest, on_tokens: Callable[[int], None] = lambda num: None
    ) -> MeasuredAnswer:
        """Sends a planned request now; `on_tokens` is told how many tokens every event brings, as it comes."""
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
        self, num_streams: int, num_tokens: int, max_tokens: int
    ) -> AsyncIterator[list[TokenTimes]]:
        """So many answers at once, until the context ends and hangs up. Entered when each is past its head.

        An answer that ends is followed by a new one, whose first token counts as the next of the old one's. Raises
        `ExceptionGroup` with what failed, here or inside.
        """
        times = [TokenTimes(self._clock) for _ in range(num_streams)]

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
        """Gaps between tokens of so many answers at once, in seconds, without their heads."""
        asked = (self.ask(num_tokens, max_tokens) for _ in range(num_streams))
        return [gap for answer in await asyncio.gather(*asked) for gap in gaps_of(answer)]


def gaps_of(answer: MeasuredAnswer) -> list[float]:
    """Gaps between an answer's tokens after the first few; an event of n tokens counts as n gaps of an n-th."""
    gaps: list[float] = []
    for before, after in itertools.pairwise(answer.deliveries):
        gaps += [(after.at_s - before.at_s) / after.num_tokens] * after.num_tokens
    return gaps[HEAD_TOKENS:]
