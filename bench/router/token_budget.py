"""Counts what 100 more tokens of every stream cost the router: own calls, async generators, tasks and timers.

    python -m bench.router.token_budget [--streams 1 8] [--list]

Counts do not depend on the machine's speed, so a test bounds them. A real router runs in this process, mock workers in
another one. Tokens come in calls, and then in sessions. Long answers less short ones are what the tokens cost. Only
functions count that are called for nearly every step of a stream, and those of the store only if they are called for
nearly every token: a flush of the journal, which comes by time, and a heartbeat are not part of a token.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from rich.console import Console

from baton.services.cli.processes.local_redis import LocalRedis
from bench.router.mock_cluster import DecodeCapacity, mock_workers
from bench.router.path_profile import (
    EVERY_TOKEN,
    GENERATED_SOURCES,
    OWN_SOURCES,
    SETTLE_S,
    TOKEN_INTERVAL_S,
    router_in_process,
    stream_chat,
)

EXTRA_TOKENS = 100
SHORT_TOKENS = 20
STREAMS = (1, 8)
STORE_SOURCES = f"{OWN_SOURCES[0]}store/"


@dataclass(slots=True)
class WorkTotal:
    """Work of this process while it was counted."""

    calls: Counter[CodeType] = field(default_factory=Counter)
    num_tasks: int = 0
    num_timers: int = 0


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Work of one more token. `generator_calls`: of `calls`, those that resume an async generator."""

    num_streams: int
    sessions: bool
    calls: float
    generator_calls: float
    tasks: float
    timers: float
    functions: tuple[tuple[str, float], ...]


@contextmanager
def counting(loop: asyncio.AbstractEventLoop, total: WorkTotal | None = None) -> Iterator[WorkTotal]:
    """Counts calls of the project's functions, and the tasks and timers that are made on `loop`. Adds to `total`."""
    work, earlier_factory, call_at = total or WorkTotal(), loop.get_task_factory(), loop.call_at

    def on_call(frame: FrameType, event: str, arg: Any) -> None:
        source = frame.f_code.co_filename
        if event == "call" and source.startswith(OWN_SOURCES) and not source.startswith(GENERATED_SOURCES):
            work.calls[frame.f_code] += 1

    def make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        work.num_tasks += 1
        return asyncio.Task(coroutine, loop=loop, **options)

    def count_timer(*inputs: Any, **options: Any) -> asyncio.TimerHandle:
        work.num_timers += 1
        return call_at(*inputs, **options)

    loop.set_task_factory(make_task)
    loop.call_at = count_timer  # type: ignore[method-assign, assignment]
    sys.setprofile(on_call)
    try:
        yield work
    finally:
        sys.setprofile(None)
        del loop.call_at
        loop.set_task_factory(earlier_factory)


def budget_of(
    short: WorkTotal, long: WorkTotal, num_streams: int, num_extra: int = EXTRA_TOKENS, *, sessions: bool = False
) -> TokenBudget:
    """The work of a token, from two runs that differ by `num_extra` tokens of each stream."""
    num_tokens = num_extra * num_streams
    extra = {code: count - short.calls[code] for code, count in long.calls.items()}
    kept = {
        code: count / num_tokens
        for code, count in extra.items()
        if count >= EVERY_TOKEN * (num_tokens if code.co_filename.startswith(STORE_SOURCES) else num_extra)
    }
    names = sorted(((function_name(code), count) for code, count in kept.items()), key=lambda pair: -pair[1])
    return TokenBudget(
        num_streams,
        sessions,
        sum(kept.values()),
        sum(count for code, count in kept.items() if code.co_flags & inspect.CO_ASYNC_GENERATOR),
        (long.num_tasks - short.num_tasks) / num_tokens,
        (long.num_timers - short.num_timers) / num_tokens,
        tuple(names),
    )


def function_name(code: CodeType) -> str:
    """Source file and name of a function."""
    return f"{code.co_filename.removeprefix(OWN_SOURCES[0]).removeprefix(OWN_SOURCES[1])}:{code.co_qualname}"


async def measure(redis_url: str, streams: Sequence[int], *, sessions: bool) -> list[TokenBudget]:
    """The budget at each number of streams, on the workers that are registered at `redis_url`."""
    budgets = []
    async with router_in_process(redis_url, sessions=sessions) as port:
        await stream_chat(port, SHORT_TOKENS + EXTRA_TOKENS)  # the tables of its tokens are filled
        for num_streams in streams:
            short, long = [
                await _count(port, num_streams, num_tokens)
                for num_tokens in (SHORT_TOKENS, SHORT_TOKENS + EXTRA_TOKENS)
            ]
            budgets.append(budget_of(short, long, num_streams, sessions=sessions))
    return budgets


async def _count(port: int, num_streams: int, num_tokens: int) -> WorkTotal:
    with counting(asyncio.get_running_loop()) as work:
        async with asyncio.TaskGroup() as group:
            for _ in range(num_streams):
                group.create_task(stream_chat(port, num_tokens))
        await asyncio.sleep(SETTLE_S)
    return work


def token_budgets(streams: Sequence[int] = STREAMS) -> list[TokenBudget]:
    """Counts on a Redis and workers of its own, with calls and with sessions."""
    with LocalRedis() as redis, mock_workers(redis.url, DecodeCapacity(64, TOKEN_INTERVAL_S)):
        ways = [asyncio.run(measure(redis.url, streams, sessions=sessions)) for sessions in (False, True)]
    return [budget for way in ways for budget in way]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--list", action="store_true", help="also list the functions")
    options = parser.parse_args()
    console = Console(soft_wrap=True)
    for budget in token_budgets(options.streams):
        way = "in sessions" if budget.sessions else "in calls"
        console.print(
            f"{budget.num_streams} streams {way}, a token: {budget.calls:.1f} calls, {budget.generator_calls:.2f} of "
            f"async generators; {budget.tasks:.2f} tasks, {budget.timers:.2f} timers",
            highlight=False,
        )
        for name, count in budget.functions if options.list else ():
            console.print(f"  {count:6.2f} {name}", highlight=False)


if __name__ == "__main__":
    main()
