"""Streams that run while something else is measured: past their heads, started anew at their ends, gone outside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from baton.domain.errors import Interrupted
from bench.goodput import Capacity, capacity_of
from bench.goodput import parse as parse_goodput
from bench.load_client import HEAD_TOKENS, LoadClient
from services.cli.bench.prompts import Vocabulary
from services.cli.bench.records import Answer, Delivery
from services.router.api.fake_dispatcher import Act, Hold, Script, failing, one_by_one
from services.router.generation import GenerationJob
from tests.service.router_world import TIMEOUT_S, World, router, tokens_of
from tests.unit.bench.test_load import FakeClock

TOKENS = tokens_of("one two three four five six seven", eos=False)[: HEAD_TOKENS - 2]


@asynccontextmanager
async def load_client(world: World) -> AsyncIterator[LoadClient]:
    clock: Callable[[], float] = FakeClock()
    client = LoadClient(str(world.http.base_url), Vocabulary(64, 0), timeout_s=TIMEOUT_S, clock=clock)
    try:
        yield client
    finally:
        await client.close()


def then_held() -> tuple[Script, list[GenerationJob]]:
    """Jobs say so many tokens and end; from the third on they then stop in the middle."""
    jobs: list[GenerationJob] = []

    def script(job: GenerationJob) -> Sequence[Act]:
        jobs.append(job)
        says = one_by_one(TOKENS)
        return says if len(jobs) < 3 else [*says[:-1], Hold(asyncio.Event())]

    return script, jobs


async def test_streams_are_started_anew_until_the_context_ends_and_hung_up_on_then():
    script, jobs = then_held()
    async with router(script) as world, load_client(world) as client:
        async with client.running(2, 4, 50) as streams:
            assert all(stream.num_tokens >= HEAD_TOKENS for stream in streams)
            assert world.dispatcher.aborted == []
            assert sum(len(stream.gaps(0.0, 1e9)) for stream in streams) >= 2 * (HEAD_TOKENS - 1)
        await world.dispatcher.until(lambda dispatcher: len(dispatcher.aborted) == 2)
    assert len(jobs) == 4
    assert len({tuple(job.prompt_tokens) for job in jobs}) == 4


async def test_a_stream_that_fails_ends_the_measurement():
    async with router(failing(Interrupted("lost"))) as world, load_client(world) as client:
        with pytest.raises(ExceptionGroup) as raised:
            async with client.running(1, 4, 50):
                raise AssertionError("it has no head")
    assert raised.group_contains(RuntimeError, match="failed")


class Scripted:
    """Answers with fixed times, by the prompt's length."""

    async def ask(self, num_tokens: int, max_tokens: int) -> Answer:
        first_s = num_tokens / 1024
        deliveries = tuple(Delivery(first_s + 0.01 * number, 1) for number in range(max_tokens))
        return Answer(0.0, deliveries[-1].at_s, deliveries, max_tokens)


def test_capacity_is_what_single_requests_took():
    options = parse_goodput(["--prompt-tokens", "512", "1024", "--output-tokens", "32"])
    with asyncio.Runner() as runner:
        found = capacity_of(options, Scripted(), runner)  # type: ignore[arg-type]
    assert found.mean_prompt_s == 0.75
    assert found.longest_prompt_s == 1.0
    assert found.gap_s == pytest.approx(0.01)
    assert isinstance(found, Capacity)
