"""What a token costs a decode worker's host stays within its budget, and every token leaves in its step's frame."""

from __future__ import annotations

import asyncio

import pytest

from baton.rpc.gen import session_pb2 as pb
from bench.router import decode_host
from bench.router.decode_host import DecodeHost, DroppingConnection

MAX_ENGINE_CALLS = {1: 135, 8: 26, 64: 13}
MAX_EMISSION_CALLS = {1: 22, 8: 8, 64: 6}
"""A frame costs about 16 calls, a row 5. A task switch a token would add at least 8."""


@pytest.mark.parametrize("num_streams", [1, 8, 64])
async def test_a_token_stays_within_its_budget(num_streams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_host, "NUM_STEPS", 48)
    cost = await decode_host.measure(num_streams)
    assert 3 < cost.engine_calls <= MAX_ENGINE_CALLS[num_streams], cost.functions
    assert 3 < cost.emission_calls <= MAX_EMISSION_CALLS[num_streams], cost.functions
    assert cost.tasks == 0.0
    assert cost.timers * num_streams <= 0.2, "a timer a token"
    assert cost.frames_a_step == 1.0


class ReadingConnection(DroppingConnection):
    """Keeps the frames."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[pb.Frame] = []

    def write(self, message: pb.SessionMessage) -> bool:
        """See `DirectConnection`."""
        self.frames.append(pb.Frame.FromString(message.body))
        return True


async def test_all_tokens_of_an_answer_leave_in_order_and_the_last_one_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_host, "DroppingConnection", ReadingConnection)
    host = DecodeHost(3)
    for number in (1, 2, 3):
        host.open(number, 4 + number)
    await host.pass_loop()
    async with asyncio.timeout(30.0):
        while len(host.streams):
            host.loop.turn()
            await host.pass_loop()
    assert isinstance(host.connection, ReadingConnection)
    rows = [row for frame in host.connection.frames for message in frame.messages for row in message.step.rows]
    for number in (1, 2, 3):
        own = [row for row in rows if row.stream == number]
        assert [row.first_index for row in own] == list(range(4 + number))
        assert [bool(row.finish_reason) for row in own] == [False] * (3 + number) + [True]
    await host.close()
