"""Sampled tokens between steps and on their way to the host, without waiting for the device. Used by the runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.domain.errors import Broken
from baton.domain.request import SampledToken
from baton.engine.batch import Batch, Row
from baton.model.to_device import int64_tensor


@dataclass(frozen=True, slots=True)
class SentTokens:
    """Tokens [samples] that are copied to pinned host memory, and an event behind the copy and the step."""

    tokens: torch.Tensor
    sent: torch.cuda.Event

    @classmethod
    def of(cls, tokens: torch.Tensor) -> SentTokens:
        """Starts the copy of `tokens` [samples], int64, on the current stream of a CUDA device."""
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        sent = torch.cuda.Event()
        sent.record()
        return cls(host, sent)

    def read(self) -> tuple[SampledToken, ...]:
        """Waits for the step, not for steps behind it. The pages that it has written are final then."""
        self.sent.synchronize()
        return tuple([SampledToken(token) for token in self.tokens.tolist()])


def fill_futures(ids: torch.Tensor, rows: Sequence[Row], before: tuple[Batch, torch.Tensor] | None) -> None:
    """Puts the tokens that `rows` wait for into `ids` [tokens of the step], on their device.

    `before`: the batch of the step before and its samples, [samples]. Raises `Broken` if a row there samples none, or
    several.
    """
    batch, sampled = (None, None) if before is None else before
    first, sample_at = 0, dict[int, int]()
    for index, row in enumerate(() if batch is None else batch.rows):
        if row.sample is not None:
            if not row.drafted:
                sample_at[index] = first
            first += 1 + len(row.drafted)
    places, sources, at = list[int](), list[int](), 0
    for row in rows:
        if row.future is not None:
            if batch is None or row.future.row not in sample_at or batch.rows[row.future.row].id != row.id:
                raise Broken(f"{row.id}: row {row.future.row} of the step before does not sample its token")
            places.append(at)
            sources.append(sample_at[row.future.row])
        at += len(row.tokens)
    if sampled is not None:
        ids[int64_tensor(places, ids.device)] = sampled[int64_tensor(sources, ids.device)]
