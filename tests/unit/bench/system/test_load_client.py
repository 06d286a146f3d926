"""Background streams: measured after their heads, restarted at their ends, aborted at the end of the context."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from baton.domain.errors import Interrupted
from baton.services.cli.bench.results.records import Delivery, MeasuredAnswer
from baton.services.cli.bench.workload.prompts import Vocabulary
from baton.services.router.generation import SequenceSpec
from bench.system.goodput import Capacity, capacity_of
from bench.system.goodput import parse as parse_goodput
from bench.system.load_client import HEAD_TOKENS, LoadClient
from tests.fake_dispatcher import DispatchScript, ScriptStep, WaitForGate, failing, one_token_chunks
from tests.service.http.http_server import TIMEOUT_S, RouterServer, router, tokens_of
from tests.unit.cli.bench.test_load_generator import FakeClock

TOKENS = tokens_of("one two three four five six seven", eos=False)[: HEAD_TOKENS - 2]


@asynccontextmanager
async def load_client(server: RouterServer) -> AsyncIterator[LoadClient]:
    clock: Callable[[], float] = FakeClock()
    client = LoadClient(str(server.http.base_url), Vocabulary(64, 0), timeout_s=TIMEOUT_S, clock=clock)
    try:
        yield client
    finally:
        await client.close()


def then_held() -> tuple[DispatchScript, list[SequenceSpec]]:
    """Jobs say so many tokens and end; from the third on they then stop in the middle."""
    sequences: list[SequenceSpec] = []

    def script(sequence: SequenceSpec) -> Sequence[ScriptStep]:
        sequences.append(sequence)
        says = one_token_chunks(TOKENS)
        return says if len(sequences) < 3 else [*says[:-1], WaitForGate(asyncio.Event())]

    return script, sequences


async def test_streams_restart_until_the_context_ends_and_abort_then():
    script, sequences = then_held()
    async with router(script) as server, load_client(server) as client:
        async with client.running_streams(2, 4, 50) as streams:
            assert all(stream.num_tokens >= HEAD_TOKENS for stream in streams)
            assert server.dispatcher.aborted == []
            assert sum(len(stream.gaps(0.0, 1e9)) for stream in streams) >= 2 * (HEAD_TOKENS - 1)
        await server.dispatcher.until(lambda dispatcher: len(dispatcher.aborted) == 2)
    assert len(sequences) == 4
    assert len({tuple(sequence.prompt_tokens) for sequence in sequences}) == 4


async def test_a_stream_that_fails_ends_the_measurement():
    async with router(failing(Interrupted("lost"))) as server, load_client(server) as client:
        with pytest.raises(ExceptionGroup) as raised:
            async with client.running_streams(1, 4, 50):
                raise AssertionError("it has no head")
    assert raised.group_contains(RuntimeError, match="failed")


class Scripted:
    """Answers with fixed times by prompt length."""

    async def ask(self, num_tokens: int, max_tokens: int) -> MeasuredAnswer:
        first_s = num_tokens / 1024
        deliveries = tuple(Delivery(first_s + 0.01 * number, 1) for number in range(max_tokens))
        return MeasuredAnswer(0.0, deliveries[-1].at_s, deliveries, max_tokens)


def test_capacity_is_the_median_of_single_requests():
    options = parse_goodput(["--prompt-tokens", "512", "1024", "--output-tokens", "32"])
    with asyncio.Runner() as runner:
        found = capacity_of(options, Scripted(), runner)  # type: ignore[arg-type]
    assert found.mean_prompt_s == 0.75
    assert found.longest_prompt_s == 1.0
    assert found.gap_s == pytest.approx(0.01)
    assert isinstance(found, Capacity)
