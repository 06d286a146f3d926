"""Scores prompt tokens from the model's logits: log probability, rank and best tokens. Called by the runner.

Logits of a whole chunk would not fit: 512 rows of 151,936 tokens are 311 MB. So the decoder applies the output head to
a few rows at a time, and `add` keeps only their scores. Works on the logits' device; `read` waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from baton.domain.scores.prompt_scores import PromptScores
from baton.model.to_device import int64_tensor

SCORE_ROWS = {"cpu": 64, "cuda": 256}
"""Rows of logits at a time, by device."""


class TokensToScore(Protocol):
    """The fields that the scorer reads; implemented by `baton.engine.batch.ScoreSpec`."""

    @property
    def k(self) -> int: ...

    @property
    def targets(self) -> Sequence[int]: ...


class PromptScorer:
    """Scores the prompt tokens of one step. `places`: indices of the flat tokens whose logits it needs, in order."""

    def __init__(self, device: torch.device) -> None:
        self.max_rows = SCORE_ROWS.get(device.type, SCORE_ROWS["cuda"])
        self._device = device
        self._places: list[int] = []
        self._targets: list[int] = []
        self._rows: list[tuple[int, int, int, int]] = []  # index in the batch, first position, tokens, k
        self._parts: list[tuple[torch.Tensor, ...]] = []  # logprobs, ranks, best tokens, their logprobs
        self._num_added = 0
        self._scored = int64_tensor([], device)

    def __len__(self) -> int:
        return len(self._places)

    def add_row(self, index: int, flat_start: int, start: int, wanted: TokensToScore) -> None:
        """Adds the row `index` of the batch, whose tokens begin at `flat_start` and have positions from `start` on."""
        num_tokens = len(wanted.targets)
        self._places += range(flat_start, flat_start + num_tokens)
        self._targets += wanted.targets
        self._rows.append((index, start + 1, num_tokens, wanted.k))

    @property
    def places(self) -> torch.Tensor:
        return int64_tensor(self._places, self._device)

    def add(self, logits: torch.Tensor) -> None:
        """Scores the next rows of logits [rows, vocab_size], at most `max_rows` of them."""
        if not self._num_added:
            self._scored = int64_tensor(self._targets, self._device)
        targets = self._scored[self._num_added : self._num_added + len(logits), None]
        self._num_added += len(logits)
        table = logits.float().log_softmax(-1)
        chosen = table.gather(-1, targets)
        best = table.topk(min(max(k for _, _, _, k in self._rows), table.shape[-1]), dim=-1)
        ranks = (table >= chosen).sum(-1, dtype=torch.int32)
        self._parts.append((chosen[:, 0], ranks, best.indices.to(torch.int32), best.values))

    def read(self) -> dict[int, PromptScores]:
        """The scores by row of the batch. Waits for the device."""
        if not self._parts:
            return {}
        columns = [torch.cat(column).cpu().numpy() for column in zip(*self._parts, strict=True)]
        scores, at = {}, 0
        for index, first, num_tokens, wanted in self._rows:
            rows, at = slice(at, at + num_tokens), at + num_tokens
            k = min(wanted, columns[2].shape[1])
            logprobs, ranks, ids, values = (
                columns[0][rows],
                columns[1][rows],
                columns[2][rows, :k],
                columns[3][rows, :k],
            )
            packed = (logprobs.astype("<f4"), ranks.astype("<u4"), ids.astype("<u4"), values.astype("<f4"))
            scores[index] = PromptScores(first, k, *(column.tobytes() for column in packed))
        return scores
