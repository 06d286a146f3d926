"""Sampling with the native kernels: one or two passes over a row's logits, no sorting.

Used where the logits are on the CPU. Filters are those of `baton.model.sampling.distribution`, noise that of
`baton.model.sampling.gumbel`; results are equal up to rounding.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import torch

from baton.domain.request import SamplingParams
from baton.grammar.matcher import MaskRow
from baton.grammar.tokenizer import WORD_BITS
from baton.model.kernels.library import Kernels, supports_dtype
from baton.model.sampling.distribution import MIN_TEMPERATURE, mask_logits


class NativeSampler:
    """A `SamplerBackend` for float32 and bfloat16 logits [rows, vocab_size] on the CPU."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Argmax of each row; ties go to the lowest token id."""
        logits = _readable(logits)
        tokens = torch.empty(logits.shape[0], dtype=torch.int64)
        is_bfloat16 = logits.dtype is torch.bfloat16
        self._kernels.argmax(is_bfloat16, logits.data_ptr(), *logits.shape, tokens.data_ptr())
        return tokens

    def read_argmax(self, logits: torch.Tensor) -> Sequence[int]:
        """`argmax`, as numbers."""
        logits = _readable(logits)
        num_rows, vocab_size = logits.shape
        tokens = array("q", [0]) * num_rows
        is_bfloat16 = logits.dtype is torch.bfloat16
        self._kernels.argmax(is_bfloat16, logits.data_ptr(), num_rows, vocab_size, tokens.buffer_info()[0])
        return tokens

    def mask(self, logits: torch.Tensor, masks: Mapping[int, MaskRow]) -> None:
        """Sets the logits of tokens without a bit to minus infinity, in place, for the rows that `masks` names."""
        if not supports_dtype(logits.dtype) or not logits.is_contiguous():
            mask_logits(logits, masks)
            return
        if any(WORD_BITS * len(bits) < logits.shape[1] for bits in masks.values()):
            raise ValueError("a mask has no bit for every token")
        is_bfloat16, vocab_size = logits.dtype is torch.bfloat16, logits.shape[1]
        first, row_bytes = logits.data_ptr(), vocab_size * logits.element_size()
        for row, bits in masks.items():
            address = torch.from_numpy(bits).data_ptr()
            self._kernels.mask(is_bfloat16, first + row * row_bytes, vocab_size, address)

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingParams], keys: Sequence[int]) -> torch.Tensor:
        """One token a row, by its parameters and its `draw_key`."""
        logits = _readable(logits).float()
        tokens = torch.empty(len(rows), dtype=torch.int64)
        vocab_size = logits.shape[1]
        for index, (row, key) in enumerate(zip(rows, keys, strict=True)):
            self._kernels.sample(
                *(logits.data_ptr() + 4 * index * vocab_size, vocab_size, max(row.temperature, MIN_TEMPERATURE)),
                *(row.top_k, row.top_p, row.min_p, key, tokens.data_ptr() + 8 * index),
            )
        return tokens


def _readable(logits: torch.Tensor) -> torch.Tensor:
    if not logits.is_cpu or logits.dim() != 2:
        raise ValueError(f"kernels sample from [rows, vocab_size] on the CPU, not {tuple(logits.shape)}")
    logits = logits if supports_dtype(logits.dtype) else logits.float()
    return logits if logits.is_contiguous() else logits.contiguous()
