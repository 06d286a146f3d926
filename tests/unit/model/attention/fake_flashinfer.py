"""flashinfer's two wrappers, as far as they are used here, in plain torch on the CPU.

Written from the signatures and docstrings of flashinfer-python 0.7.2. A wrapper with buffers for CUDA graphs computes
from their contents and refuses another batch size, like the real one. Masks are packed and read by bits, and a plan for
a window gives a tile of queries as many keys as the real one may (`scheduler.cuh`, `prefill.cuh`): enough for causal
queries only. It verifies how the conventions were read, not that flashinfer keeps them.
"""

from __future__ import annotations

import numpy as np
import torch

TILE_QUERIES = 16
"""The fewest queries of a tile."""

Pages = tuple[torch.Tensor, torch.Tensor]


class _Wrapper:
    """The common part: int32 tables planned on the host, and attention by gathering."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str, backend: str) -> None:
        assert kv_layout == "HND"
        assert backend == "fa2"
        assert not float_workspace_buffer.any(), "must be zero at first use"
        self.num_plans = 0
        self._mask: _PackedMask | None = None

    def _keep(self, page_size: int, heads: tuple[int, int, int], sm_scale, window_left, logits_soft_cap, types) -> None:
        self.num_plans += 1
        self._page_size = page_size
        self._heads = heads
        self._scale, self._window_left, self._softcap, self._types = sm_scale, window_left, logits_soft_cap, types

    def _answer(
        self, q: torch.Tensor, pages: Pages, query_offsets: list[int], indptr: list[int], indices: list[int],
        last_page_len: list[int],
    ) -> torch.Tensor:  # fmt: skip
        num_heads, num_kv_heads, head_dim = self._heads
        assert q.is_contiguous()
        assert q.shape[1:] == (num_heads, head_dim)
        assert {q.dtype, *(side.dtype for side in pages)} == set(self._types)
        assert pages[0].stride() == pages[1].stride()
        assert pages[0].shape[1:] == (num_kv_heads, self._page_size, head_dim)
        out = torch.empty_like(q)
        for row, slots in enumerate(last_page_len):
            assert 1 <= slots <= self._page_size
            table = indices[indptr[row] : indptr[row + 1]]
            length = (len(table) - 1) * self._page_size + slots
            keys, values = (side[table].transpose(1, 2).flatten(0, 1)[:length].float() for side in pages)
            group = num_heads // num_kv_heads
            keys, values = (side.repeat_interleave(group, dim=1) for side in (keys, values))
            place = slice(query_offsets[row], query_offsets[row + 1])
            mask = (
                None if self._mask is None else self._mask.of(row, query_offsets[row + 1] - query_offsets[row], length)
            )
            out[place] = self._attend(q[place].float(), keys, values, mask).to(q.dtype)
        return out

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        scores = torch.einsum("qhd,khd->hqk", query, keys) * self._scale
        if self._softcap is not None:
            scores = self._softcap * torch.tanh(scores / self._softcap)
        length, num_queries = keys.shape[0], query.shape[0]
        at = torch.arange(length - num_queries, length)[:, None]
        seen = torch.arange(length)
        hidden = seen > at if mask is None else ~mask  # a mask takes the place of causality
        if self._window_left >= 0:
            hidden |= seen < at - self._window_left
            hidden |= seen >= self._planned_ends(length, num_queries)[:, None]
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)

    def _planned_ends(self, length: int, num_queries: int) -> torch.Tensor:
        """One past the last key that each query gets from a plan for a window that splits the keys."""
        tiles = torch.arange(num_queries) // TILE_QUERIES * TILE_QUERIES
        starts = (length - num_queries + tiles - self._window_left).clamp(min=0)
        planned = -(-(self._window_left + TILE_QUERIES) // self._page_size) * self._page_size
        return starts + planned


class _PackedMask:
    """A mask as the wrapper packs it: of each request whole bytes, and in them the first item in the lowest bit."""

    def __init__(self, mask: torch.Tensor, counts: list[int]) -> None:
        assert mask.dtype == torch.bool
        assert mask.dim() == 1
        assert len(mask) == sum(counts), "the items of all requests: queries x keys of each"
        assert len(mask) < 2**31, "offsets are int32"
        self._bytes = [np.packbits(part.numpy(), bitorder="little") for part in mask.split(counts)]

    def of(self, row: int, num_queries: int, length: int) -> torch.Tensor:
        """[queries, keys] of a request."""
        offsets = np.arange(num_queries)[:, None] * length + np.arange(length)
        return torch.from_numpy((self._bytes[row][offsets // 8] >> (offsets % 8) & 1).astype(bool))


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """For steps with chunks."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend)

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, *, custom_mask=None, causal=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        q_data_type="float16", kv_data_type=None,
    ) -> None:  # fmt: skip
        assert causal == (custom_mask is None)
        self._tables = [_host(x) for x in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)]
        self._mask = None if custom_mask is None else _PackedMask(custom_mask, self._mask_counts(page_size))
        heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        self._keep(page_size, heads, sm_scale, window_left, logits_soft_cap, (q_data_type, kv_data_type))

    def _mask_counts(self, page_size: int) -> list[int]:
        """Queries x keys of each request, as `_compute_page_mask_indptr` counts them."""
        offsets, indptr, _, last = self._tables
        return [
            (offsets[row + 1] - offsets[row]) * ((indptr[row + 1] - indptr[row] - 1) * page_size + slots)
            for row, slots in enumerate(last)
        ]

    def run(self, q: torch.Tensor, paged_kv_cache: Pages) -> torch.Tensor:
        return self._answer(q, paged_kv_cache, *self._tables)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """For steps of single tokens."""

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        use_tensor_cores: bool = False, paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None, paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__(float_workspace_buffer, kv_layout, backend)
        self._use_cuda_graph = use_cuda_graph
        self._use_tensor_cores = use_tensor_cores
        self._buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *, window_left=-1,
        logits_soft_cap=None, q_data_type="float16", kv_data_type=None, sm_scale=None,
    ) -> None:  # fmt: skip
        group = num_qo_heads // num_kv_heads
        assert self._use_tensor_cores or group in (1, 2, 3, 4, 6, 8, 16), "flashinfer has no kernel for this group"
        tables = [indptr, indices, last_page_len]
        for table in tables:
            _host(table)
        if self._use_cuda_graph:
            for buffer, table in zip(self._buffers, tables, strict=True):
                assert buffer is not None
                assert len(table) <= len(buffer), "does not fit the buffer"
                buffer[: len(table)].copy_(table)
            assert self._buffers[2] is not None
            assert len(last_page_len) == len(self._buffers[2]), "the batch size should be fixed"
        else:
            self._buffers = (indptr, indices, last_page_len)
        heads = (num_qo_heads, num_kv_heads, head_dim)
        self._keep(page_size, heads, sm_scale, window_left, logits_soft_cap, (q_data_type, kv_data_type))

    def run(self, q: torch.Tensor, paged_kv_cache: Pages) -> torch.Tensor:
        indptr, indices, last_page_len = (buffer.tolist() for buffer in self._buffers if buffer is not None)
        assert len(q) == len(last_page_len)
        return self._answer(q, paged_kv_cache, list(range(len(q) + 1)), indptr, indices, last_page_len)


def _host(table: torch.Tensor) -> list[int]:
    assert table.dtype == torch.int32
    assert table.device.type == "cpu", "a plan would wait for the device"
    numbers: list[int] = table.tolist()
    return numbers
