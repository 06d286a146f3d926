"""How many pages and window slots a pool has, and what that is worth for published shapes."""

from __future__ import annotations

import pytest

from baton.domain.arithmetic import ceil_div
from baton.kv.geometry import KVGeometry, LayerGeometry, PageWindow
from baton.kv.windows.plan import PoolPlan, auto_share, plan_pool

GIB = 1 << 30


def shape(heads: int, dim: int, windowed: int, full: int, window: int, page_size: int = 16) -> KVGeometry:
    layers = (LayerGeometry(heads, dim, dim),) * (windowed + full)
    whole = KVGeometry.of_layers(layers, "bfloat16", page_size)
    return whole.with_window_part(window, tuple(range(windowed)))


GEMMA_3_27B = shape(16, 128, 52, 10, 1024)
GPT_OSS_20B = shape(8, 64, 12, 12, 128)
PLAIN = KVGeometry.of_layers((LayerGeometry(8, 64, 64),) * 4, "bfloat16", 16)


def num_tokens_in(geometry: KVGeometry, plan: PoolPlan, num_tokens: int) -> int:
    """Tokens of sequences of `num_tokens` each that a pool holds at once, with the window parts that rows need."""
    pages = ceil_div(num_tokens, geometry.page_size)
    window = PageWindow.of(geometry)
    if plan.num_slots is None or window is None:
        return plan.num_pages // pages * num_tokens
    return min(plan.num_pages // pages, plan.num_slots // min(pages, window.most_pages(2))) * num_tokens


@pytest.mark.parametrize("share", [0.01, 0.25, 0.9])
@pytest.mark.parametrize("geometry", [GEMMA_3_27B, GPT_OSS_20B])
def test_a_plan_fills_the_memory_and_no_more(geometry: KVGeometry, share: float):
    plan = plan_pool(geometry, share, 100, num_bytes=20 * GIB)
    assert plan.num_slots is not None
    assert 20 * GIB - geometry.page_bytes < plan.num_bytes(geometry) <= 20 * GIB
    assert plan.num_slots >= 100
    assert plan.num_slots == 100 or plan.num_slots == pytest.approx(share * plan.num_pages, abs=2)
    assert PoolPlan(plan.num_pages).num_bytes(geometry) == plan.num_pages * geometry.page_bytes
    num_whole = 20 * GIB // geometry.page_bytes
    assert num_whole - 1 <= plan.num_whole_pages(geometry) <= num_whole < plan.num_pages, "for preempted rows"
    assert PoolPlan(plan.num_pages).num_whole_pages(geometry) == plan.num_pages


def test_a_given_number_of_pages_is_kept():
    assert plan_pool(GPT_OSS_20B, 0.25, 10, num_pages=1000) == PoolPlan(1000, 250, 10)
    assert plan_pool(GPT_OSS_20B, 0.25, 300, num_pages=1000) == PoolPlan(1000, 300, 300)


def test_no_pool_has_as_many_slots_as_pages():
    """Window parts lie in their pages then, as without this setting."""
    for plan in (
        plan_pool(GPT_OSS_20B, 1.0, 10, num_pages=1000),
        plan_pool(GPT_OSS_20B, 0.25, 1000, num_pages=1000),
        plan_pool(GPT_OSS_20B, 0.25, 10**6, num_bytes=1000 * GPT_OSS_20B.page_bytes),
        plan_pool(PLAIN, 0.25, 10, num_pages=1000),
        plan_pool(PLAIN, 0.25, 10, num_bytes=1000 * PLAIN.page_bytes),
    ):
        assert plan == PoolPlan(1000)


def test_a_context_of_a_few_windows_needs_more_slots():
    window = PageWindow.of(GEMMA_3_27B)
    assert window is not None
    assert auto_share(window, 131072) == auto_share(window, 2048) == pytest.approx(65 * 16 / 2048)
    assert auto_share(window, 1536) == pytest.approx(65 * 16 / 1536)
    assert auto_share(window, 512) == 1.0


@pytest.mark.parametrize(
    ("geometry", "num_tokens", "before", "after"),
    [
        (GEMMA_3_27B, 8192, 40960, 65536),
        (GEMMA_3_27B, 32768, 32768, 65536),
        (GPT_OSS_20B, 8192, 434176, 557056),
        (GPT_OSS_20B, 32768, 425984, 557056),
    ],
)
def test_more_tokens_fit_the_same_bytes(geometry: KVGeometry, num_tokens: int, before: int, after: int):
    """The figures of ADR 146: tokens of whole sequences in 20 GiB at once, with `auto` for a context of 128k."""
    window = PageWindow.of(geometry)
    assert window is not None
    whole = PoolPlan(20 * GIB // geometry.page_bytes)
    plan = plan_pool(geometry, auto_share(window, 131072), 0, num_bytes=20 * GIB)
    assert (num_tokens_in(geometry, whole, num_tokens), num_tokens_in(geometry, plan, num_tokens)) == (before, after)
