"""Paged attention by the native kernels: one call a layer for rows and prompt chunks, without gathering.

Chosen by `choose_backend` where the kernels support the model. Reads K and V in their pages; slots outside every
query's window are not touched. Prompt chunks go to torch where it has bfloat16 products that the kernels lack.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import replace

import torch

from baton.domain.arithmetic import ceil_div
from baton.model.attention.base import AttentionCall, Segment, StepMetadata, require_no_window
from baton.model.attention.layers import ObservedLayer
from baton.model.attention.torch_backend import TorchAttention
from baton.model.cpu import has_bfloat16_arithmetic
from baton.model.kernels.build import IsaLevel
from baton.model.kernels.library import Kernels, supports_dtype
from baton.model.storage import PageStorage

MAX_ROW_TOKENS = 16
"""Longest segment that counts as a row, decoded and drafted tokens: `kMaxRowTokens` of src/attention.cpp."""
_SEGMENT_COLUMNS = ("offset", "start", "num_tokens")


def native_supports(kernels: Kernels, layers: Sequence[ObservedLayer], storage: PageStorage) -> bool:
    """True if the kernels support every layer's dtype and head sizes on the device of `storage`."""
    sizes = {size for layer in layers for size in (layer.geometry.k_head_dim, layer.geometry.v_head_dim)}
    fits = all(size % kernels.head_dim_multiple == 0 for size in sizes) and all(
        layer.num_heads % layer.geometry.num_kv_heads == 0 for layer in layers
    )
    return storage.device.type == "cpu" and supports_dtype(storage.dtype) and fits


class NativeAttentionLayer(ctypes.Structure):
    """`AttentionLayer` of src/attention.cpp."""

    _fields_ = (
        ("query", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("query_token_stride", "query_head_stride")),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "key_scales", "value_scales")),
        ("scale_page_stride", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in ("page_stride", "page_size", "group_heads", "group_stride")),
        *((name, ctypes.c_int64) for name in ("key_slot_stride", "value_slot_stride")),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "k_dim", "v_dim", "window")),
        ("sinks", ctypes.c_void_p),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


class _Segments(ctypes.Structure):
    """`Segments` of src/attention.cpp."""

    _fields_ = (
        ("num_segments", ctypes.c_int64),
        *(
            (name, ctypes.c_void_p)
            for name in ("offset", "start", "num_tokens", "first_page", "pages", "visible_ends", "parents")
        ),
    )


class NativePlan:
    """Segments in the kernels' layout; owns the memory that `struct` points to."""

    def __init__(self, segments: Sequence[Segment], page_size: int) -> None:
        pages, first_page = array("i"), array("q")
        for segment in segments:
            first_page.append(len(pages) - segment.first_page)  # the kernels count pages from position 0
            pages.extend(segment.pages_between(segment.first_page, ceil_div(segment.end, page_size)))
        columns = [array("q", [getattr(segment, name) for segment in segments]) for name in _SEGMENT_COLUMNS]
        self.has_trees = any(segment.parents for segment in segments)
        ends = array("q", _flat_ends(segments) if any(segment.blocks for segment in segments) else [])
        parents = array("q", _flat_parents(segments) if self.has_trees else [])
        self._arrays = (*columns, first_page, pages, ends, parents)
        addresses = [numbers.buffer_info()[0] if numbers else None for numbers in self._arrays]
        self.struct = _Segments(len(segments), *addresses)


def _flat_ends(segments: Sequence[Segment]) -> list[int]:
    """One past the last visible key of each token of the step; 0 for those of other segments."""
    ends = [0] * max(segment.offset + segment.num_tokens for segment in segments)
    for segment in segments:
        ends[segment.offset : segment.offset + segment.num_tokens] = segment.visible_ends()
    return ends


def _flat_parents(segments: Sequence[Segment]) -> list[int]:
    """The parent of each token of the step: -1 for the first one of a tree, and 0 for that of any other segment."""
    parents = [0] * max(segment.offset + segment.num_tokens for segment in segments)
    for segment in segments:
        parents[segment.offset : segment.offset + len(segment.parents)] = segment.parents
    return parents


