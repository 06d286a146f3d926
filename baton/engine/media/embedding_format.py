"""Numbers of an embedding: their shape, the fingerprint of all that they depend on, and their way to bytes and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

import torch

from baton.domain.fingerprint import digest_of
from baton.engine.media.exported_embedding import ExportedEmbedding
from baton.engine.media.settled_embedding import SettledEmbedding
from baton.model.vision.embedding import MediaEmbedding

KIND = "embeddings"


@dataclass(frozen=True, slots=True)
class EmbeddingFormat:
    """Rows of `hidden` numbers of a torch `dtype`, and `depth` further layers of such rows (DeepStack)."""

    hidden: int
    depth: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, with its DeepStack rows."""
        return (1 + self.depth) * self.hidden * self._torch_dtype.itemsize

    @property
    def _torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def fingerprint(self, weights: str, processor: str) -> str:
        """Digest of all that an embedding depends on beside the image. `weights`: `checkpoint_root`.

        `processor`: digest of the image processor's files. Workers with equal fingerprints exchange embeddings.
        """
        libraries = [f"{name} {version(name)}" for name in ("transformers", "pillow", "torch")]
        return digest_of((KIND, str(self.hidden), str(self.depth), self.dtype, weights, processor, *libraries))

    def to_bytes(self, embedding: MediaEmbedding) -> ExportedEmbedding:
        """The bytes of `embedding`, all of its rows before those of its first DeepStack layer, with digests."""
        layers = torch.cat([embedding.rows, *embedding.deep]).to("cpu", self._torch_dtype).contiguous()
        data = bytearray(layers.view(torch.uint8).flatten().numpy().tobytes())
        return ExportedEmbedding.settle(len(embedding.rows), data)

    def from_bytes(
        self, data: bytearray, digests: Sequence[int], num_rows: int, device: torch.device
    ) -> SettledEmbedding:
        """The embedding of `num_rows` rows, on `device`, which keeps `digests`: of each part of `data`.

        Raises `ValueError` for another number of bytes.
        """
        if num_rows < 1 or len(data) != num_rows * self.row_bytes:
            raise ValueError(f"{len(data)} bytes for {num_rows} rows of {self.row_bytes}")
        layers = torch.frombuffer(data, dtype=self._torch_dtype).view(1 + self.depth, num_rows, self.hidden).to(device)
        return SettledEmbedding.of(layers, tuple(digests))
