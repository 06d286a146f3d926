"""Places weights on huge pages and measures the share of their bytes that is on them.

A decode step reads every weight once. On 4 KiB pages the address translation of that read costs up to 40 % of a step.
Called when a model is loaded. Knows tensors, no layer.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterable, Sequence

import torch

from baton.domain.arithmetic import ceil_div
from baton.kv.memory import HUGE_PAGE_BYTES
from baton.model.smaps import measure_memory

MIN_BYTES = 1024 * 1024
"""Smaller tensors stay in the allocator's memory: rounding them up to huge pages would waste more than half."""

ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


def huge_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised host tensor in memory of its own, aligned to and advised for huge pages; small ones are plain.

    Rounds up by less than one huge page. The kernel may still use small pages: `huge_fraction` measures it.
    """
    num_elements = math.prod(shape)
    if num_elements * dtype.itemsize < MIN_BYTES or ADVICE is None:
        return torch.empty(shape, dtype=dtype)
    num_bytes = ceil_div(num_elements * dtype.itemsize, HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE_BYTES
    memory.madvise(ADVICE, start, num_bytes)
    return torch.frombuffer(memory, dtype=dtype, count=num_elements, offset=start).view(*shape)  # keeps the mapping


def to_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on huge pages; a small tensor or one on a device is returned as it is."""
    if not tensor.is_cpu or tensor.nbytes < MIN_BYTES:
        return tensor
    return huge_empty(tensor.shape, tensor.dtype).copy_(tensor)


def move_parameters(module: torch.nn.Module) -> None:
    """Moves a module's parameters to huge pages, one after another; shared ones stay shared."""
    for parameter in module.parameters():
        parameter.data = to_huge_pages(parameter.data)


def huge_fraction(tensors: Iterable[torch.Tensor]) -> float | None:
    """The measured share of the tensors' bytes on huge pages; None where the system does not tell."""
    memory = measure_memory(tensors)
    return None if memory is None else memory.huge_fraction
