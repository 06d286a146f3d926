"""This CPU's arithmetic, and the number of compute threads of this process."""

from __future__ import annotations

import torch


def has_bfloat16_arithmetic() -> bool:
    """True if this CPU multiplies bfloat16 matrices natively (AVX512 or AVX-NE-CONVERT) rather than in emulation."""
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def configure_threads(num_threads: int) -> None:
    """Sets torch's compute threads. Two workers that share cores lose more than half of their speed."""
    torch.set_num_threads(num_threads)
