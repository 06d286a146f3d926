"""The word of a reader that it has an embedding: nobody else can say it, and a closed channel harms nothing."""

from __future__ import annotations

import asyncio
import gc
import itertools
from typing import Any

import grpc
import pytest

from baton.rpc.gen import encode_pb2
from baton.transfer.nixl_agent import nixl_available
from tests.unit.encode.encode_world import FINGERPRINT, INCARNATION, TIMEOUT_S, WIDE, header
from tests.unit.encode.test_nixl_pull import OTHER, linked_world, moved

pytestmark = pytest.mark.skipif(nixl_available() is not None, reason="NIXL is not installed")


async def test_the_number_of_a_pull_cannot_be_guessed_from_another():
    async with linked_world() as w:
        numbers = []
        for _ in range(3):
            request = encode_pb2.PullEmbeddingRequest(
                incarnation=INCARNATION,
                identity=header(OTHER).identity,
                salt="s",
                fingerprint=FINGERPRINT,
                is_linked=True,
            )
            call = w.encode.encoder.PullEmbedding(request, timeout=TIMEOUT_S)
            numbers.append((await anext(aiter(call))).header.pull)
            call.cancel()
            await w.wait_free()
        assert min(abs(one - other) for one, other in itertools.combinations(numbers, 2)) > 1 << 32


async def test_a_channel_that_was_closed_before_the_word_harms_nothing(monkeypatch: pytest.MonkeyPatch):
    async with linked_world() as w:

        def closed(request: object, timeout: float) -> None:
            raise grpc.aio.UsageError("Channel is closed.")

        errors: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
        monkeypatch.setattr(w.encode.encoder, "CommitPull", closed)
        before = moved("nixl")
        await w.pull(OTHER)
        assert moved("nixl") - before == 5 * WIDE.row_bytes
        await w.wait_free()
        gc.collect()
        assert errors == []
