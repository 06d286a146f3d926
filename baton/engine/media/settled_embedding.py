"""An embedding that a prefill worker holds, with the digests that its bytes settled with.

As pages do, it is compared before its use: what has changed in memory since then is never computed with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from baton.domain.arithmetic import ceil_div
from baton.engine.media.exported_embedding import PART_BYTES
from baton.model.vision.embedding import MediaEmbedding
from baton.transfer.digest import page_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledEmbedding(MediaEmbedding):
    """`layers` [1 + depth, num_rows, hidden_size], contiguous: the rows, then the DeepStack rows, all views of it.

    `digests`: xxh3-64 of each `PART_BYTES` of its bytes, as an encode worker announces them.
    """

    layers: torch.Tensor
    digests: tuple[int, ...]

    @classmethod
    def settle(cls, embedding: MediaEmbedding) -> SettledEmbedding:
        """Copies an embedding that was just made, on its device, and digests it."""
        layers = torch.stack([embedding.rows, *embedding.deep]).contiguous()
        num_parts = ceil_div(layers.nbytes, PART_BYTES)
        return cls.of(layers, tuple(_digest(layers, part) for part in range(num_parts)))

    @classmethod
    def of(cls, layers: torch.Tensor, digests: tuple[int, ...]) -> SettledEmbedding:
        """An embedding whose digests are known. It is not compared with them now."""
        return cls(rows=layers[0], deep=tuple(layers[1:]), layers=layers, digests=digests)

    def is_intact(self, first: int, end: int) -> bool:
        """True while the rows [first, end) of all layers are those that were digested. Parts are compared whole.

        Device memory is copied to be compared.
        """
        return all(_digest(self.layers, part) == self.digests[part] for part in self._parts(first, end))

    def _parts(self, first: int, end: int) -> Iterator[int]:
        """Numbers of the parts that hold the rows [first, end) of some layer, each once."""
        num_rows = len(self.rows)
        row_bytes, at = self.rows[0].nbytes, 0
        for layer in range(len(self.layers)):
            begin, stop = (row_bytes * (layer * num_rows + row) for row in (first, end))
            begin = max(at, begin // PART_BYTES)
            at = max(at, ceil_div(stop, PART_BYTES))
            yield from range(begin, at)


def _digest(layers: torch.Tensor, part: int) -> int:
    """Digest of one part of the bytes as they are now."""
    data = layers.view(torch.uint8).flatten()[part * PART_BYTES : (part + 1) * PART_BYTES]
    return page_digest(data.cpu().numpy().data)
