"""Paged attention on CUDA through flashinfer. Imported only where there is a GPU; see `docs/gpu.md`.

Written against flashinfer-python 0.7. Its decode wrapper serves steps of single tokens, its prefill wrapper steps with
chunks. There is one wrapper of each kind for every distinct (window, softcap) of the layers, planned once a step on the
page-major HND views of the pool. The torch backend serves sinks, and layers whose K and V differ in size.

Steps with trees of drafts, and chunks with blocks (an image of Gemma 3), whose tokens see keys behind them, give the
prefill wrapper a mask of all their tokens (`custom_mask`): no GPU has run that. The mask has the window, too, and the
wrapper gets none, since its plan for a window gives a tile of queries no more keys than `window_left` and its own
number, too few for a block. So that old keys are not read, a layer with a window has tables that begin with it.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from baton.domain.arithmetic import ceil_div
from baton.model.attention.base import (
    AttentionBackend,
    AttentionCall,
    StepMetadata,
    require_no_window,
    tree_mask,
)
from baton.model.attention.layers import ObservedLayer
from baton.model.attention.torch_backend import TorchAttention
from baton.model.storage import PageStorage
from baton.model.to_device import int64_tensor

WORKSPACE_BYTES = 256 * 1024 * 1024
HEAD_DIMS = frozenset({64, 128, 256})
MIN_TENSOR_CORE_GROUP = 4
"""Query heads a KV head from which flashinfer recommends tensor cores for single tokens."""
MAX_MASK_ITEMS = 2**30
"""Pairs of query and key that a step's mask may have: a byte each until flashinfer packs it, counted in int32 there."""

PlanKey = tuple[int | None, float | None]
"""(window, softcap): layers with equal ones share a plan."""


def flashinfer_supports(layers: Sequence[ObservedLayer], storage: PageStorage) -> bool:
    """True if flashinfer and a GPU are present and flashinfer supports every layer."""
    if storage.device.type != "cuda" or importlib.util.find_spec("flashinfer") is None:
        return False
    shapes = {(layer.num_heads, layer.scale, layer.geometry) for layer in layers}
    head_groups = storage.geometry.group.head_groups
    return (
        storage.geometry.dtype == "bfloat16"
        and storage.geometry.kv_dtype is None
        and len(shapes) == 1  # a plan is for one number of heads
        and all(
            layer.geometry.k_head_dim == layer.geometry.v_head_dim
            and layer.geometry.k_head_dim in HEAD_DIMS
            and head_groups in (1, layer.geometry.num_kv_heads)  # otherwise heads are not at one distance
            and not layer.has_sinks
            for layer in layers
        )
    )


class FlashinferAttention:
    """An `AttentionBackend` over a CUDA `storage`; makes backends for a fixed batch size."""

    def __init__(self, layers: Sequence[ObservedLayer], storage: PageStorage) -> None:
        self._flashinfer = importlib.import_module("flashinfer")  # needs a GPU, has no types
        self._storage = storage
        self._layer = layers[0]
        self._keys: tuple[PlanKey, ...] = tuple(dict.fromkeys((layer.window, layer.softcap) for layer in layers))
        # Zeroed, as flashinfer requires. All wrappers share it; one runs at a time.
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=storage.device)
        prefill = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self._chunks = {key: prefill(self._workspace, kv_layout="HND", backend="fa2") for key in self._keys}
        self._rows = {key: self._decode_wrapper() for key in self._keys}
        self._current: dict[PlanKey, Any] | None = self._chunks
        self._torch = TorchAttention(storage)
        self._planned = torch.cuda.Event() if storage.device.type == "cuda" else None

    def begin(self, step: StepMetadata) -> None:
        if step.is_decode_only:  # a block ends with its segment at the latest: its last token sees itself last
            self._current = self._rows
            self.plan_decode(self._rows, PageTables.of(step), step.page_size)
            return
        has_mask = step.has_trees or step.has_blocks
        if has_mask and max(_num_mask_items(step, window) for window, _ in self._keys) > MAX_MASK_ITEMS:
            self._current = None
            self._torch.begin(step)
            return
        self._current = self._chunks
        with self._planning():
            if has_mask:
                self._plan_masked(step)
                return
            tables = PageTables.of(step)
            for (window, softcap), wrapper in self._chunks.items():
                self._plan_chunks(wrapper, tables, step.page_size, causal=True, **self._options(window, softcap))

    def _plan_masked(self, step: StepMetadata) -> None:
        """Plans the wrappers for chunks with a mask of the step's tokens, one for the layers of each window."""
        plans: dict[int | None, tuple[PageTables, torch.Tensor]] = {}
        for (window, softcap), wrapper in self._chunks.items():
            if window not in plans:
                plans[window] = PageTables.of(step, window), step_mask(step, self._storage.device, window)
            tables, mask = plans[window]
            options = self._options(None, softcap)
            self._plan_chunks(wrapper, tables, step.page_size, causal=False, custom_mask=mask, **options)

    def _plan_chunks(self, wrapper: Any, tables: PageTables, page_size: int, **options: Any) -> None:
        layer = self._layer
        wrapper.plan(
            *(tables.query_offsets, tables.table_offsets, tables.pages, tables.last_slots),
            *(layer.num_heads, layer.geometry.num_kv_heads, layer.geometry.k_head_dim, page_size),
            **options,
        )

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if self._current is None:
            return self._torch.attend(call)
        return self.run(self._current[call.window, call.softcap], call)

    def for_batch_size(self, num_rows: int, max_row_pages: int) -> AttentionBackend:
        """A backend for steps of exactly `num_rows` single tokens with tables of at most `max_row_pages`.

        It has buffers of its own, and `begin` changes only their contents. So `attend` can be captured in a CUDA graph.
        """
        device = self._storage.device
        offsets, last_slots = (torch.zeros(n, dtype=torch.int32, device=device) for n in (num_rows + 1, num_rows))
        pages = torch.zeros(num_rows * max_row_pages, dtype=torch.int32, device=device)
        buffers = {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": offsets,
            "paged_kv_indices_buffer": pages,
            "paged_kv_last_page_len_buffer": last_slots,
        }
        return FixedBatchBackend(self, {key: self._decode_wrapper(**buffers) for key in self._keys})

    def plan_decode(self, wrappers: dict[PlanKey, Any], tables: PageTables, page_size: int) -> None:
        """Plans decode wrappers for rows of one token each."""
        layer = self._layer
        with self._planning():
            for (window, softcap), wrapper in wrappers.items():
                wrapper.plan(
                    *(tables.table_offsets, tables.pages, tables.last_slots),
                    *(layer.num_heads, layer.geometry.num_kv_heads, layer.geometry.k_head_dim, page_size),
                    **self._options(window, softcap),
                )

    @contextmanager
    def _planning(self) -> Iterator[None]:
        """Plans go to the device through pinned buffers of the wrappers: none is rewritten before it was copied.

        A step that starts while the one before it runs would otherwise hand its own plan to that one.
        """
        if self._planned is not None:
            self._planned.synchronize()
        yield
        if self._planned is not None:
            self._planned.record()

    def run(self, wrapper: Any, call: AttentionCall) -> torch.Tensor:
        """Runs a planned wrapper for one layer."""
        pages = tuple(side(call.layer).flatten(1, 2) for side in (self._storage.keys, self._storage.values))  # views
        out: torch.Tensor = wrapper.run(call.query.contiguous(), pages)
        return out

    def _decode_wrapper(self, **buffers: Any) -> Any:
        group = self._layer.num_heads // self._layer.geometry.num_kv_heads
        return self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            kv_layout="HND",
            use_tensor_cores=group >= MIN_TENSOR_CORE_GROUP,
            backend="fa2",
            **buffers,
        )

    def _options(self, window: int | None, softcap: float | None) -> dict[str, Any]:
        dtype = self._storage.keys(0).dtype
        return {
            "sm_scale": self._layer.scale,
            "window_left": -1 if window is None else window - 1,  # flashinfer counts keys left of the query
            "logits_soft_cap": softcap,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }


