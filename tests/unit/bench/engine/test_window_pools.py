"""Pools of equal bytes with window slots and without them: their sizes, rows and hits."""

from __future__ import annotations

import pytest

from baton.services.cli.bench.workload.traces import TraceRow
from bench.engine.windows.pools import SHAPES, arms
from bench.engine.windows.prompts import replay, short_chats, system_prompts
from bench.engine.windows.rows import compare


@pytest.mark.parametrize("shape", SHAPES)
def test_all_pools_of_a_shape_have_equal_bytes(shape: str):
    geometry = SHAPES[shape].geometry()
    off, *others = arms(shape, 2000, [4])
    assert off.plan.num_slots is None
    for arm in others:
        assert 0 <= off.plan.num_bytes(geometry) - arm.plan.num_bytes(geometry) < geometry.page_bytes
        assert arm.plan.num_slots is not None
        assert arm.plan.num_slots < off.plan.num_pages < arm.plan.num_pages


def test_long_rows_gain_and_rows_of_a_window_lose_little():
    """The pool has the bytes of 12 sequences of a window of Gemma 3 27B."""
    pools = arms("gemma-3-27b", 780)
    for length, low, high in ((1024, 0.8, 0.95), (4096, 1.5, 1.8)):
        found = compare([TraceRow(0.0, length - 32, 32)], pools, num_steps=60, num_warmup=60)
        assert found["off"].num_finished > 0
        assert low < found["auto"].mean_rows / found["off"].mean_rows < high


def test_a_pool_for_all_prompts_computes_each_prefix_once():
    """32 beginnings of 32 pages and 8 pages a prompt; chats compute their newest message."""
    for arm in arms("gpt-oss-20b", 4000, page_size=64):
        found = replay(system_prompts(100), arm)
        assert found.num_tokens == 100 * 40
        assert 100 * 8 <= found.num_computed <= 100 * 8 + 32 * 32
        assert replay(short_chats(60), arm).num_computed <= 2 * 60
