"""The scales of pages of int8: views of the pool, one of K's and one of V's for every layer.

Each token's head is rounded by itself when it is written, and never again. So a slot's bytes do not depend on the
chunk that it came in, nor on what is written beside it later. Called by `storage`.
"""

from __future__ import annotations

import torch

from baton.kv.geometry import SCALE_BYTES, KVGeometry
from baton.model.int8_rows import quantize_rows


class PageScales:
    """Scales of `pool` [num_pages, bytes of a page], int8."""

    def __init__(self, geometry: KVGeometry, pool: torch.Tensor) -> None:
        self.page_stride = pool.shape[1] // SCALE_BYTES
        floats = pool.view(torch.float32)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for layer, offsets in zip(geometry.layers, geometry.scale_offsets(), strict=True):
            shape = pool.shape[0], layer.num_kv_heads, geometry.page_size
            strides = self.page_stride, geometry.page_size, 1
            for sides, offset in zip((self.keys, self.values), offsets, strict=True):
                sides.append(floats.as_strided(shape, strides, floats.storage_offset() + offset))

    def addresses(self, layer: int) -> tuple[int, int, int]:
        """Of a layer's K and V scales in page 0, and the distance of two pages in scales."""
        return self.keys[layer].data_ptr(), self.values[layer].data_ptr(), self.page_stride

    @staticmethod
    def write(side: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Writes the scales of new tokens [tokens, num_kv_heads, dim] to a `side` [pages, num_kv_heads, slots].

        Returns the tokens as int8.
        """
        rows, scales = quantize_rows(tokens.flatten(0, 1))
        side.transpose(1, 2)[pages, slots] = scales.view(tokens.shape[:2])
        return rows.view(tokens.shape)

    @staticmethod
    def restore(side: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Numbers of int8 `rows` [tables, num_kv_heads, token slots, dim], gathered from `pages` [tables, pages]."""
        scales = side[pages].transpose(1, 2).flatten(2)
        return (rows.float() * scales.unsqueeze(-1)).to(dtype)
