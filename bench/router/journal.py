"""Cost of journaling every token: CPU of the router's process and of Redis, and the lag of the store.

    python -m bench.router.journal [--streams 256] [--tokens 200] [--rate 50] [--rotations 5]

Every stream emits `--rate` tokens a second. The arms are the same loop with `StoreWriter` on a real redis-server, and
with a sink that writes nothing; a token's cost is the difference of their CPU time. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol, cast

import uvloop
from redis.asyncio import Redis

from baton.domain.ids import AttemptId, OwnerId, RequestId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.request import FinishReason, OutputToken
from baton.services.cli.processes.local_redis import LocalRedis
from baton.store.options import StoreOptions
from baton.store.redis.redis_store import RedisStore
from baton.store.store import CallRecord, CallStatus, SequenceRecord
from baton.store.write_behind.writer import StoreWriter
from bench.harness.signals import run_command

FLUSH_S = 30.0


class TokenSink(Protocol):
    """The part of `StoreWriter` that is called for every token."""

    def write_tokens(
        self,
        id: AttemptId,
        tokens: Sequence[OutputToken],
        *,
        num_cached_tokens: int,
        finish: FinishReason | None = None,
    ) -> None: ...


class _NullSink:
    """Writes nothing."""

    def write_tokens(
        self,
        id: AttemptId,
        tokens: Sequence[OutputToken],
        *,
        num_cached_tokens: int,
        finish: FinishReason | None = None,
    ) -> None:
        return


@dataclass(frozen=True, slots=True)
class JournalLoad:
    """`tokens` a stream, `rate` of them a second."""

    streams: int
    tokens: int
    rate: float

    @property
    def total_tokens(self) -> int:
        return self.streams * self.tokens


@dataclass(frozen=True, slots=True)
class JournalRotation:
    """Both arms once. Microseconds of CPU a token; the lag is from the last token to an empty queue."""

    router_us: float
    redis_us: float
    flush_after_last_s: float
    redis_bytes: float


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--rotations", type=int, default=5)
    flags = parser.parse_args()
    load = JournalLoad(flags.streams, flags.tokens, flags.rate)
    with LocalRedis() as server:
        rotations = uvloop.run(_measure(server.url, load, flags.rotations))
    print(json.dumps({"load": asdict(load), "median": _median(rotations), "rotations": [asdict(r) for r in rotations]}))


async def _measure(url: str, load: JournalLoad, num_rotations: int) -> list[JournalRotation]:
    return [await _rotate(url, load, number) for number in range(num_rotations)]


async def _rotate(url: str, load: JournalLoad, number: int) -> JournalRotation:
    store = RedisStore(url, StoreOptions(prefix=f"bench{number}:", timeout_s=5.0))
    async with StoreWriter(store) as writer:
        ids = [AttemptId(RequestId(f"job-{stream}"), 1) for stream in range(load.streams)]
        _open(writer, ids)
        if await writer.flush(FLUSH_S):
            raise TimeoutError("redis did not accept the calls in time")
        idle_s = await _emit(_NullSink(), ids, load)
        before, began_s = await _redis(url), time.process_time()
        await _emit(writer, ids, load)
        last_at = time.monotonic()
        if await writer.flush(FLUSH_S):
            raise TimeoutError("redis did not accept the tokens in time")
        lag_s, busy_s, after = time.monotonic() - last_at, time.process_time() - began_s, await _redis(url)
    await store.close()
    per_token = 1e6 / load.total_tokens
    return JournalRotation(
        router_us=(busy_s - idle_s) * per_token,
        redis_us=(after.cpu_s - before.cpu_s) * per_token,
        flush_after_last_s=lag_s,
        redis_bytes=(after.used_bytes - before.used_bytes) / load.total_tokens,
    )


def _open(writer: StoreWriter, ids: Sequence[AttemptId]) -> None:
    """Opens one call a stream, in state decoding."""
    for id in ids:
        job = id.request_id
        call = RequestId(f"call-{job}")
        writer.open_call(
            CallRecord(call, OwnerId("r/1"), 1, CallStatus.OPEN, "/v1/completions", b"{}", "", 1, 1, (job,))
        )
        writer.create(SequenceRecord(job, 1, RequestState.RECEIVED, "r", "m", num_prompt_tokens=3))
        for event in (RequestEvent.ENQUEUE, RequestEvent.RESERVE, RequestEvent.DECODE):
            writer.advance(id, event)


async def _emit(sink: TokenSink, ids: Sequence[AttemptId], load: JournalLoad) -> float:
    """Emits all tokens, one stream after the other, and returns CPU seconds of this process."""
    began_s, loop = time.process_time(), asyncio.get_running_loop()
    start = loop.time()
    for index in range(load.tokens):
        for id in ids:
            sink.write_tokens(id, (OutputToken(index, 1000 + index),), num_cached_tokens=0)
        await asyncio.sleep(max(0.0, start + (index + 1) / load.rate - loop.time()))
    return time.process_time() - began_s


@dataclass(frozen=True, slots=True)
class _Usage:
    cpu_s: float
    used_bytes: int


async def _redis(url: str) -> _Usage:
    async with Redis.from_url(url) as outside:
        info = cast("dict[str, float]", await outside.info())
    return _Usage(info["used_cpu_user"] + info["used_cpu_sys"], int(info["used_memory"]))


def _median(rotations: Sequence[JournalRotation]) -> dict[str, float]:
    return {name: statistics.median(asdict(rotation)[name] for rotation in rotations) for name in asdict(rotations[0])}


if __name__ == "__main__":
    run_command(main)
