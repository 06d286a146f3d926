"""Choosing tokens with the native kernels: a pass or two over a row's logits, and nothing sorted.

What `baton.model.sampler` calls instead of torch where the logits lie on the CPU. Same filters, same order of the draw,
same numbers up to rounding as `baton.model.distribution`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.domain.request import SamplingParams
from baton.model.distribution import MIN_TEMPERATURE
from baton.model.kernels.library import Kernels, takes


class NativeChooser:
    """A `Chooser` for float32 and bfloat16 logits [rows, vocab_size] on the CPU."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """Each row's; of equals the lowest id."""
        logits = _readable(logits)
        tokens = torch.empty(logits.shape[0], dtype=torch.int64)
        is_bfloat16 = logits.dtype is torch.bfloat16
        self._kernels.likeliest(is_bfloat16, logits.data_ptr(), *logits.shape, tokens.data_ptr())
        return tokens

    def drawn(self, logits: torch.Tensor, rows: Sequence[SamplingParams], uniforms: Sequence[float]) -> torch.Tensor:
        """One token a row, by its parameters and its number in [0, 1)."""
        logits = _readable(logits).float()
        tokens = torch.empty(len(rows), dtype=torch.int64)
        vocab_size = logits.shape[1]
        for index, (row, uniform) in enumerate(zip(rows, uniforms, strict=True)):
            self._kernels.draw(
                *(logits.data_ptr() + 4 * index * vocab_size, vocab_size, max(row.temperature, MIN_TEMPERATURE)),
                *(row.top_k, row.top_p, row.min_p, uniform, tokens.data_ptr() + 8 * index),
            )
        return tokens


def _readable(logits: torch.Tensor) -> torch.Tensor:
    if not logits.is_cpu or logits.dim() != 2:
        raise ValueError(f"kernels choose from [rows, vocab_size] on the CPU, not {tuple(logits.shape)}")
    return (logits if takes(logits.dtype) else logits.float()).contiguous()
