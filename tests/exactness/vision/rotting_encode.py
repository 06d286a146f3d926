"""A worker whose memory is faulty: bytes of some embeddings change, behind or before their digests.

`run([MODE, FILE, "serve", ...])` is the worker, a program for the fork server. Once FILE exists, every second
embedding is damaged: when it is made, MODE `after` or `before` its digests were, or in the registered memory that a
puller reads (`copy`). `before` is the control: nothing can find it. These are for an encode worker; in a prefill worker
`held` damages embeddings that it has just come to hold, pulled or of its own tower.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from baton.domain.ids import PageId
from baton.engine.media.exported_embedding import ExportedEmbedding
from baton.engine.media.settled_embedding import SettledEmbedding
from baton.services.cli import main
from baton.worker.media.embedding_pages import EmbeddingPages

PERIOD = 2


class RottingEmbeddings:
    """Replaces `ExportedEmbedding.settle`, `EmbeddingPages.fill` or `SettledEmbedding.of`."""

    def __init__(self, mode: str, trigger: Path) -> None:
        self._mode = mode
        self._trigger = trigger
        self._num_seen = 0
        self._settle, self._fill, self._of = ExportedEmbedding.settle, EmbeddingPages.fill, SettledEmbedding.of
        if mode == "held":
            setattr(SettledEmbedding, "of", self.of)  # noqa: B010
        elif mode == "copy":
            setattr(EmbeddingPages, "fill", lambda pages, *args: self.fill(pages, *args))  # noqa: B010
        else:
            setattr(ExportedEmbedding, "settle", self.settle)  # noqa: B010

    def settle(self, num_rows: int, data: bytearray) -> ExportedEmbedding:
        """Digests `data`, which changes before or behind that."""
        is_damaged = self._is_next()
        if is_damaged and self._mode == "before":
            _damage(data)
        made = self._settle(num_rows, data)
        if is_damaged and self._mode == "after":
            _damage(data)
        return made

    def fill(self, pages: EmbeddingPages, taken: list[PageId], data: bytes | bytearray) -> None:
        """Copies `data` into pages, of which bytes change."""
        changed = bytearray(data)
        if self._is_next():
            _damage(changed)
        self._fill(pages, taken, changed)

    def of(self, layers: torch.Tensor, digests: tuple[int, ...]) -> SettledEmbedding:
        """An embedding, which changes behind its digests."""
        made = self._of(layers, digests)
        if self._is_next():
            made.layers.neg_()
        return made

    def _is_next(self) -> bool:
        self._num_seen += self._trigger.exists()
        return self._trigger.exists() and self._num_seen % PERIOD == 1


def _damage(data: bytearray) -> None:
    """Changes the signs of half of the numbers, which are float32."""
    for at in range(3, len(data), 8):
        data[at] ^= 0x80


def run(words: Sequence[str]) -> int:
    """Runs `baton` with the words after MODE and FILE, in this process, and returns its exit code."""
    mode, trigger, *command = words
    RottingEmbeddings(mode, Path(trigger))
    return main.run(command)
