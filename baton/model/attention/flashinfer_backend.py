"""Paged attention on CUDA through flashinfer. Imported only where a GPU is; untested on machines without one.

Written against flashinfer-python 0.7's `BatchPrefillWithPagedKVCacheWrapper`, which serves rows of one token and
chunks alike: a wrapper for every distinct (window, softcap) among the layers, one plan a step for each, on
the page-major HND views of the pool (strided by whole pages). Sinks, and layers whose K and V differ in size, are
left to the torch backend, which runs on GPUs too.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from baton.model.attention.base import AttentionCall, StepMetadata
from baton.model.geometry import ObservedLayer
from baton.model.storage import PageStorage

WORKSPACE_BYTES = 256 * 1024 * 1024
HEAD_DIMS = frozenset({64, 128, 256})

PlanKey = tuple[int | None, float | None]
"""Layers of one window and one softcap share a plan."""


def flashinfer_serves(layers: Sequence[ObservedLayer], storage: PageStorage) -> bool:
    """Whether every layer's attention exists in flashinfer, and flashinfer and a GPU are here."""
    if storage.device.type != "cuda" or importlib.util.find_spec("flashinfer") is None:
        return False
    shapes = {(layer.num_heads, layer.geometry.num_kv_heads, layer.geometry.k_head_dim) for layer in layers}
    return (
        storage.geometry.dtype in ("float16", "bfloat16")
        and len(shapes) == 1  # one plan is made for one number of heads
        and all(
            layer.geometry.k_head_dim == layer.geometry.v_head_dim
            and layer.geometry.k_head_dim in HEAD_DIMS
            and not layer.has_sinks
            for layer in layers
        )
    )


class FlashinferAttention:
    """An `AttentionBackend` over a CUDA `storage`."""

    def __init__(self, layers: Sequence[ObservedLayer], storage: PageStorage) -> None:
        flashinfer = importlib.import_module("flashinfer")  # needs a GPU, and has no types
        self._storage = storage
        self._layers = tuple(layers)
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=storage.device)
        self._wrappers: dict[PlanKey, Any] = {
            key: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="HND", backend="fa2")
            for key in {(layer.window, layer.softcap) for layer in layers}
        }

    def begin(self, step: StepMetadata) -> None:
        tables = _page_tables(step)
        layer = self._layers[0]
        dtype = self._storage.keys(0).dtype
        for (window, softcap), wrapper in self._wrappers.items():
            wrapper.plan(
                *tables,
                layer.num_heads,
                layer.geometry.num_kv_heads,
                layer.geometry.k_head_dim,
                step.page_size,
                causal=True,
                sm_scale=layer.scale,
                window_left=-1 if window is None else window - 1,  # flashinfer counts keys left of the query
                logits_soft_cap=softcap,
                q_data_type=dtype,
                kv_data_type=dtype,
            )

    def attend(self, call: AttentionCall) -> torch.Tensor:
        wrapper = self._wrappers[call.window, call.softcap]
        pages = (self._storage.keys(call.layer), self._storage.values(call.layer))
        out: torch.Tensor = wrapper.run(call.query.contiguous(), pages)
        return out


def _page_tables(step: StepMetadata) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query offsets, table offsets, tables, filled slots of last pages: int32 on the host, where plans read them."""
    query_offsets, table_offsets = [0], [0]
    tables: list[int] = []
    last_slots: list[int] = []
    for segment in step.segments:
        num_pages = -(-segment.end // step.page_size)
        query_offsets.append(query_offsets[-1] + segment.num_tokens)
        table_offsets.append(table_offsets[-1] + num_pages)
        tables.extend(segment.pages[:num_pages])
        last_slots.append(segment.end - (num_pages - 1) * step.page_size)
    first, second, third, fourth = (
        torch.tensor(values, dtype=torch.int32) for values in (query_offsets, table_offsets, tables, last_slots)
    )
    return first, second, third, fourth
