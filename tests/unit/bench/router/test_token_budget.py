"""The work of a token is a difference of counts, and the router stays within its budget at 1 and at 8 streams."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.domain.arithmetic import ceil_div
from baton.services.cli.bench.workload.arrivals import rescale
from bench.router.token_budget import TokenBudget, WorkTotal, budget_of, counting, token_budgets
from tests.redis_server import require_redis

MAX_CALLS = {False: {1: 42, 8: 42}, True: {1: 45, 8: 34}}
"""In calls and in sessions. At one stream each token is a frame, whose bytes are cut apart here and not in gRPC; at
eight, streams share them."""
MAX_GENERATOR_CALLS = {False: 2.5, True: 0.1}
MAX_TASKS = 0.1
"""By time, too: 0.04 to 0.05 on a busy machine. A task a token would add 1."""
MAX_TIMERS = {1: 0.95, 8: 0.6}
"""By time: heartbeats and flushes of the longer run, more on a busy machine. A timer a token would add 1."""
MAX_TRIES = 3
"""A busy machine only adds work, that which comes by time: then it is counted again."""


async def a_generator():
    yield ceil_div(7, 2)


async def test_calls_tasks_and_timers_are_counted_while_it_runs() -> None:
    loop = asyncio.get_running_loop()
    with counting(loop) as work:
        ceil_div(7, 2)
        rescale([1.0, 2.0], 4.0)
        await loop.create_task(asyncio.sleep(0))
        loop.call_later(60.0, print).cancel()
    ceil_div(7, 2)
    loop.call_later(60.0, print).cancel()
    await loop.create_task(asyncio.sleep(0))
    names = {code.co_name: count for code, count in work.calls.items()}
    assert names["ceil_div"] == names["rescale"] == 1
    assert (work.num_tasks, work.num_timers) == (1, 1)


def test_the_work_of_a_token_is_the_difference_of_two_runs() -> None:
    short, long = WorkTotal(), WorkTotal()
    short.calls.update({ceil_div.__code__: 50, rescale.__code__: 7})
    long.calls.update({ceil_div.__code__: 450, rescale.__code__: 20, a_generator.__code__: 100})
    short.num_tasks, long.num_tasks, long.num_timers = 8, 12, 4
    budget = budget_of(short, long, 2, 100)
    assert (budget.calls, budget.generator_calls) == (2.5, 0.5)  # once a step of both streams counts, a flush does not
    assert (budget.tasks, budget.timers) == (0.02, 0.02)
    assert [name.rpartition(":")[2] for name, _ in budget.functions] == ["ceil_div", "a_generator"]


@pytest.mark.integration
def test_a_token_stays_within_its_budget() -> None:
    require_redis()
    for _ in range(MAX_TRIES):
        budgets = token_budgets()
        assert [budget.sessions for budget in budgets] == [False, False, True, True]
        assert min(budget.calls for budget in budgets) > 5
        if not (over := [budget for budget in budgets if excess(budget)]):
            break
    assert not over, [(excess(budget), budget) for budget in over]


def excess(budget: TokenBudget) -> dict[str, float]:
    """The counts above their bounds."""
    sessions, streams = budget.sessions, budget.num_streams
    bounds = {
        "calls": MAX_CALLS[sessions][streams],
        "generator_calls": MAX_GENERATOR_CALLS[sessions],
        "tasks": MAX_TASKS,
        "timers": MAX_TIMERS[streams],
    }
    return {name: count for name, bound in bounds.items() if (count := getattr(budget, name)) > bound}


def test_counts_above_their_bounds_are_named() -> None:
    fine = TokenBudget(1, True, MAX_CALLS[True][1], MAX_GENERATOR_CALLS[True], MAX_TASKS, MAX_TIMERS[1], ())
    assert excess(fine) == {}
    assert excess(replace(fine, calls=46.0, timers=1.7)) == {"calls": 46.0, "timers": 1.7}
    assert excess(replace(fine, generator_calls=1.0, tasks=1.0)) == {"generator_calls": 1.0, "tasks": 1.0}