class NativeAttention:
    """An `AttentionBackend` over a `storage` that passes `native_supports`.

    torch computes segments of more than `max_segment_tokens` new tokens; None: no limit.
    """

    def __init__(self, kernels: Kernels, storage: PageStorage, max_segment_tokens: int | None = None) -> None:
        self._kernels = kernels
        self._storage = storage
        self._max_segment_tokens = max_segment_tokens
        self._torch = TorchAttention(storage)
        self._plan: NativePlan | None = None
        self._windowed: NativePlan | None = None  # of layers whose window parts are apart
        self._torch_segments: tuple[Segment, ...] = ()

    def begin(self, step: StepMetadata) -> None:
        self._torch_segments = self._for_torch(step)
        windowed = step.windowed
        if self._torch_segments:
            rest = None if windowed is None else replace(windowed, segments=self._for_torch(windowed))
            self._torch.begin(replace(step, segments=self._torch_segments, windowed=rest))
        self._plan = NativePlan(self._for_kernels(step), step.page_size)
        self._windowed = None if windowed is None else NativePlan(self._for_kernels(windowed), step.page_size)

    @property
    def dtype(self) -> torch.dtype:
        """That of queries."""
        return self._storage.dtype

    @property
    def native_plan(self) -> NativePlan | None:
        """The planned step; None before the first one, and if torch computes a part of it."""
        return None if self._torch_segments else self._plan

    def native_layer(
        self, layer: int, num_heads: int, scale: float, window: int | None, softcap: float | None
    ) -> NativeAttentionLayer:
        """A layer's call without sinks, for contiguous queries; `query` and `out` are to be set."""
        keys, values, scales = self._storage.keys(layer), self._storage.values(layer), self._storage.scales
        num_groups, group_heads, page_size, k_dim = keys.shape[1:]
        return NativeAttentionLayer(
            *(None, num_heads * k_dim, k_dim),
            *(keys.data_ptr(), values.data_ptr()),
            *((None, None, 0) if scales is None else scales.addresses(layer)),
            *(keys.stride(0), page_size, group_heads, keys.stride(1)),
            *(keys.stride(3), values.stride(3)),
            *(None, num_heads, num_groups * group_heads, k_dim, values.shape[-1]),
            window or 0,
            *(None, scale, softcap or 0.0),
        )

    def _for_torch(self, step: StepMetadata) -> tuple[Segment, ...]:
        limit = self._max_segment_tokens
        return () if limit is None else tuple([s for s in step.segments if s.num_tokens > limit])

    def _for_kernels(self, step: StepMetadata) -> Sequence[Segment]:
        limit = self._max_segment_tokens
        return step.segments if limit is None else [s for s in step.segments if s.num_tokens <= limit]

    def attend(self, call: AttentionCall) -> torch.Tensor:
        plan = self._windowed if self._storage.is_apart(call.layer) else self._plan
        assert plan is not None, "attend before begin"
        out = self._attend(call, plan)
        if self._torch_segments:
            torch_out = self._torch.attend(call)
            for segment in self._torch_segments:
                place = slice(segment.offset, segment.offset + segment.num_tokens)
                out[place] = torch_out[place]
        return out

    def _attend(self, call: AttentionCall, plan: NativePlan) -> torch.Tensor:
        if plan.has_trees:
            require_no_window(call.window)
        dtype = self._storage.dtype
        query = call.query.to(dtype)
        if query.stride(-1) != 1:
            query = query.contiguous()
        sinks = None if call.sinks is None else call.sinks.detach().float().contiguous()
        layer = self.native_layer(call.layer, query.shape[1], call.scale, call.window, call.softcap)
        out = query.new_empty(*query.shape[:2], layer.v_dim)
        layer.query, layer.out = query.data_ptr(), out.data_ptr()
        layer.query_token_stride, layer.query_head_stride = query.stride(0), query.stride(1)
        layer.sinks = None if sinks is None else sinks.data_ptr()
        self._kernels.attend(dtype is torch.bfloat16, ctypes.addressof(layer), ctypes.addressof(plan.struct))
        return out.to(call.query.dtype)


def max_native_segment_tokens(kernels: Kernels, dtype: torch.dtype) -> int | None:
    """Longest segment that the native kernels compute on this machine; None: no limit.

    torch computes longer bfloat16 segments where it has products that `kernels` lack.
    """
    lacks_products = has_bfloat16_arithmetic() and (
        kernels.level is not IsaLevel.AVX512_BF16 or torch.cpu._is_amx_tile_supported()
    )
    return MAX_ROW_TOKENS if dtype is torch.bfloat16 and lacks_products else None
