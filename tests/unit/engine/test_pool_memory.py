"""The pool that a worker's settings ask for: with window slots, or why not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import pytest
from structlog.testing import capture_logs

from baton.engine.pool.memory import allocate_pool, choose_plan, empty_cache
from baton.kv.geometry import KVGeometry, LayerGeometry, PageWindow
from baton.kv.windows.memory import WindowedMemory
from baton.kv.windows.plan import PoolPlan
from baton.model.loading.loader import LoadedModel
from baton.services.decode.settings import DecodeSettings
from baton.services.prefill.settings import PrefillSettings

PLAIN = KVGeometry.of_layers((LayerGeometry(2, 64, 64),) * 4, "float32", 16)
WINDOWED = PLAIN.with_window_part(128, (0, 1, 2))


@dataclass
class Config:
    max_model_len: int = 4096


@dataclass
class Model:
    """What a pool depends on of a loaded model."""

    geometry: KVGeometry = WINDOWED
    device: str = "cpu"
    config: Config = field(default_factory=Config)


def plan(settings: PrefillSettings | DecodeSettings, step_tokens: int = 512, **more: object) -> tuple[PoolPlan, str]:
    """The plan, and why there are no slots."""
    with capture_logs() as logged:
        chosen = choose_plan(settings, cast(LoadedModel, Model(**more)), step_tokens)  # type: ignore[arg-type]
    return chosen, "; ".join(entry["why"] for entry in logged)


@pytest.mark.parametrize("settings", [PrefillSettings(num_pages=1000), DecodeSettings(num_pages=1000)])
def test_only_models_with_a_window_part_have_slots_by_default(settings: PrefillSettings | DecodeSettings):
    assert plan(settings) == (PoolPlan(1000, 563, 41), "")
    assert plan(settings, geometry=PLAIN) == (PoolPlan(1000), "")
    assert plan(settings.model_copy(update={"window_slots": "off"})) == (PoolPlan(1000), "")


def test_a_share_of_the_pages_has_slots():
    assert plan(PrefillSettings(num_pages=1000, window_slots="0.25")) == (PoolPlan(1000, 250, 41), "")
    assert plan(PrefillSettings(num_pages=1000, window_slots="auto")) == (PoolPlan(1000, 563, 41), "")
    assert plan(PrefillSettings(num_pages=1000, window_slots="0.01")) == (PoolPlan(1000, 41, 41), ""), "a step's"


def test_the_memory_is_shared_out():
    chosen, _ = plan(PrefillSettings(kv_memory_mib=64, window_slots="0.25"))
    assert chosen.num_slots is not None
    assert 0.99 * (64 << 20) < chosen.num_bytes(WINDOWED) <= 64 << 20
    assert chosen.num_pages > 2 * ((64 << 20) // WINDOWED.page_bytes)


@pytest.mark.parametrize(
    ("step_tokens", "device", "share", "why"),
    [
        (512, "cuda", "0.25", "GPUs"),
        (512, "cpu", "1.0", "every page"),
        (20000, "cpu", "0.25", "every page"),
    ],
)
def test_a_worker_without_slots_tells_why(step_tokens: int, device: str, share: str, why: str):
    settings = DecodeSettings(num_pages=1000, window_slots=share)
    chosen, reason = plan(settings, step_tokens, device=device)
    assert chosen == PoolPlan(1000)
    assert why in reason


def test_a_pool_with_slots_has_memory_for_both():
    storage, memory = allocate_pool(cast(LoadedModel, Model()), PoolPlan(12, 5), None)
    assert isinstance(memory, WindowedMemory)
    assert (storage.num_pages, storage.address, storage.has_window_slots) == (12, memory.address, True)
    assert memory.num_bytes == PoolPlan(12, 5).num_bytes(WINDOWED)
    cache = empty_cache(memory, WINDOWED)
    assert cache.window == PageWindow.of(WINDOWED)
    assert cache.pool.windows is not None
    assert cache.pool.windows.slot_of is memory.slot_of
    plain = empty_cache(allocate_pool(cast(LoadedModel, Model()), PoolPlan(12), None)[1], WINDOWED)
    assert (plain.window, plain.pool.windows) == (None, None)


@pytest.mark.parametrize("text", ["", "on", "0", "-0.5", "1.5", "nan"])
def test_a_wrong_share_is_a_clear_error(text: str):
    with pytest.raises(ValueError, match=r"window_slots is off, auto, or a share of the pages such as 0\.25"):
        PrefillSettings(window_slots=text)


def test_a_pool_has_the_slots_of_an_image_that_no_step_may_cut():
    settings = PrefillSettings(num_pages=1000, window_slots="0.01", token_budget=64)
    chosen = choose_plan(settings, cast(LoadedModel, Model()), 64, block_rows=256)
    window = PageWindow.of(WINDOWED)
    assert window is not None
    assert (chosen.num_slots, chosen.least_slots) == (window.most_pages(256 + 16),) * 2
    memory = allocate_pool(cast(LoadedModel, Model()), PoolPlan(12, 5, 4), None)[1]
    windows = empty_cache(memory, WINDOWED, least_slots=4).pool.windows
    assert windows is not None
    assert windows.least_slots == 4
