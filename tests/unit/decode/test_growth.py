"""Growth reserves: what each mode keeps free, what it learns, and that it delays admission only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.arithmetic import ceil_div
from baton.domain.request import StopParams
from baton.engine.messages import Fail
from baton.kv.growth import FIRST_SHARE, MIN_LENGTHS, MIN_RATIO, GrowthPolicy, GrowthReserve, RowGrowth
from baton.services.decode.effects import DecodeEffect, EmitTokens
from baton.services.decode.kv_import import Busy, Reserved
from tests.property.machines.decode_checks import TOKEN_BUDGET
from tests.tiny_workers import (
    PAGE_SIZE,
    TinyDecode,
    assert_idle,
    engine_request,
    expected_output,
    tiny_decode,
)
from tests.unit.decode.test_scheduler import run_to_the_end

SIZE, CLIP = 16, 1_000
RESERVING = [mode for mode in GrowthPolicy if mode is not GrowthPolicy.NONE]


def reserve(mode: GrowthPolicy, clip: int = CLIP) -> GrowthReserve:
    return GrowthReserve(mode, SIZE, clip)


def row(num_tokens: int, num_output: int, max_rest: int) -> RowGrowth:
    num_pages = ceil_div(num_tokens, SIZE)
    return RowGrowth(num_tokens, num_output, max_rest, num_pages, num_pages)


@pytest.mark.parametrize("mode", GrowthPolicy)
def test_a_row_alone_always_fits(mode: GrowthPolicy):
    assert reserve(mode).fits([row(32, 0, 900)], 0)


def test_no_reserve_fits_any_rows():
    assert reserve(GrowthPolicy.NONE).fits([row(32, 0, 900)] * 2, 0)


def test_full_reserves_the_longest_rest_of_every_row():
    rows = [row(32, 0, 160), row(32, 0, 8)]
    assert reserve(GrowthPolicy.FULL).fits(rows, 11)
    assert not reserve(GrowthPolicy.FULL).fits(rows, 10)


@pytest.mark.parametrize("mode", RESERVING)
def test_the_clip_bounds_what_is_reserved(mode: GrowthPolicy):
    rows = [row(32, 0, 100_000)] * 2
    assert reserve(mode, clip=16).fits(rows, 4)
    assert not reserve(mode, clip=160).fits(rows, 4)


def test_the_ratio_falls_by_step_and_rises_by_preemption():
    growth = reserve(GrowthPolicy.RATIO)
    assert growth.ratio == FIRST_SHARE
    for _ in range(2_000):
        growth.on_step()
    assert growth.ratio == pytest.approx(MIN_RATIO)
    rows = [row(64, 50, 50)] * 2
    assert growth.fits(rows, 2)
    growth.on_preempted(rows)
    assert growth.ratio == pytest.approx(140 / 201)
    assert not growth.fits(rows, 2)


def test_the_peak_follows_the_outputs_that_ended():
    growth = reserve(GrowthPolicy.PEAK)
    assert growth.expected_rest(row(32, 0, 100)) == FIRST_SHARE * 100
    for _ in range(MIN_LENGTHS):
        growth.on_ended(32)
    assert growth.expected_rest(row(32, 0, 100)) == 32
    assert growth.expected_rest(row(32, 30, 100)) == 2
    assert growth.expected_rest(row(32, 40, 100)) == 40  # longer than all: expected to double
    assert growth.expected_rest(row(32, 40, 7)) == 7


def test_the_peak_counts_pages_that_come_back_before():
    """The short row ends after 16 tokens with 10 own pages; the long one grows by 10 pages in 160."""
    growth = GrowthReserve(GrowthPolicy.PEAK, SIZE, CLIP)
    for length in (16, 160):
        for _ in range(MIN_LENGTHS):
            growth.on_ended(length)
    short, long = row(160, 144, 16), row(32, 0, 160)
    assert growth.expected_rest(short) == 16
    assert growth.expected_rest(long) == 88
    # before the short one ends: (192 + 2 * 16) / 16 + 1 - 12; before the long one ends less is in use
    assert growth.peak_pages([short, long]) == 3
    shared = RowGrowth(160, 144, 16, 10, 0)
    assert growth.peak_pages([shared, long]) == 6


@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(0, 90), st.integers(0, 300), st.integers(0, 12)), max_size=8),
    st.lists(st.integers(1, 120), max_size=40),
)
def test_the_peak_is_the_largest_use_before_any_end(numbers, lengths):
    growth = reserve(GrowthPolicy.PEAK)
    for length in lengths:
        growth.on_ended(length)
    rows = [RowGrowth(tokens, output, rest, pages + 2, pages) for tokens, output, rest, pages in numbers]
    rests = [(growth.expected_rest(one), one) for one in rows]
    expected = 0.0
    for end in {rest for rest, _ in rests}:
        alive = [one for rest, one in rests if rest >= end]
        grown = sum((one.num_tokens + end) / SIZE + 0.5 - one.num_pages for one in alive)
        expected = max(expected, grown - sum(one.num_own_pages for rest, one in rests if rest < end))
    assert growth.peak_pages(rows) == pytest.approx(expected)


STOP = StopParams(max_tokens=9)
OLD = engine_request("old", [0, 1, 1, 0, 1, 0, 1], stop=STOP)
NEW = engine_request("new", [1, 1, 0, 1, 1, 0, 1], stop=STOP)


def ask(world: TinyDecode, request) -> Reserved | Busy:
    answer, _ = world.import_policy.reserve(request.id, len(request.tokens), [], 0.0, 5.0, STOP.max_tokens)
    return answer


@pytest.mark.parametrize("mode", RESERVING)
def test_a_reserve_delays_a_row_instead_of_preempting_one(mode: GrowthPolicy):
    """Each row has four of the eight pages and needs eight in the end."""
    world = tiny_decode(True, 8, token_budget=TOKEN_BUDGET, growth=GrowthReserve(mode, PAGE_SIZE, 100))
    answer = ask(world, OLD)
    assert isinstance(answer, Reserved)
    assert ask(world, OLD) == answer  # the same attempt gets the same reservation again
    num_reserved = world.imports.num_reserved_pages
    assert isinstance(ask(world, NEW), Busy)
    assert world.imports.num_reserved_pages == num_reserved
    effects: list[DecodeEffect] = []
    for request in (OLD, NEW):
        answer = ask(world, request)
        assert isinstance(answer, Reserved)
        effects += world.import_policy.claim(answer.id, request, None, 9.0)
        effects += run_to_the_end(world)
        emitted = [effect for effect in effects if isinstance(effect, EmitTokens) and effect.id == request.id]
        tokens = [token.token for effect in emitted for token in effect.tokens]
        assert tokens == expected_output(request)
    assert world.scheduler.num_preemptions == 0
    assert not [effect for effect in effects if isinstance(effect, Fail)]
    assert_idle(world.cache)
