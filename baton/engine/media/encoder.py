"""Encodes images in the engine thread: the vision tower of the model over a batch of held images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from baton.domain.errors import BatonError, Broken
from baton.engine.media.settled_embedding import SettledEmbedding
from baton.engine.media.store import HeldMedia, MediaKey, MediaStore
from baton.model.vision.embedding import MediaEmbedding
from baton.model.vision.tower import VisionTower, WrongRowCount
from baton.telemetry import metrics
from baton.telemetry.logs import get_logger

Inputs = Mapping[str, torch.Tensor]
Held = HeldMedia[Inputs, Any]
Images = MediaStore[Inputs, SettledEmbedding]

log = get_logger()


class MediaEncoder:
    """Runs `tower` for images in `store`."""

    def __init__(
        self,
        tower: VisionTower,
        store: MediaStore[Inputs, Any],
        settle: Callable[[MediaEmbedding], object] = SettledEmbedding.settle,
    ) -> None:
        """`settle`: makes of an embedding what the store keeps, with digests."""
        self._tower = tower
        self._store = store
        self._settle = settle

    def encode(self, batch: Sequence[tuple[MediaKey, Held]]) -> list[tuple[MediaKey, BatonError]]:
        """Encodes images one by one. Returns those of which the tower made nothing, with the error of their prompts.

        The router tries such a prompt on another worker: a tower may fail for a while, as without memory.
        """
        failed: list[tuple[MediaKey, BatonError]] = []
        for key, item in batch:
            if item.inputs is None:
                continue
            try:
                (embedding,) = self._tower.encode(item.inputs, [item.num_rows])
                rows = self._settle(embedding)
            except Exception as error:  # a library's own faults end no engine
                why = "has other rows than counted" if isinstance(error, WrongRowCount) else "cannot be encoded now"
                failed.append((key, Broken(f"media {key[1].hex()} {why}")))
                metrics.MEDIA_TOTAL.labels("encode_failed").inc()
                log.error("media_not_encoded", identity=key[1].hex(), why=repr(error)[:200])
                continue
            if embedding.rows.is_cuda:  # else a later step would pay for it, and be blamed for its faults
                torch.cuda.current_stream(embedding.rows.device).synchronize()
            self._store.on_encoded(key, rows)
            metrics.MEDIA_TOTAL.labels("encoded").inc()
        metrics.MEDIA_HELD_BYTES.set(self._store.num_bytes)
        return failed
