"""Allocates a worker's pool as its settings say: pages, slots for window parts, and host memory beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from baton.engine.pool.touch import TouchThread, touch_beside
from baton.kv.eviction import EvictionPolicy
from baton.kv.geometry import KVGeometry, PageWindow
from baton.kv.memory import PageMemory, PoolMemory
from baton.kv.pages import PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.kv.windows.memory import WindowedMemory
from baton.kv.windows.plan import PoolPlan, auto_share, plan_pool
from baton.model.device_memory import CudaCopyStream, DeviceMemory
from baton.model.loading.loader import LoadedModel
from baton.model.storage import PageStorage
from baton.settings.base import SettingsError
from baton.settings.groups import MIB, WorkerSettings
from baton.telemetry.logs import get_logger
from baton.transfer.digest import PoolHasher

log = get_logger()


def choose_plan(settings: WorkerSettings, model: LoadedModel, step_tokens: int, block_rows: int = 0) -> PoolPlan:
    """Sizes of the pool. `step_tokens`: most tokens of one sequence in a step. `block_rows`: of an image that no step
    may cut.

    Raises `SettingsError` if not one page fits.
    """
    geometry = model.geometry
    whole = PoolPlan(settings.pool_pages(geometry.page_bytes))
    window, why = PageWindow.of(geometry), ""
    share = settings.window_share(0.0 if window is None else auto_share(window, model.config.max_model_len))
    if share is None or window is None:
        return whole
    if model.device != "cpu":
        why = "not on GPUs yet"
    plan = plan_pool(
        geometry,
        share,
        window.most_pages(max(2, step_tokens, block_rows + geometry.page_size)),
        num_bytes=settings.kv_memory_mib * MIB,
        num_pages=settings.num_pages,
    )
    if plan.num_slots is None:
        why = why or "every page would have a slot"
    if why:
        log.info("no_window_slots", why=why)
        return whole
    return plan


def allocate_pool(model: LoadedModel, plan: PoolPlan, host: PageMemory | None) -> tuple[PageStorage, PoolMemory]:
    """The pages as tensors and as bytes. On the host `touch_pool` touches them, before any use.

    Raises `SettingsError` if they do not fit a GPU.
    """
    geometry, num_pages = model.geometry, plan.num_pages
    if plan.num_slots is not None:
        windowed = WindowedMemory.allocate(num_pages, plan.num_slots, geometry.part_ends)
        return PageStorage.on_memory(geometry, windowed, host), windowed
    if model.device == "cpu":
        memory = PageMemory(num_pages, geometry.page_bytes, geometry.part_ends)
        return PageStorage.on_memory(geometry, memory, host), memory
    with raise_if_out_of_memory(f"{num_pages} pages, {num_pages * geometry.page_bytes / MIB:.0f} MiB"):
        storage = PageStorage.allocate(geometry, num_pages, model.device, host, has_scratch=True)
    return storage, DeviceMemory(storage, CudaCopyStream(storage.device))


def touch_pool(memory: PoolMemory) -> TouchThread | None:
    """Touches `memory` on the host, see `touch_beside`; None if nothing is left to be touched beside the start."""
    if isinstance(memory, WindowedMemory):
        return touch_beside((memory.leading, memory.windows))
    return touch_beside((memory,)) if isinstance(memory, PageMemory) else None


def host_memory(num_slots: int, geometry: KVGeometry) -> PageMemory:
    """Slots with the parts of a page: its digests move with it."""
    return PageMemory(num_slots, geometry.page_bytes, geometry.part_ends)


def empty_cache(
    memory: PoolMemory,
    geometry: KVGeometry,
    policy: EvictionPolicy = EvictionPolicy.LRU,
    *,
    digests: bool = True,
    least_slots: int = 0,
) -> PrefixCache:
    """The cache of an empty pool over `memory`, with a window if window parts have slots there.

    `least_slots`: see `WindowSlots`.
    """
    pool = PagePool(memory.num_pages)
    cache = PrefixCache(pool, PoolHasher(memory) if digests else None, policy)
    if isinstance(memory, WindowedMemory):
        memory.join(pool).least_slots = least_slots
        cache.window = PageWindow.of(geometry)
    return cache


@contextmanager
def raise_if_out_of_memory(what: str) -> Iterator[None]:
    """Turns an out-of-memory error of a GPU into a `SettingsError` that names `what`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        hint = "Lower --kv-memory-mib or --num-pages, take a smaller model, or stop other processes on the GPU."
        raise SettingsError(what, why="the GPU has too little memory", hint=hint) from error