class FixedBatchBackend:
    """An `AttentionBackend` for one batch size; made by `FlashinferAttention.for_batch_size`."""

    def __init__(self, attention: FlashinferAttention, wrappers: dict[PlanKey, Any]) -> None:
        self._attention = attention
        self._wrappers = wrappers

    def begin(self, step: StepMetadata) -> None:
        self._attention.plan_decode(self._wrappers, PageTables.of(step), step.page_size)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return self._attention.run(self._wrappers[call.window, call.softcap], call)


@dataclass(frozen=True, slots=True)
class PageTables:
    """A step's page tables one after another, int32 on the host, where plans read them.

    Segment i uses `pages[table_offsets[i] : table_offsets[i + 1]]`, and `last_slots[i]` slots of the last one. Its
    queries are [query_offsets[i], query_offsets[i + 1]).
    """

    query_offsets: torch.Tensor
    table_offsets: torch.Tensor
    pages: torch.Tensor
    last_slots: torch.Tensor

    @classmethod
    def of(cls, step: StepMetadata, window: int | None = None) -> PageTables:
        """The tables of a step's segments; with `window` each from the page of the first key that it sees."""
        query_offsets, table_offsets = [0], [0]
        pages: list[int] = []
        last_slots: list[int] = []
        for segment in step.segments:
            first, end = segment.first_seen_page(step.page_size, window), ceil_div(segment.end, step.page_size)
            query_offsets.append(query_offsets[-1] + segment.num_tokens)
            table_offsets.append(table_offsets[-1] + end - first)
            pages.extend(segment.pages_between(first, end))
            last_slots.append(segment.end - (end - 1) * step.page_size)
        return cls(_int32(query_offsets), _int32(table_offsets), _int32(pages), _int32(last_slots))


def step_mask(step: StepMetadata, device: torch.device, window: int | None = None) -> torch.Tensor:
    """The `custom_mask` of a step with trees or blocks: [queries, keys] of each segment, flat, one after another; bool.

    The keys are those of `PageTables.of(step, window)`. Raises `ValueError` for a tree and a window.
    """
    mask = torch.empty(_num_mask_items(step, window), dtype=torch.bool, device=device)
    at = 0
    for segment in step.segments:
        first = segment.first_seen_page(step.page_size, window) * step.page_size
        places = torch.arange(first, segment.end, device=device)
        queries = torch.arange(segment.start, segment.end, device=device)[:, None]
        own = mask[at : at + len(queries) * len(places)].view(len(queries), len(places))
        at += own.numel()
        ends = int64_tensor(segment.visible_ends(), device)[:, None] if segment.blocks else queries + 1
        torch.lt(places, ends, out=own)
        if window is not None:
            own &= places > queries - window
        if segment.parents:
            require_no_window(window)
            own[:, segment.start :] = tree_mask(segment, device)
    return mask


def _num_mask_items(step: StepMetadata, window: int | None = None) -> int:
    """Pairs of a query and a key of its segment's table."""
    page_size = step.page_size
    return sum(
        segment.num_tokens * (segment.end - segment.first_seen_page(page_size, window) * page_size)
        for segment in step.segments
    )


def _int32(values: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int32))  # numpy reads a list several times as fast as torch
